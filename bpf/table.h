// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The flow tables: search, and entries that are taken and given back.
//
// Entries are filled densely, in the order in which flows are made, so that both
// directions of a flow, and flows made together, are neighbours in memory. An
// index of buckets finds them: a slot of 32 bits, tag and entry's number, in one of
// two buckets, and then the whole key, its state included, is compared. The index
// is kept small because every packet of another flow reads another place of it. A
// bucket counts the slots that are in their second bucket because it was full, so
// that nearly all searches, also those that find nothing, read one cache line of it.
// The straight path asks the hints first: slots that were found before, as many as a
// CPU's own cache can keep, however large the index is.
// Nobody takes a lock:
//   free -> claimed  an entry from the stack of free ones, then a slot by
//                    compare-and-swap
//   claimed -> live  atomic or of the key's last word, after all else is written
//   live -> dead     the sweeper, or an inserter that lost a race
//   dead -> free     the sweeper, a second later at the earliest: no program
//                    runs that long, so none sees an entry change under it
#ifndef SLUICE_TABLE_H
#define SLUICE_TABLE_H

#include "maps.h"
#include "parse.h"

struct place {
	__u32 bucket[2];
	__u32 tag;  // in the bits above entry_mask
	__u32 hint; // element of hints
};

static __always_inline __u64 nh(__u32 a, __u32 b, int i)
{
	return (__u64)(a + hash_key[i]) * (__u64)(b + hash_key[i + 1]);
}

// NH (Black et al., CRYPTO 1999) with secret keys: two tuples collide with
// probability 2^-32 whoever chose them, so nobody can aim at a bucket.
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

// Where a tuple may stand.
static __always_inline struct place place_of(const struct tuple *t, const bool v6)
{
	__u64 h = tuple_hash(t, v6);
	struct place at;

	at.bucket[0] = (h >> 32) * (v6 ? buckets6 : buckets4) >> 32;
	at.bucket[1] = (h & 0xffffffff) * (v6 ? buckets6 : buckets4) >> 32;
	at.hint = h & (v6 ? hint_mask6 : hint_mask4);
	at.tag = (__u32)(h ^ h >> 32) * 0x9e3779b1U & ~(v6 ? entry_mask6 : entry_mask4); // other bits than the buckets'
	return at;
}

static __always_inline struct bucket *bucket_at(__u32 i, const bool v6)
{
	if (v6)
		return bpf_map_lookup_elem(&index6, &i);
	return bpf_map_lookup_elem(&index4, &i);
}

static __always_inline void *entry_at(__u32 i, const bool v6)
{
	if (v6)
		return bpf_map_lookup_elem(&flows6, &i);
	return bpf_map_lookup_elem(&flows4, &i);
}

static __always_inline struct entry_meta *meta_of(void *e, const bool v6)
{
	return v6 ? &((struct flow6 *)e)->meta : &((struct flow4 *)e)->meta;
}

// The word of owner and backend: of a reply the index of the flow's binding (see
// binding.h), or the port of a fullnat flow as map << 16 | port; of a binding how many
// flows refer to it.
static __always_inline __u32 *ref_of(struct entry_meta *m)
{
	return (__u32 *)&m->owner;
}

// The word of the key that ends in the state.
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

// Reads a word that is needed later. What a new flow reads and writes lies in cold
// memory: read beforehand, without an atomic in between, its lines come while a search
// waits for its own, and not one after the other.
static __always_inline void touch_word(const __u32 *word)
{
	__u32 read = *(const volatile __u32 *)word;

	asm volatile("" ::"r"(read));
}

// Touches where a tuple may stand.
static __always_inline void touch_place(const struct tuple *t, const bool v6)
{
	struct place at = place_of(t, v6);
	struct bucket *bucket = bucket_at(at.bucket[0], v6);

	if (bucket)
		touch_word(&bucket->spilled);
}

// Touches where the binding of a packet's source stands, for a packet that may open a
// flow: beside the search of that flow.
static __always_inline void touch_binding(const struct work *w, const struct tuple *t, const bool v6)
{
	struct tuple key = { .saddr = t->saddr, .sport = t->sport, .l4_proto = t->l4_proto, .kind = KIND_BINDING };

	key.zone = w->guess.rule;
	touch_place(&key, v6);
}

// Finds an entry that a tuple's slots point at, other than "other", and its index;
// null and NO_ENTRY when there is none.
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
			__u32 index = (bucket->slots[k] ^ at->tag) - 1; // of another tag or a free slot: not below mask
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

