// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Later fragments that come before their first one (RFC 4787 REQ-14, RFC 6146
// §3.4). No program can send a packet later on, so user space keeps them, within
// bounds of its own, and is told when the first one comes.
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

// Hands a fragment without a first one to user space: REASON_HELD_FRAGMENT, or
// REASON_ORPHAN_FRAGMENT when there is nobody or no room.
static __always_inline int hold(void *ctx, const struct packet *p, const bool xdp)
{
	struct control *c = the_control();
	__u32 len = p->frame_len;
	struct held *h;
	long failed;

	if (dry_run)
		return REASON_HELD_FRAGMENT;
	if (!hold_fragments || !c || len > HELD_FRAME || len < ETH_HLEN || !held_credit(c, p->now))
		return REASON_ORPHAN_FRAGMENT;
	h = bpf_ringbuf_reserve(&early, sizeof(*h), 0);
	if (!h)
		return REASON_ORPHAN_FRAGMENT;
	__builtin_memset(&h->key, 0, sizeof(h->key));
	fragment_key_of(&h->key, p);
	h->at = bpf_ktime_get_ns();
	h->ifindex = p->ifindex;
	h->len = len;
	bounded(len);
	len = ((len - 1) & (HELD_FRAME - 1)) + 1; // as it was: Linux 6.1 loses sight of both bounds otherwise
	failed = xdp ? bpf_xdp_load_bytes(ctx, 0, h->frame, len) : bpf_skb_load_bytes(ctx, 0, h->frame, len);
	if (failed) {
		bpf_ringbuf_discard(h, 0);
		return REASON_ORPHAN_FRAGMENT;
	}
	bpf_ringbuf_submit(h, 0);
	return REASON_HELD_FRAGMENT;
}

#endif
