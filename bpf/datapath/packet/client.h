// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The client's address for the backends of fullnat services: a TCP option (TOA),
// or a PROXY protocol header (version 2, section 2.2 of its specification).
//
// The PROXY header is payload that the client never sent. It is added to the packet that completes
// the handshake, so that a server that sends first has received it. Afterwards, the sequence
// numbers towards the backend are higher by the size of the header. Acknowledgements of the backend
// are lowered by it. If the header is lost, the backend keeps requesting its first byte. The client
// then retransmits its own first byte, and the header is added before it again.
#ifndef SLUICE_CLIENT_H
#define SLUICE_CLIENT_H

#include "packet/splice.h"

#define TCP_OPTION_SACK 5
#define TCP_OPTION_TOA 254 // RFC 6994, experimental; the format of the toa modules of IPVS and DPVS
#define TOA4_SIZE 8
#define TOA6_SIZE 20

struct toa {
	__u8 kind;
	__u8 size;
	__be16 port;
	__be32 addr[4];
};

#define PROXY4_SIZE 28
#define PROXY6_SIZE 52

struct proxy_header {
	__u8 start[14]; // signature, version 2 and command PROXY, family and TCP
	__be16 len;	// length of the addresses and ports
	__be32 ends[9]; // source, destination, ports
};

static __always_inline __u32 toa_size(__u8 family)
{
	return family == FAMILY_6 ? TOA6_SIZE : TOA4_SIZE;
}

static __always_inline __u32 proxy_size(__u8 family)
{
	return family == FAMILY_6 ? PROXY6_SIZE : PROXY4_SIZE;
}

// Returns the number of bytes that edits may add to a packet. Every segment from the client counts,
// so that the segment with the header fits into the MTU.
static __always_inline __u32 edit_growth(const struct packet *p, const struct plan *plan)
{
	return plan->edits & EDIT_PROXY ? proxy_size(p->family) : 0;
}

static __always_inline __u64 proxy_fill(struct proxy_header *h, const struct tuple *t, const bool v6)
{
	static const __u8 start[14] = { '\r', '\n', '\r', '\n', 0, '\r', '\n', 'Q', 'U', 'I', 'T', '\n', 0x21, 0x11 };

	__builtin_memcpy(h->start, start, sizeof(start));
	if (v6) {
		h->start[13] = 0x21;
		h->len = bpf_htons(PROXY6_SIZE - 16);
		__builtin_memcpy(h->ends, &t->saddr, 16);
		__builtin_memcpy(h->ends + 4, &t->daddr, 16);
		h->ends[8] = (__u32)t->sport | (__u32)t->dport << 16;
		return sum_words((__u32 *)h, PROXY6_SIZE / 4);
	}
	h->len = bpf_htons(PROXY4_SIZE - 16);
	h->ends[0] = t->saddr.w[0];
	h->ends[1] = t->daddr.w[0];
	h->ends[2] = (__u32)t->sport | (__u32)t->dport << 16;
	return sum_words((__u32 *)h, PROXY4_SIZE / 4);
}

static __always_inline enum reason add_toa(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	__u32 off = l4_then(p, plan), end = end_then(p, plan), len = toa_size(p->family);
	struct toa toa = { .kind = TCP_OPTION_TOA, .size = len, .port = p->tuple.sport };
	__be16 was, is;
	__u64 sum;

	if (p->tcp_flags & (TCP_SYN | TCP_RST) || !(p->tcp_flags & TCP_ACK) || !single(p) ||
	    end - ETH_HLEN + len > plan->mtu)
		return REASON_NONE;
	if (!get(ctx, off + 12, &was, 2, xdp))
		return REASON_INTERNAL;
	if ((bpf_ntohs(was) >> 12) * 4 + len > sizeof(struct tcphdr) + TCP_OPTIONS_MAX)
		return REASON_NONE;
	is = bpf_htons(bpf_ntohs(was) + (len / 4 << 12));
	__builtin_memcpy(toa.addr, &p->tuple.saddr, sizeof(toa.addr));
	if (!widen(ctx, off + sizeof(struct tcphdr), end, len, plan->family == FAMILY_6, xdp))
		return REASON_INTERNAL;
	sum = sum_words((__u32 *)&toa, len / 4) + change(was, is);
	if (!put_covered(ctx, off + 12, &is, 2, xdp) ||
	    !(p->family == FAMILY_6 ? put_covered(ctx, off + sizeof(struct tcphdr), &toa, TOA6_SIZE, xdp) :
				      put_covered(ctx, off + sizeof(struct tcphdr), &toa, TOA4_SIZE, xdp)))
		return REASON_INTERNAL;
	return fix_check(ctx, off, IPPROTO_TCP, bpf_htons(len), sum, xdp) ? REASON_NONE : REASON_INTERNAL;
}

