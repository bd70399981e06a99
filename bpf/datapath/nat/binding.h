// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Bindings: the mapping of an inside endpoint to an outside endpoint, independent of the remote
// (RFC 4787 REQ-1).
//
// Most inside endpoints have one flow. This flow represents its binding: a second slot of the
// index, placed by the hash of the binding's key, refers to the primary entry of the flow. The
// owner of the outside port refers to it too. When a second flow shares the binding, the binding
// gets its own entry (KIND_BINDING), which counts its flows. ref_of the reply entry of the first
// flow contains the state:
//   the primary entry of the flow  the flow is the only one of the binding
//   an entry of KIND_BINDING       the flow shares the binding
//   NO_ENTRY                       the flow has ended
// Sharing a binding and ending a flow each take one compare-and-swap of this word. Exactly one
// succeeds. After the last flow, the port is held by the last entry of the binding until the hold
// time is over.
#ifndef SLUICE_BINDING_H
#define SLUICE_BINDING_H

#include "flow/conn.h"
#include "nat/limit.h"

enum port_classes {
	PORT_CLASSES = 3,
};

static __always_inline __u32 port_class(__u8 l4_proto)
{
	return l4_proto == IPPROTO_TCP ? 0 : l4_proto == IPPROTO_UDP ? 1 : 2;
}

// Returns the key of a port in port_owners.
static __always_inline __u32 port_slot(__u32 number, __u8 l4_proto, __be16 port)
{
	return (number * PORT_CLASSES + port_class(l4_proto)) << 16 | bpf_ntohs(port);
}

static __always_inline __u32 *owner_at(__u32 slot)
{
	__u32 map = slot >> 16, element = (slot & 0xffff) / 2;
	void *part = bpf_map_lookup_elem(&port_owners, &map);
	struct owner_pair *pair = part ? bpf_map_lookup_elem(part, &element) : (void *)0;

	return pair ? &pair->owner[slot % 2] : (void *)0;
}

static __always_inline void set_owner(__u32 slot, __u32 value)
{
	__u32 *owner = owner_at(slot);

	if (owner)
		*(volatile __u32 *)owner = value;
}

static __always_inline void touch_owner(__u32 slot)
{
	__u32 *owner = owner_at(slot);

	if (owner)
		touch_word(owner);
}

#define OWNER_6 0x80000000U

// Flag in ref_of the reply of a flow from IPv4 to IPv6 (a hairpin): the binding belongs to the IPv4
// sender. For all other flows between the families, it belongs to an IPv6 host.
#define REF_4 0x80000000U

static __always_inline __u32 owner_of(__u32 index, bool v6)
{
	return (index + 1) | (v6 ? OWNER_6 : 0);
}

static __always_inline struct entry_meta *meta_at(__u32 index, bool v6)
{
	void *e;

	if (v6) {
		e = entry_at(index, true);
		return e ? meta_of(e, true) : (void *)0;
	}
	e = entry_at(index, false);
	return e ? meta_of(e, false) : (void *)0;
}

// Reports whether a pool address is in the pool of a rule. Addresses removed from the pool keep
// their flows, but get no new ones.
static __always_inline bool in_pool(__u32 number, __u32 rule)
{
	__u64 *rules = bpf_map_lookup_elem(&pool_rules, &number);

	return rules && *rules >> (rule & 63) & 1;
}

// Reports whether a binding to a pool address may have more flows. An address removed from the pool
// may have more only if clients keep the address of their port blocks (see part).
__noinline int joinable(__u32 number, __u32 rule)
{
	struct pool_addr *address;
	struct nat_rule *r;

	if (in_pool(number, rule))
		return 1;
	if (!have_blocks)
		return 0;
	r = bpf_map_lookup_elem(&nat_rules, &rule);
	address = bpf_map_lookup_elem(&pools, &number);
	return r && address && r->block && !(r->flags & NAT_DETERMINISTIC) && !address->lost;
}

// Reports whether an entry is the primary entry of a flow that was created with its binding.
static __always_inline bool made_with_binding(const struct entry_meta *m)
{
	return (m->flags & (ENTRY_PRIMARY | ENTRY_NAT | ENTRY_PORT)) == (ENTRY_PRIMARY | ENTRY_NAT | ENTRY_PORT);
}

