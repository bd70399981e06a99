// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Fills a larger index of a flow table while packets flow. Insertions and deletions during this
// time update both indexes (claim_slot and unindex in stock.h). This program adds the slots of all
// other entries.
#ifndef SLUICE_REINDEX_H
#define SLUICE_REINDEX_H

#include "nat/binding.h"

struct reindex {
	__u32 v6;
	__u32 first; // number of the first entry
	__u32 count;
	__u32 failed; // entries with no free slot in either bucket
};

// Reports whether one of the two buckets of a tuple has a slot for the entry.
static __always_inline bool indexed_in(__u64 in, const struct tuple *t, __u32 index, const bool v6)
{
	struct place at = place_in(in, t, v6);
	__u32 value = at.tag | (index + 1);

	for (int i = 0; i < 2; i++) {
		struct bucket *bucket = bucket_at(at.bucket[i], v6);

		for (int k = 0; bucket && k < BUCKET_SLOTS; k++) {
			if (*(volatile __u32 *)&bucket->slots[k] == value)
				return true;
		}
	}
	return false;
}

// Adds an entry to the next index, if the index in force has it under this key. Returns false if
// there is no room.
static __always_inline bool reindex_key(const struct tuple *key, __u32 index, const bool v6)
{
	__u64 in = index_in_force(v6), next = next_index(v6);

	if (!indexed_in(in, key, index, v6) || indexed_in(next, key, index, v6))
		return true; // an insertion in progress writes to both indexes
	if (!(v6 ? claim_in6(key, index, next) : claim_in4(key, index, next)))
		return false;
	if (!indexed_in(in, key, index, v6)) { // freed meanwhile, possibly before this slot existed
		if (v6)
			unindex_in6(key, index, next);
		else
			unindex_in4(key, index, next);
	}
	return true;
}

static __always_inline long reindex_nth(__u32 i, struct reindex *r, const bool v6)
{
	__u32 index = r->first + i, word;
	void *e = entry_at(index, v6);
	struct tuple key = {};

	if (!e)
		return 1;
	word = *(volatile __u32 *)state_word(e, v6);
	if (word >> STATE_SHIFT == ENTRY_FREE || word >> STATE_SHIFT == ENTRY_RETURNING)
		return 0;
	key_of_entry(&key, e, v6);
	if (!reindex_key(&key, index, v6))
		r->failed++;
	if (key.kind != KIND_FLOW || !made_with_binding(meta_of(e, v6)))
		return 0;
	key_of_binding(&key, e, v6);
	if (!reindex_key(&key, index, v6))
		r->failed++;
	return 0;
}

static long reindex_nth4(__u32 i, void *ctx)
{
	return reindex_nth(i, ctx, false);
}

static long reindex_nth6(__u32 i, void *ctx)
{
	return reindex_nth(i, ctx, true);
}

// Adds a range of entries to the next index; user space runs this program.
SEC("syscall")
int fill_index(struct reindex *ctx)
{
	struct reindex r = *ctx;

	if (r.v6)
		bpf_loop(r.count, reindex_nth6, &r, 0);
	else
		bpf_loop(r.count, reindex_nth4, &r, 0);
	ctx->failed = r.failed;
	return 0;
}

#endif