// Finds the live entry of a tuple.
static __always_inline void *search_entry(const struct tuple *t, __u32 *at_index, const bool v6)
{
	return search_by(t, at_index, NO_ENTRY, key_equal, v6);
}

// Keeps the slot of an entry among the hints. Short flows stay out of them, and only
// every 16th packet of another flow evicts a hint: of more busy flows than there are hints
// some keep theirs, and the rest seldom write.
static __always_inline void remember(struct hint *hint, __u32 slot, __u64 packets)
{
	if (packets < 8)
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

// Finds the live entry of a tuple, by the hints if they know it. A hint may be of a flow
// that is over, or written by another CPU just now: the comparison of keys tells.
static __always_inline void *search_hinted(const struct tuple *t, __u32 *at_index, const bool v6)
{
	const __u32 mask = v6 ? entry_mask6 : entry_mask4;
	struct place at = place_of(t, v6);
	struct hint *hint = v6 ? bpf_map_lookup_elem(&hints6, &at.hint) : bpf_map_lookup_elem(&hints4, &at.hint);
	struct work *w = have_nat ? the_work() : (void *)0;
	void *e;

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
		remember(hint, at.tag | (*at_index + 1), *(__u64 *)e);
	return e;
}

static __always_inline __u32 search(const struct tuple *t, const bool v6)
{
	__u32 index;

	search_entry(t, &index, v6);
	return index;
}

// The same for callers off the fast path: verified once.
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

// Makes name(t, except, v6): the live entry that matches a tuple and is not except; or NO_ENTRY.
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

SEARCH_FUNCTION(rival, key_equal) // of the same tuple

// Touches the entries that the next flow is likely to be given: they are freed, and
// first used, in order.
static __always_inline void touch_entries(const bool v6)
{
	__u32 zero = 0, one, two;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);
	void *e;

	if (!stock)
		return;
	one = stock->top;
	two = one ? one - 2 : stock->fresh + 1;
	one = one ? one - 1 : stock->fresh;
	e = entry_at(one, v6);
	if (e)
		touch_word(state_word(e, v6));
	e = entry_at(two, v6);
	if (e)
		touch_word(state_word(e, v6));
}

// Takes an entry: one that was freed, else one that was never used.
static __always_inline __u32 take_entry(const bool v6)
{
	__u32 zero = 0, limit = v6 ? entries6 : entries4, fresh;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	if (!stock)
		return NO_ENTRY;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 64; i++) { // tries: each failed one is another CPU's success
		__u64 top = *(volatile __u64 *)&stock->top, next;
		void *e;

		if (!(__u32)top)
			break;
		e = entry_at((__u32)top - 1, v6);
		if (!e)
			return NO_ENTRY;
		next = ((top >> 32) + 1) << 32 | *(volatile __u32 *)&meta_of(e, v6)->twin;
		if (__sync_val_compare_and_swap(&stock->top, top, next) == top)
			return (__u32)top - 1;
	}
	if (*(volatile __u32 *)&stock->fresh >= limit)
		return NO_ENTRY;
	fresh = __sync_fetch_and_add(&stock->fresh, 1);
	return fresh < limit ? fresh : NO_ENTRY;
}

// Whether two entries are left: one for each direction of a flow. It only looks.
static __always_inline bool table_has_room(bool v6)
{
	__u32 zero = 0, limit = v6 ? entries6 : entries4;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	return stock && ((__u32) * (volatile __u64 *)&stock->top || *(volatile __u32 *)&stock->fresh + 1 < limit);
}

// Gives back an entry that nothing points at. One that many CPUs at once keep from the
// stack is left to the sweeper.
static __always_inline void give_entry(void *e, __u32 index, const bool v6)
{
	__u32 zero = 0;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	*(volatile __u32 *)state_word(e, v6) = 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 64 && stock; i++) {
		__u64 top = *(volatile __u64 *)&stock->top;

		*(volatile __u32 *)&meta_of(e, v6)->twin = top;
		if (__sync_val_compare_and_swap(&stock->top, top, ((top >> 32) + 1) << 32 | (index + 1)) == top)
			return;
	}
	*(volatile __u32 *)state_word(e, v6) = (__u32)ENTRY_RETURNING << STATE_SHIFT;
}

__noinline __u32 take4(void)
{
	return take_entry(false);
}

__noinline __u32 take6(void)
{
	return take_entry(true);
}

