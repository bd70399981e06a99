// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Bindings: the pool address and port of each inside endpoint.
#ifndef SLUICE_NAT_H
#define SLUICE_NAT_H

#include "nat/pool.h"

static __always_inline bool has_client(const struct nat_rule *rule)
{
	if (rule->max_ports)
		return true;
	return !(rule->flags & NAT_DETERMINISTIC) && (rule->block || rule->pool_len > 1 || rule->pool6_len > 1);
}

// Allocates an outside endpoint for b without publishing it.
static __always_inline enum reason bind_allocate(struct bind *b, const struct nat_rule *rule, struct port_request *r,
						 struct client_key *who)
{
	struct pool_addr *address;
	bool charged = has_client(rule);
	enum reason reason;
	__u32 number;

	port_range(rule, b, r);
	if (charged) {
		struct client *client;

		who->addr = b->inside.saddr;
		who->owner = CLIENT_NAT | b->rule;
		reason = client_charge(who, CLIENT_PORT, rule->max_ports);
		if (reason != REASON_NONE)
			return reason == REASON_CLIENT_FLOWS ? REASON_CLIENT_PORTS : reason;
		b->client_seen = 1;
		client = bpf_map_lookup_elem(&clients, who);
		if (!client || !part(client, b->rule)) {
			client_port_put(&b->inside.saddr, b->rule);
			return REASON_NO_PORT;
		}
	}
	if (have_blocks && rule->flags & NAT_DETERMINISTIC)
		reason = take_computed(b, r);
	else if (have_blocks && rule->block)
		reason = take_blocked(b, r);
	else
		reason = take_paired(b, r);
	number = r->map / PORT_CLASSES;
	address = bpf_map_lookup_elem(&pools, &number);
	if (reason != REASON_NONE || !address) {
		if (charged)
			client_port_put(&b->inside.saddr, b->rule);
		return reason != REASON_NONE ? reason : REASON_INTERNAL;
	}
	b->outside = address->addr;
	b->port = bpf_htons(r->port);
	return REASON_NONE;
}

// Frees the port of a binding that the caller does not make after all.
static __always_inline void bind_cancel(const struct bind *b)
{
	give_port(b->slot >> 16, b->slot & 0xffff);
	if (b->client_seen)
		client_port_put(&b->inside.saddr, b->rule);
}

// Reports whether the allocated endpoint is the one that the client requires.
static __always_inline bool as_wanted(const struct bind *b, const struct nat_rule *rule, const struct port_request *r)
{
	__u32 first = b->outside_family == FAMILY_6 ? rule->pool6 : rule->pool;

	return (!b->want || r->port == b->want) &&
	       (!b->place || r->map / PORT_CLASSES == pool_number(first + b->place - 1));
}

// Fills b with the outside endpoint for "sluice explain", which makes no binding. It is the
// endpoint of the existing binding, or the only address of the pool. Zero means that the choice is
// open until a packet arrives.
__noinline int bind_foresee(struct bind *b)
{
	struct pool_addr *address = 0;
	struct work *w = the_work();
	struct nat_rule *rule;
	__u32 index, number, len;

	if (!b || !w)
		return 0;
	number = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &number);
	if (!rule)
		return 0;
	bind_key(&w->key, b, rule);
	index = find_binding(&w->key, NO_ENTRY, b->family == FAMILY_6);
	if (index != NO_ENTRY && bind_outside(b, index))
		return 0;
	number = pool_number(b->outside_family == FAMILY_6 ? rule->pool6 : rule->pool);
	len = b->outside_family == FAMILY_6 ? rule->pool6_len : rule->pool_len;
	if (len == 1)
		address = bpf_map_lookup_elem(&pools, &number);
	if (address)
		b->outside = address->addr;
	return 0;
}

