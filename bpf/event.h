// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Counting what happened to packets, and telling user space what it must do.
#ifndef SLUICE_EVENT_H
#define SLUICE_EVENT_H

#include "maps.h"

#define REASONS_STRIDE 64

_Static_assert(REASON_COUNT <= REASONS_STRIDE, "counters have room for every reason");

static __always_inline void count(__u32 family, __u32 action, __u32 reason)
{
	__u32 at = (family * 3 + action) * REASONS_STRIDE + reason;
	__u64 *n;

	if (dry_run)
		return;
	n = bpf_map_lookup_elem(&reasons, &at);
	if (n)
		(*n)++;
}

// Asks user space to resolve a neighbour, at most once a tick and CPU's turn:
// the ring drops what it has no room for.
__noinline int ask_neighbour(const union addr *a, __u32 family, __u32 ifindex)
{
	struct event *e;

	if (!a || dry_run)
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = EVENT_NEIGHBOUR;
	e->family = family;
	e->ifindex = ifindex;
	e->addr = *a;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

#endif