__noinline int give(__u32 index, __u32 v6)
{
	void *e;

	if (v6) {
		e = entry_at(index, true);
		if (e)
			give_entry(e, index, true);
	} else {
		e = entry_at(index, false);
		if (e)
			give_entry(e, index, false);
	}
	return 0;
}

// Takes one of the slots from..to of a bucket.
static __always_inline bool take_slot(struct bucket *bucket, int from, int to, __u32 value)
{
#pragma clang loop unroll(disable)
	for (int k = from; k < to; k++) {
		if (!*(volatile __u32 *)&bucket->slots[k] && !__sync_val_compare_and_swap(&bucket->slots[k], 0, value))
			return true;
	}
	return false;
}

// The same of the second bucket of a tuple, which its first one counts.
static __always_inline bool spill_slot(struct bucket *one, struct bucket *two, int from, int to, __u32 value)
{
	if (one == two || !take_slot(two, from, to, value))
		return false;
	__sync_fetch_and_add(&one->spilled, 1);
	return true;
}

// Lets a free slot point at a tuple's entry. False when both buckets are full. The
// second is used when the first is nearly full and the second is not as full: of an index
// that is as full as it gets (see buckets in tables.go) one slot in forty is a second one,
// and one bucket in nine has spilled; of a half full one, one slot in 10,000.
static __always_inline int claim_slot(const struct tuple *t, __u32 index, const bool v6)
{
	struct place at = place_of(t, v6);
	__u32 value = at.tag | (index + 1);
	struct bucket *one = bucket_at(at.bucket[0], v6), *two = bucket_at(at.bucket[1], v6);

	if (!one || !two)
		return 0;
	return take_slot(one, 0, 13, value) || spill_slot(one, two, 0, 13, value) || take_slot(one, 13, 14, value) ||
	       spill_slot(one, two, 13, 14, value) || take_slot(one, 14, BUCKET_SLOTS, value) ||
	       spill_slot(one, two, 14, BUCKET_SLOTS, value);
}

__noinline int claim_slot4(const struct tuple *t, __u32 index)
{
	return t ? claim_slot(t, index, false) : 0;
}

__noinline int claim_slot6(const struct tuple *t, __u32 index)
{
	return t ? claim_slot(t, index, true) : 0;
}

// An entry for a tuple, which searches find once it is live; or NO_ENTRY.
static __always_inline __u32 claim(const struct tuple *t, bool v6)
{
	__u32 index = v6 ? take6() : take4();

	if (index == NO_ENTRY || (v6 ? claim_slot6(t, index) : claim_slot4(t, index)))
		return index;
	give(index, v6);
	return NO_ENTRY;
}

// Frees a slot of a bucket that has a value.
static __always_inline bool clear_slot(struct bucket *bucket, __u32 value)
{
#pragma clang loop unroll(disable)
	for (int k = 0; k < BUCKET_SLOTS; k++) {
		if (*(volatile __u32 *)&bucket->slots[k] == value &&
		    __sync_val_compare_and_swap(&bucket->slots[k], value, 0) == value)
			return true;
	}
	return false;
}

// Frees the slot by which a tuple finds an entry.
static __always_inline int unindex(const struct tuple *t, __u32 index, const bool v6)
{
	struct place at = place_of(t, v6);
	__u32 value = at.tag | (index + 1);
	struct bucket *one = bucket_at(at.bucket[0], v6), *two = bucket_at(at.bucket[1], v6);

	if (!one || !two)
		return 0;
	if (clear_slot(one, value))
		return 1;
	if (!clear_slot(two, value))
		return 0;
	__sync_fetch_and_sub(&one->spilled, 1);
	return 1;
}

// Gives back the slot and the entry of a key. Only for entries that were never
// live, or long dead.
static __always_inline void release(const struct tuple *t, __u32 index, const bool v6)
{
	if (unindex(t, index, v6))
		give(index, v6);
}

__noinline int release4(const struct tuple *t, __u32 index)
{
	if (t)
		release(t, index, false);
	return 0;
}

__noinline int release6(const struct tuple *t, __u32 index)
{
	if (t)
		release(t, index, true);
	return 0;
}

static __always_inline void set_state(void *e, enum entry_state state, const bool v6)
{
	__u32 *word = state_word(e, v6);

	__sync_fetch_and_and(word, 0xffffff);
	__sync_fetch_and_or(word, (__u32)state << STATE_SHIFT);
}

static __always_inline void kill(void *e, __u32 now, enum entry_state state, const bool v6)
{
	meta_of(e, v6)->seen = now;
	set_state(e, state, v6);
}

#endif
