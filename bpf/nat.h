// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Ports, bindings, and the rules that translate sources.
#ifndef SLUICE_NAT_H
#define SLUICE_NAT_H

#include "conn.h"
#include "limit.h"
#include "prefix.h"

#define PORT_CLASSES 3

static __always_inline __u32 port_class(__u8 l4_proto)
{
	return l4_proto == IPPROTO_TCP ? 0 : l4_proto == IPPROTO_UDP ? 1 : 2;
}

// Position of a port in its map: even ports first.
static __always_inline __u32 bit_of(__u16 port)
{
	return (port & 1) << 15 | port >> 1;
}

static __always_inline __u32 lowest_bit(__u64 x)
{
	return __builtin_ctzll(x);
}

// Bits of word w (of one parity) that stand for half-ports first..last.
static __always_inline __u64 usable(__u32 w, __u32 first, __u32 last)
{
	__u64 mask = ~0ULL;

	if (w == first / 64)
		mask &= ~0ULL << (first % 64);
	if (w == last / 64)
		mask &= ~0ULL >> (63 - last % 64);
	return mask;
}

// Makes the compiler forget what it knows of a number, so that the comparison
// with its bound stays in the program, where the verifier looks for it.
#define bounded(x) asm volatile("" : "+r"(x))

// Takes a free bit of one word. The position, or -1.
__noinline int take_word(__u32 map, __u32 w, __u64 mask)
{
	struct port_map *m = bpf_map_lookup_elem(&port_maps, &map);
	__u32 random = bpf_get_prandom_u32();

	bounded(w);
	if (!m || w >= PORT_WORDS)
		return -1;
	for (int i = 0; i < 4; i++) {
		__u64 word = *(volatile __u64 *)&m->words[w];
		__u64 free = ~word & mask, high, bit;
		__u32 n;

		if (!free)
			return -1;
		high = free & (~0ULL << (random % 64));
		n = lowest_bit(high ? high : free) & 63;
		bit = 1ULL << n;
		word = __sync_fetch_and_or(&m->words[w], bit);
		if (word & bit)
			continue;
		__sync_fetch_and_add(&m->used, 1);
		if ((word | bit) == ~0ULL)
			__sync_fetch_and_or(&m->full[w / 64], 1ULL << (w % 64));
		return w * 64 + n;
	}
	return -1;
}

// The first word at or after w, within from..to and round its end, that the
// summary does not call full; w itself when there is none.
__noinline __u32 open_word(__u32 map, __u32 w, __u32 from, __u32 to)
{
	struct port_map *m = bpf_map_lookup_elem(&port_maps, &map);
	__u32 at = w;

	if (!m)
		return w;
	for (int i = 0; i < 10; i++) {
		__u64 open;

		if (at > to)
			at = from;
		open = ~m->full[at / 64 & (PORT_SUMMARY - 1)] & (~0ULL << (at % 64));
		if (open) {
			at = (at & ~63U) + lowest_bit(open);
			if (at <= to)
				return at;
			at = from;
			continue;
		}
		at = (at & ~63U) + 64;
	}
	return w;
}

// Ports of one parity within first..last: a random word, then the next one that
// is not full. Two looks are nearly always enough, at any fill.
__noinline int take_parity(__u32 map, __u32 odd, __u32 first, __u32 last)
{
	__u32 low = (first + !odd) >> 1, high = (last - odd) >> 1; // half-ports
	__u32 base = odd ? PORT_WORDS / 2 : 0, from, to, w;

	odd &= 1;
	if (last > 0xffff || first > last || last < odd || low > high)
		return -1;
	from = low / 64;
	to = high / 64;
	w = from + ((__u64)bpf_get_prandom_u32() * (to - from + 1) >> 32);
	for (int i = 0; i < 16; i++) {
		int bit = take_word(map, base + w, usable(w, low, high));

		if (bit >= 0)
			return bit;
		w = w < to ? w + 1 : from;
		w = open_word(map, base + w, base + from, base + to) - base;
	}
	return -1;
}

// Takes a port; REASON_NONE and r->port, or REASON_NO_PORT.
__noinline int take_port(struct port_request *r)
{
	__u32 odd, map, first;
	int bit;

	if (!r)
		return REASON_INTERNAL;
	map = r->map;
	odd = r->want & 1;
	first = r->first;
	if (r->want < 1024 && first < 1024) { // RFC 4787 REQ-3a
		bit = take_parity(map, odd, first, r->last < 1024 ? r->last : 1023);
		if (bit >= 0)
			goto found;
	} else if (first < 1024 && r->last >= 1024 && !r->whole) {
		first = 1024;
	}
	bit = take_parity(map, odd, first, r->last);
	if (bit < 0)
		bit = take_parity(map, !odd, first, r->last);
	if (bit < 0)
		return REASON_NO_PORT;
found:
	r->port = (bit & 0x7fff) << 1 | bit >> 15;
	return REASON_NONE;
}

