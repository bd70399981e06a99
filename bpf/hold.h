// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets for user space. Later fragments that come before their first one (RFC 4787
// REQ-14, RFC 6146 §3.4): no program can send a packet later on, so user space keeps
// them, within bounds of its own, and is told when the first one comes. And packets
// that IPv6 carries in fragments only.
#ifndef SLUICE_HOLD_H
#define SLUICE_HOLD_H

#include "decide.h"

#define HELD_PER_SECOND 4096 // a flood costs no more than this (RFC 4787 REQ-14a)

static __always_inline bool held_credit(struct control *c, __u32 now)
{
	if (now - c->held_tick >= hz) {
		c->held_tick = now;
		c->held = 0;
	}
	return __sync_fetch_and_add(&c->held, 1) < HELD_PER_SECOND;
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
	h->len = len;
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

#endif
