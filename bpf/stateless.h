// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// static (1:1), npt66 and siit: prefixes rewritten without any state.
#ifndef SLUICE_STATELESS_H
#define SLUICE_STATELESS_H

#include "prefix.h"

// RFC 6296 §3.1: changes one 16-bit word so that the address's sum stays the
// same. Prefixes of up to 48 bits use bits 48 to 63, longer ones the first word
// of the interface identifier that is not 0xffff. False: no such word.
static __always_inline bool npt_adjust(union addr *a, __u16 adjust, __u32 len)
{
	__u16 *word = (__u16 *)a->b;
	__u32 sum;

	if (len <= 48) {
		sum = word[3];
		if (sum == 0xffff)
			return false;
		sum += adjust;
		sum = (sum & 0xffff) + (sum >> 16);
		word[3] = sum == 0xffff ? 0 : sum;
		return true;
	}
	for (int i = 4; i < 8; i++) {
		if (word[i] == 0xffff)
			continue;
		sum = word[i] + adjust;
		sum = (sum & 0xffff) + (sum >> 16);
		word[i] = sum == 0xffff ? 0 : sum;
		return true;
	}
	return false;
}

// One address through one rule. The family may change.
static __always_inline enum reason map_address(union addr *a, const struct prefix *by, bool v6)
{
	union addr was = *a;
	__u32 mask;

	switch (by->kind) {
	case PREFIX_NPT66:
		replace_prefix(a, &by->to, by->to_len);
		return npt_adjust(a, by->adjust, by->to_len) ? REASON_NONE : REASON_UNTRANSLATABLE;
	case PREFIX_STATIC:
		replace_prefix(a, &by->to, by->to_len);
		return REASON_NONE;
	case PREFIX_SIIT:
		if (v6) {
			a->d[0] = extract(&was, by->len);
			a->d[1] = 0;
		} else {
			embed(a, &by->to, by->to_len, was.w[0]);
		}
		return REASON_NONE;
	case PREFIX_EAM: // the suffixes are of equal length
		*a = by->to;
		if (v6) {
			mask = by->to_len < 32 ? bpf_htonl(0xffffffffU >> by->to_len) : 0;
			a->w[0] |= was.w[3] & mask;
		} else {
			mask = by->len < 32 ? bpf_htonl(0xffffffffU >> by->len) : 0;
			a->w[3] |= was.w[0] & mask;
		}
		return REASON_NONE;
	}
	return REASON_INTERNAL;
}

// What a rule does with the family of an address.
enum crossing {
	CROSSING_NONE,	  // no rule
	CROSSING_WITHIN,  // stays in its family
	CROSSING_MAPPED,  // changes it, by an explicit mapping
	CROSSING_DEFAULT, // changes it, by the rule's prefix
};

static __always_inline enum crossing crossing_of(const struct prefix *by)
{
	if (!by || by->kind == PREFIX_NAT64)
		return CROSSING_NONE;
	if (by->kind == PREFIX_SIIT)
		return CROSSING_DEFAULT;
	return by->kind == PREFIX_EAM ? CROSSING_MAPPED : CROSSING_WITHIN;
}

static __always_inline void count_prefix(struct prefix *by, const struct packet *p)
{
	if (dry_run || !p->l3_len) // an error's quotation
		return;
	__sync_fetch_and_add(&by->packets, 1);
	__sync_fetch_and_add(&by->bytes, p->l3_len);
}

// Rewrites both addresses of a packet. REASON_NONE when no rule wants it.
__noinline int stateless(const struct packet *p, struct plan *plan)
{
	// volatile: the compiler must not join tests of the two pointers with
	// "or", which the verifier does not let pointers do.
	struct prefix *volatile by_source, *volatile by_dest;
	enum crossing source, dest;
	struct prefix *by;
	enum reason reason;
	bool v6;

	if (!p || !plan)
		return REASON_INTERNAL;
	v6 = p->family == FAMILY_6;
	by_dest = prefix_of(&p->tuple.daddr, false, v6);
	by_source = prefix_of(&p->tuple.saddr, true, v6);
	dest = crossing_of(by_dest);
	source = crossing_of(by_source);
	if (dest == CROSSING_NONE && source == CROSSING_NONE)
		return REASON_NONE;
	// Between the families both ends must have a mapping; of IPv4, where the
	// prefix stands for every address, one of them an explicit one.
	if ((dest >= CROSSING_MAPPED) != (source >= CROSSING_MAPPED))
		return REASON_NONE;
	if (!v6 && dest == CROSSING_DEFAULT && source == CROSSING_DEFAULT)
		return REASON_NONE;
	plan->to = p->tuple;
	plan->family = p->family;
	if (dest >= CROSSING_MAPPED) {
		plan->family = v6 ? FAMILY_4 : FAMILY_6;
		plan->to.l4_proto = p->tuple.l4_proto == IPPROTO_ICMP ? IPPROTO_ICMPV6 :
				    p->tuple.l4_proto == IPPROTO_ICMPV6 ? IPPROTO_ICMP : p->tuple.l4_proto;
	}
	by = by_dest;
	if (by && dest != CROSSING_NONE) {
		reason = map_address(&plan->to.daddr, by, v6);
		if (reason != REASON_NONE)
			return reason;
		count_prefix(by, p);
		plan->owner = by->rule;
	}
	by = by_source;
	if (by && source != CROSSING_NONE) {
		reason = map_address(&plan->to.saddr, by, v6);
		if (reason != REASON_NONE)
			return reason;
		count_prefix(by, p);
		plan->owner = by->rule;
	}
	plan->owner_nat = 3;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = plan->family;
	if (p->flags & (PACKET_LATER_FRAGMENT | PACKET_NO_FLOW))
		plan->flags |= PLAN_NO_L4;
	return REASON_STATIC;
}

#endif
