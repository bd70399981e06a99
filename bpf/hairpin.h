// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets from inside to an inside host by its outside endpoint.
#ifndef SLUICE_HAIRPIN_H
#define SLUICE_HAIRPIN_H

#include "portless.h"

// Whether a packet may open a flow of a NAT rule, by its protocol.
static __always_inline bool may_open(const struct packet *p)
{
	if (p->tuple.l4_proto == IPPROTO_ICMP || p->tuple.l4_proto == IPPROTO_ICMPV6)
		return p->flags & PACKET_QUERY;
	return !(p->flags & (PACKET_NO_FLOW | PACKET_ERROR));
}

// Whether a rule that takes a packet's source gives it an outside one when it is for
// another inside host. Verified on its own, not for each of the rules.
__noinline int hairpins(const struct packet *p, __u32 id)
{
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &id);

	return p && r && r->active && r->flags & NAT_HAIRPIN && includes(r->in, p->ifindex) &&
	       (p->family == FAMILY_6 ? r->pool6_len : r->pool_len);
}

// The rule that does: own if it is one, otherwise the first; or NO_ENTRY.
__noinline __u32 hairpin_rule(const struct packet *p, __u32 own)
{
	struct nat_order *order = order_now();
	__u64 rules;

	if (!p || !order)
		return NO_ENTRY;
	rules = member_of(&p->tuple.saddr, LIST_SOURCES, p->family == FAMILY_6);
	if (own < MAX_NAT_RULES && rules >> own & 1 && hairpins(p, own))
		return own;
	for (int i = 0; i < MAX_NAT_RULES && rules && order->rules[i]; i++) {
		__u32 id = order->rules[i] - 1;

		if (rules >> (id & 63) & 1 && hairpins(p, id))
			return id;
	}
	return NO_ENTRY;
}

// From inside to an inside host by its outside endpoint: the source is translated too,
// so that the answer comes back this way (RFC 4787 REQ-9). own: rule of that endpoint,
// or NO_ENTRY. REASON_NONE: not from inside.
static __always_inline int hairpin_source(const struct packet *p, struct plan *plan, struct bind *source, __u32 own)
{
	__u32 rule = NO_ENTRY;
	int reason;

	if (have_nat)
		rule = hairpin_rule(p, own);
	if (rule == NO_ENTRY)
		return REASON_NONE;
	if (!may_open(p) && !portless(p))
		return REASON_UNSUPPORTED_PROTOCOL;
	source->inside = p->tuple;
	source->family = p->family;
	source->outside_family = p->family;
	source->rule = rule;
	source->now = p->now;
	if (dry_run)
		return REASON_NONE;
	if (portless(p)) {
		reason = take_address(plan, source);
		return reason == REASON_NONE ? REASON_FLOW : reason;
	}
	reason = bind(source);
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		return reason;
	plan->to.saddr = source->outside;
	plan->to.sport = source->port;
	return REASON_FLOW;
}

#endif
