// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Translation between IPv4 and IPv6 (RFC 7915): replaces the header by one of the other family.
#ifndef SLUICE_XLAT_H
#define SLUICE_XLAT_H

#include "packet/rewrite.h"

#define SMALL_PACKET 1260    // RFC 7915 §5.1: larger packets get DF
#define LOWEST_IPV6_MTU 1280 // RFC 8200 §5

#define SUM_MOST 9216U
#define SUM_BLOCK 64U // bytes; divides SUM_MOST

// A sum in progress: the next bytes are at off, and len bytes are left.
struct summing {
	__u64 sum;
	__u32 off;
	__u32 len;
	__u32 failed;
};

static __always_inline __u64 sum_block(const __u32 *block)
{
	__u64 sum = 0;

	for (__u32 i = 0; i < SUM_BLOCK / sizeof(*block); i++)
		sum += block[i];
	return sum;
}

// Adds a block to the sum. Returns non-zero if no complete block is left. A global function,
// because the verifier checks it once. It would check a loop body at each iteration.
static __always_inline int next_sum(void *ctx, struct summing *s, const bool xdp)
{
	__u32 block[SUM_BLOCK / sizeof(__u32)];

	if (s->len < SUM_BLOCK)
		return 1;
	s->failed = !get(ctx, s->off, block, SUM_BLOCK, xdp);
	if (s->failed)
		return 1;
	s->sum += sum_block(block);
	s->off += SUM_BLOCK;
	s->len -= SUM_BLOCK;
	return 0;
}

BOTH_HOOKS(int, next_sum, !s || next_sum(ctx, s, xdp), struct summing *s)

// Returns the sum of len bytes of the frame from off onwards, at most SUM_MOST.
static __always_inline __u64 sum_frame(void *ctx, __u32 off, __u32 len, const bool xdp)
{
	struct summing s = { .off = off, .len = len };
	__u32 block[SUM_BLOCK / sizeof(__u32)] = {};

	for (__u32 i = 0; i < SUM_MOST / SUM_BLOCK; i++)
		if (BY_HOOK(next_sum, ctx, &s))
			break;
	len = s.len;
	if (len > 0 && len < SUM_BLOCK) {
		bounded(len);
		len = ((len - 1) & (SUM_BLOCK - 1)) + 1; // unchanged; Linux 6.1 loses track of both bounds otherwise
		if (!load(ctx, s.off, block, len, xdp))
			return 0;
		s.sum += sum_block(block);
	}
	return s.failed ? 0 : fold32(s.sum);
}

__noinline __u64 xdp_sum(struct xdp_md *ctx, __u32 off, __u32 len)
{
	return sum_frame(ctx, off, len, true);
}

__noinline __u64 tc_sum(struct __sk_buff *ctx, __u32 off, __u32 len)
{
	return sum_frame(ctx, off, len, false);
}

static __always_inline __u64 sum_of(void *ctx, __u32 off, __u32 len, const bool xdp)
{
	return BY_HOOK(sum, ctx, off, len);
}

static __always_inline __u64 sum_ends(const union addr *s, const union addr *d, const bool v6)
{
	return sum_addr(s, v6) + sum_addr(d, v6);
}

// Returns the length of all headers between network header and transport header before translation.
// header_then returns the length after it.
static __always_inline __u32 header_now(const struct packet *p)
{
	return p->l4_off - ETH_HLEN;
}

static __always_inline __u32 header_then(const struct packet *p, const struct plan *plan)
{
	if (plan->family == p->family)
		return header_now(p);
	if (plan->family == FAMILY_4)
		return sizeof(struct iphdr);
	if (p->flags & (PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT))
		return sizeof(struct ipv6hdr) + sizeof(struct fragment_header);
	return sizeof(struct ipv6hdr) + (p->l3_len - header_now(p) > 0xffff ? JUMBO_SIZE : 0);
}

// Returns the maximum size of a packet on a link with this MTU (RFC 7915 §4.1). IPv6 packets have
// DF.
static __always_inline __u32 largest(const struct packet *p, __u8 family, __u32 mtu)
{
	bool bounded6 = lowest_ipv6_mtu && family == FAMILY_6 && !(p->flags & PACKET_DF);

	return bounded6 && lowest_ipv6_mtu < mtu ? lowest_ipv6_mtu : mtu;
}

