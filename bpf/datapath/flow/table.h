// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The flow tables and their search. Allocation of entries: stock.h.
//
// Entries are allocated densely, in the order in which flows are made. Both directions of a flow,
// and flows made at about the same time, are therefore neighbours in memory.
//
// An index of buckets finds the entries. A slot has 32 bits: a tag and the number of the entry. A
// tuple has two buckets. After the tag, a search compares the complete key, including the state.
// The index is small, because nearly every packet reads another part of it. A bucket counts the
// tuples that are in their second bucket because the first one was full. Nearly all searches, also
// unsuccessful ones, therefore read only one cache line of the index.
//
// The fast path first reads the hints: recently found slots, as many as fit into the cache of a CPU,
// independent of the size of the index.
//
// The tables need no locks:
//   free -> claimed  an entry from the free list, then a slot by compare-and-swap
//   claimed -> live  atomic or of the last word of the key, after all other writes
//   live -> dead     by the sweeper, or by an inserter that lost a race
//   dead -> free     by the sweeper, at least a second later: no program runs that long, so that
//                    no program sees an entry change during use
#ifndef SLUICE_TABLE_H
#define SLUICE_TABLE_H

#include "maps.h"
#include "packet/parse.h"

struct place {
	__u32 bucket[2];
	__u32 tag;  // uses the bits above entry_mask
	__u32 hint; // element of hints
};

static __always_inline __u64 nh(__u32 a, __u32 b, int i)
{
	return (__u64)(a + hash_key[i]) * (__u64)(b + hash_key[i + 1]);
}

// Hashes a tuple with NH (Black et al., CRYPTO 1999) and secret keys. Any two tuples collide with
// probability 2^-32. An attacker therefore cannot target a bucket.
static __always_inline __u64 tuple_hash(const struct tuple *t, const bool v6)
{
	__u32 ports = (__u32)t->sport | (__u32)t->dport << 16;
	__u32 id = t->l4_proto | t->kind << 8 | t->zone << 16;
	__u64 h;

	h = nh(t->saddr.w[0], t->daddr.w[0], 0) + nh(ports, id, 2);
	if (v6) {
		h += nh(t->saddr.w[1], t->daddr.w[1], 4);
		h += nh(t->saddr.w[2], t->daddr.w[2], 6);
		h += nh(t->saddr.w[3], t->daddr.w[3], 8);
	}
	h ^= h >> 32;
	h *= hash_multiplier;
	return h ^ h >> 32;
}

// Returns the index in force, which searches use.
static __always_inline __u64 index_in_force(const bool v6)
{
	struct control *c = the_control();

	if (!c)
		return 0;
	return v6 ? *(volatile __u64 *)&c->index6 : *(volatile __u64 *)&c->index4;
}

// Returns the index that is being filled to replace it, or 0.
static __always_inline __u64 next_index(const bool v6)
{
	struct control *c = the_control();

	if (!c)
		return 0;
	return v6 ? *(volatile __u64 *)&c->next_index6 : *(volatile __u64 *)&c->next_index4;
}

// Returns the places of a tuple in an index (see control.index4).
static __always_inline struct place place_in(__u64 index, const struct tuple *t, const bool v6)
{
	__u64 h = tuple_hash(t, v6), buckets = (__u32)index;
	struct place at;

	at.bucket[0] = (index >> 32) + ((h >> 32) * buckets >> 32);
	at.bucket[1] = (index >> 32) + ((h & 0xffffffff) * buckets >> 32);
	at.hint = h & (v6 ? hint_mask6 : hint_mask4);
	at.tag = (__u32)(h ^ h >> 32) * 0x9e3779b1U & ~(v6 ? entry_mask6 : entry_mask4); // not the bucket bits
	return at;
}

static __always_inline struct place place_of(const struct tuple *t, const bool v6)
{
	return place_in(index_in_force(v6), t, v6);
}

static __always_inline struct bucket *bucket_at(__u32 i, const bool v6)
{
	__u32 number = i >> INDEX_PART_BITS, within = i & ((1 << INDEX_PART_BITS) - 1);
	void *part = v6 ? bpf_map_lookup_elem(&index6, &number) : bpf_map_lookup_elem(&index4, &number);

	return part ? bpf_map_lookup_elem(part, &within) : (void *)0;
}