static __always_inline enum reason add_proxy(void *ctx, const struct packet *p, const struct plan *plan, __u32 off,
					     __u32 doff, const bool xdp)
{
	__u32 len = proxy_size(p->family), at = off + doff;
	struct proxy_header h = {};
	__u64 sum = p->family == FAMILY_6 ? proxy_fill(&h, &p->tuple, true) : proxy_fill(&h, &p->tuple, false);

	if (!single(p)) // the client will retransmit it in single segments
		return REASON_UNTRANSLATABLE;
	if (doff < sizeof(struct tcphdr) || at > end_then(p, plan)) // the TCP header is invalid
		return REASON_BAD_HEADER;
	if (!widen(ctx, at, end_then(p, plan), len, plan->family == FAMILY_6, xdp))
		return REASON_INTERNAL;
	if (!(p->family == FAMILY_6 ? put_covered(ctx, at, &h, PROXY6_SIZE, xdp) :
				      put_covered(ctx, at, &h, PROXY4_SIZE, xdp)))
		return REASON_INTERNAL;
	return fix_check(ctx, off, IPPROTO_TCP, bpf_htons(len), sum, xdp) ? REASON_NONE : REASON_INTERNAL;
}

// Removes the data of a SYN (TCP Fast Open, RFC 7413), which the backend would read before the PROXY header. The
// client sends it again, because the SYN-ACK does not acknowledge it.
static __always_inline enum reason cut_data(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	__u32 off = l4_then(p, plan), at, end = end_then(p, plan), len;
	__u8 doff;

	if (!single(p))
		return REASON_UNTRANSLATABLE;
	if (!get(ctx, off + 12, &doff, 1, xdp))
		return REASON_INTERNAL;
	at = off + (doff >> 4) * 4;
	if (at < off + sizeof(struct tcphdr) || at >= end)
		return REASON_NONE;
	len = end - at;
	if (!fix_check(ctx, off, IPPROTO_TCP, minus(bpf_htons(len)), minus(sum_of(ctx, at, len, xdp)), xdp) ||
	    !grow_header(ctx, -len, plan->family == FAMILY_6, xdp))
		return REASON_INTERNAL;
	end += p->frame_len - (ETH_HLEN + p->l3_len); // padding included
	if (xdp)
		return bpf_xdp_adjust_tail(ctx, (int)at - (int)end) ? REASON_INTERNAL : REASON_NONE;
	return bpf_skb_change_tail(ctx, at, 0) ? REASON_INTERNAL : REASON_NONE;
}

BOTH_HOOKS(enum reason, cut_data, !p || !plan ? REASON_INTERNAL : cut_data(ctx, p, plan, xdp), const struct packet *p,
	   const struct plan *plan)

