// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Rules that translate sources (snat, masquerade, nat64), in both directions.
#ifndef SLUICE_SNAT_H
#define SLUICE_SNAT_H

#include "lb.h"
#include "mapping.h"

// What the flow of a NAT rule is to be, with its share of the quotas. REASON_NONE: it may be
// made; of a protocol without ports it has no binding. The client of bound->inside pays for it.
__noinline int new_nat_flow(const struct packet *p, struct plan *plan, const struct bind *bound)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct nat_rule *rule;
	struct new_flow *b;
	int reason;
	__u32 id;

	if (!p || !plan || !bound || !c || !w)
		return REASON_INTERNAL;
	id = bound->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	if (p->tuple.l4_proto == IPPROTO_TCP && !half_open_take(c))
		return REASON_HALF_OPEN_FULL;
	plan->owner = id;
	plan->owner_nat = OWNER_SOURCE;
	if (rule->flags & NAT_MSS_CLAMP && p->tcp_flags & TCP_SYN)
		plan->edits |= EDIT_MSS;
	b = new_flow_of(w, p, plan);
	b->ref = bound->index | (bound->family == FAMILY_4 && plan->family == FAMILY_6 ? REF_4 : 0);
	b->backend = (bound->slot >> 16) / PORT_CLASSES;
	b->flags = ENTRY_NAT | (portless(p) ? 0 : ENTRY_BOUND) |
		   (p->tuple.l4_proto == IPPROTO_TCP ? ENTRY_HALF_OPEN : 0);
	if (bound->index == NO_ENTRY) {
		b->flags |= ENTRY_PORT;
		b->edited = (bound->client_seen ? HEARD_CHARGED : 0) |
			    (rule->flags & NAT_MAP_REMOTE ? HEARD_REMOTE : 0);
	}
	if (!rule->max_flows)
		return REASON_NONE;
	client_of(&w->who, &bound->inside.saddr, CLIENT_NAT | id, bound->family == FAMILY_6);
	reason = client_flow_get(&w->who, rule->max_flows);
	if (reason == REASON_NONE)
		b->flags |= ENTRY_CLIENT;
	else if (b->flags & ENTRY_HALF_OPEN)
		half_open_give(c);
	return reason;
}

// Makes the flow of a NAT rule, which holds a binding that has no entry. In steps, as deep
// calls follow each of them (Linux 6.1).
__noinline int nat_flow(const struct packet *p, struct plan *plan, struct bind *bound)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct nat_rule *rule;
	int reason;
	__u32 id;

	if (!p || !plan || !bound || !c || !w)
		return REASON_INTERNAL;
	reason = new_nat_flow(p, plan, bound);
	if (reason != REASON_NONE)
		return reason;
	reason = make_flow(&w->new_flow);
	if (reason == REASON_NEW_FLOW && bound->index == NO_ENTRY) {
		bound->index = w->new_flow.index; // from now on the port is the flow's
		reason = binding_hold(bound, w->new_flow.index);
	}
	plan->entry = w->new_flow.index;
	if (reason == REASON_NEW_FLOW) {
		id = bound->rule;
		rule = bpf_map_lookup_elem(&nat_rules, &id);
		if (rule)
			__sync_fetch_and_add(&rule->flows, 1);
		return reason;
	}
	if (w->new_flow.flags & ENTRY_CLIENT)
		client_flow_put(&w->who);
	if (w->new_flow.flags & ENTRY_HALF_OPEN)
		half_open_give(c);
	return reason;
}

// Remote address that a binding's owner has sent to (address-dependent
// filtering). Its twin is the binding's port, as a key of port_owners.
static __always_inline void permit_key(struct tuple *key, const union addr *remote, const union addr *outside,
				       __be16 port, __u8 l4_proto)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->saddr = *remote;
	key->daddr = *outside;
	key->dport = port;
	key->l4_proto = l4_proto;
	key->kind = KIND_PERMIT;
	key->state = ENTRY_LIVE;
}

static __always_inline bool permit_fill(__u32 index, const struct tuple *key, const struct bind *bound, const bool v6)
{
	void *e = entry_at(index, v6);
	struct tuple none = {};
	struct entry_meta *m;

	if (!e)
		return false;
	fill(e, key, &none, v6);
	m = meta_of(e, v6);
	m->twin = bound->slot;
	m->seen = bound->now;
	m->flags = ENTRY_NAT;
	m->heard = 0;
	m->hop = 0;
	m->hop_gen = 0;
	*ref_of(m) = 0;
	publish(e, v6);
	return true;
}

