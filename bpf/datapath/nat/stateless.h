// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// static (1:1), npt66 and siit: stateless translation of prefixes.
#ifndef SLUICE_STATELESS_H
#define SLUICE_STATELESS_H

#include "packet/prefix.h"

// Changes one 16-bit word so that the sum of the address stays the same (RFC 6296 §3.1). Prefixes
// of up to 48 bits use bits 48 to 63. Longer prefixes use the first word of the interface
// identifier that is not 0xffff. Returns false if there is no such word.
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

// Translates one address by one rule within its family.
static __always_inline enum reason map_address(union addr *a, const struct prefix *by)
{
	replace_prefix(a, &by->to, by->to_len);
	if (by->kind != PREFIX_NPT66)
		return REASON_NONE;
	return npt_adjust(a, by->adjust, by->to_len) ? REASON_NONE : REASON_UNTRANSLATABLE;
}

// Returns 32 bits of an IPv6 address from bit "at" onwards, padded with zeros.
static __always_inline __u32 bits_at(const union addr *a, __u32 at)
{
	__u64 high = bpf_be64_to_cpu(a->d[0]), low = bpf_be64_to_cpu(a->d[1]);

	if (at >= 64)
		return (low << (at & 63)) >> 32;
	return (at ? high << at | low >> (64 - at) : high) >> 32;
}

// Inserts 32 bits at bit "at", where the address has zeros.
static __always_inline void put_bits(union addr *a, __u32 at, __u32 bits)
{
	__u64 high = (__u64)bits << 32, low = 0;

	if (at >= 64) {
		low = high >> (at & 63);
		high = 0;
	} else if (at) {
		low = high << (64 - at);
		high >>= at;
	}
	a->d[0] |= bpf_cpu_to_be64(high);
	a->d[1] |= bpf_cpu_to_be64(low);
}

// Translates an address into the other family by the mapping that covers it (RFC 7757 §3.3, RFC
// 6052 §2.3). The suffix of the IPv6 prefix may be longer: the bits of the IPv4 suffix are its
// first ones.
static __always_inline void cross_address(union addr *a, const struct prefix *by, bool v6)
{
	union addr was = *a;

	if (by->kind != PREFIX_EAM) {
		if (v6) {
			a->d[0] = extract(&was, by->len);
			a->d[1] = 0;
		} else {
			embed(a, &by->embed, by->embed_len, was.w[0]);
		}
		return;
	}
	*a = by->to;
	if (v6 && by->to_len < 32)
		a->w[0] |= bpf_htonl(bits_at(&was, by->len) >> by->to_len);
	else if (!v6 && by->len < 32)
		put_bits(a, by->to_len, bpf_ntohl(was.w[0]) << by->len);
}

static __always_inline bool same_embedding(const struct prefix *a, const struct prefix *b)
{
	return a->embed_len == b->embed_len && a->embed.d[0] == b->embed.d[0] && a->embed.d[1] == b->embed.d[1];
}

// Reports whether a rule excepts an address.
static __always_inline bool excepts(const struct prefix *by, const union addr *a, bool v6)
{
	return by->except && member_of(a, LIST_PREFIX | (__u32)by->rule << 16, v6);
}

// Applies the settings of a rule to a packet and counts it.
static __always_inline void take_prefix(struct prefix *by, const struct packet *p, struct plan *plan)
{
	if (!p->l3_len) // the quotation in an ICMP error
		return;
	if (by->clamp && p->tcp_flags & TCP_SYN && !(p->flags & PACKET_LATER_FRAGMENT))
		plan->edits |= EDIT_MSS;
	if (dry_run)
		return;
	__sync_fetch_and_add(&by->packets, 1);
	__sync_fetch_and_add(&by->bytes, p->l3_len);
}

// Returns the reason to leave a packet untranslated although a mapping covers its destination, or
// REASON_FLOW for none. Either the destination is this host, or the routing table has a more
// specific route than the mapping of "len" bits (RFC 7915 §4.6, §5.6). In the latter case,
// REASON_NONE lets other rules translate the packet.
static __always_inline enum reason untranslated(const union addr *dest, __u32 len, bool v6)
{
	__u64 route = member_of(dest, LIST_ROUTED, v6);

	if (route & ROUTED_HERE)
		return REASON_NOT_ROUTED;
	return (route & 0xff) > len ? REASON_NONE : REASON_FLOW;
}

// Reports whether the interfaces of a packet match a rule: from "in" to "out", or back. "turned"
// marks a packet that returns to its own network.
static __always_inline bool of_interfaces(const struct prefix *by, const struct packet *p, bool turned)
{
	__u32 in = by->in, out = by->out;

	if (!cross_by_egress || (includes(in, p->ifindex) && (turned || includes(out, p->cross_out))))
		return true;
	return includes(out, p->ifindex) && includes(in, p->cross_out);
}