__noinline int give_port(__u32 map, __u32 port)
{
	struct port_map *m = bpf_map_lookup_elem(&port_maps, &map);
	__u32 bit = bit_of(port), w = bit / 64;
	__u64 mask = 1ULL << (bit % 64);

	bounded(w);
	if (!m || w >= PORT_WORDS)
		return 0;
	if (!(__sync_fetch_and_and(&m->words[w], ~mask) & mask))
		return 0;
	__sync_fetch_and_and(&m->full[w / 64], ~(1ULL << (w % 64)));
	__sync_fetch_and_sub(&m->used, 1);
	return 1;
}

// The pool address that an address is, with its number; null for others.
static __always_inline struct pool_addr *pool_of(const union addr *a, __u32 *number)
{
	union addr key = *a;
	__u32 *found = bpf_map_lookup_elem(&pool_numbers, &key);

	if (!found)
		return 0;
	*number = *found;
	return bpf_map_lookup_elem(&pools, number);
}

static __always_inline void set_owner(__u32 slot, __u32 value)
{
	__u32 *owner = bpf_map_lookup_elem(&port_owners, &slot);

	if (owner)
		*(volatile __u32 *)owner = value;
}

#define OWNER_6 0x80000000U

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

// One more flow for a binding; false when it has just died.
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

// One flow less. With the last one the binding dies; the sweeper frees its port
// when the hold time is over.
__noinline int binding_put(__u32 index, __u32 v6, __u32 now)
{
	struct entry_meta *m = meta_at(index, v6);
	void *e;

	if (!m || __sync_fetch_and_sub(ref_of(m), 1) != 1)
		return 0;
	set_owner(m->twin, 0);
	if (v6) {
		e = entry_at(index, true);
		if (e)
			kill(e, now, ENTRY_HOLD, true);
	} else {
		e = entry_at(index, false);
		if (e)
			kill(e, now, ENTRY_HOLD, false);
	}
	return 1;
}

static __always_inline void bind_key(struct tuple *key, const struct bind *b)
{
	key->saddr = b->inside.saddr;
	key->sport = b->inside.sport;
	key->l4_proto = b->inside.l4_proto;
	key->kind = KIND_BINDING;
	key->zone = b->rule;
	key->state = ENTRY_LIVE;
}

static __always_inline int bind_existing(struct bind *b, __u32 index)
{
	struct entry_meta *m;

	if (b->family == FAMILY_6) {
		struct flow6 *f = entry_at(index, true);

		if (!f)
			return REASON_INTERNAL;
		b->outside = f->to_saddr;
		b->port = f->to_sport;
		m = &f->meta;
	} else {
		struct flow4 *f = entry_at(index, false);

		if (!f)
			return REASON_INTERNAL;
		b->outside.d[0] = f->to_saddr;
		b->outside.d[1] = 0;
		b->port = f->to_sport;
		m = &f->meta;
	}
	b->index = index;
	return binding_get(m) ? REASON_FLOW : REASON_NONE;
}

// Which pool address a client has: the one that it had before, else one by its
// hash, the next when that one has no port left (RFC 4787 REQ-2).
static __always_inline int choose_address(struct bind *b, const struct nat_rule *rule, struct client *client,
					  struct port_request *r, struct pool_addr **chosen)
{
	bool out6 = b->outside_family == FAMILY_6;
	__u32 first = out6 ? rule->pool6 : rule->pool, len = out6 ? rule->pool6_len : rule->pool_len;
	__u32 class = port_class(b->inside.l4_proto), at, number;
	int reason = REASON_NO_PORT;

	if (!len)
		return REASON_NO_PORT;
	at = (__u64)(__u32)((b->inside.saddr.w[0] ^ b->inside.saddr.w[1] ^ b->inside.saddr.w[2] ^
			     b->inside.saddr.w[3]) * 0x9e3779b1U) * len >> 32;
	for (int i = 0; i < 8; i++) {
		number = first + at;
		if (client && client->pool)
			number = client->pool - 1;
		r->map = number * PORT_CLASSES + class;
		reason = take_port(r);
		if (reason == REASON_NONE || !client || client->pool || (__u32)i + 1 >= len)
			break;
		at = at + 1 < len ? at + 1 : 0;
	}
	if (reason != REASON_NONE)
		return reason;
	*chosen = bpf_map_lookup_elem(&pools, &number);
	if (!*chosen)
		return REASON_INTERNAL;
	if (client)
		client->pool = number + 1;
	return REASON_NONE;
}

static __always_inline void port_range(const struct nat_rule *rule, const struct bind *b, struct port_request *r)
{
	r->want = bpf_ntohs(b->inside.sport);
	r->first = rule->port_first;
	r->last = rule->port_last;
	if (b->inside.l4_proto == IPPROTO_ICMP || b->inside.l4_proto == IPPROTO_ICMPV6) {
		r->first = 0;
		r->last = 0xffff;
		r->whole = 1;
		r->want |= 1024;
	}
}

