// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Scheduling: finds the slot of a packet in its service, and the backend in this slot.
#ifndef SLUICE_SCHEDULE_H
#define SLUICE_SCHEDULE_H

#include "nat/limit.h"
#include "packet/parse.h"
#include "packet/prefix.h"

#define JHASH_INITVAL 0xdeadbeef // include/linux/jhash.h

static __always_inline __u32 rol32(__u32 x, int k)
{
	return x << k | x >> (32 - k);
}

// Returns Bob Jenkins' lookup3 hash as the kernel and nftables compute it (balance.JHash).
static __always_inline __u32 jhash(const __u32 *word, int words, __u32 seed)
{
	__u32 a = JHASH_INITVAL + words * 4 + seed, b = a, c = a;
	int i = 0;

	for (; words - i > 3; i += 3) {
		a += word[i];
		b += word[i + 1];
		c += word[i + 2];
		a -= c;
		a ^= rol32(c, 4);
		c += b;
		b -= a;
		b ^= rol32(a, 6);
		a += c;
		c -= b;
		c ^= rol32(b, 8);
		b += a;
		a -= c;
		a ^= rol32(c, 16);
		c += b;
		b -= a;
		b ^= rol32(a, 19);
		a += c;
		c -= b;
		c ^= rol32(b, 4);
		b += a;
	}
	if (words - i == 3)
		c += word[i + 2];
	if (words - i >= 2)
		b += word[i + 1];
	a += word[i];
	c ^= b;
	c -= rol32(b, 14);
	a ^= c;
	a -= rol32(c, 11);
	b ^= a;
	b -= rol32(a, 25);
	c ^= b;
	c -= rol32(b, 16);
	a ^= c;
	a -= rol32(c, 4);
	b ^= a;
	b -= rol32(a, 14);
	c ^= b;
	c -= rol32(b, 24);
	return c;
}

// Hashes the concatenation "saddr . sport . daddr . dport", with every field padded to words as in
// nftables.
static __always_inline __u32 hash_endpoints(const union addr *s, __be16 sport, const union addr *d, __be16 dport,
					    const bool v6)
{
	__u32 word[10];

	if (!v6) {
		word[0] = s->w[0];
		word[1] = sport;
		word[2] = d->w[0];
		word[3] = dport;
		return jhash(word, 4, hash_seed);
	}
	__builtin_memcpy(word, s, 16);
	word[4] = sport;
	__builtin_memcpy(word + 5, d, 16);
	word[9] = dport;
	return jhash(word, 10, hash_seed);
}

// Hashes both endpoints, the smaller one first, so that both directions have the same hash.
static __always_inline __u32 hash_symmetric(const struct tuple *t, const bool v6)
{
	bool swap = false;

	for (int i = 0; i < (v6 ? 4 : 1); i++) {
		__u32 s = bpf_ntohl(t->saddr.w[i]), d = bpf_ntohl(t->daddr.w[i]);

		if (s == d)
			continue;
		swap = s > d;
		goto ordered;
	}
	swap = bpf_ntohs(t->sport) > bpf_ntohs(t->dport);
ordered:
	return swap ? hash_endpoints(&t->daddr, t->dport, &t->saddr, t->sport, v6) :
		      hash_endpoints(&t->saddr, t->sport, &t->daddr, t->dport, v6);
}

static __always_inline __u32 hash_of(const struct tuple *t, __u8 scheduler, const bool v6)
{
	switch (scheduler) {
	case SCHEDULER_SOURCE:
		return v6 ? jhash(t->saddr.w, 4, hash_seed) : jhash(t->saddr.w, 1, hash_seed);
	case SCHEDULER_SYMMETRIC:
		return hash_symmetric(t, v6);
	}
	return hash_endpoints(&t->saddr, t->sport, &t->daddr, t->dport, v6);
}

