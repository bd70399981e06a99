// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Port blocks (RFC 6888 REQ-14): a client's ports are allocated from blocks reserved for the
// client. One log line for each block is enough to identify the user of a port.
#ifndef SLUICE_BLOCK_H
#define SLUICE_BLOCK_H

#include "maps.h"
#include "packet/bytes.h"

static __always_inline __u32 lowest_bit(__u64 x)
{
	return __builtin_ctzll(x);
}

static __always_inline __u32 blocks_of(const struct nat_rule *rule)
{
	return rule->block ? ((__u32)rule->port_last - rule->port_first + 1) / rule->block : 0;
}

// State of the search for a free block of a pool address, starting at a random word.
struct block_search {
	__u32 number; // pool address
	__u32 random;
	int found;
};

// Allocates a free block in the i-th word of the search. Nonzero: the search is over.
static long take_block_in(__u32 i, struct block_search *s)
{
	struct block_map *m = bpf_map_lookup_elem(&block_maps, &s->number);
	__u32 w = ((s->random >> 8) + i) & (BLOCK_WORDS - 1), n;
	__u64 free, high, bit;

	if (!m)
		return 1;
	free = ~*(volatile __u64 *)&m->words[w];
	high = free & (~0ULL << (s->random % 64));
	n = lowest_bit(high ? high : free) & 63;
	bit = 1ULL << n;
	if (!free || __sync_fetch_and_or(&m->words[w], bit) & bit)
		return 0;
	s->found = w * 64 + n;
	return 1;
}

// Allocates a free block of a pool address. Returns its number, or -1.
__noinline int take_block(__u32 number)
{
	struct block_search s = { .number = number, .random = bpf_get_prandom_u32(), .found = -1 };

	bpf_loop(2 * BLOCK_WORDS, take_block_in, &s, 0); // one round, and another for races with other CPUs
	return s.found;
}

static __always_inline int release_block(__u32 number, __u32 block)
{
	struct block_map *m = bpf_map_lookup_elem(&block_maps, &number);
	__u32 w = block / 64;

	bounded(w);
	if (m && w < BLOCK_WORDS)
		__sync_fetch_and_and(&m->words[w], ~(1ULL << block % 64));
	return 0;
}

// Reports the allocation or release of a block to user space.
static __always_inline void log_block(__u32 id, const union addr *client, __u32 number, __u32 block, bool given)
{
	struct pool_addr *address = bpf_map_lookup_elem(&pools, &number);
	struct nat_rule *rule = bpf_map_lookup_elem(&nat_rules, &id);
	struct control *c = the_control();
	struct block_event *e;

	if (!address || !rule || !c)
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		__sync_fetch_and_add(&c->lost_logs, 1);
		return;
	}
	e->kind = EVENT_BLOCK;
	e->rule = id;
	e->client = *client;
	e->outside = address->addr;
	e->first = rule->port_first + block * rule->block;
	e->last = e->first + rule->block - 1;
	e->outside_family = address->family;
	e->client_family = rule->prefix_len ? FAMILY_6 : address->family;
	e->given = given;
	__builtin_memset(e->pad, 0, sizeof(e->pad));
	bpf_ringbuf_submit(e, 0);
}

// Releases the blocks of a client, after its removal or the loss of its pool address by the host.
__noinline int release_blocks(const struct client_key *who, __u32 number)
{
	struct client_key key;
	struct client *c;

	if (!who)
		return 0;
	key = *who; // Linux 6.1 accepts map keys only from the stack or from map values
	c = bpf_map_lookup_elem(&clients, &key);
	if (!c)
		return 0;
	for (int i = 0; i < CLIENT_BLOCKS; i++) {
		__u32 block = __sync_lock_test_and_set(&c->blocks[i], 0);

		if (!block)
			break;
		log_block(key.owner & 0xffff, &key.addr, number, block - 1, false);
		release_block(number, block - 1);
	}
	return 0;
}

#endif
