// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets for user space:
//   - Later fragments that arrive before the first one (RFC 4787 REQ-14, RFC 6146 §3.4). A program
//   cannot delay packets. User space stores a limited number of them until the program reports the
//   first fragment.
//   - Packets that must be fragmented, but not by the kernel: packets translated to IPv6, and packets
//   with a source address of this host.
//   - Packets to translate whose next hop has an unknown hardware address. The kernel would refuse some
//   sources, and its ICMP errors would quote the translated packet.
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
static __always_inline enum reason hold(void *ctx, const struct packet *p, const bool xdp)
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
BOTH_HOOKS(enum reason, fragment6, !p || !large(ctx, p, xdp) ? REASON_TOO_BIG : REASON_TO_FRAGMENT6,
	   const struct packet *p)

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
static __always_inline enum reason fragment4(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	if (kernel_accepts(ctx, p, plan))
		return REASON_TO_FRAGMENT;
	return dry_run || large(ctx, p, xdp) ? REASON_TO_FRAGMENT6 : REASON_TOO_BIG;
}

BOTH_HOOKS(enum reason, fragment4, !p || !plan ? REASON_INTERNAL : fragment4(ctx, p, plan, xdp), const struct packet *p,
	   const struct plan *plan)

// Handles a packet that no rewrite has changed yet, to a next hop with an unknown hardware address.
// User space waits for the address, then runs the packet through its own program. That program
// sends the packet, or answers for the next hop if it is still unknown. Without user space the
// kernel gets the translated packet, if it accepts the source. Other packets wait in the ring buffer
// for the next start of user space.
static __always_inline enum reason unresolved(void *ctx, const struct packet *p, struct plan *plan, const bool xdp)
{
	struct control *c = the_control();
	struct work *w = the_work();
	bool v6 = (plan->encap ? plan->gateway_family : plan->family) == FAMILY_6;

	if (!c || !w)
		return REASON_INTERNAL;
	if (!plan->hop) // otherwise the kernel probes a STALE neighbour
		ask_neighbour((void *)w->fib);
	if (!hold_fragments && !dry_run) {
		plan->answer = ANSWER_UNREACHABLE_HOST;
		return REASON_UNRESOLVED;
	}
	if ((user_space_gone(c) || without_neighbours(((struct bpf_fib_lookup *)w->fib)->ifindex)) &&
	    (v6 || kernel_accepts(ctx, p, plan)))
		return REASON_NO_NEIGHBOUR;
	if (dry_run)
		return p->frame_len > HELD_FRAME ? REASON_NO_NEIGHBOUR : REASON_UNRESOLVED;
	return hold_frame(ctx, p, HOLD_UNRESOLVED, p->frame_len, summed_later(ctx, p, p->l4_off, xdp), xdp) ?
		       REASON_UNRESOLVED :
		       REASON_NO_NEIGHBOUR;
}

BOTH_HOOKS(enum reason, unresolved, !p || !plan ? REASON_INTERNAL : unresolved(ctx, p, plan, xdp),
	   const struct packet *p, struct plan *plan)

#endif