__noinline int permit(const struct tuple *to, const struct bind *bound)
{
	struct work *w = the_work();
	struct nat_rule *rule;
	struct tuple *key;
	__u32 index, id;
	bool v6;

	if (!to || !bound || !w)
		return REASON_INTERNAL;
	id = bound->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule || rule->filtering != FILTERING_ADDRESS)
		return REASON_NONE;
	key = &w->key;
	v6 = bound->outside_family == FAMILY_6;
	permit_key(key, &to->daddr, &bound->outside, bound->port, to->l4_proto);
	index = find(key, v6);
	if (index != NO_ENTRY) {
		struct entry_meta *m = meta_at(index, v6);

		if (m)
			m->seen = bound->now;
		return REASON_NONE;
	}
	index = claim(key, v6);
	if (index == NO_ENTRY)
		return REASON_TABLE_FULL;
	if (v6)
		permit_fill(index, key, bound, true);
	else
		permit_fill(index, key, bound, false);
	return REASON_NONE;
}

// The service that stands for a port-forward from an IPv4 address to an IPv6 host, by which other
// IPv6 hosts may reach it; or NO_ENTRY.
__noinline __u32 forward64_of(const struct packet *p, const union addr *four)
{
	struct listener_key key = {};
	struct service *s;
	__u32 id;

	if (!p || !four)
		return NO_ENTRY;
	key.l4_proto = proto_in(p->tuple.l4_proto, FAMILY_4);
	key.family = FAMILY_4;
	key.port = p->tuple.dport;
	__builtin_memcpy(key.addr, four, sizeof(key.addr));
	id = listening(&key, p->ifindex);
	s = bpf_map_lookup_elem(&services, &id);
	return s && s->nat_rule != NO_RULE && s->flags & SERVICE_PORT_FORWARD ? id : NO_ENTRY;
}

// Whether the outside endpoint with a packet's port is an IPv6 host's.
static __always_inline bool bound64(const struct packet *p, __u32 number)
{
	__u32 slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport), *owner;

	owner = bpf_map_lookup_elem(&port_owners, &slot);
	return owner && *owner & OWNER_6;
}

// Whether a nat64 rule translates a packet for its prefix: where the packet leaves is asked for its
// IPv4 destination, but for endpoints of pools, which are turned round (RFC 6146 §3.8), and of this
// host's own addresses those that an IPv6 host has; a more specific route than the prefix leads to
// it untranslated (RFC 7915 §5.6).
static __always_inline bool takes64(const struct packet *p, const struct nat_rule *r)
{
	__u64 route = member_of(&p->tuple.daddr, LIST_ROUTED, true);
	struct pool_addr *address;
	union addr four = {};
	__u32 number;

	if ((route & 0xff) > r->prefix_len)
		return false;
	if (includes(r->out, p->cross_out))
		return true;
	four.w[0] = extract(&p->tuple.daddr, r->prefix_len);
	address = pool_of(&four, &number);
	if (address && (!address->local || bound64(p, number)))
		return true;
	return have_forwards && forward64_of(p, &four) != NO_ENTRY;
}

// Whether the part of a masquerade rule that is for a packet is that of an id: for IPv4 the next
// hop decides, as it was just looked up, and for IPv6 the destination.
__noinline int part_for(const struct packet *p, __u32 id, __u32 group)
{
	struct work *w = the_work();
	struct bpf_fib_lookup *fib;
	union addr hop = {};

	if (!p || !w)
		return 0;
	if (p->family == FAMILY_6)
		return member_of(&p->tuple.daddr, LIST_TOWARDS | group << 16, true) == id + 1;
	fib = (void *)w->fib;
	if (fib->family != AF_INET) // an IPv6 next hop is in no network of IPv4
		return 0;
	hop.w[0] = fib->ipv4_dst;
	return member_of(&hop, LIST_TOWARDS | group << 16, false) == id + 1;
}

// Whether a rule translates a packet, which is of a source of the rule's. Verified on its
// own, not for each of the rules.
__noinline int takes(const struct packet *p, __u32 id)
{
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &id);

	if (!p || !r || !r->active || !includes(r->in, p->ifindex))
		return 0;
	if (r->prefix_len)
		return in_prefix(&p->tuple.daddr, &r->prefix, r->prefix_len) && takes64(p, r);
	if (p->out == NO_ENTRY || !includes(r->out, p->out))
		return 0;
	return !r->group || part_for(p, id, r->group - 1);
}

