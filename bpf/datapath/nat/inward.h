// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Packets from outside to a binding of a NAT rule. The filter of the rule admits or refuses a
// packet, and the binding gives its inside destination. The file also handles the hairpin of nat64
// and its port-forwards.
#ifndef SLUICE_INWARD_H
#define SLUICE_INWARD_H

#include "nat/snat.h"

// Reports whether the filter of a rule admits packets from a remote endpoint to one of its
// bindings. "from" is the remote address as seen outside. The destination of "to" is the outside
// endpoint of the binding.
static __always_inline bool admitted(const union addr *from, const struct tuple *to, const struct nat_rule *rule,
				     struct tuple *key, bool v6)
{
	if (rule->filtering == FILTERING_ENDPOINT_INDEPENDENT)
		return true;
	if (rule->filtering == FILTERING_ADDRESS_PORT)
		return false; // a known endpoint has a flow
	permit_key(key, from, &to->daddr, to->dport, to->l4_proto);
	return find(key, v6) != NO_ENTRY;
}

// Fills b with the inside endpoint of the binding of an outside endpoint. b->index becomes the
// index of the entry that leads to the binding. The function takes no reference.
__noinline enum reason bound_to(__u32 owner, const union addr *outside, __be16 port, struct bind *b)
{
	bool v6 = owner & OWNER_6, ours;
	__u32 index = (owner & ~OWNER_6) - 1;

	if (!outside || !b)
		return REASON_INTERNAL;
	b->index = index;
	b->family = v6 ? FAMILY_6 : FAMILY_4;
	if (!bind_outside(b, index) || b->port != port || b->outside.d[0] != outside->d[0] ||
	    b->outside.d[1] != outside->d[1])
		return REASON_NO_BINDING;
	if (v6) {
		struct flow6 *f = entry_at(index, true);

		if (!f)
			return REASON_NO_BINDING;
		ours = f->key.state == ENTRY_LIVE && (f->key.kind == KIND_BINDING || made_with_binding(&f->meta));
		b->inside.saddr = f->key.saddr;
		b->inside.sport = f->key.sport;
		b->rule = f->key.kind == KIND_BINDING ? f->key.zone : f->meta.owner;
		return ours ? REASON_NONE : REASON_NO_BINDING;
	}
	struct flow4 *f = entry_at(index, false);

	if (!f)
		return REASON_NO_BINDING;
	ours = f->key.state == ENTRY_LIVE && (f->key.kind == KIND_BINDING || made_with_binding(&f->meta));
	b->inside.saddr.d[0] = f->key.saddr;
	b->inside.sport = f->key.sport;
	b->rule = f->key.kind == KIND_BINDING ? f->key.zone : f->meta.owner;
	return ours ? REASON_NONE : REASON_NO_BINDING;
}

static __always_inline void towards_inside(const struct packet *p, struct plan *plan, const struct bind *b,
					   const struct nat_rule *rule)
{
	plan->to = p->tuple;
	plan->family = b->family;
	plan->to.daddr = b->inside.saddr;
	plan->to.dport = b->inside.sport;
	plan->to.l4_proto = proto_in(p->tuple.l4_proto, b->family);
	if (p->tuple.l4_proto == IPPROTO_ICMP || p->tuple.l4_proto == IPPROTO_ICMPV6)
		plan->to.sport = b->inside.sport;
	if (p->family != b->family)
		embed(&plan->to.saddr, &rule->prefix, rule->prefix_len, p->tuple.saddr.w[0]);
	plan->gateway = plan->to.daddr;
	plan->gateway_family = b->family;
}

// Directs a nat64 packet to the IPv6 server of a port-forward, if its destination is one.
// plan->to.daddr is the IPv4 address. Returns 1 if a port-forward applies.
__noinline int forward64(const struct packet *p, struct plan *plan)
{
	struct service *s;
	struct backend *b;
	__u32 id;

	if (!p || !plan)
		return 0;
	id = forward64_of(p, &plan->to.daddr);
	s = bpf_map_lookup_elem(&services, &id);
	if (!s)
		return 0;
	id = slot_at(s->slots >> 32);
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b)
		return 0;
	plan->to.daddr = b->addr;
	plan->to.dport = server_port(s, b, p->tuple.dport);
	return 1;
}

// Directs a nat64 packet to the IPv6 host whose binding has its IPv4 destination, plan->to.daddr.
// work.bound then describes the binding. Returns REASON_NOT_OURS if no inside host owns the
// destination. "number" is the number of the pool address, or NO_ENTRY.
__noinline enum reason nat64_target(const struct packet *p, struct plan *plan, __u32 number)
{
	struct work *w = the_work();
	struct pool_addr *address;
	__u32 slot, *owner;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	address = bpf_map_lookup_elem(&pools, &number);
	if (!address || (address->local && !bound64(p, number))) // an unbound port of an address of this host
		return REASON_NOT_OURS;
	slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport);
	owner = owner_at(slot);
	if (!owner || !(*owner & OWNER_6))
		return REASON_NO_BINDING;
	if (bound_to(*owner, &plan->to.daddr, p->tuple.dport, &w->bound) != REASON_NONE)
		return REASON_NO_BINDING;
	plan->to.daddr = w->bound.inside.saddr;
	plan->to.dport = w->bound.inside.sport;
	return REASON_NONE;
}

