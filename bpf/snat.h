// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Rules that translate sources (snat, masquerade, nat64): which one takes a packet, and its new flow.
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

	owner = owner_at(slot);
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

#endif