// Edits a packet from the client to the backend.
static __always_inline enum reason proxy_forward(void *ctx, const struct packet *p, const struct plan *plan,
						 const bool xdp)
{
	__u32 off = l4_then(p, plan), key = plan->record, seq;
	struct adjust *a, fresh = {};
	struct tcphdr tcp;
	__be32 is;
	enum reason done;

	if (!get(ctx, off, &tcp, sizeof(tcp), xdp))
		return REASON_INTERNAL;
	seq = bpf_ntohl(tcp.seq);
	if (tcp.syn) {
		fresh.base = seq + 1;
		return bpf_map_update_elem(&adjusts, &key, &fresh, BPF_ANY) ? REASON_TABLE_FULL : REASON_NONE;
	}
	a = bpf_map_lookup_elem(&adjusts, &key);
	if (!a)
		return REASON_NONE;
	if (seq == a->base && !tcp.rst && (a->flags & (ADJUST_SENT | ADJUST_LOST)) != ADJUST_SENT) {
		done = add_proxy(ctx, p, plan, off, tcp.doff * 4, xdp);
		if (done == REASON_NONE)
			a->flags = ADJUST_SENT;
		return done;
	}
	if (!after(seq, a->base) && !(seq == a->base && a->flags & ADJUST_SENT))
		return REASON_NONE;
	is = bpf_htonl(seq + proxy_size(p->family));
	if (!put_covered(ctx, off + 4, &is, 4, xdp))
		return REASON_INTERNAL;
	return fix_check(ctx, off, IPPROTO_TCP, 0, change(tcp.seq, is), xdp) ? REASON_NONE : REASON_INTERNAL;
}

// Converts an acknowledgement of the backend to the client's sequence numbers.
static __always_inline __u32 without_proxy(__u32 ack, __u32 base, __u32 len)
{
	if (!after(ack, base))
		return ack;
	return after(ack, base + len) ? ack - len : base;
}

// Conversion of selective acknowledgements (RFC 2018) to the client's sequence numbers. It iterates
// over the options of the TCP header at off, which is end bytes long.
struct sacks {
	__u64 delta; // change of the checksum
	__u32 off;
	__u32 at; // offset of the next option, or of the next block edge
	__u32 end;
	__u32 edges; // remaining block edges of the option
	__u32 base;  // see struct adjust
	__u32 len;   // size of the PROXY header
	__u32 failed;
};

// Handles the next option or the next block edge. Nonzero: it was the last one.
static __always_inline int next_sack(void *ctx, struct sacks *s, const bool xdp)
{
	__u32 at = s->at;
	__u8 option[2];
	__be32 was, is;

	if (s->edges) {
		s->failed = !load(ctx, s->off + at, &was, 4, xdp);
		if (s->failed)
			return 1;
		is = bpf_htonl(without_proxy(bpf_ntohl(was), s->base, s->len));
		if (is != was)
			s->failed = xdp ? !!bpf_xdp_store_bytes(ctx, s->off + at, &is, 4) :
					  !put_covered(ctx, s->off + at, &is, 4, false);
		s->delta += at & 1 ? __builtin_bswap16(fold16(change(was, is))) : change(was, is);
		s->at = at + 4;
		s->edges--;
		return s->failed;
	}
	if (at + 2 > s->end || !load(ctx, s->off + at, option, sizeof(option), xdp) || option[0] == OPTION_END)
		return 1;
	if (option[0] == OPTION_NOP) {
		s->at = at + 1;
		return 0;
	}
	if (option[1] < 2 || at + option[1] > s->end)
		return 1;
	if (option[0] == TCP_OPTION_SACK)
		s->edges = (option[1] - 2) / 4;
	s->at = at + (option[0] == TCP_OPTION_SACK ? 2 : option[1]);
	return 0;
}

BOTH_HOOKS(int, next_sack, !s || next_sack(ctx, s, xdp), struct sacks *s)