// Handles a nat64 packet from one inside host to the outside endpoint of another one: both see the
// other behind the prefix (RFC 6146 §3.8). plan->to.daddr is the IPv4 address. "number" is the
// number of the pool address, or NO_ENTRY. Returns REASON_NOT_OURS if no inside host owns the
// destination.
__noinline enum reason nat64_hairpin(const struct packet *p, struct plan *plan, __u32 id, __u32 number)
{
	struct nat_rule *rule, *target;
	struct work *w = the_work();
	bool forwarded;
	enum reason reason;
	struct tuple *seen; // tuple of the packet as seen outside
	__u32 zone;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	if (p->tuple.l4_proto == IPPROTO_TCP && (p->tcp_flags & TCP_RST))
		return REASON_NO_FLOW;
	seen = &w->source.inside;
	*seen = plan->to;
	forwarded = have_forwards && forward64(p, plan);
	reason = forwarded ? REASON_NONE : nat64_target(p, plan, number);
	if (reason != REASON_NONE)
		return reason;
	zone = w->bound.rule;
	plan->to.l4_proto = p->tuple.l4_proto;
	plan->owner = id;
	plan->owner_nat = OWNER_SOURCE;
	plan->family = FAMILY_6;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = FAMILY_6;
	__builtin_memset(&w->bound, 0, sizeof(w->bound));
	w->bound.inside = p->tuple;
	w->bound.family = FAMILY_6;
	w->bound.outside_family = FAMILY_4;
	w->bound.rule = id;
	w->bound.now = p->now;
	if (dry_run)
		return REASON_NEW_FLOW;
	reason = bind(&w->bound);
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		return reason;
	reason = permit(seen, &w->bound);
	if (reason == REASON_NONE && !forwarded) {
		target = bpf_map_lookup_elem(&nat_rules, &zone);
		if (!target ||
		    (!admitted(&w->bound.outside, seen, target, &w->key, false) && !mapped(&plan->to, zone, FAMILY_6)))
			reason = REASON_FILTERED;
	}
	if (reason != REASON_NONE) {
		binding_put(w->bound.index, true, p->now);
		return reason;
	}
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (rule)
		embed(&plan->to.saddr, &rule->prefix, rule->prefix_len, w->bound.outside.w[0]);
	plan->to.sport = w->bound.port;
	if (forwarded && plan->to.l4_proto == IPPROTO_ICMPV6)
		plan->to.dport = w->bound.port; // the identifier serves as both ports
	reason = nat_flow(p, plan, &w->bound);
	if (reason != REASON_NEW_FLOW)
		binding_put(w->bound.index, true, p->now);
	return reason;
}

// Writes the sender of a hairpin packet from IPv4 as its IPv6 receiver sees it: behind the prefix
// of the receiver's rule. A separate function, because the stack frame of nat_in has no room (Linux
// 6.1).
__noinline int show_sender(struct plan *plan)
{
	struct work *w = the_work();
	struct nat_rule *rule;
	__u32 id;

	if (!plan || !w)
		return 0;
	id = plan->owner;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (rule)
		embed(&plan->to.saddr, &rule->prefix, rule->prefix_len, w->source.outside.w[0]);
	return 0;
}

// Translates a packet without a flow to a pool address, through the binding of its outside
// endpoint. "number" is the number of the pool address.
__noinline enum reason nat_in(const struct packet *p, struct plan *plan, __u32 number)
{
	struct bind *bound, *source;
	struct work *w = the_work();
	__u32 slot, *owner, id;
	struct nat_rule *rule;
	enum reason reason;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport);
	bound = &w->bound;
	source = &w->source;
	__builtin_memset(bound, 0, sizeof(*bound));
	__builtin_memset(source, 0, sizeof(*source));
	owner = owner_at(slot);
	if (!owner || !*owner || (p->flags & PACKET_NO_FLOW))
		return REASON_NO_BINDING;
	if (p->tuple.l4_proto == IPPROTO_TCP && (p->tcp_flags & TCP_RST))
		return REASON_NO_FLOW;
	bound->inside.l4_proto = p->tuple.l4_proto;
	bound->outside_family = p->family;
	bound->now = p->now;
	reason = bound_to(*owner, &p->tuple.daddr, p->tuple.dport, bound);
	if (reason != REASON_NONE)
		return reason;
	id = bound->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	plan->owner = id;
	plan->owner_nat = OWNER_SOURCE;
	towards_inside(p, plan, bound, rule);
	reason = hairpin_source(p, plan, source, id);
	if (reason == REASON_FLOW) { // the flow belongs to the sender's binding
		bound = source;
		reason = permit(&p->tuple, bound); // the receiver's filter then admits the sender
	}
	if (reason == REASON_NONE &&
	    !admitted(bound == source ? &plan->to.saddr : &p->tuple.saddr, &p->tuple, rule, &w->key,
		      p->family == FAMILY_6) &&
	    !mapped(&plan->to, w->bound.rule, plan->family))
		reason = REASON_FILTERED;
	if (reason == REASON_NONE && dry_run)
		return REASON_NEW_FLOW;
	if (reason == REASON_NONE && bound != source) {
		bound->index = binding_join(bound->index, bound->family == FAMILY_6, p->now);
		if (bound->index == NO_ENTRY)
			return REASON_NO_BINDING;
	}
	if (reason == REASON_NONE && bound == source && plan->family != p->family)
		show_sender(plan);
	if (reason == REASON_NONE)
		reason = nat_flow(p, plan, bound);
	else if (bound != source)
		return reason;
	if (reason != REASON_NEW_FLOW)
		binding_put(bound->index, bound->family == FAMILY_6, p->now);
	return reason;
}

#endif
