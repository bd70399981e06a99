// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Rates and quotas. Looked at only when a flow is made.
#ifndef SLUICE_LIMIT_H
#define SLUICE_LIMIT_H

#include "block.h"

#define CLIENT_NAT 0x10000 // client_key.owner: a NAT rule rather than a service
#define CLIENT_LOG 0x20000 // in client_rates, without an address: the log of a service

// Generic cell rate algorithm (ITU-T I.371): *tat is when the next event
// conforms. One word, so no lock. True when this event conforms.
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

// A counted client, made when it is new; null when there is no room. Whoever adds
// to flows or ports looks for CLIENT_GONE in what was there.
static __always_inline struct client *client_get(const struct client_key *key)
{
	struct client *c = bpf_map_lookup_elem(&clients, key), fresh = {};

	if (c)
		return c;
	bpf_map_update_elem(&clients, key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&clients, key);
}

// Whether rate_take would refuse an event now.
static __always_inline bool rate_used_up(const __u64 *tat, __u64 burst_ns)
{
	__u64 now = bpf_ktime_get_ns(), was = *(volatile const __u64 *)tat;

	return was > now && was - now > burst_ns;
}

// Who a flow is counted for.
static __always_inline void client_of(struct client_key *key, const union addr *a, __u32 owner, bool v6)
{
	key->addr = *a;
	key->owner = owner;
	if (v6 && !(owner & CLIENT_NAT))
		key->addr.d[1] = 0; // a /64 is one client
}

// Whether the rate that is kept for a key lets one more through; unknown: the answer
// where there is no room to keep it.
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

// Whether the client of a binding may open one more connection now. Not in the frame of
// bind, which has no room (Linux 6.1).
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

// Forgets a client that has nothing any more, once.
static __always_inline void client_drop(const struct client_key *key, struct client *c)
{
	__u64 *held = (__u64 *)&c->flows;

	if (__sync_val_compare_and_swap(held, 0, CLIENT_GONE | (__u64)CLIENT_GONE << 32))
		return;
	if (have_blocks && key->owner & CLIENT_NAT)
		release_blocks(key, c->pool - 1);
	bpf_map_delete_elem(&clients, key);
}

__noinline int client_flow_put(const struct client_key *key)
{
	struct client_key who;
	struct client *c;

	if (!key)
		return 0;
	who = *key; // Linux 6.1 takes keys only from the stack or from maps
	c = bpf_map_lookup_elem(&clients, &who);
	if (!c)
		return 0;
	__sync_fetch_and_sub(&c->flows, 1);
	client_drop(&who, c);
	return 0;
}

// One flow more for a client with a limit.
static __always_inline enum reason client_flow_get(const struct client_key *key, __u32 max)
{
	struct client *c = client_get(key);
	__u32 was;

	if (!c)
		return REASON_CLIENTS_FULL;
	was = __sync_fetch_and_add(&c->flows, 1);
	if (was < max)
		return REASON_NONE;
	if (!(was & CLIENT_GONE)) {
		client_flow_put(key); // its last flow may just have ended
		return REASON_CLIENT_FLOWS;
	}
	__sync_fetch_and_sub(&c->flows, 1);
	return REASON_CLIENTS_FULL;
}

// Whether a client has all the flows it may have.
static __always_inline bool client_full(const struct client_key *key, __u32 max)
{
	struct client *c = bpf_map_lookup_elem(&clients, key);
	__u32 flows;

	if (!c)
		return false;
	flows = *(volatile __u32 *)&c->flows;
	return !(flows & CLIENT_GONE) && flows >= max;
}

__noinline int client_port_put(const union addr *addr, __u32 rule)
{
	struct client_key key = {};
	struct client *c;

	if (!addr)
		return 0;
	client_of(&key, addr, CLIENT_NAT | rule, false);
	c = bpf_map_lookup_elem(&clients, &key);
	if (!c)
		return 0;
	__sync_fetch_and_sub(&c->ports, 1);
	client_drop(&key, c);
	return 0;
}

#endif