// Reports whether an entry refers to the binding of a key. It is the entry of the binding, or of
// the flow created with it. In most cases the first comparison fails. A binding to an address
// removed from the pool does not match, so that another replaces it.
static __always_inline bool leads_to(void *e, const struct tuple *t, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u32 id = *(volatile __u32 *)state_word(e, v6), zone = id >> 16 & 0xff;
	__u64 inside, remote;

	if (v6) {
		struct tuple *k = &((struct flow6 *)e)->key;

		inside = (k->saddr.d[0] ^ t->saddr.d[0]) | (k->saddr.d[1] ^ t->saddr.d[1]) | (k->sport ^ t->sport);
		remote = (k->daddr.d[0] ^ t->daddr.d[0]) | (k->daddr.d[1] ^ t->daddr.d[1]) | (k->dport ^ t->dport);
	} else {
		struct tuple4 *k = &((struct flow4 *)e)->key;

		inside = (k->saddr ^ t->saddr.w[0]) | (k->sport ^ t->sport);
		remote = (k->daddr ^ t->daddr.w[0]) | (k->dport ^ t->dport);
	}
	if (inside | ((id ^ ((__u32)ENTRY_LIVE << STATE_SHIFT | t->l4_proto)) & 0xff0000ff))
		return false;
	if ((id >> 8 & 0xff) == KIND_FLOW) {
		if (!made_with_binding(m))
			return false;
		zone = m->owner;
		if (!(m->heard & HEARD_REMOTE))
			remote = t->daddr.d[0] | t->daddr.d[1];
	}
	if (remote | (zone ^ t->zone))
		return false;
	return joinable((id >> 8 & 0xff) == KIND_FLOW ? m->backend : (m->twin >> 16) / PORT_CLASSES, zone);
}

SEARCH_FUNCTION(find_binding, leads_to)

// Sets key to the key of the binding with which an entry was created.
static __always_inline void key_of_binding(struct tuple *key, void *e, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);

	__builtin_memset(key, 0, sizeof(*key));
	if (v6) {
		struct tuple *k = &((struct flow6 *)e)->key;

		key->saddr = k->saddr;
		if (m->heard & HEARD_REMOTE)
			key->daddr = k->daddr;
		key->sport = k->sport;
		key->dport = m->heard & HEARD_REMOTE ? k->dport : 0;
		key->l4_proto = k->l4_proto;
	} else {
		struct tuple4 *k = &((struct flow4 *)e)->key;

		key->saddr.w[0] = k->saddr;
		key->daddr.w[0] = m->heard & HEARD_REMOTE ? k->daddr : 0;
		key->sport = k->sport;
		key->dport = m->heard & HEARD_REMOTE ? k->dport : 0;
		key->l4_proto = k->l4_proto;
	}
	key->kind = KIND_BINDING;
	key->zone = m->owner;
	key->state = ENTRY_LIVE;
}

// Returns the port of an entry's binding, as a key of port_owners.
static __always_inline __u32 slot_of(void *e, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);

	if (v6) {
		struct flow6 *f = e;

		return f->key.kind == KIND_BINDING ? m->twin : port_slot(m->backend, f->key.l4_proto, f->to_sport);
	}
	struct flow4 *f = e;

	return f->key.kind == KIND_BINDING ? m->twin : port_slot(m->backend, f->key.l4_proto, f->to_sport);
}

// Writes the entry of a binding, except for the outside endpoint.
static __always_inline void binding_fill(void *e, const struct tuple *key, __u32 slot, __u32 flags, __u32 refs,
					 __u32 now, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	struct tuple none = {};

	fill(e, key, &none, v6);
	m->twin = slot;
	m->seen = now;
	m->flags = ENTRY_NAT | flags;
	m->heard = 0;
	m->hop = 0;
	m->hop_gen = 0;
	*ref_of(m) = refs;
}

// Creates a separate entry for the binding of a single flow. Returns its index. The entry has two
// references: one for the flow and one for the caller. NO_ENTRY: the table is full, or the flow no
// longer holds the binding alone.
static __always_inline __u32 share_binding(__u32 index, __u32 now, const bool v6)
{
	void *e = entry_at(index, v6), *own;
	struct entry_meta *m, *twin;
	struct work *w = the_work();
	__u32 at, flags, slot;

	if (!e || !w)
		return NO_ENTRY;
	m = meta_of(e, v6);
	twin = twin_meta(m, v6);
	if (!twin)
		return NO_ENTRY;
	key_of_binding(&w->key, e, v6);
	slot = slot_of(e, v6);
	flags = (m->heard & HEARD_CHARGED ? ENTRY_CLIENT : 0) | (m->flags & ENTRY_CROSS);
	at = claim(&w->key, v6);
	if (at == NO_ENTRY)
		return NO_ENTRY;
	own = entry_at(at, v6);
	if (!own)
		return NO_ENTRY;
	binding_fill(own, &w->key, slot, flags, 2, now, v6);
	if (v6) {
		((struct flow6 *)own)->to_saddr = ((struct flow6 *)e)->to_saddr;
		((struct flow6 *)own)->to_sport = ((struct flow6 *)e)->to_sport;
	} else {
		((struct flow4 *)own)->to_saddr = ((struct flow4 *)e)->to_saddr;
		((struct flow4 *)own)->to_sport = ((struct flow4 *)e)->to_sport;
	}
	if (__sync_val_compare_and_swap(ref_of(twin), index, at) != index) {
		kill(own, now, ENTRY_DEAD, v6); // it was never visible; the sweeper frees it
		return NO_ENTRY;
	}
	publish(own, v6);
	set_owner(slot, owner_of(at, v6));
	return at;
}

__noinline __u32 share_binding4(__u32 index, __u32 now)
{
	return share_binding(index, now, false);
}

__noinline __u32 share_binding6(__u32 index, __u32 now)
{
	return share_binding(index, now, true);
}

