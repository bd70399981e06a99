// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Rates and quotas of new flows. Packets of existing flows skip them.
#ifndef SLUICE_LIMIT_H
#define SLUICE_LIMIT_H

#include "nat/block.h"

#define CLIENT_NAT 0x10000 // in client_key.owner: the owner is a NAT rule, not a service
#define CLIENT_LOG 0x20000 // in client_rates, with a zero address: the rate of the service's connection log

// Generic cell rate algorithm (ITU-T I.371). *tat is the time from which the next event conforms.
// It is a single word, so that it needs no lock. Returns true if this event conforms.
static __always_inline bool rate_take(__u64 *tat, __u64 interval_ns, __u64 burst_ns)
{
	__u64 now = bpf_ktime_get_ns();

	for (int i = 0; i < 4; i++) {
		__u64 was = *(volatile __u64 *)tat, at = was > now ? was : now;

		if (at - now > burst_ns)
			return false;
		if (__sync_val_compare_and_swap(tat, was, at + interval_ns) == was)
			return true;
	}
	return false;
}

// Reports whether rate_take would refuse an event now.
static __always_inline bool rate_used_up(const __u64 *tat, __u64 burst_ns)
{
	__u64 now = bpf_ktime_get_ns(), was = *(volatile const __u64 *)tat;

	return was > now && was - now > burst_ns;
}

// Fills the key of the client to which a flow is charged.
static __always_inline void client_of(struct client_key *key, const union addr *a, __u32 owner, bool v6)
{
	key->addr = *a;
	key->owner = owner;
	if (v6 && !(owner & CLIENT_NAT))
		key->addr.d[1] = 0; // a /64 is one client
}

// Reports whether the rate of a key admits one more event. Returns "unknown" if the map has no room
// for the key.
__noinline int client_may(const struct client_key *key, __u64 interval_ns, __u64 burst_ns, int unknown)
{
	struct client_key who;
	struct client *c, fresh = {};

	if (!key)
		return 0;
	who = *key; // Linux 6.1 takes keys only from the stack or from maps
	c = bpf_map_lookup_elem(&client_rates, &who);
	if (!c) {
		bpf_map_update_elem(&client_rates, &who, &fresh, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&client_rates, &who);
	}
	return c ? rate_take(&c->tat, interval_ns, burst_ns) : unknown;
}

// Reports whether the client of a binding may open one more connection now. A separate function,
// because the stack frame of bind has no room (Linux 6.1).
__noinline int bind_may(struct bind *b)
{
	struct client_key who = {};
	struct nat_rule *rule;
	__u32 id;

	if (!b)
		return 0;
	id = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule || !rule->rate_ns || b->charged)
		return 1;
	b->charged = 1;
	client_of(&who, &b->inside.saddr, CLIENT_NAT | id, b->family == FAMILY_6);
	return client_may(&who, rule->rate_ns, rule->burst_ns, true);
}

// The word of flows and ports.
static __always_inline __u64 *client_held(struct client *c)
{
	return (__u64 *)&c->flows;
}

static __always_inline bool client_gone(__u64 held)
{
	return (held & CLIENT_HELD) == CLIENT_HELD;
}

// Returns the counts of a client and creates them if needed; null if the map is full. The identity
// of an entry is random.
static __always_inline struct client *client_get(const struct client_key *key)
{
	struct client *c = bpf_map_lookup_elem(&clients, key), fresh = {};

	if (c)
		return c;
	fresh.flows = bpf_get_prandom_u32() & ~CLIENT_COUNT;
	fresh.ports = bpf_get_prandom_u32() & ~CLIENT_COUNT;
	bpf_map_update_elem(&clients, key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&clients, key);
}

#define CHARGE_TRIES 16

// Charges a flow or a port (unit) to a client. The kernel reuses the memory of a deleted entry at
// once, perhaps for another client. The charge therefore applies only if the word still has the
// identity that it had while a search found the entry. "max" 0 means no limit. Returns REASON_NONE;
// REASON_CLIENT_FLOWS if the client has reached "max", of ports too; or REASON_CLIENTS_FULL.
__noinline enum reason client_charge(const struct client_key *key, __u64 unit, __u32 max)
{
	struct client_key who;
	struct client *c;
	__u64 was;

	if (!key)
		return REASON_INTERNAL;
	who = *key; // Linux 6.1 takes keys only from the stack or from maps
	if (!max || max >= CLIENT_COUNT)
		max = CLIENT_COUNT - 1;
#pragma clang loop unroll(disable)
	for (int i = 0; i < CHARGE_TRIES; i++) {
		c = client_get(&who);
		if (!c)
			return REASON_CLIENTS_FULL;
		was = *(volatile __u64 *)client_held(c);
		if (client_gone(was) || bpf_map_lookup_elem(&clients, &who) != c)
			continue;
		if (((unit == CLIENT_PORT ? was >> 32 : was) & CLIENT_COUNT) >= max)
			return REASON_CLIENT_FLOWS;
		if (__sync_val_compare_and_swap(client_held(c), was, was + unit) == was)
			return REASON_NONE;
	}
	return REASON_CLIENTS_FULL;
}

// Releases a flow or a port (unit) of a client. Returns true if the client has no others: the caller
// then deletes its entry, which no other CPU can charge any more.
static __always_inline bool client_release(struct client *c, __u64 unit)
{
	__u64 now = __sync_fetch_and_sub(client_held(c), unit) - unit;

	return !(now & CLIENT_HELD) && __sync_val_compare_and_swap(client_held(c), now, now | CLIENT_HELD) == now;
}

static __always_inline void client_put(const struct client_key *key, __u64 unit)
{
	struct client *c = bpf_map_lookup_elem(&clients, key);

	if (!c || !client_release(c, unit))
		return;
	if (have_blocks && key->owner & CLIENT_NAT)
		release_blocks(key, c->pool - 1);
	bpf_map_delete_elem(&clients, key);
}

__noinline int client_flow_put(const struct client_key *key)
{
	struct client_key who;

	if (!key)
		return 0;
	who = *key; // Linux 6.1 takes keys only from the stack or from maps
	client_put(&who, CLIENT_FLOW);
	return 0;
}

// Like client_flow_put, for a client of a service. It has no blocks of ports, so that the function
// needs less stack.
__noinline int service_flow_put(const struct client_key *key)
{
	struct client_key who;
	struct client *c;

	if (!key)
		return 0;
	who = *key; // Linux 6.1 takes keys only from the stack or from maps
	c = bpf_map_lookup_elem(&clients, &who);
	if (c && client_release(c, CLIENT_FLOW))
		bpf_map_delete_elem(&clients, &who);
	return 0;
}

// Reports whether a client has reached its limit of flows.
static __always_inline bool client_full(const struct client_key *key, __u32 max)
{
	struct client *c = bpf_map_lookup_elem(&clients, key);
	__u64 held;

	if (!c)
		return false;
	held = *(volatile __u64 *)client_held(c);
	return !client_gone(held) && (held & CLIENT_COUNT) >= max;
}

__noinline int client_port_put(const union addr *addr, __u32 rule)
{
	struct client_key key = {};

	if (!addr)
		return 0;
	client_of(&key, addr, CLIENT_NAT | rule, false);
	client_put(&key, CLIENT_PORT);
	return 0;
}

#endif
