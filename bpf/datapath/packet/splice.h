// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Splices connections that a cookie opened. The client completes its handshake with the cookie
// first, and the gateway then opens the connection to the backend. Sequence numbers of the backend
// are shifted to match the cookie.
//
// Until the backend replies, every packet of the client becomes the SYN. A lost SYN is therefore
// repeated, because a client with data probes the window of 0. The backend's SYN-ACK becomes a
// segment with one byte that the client already has: a keepalive (RFC 9293 §3.8.4). It opens the
// window, and the client acknowledges it at once. This acknowledgement completes the backend's
// handshake, as a server that sends first needs.
#ifndef SLUICE_SPLICE_H
#define SLUICE_SPLICE_H

#include "packet/edit.h"

// A TCP header with an MSS option.
struct syn_segment {
	struct tcphdr tcp;
	__u8 kind;
	__u8 size;
	__be16 mss;
};
ASSERT_SIZE(struct syn_segment, 24);

#define KEEPALIVE_SIZE (sizeof(struct tcphdr) + 1)

// Reports whether a packet is one complete segment. A GSO packet is split later. A fragment must
// not grow into the next one, and its checksum cannot be computed.
static __always_inline bool single(const struct packet *p)
{
	return p->segment == p->l3_len && !(p->flags & PACKET_FIRST_FRAGMENT);
}

// Replaces the packet's segment with another one of "size" bytes. Bytes after is->tcp are 0, except
// for the option of a SYN.
static __always_inline enum reason replace_segment(void *ctx, const struct packet *p, const struct plan *plan,
						   const struct syn_segment *is, const __u32 size, const bool xdp)
{
	const bool v6 = plan->family == FAMILY_6;
	__u32 off = l4_then(p, plan), end = end_then(p, plan), have = end - off;
	__u64 sum;
	__u8 zero = 0;

	if (!single(p) || have < sizeof(struct tcphdr))
		return REASON_UNTRANSLATABLE;
	sum = sum_of(ctx, off, have, xdp);
	if (have < size) {
		if (!widen(ctx, off + sizeof(struct tcphdr), end, size - have, v6, xdp))
			return REASON_INTERNAL;
	} else if (have > size && !grow_header(ctx, size - have, v6, xdp)) {
		return REASON_INTERNAL;
	}
	if (!(size == sizeof(*is) ? put_covered(ctx, off, is, sizeof(*is), xdp) :
				    put_covered(ctx, off, &is->tcp, sizeof(is->tcp), xdp) &&
					    put_covered(ctx, off + sizeof(is->tcp), &zero, 1, xdp)))
		return REASON_INTERNAL;
	sum = minus(sum) + sum_words((__u32 *)is, sizeof(*is) / 4);
	if (!fix_check(ctx, off, IPPROTO_TCP, change(bpf_htons(have), bpf_htons(size)), sum, xdp))
		return REASON_INTERNAL;
	end = p->frame_len + end - (ETH_HLEN + p->l3_len); // padding included
	if (end <= off + size || have <= size)
		return REASON_NONE;
	if (xdp)
		return bpf_xdp_adjust_tail(ctx, (int)(off + size) - (int)end) ? REASON_INTERNAL : REASON_NONE;
	return bpf_skb_change_tail(ctx, off + size, 0) ? REASON_INTERNAL : REASON_NONE;
}

// Replaces a 32-bit field of the TCP header.
static __always_inline enum reason put_number(void *ctx, __u32 off, const __u32 place, __be32 was, __u32 is,
					      const bool xdp)
{
	__be32 now = bpf_htonl(is);

	if (!put_covered(ctx, off + place, &now, 4, xdp))
		return REASON_INTERNAL;
	return fix_check(ctx, off, IPPROTO_TCP, 0, change(was, now), xdp) ? REASON_NONE : REASON_INTERNAL;
}

static __always_inline struct adjust *splice_of(const struct plan *plan)
{
	__u32 key = plan->record;

	return bpf_map_lookup_elem(&adjusts, &key);
}