// Takes a reference to a binding. Returns false if the binding has just ended.
static __always_inline bool binding_get(struct entry_meta *m)
{
	for (int i = 0; i < 4; i++) {
		__u32 refs = *(volatile __u32 *)ref_of(m);

		if (!refs)
			return false;
		if (__sync_val_compare_and_swap(ref_of(m), refs, refs + 1) == refs)
			return true;
	}
	return false;
}

// Takes a reference to the binding of an entry. Returns the separate entry of the binding, or
// NO_ENTRY if the binding has just ended.
static __always_inline __u32 binding_join(__u32 index, bool v6, __u32 now)
{
	struct entry_meta *m = meta_at(index, v6), *twin;
	__u32 ref = index;

	if (!m)
		return NO_ENTRY;
	if (made_with_binding(m)) {
		twin = twin_meta(m, v6);
		if (!twin)
			return NO_ENTRY;
		ref = *(volatile __u32 *)ref_of(twin);
		if (ref == index)
			return v6 ? share_binding6(index, now) : share_binding4(index, now);
		m = meta_at(ref, v6);
	}
	return m && binding_get(m) ? ref : NO_ENTRY;
}

// Drops a reference to a binding. The last reference ends the binding; the sweeper frees its port
// when the hold time is over.
__noinline int binding_put(__u32 index, __u32 v6, __u32 now)
{
	struct entry_meta *m = meta_at(index, v6);

	if (!m || __sync_fetch_and_sub(ref_of(m), 1) != 1)
		return 0;
	set_owner(m->twin, 0);
	kill_index(index, now, ENTRY_HOLD, v6);
	return 1;
}

// Detaches a flow from the binding with which it was created. Returns index if the flow was the
// only one; the port then has no owner. Otherwise returns the entry of the binding. NO_ENTRY: the
// flow is already detached.
__noinline __u32 binding_leave(__u32 index, __u32 v6)
{
	struct entry_meta *m, *twin;
	__u32 ref, slot;
	void *e;

	if (v6) {
		e = entry_at(index, true);
		if (!e)
			return NO_ENTRY;
		slot = slot_of(e, true);
		m = meta_of(e, true);
	} else {
		e = entry_at(index, false);
		if (!e)
			return NO_ENTRY;
		slot = slot_of(e, false);
		m = meta_of(e, false);
	}
	twin = twin_meta(m, v6);
	if (!twin)
		return NO_ENTRY;
	ref = __sync_val_compare_and_swap(ref_of(twin), index, NO_ENTRY);
	if (ref == index)
		set_owner(slot, 0);
	return ref;
}

static __always_inline void bind_key(struct tuple *key, const struct bind *b, const struct nat_rule *rule)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (rule->flags & NAT_MAP_REMOTE) {
		key->daddr = b->inside.daddr;
		key->dport = b->inside.dport;
	}
	key->saddr = b->inside.saddr;
	key->sport = b->inside.sport;
	key->l4_proto = b->inside.l4_proto;
	key->kind = KIND_BINDING;
	key->zone = b->rule;
	key->state = ENTRY_LIVE;
}

// Makes a new flow the holder of the binding for which its port was allocated. index is the primary
// entry of the flow. Returns REASON_NEW_FLOW on success. Otherwise the flow is dead and its port is
// in the hold time: REASON_FLOW if another CPU has just mapped the same endpoint, else
// REASON_TABLE_FULL.
__noinline enum reason binding_hold(const struct bind *b, __u32 index)
{
	struct work *w = the_work();
	struct nat_rule *rule;
	__u32 id, ref, twin;
	struct entry_meta *m;
	bool v6, cross, ok;

	if (!b || !w)
		return REASON_INTERNAL;
	id = b->rule;
	v6 = b->family == FAMILY_6;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	m = meta_at(index, v6);
	if (!rule || !m)
		return REASON_INTERNAL;
	bind_key(&w->key, b, rule);
	set_owner(b->slot, owner_of(index, v6)); // before other CPUs can find and share it
	ok = v6 ? claim_slot(&w->key, index, true) : claim_slot(&w->key, index, false);
	if (ok && find_binding(&w->key, index, v6) == NO_ENTRY)
		return REASON_NEW_FLOW;
	twin = m->twin;
	cross = m->flags & ENTRY_CROSS;
	ref = binding_leave(index, v6);
	if (ref == NO_ENTRY)
		return REASON_NEW_FLOW; // the flow has already ended, because its rule was removed
	// No packet with this port has been sent: the port is held for one second only.
	kill_index(index, ref == index && hold_ticks > hz ? b->now - hold_ticks + hz : b->now,
		   ref == index ? ENTRY_HOLD : ENTRY_DEAD, v6);
	kill_index(twin, b->now, ENTRY_DEAD, v6 != cross);
	if (!(take_charges(m) & ENTRY_HALF_OPEN)) // a packet on another CPU has released it
		w->new_flow.flags &= ~ENTRY_HALF_OPEN;
	if (ref != index)
		binding_put(ref, v6, b->now);
	return ok ? REASON_FLOW : REASON_TABLE_FULL;
}

#endif
