// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packet counters, and requests to user space.
#ifndef SLUICE_EVENT_H
#define SLUICE_EVENT_H

#include "maps.h"

#define AF_INET 2
#define AF_INET6 10

_Static_assert((int)REASON_COUNT <= (int)REASONS_STRIDE, "counters have room for every reason");

static __always_inline void count_one(__u32 family, __u32 action, __u32 reason)
{
	__u32 at = (family * 3 + action) * REASONS_STRIDE + reason;
	__u64 *n = bpf_map_lookup_elem(&reasons, &at);

	if (n)
		(*n)++;
}

static __always_inline void count(__u32 family, __u32 action, __u32 reason)
{
	if (!dry_run)
		count_one(family, action, reason);
}

// Reports whether a link has no hardware addresses (tun), so that no neighbour can be resolved.
static __always_inline bool without_neighbours(__u32 ifindex)
{
	struct interface_addr *out = bpf_map_lookup_elem(&interfaces, &ifindex);

	return out && !(out->mac[0] | out->mac[1] | out->mac[2] | out->mac[3] | out->mac[4] | out->mac[5]);
}

// Requests resolution of the neighbour in the result of a route lookup.
__noinline int ask_neighbour(const struct bpf_fib_lookup *fib)
{
	struct event *e;

	if (!fib || dry_run || without_neighbours(fib->ifindex))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = EVENT_NEIGHBOUR;
	e->ifindex = fib->ifindex;
	if (fib->family == AF_INET6) { // also for an IPv4 packet with a route via IPv6
		e->family = FAMILY_6;
		__builtin_memcpy(&e->addr, fib->ipv6_dst, 16);
	} else {
		e->family = FAMILY_4;
		e->addr.w[0] = fib->ipv4_dst;
	}
	bpf_ringbuf_submit(e, 0);
	return 0;
}

#endif
