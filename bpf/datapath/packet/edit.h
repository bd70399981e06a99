// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Changes to the TCP header beyond the ports, made after all other changes to a packet.
#ifndef SLUICE_EDIT_H
#define SLUICE_EDIT_H

#include "packet/xlat.h"

#define TCP_OPTIONS_MAX 40
#define TCP_OPTION_MSS 2
#define TCP_OPTION_MSS_SIZE 4

// Returns the offset of the transport header after translation to the plan's family.
static __always_inline __u32 l4_then(const struct packet *p, const struct plan *plan)
{
	return ETH_HLEN + header_then(p, plan);
}

// Returns the change of a segment's sum by a 16-bit word. At an odd offset, the bytes of the word
// are swapped (RFC 1071 §2 (B)).
static __always_inline __u64 change_at(__u32 place, __be16 was, __be16 is)
{
	__u16 delta = fold16(change(was, is));

	return place & 1 ? __builtin_bswap16(delta) : delta;
}

struct gue_header {
	struct udphdr udp;
	__u8 hlen; // version 0, no control, no options
	__u8 proto;
	__be16 flags;
};

static __always_inline __u32 encap_size(const struct plan *plan)
{
	if (plan->encap == ENCAP_NONE)
		return 0;
	return (plan->gateway_family == FAMILY_6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       (plan->encap == ENCAP_GUE ? sizeof(struct gue_header) : 0);
}

// Returns the largest segment that fits the MTU without options (RFC 9293 §3.7.1).
static __always_inline __u32 mss_of(const struct plan *plan)
{
	__u32 mtu = plan->mtu, headers = sizeof(struct tcphdr) + encap_size(plan);

	headers += plan->family == FAMILY_6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	return mtu > headers ? mtu - headers : 0;
}

// Iterator over the options of the TCP header at off, which is end bytes long.
struct tcp_options {
	__u32 off;
	__u32 at; // offset of the next TCP option
	__u32 end;
	__u32 found; // the option at "at" is the MSS
};

// Examines the next option. Nonzero: it was the last one, or the MSS.
static __always_inline int next_tcp_option(void *ctx, struct tcp_options *o, const bool xdp)
{
	__u32 at = o->at;
	__u8 option[2];

	if (at + 2 > o->end || !get(ctx, o->off + at, option, sizeof(option), xdp) || option[0] == OPTION_END)
		return 1;
	if (option[0] == OPTION_NOP) {
		o->at = at + 1;
		return 0;
	}
	o->found = option[0] == TCP_OPTION_MSS && option[1] == TCP_OPTION_MSS_SIZE;
	if (o->found || option[1] < 2 || at + option[1] > o->end)
		return 1;
	o->at = at + option[1];
	return 0;
}

BOTH_HOOKS(int, next_tcp_option, !o || next_tcp_option(ctx, o, xdp), struct tcp_options *o)

// Lowers the MSS option of the TCP header at off to at most "most". stop: end of the packet in the
// frame. Bytes after it are not read, even if the header length includes them.
static __always_inline enum reason clamp_mss(void *ctx, __u32 off, __u32 stop, __u32 most, const bool xdp)
{
	struct tcp_options o = { .off = off, .at = sizeof(struct tcphdr) };
	__be16 mss, lower;
	__u8 length;
	__u32 at;

	if (!get(ctx, off + 12, &length, 1, xdp))
		return REASON_INTERNAL;
	o.end = (length >> 4) * 4;
	if (off + o.end > stop)
		o.end = stop - off;
	for (int i = 0; i < TCP_OPTIONS_MAX; i++)
		if (BY_HOOK(next_tcp_option, ctx, &o))
			break;
	if (!o.found)
		return REASON_NONE;
	at = o.at + 2;
	if (at + 2 > o.end || !get(ctx, off + at, &mss, 2, xdp) || bpf_ntohs(mss) <= most)
		return REASON_NONE;
	lower = bpf_htons(most);
	if (xdp ? !put(ctx, off + at, &lower, 2, true) : !!bpf_skb_store_bytes(ctx, off + at, &lower, 2, 0))
		return REASON_INTERNAL;
	return fix_check(ctx, off, IPPROTO_TCP, 0, change_at(at, mss, lower), xdp) ? REASON_NONE : REASON_INTERNAL;
}

BOTH_HOOKS(enum reason, clamp_mss, clamp_mss(ctx, off, stop, most, xdp), __u32 off, __u32 stop, __u32 most)

// ---- lengths ----

// Adds len to the packet length in the network header.
static __always_inline bool grow_header(void *ctx, __u32 len, const bool v6, const bool xdp)
{
	struct iphdr ip;
	__be16 was, is;

	if (v6) {
		const __u32 at = ETH_HLEN + __builtin_offsetof(struct ipv6hdr, payload_len);

		if (!get(ctx, at, &was, 2, xdp))
			return false;
		is = bpf_htons(bpf_ntohs(was) + len);
		return put(ctx, at, &is, 2, xdp);
	}
	if (!get(ctx, ETH_HLEN, &ip, sizeof(ip), xdp))
		return false;
	was = ip.tot_len;
	ip.tot_len = bpf_htons(bpf_ntohs(was) + len);
	ip.check = check_after(ip.check, change(was, ip.tot_len));
	return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp);
}

