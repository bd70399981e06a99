// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Allocation of flow table entries and of their index slots; see table.h.
#ifndef SLUICE_STOCK_H
#define SLUICE_STOCK_H

#include "flow/table.h"

static __always_inline void key_of_entry(struct tuple *key, void *e, const bool v6)
{
	if (v6) {
		*key = ((struct flow6 *)e)->key;
	} else {
		struct tuple4 *k = &((struct flow4 *)e)->key;

		key->saddr.w[0] = k->saddr;
		key->daddr.w[0] = k->daddr;
		*(__u64 *)&key->sport = *(__u64 *)&k->sport;
	}
}

// Touches the entries that the next flow will probably use: entries are freed, and first used, in
// order.
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

// Allocates an entry: from the free list, else one that was never used.
static __always_inline __u32 take_entry(const bool v6)
{
	__u32 zero = 0, room, fresh;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	if (!stock)
		return NO_ENTRY;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 64; i++) { // each failed try is a success of another CPU
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
	room = *(volatile __u32 *)&stock->room;
	if (*(volatile __u32 *)&stock->fresh >= room)
		return NO_ENTRY;
	fresh = __sync_fetch_and_add(&stock->fresh,
				     1); // the number is lost: at most one per CPU
	return fresh < room ? fresh : NO_ENTRY;
}

// Reports whether two entries are free, one for each direction of a flow. It allocates nothing.
static __always_inline bool table_has_room(bool v6)
{
	__u32 zero = 0;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	return stock && ((__u32) * (volatile __u64 *)&stock->top ||
			 *(volatile __u32 *)&stock->fresh + 1 < *(volatile __u32 *)&stock->room);
}

// Puts an unreferenced entry on the free list. If many CPUs compete for the list, the entry is left
// to the sweeper.
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

// Writes a value to a free slot among from..to of a bucket.
static __always_inline bool take_slot(struct bucket *bucket, int from, int to, __u32 value)
{
#pragma clang loop unroll(disable)
	for (int k = from; k < to; k++) {
		if (!*(volatile __u32 *)&bucket->slots[k] && !__sync_val_compare_and_swap(&bucket->slots[k], 0, value))
			return true;
	}
	return false;
}

// Takes a slot in the second bucket of a tuple; the first bucket counts it.
static __always_inline bool spill_slot(struct bucket *one, struct bucket *two, int from, int to, __u32 value)
{
	if (one == two || !take_slot(two, from, to, value))
		return false;
	__sync_fetch_and_add(&one->spilled, 1);
	return true;
}

// Makes a free slot of an index point to the entry of a tuple. Returns 0 if both buckets are full.
// The second bucket is used if the first is nearly full and the second has more room. In an index
// at its highest load (see buckets in tables.go), one slot in forty is in a second bucket, and one
// bucket in nine has spilled. In a half full index, it is one slot in 10,000.
static __always_inline int claim_in(__u64 in, const struct tuple *t, __u32 index, const bool v6)
{
	struct place at = place_in(in, t, v6);
	__u32 value = at.tag | (index + 1);
	struct bucket *one = bucket_at(at.bucket[0], v6), *two = bucket_at(at.bucket[1], v6);

	if (!one || !two)
		return 0;
	return take_slot(one, 0, 13, value) || spill_slot(one, two, 0, 13, value) || take_slot(one, 13, 14, value) ||
	       spill_slot(one, two, 13, 14, value) || take_slot(one, 14, BUCKET_SLOTS, value) ||
	       spill_slot(one, two, 14, BUCKET_SLOTS, value);
}

__noinline int claim_in4(const struct tuple *t, __u32 index, __u64 in)
{
	return t ? claim_in(in, t, index, false) : 0;
}

__noinline int claim_in6(const struct tuple *t, __u32 index, __u64 in)
{
	return t ? claim_in(in, t, index, true) : 0;
}

// Frees the slot of a bucket that holds a value.
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

// Frees the slot of an index through which a tuple finds an entry.
static __always_inline int unindex_in(__u64 in, const struct tuple *t, __u32 index, const bool v6)
{
	struct place at = place_in(in, t, v6);
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

__noinline int unindex_in4(const struct tuple *t, __u32 index, __u64 in)
{
	return t ? unindex_in(in, t, index, false) : 0;
}

__noinline int unindex_in6(const struct tuple *t, __u32 index, __u64 in)
{
	return t ? unindex_in(in, t, index, true) : 0;
}

// Frees all slots through which a tuple finds an entry. Returns 0 if there was none.
static __always_inline int unindex(const struct tuple *t, __u32 index, const bool v6)
{
	__u64 in = index_in_force(v6), next = next_index(v6);
	int freed = v6 ? unindex_in6(t, index, in) : unindex_in4(t, index, in);

	if (next && next != in)
		freed |= v6 ? unindex_in6(t, index, next) : unindex_in4(t, index, next);
	return freed;
}

// Makes slots point to the entry of a tuple: first in the next index, then in the index in force.
// They are freed in the opposite order. An entry that fill_index finds in the index in force
// therefore has its slot in the next index, or fill_index adds it. Returns 0 if one of the indexes
// has no room.
static __always_inline int claim_slot(const struct tuple *t, __u32 index, const bool v6)
{
	__u64 in = index_in_force(v6), next = next_index(v6);

	if (next == in)
		next = 0;
	if (next && !(v6 ? claim_in6(t, index, next) : claim_in4(t, index, next)))
		return 0;
	if (v6 ? claim_in6(t, index, in) : claim_in4(t, index, in))
		return 1;
	if (next) {
		if (v6)
			unindex_in6(t, index, next);
		else
			unindex_in4(t, index, next);
	}
	return 0;
}

// Allocates an entry for a tuple, with its slots. Searches find the entry once it is live. Returns
// NO_ENTRY if there is no room.
static __always_inline __u32 claim(const struct tuple *t, bool v6)
{
	__u32 index = v6 ? take6() : take4();

	if (index == NO_ENTRY || (v6 ? claim_slot(t, index, true) : claim_slot(t, index, false)))
		return index;
	give(index, v6);
	return NO_ENTRY;
}

// Frees the slot and the entry of a key. Only for entries that were never live, or that have been
// dead for a second.
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

// Kills a live flow and reports success. The CPU that succeeds releases the resources of the flow:
// the sweeper, a packet that opens another flow in its place, or the creator that withdraws it.
static __always_inline bool take_life(void *e, __u32 now, enum entry_state state, const bool v6)
{
	__u32 *word = state_word(e, v6), was = *(volatile __u32 *)word;

	meta_of(e, v6)->seen = now;
	return was >> STATE_SHIFT == ENTRY_LIVE &&
	       __sync_val_compare_and_swap(word, was, (was & 0xffffff) | (__u32)state << STATE_SHIFT) == was;
}

// Makes a dead entry live again and reports success. The caller has killed it, and has released
// nothing.
static __always_inline bool revive(void *e, const bool v6)
{
	__u32 *word = state_word(e, v6), was = *(volatile __u32 *)word;

	return was >> STATE_SHIFT == ENTRY_DEAD &&
	       __sync_val_compare_and_swap(word, was, (was & 0xffffff) | (__u32)ENTRY_LIVE << STATE_SHIFT) == was;
}

#endif