static __always_inline void *entry_at(__u32 i, const bool v6)
{
	__u32 number = i >> PART_BITS, within = i & ((1 << PART_BITS) - 1);
	void *part;

	if (v6) {
		part = bpf_map_lookup_elem(&flows6, &number);
		return part ? bpf_map_lookup_elem(part, &within) : (void *)0;
	}
	part = bpf_map_lookup_elem(&flows4, &number);
	return part ? bpf_map_lookup_elem(part, &within) : (void *)0;
}

static __always_inline struct entry_meta *meta_of(void *e, const bool v6)
{
	return v6 ? &((struct flow6 *)e)->meta : &((struct flow4 *)e)->meta;
}

// Returns the word of owner and backend. Its meaning depends on the entry. A reply entry holds the
// index of the flow's binding (see binding.h), or the port of a fullnat flow as map << 16 | port. A
// binding holds the number of flows that refer to it.
static __always_inline __u32 *ref_of(struct entry_meta *m)
{
	return (__u32 *)&m->owner;
}

// Returns the last word of the key, which contains the state.
static __always_inline __u32 *state_word(void *e, const bool v6)
{
	return v6 ? (__u32 *)&((struct flow6 *)e)->key.l4_proto : (__u32 *)&((struct flow4 *)e)->key.l4_proto;
}

#define STATE_SHIFT 24

static __always_inline __u64 pack(__u32 low, __u32 high)
{
	return low | (__u64)high << 32;
}

static __always_inline bool key_equal(void *e, const struct tuple *t, const bool v6)
{
	__u32 ports = (__u32)t->sport | (__u32)t->dport << 16;
	__u32 id = t->l4_proto | t->kind << 8 | t->zone << 16 | (__u32)ENTRY_LIVE << STATE_SHIFT;

	if (!v6) {
		__u64 *key = (__u64 *)&((struct flow4 *)e)->key;

		return key[0] == pack(t->saddr.w[0], t->daddr.w[0]) && key[1] == pack(ports, id);
	}
	struct tuple *key = &((struct flow6 *)e)->key;

	return key->saddr.d[0] == t->saddr.d[0] && key->saddr.d[1] == t->saddr.d[1] &&
	       key->daddr.d[0] == t->daddr.d[0] && key->daddr.d[1] == t->daddr.d[1] &&
	       *(__u64 *)&key->sport == pack(ports, id);
}

// Reads a word that a later step needs. A new flow uses cold memory. If there is no atomic
// operation between the reads, the processor loads these cache lines during a search instead of one
// after the other.
static __always_inline void touch_word(const __u32 *word)
{
	__u32 read = *(const volatile __u32 *)word;

	asm volatile("" ::"r"(read));
}

// Touches the bucket of a tuple.
static __always_inline void touch_place(const struct tuple *t, const bool v6)
{
	struct place at = place_of(t, v6);
	struct bucket *bucket = bucket_at(at.bucket[0], v6);

	if (bucket)
		touch_word(&bucket->spilled);
}

// Touches the bucket of the binding of a packet's source. The load overlaps with the search for the
// flow of a packet that may open one.
static __always_inline void touch_binding(const struct work *w, const struct tuple *t, const bool v6)
{
	struct tuple key = { .saddr = t->saddr, .sport = t->sport, .l4_proto = t->l4_proto, .kind = KIND_BINDING };

	key.zone = w->guess.rule;
	touch_place(&key, v6);
}

// Finds an entry and its index by the slots of a tuple, except the entry "other". Returns null and
// NO_ENTRY if there is none.
static __always_inline void *search_at(const struct place *at, const struct tuple *t, __u32 *at_index, __u32 other,
				       bool (*wanted)(void *e, const struct tuple *t, const bool v6), const bool v6)
{
	const __u32 mask = v6 ? entry_mask6 : entry_mask4;

	*at_index = NO_ENTRY;
	for (int i = 0; i < 2; i++) {
		struct bucket *bucket = bucket_at(i ? at->bucket[1] : at->bucket[0], v6);

		if (!bucket)
			return 0;
		for (int k = 0; k < BUCKET_SLOTS; k++) {
			__u32 index = (bucket->slots[k] ^ at->tag) - 1; // not below mask: other tag, or free
			void *e;

			if (index >= mask)
				continue;
			e = entry_at(index, v6);
			if (e && index != other && wanted(e, t, v6)) {
				*at_index = index;
				return e;
			}
		}
		if (!*(volatile __u32 *)&bucket->spilled)
			return 0;
	}
	return 0;
}