// Writes an IPv4 header. "id" is for packets without their own identification. The function
// assembles words in registers, because a load of freshly stored bytes as a word stalls the
// processor.
static __always_inline void header4(struct iphdr *ip, const struct packet *p, const struct plan *plan, __u32 payload,
				    __be16 id)
{
	__u32 len = sizeof(*ip) + payload, check;
	__u32 w[5] = {
		[0] = bpf_htonl(0x45U << 24 | (__u32)p->tos << 16 | (len > 0xffff ? 0 : len)),
		[2] = (__u8)(p->ttl - hops_down(plan)) | (__u32)plan->to.l4_proto << 8,
		[3] = plan->to.saddr.w[0],
		[4] = plan->to.daddr.w[0],
	};
	__u16 frag = 0;

	if (p->fragment_at) {	       // an atomic fragment (RFC 6946) keeps its identification too
		id = p->frag_id >> 16; // the low half of a big-endian word
		frag = p->frag_off / 8 | (p->flags & PACKET_MORE ? IP_MF : 0);
	} else if (len > SMALL_PACKET) {
		frag = IP_DF;
	}
	w[1] = id | (__u32)bpf_htons(frag) << 16;
	check = (__u16)~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	w[2] |= check << 16;
	copy(ip, w, sizeof(w));
}

static __always_inline void header6(struct ipv6hdr *ip, const struct packet *p, const struct plan *plan, __u32 payload)
{
	*(__u32 *)ip = bpf_htonl(6U << 28 | (__u32)p->tos << 20);
	ip->payload_len = stated_len(payload);
	ip->nexthdr = plan->to.l4_proto;
	ip->hop_limit = p->ttl - hops_down(plan);
	__builtin_memcpy(&ip->saddr, &plan->to.saddr, 16);
	__builtin_memcpy(&ip->daddr, &plan->to.daddr, 16);
}