static __always_inline __u32 slot_at(__u32 i)
{
	__u32 group = i / 4;
	__u64 *four = bpf_map_lookup_elem(&slots, &group);

	return four ? *four >> (i % 4 * 16) & 0xffff : NO_ENTRY;
}

// Returns the number of flows of a backend plus one, or 0 if it accepts no more.
__noinline __u32 backend_room(__u32 service, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct backend *b = bpf_map_lookup_elem(&backends, &id);
	struct load *l = bpf_map_lookup_elem(&backend_loads, &id);
	__u32 max;

	if (!s || !b || !l)
		return 0;
	max = b->max_flows ? b->max_flows : s->max_backend_flows;
	if (max && l->active >= (__s64)max)
		return 0;
	return (__u32)l->active + 1;
}

#define LEAST_LOOKS 64 // lc, wlc: backends compared for one new flow

struct least {
	__u32 service;
	__u32 first; // slot
	__u32 count;
	__u32 start;
	__u32 best; // backend
	__u32 room; // flows of this backend plus one
	__u32 weight;
};

static long least_look(__u32 i, void *ctx)
{
	struct least *least = ctx;
	__u32 id = slot_at(least->first + (least->start + i) % least->count);
	__u32 room = backend_room(least->service, id);
	struct backend *b = bpf_map_lookup_elem(&backends, &id);

	if (!b || !room)
		return 0;
	// room / weight < least room / least weight, without division
	// The verifier of Linux 6.1 checks a callback with the initial values alone, and would remove the
	// other branch of a condition on them. This one also depends on the backend.
	if ((__u64)room * least->weight < (__u64)least->room * b->weight) {
		least->best = id;
		least->room = room;
		least->weight = b->weight;
	}
	return 0;
}

// Returns the backend with the fewest flows per weight, among up to LEAST_LOOKS backends from a
// random one onwards.
static __always_inline __u32 slot_least(__u32 service, __u32 first, __u32 count)
{
	struct least least = {
		.service = service,
		.first = first,
		.count = count,
		.start = bpf_get_prandom_u32() >> 8,
		.best = NO_ENTRY,
		.room = ~0U, // greater than that of any backend
		.weight = 1,
	};

	bpf_loop(count < LEAST_LOOKS ? count : LEAST_LOOKS, least_look, &least, 0);
	return least.best;
}

#define ROOMY_LOOKS 16 // backends to try, from the scheduled one onwards

// Returns a backend that accepts one more flow, at the slot or shortly after it.
__noinline __u32 slot_with_room(__u32 service, __u32 first, __u32 count, __u32 slot)
{
	for (__u32 i = 0; i < ROOMY_LOOKS && count; i++) {
		__u32 id = slot_at(first + (slot + i) % count);

		if (backend_room(service, id))
			return id;
	}
	return NO_ENTRY;
}

// Returns the same as slot_with_room. Avoids the calls if the scheduled backend has no limit.
static __always_inline __u32 slot_roomy(const struct service *s, __u32 service, __u32 first, __u32 count, __u32 slot)
{
	__u32 id = slot_at(first + slot);
	struct backend *b = bpf_map_lookup_elem(&backends, &id);

	return b && !(b->max_flows | s->max_backend_flows) ? id : slot_with_room(service, first, count, slot);
}

#define HASH_ONLY 1 // for schedule: no state, so that every packet of the flow gets the same backend
#define HASH_ROOM 2 // like HASH_ONLY, but a backend with room

