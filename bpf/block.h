// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Blocks of ports (RFC 6888 REQ-14): each client's ports come from runs that are
// its own, so that one line of the log a block tells who had a port.
#ifndef SLUICE_BLOCK_H
#define SLUICE_BLOCK_H

#include "maps.h"

static __always_inline __u32 lowest_bit(__u64 x)
{
	return __builtin_ctzll(x);
}

// Makes the compiler forget what it knows of a number, so that the comparison
// with its bound stays in the program, where the verifier looks for it.
#define bounded(x) asm volatile("" : "+r"(x))

static __always_inline __u32 blocks_of(const struct nat_rule *rule)
{
	return rule->block ? ((__u32)rule->port_last - rule->port_first + 1) / rule->block : 0;
}

// A search for a free block of a pool address, from a word on.
struct block_search {
	__u32 number; // of the address
	__u32 random;
	int found;
};

// Takes a free block in the i-th word of them. Not zero: the search is over.
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

// Takes a free block of a pool address. Its number, or -1.
__noinline int take_block(__u32 number)
{
	struct block_search s = { .number = number, .random = bpf_get_prandom_u32(), .found = -1 };

	bpf_loop(2 * BLOCK_WORDS, take_block_in, &s, 0); // once round, and again where another CPU was faster
	return s.found;
}

static __always_inline int give_block(__u32 number, __u32 block)
{
	struct block_map *m = bpf_map_lookup_elem(&block_maps, &number);
	__u32 w = block / 64;

	bounded(w);
	if (m && w < BLOCK_WORDS)
		__sync_fetch_and_and(&m->words[w], ~(1ULL << block % 64));
	return 0;
}

// Tells user space who has a block from now on, or has it no longer.
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

// Takes back the blocks of a client that is being forgotten, or whose pool address the
// host has lost.
__noinline int give_blocks(const struct client_key *who, __u32 number)
{
	struct client_key key;
	struct client *c;

	if (!who)
		return 0;
	key = *who; // Linux 6.1 takes keys only from the stack or from maps
	c = bpf_map_lookup_elem(&clients, &key);
	if (!c)
		return 0;
	for (int i = 0; i < CLIENT_BLOCKS; i++) {
		__u32 block = __sync_lock_test_and_set(&c->blocks[i], 0);

		if (!block)
			break;
		log_block(key.owner & 0xffff, &key.addr, number, block - 1, false);
		give_block(number, block - 1);
	}
	return 0;
}

#endif