// Reports whether a siit rule excepts one of the addresses, before or after translation.
static __always_inline bool siit_excepts(const struct prefix *by, const struct packet *p, const struct plan *plan)
{
	bool v6 = p->family == FAMILY_6;

	return by->except && (excepts(by, &p->tuple.daddr, v6) || excepts(by, &plan->to.daddr, !v6) ||
			      excepts(by, &p->tuple.saddr, v6) || excepts(by, &plan->to.saddr, !v6));
}

// Copies the options of a siit rule to the plan of a packet.
static __always_inline enum reason siit_take(struct prefix *by, const struct packet *p, struct plan *plan)
{
	if (siit_excepts(by, p, plan))
		return REASON_EXCEPTED;
	__builtin_memcpy(&plan->pool, by->pool, sizeof(plan->pool));
	plan->pool_len = by->pool_len;
	plan->choices = by->choices;
	plan->tos = by->adjust;
	plan->owner = by->rule;
	return REASON_STATIC;
}

// Handles a hairpin (RFC 7757 §4.2.2): the destination is in the prefix but belongs to a host with
// an explicit mapping. The packet stays in IPv6. Its source becomes an address in the prefix, so
// that the replies return through the gateway. plan->to holds the IPv4 addresses.
static __always_inline bool siit_hairpin(struct plan *plan, const struct prefix *by)
{
	struct prefix *back = prefix_of(&plan->to.daddr, ROLE_CROSSING, false);
	__be32 source = plan->to.saddr.w[0];

	if (!back || back->kind != PREFIX_EAM || back->rule != by->rule)
		return false;
	cross_address(&plan->to.daddr, back, false);
	embed(&plan->to.saddr, &by->embed, by->embed_len, source);
	plan->family = FAMILY_6;
	return true;
}

// siit from IPv6: translates both addresses by an explicit mapping, or else by the RFC 6052 prefix
// of the same rule. Returns REASON_NONE if no rule applies.
static __always_inline enum reason siit_from6(const struct packet *p, struct plan *plan)
{
	// volatile: the compiler must not combine the tests of both pointers with "or", because the
	// verifier rejects arithmetic on pointers.
	struct prefix *volatile by_source = prefix_of(&p->tuple.saddr, ROLE_CROSSING, true);
	struct prefix *volatile by_dest = prefix_of(&p->tuple.daddr, ROLE_CROSSING, true);
	struct prefix *source = by_source, *dest, *by;
	enum reason reason;
	bool turned;
	enum reason taken;

	if (!source || source->kind == PREFIX_NAT64)
		return REASON_NONE;
	dest = by_dest;
	if (!dest || dest->kind == PREFIX_NAT64)
		return REASON_NONE;
	by = source->kind == PREFIX_EAM ? source : dest;
	if (source->kind == PREFIX_EAM && dest->kind == PREFIX_EAM ? source->rule != dest->rule :
								     !same_embedding(source, dest))
		return REASON_NONE;
	reason = untranslated(&p->tuple.daddr, dest->len, true);
	if (reason != REASON_FLOW)
		return reason;
	plan->family = FAMILY_4;
	cross_address(&plan->to.saddr, source, true);
	cross_address(&plan->to.daddr, dest, true);
	taken = siit_take(by, p, plan);
	if (taken == REASON_STATIC && (nowhere4(plan->to.saddr.w[0]) || nowhere4(plan->to.daddr.w[0])))
		taken = REASON_UNTRANSLATABLE; // RFC 7915 §5.1, RFC 1812 §5.3.7
	turned = taken == REASON_STATIC && dest->kind == PREFIX_SIIT && siit_hairpin(plan, by);
	if (!of_interfaces(by, p, turned))
		return REASON_NONE;
	if (taken == REASON_STATIC)
		take_prefix(by, p, plan);
	return taken;
}

// Translates the destination of an IPv4 packet by its explicit mapping. Otherwise, the prefix of
// the rule that maps the source applies, or of a rule for all traffic between its interfaces.
// Returns the prefix entry used, or null.
static __always_inline struct prefix *siit_dest4(const struct packet *p, const struct prefix *source, union addr *to,
						 __u32 *len)
{
	struct prefix *dest = prefix_of(&p->tuple.daddr, ROLE_CROSSING, false);
	const struct prefix *by = dest;

	*to = p->tuple.daddr;
	*len = 0;
	if (dest && dest->kind == PREFIX_EAM) {
		*len = dest->len;
		cross_address(to, dest, false);
		return dest;
	}
	if (source && source->kind == PREFIX_EAM && source->embed_len)
		by = source;
	if (!by || nowhere4(p->tuple.daddr.w[0]))
		return 0;
	embed(to, &by->embed, by->embed_len, p->tuple.daddr.w[0]);
	return (struct prefix *)by;
}