// Changes the length of the network headers from "now" to "then" bytes and writes a new Ethernet
// header.
static __always_inline bool resize_header(void *ctx, __u32 now, __u32 then, const bool to_v6, const bool xdp)
{
	__be16 type = to_v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	__u8 macs[2 * ETH_ALEN];
	__u32 have;

	if (xdp) {
		if (!get(ctx, 0, macs, sizeof(macs), true) || bpf_xdp_adjust_head(ctx, (int)now - (int)then))
			return false;
		return put(ctx, 0, macs, sizeof(macs), true) && put(ctx, 2 * ETH_ALEN, &type, 2, true);
	}
	// Remove options and extension headers first. Then change the family, by 20 bytes. Then add
	// space for a fragment header.
	have = to_v6 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	if (now != have && bpf_skb_adjust_room(ctx, (int)have - (int)now, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	if (bpf_skb_change_proto(ctx, type, 0))
		return false;
	have = to_v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	if (then != have && bpf_skb_adjust_room(ctx, (int)then - (int)have, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	return !bpf_skb_store_bytes(ctx, 2 * ETH_ALEN, &type, 2, 0);
}

// Translates an ICMP query or reply: its type, and the pseudo-header in its checksum.
static __always_inline enum reason translate_query(void *ctx, const struct packet *p, const struct plan *plan,
						   __u32 payload, const bool to_v6, const bool xdp)
{
	struct icmp_header icmp;
	__u64 delta;
	__u16 was;

	if (!get(ctx, p->l4_off, &icmp, sizeof(icmp), xdp))
		return REASON_INTERNAL;
	was = *(__u16 *)&icmp;
	if (to_v6) {
		icmp.type = icmp.type == ICMP4_ECHO ? ICMP6_ECHO : ICMP6_ECHO_REPLY;
		delta = sum_ends(&plan->to.saddr, &plan->to.daddr, true) + bpf_htons(payload) +
			bpf_htons(IPPROTO_ICMPV6);
	} else {
		icmp.type = icmp.type == ICMP6_ECHO ? ICMP4_ECHO : ICMP4_ECHO_REPLY;
		delta = minus(sum_ends(&p->tuple.saddr, &p->tuple.daddr, true) + bpf_htons(payload) +
			      bpf_htons(IPPROTO_ICMPV6));
	}
	delta += change(was, *(__u16 *)&icmp) + change(icmp.id, plan->to.dport);
	icmp.id = plan->to.dport;
	icmp.check = check_after(icmp.check, delta);
	return put(ctx, p->l4_off, &icmp, sizeof(icmp), xdp) ? REASON_NONE : REASON_INTERNAL;
}

// Computes the UDP checksum that IPv6 requires (RFC 7915 §4.5). It covers the datagram, but not the
// bytes after it in the packet (RFC 9868 §5). It cannot be computed for a fragment, and is not
// computed for more than the largest usual frame.
static __always_inline enum reason udp_checksum(void *ctx, const struct packet *p, const struct plan *plan,
						const struct ports *ports, __u32 payload, const bool xdp)
{
	__u16 check;
	__be16 len;

	if (!get(ctx, p->l4_off + UDP_LENGTH, &len, 2, xdp))
		return REASON_INTERNAL;
	if (bpf_ntohs(len) < sizeof(struct udphdr) || bpf_ntohs(len) > payload)
		return REASON_UNTRANSLATABLE;
	payload = bpf_ntohs(len);
	if (p->flags & PACKET_FIRST_FRAGMENT || payload > SUM_MOST)
		return REASON_UNTRANSLATABLE;
	if (!put(ctx, p->l4_off, ports, sizeof(*ports), xdp))
		return REASON_INTERNAL;
	check = ~fold16(sum_of(ctx, p->l4_off, payload, xdp) + sum_ends(&plan->to.saddr, &plan->to.daddr, true) + len +
			bpf_htons(IPPROTO_UDP));
	if (!check)
		check = 0xffff;
	return put(ctx, p->l4_off + UDP_CHECK, &check, 2, xdp) ? REASON_NONE : REASON_INTERNAL;
}

// Translates ports and checksum of a segment for a change of family.
static __always_inline enum reason translate_l4(void *ctx, const struct packet *p, const struct plan *plan,
						__u32 payload, const bool to_v6, const bool xdp)
{
	struct ports ports = { plan->to.sport, plan->to.dport };
	__u64 pseudo, changed;
	__u16 check;

	if (is_icmp(p->tuple.l4_proto))
		return translate_query(ctx, p, plan, payload, to_v6, xdp);
	if (to_v6 && p->tuple.l4_proto == IPPROTO_UDP) {
		if (!get(ctx, p->l4_off + UDP_CHECK, &check, 2, xdp))
			return REASON_INTERNAL;
		if (!check && plan->choices & CHOICE_SUMMED)
			return REASON_UNTRANSLATABLE;
		if (!check)
			return udp_checksum(ctx, p, plan, &ports, payload, xdp);
	}
	if (!put_ports(ctx, p->l4_off, &ports, p->tuple.l4_proto, xdp))
		return REASON_INTERNAL;
	pseudo = minus(sum_ends(&p->tuple.saddr, &p->tuple.daddr, !to_v6)) +
		 sum_ends(&plan->to.saddr, &plan->to.daddr, to_v6);
	changed = change(p->tuple.sport, plan->to.sport) + change(p->tuple.dport, plan->to.dport);
	return fix_check(ctx, p->l4_off, p->tuple.l4_proto, pseudo, changed, xdp) ? REASON_NONE : REASON_INTERNAL;
}

#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_LSRR 131
#define OPTION_SSRR 137

// The state of a walk over the options of an IPv4 header of "header" bytes.
struct ip_options {
	__u32 header;
	__u32 at; // offset of the next option
	__u32 routed; // the header has a source route that is not used up
};

// Reads the next option. Returns non-zero after the last one, or at a source route.
static __always_inline int next_ip_option(void *ctx, struct ip_options *o, const bool xdp)
{
	__u32 at = o->at, step;
	__u8 option[3]; // type, length, pointer

	if (at + 3 > o->header || !get(ctx, ETH_HLEN + at, option, sizeof(option), xdp) || option[0] == OPTION_END)
		return 1;
	step = option[0] == OPTION_NOP ? 1 : option[1];
	if (option[0] != OPTION_NOP && (step < 2 || at + step > o->header))
		return 1;
	o->routed = (option[0] == OPTION_LSRR || option[0] == OPTION_SSRR) && step > 2 && option[2] <= step;
	o->at = at + step;
	return o->routed;
}

BOTH_HOOKS(int, next_ip_option, !o || next_ip_option(ctx, o, xdp), struct ip_options *o)

static __always_inline bool source_routed(void *ctx, __u32 header, const bool xdp)
{
	struct ip_options o = { .header = header, .at = sizeof(struct iphdr) };

	for (int i = 0; i < 40; i++)
		if (BY_HOOK(next_ip_option, ctx, &o))
			break;
	return o.routed;
}

BOTH_HOOKS(int, source_routed, source_routed(ctx, header, xdp), __u32 header)

// Reports whether a packet has a source route that is not used up. It has no counterpart in the
// other family (RFC 7915 §4.1, §5.1).
static __always_inline bool untranslatable_route(void *ctx, const struct packet *p, const bool to_v6, const bool xdp)
{
	__u32 header = header_now(p);

	if (!to_v6)
		return p->source_route;
	return header > sizeof(struct iphdr) && (BY_HOOK(source_routed, ctx, header));
}

// Reports whether extension headers follow the fragment header. The fragment offsets include them,
// but translation removes them (RFC 7915 §5.1.1).
static __always_inline bool extended_fragment(const struct packet *p)
{
	return p->fragment_at && is_extension(p->fragment_next);
}

// Requests an error to the sender of an untranslatable packet (RFC 7915 §4.4, §5.4).
static __always_inline enum reason not_translated(struct plan *plan)
{
	plan->answer = ANSWER_PROHIBITED;
	return REASON_UNTRANSLATABLE;
}

// Translates a whole packet into the other family.
static __always_inline enum reason translate(void *ctx, const struct packet *p, struct plan *plan, const bool to_v6,
					     const bool xdp)
{
	__u32 now = header_now(p), then = header_then(p, plan), payload = p->l3_len - now;
	enum reason reason;

	if (p->l3_len < now)
		return REASON_TRUNCATED;
	if (untranslatable_route(ctx, p, to_v6, xdp)) {
		plan->answer = ANSWER_SOURCE_ROUTE;
		plan->mtu = p->source_route;
		return REASON_UNTRANSLATABLE;
	}
	// Fragmented ICMP has an unknown length, and therefore an unknown checksum (RFC 7915 §1.2).
	if (is_icmp(plan->to.l4_proto) && p->flags & (PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT))
		return not_translated(plan);
	if (extended_fragment(p))
		return not_translated(plan);
	if (!(plan->flags & PLAN_NO_L4)) {
		reason = translate_l4(ctx, p, plan, payload, to_v6, xdp);
		if (reason == REASON_UNTRANSLATABLE)
			return not_translated(plan);
		if (reason != REASON_NONE)
			return reason;
	}
	if (!resize_header(ctx, now, then, to_v6, xdp))
		return REASON_INTERNAL;
	if (to_v6) {
		struct ipv6hdr ip;
		struct fragment_header f = {};

		header6(&ip, p, plan, payload + then - sizeof(ip));
		if (payload > 0xffff) { // without the option, the kernel reads the length as 0
			__u8 jumbo[JUMBO_SIZE] = { ip.nexthdr, 0, OPTION_JUMBO, 4 };
			__be32 len = bpf_htonl(payload + JUMBO_SIZE);

			ip.nexthdr = NEXT_HOP_BY_HOP;
			__builtin_memcpy(jumbo + 4, &len, sizeof(len));
			if (!put(ctx, ETH_HLEN + sizeof(ip), jumbo, sizeof(jumbo), xdp))
				return REASON_INTERNAL;
		} else if (then > sizeof(ip)) {
			f.next = ip.nexthdr;
			ip.nexthdr = NEXT_FRAGMENT;
			f.offset = bpf_htons(p->frag_off | (p->flags & PACKET_MORE ? 1 : 0));
			f.id = (__u32)p->frag_id << 16; // 16 bits in the low half, in wire order
			if (!put(ctx, ETH_HLEN + sizeof(ip), &f, sizeof(f), xdp))
				return REASON_INTERNAL;
		}
		return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp) ? REASON_NONE : REASON_INTERNAL;
	}
	struct iphdr ip;

	header4(&ip, p, plan, payload, bpf_get_prandom_u32());
	return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp) ? REASON_NONE : REASON_INTERNAL;
}

BOTH_HOOKS(enum reason, translate,
	   !p || !plan ? REASON_INTERNAL :
	   plan->family == FAMILY_6 ? translate(ctx, p, plan, true, xdp) : translate(ctx, p, plan, false, xdp),
	   const struct packet *p, struct plan *plan)

#endif