// Whether a rule leaves a packet's destination alone; of nat64 also the IPv4 one in it.
__noinline int excepted(const struct packet *p, __u32 id)
{
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &id);
	union addr four = {};

	if (!p || !r)
		return 0;
	if (member_of(&p->tuple.daddr, LIST_EXCEPT, p->family == FAMILY_6) >> (id & 63) & 1)
		return 1;
	if (!r->prefix_len)
		return 0;
	four.w[0] = extract(&p->tuple.daddr, r->prefix_len);
	return member_of(&four, LIST_EXCEPT, false) >> (id & 63) & 1;
}

#define EXCEPTED MAX_NAT_RULES // no rule's id

// The first rule that translates a packet's source, or NO_ENTRY; EXCEPTED: it would, but leaves
// the destination alone.
__noinline __u32 nat_rule_of(const struct packet *p)
{
	struct nat_order *order = order_now();
	__u64 rules;

	if (!p || !order)
		return NO_ENTRY;
	rules = member_of(&p->tuple.saddr, LIST_SOURCES, p->family == FAMILY_6);
	for (int i = 0; i < MAX_NAT_RULES && rules && order->rules[i]; i++) {
		__u32 id = order->rules[i] - 1;

		if (rules >> (id & 63) & 1 && takes(p, id))
			return excepted(p, id) ? EXCEPTED : id;
	}
	return NO_ENTRY;
}

// Whether a rule would translate a packet's source, if it could open a flow.
static __always_inline bool translates(const struct packet *p)
{
	return nat_rule_of(p) < EXCEPTED;
}

// Touches what a new port leads to: its owner's place, and the answers'.
__noinline int touch_outside(const struct plan *plan, __u32 slot)
{
	struct tuple back = {};

	if (!plan)
		return 0;
	reverse_tuple(&back, &plan->to);
	if (plan->family == FAMILY_6)
		touch_place(&back, true);
	else
		touch_place(&back, false);
	touch_owner(slot);
	return 1;
}

// The flow of a binding, and the binding if there is none. REASON_FLOW: another CPU was
// faster; where bound->alone still stands its binding is another, which is there now.
static __always_inline int nat_open(const struct packet *p, struct plan *plan, struct bind *bound)
{
	int reason;
	bool fresh;

	bound->client_seen = 0;
	reason = bind(bound);
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		return reason;
	fresh = bound->index == NO_ENTRY;
	bound->alone = fresh;
	plan->to.saddr = bound->outside;
	plan->to.sport = bound->port;
	if (plan->to.l4_proto == IPPROTO_ICMP || plan->to.l4_proto == IPPROTO_ICMPV6)
		plan->to.dport = bound->port; // the identifier stands for both
	if (fresh)
		touch_outside(plan, bound->slot);
	reason = nat_flow(p, plan, bound);
	if (reason == REASON_NEW_FLOW) {
		permit(&plan->to, bound); // a full table: then only the remote endpoint itself may answer
		return reason;
	}
	if (!fresh)
		binding_put(bound->index, bound->family == FAMILY_6, p->now);
	else if (bound->index == NO_ENTRY)
		bind_cancel(bound);
	return reason;
}

// From inside to outside through a rule. plan->to.daddr, dport, l4_proto and
// plan->family are set.
__noinline int nat_out(const struct packet *p, struct plan *plan, __u32 id)
{
	struct work *w = the_work();
	struct nat_rule *rule;
	struct bind *bound;
	int reason;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	bound = &w->bound;
	__builtin_memset(bound, 0, sizeof(*bound));
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	plan->owner = id;
	plan->owner_nat = OWNER_SOURCE;
	if (p->tuple.l4_proto == IPPROTO_TCP && (p->tcp_flags & TCP_RST))
		return REASON_NO_FLOW;
	bound->inside = p->tuple;
	bound->family = p->family;
	bound->outside_family = plan->family;
	bound->rule = id;
	bound->now = p->now;
	if (dry_run) {
		bind_foresee(bound);
		plan->to.saddr = bound->outside;
		plan->to.sport = bound->port;
		return REASON_NEW_FLOW;
	}
	bound->alone = 1;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 2; i++) {
		reason = nat_open(p, plan, bound);
		if (reason != REASON_FLOW || !bound->alone)
			break;
	}
	if (reason == REASON_FLOW && bound->alone)
		return REASON_CLASH; // twice another CPU was as fast: what is sent again will pass
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		refuse(plan, reason, rule->flags & NAT_PROHIBITED ? ANSWER_PROHIBITED : ANSWER_UNREACHABLE_HOST);
	return reason;
}

