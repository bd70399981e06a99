// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets for user space. Later fragments that come before their first one (RFC 4787
// REQ-14, RFC 6146 §3.4): no program can send a packet later on, so user space keeps
// them, within bounds of its own, and is told when the first one comes. And packets
// that go on in fragments only, which the kernel does not make: of what becomes IPv6, and
// of what has an address of this host.
#ifndef SLUICE_HOLD_H
#define SLUICE_HOLD_H

#include "errorxlat.h"

#define HELD_PER_SECOND 4096 // a flood costs no more than this (RFC 4787 REQ-14a)

static __always_inline bool held_credit(struct control *c, __u32 now)
{
	if (now - c->held_tick >= hz) {
		c->held_tick = now;
		c->held = 0;
	}
	return __sync_fetch_and_add(&c->held, 1) < HELD_PER_SECOND;
}

// Whether the kernel, or a card, is still to fill in the checksum of a segment
// (CHECKSUM_PARTIAL): packets of a local sender, or those that were joined on arrival (GRO),
// are such, and stay it whatever is made of them. bpf_l4_csum_replace leaves their
// checksums alone, where the addresses stay.
static __always_inline bool summed_later(void *ctx, const struct packet *p, const bool xdp)
{
	__u32 at = p->l4_off + check_offset(p->tuple.l4_proto);
	__u16 was, is;

	if (xdp || (p->tuple.l4_proto != IPPROTO_TCP && p->tuple.l4_proto != IPPROTO_UDP) || !get(ctx, at, &was, 2, false) ||
	    bpf_l4_csum_replace(ctx, at, 0, 1, 0) || !get(ctx, at, &is, 2, false))
		return false;
	return is == was || bpf_skb_store_bytes(ctx, at, &was, 2, 0);
}

// Hands a packet to user space. False when there is nobody or no room.
static __always_inline bool hand_over(void *ctx, const struct packet *p, bool too_large, const bool xdp)
{
	struct control *c = the_control();
	__u32 len = p->frame_len;
	struct held *h;
	long failed;

	if (!hold_fragments || !c || len > HELD_FRAME || len < ETH_HLEN || !held_credit(c, p->now))
		return false;
	h = bpf_ringbuf_reserve(&early, sizeof(*h), 0);
	if (!h)
		return false;
	__builtin_memset(&h->key, 0, sizeof(h->key));
	if (!too_large)
		fragment_key_of(&h->key, p);
	h->at = bpf_ktime_get_ns();
	h->ifindex = p->ifindex;
	h->len = len | (too_large && summed_later(ctx, p, xdp) ? HELD_UNSUMMED : 0);
	bounded(len);
	len = ((len - 1) & (HELD_FRAME - 1)) + 1; // as it was: Linux 6.1 loses sight of both bounds otherwise
	failed = xdp ? bpf_xdp_load_bytes(ctx, 0, h->frame, len) : bpf_skb_load_bytes(ctx, 0, h->frame, len);
	if (failed) {
		bpf_ringbuf_discard(h, 0);
		return false;
	}
	bpf_ringbuf_submit(h, 0);
	return true;
}

// A later fragment without a first one.
static __always_inline int hold(void *ctx, const struct packet *p, const bool xdp)
{
	return dry_run || hand_over(ctx, p, false, xdp) ? REASON_HELD_FRAGMENT : REASON_ORPHAN_FRAGMENT;
}

// RFC 7915 §4: what an IPv4 host sends without DF must not become too large for the
// path in IPv6. No program can make two packets of one.
__noinline int xdp_fragment6(struct xdp_md *ctx, const struct packet *p)
{
	return p && hand_over(ctx, p, true, true) ? REASON_TO_FRAGMENT6 : REASON_TOO_BIG;
}

__noinline int tc_fragment6(struct __sk_buff *ctx, const struct packet *p)
{
	return p && hand_over(ctx, p, true, false) ? REASON_TO_FRAGMENT6 : REASON_TOO_BIG;
}

// Whether the kernel takes a packet with the source that it is to get. One that comes in
// with an address of this host, or without a way back, is a martian to it: what masquerade
// translates, answers of a service on an address of this host, and tunnels.
static __always_inline bool kernel_takes(void *ctx, const struct packet *p, const struct plan *plan)
{
	struct bpf_fib_lookup back = {};
	const union addr *from = &plan->to.saddr;
	struct work *w = the_work();

	if (plan->encap || !w)
		return false;
	if (plan->flags & PLAN_ERROR)
		from = error_source_within(p, plan, &w->about);
	back.family = AF_INET;
	back.ifindex = p->ifindex;
	back.ipv4_dst = from->w[0];
	switch (bpf_fib_lookup(ctx, &back, sizeof(back), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
	case BPF_FIB_LKUP_RET_FRAG_NEEDED: // on TC the packet is measured against the way back too
		return true;
	}
	return false;
}

// An IPv4 packet without DF that is larger than the next link: the kernel fragments it,
// or user space does.
static __always_inline int fragment4(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	if (kernel_takes(ctx, p, plan))
		return REASON_TO_FRAGMENT;
	return dry_run || hand_over(ctx, p, true, xdp) ? REASON_TO_FRAGMENT6 : REASON_TOO_BIG;
}

__noinline int xdp_fragment4(struct xdp_md *ctx, const struct packet *p, const struct plan *plan)
{
	return p && plan ? fragment4(ctx, p, plan, true) : REASON_INTERNAL;
}

__noinline int tc_fragment4(struct __sk_buff *ctx, const struct packet *p, const struct plan *plan)
{
	return p && plan ? fragment4(ctx, p, plan, false) : REASON_INTERNAL;
}

#endif