// Returns another binding of the same endpoint that has precedence over a new one, or NO_ENTRY. Two
// CPUs may publish bindings of one endpoint at the same time. first_flow does the same for
// flows.
__noinline __u32 first_binding(const struct tuple *key, __u32 index, __u32 v6)
{
	__u32 other = NO_ENTRY, first;

	if (!key)
		return NO_ENTRY;
#pragma clang loop unroll(disable)
	for (int i = 0; i < RIVAL_LOOKS; i++) {
		other = find_binding(key, index, v6);
		if (other == NO_ENTRY)
			break;
		first = find_binding(key, NO_ENTRY, v6);
		if (first != index && first != NO_ENTRY)
			return first;
	}
	return other;
}

// Makes the entry of a new binding. Returns REASON_NEW_FLOW, REASON_FLOW if another CPU was faster,
// or REASON_TABLE_FULL.
static __always_inline enum reason bind_entry(struct bind *b, const struct tuple *key)
{
	__u32 index, other, flags;
	bool v6;

	v6 = b->family == FAMILY_6;
	flags = (b->client_seen ? ENTRY_CLIENT : 0) | (b->family != b->outside_family ? ENTRY_CROSS : 0);
	index = claim(key, v6);
	if (index == NO_ENTRY) {
		bind_cancel(b);
		return REASON_TABLE_FULL;
	}
	if (v6) {
		struct flow6 *f = entry_at(index, true);

		if (!f)
			return REASON_INTERNAL;
		binding_fill(f, key, b->slot, flags, 1, b->now, true);
		f->to_saddr = b->outside;
		f->to_sport = b->port;
	} else {
		struct flow4 *f = entry_at(index, false);

		if (!f)
			return REASON_INTERNAL;
		binding_fill(f, key, b->slot, flags, 1, b->now, false);
		f->to_saddr = b->outside.w[0];
		f->to_sport = b->port;
	}
	set_owner(b->slot, owner_of(index, v6));
	publish_index(index, v6);
	b->index = index;
	other = first_binding(key, index, v6);
	if (other == NO_ENTRY || bind_existing(b, other) != REASON_FLOW) {
		b->index = index;
		return REASON_NEW_FLOW;
	}
	binding_put(index, v6, b->now);
	return REASON_FLOW;
}

// Finds or makes the binding of an inside endpoint. Returns REASON_FLOW or REASON_NEW_FLOW with one
// reference taken, otherwise the cause of the failure. With b->alone, a new binding is only a port
// without an entry, and the flow that the caller makes holds it.
__noinline enum reason bind(struct bind *b)
{
	struct work *w = the_work();
	struct port_request *r;
	struct nat_rule *rule;
	__u32 index, id;
	enum reason reason;

	if (!b || !w)
		return REASON_INTERNAL;
	if (!bind_may(b))
		return REASON_LIMIT_CLIENT_RATE;
	id = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	r = &w->request;
	__builtin_memset(r, 0, sizeof(*r));
	__builtin_memset(&w->who, 0, sizeof(w->who));
	bind_key(&w->key, b, rule);
	w->guess.rule = id;
	if (b->family == FAMILY_6)
		touch_entries(true);
	else
		touch_entries(false);
	index = find_binding(&w->key, NO_ENTRY, b->family == FAMILY_6);
	if (index != NO_ENTRY && bind_existing(b, index) == REASON_FLOW)
		return REASON_FLOW;
	reason = bind_allocate(b, rule, r, &w->who);
	if (reason != REASON_NONE)
		return reason;
	b->slot = r->map << 16 | r->port;
	b->index = NO_ENTRY;
	if (have_mappings && b->exact && !as_wanted(b, rule, r)) {
		bind_cancel(b);
		return REASON_NO_PORT;
	}
	return b->alone ? REASON_NEW_FLOW : bind_entry(b, &w->key);
}

// Returns the NAT rules in the order of the configuration.
static __always_inline struct nat_order *order_now(void)
{
	struct control *c = the_control();
	__u32 at = c ? c->nat_order & 1 : 0;

	return bpf_map_lookup_elem(&nat_orders, &at);
}

#endif
