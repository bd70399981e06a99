// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets to virtual addresses of the gateway that no service accepts.
#ifndef SLUICE_OWNED_H
#define SLUICE_OWNED_H

#include "packet/route.h"

// Refuses a packet to a virtual address that no service accepts. Routers send virtual addresses to
// this host. Its own default route would return the packet to them, until its TTL expired. The
// refusal needs no route to the address: many gateways have no such route, or announce a blackhole
// route. LIST_SERVED does not mark addresses of the host itself, because bpf_fib_lookup cannot
// distinguish them from missing routes.
static __always_inline enum reason unserved_here(void *ctx, struct packet *p, struct plan *plan)
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
		return REASON_UNSERVED; // an unsolicited ICMP reply
	if (address & SERVED_RESET)
		plan->answer = tcp ? ANSWER_RESET : ANSWER_UNREACHABLE_PORT;
	else if (address & SERVED_REJECT)
		plan->answer = ANSWER_UNREACHABLE_PORT;
	return REASON_UNSERVED;
}

BOTH_HOOKS(enum reason, unserved, !p || !plan ? REASON_INTERNAL : unserved_here(ctx, p, plan), struct packet *p,
	   struct plan *plan)

#endif