static __always_inline void *search_by(const struct tuple *t, __u32 *at_index, __u32 other,
				       bool (*wanted)(void *e, const struct tuple *t, const bool v6), const bool v6)
{
	struct place at = place_of(t, v6);

	return search_at(&at, t, at_index, other, wanted, v6);
}

static __always_inline struct hint *hint_at(__u32 i, const bool v6)
{
	return v6 ? bpf_map_lookup_elem(&hints6, &i) : bpf_map_lookup_elem(&hints4, &i);
}

// Records the slot of an entry in the hints. Short flows are excluded. Only every 16th packet of
// another flow evicts a hint. If there are more busy flows than hints, some keep their hints, and
// the others rarely write.
static __always_inline void remember(__u32 at, __u32 slot, __u64 packets, const bool v6)
{
	struct hint *hint;

	if (packets < 8)
		return;
	hint = hint_at(at, v6);
	if (!hint)
		return;
#pragma clang loop unroll(full)
	for (int k = 0; k < HINT_SLOTS; k++) {
		if (!*(volatile __u32 *)&hint->slots[k]) {
			*(volatile __u32 *)&hint->slots[k] = slot;
			return;
		}
	}
	if (packets % 16 == 0)
		*(volatile __u32 *)&hint->slots[packets / 16 % HINT_SLOTS] = slot;
}

// Finds the live entry of a tuple, through the hints if possible. A hint may belong to an ended
// flow, or another CPU may be writing it: the comparison of keys detects both. "early": the packet
// opens or closes its flow, which rarely has a hint. It uses the first element of the hints, which
// is in the cache.
static __always_inline void *search_hinted(const struct tuple *t, __u32 *at_index, bool early, const bool v6)
{
	const __u32 mask = v6 ? entry_mask6 : entry_mask4;
	struct place at = place_of(t, v6);
	struct work *w = have_nat ? the_work() : (void *)0;
	struct hint *hint;
	void *e;

	if (early)
		at.hint = 0;
	hint = hint_at(at.hint, v6);
	if (!hint)
		return 0;
	for (int k = 0; k < HINT_SLOTS; k++) {
		*at_index = (*(volatile __u32 *)&hint->slots[k] ^ at.tag) - 1;
		if (*at_index >= mask)
			continue;
		e = entry_at(*at_index, v6);
		if (e && key_equal(e, t, v6))
			return e;
	}
	if (w && w->guess.opens)
		touch_binding(w, t, v6);
	e = search_at(&at, t, at_index, NO_ENTRY, key_equal, v6);
	if (w && w->guess.opens != !e)
		w->guess.opens = !e;
	if (e)
		remember(at.hint, at.tag | (*at_index + 1), *(__u64 *)e, v6);
	return e;
}

// Returns the index of the live entry of a tuple, or NO_ENTRY.
static __always_inline __u32 search(const struct tuple *t, const bool v6)
{
	__u32 index;

	search_by(t, &index, NO_ENTRY, key_equal, v6);
	return index;
}

// Global functions for the search: the verifier checks them once for all callers.
__noinline __u32 find4(const struct tuple *t)
{
	return t ? search(t, false) : NO_ENTRY;
}

__noinline __u32 find6(const struct tuple *t)
{
	return t ? search(t, true) : NO_ENTRY;
}

static __always_inline __u32 find(const struct tuple *t, bool v6)
{
	return v6 ? find6(t) : find4(t);
}

// Defines name(t, except, v6). It returns the live entry, other than "except", that matches a
// tuple, or NO_ENTRY.
#define SEARCH_FUNCTION(name, matches)                                                  \
	__noinline __u32 name##4(const struct tuple *t, __u32 except)                   \
	{                                                                               \
		__u32 index = NO_ENTRY;                                                 \
                                                                                        \
		if (t)                                                                  \
			search_by(t, &index, except, matches, false);                   \
		return index;                                                           \
	}                                                                               \
                                                                                        \
	__noinline __u32 name##6(const struct tuple *t, __u32 except)                   \
	{                                                                               \
		__u32 index = NO_ENTRY;                                                 \
                                                                                        \
		if (t)                                                                  \
			search_by(t, &index, except, matches, true);                    \
		return index;                                                           \
	}                                                                               \
                                                                                        \
	static __always_inline __u32 name(const struct tuple *t, __u32 except, bool v6) \
	{                                                                               \
		return v6 ? name##6(t, except) : name##4(t, except);                    \
	}

SEARCH_FUNCTION(rival, key_equal) // an entry with the same tuple

#endif