// Edits a segment from the client.
static __always_inline enum reason splice_forward(void *ctx, const struct packet *p, const struct plan *plan,
						  const bool xdp)
{
	struct adjust *a = splice_of(plan);
	__u32 off = l4_then(p, plan), most = mss_of(plan);
	struct syn_segment syn = {};
	struct tcphdr tcp;

	if (!a)
		return REASON_TABLE_FULL;
	if (!get(ctx, off, &tcp, sizeof(tcp), xdp))
		return REASON_INTERNAL;
	if (a->flags & ADJUST_HEARD)
		return tcp.ack ? put_number(ctx, off, 8, tcp.ack_seq, bpf_ntohl(tcp.ack_seq) - a->ahead, xdp) :
				 REASON_NONE;
	if (tcp.rst)
		return REASON_NONE;
	syn.tcp.source = tcp.source;
	syn.tcp.dest = tcp.dest;
	syn.tcp.seq = bpf_htonl(a->base - 1);
	syn.tcp.doff = sizeof(syn) / 4;
	syn.tcp.syn = 1;
	syn.tcp.window = a->window;
	syn.tcp.check = tcp.check; // fix_check updates the checksum incrementally
	syn.kind = TCP_OPTION_MSS;
	syn.size = TCP_OPTION_MSS_SIZE;
	syn.mss = bpf_htons(a->mss < most ? a->mss : most);
	return replace_segment(ctx, p, plan, &syn, sizeof(syn), xdp);
}

// Edits a segment to the client.
static __always_inline enum reason splice_answer(void *ctx, const struct packet *p, const struct plan *plan,
						 const bool xdp)
{
	struct adjust *a = splice_of(plan);
	struct syn_segment alive = {};
	__u32 off = l4_then(p, plan);
	struct tcphdr tcp;

	if (!a)
		return REASON_TABLE_FULL;
	if (!get(ctx, off, &tcp, sizeof(tcp), xdp))
		return REASON_INTERNAL;
	if (!tcp.syn && !(a->flags & ADJUST_HEARD) && (!tcp.ack || bpf_ntohl(tcp.ack_seq) != a->base))
		return REASON_NO_FLOW; // a reset of an older connection (RFC 9293 §3.10.7.3)
	if (!tcp.syn)		       // before the SYN-ACK, only a reset gets here
		return put_number(ctx, off, 4, tcp.seq,
				  a->flags & ADJUST_HEARD ? bpf_ntohl(tcp.seq) + a->ahead : a->cookie + 1, xdp);
	if (!tcp.ack || bpf_ntohl(tcp.ack_seq) != a->base)
		return REASON_NO_FLOW; // SYN-ACK of an older connection
	if (!(a->flags & ADJUST_HEARD)) {
		*(volatile __u32 *)&a->ahead = a->cookie - bpf_ntohl(tcp.seq);
		*(volatile __u32 *)&a->flags = ADJUST_COOKIE | ADJUST_HEARD;
	}
	alive.tcp.source = tcp.source;
	alive.tcp.dest = tcp.dest;
	alive.tcp.seq = bpf_htonl(a->cookie);
	alive.tcp.ack_seq = tcp.ack_seq;
	alive.tcp.doff = sizeof(tcp) / 4;
	alive.tcp.ack = 1;
	alive.tcp.window = tcp.window;
	alive.tcp.check = tcp.check;
	return replace_segment(ctx, p, plan, &alive, KEEPALIVE_SIZE, xdp);
}

BOTH_HOOKS(enum reason, splice_forward, !p || !plan ? REASON_INTERNAL : splice_forward(ctx, p, plan, xdp),
	   const struct packet *p, const struct plan *plan)

BOTH_HOOKS(enum reason, splice_answer, !p || !plan ? REASON_INTERNAL : splice_answer(ctx, p, plan, xdp),
	   const struct packet *p, const struct plan *plan)

#endif