// Edits a packet from the backend to the client. plan->family is the family of the client.
static __always_inline enum reason proxy_answer(void *ctx, const struct packet *p, const struct plan *plan,
						const bool xdp)
{
	__u32 off = l4_then(p, plan), key = plan->record, len = proxy_size(plan->family), stop = end_then(p, plan), ack;
	struct sacks s = {};
	struct tcphdr tcp;
	struct adjust *a;
	__be32 is;

	a = bpf_map_lookup_elem(&adjusts, &key);
	if (!a)
		return REASON_NONE;
	if (!get(ctx, off, &tcp, sizeof(tcp), xdp))
		return REASON_INTERNAL;
	if (!tcp.ack)
		return REASON_NONE;
	ack = bpf_ntohl(tcp.ack_seq);
	if (!tcp.syn && ack == a->base && a->flags & ADJUST_SENT)
		a->flags |= ADJUST_LOST;
	else if (after(ack, a->base))
		a->flags = ADJUST_SENT;
	is = bpf_htonl(without_proxy(ack, a->base, len));
	s.delta = change(tcp.ack_seq, is);
	if (is != tcp.ack_seq && !put_covered(ctx, off + 8, &is, 4, xdp))
		return REASON_INTERNAL;
	if (tcp.doff > 5) {
		s.off = off;
		s.at = sizeof(tcp);
		s.end = off + tcp.doff * 4 < stop ? tcp.doff * 4 : stop - off;
		s.base = a->base;
		s.len = len;
		for (int i = 0; i < TCP_OPTIONS_MAX; i++)
			if (BY_HOOK(next_sack, ctx, &s))
				break;
	}
	return !s.failed && fix_check(ctx, off, IPPROTO_TCP, 0, s.delta, xdp) ? REASON_NONE : REASON_INTERNAL;
}

BOTH_HOOKS(enum reason, add_toa, !p || !plan ? REASON_INTERNAL : add_toa(ctx, p, plan, xdp), const struct packet *p,
	   const struct plan *plan)

BOTH_HOOKS(enum reason, proxy_forward, !p || !plan ? REASON_INTERNAL : proxy_forward(ctx, p, plan, xdp),
	   const struct packet *p, const struct plan *plan)

BOTH_HOOKS(enum reason, proxy_answer, !p || !plan ? REASON_INTERNAL : proxy_answer(ctx, p, plan, xdp),
	   const struct packet *p, const struct plan *plan)

// Returns the MSS for a client: its segments will grow by the PROXY header or the option, and leave
// by the interface on which the backend's packets arrive.
static __always_inline __u32 mss_room(const struct packet *p, const struct plan *plan)
{
	__u32 ifindex = p->ifindex, less;
	struct interface_addr *in = bpf_map_lookup_elem(&interfaces, &ifindex);

	less = sizeof(struct tcphdr) + (p->family == FAMILY_6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       (plan->edits & EDIT_ANSWER ? proxy_size(plan->family) : toa_size(plan->family));
	return in && in->mtu > less ? in->mtu - less : 0xffff;
}

// Applies all edits of a packet.
static __always_inline enum reason edit(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	enum reason done = REASON_NONE;

	if (plan->edits & EDIT_MSS)
		done = BY_HOOK(clamp_mss, ctx, l4_then(p, plan), end_then(p, plan), mss_of(plan));
	if (done == REASON_NONE && plan->edits & EDIT_ROOM)
		done = BY_HOOK(clamp_mss, ctx, l4_then(p, plan), end_then(p, plan), mss_room(p, plan));
	if (done == REASON_NONE && plan->edits & EDIT_TOA)
		done = BY_HOOK(add_toa, ctx, p, plan);
	if (done == REASON_NONE && plan->edits & EDIT_PROXY)
		done = BY_HOOK(proxy_forward, ctx, p, plan);
	if (done == REASON_NONE && plan->edits & EDIT_PROXY && p->tcp_flags & TCP_SYN)
		done = BY_HOOK(cut_data, ctx, p, plan);
	if (done == REASON_NONE && plan->edits & EDIT_ANSWER)
		done = BY_HOOK(proxy_answer, ctx, p, plan);
	if (done == REASON_NONE && have_cookies && plan->edits & EDIT_SPLICE)
		done = BY_HOOK(splice_forward, ctx, p, plan);
	if (done == REASON_NONE && have_cookies && plan->edits & EDIT_SPLICED)
		done = BY_HOOK(splice_answer, ctx, p, plan);
	return done;
}

// Separate stack frames, so that spills of the edits do not add to the stack of the miss path.
BOTH_HOOKS(static enum reason, edit, edit(ctx, p, plan, xdp), const struct packet *p, const struct plan *plan)

#endif