// The same of a protocol without ports: see portless.h.
__noinline int nat_portless(const struct packet *p, struct plan *plan, __u32 id)
{
	struct nat_rule *rule = bpf_map_lookup_elem(&nat_rules, &id);
	struct work *w = the_work();
	struct bind *bound;
	int reason;

	if (!p || !plan || !w || !rule)
		return REASON_INTERNAL;
	bound = &w->bound;
	__builtin_memset(bound, 0, sizeof(*bound));
	bound->inside = p->tuple;
	bound->family = p->family;
	bound->outside_family = plan->family;
	bound->rule = id;
	bound->now = p->now;
	plan->owner = id;
	plan->owner_nat = OWNER_SOURCE;
	plan->flags |= PLAN_NO_L4;
	reason = take_address(plan, bound);
	if (reason == REASON_NONE)
		reason = dry_run ? REASON_NEW_FLOW : nat_flow(p, plan, bound);
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		refuse(plan, reason, rule->flags & NAT_PROHIBITED ? ANSWER_PROHIBITED : ANSWER_UNREACHABLE_HOST);
	return reason;
}

// Whether the filter of a rule lets a remote endpoint send to one of its bindings. from:
// that endpoint as it is seen outside; to: whose daddr and dport are the binding's.
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

// Fills b with the inside of the binding of an outside endpoint. No reference is
// taken: index is that of the entry that leads to the binding.
__noinline int bound_to(__u32 owner, const union addr *outside, __be16 port, struct bind *b)
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

// Points a packet of nat64 that is for a port-forward to another IPv6 host at that one.
// plan->to.daddr is the IPv4 address.
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

#define FORWARDED REASON_COUNT

// Points a packet of nat64 at the IPv6 host that has its IPv4 destination, plan->to.daddr, outside:
// FORWARDED by a port-forward, or REASON_NONE by the binding that work.bound is then of.
// REASON_NOT_OURS: it is for nobody inside. number: of the pool address, or NO_ENTRY.
__noinline int nat64_target(const struct packet *p, struct plan *plan, __u32 number)
{
	struct work *w = the_work();
	struct pool_addr *address;
	__u32 slot, *owner;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	if (have_forwards && forward64(p, plan))
		return FORWARDED;
	address = bpf_map_lookup_elem(&pools, &number);
	if (!address || (address->local && !bound64(p, number))) // for this host itself
		return REASON_NOT_OURS;
	slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport);
	owner = bpf_map_lookup_elem(&port_owners, &slot);
	if (!owner || !(*owner & OWNER_6))
		return REASON_NO_BINDING;
	if (bound_to(*owner, &plan->to.daddr, p->tuple.dport, &w->bound) != REASON_NONE)
		return REASON_NO_BINDING;
	plan->to.daddr = w->bound.inside.saddr;
	plan->to.dport = w->bound.inside.sport;
	return REASON_NONE;
}

// nat64 to an endpoint that an IPv6 host has outside: from one inside host to another, both seen
// behind the prefix (RFC 6146 §3.8). plan->to.daddr is the IPv4 address, number that of the
// pool address or NO_ENTRY. REASON_NOT_OURS: it is for nobody inside.
__noinline int nat64_hairpin(const struct packet *p, struct plan *plan, __u32 id, __u32 number)
{
	struct nat_rule *rule, *target;
	struct work *w = the_work();
	int reason, found;
	struct tuple *seen; // the packet as it would be outside
	__u32 zone;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	if (p->tuple.l4_proto == IPPROTO_TCP && (p->tcp_flags & TCP_RST))
		return REASON_NO_FLOW;
	seen = &w->source.inside;
	*seen = plan->to;
	found = nat64_target(p, plan, number);
	if (found != FORWARDED && found != REASON_NONE)
		return found;
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
	if (reason == REASON_NONE && found != FORWARDED) {
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
	if (found == FORWARDED && plan->to.l4_proto == IPPROTO_ICMPV6)
		plan->to.dport = w->bound.port; // the identifier stands for both
	reason = nat_flow(p, plan, &w->bound);
	if (reason != REASON_NEW_FLOW)
		binding_put(w->bound.index, true, p->now);
	return reason;
}

// The sender of a hairpin from IPv4 as an IPv6 host sees it: behind the prefix of that
// host's rule. Not in the frame of nat_in, which has no room (Linux 6.1).
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

// Packet to a pool address, without a flow: through the binding of its outside
// endpoint. number: of the pool address.
__noinline int nat_in(const struct packet *p, struct plan *plan, __u32 number)
{
	struct bind *bound, *source;
	struct work *w = the_work();
	__u32 slot, *owner, id;
	struct nat_rule *rule;
	int reason;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport);
	bound = &w->bound;
	source = &w->source;
	__builtin_memset(bound, 0, sizeof(*bound));
	__builtin_memset(source, 0, sizeof(*source));
	owner = bpf_map_lookup_elem(&port_owners, &slot);
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
		reason = permit(&p->tuple, bound); // it may be answered
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