// siit from IPv4. A rule with explicit mappings needs one for either address. A rule without them
// names its interfaces, because its prefix covers every address.
static __always_inline enum reason siit_from4(const struct packet *p, struct plan *plan)
{
	struct prefix *source = prefix_of(&p->tuple.saddr, ROLE_CROSSING, false), *by;
	enum reason reason;
	__u32 len;
	enum reason taken;

	by = siit_dest4(p, source, &plan->to.daddr, &len);
	if (!by)
		return REASON_NONE;
	reason = untranslated(&p->tuple.daddr, len, false);
	if (reason != REASON_FLOW)
		return reason;
	plan->family = FAMILY_6;
	if (source && source->kind == PREFIX_EAM && source->rule == by->rule)
		cross_address(&plan->to.saddr, source, false);
	else if (by->embed_len)
		embed(&plan->to.saddr, &by->embed, by->embed_len, p->tuple.saddr.w[0]);
	else
		return REASON_NONE;
	if (!of_interfaces(by, p, false))
		return REASON_NONE;
	taken = siit_take(by, p, plan);
	if (taken == REASON_STATIC)
		take_prefix(by, p, plan);
	return taken;
}

// Translates between the families. ICMP messages without a counterpart are dropped silently (RFC
// 7915 §1.2).
__noinline enum reason siit(const struct packet *p, struct plan *plan)
{
	bool v6;
	enum reason reason;

	if (!p || !plan)
		return REASON_INTERNAL;
	v6 = p->family == FAMILY_6;
	plan->to = p->tuple;
	reason = v6 ? siit_from6(p, plan) : siit_from4(p, plan);
	if (reason != REASON_STATIC || plan->family == p->family)
		return reason;
	if (!v6 && p->tuple.l4_proto == IPPROTO_IGMP) // for one link, or for routers (RFC 7915 §4.2)
		return REASON_UNTRANSLATABLE;
	if (p->tuple.l4_proto == (v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		if (p->flags & PACKET_NO_FLOW)
			return REASON_UNTRANSLATABLE;
		plan->to.l4_proto = v6 ? IPPROTO_ICMP : IPPROTO_ICMPV6;
	}
	return reason;
}

// Computes the destination of a packet in the other family, for siit or nat64. Returns 0 if there
// is none.
__noinline int crossed_dest(const struct packet *p, union addr *to)
{
	struct prefix *by;
	__u32 len;

	if (!p || !to)
		return 0;
	if (p->family == FAMILY_4)
		return !!siit_dest4(p, prefix_of(&p->tuple.saddr, ROLE_CROSSING, false), to, &len);
	by = prefix_of(&p->tuple.daddr, ROLE_CROSSING, true);
	if (!by)
		return 0;
	*to = p->tuple.daddr;
	cross_address(to, by, true);
	return 1;
}

// static and npt66. An outbound packet leaves through the "out" interface of the rule, unless its
// destination is another outside address of the rules (hairpin). For a later fragment, no route
// lookup has set p->out, and the rule applies on any interface.
__noinline enum reason prefix_pair(const struct packet *p, struct plan *plan)
{
	struct prefix *volatile by_source, *volatile by_dest; // volatile: see siit_from6
	struct prefix *source, *dest;
	enum reason reason;
	bool v6;

	if (!p || !plan)
		return REASON_INTERNAL;
	v6 = p->family == FAMILY_6;
	by_dest = prefix_of(&p->tuple.daddr, ROLE_DEST, v6);
	by_source = prefix_of(&p->tuple.saddr, ROLE_SOURCE, v6);
	dest = by_dest;
	source = by_source;
	plan->to = p->tuple;
	if (source) {
		if (!includes(source->in, p->ifindex))
			source = 0;
		else if (p->out && !dest && !includes(source->out, p->out))
			source = 0;
	}
	if (source) {
		if (!dest && excepts(source, &p->tuple.daddr, v6))
			return REASON_EXCEPTED;
		reason = map_address(&plan->to.saddr, source);
		if (reason != REASON_NONE)
			return reason;
		take_prefix(source, p, plan);
		plan->owner = source->rule;
	}
	dest = by_dest;
	if (!dest)
		return source ? REASON_STATIC : REASON_NONE;
	reason = map_address(&plan->to.daddr, dest);
	if (reason != REASON_NONE)
		return reason;
	take_prefix(dest, p, plan);
	plan->owner = dest->rule;
	return REASON_STATIC;
}

// Translates both addresses of a packet. Returns REASON_NONE if no rule applies.
static __always_inline enum reason stateless(const struct packet *p, struct plan *plan)
{
	enum reason reason = REASON_NONE;

	plan->family = p->family;
	if (have_crossing)
		reason = siit(p, plan);
	if (reason == REASON_NONE) {
		plan->family = p->family;
		reason = prefix_pair(p, plan);
	}
	if (reason != REASON_STATIC)
		return reason;
	plan->owner_nat = OWNER_STATELESS;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = plan->family;
	// The checksum of every ICMPv6 message covers its addresses.
	if (p->flags & PACKET_LATER_FRAGMENT || (p->flags & PACKET_NO_FLOW && p->tuple.kind != KIND_NONE))
		plan->flags |= PLAN_NO_L4;
	return REASON_STATIC;
}

#endif