// Chooses the backend of a new flow. Returns NO_ENTRY if all are full or there is none. by_hash is
// 0 or HASH_*.
__noinline __u32 schedule(const struct packet *p, __u32 service, __u32 by_hash)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct load *l = bpf_map_lookup_elem(&service_loads, &service);
	__u32 first, count, slot;
	__u64 table;

	if (!p || !s || !l)
		return NO_ENTRY;
	table = *(volatile __u64 *)&s->slots;
	first = table >> 32;
	count = (__u32)table;
	if (!count)
		return NO_ENTRY;
	switch (s->scheduler) {
	case SCHEDULER_LEAST:
		if (!by_hash)
			return slot_least(service, first, count);
		break;
	case SCHEDULER_SEQUENCE:
		if (!by_hash) {
			slot = __sync_fetch_and_add(&l->sequence, 1) % count;
			return slot_roomy(s, service, first, count, slot);
		}
		break;
	case SCHEDULER_RANDOM:
		if (!by_hash) {
			slot = (__u64)bpf_get_prandom_u32() * count >> 32;
			return slot_roomy(s, service, first, count, slot);
		}
		break;
	}
	slot = p->family == FAMILY_6 ? hash_of(&p->tuple, s->scheduler, true) : hash_of(&p->tuple, s->scheduler, false);
	slot = (__u64)slot * count >> 32;
	return by_hash == HASH_ONLY ? slot_at(first + slot) : slot_roomy(s, service, first, count, slot);
}

static __always_inline void sticky_key_of(struct sticky_key *key, const struct packet *p, const struct service *s,
					  __u32 service)
{
	key->service = service;
	if (s->sticky_keys & STICKY_SADDR)
		key->saddr = p->tuple.saddr;
	if (s->sticky_keys & STICKY_DADDR)
		key->daddr = p->tuple.daddr;
	if (s->sticky_keys & STICKY_SPORT)
		key->sport = p->tuple.sport;
	if (s->sticky_keys & STICKY_DPORT)
		key->dport = p->tuple.dport;
	if (s->sticky_keys & STICKY_SMAC)
		__builtin_memcpy(key->smac, p->smac, ETH_ALEN);
	if (s->sticky_keys & STICKY_DMAC)
		__builtin_memcpy(key->dmac, p->dmac, ETH_ALEN);
}

// Returns the persistent backend of a client, provided that it accepts flows.
__noinline __u32 sticky_get(const struct packet *p, __u32 service)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct work *w = the_work();
	struct sticky *known;
	struct backend *b;
	__u32 id;

	if (!p || !s || !w)
		return NO_ENTRY;
	__builtin_memset(&w->sticky, 0, sizeof(w->sticky));
	sticky_key_of(&w->sticky, p, s, service);
	known = bpf_map_lookup_elem(&stickies, &w->sticky);
	if (!known || elapsed(p->now, known->seen, s->sticky_ticks - 1))
		return NO_ENTRY;
	id = known->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b || b->state != BACKEND_UP || b->service != service || !backend_room(service, id))
		return NO_ENTRY;
	if (!dry_run)
		known->seen = p->now;
	return id;
}

// Records the persistent backend of a client. It reuses the key that sticky_get prepared.
__noinline int sticky_put(__u32 backend, __u32 now)
{
	struct sticky fresh = { .backend = backend, .seen = now };
	struct work *w = the_work();

	if (w && !dry_run)
		bpf_map_update_elem(&stickies, &w->sticky, &fresh, BPF_ANY);
	return 0;
}

// Returns the backend to which the configuration pins a client.
__noinline __u32 schedule_session(const struct packet *p, __u32 service)
{
	struct session_key key = { .prefix_len = 32 + 128, .service = service };
	struct backend *b;
	__u32 *id, at;

	if (!p)
		return NO_ENTRY;
	// IPv4 clients have keys of the form ::ffff:a.b.c.d in the same trie as IPv6 clients.
	if (p->family == FAMILY_6) {
		__builtin_memcpy(key.addr, &p->tuple.saddr, 16);
	} else {
		key.addr[10] = key.addr[11] = 0xff;
		__builtin_memcpy(key.addr + 12, &p->tuple.saddr, 4);
	}
	id = bpf_map_lookup_elem(&sessions, &key);
	if (!id)
		return NO_ENTRY;
	at = *id;
	b = bpf_map_lookup_elem(&backends, &at);
	return b && b->state == BACKEND_UP ? at : NO_ENTRY;
}

#endif