// Allocates an outside endpoint for b without making it known.
static __always_inline int bind_allocate(struct bind *b, struct port_request *r, struct client_key *who)
{
	struct pool_addr *address;
	struct client *client = 0;
	struct nat_rule *rule;
	__u32 id = b->rule;
	int reason;

	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	port_range(rule, b, r);
	if (rule->max_ports || rule->pool_len > 1 || rule->pool6_len > 1) {
		who->addr = b->inside.saddr;
		who->owner = CLIENT_NAT | id;
		client = client_get(who);
		if (!client)
			return REASON_CLIENTS_FULL;
		if (rule->max_ports && client->ports >= rule->max_ports)
			return REASON_CLIENT_PORTS;
	}
	reason = choose_address(b, rule, client, r, &address);
	if (reason != REASON_NONE)
		return reason;
	if (client) {
		__sync_fetch_and_add(&client->ports, 1);
		b->client_seen = 1;
	}
	b->outside = address->addr;
	b->port = bpf_htons(r->port);
	return REASON_NONE;
}

static __always_inline void bind_cancel(struct bind *b, const struct port_request *r)
{
	give_port(r->map, r->port);
	if (b->client_seen)
		client_port_put(&b->inside.saddr, b->rule);
}

static __always_inline bool bind_fill(struct bind *b, const struct tuple *key, __u32 slot, __u32 index, const bool v6)
{
	void *e = entry_at(index, v6);
	struct tuple to = {};
	struct entry_meta *m;

	if (!e)
		return false;
	to.saddr = b->outside;
	to.sport = b->port;
	fill(e, key, &to, v6);
	m = meta_of(e, v6);
	m->twin = slot;
	m->seen = b->now;
	m->flags = ENTRY_NAT | (b->client_seen ? ENTRY_CLIENT : 0) | (b->family != b->outside_family ? ENTRY_CROSS : 0);
	m->heard = b->inside.l4_proto;
	m->hop = 0;
	m->hop_gen = 0;
	*ref_of(m) = 1;
	return true;
}

// What explain says of a binding that is not made: the outside endpoint of the one
// that is there, else the only address of the pool. 0 is chosen with the packet.
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
	__builtin_memset(&w->key, 0, sizeof(w->key));
	bind_key(&w->key, b);
	index = find(&w->key, b->family == FAMILY_6);
	if (index != NO_ENTRY) {
		struct flow6 *six = entry_at(index, true);
		struct flow4 *four = entry_at(index, false);

		if (b->family == FAMILY_6 && six) {
			b->outside = six->to_saddr;
			b->port = six->to_sport;
		} else if (four) {
			b->outside.w[0] = four->to_saddr;
			b->port = four->to_sport;
		}
		return 0;
	}
	number = b->outside_family == FAMILY_6 ? rule->pool6 : rule->pool;
	len = b->outside_family == FAMILY_6 ? rule->pool6_len : rule->pool_len;
	if (len == 1)
		address = bpf_map_lookup_elem(&pools, &number);
	if (address)
		b->outside = address->addr;
	return 0;
}

// The binding of an inside endpoint, made when there is none. REASON_FLOW or
// REASON_NEW_FLOW with one reference taken, else why not.
__noinline int bind(struct bind *b)
{
	struct work *w = the_work();
	__u32 index, found, slot;
	struct port_request *r;
	struct tuple *key;
	bool v6, ok;
	int reason;

	if (!b || !w)
		return REASON_INTERNAL;
	key = &w->key;
	r = &w->request;
	__builtin_memset(key, 0, sizeof(*key));
	__builtin_memset(r, 0, sizeof(*r));
	__builtin_memset(&w->who, 0, sizeof(w->who));
	v6 = b->family == FAMILY_6;
	bind_key(key, b);
	index = find(key, v6);
	if (index != NO_ENTRY && bind_existing(b, index) == REASON_FLOW)
		return REASON_FLOW;
	reason = bind_allocate(b, r, &w->who);
	if (reason != REASON_NONE)
		return reason;
	index = claim(key, v6);
	slot = r->map << 16 | r->port;
	if (index == NO_ENTRY) {
		bind_cancel(b, r);
		return REASON_TABLE_FULL;
	}
	ok = v6 ? bind_fill(b, key, slot, index, true) : bind_fill(b, key, slot, index, false);
	if (!ok)
		return REASON_INTERNAL;
	set_owner(slot, (index + 1) | (v6 ? OWNER_6 : 0));
	publish_index(index, v6);
	b->index = index;
	found = find(key, v6);
	if (found != index && found != NO_ENTRY && bind_existing(b, found) == REASON_FLOW) {
		binding_put(index, v6, b->now); // another CPU was faster
		return REASON_FLOW;
	}
	return REASON_NEW_FLOW;
}

#endif
