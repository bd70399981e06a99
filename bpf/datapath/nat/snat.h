// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Source NAT rules (snat, masquerade, nat64): finds the rule of a packet and makes its flow.
#ifndef SLUICE_SNAT_H
#define SLUICE_SNAT_H

#include "nat/mapping.h"
#include "service/lb.h"

// Fills work.new_flow for a NAT rule and charges its quotas. Returns REASON_NONE if the flow may be
// made. The flow of a protocol without ports has no binding. The quota belongs to the client of
// bound->inside.
__noinline enum reason new_nat_flow(const struct packet *p, struct plan *plan, const struct bind *bound)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct nat_rule *rule;
	struct new_flow *b;
	enum reason reason;
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
	reason = client_charge(&w->who, CLIENT_FLOW, rule->max_flows);
	if (reason == REASON_NONE)
		b->flags |= ENTRY_CLIENT;
	else if (b->flags & ENTRY_HALF_OPEN)
		half_open_give(c);
	return reason;
}

// Makes the flow of a NAT rule. The flow itself holds a binding that has no entry. The function
// calls the steps one by one, because every step has a deep call chain (Linux 6.1).
__noinline enum reason nat_flow(const struct packet *p, struct plan *plan, struct bind *bound)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct nat_rule *rule;
	enum reason reason;
	__u32 id;

	if (!p || !plan || !bound || !c || !w)
		return REASON_INTERNAL;
	reason = new_nat_flow(p, plan, bound);
	if (reason != REASON_NONE)
		return reason;
	reason = make_flow(&w->new_flow);
	if (reason == REASON_NEW_FLOW && bound->index == NO_ENTRY) {
		bound->index = w->new_flow.index; // the flow owns the port from here
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

// Fills the key of a permit: a remote address to which the owner of a binding has sent
// (address-dependent filtering). entry_meta.twin of a permit is the binding's port, as an index of
// port_owners.
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

__noinline enum reason permit(const struct tuple *to, const struct bind *bound)
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

// Returns the service that implements a port-forward from an IPv4 address to an IPv6 host, or
// NO_ENTRY. Other IPv6 hosts may use it too.
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

// Reports whether an IPv6 host owns the outside endpoint with the packet's destination port.
static __always_inline bool bound64(const struct packet *p, __u32 number)
{
	__u32 slot = port_slot(number, p->tuple.l4_proto, p->tuple.dport), *owner;

	owner = owner_at(slot);
	return owner && *owner & OWNER_6;
}

// Reports whether a nat64 rule translates a packet to its prefix. The egress interface of the IPv4
// destination must match the rule. Endpoints of pools are exempt, because their packets return to
// the inside (RFC 6146 §3.8). An address of this host is exempt only where an IPv6 host owns the
// port. A more specific route than the prefix excludes the packet from translation (RFC 7915 §5.6).
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

// Reports whether the part "id" of a masquerade rule applies to a packet. The next hop of the
// latest lookup decides for IPv4, the destination for IPv6.
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
	if (fib->family != AF_INET) // an IPv6 next hop is in no IPv4 network
		return 0;
	hop.w[0] = fib->ipv4_dst;
	return member_of(&hop, LIST_TOWARDS | group << 16, false) == id + 1;
}

// Reports whether a rule translates a packet from one of its sources. A global function, so that
// the verifier checks it once and not for each rule.
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

// Reports whether the exceptions of a rule contain the packet's destination. For nat64, they may
// also contain the embedded IPv4 address.
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

#define EXCEPTED MAX_NAT_RULES // not the id of a rule

// Returns the first rule that translates the packet's source, or NO_ENTRY. Returns EXCEPTED if that
// rule excepts the destination.
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

// Reports whether a rule would translate the source of a packet that may open a flow.
static __always_inline bool translates(const struct packet *p)
{
	return nat_rule_of(p) < EXCEPTED;
}

// Touches the memory that a new port needs: its owner and the index buckets of the replies.
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

// Makes a flow and, if needed, its binding. Returns REASON_FLOW if another CPU was faster. If
// bound->alone is still set then, another CPU has just made the binding.
static __always_inline int nat_open(const struct packet *p, struct plan *plan, struct bind *bound)
{
	enum reason reason;
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
		plan->to.dport = bound->port; // the identifier serves as both ports
	if (fresh)
		touch_outside(plan, bound->slot);
	reason = nat_flow(p, plan, bound);
	if (reason == REASON_NEW_FLOW) {
		permit(&plan->to, bound); // if the table is full, only the remote endpoint itself may reply
		return reason;
	}
	if (!fresh)
		binding_put(bound->index, bound->family == FAMILY_6, p->now);
	else if (bound->index == NO_ENTRY)
		bind_cancel(bound);
	return reason;
}

// Translates a packet from inside to outside by a rule. plan->to.daddr, dport, l4_proto and
// plan->family are set.
__noinline enum reason nat_out(const struct packet *p, struct plan *plan, __u32 id)
{
	struct work *w = the_work();
	struct nat_rule *rule;
	struct bind *bound;
	enum reason reason;

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
		return REASON_CLASH; // another CPU won twice; the retransmission will pass
	if (reason != REASON_FLOW && reason != REASON_NEW_FLOW)
		refuse(plan, reason, rule->flags & NAT_PROHIBITED ? ANSWER_PROHIBITED : ANSWER_UNREACHABLE_HOST);
	return reason;
}

// Translates a packet of a protocol without ports by a rule; see portless.h.
__noinline enum reason nat_portless(const struct packet *p, struct plan *plan, __u32 id)
{
	struct nat_rule *rule = bpf_map_lookup_elem(&nat_rules, &id);
	struct work *w = the_work();
	struct bind *bound;
	enum reason reason;

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
