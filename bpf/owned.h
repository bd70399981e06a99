// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Virtual addresses of the gateway, and what is sent there to no service.
#ifndef SLUICE_OWNED_H
#define SLUICE_OWNED_H

#include "hop.h"

// What becomes of a packet that nothing wants. Others route virtual addresses to this host;
// its own default route would lead the packet back to them, until its TTL is used up. It is
// answered without a route too: many routers have none, or a blackhole that they announce. The
// host's own addresses are not in the list: bpf_fib_lookup tells them from no route by nothing.
static __always_inline int unserved_here(void *ctx, struct packet *p, struct plan *plan)
{
	__u64 address = member_of(&p->tuple.daddr, LIST_SERVED, p->family == FAMILY_6);
	bool tcp = p->tuple.l4_proto == IPPROTO_TCP && !(p->flags & PACKET_LATER_FRAGMENT);

	if (!(address & SERVED_OWNED))
		return REASON_NOT_OURS;
	if (address & SERVED_BOUND) {
		if (!p->out) {
			plan->gateway = p->tuple.daddr;
			if (!egress(ctx, p, plan, true))
				return REASON_INTERNAL;
		}
		if (p->out != p->ifindex)
			return REASON_NOT_OURS;
	}
	if (is_icmp(p->tuple.l4_proto) && !(p->flags & PACKET_QUERY))
		return REASON_UNSERVED; // an answer that nobody asked for
	if (address & SERVED_RESET)
		plan->answer = tcp ? ANSWER_RESET : ANSWER_UNREACHABLE_PORT;
	else if (address & SERVED_REJECT)
		plan->answer = ANSWER_UNREACHABLE_PORT;
	return REASON_UNSERVED;
}

BOTH_HOOKS(unserved, !p || !plan ? REASON_INTERNAL : unserved_here(ctx, p, plan), struct packet *p, struct plan *plan)

#endif