#define MOVE_MOST (SUM_MOST + 31) // length in bytes

// Copy of n bytes at "at" to an offset higher by len, starting with the last byte.
struct move_up {
	struct __sk_buff *ctx;
	__u32 at;
	__u32 n; // remaining bytes
	__u32 len;
	__u32 failed;
};

static __always_inline bool copy_up(const struct move_up *m, const __u32 bytes)
{
	__u32 block[8], from = m->at + m->n - bytes;

	return get(m->ctx, from, block, bytes, false) && put(m->ctx, from + m->len, block, bytes, false);
}

// Copies the next block. Nonzero: the copy is complete or has failed.
static long move_up_next(__u32 i __attribute__((unused)), struct move_up *m)
{
	if (!m->n)
		return 1;
	if (m->n >= 32) {
		m->failed = !copy_up(m, 32);
		m->n -= 32;
	} else if (m->n >= 4) {
		m->failed = !copy_up(m, 4);
		m->n -= 4;
	} else {
		m->failed = !copy_up(m, 1);
		m->n--;
	}
	return m->failed;
}

static __always_inline bool move_up(struct __sk_buff *ctx, __u32 at, __u32 n, __u32 len)
{
	struct move_up m = { .ctx = ctx, .at = at, .n = n, .len = len };

	if (n > MOVE_MOST)
		return false;
	bpf_loop(MOVE_MOST / 32 + 7 + 3, move_up_next, &m, 0); // blocks of 32 bytes, of 4, and of one
	return !m.n && !m.failed;
}

// Copies n bytes of headers from the offset "from" to the start of the frame.
static __always_inline bool move_down(void *ctx, __u32 from, __u32 n)
{
	__u32 block[8], at = 0;

	for (int i = 0; i < 8 && at + sizeof(block) <= n; i++) {
		if (!get(ctx, from + at, block, sizeof(block), true) || !put(ctx, at, block, sizeof(block), true))
			return false;
		at += sizeof(block);
	}
	for (int i = 0; i < 16 && at + 2 <= n; i++) { // all headers have an even length
		if (!get(ctx, from + at, block, 2, true) || !put(ctx, at, block, 2, true))
			return false;
		at += 2;
	}
	return at == n;
}

// Inserts len bytes at the offset "at" of a packet that ends at "end". On XDP, the headers move
// down, because drivers guarantee headroom but little tailroom. On TC, the tail moves up. A
// transport header with a partial checksum (CHECKSUM_PARTIAL) must keep its offset, by which the
// kernel locates the checksum.
static __always_inline bool open_gap(void *ctx, __u32 at, __u32 end, __u32 len, const bool xdp)
{
	__u32 frame;

	if (at > end)
		return false;
	if (xdp)
		return !bpf_xdp_adjust_head(ctx, -(int)len) && move_down(ctx, len, at);
	frame = ((struct __sk_buff *)ctx)->len; // includes bytes after the IP packet
	return !bpf_skb_change_tail(ctx, frame + len, 0) && move_up(ctx, at, frame - at, len);
}

BOTH_HOOKS(int, open_gap, open_gap(ctx, at, end, len, xdp), __u32 at, __u32 end, __u32 len)

static __always_inline __u64 sum_words(const __u32 *word, __u32 n)
{
	__u64 sum = 0;

	for (__u32 i = 0; i < 13 && i < n; i++)
		sum += word[i];
	return sum;
}

// Returns the offset of the end of the packet in the frame, after translation to the plan's family.
static __always_inline __u32 end_then(const struct packet *p, const struct plan *plan)
{
	return ETH_HLEN + p->l3_len - header_now(p) + header_then(p, plan);
}

static __always_inline bool widen(void *ctx, __u32 at, __u32 end, __u32 len, const bool v6, const bool xdp)
{
	return BY_HOOK(open_gap, ctx, at, end, len) &&
	       grow_header(ctx, len, v6, xdp);
}

// Stores bytes that the transport checksum covers, without a change to skb->csum. fix_check later
// updates the transport checksum, which compensates for the bytes.
static __always_inline bool put_covered(void *ctx, __u32 off, const void *from, const __u32 len, const bool xdp)
{
	return xdp ? put(ctx, off, from, len, true) : !bpf_skb_store_bytes(ctx, off, from, len, 0);
}

static __always_inline bool after(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

#endif
