// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets for user space:
//   - Later fragments that arrive before the first one (RFC 4787 REQ-14, RFC 6146 §3.4). A program
//   cannot delay packets. User space stores a limited number of them until the program reports the
//   first fragment.
//   - Packets that must be fragmented, but not by the kernel: packets translated to IPv6, and packets
//   with a source address of this host.
//   - Translated packets to a next hop with an unknown hardware address, if the kernel would refuse
//   their source.
#ifndef SLUICE_HOLD_H
#define SLUICE_HOLD_H

#include "error/errorxlat.h"

#define HELD_PER_SECOND 4096 // limits the cost of a flood (RFC 4787 REQ-14a)

static __always_inline bool held_credit(struct control *c, __u32 now)
{
	if (now - c->held_tick >= hz) {
		c->held_tick = now;
		c->held = 0;
	}
	return __sync_fetch_and_add(&c->held, 1) < HELD_PER_SECOND;
}

// Reports whether the kernel or the NIC has yet to complete the checksum of the segment at l4_off
// (CHECKSUM_PARTIAL). Packets of a local sender and packets merged on arrival (GRO) are in this
// state, also after changes. The check uses a property of bpf_l4_csum_replace: without a change of
// addresses, it leaves such checksums unmodified.
static __always_inline bool summed_later(void *ctx, const struct packet *p, __u32 l4_off, const bool xdp)
{
	__u32 at = l4_off + check_offset(p->tuple.l4_proto);
	__u16 was, is;

	if (xdp || (p->tuple.l4_proto != IPPROTO_TCP && p->tuple.l4_proto != IPPROTO_UDP) ||
	    !get(ctx, at, &was, 2, false) || bpf_l4_csum_replace(ctx, at, 0, 1, 0) || !get(ctx, at, &is, 2, false))
		return false;
	return is == was || bpf_skb_store_bytes(ctx, at, &was, 2, 0);
}

// Stores the next hop from the result of a route lookup.
static __always_inline void next_hop_of(struct held *h, const struct bpf_fib_lookup *fib)
{
	h->out = fib->ifindex;
	if (fib->family == AF_INET6) { // also for an IPv4 packet with a route via IPv6
		h->next_family = FAMILY_6;
		__builtin_memcpy(&h->next_hop, fib->ipv6_dst, 16);
	} else {
		h->next_family = FAMILY_4;
		h->next_hop.w[0] = fib->ipv4_dst;
	}
}

// Action of user space on a packet.
enum hold_kind {
	HOLD_FRAGMENT,	 // wait for the first fragment
	HOLD_LARGE,	 // translate the packet and send it in fragments
	HOLD_UNRESOLVED, // wait for the hardware address of the next hop
};

// Passes a packet of len bytes to user space. Returns false if user space is absent or the rate
// limit or the ring buffer is exhausted.
static __always_inline bool hold_frame(void *ctx, const struct packet *p, enum hold_kind kind, __u32 len, bool unsummed,
				       const bool xdp)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct held *h;
	long failed;

	if (!hold_fragments || !c || !w || len > HELD_FRAME || len < ETH_HLEN || !held_credit(c, p->now))
		return false;
	h = bpf_ringbuf_reserve(&early, sizeof(*h), 0);
	if (!h)
		return false;
	__builtin_memset(h, 0, __builtin_offsetof(struct held, frame));
	if (kind == HOLD_FRAGMENT)
		fragment_key_of(&h->key, p);
	else if (kind == HOLD_UNRESOLVED)
		next_hop_of(h, (void *)w->fib);
	h->at = bpf_ktime_get_ns();
	h->ifindex = p->ifindex;
	h->len = len | (unsummed ? HELD_UNSUMMED : 0);
	bounded(len);
	len = ((len - 1) & (HELD_FRAME - 1)) + 1; // the same value; Linux 6.1 loses both bounds otherwise
	failed = xdp ? bpf_xdp_load_bytes(ctx, 0, h->frame, len) : bpf_skb_load_bytes(ctx, 0, h->frame, len);
	if (failed) {
		bpf_ringbuf_discard(h, 0);
		return false;
	}
	bpf_ringbuf_submit(h, 0);
	return true;
}

