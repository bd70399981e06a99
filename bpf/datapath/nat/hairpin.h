// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Hairpin: packets from an inside host to the outside endpoint of an inside host.
#ifndef SLUICE_HAIRPIN_H
#define SLUICE_HAIRPIN_H

#include "nat/portless.h"

// Reports whether the protocol of a packet permits it to open a flow of a NAT rule.
static __always_inline bool may_open(const struct packet *p)
{
	if (p->tuple.l4_proto == IPPROTO_ICMP || p->tuple.l4_proto == IPPROTO_ICMPV6)
		return p->flags & PACKET_QUERY;
	return !(p->flags & (PACKET_NO_FLOW | PACKET_ERROR));
}

// Reports whether a NAT rule with the packet's source also translates packets to inside hosts. A
// global function, so that the verifier checks it once and not for each rule.
__noinline int hairpins(const struct packet *p, __u32 id)
{
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &id);

	return p && r && r->active && r->flags & NAT_HAIRPIN && includes(r->in, p->ifindex) &&
	       (p->family == FAMILY_6 ? r->pool6_len : r->pool_len);
}

// Returns the rule for the source of a hairpin packet: "own" if it qualifies, otherwise the first
// one, or NO_ENTRY.
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

// Translates the source of a hairpin packet, so that the reply passes through this host (RFC 4787
// REQ-9). own: the rule of the destination endpoint, or NO_ENTRY. REASON_NONE: the packet is not
// from an inside host.
static __always_inline enum reason hairpin_source(const struct packet *p, struct plan *plan, struct bind *source,
						  __u32 own)
{
	__u32 rule = NO_ENTRY;
	enum reason reason;

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