// Passes a later fragment without a stored first fragment to user space.
static __always_inline int hold(void *ctx, const struct packet *p, const bool xdp)
{
	return dry_run || hold_frame(ctx, p, HOLD_FRAGMENT, p->frame_len, false, xdp) ? REASON_HELD_FRAGMENT :
											REASON_ORPHAN_FRAGMENT;
}

// Passes a packet that must be fragmented to user space.
static __always_inline bool large(void *ctx, const struct packet *p, const bool xdp)
{
	return hold_frame(ctx, p, HOLD_LARGE, p->frame_len, summed_later(ctx, p, p->l4_off, xdp), xdp);
}

// An IPv4 packet without DF may be too large for the path in IPv6 (RFC 7915 §4). A program cannot
// split a packet.
BOTH_HOOKS(fragment6, !p || !large(ctx, p, xdp) ? REASON_TOO_BIG : REASON_TO_FRAGMENT6, const struct packet *p)

// Reports whether the kernel accepts a packet with its new source. It drops packets translated by
// masquerade and replies of a service on an address of this host as martians. Tunnel packets are
// excluded too.
static __always_inline bool kernel_accepts(void *ctx, const struct packet *p, const struct plan *plan)
{
	const union addr *from = &plan->to.saddr;
	struct work *w = the_work();

	if (plan->encap || !w)
		return false;
	if (plan->flags & PLAN_ERROR)
		from = error_source_within(p, plan, &w->about);
	return way_back(ctx, p->ifindex, from->w[0]);
}

// Fragments an IPv4 packet without DF that is larger than the MTU of the next hop. Either the
// kernel or user space does it.
static __always_inline int fragment4(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	if (kernel_accepts(ctx, p, plan))
		return REASON_TO_FRAGMENT;
	return dry_run || large(ctx, p, xdp) ? REASON_TO_FRAGMENT6 : REASON_TOO_BIG;
}

BOTH_HOOKS(fragment4, !p || !plan ? REASON_INTERNAL : fragment4(ctx, p, plan, xdp), const struct packet *p,
	   const struct plan *plan)

// Handles a translated packet of len bytes to a next hop with an unknown hardware address. Either
// the kernel or user space resolves the address and sends the packet.
static __always_inline int unresolved(void *ctx, const struct packet *p, const struct plan *plan, __u32 len,
				      const bool xdp)
{
	bool unsummed;

	if ((plan->encap ? plan->gateway_family : plan->family) == FAMILY_6 || kernel_accepts(ctx, p, plan))
		return REASON_NO_NEIGHBOUR;
	unsummed = !(plan->flags & PLAN_ERROR) &&
		   summed_later(ctx, p, p->l4_off + header_then(p, plan) - header_now(p) + encap_size(plan), xdp);
	if (unsummed && plan->encap)
		return REASON_NO_NEIGHBOUR; // user space completes only the checksums of outer segments
	return hold_frame(ctx, p, HOLD_UNRESOLVED, len, unsummed, xdp) ? REASON_UNRESOLVED : REASON_NO_NEIGHBOUR;
}

__noinline int xdp_unresolved(struct xdp_md *ctx, const struct packet *p, const struct plan *plan)
{
	return p && plan ? unresolved(ctx, p, plan, bpf_xdp_get_buff_len(ctx), true) : REASON_INTERNAL;
}

__noinline int tc_unresolved(struct __sk_buff *ctx, const struct packet *p, const struct plan *plan)
{
	return p && plan ? unresolved(ctx, p, plan, ctx->len, false) : REASON_INTERNAL;
}

#endif
