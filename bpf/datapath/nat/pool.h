// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Pools: chooses the pool address of a client and a port, paired, in blocks or computed.
#ifndef SLUICE_POOL_H
#define SLUICE_POOL_H

#include "nat/port.h"
#include "packet/prefix.h"

// Returns the pool address with this address, and its number; null if there is none.
static __always_inline struct pool_addr *pool_of(const union addr *a, __u32 *number)
{
	union addr key = *a;
	__u32 *found = bpf_map_lookup_elem(&pool_numbers, &key);

	if (!found)
		return 0;
	*number = *found;
	return bpf_map_lookup_elem(&pools, number);
}

// Returns the number of the pool address in an element of runs, or NO_ENTRY if the element does not
// exist.
__noinline __u32 pool_number(__u32 place)
{
	__u64 *number = bpf_map_lookup_elem(&runs, &place);

	return number ? *number : NO_ENTRY;
}

// Fills b with the outside endpoint of the binding that an entry leads to.
static __always_inline bool bind_outside(struct bind *b, __u32 index)
{
	if (b->family == FAMILY_6) {
		struct flow6 *f = entry_at(index, true);

		if (!f)
			return false;
		b->outside = f->to_saddr;
		b->port = f->to_sport;
		b->slot = slot_of(f, true);
		return true;
	}
	struct flow4 *f = entry_at(index, false);

	if (!f)
		return false;
	b->outside.d[0] = f->to_saddr;
	b->outside.d[1] = 0;
	b->port = f->to_sport;
	b->slot = slot_of(f, false);
	return true;
}

static __always_inline enum reason bind_existing(struct bind *b, __u32 index)
{
	if (!bind_outside(b, index))
		return REASON_INTERNAL;
	b->index = binding_join(index, b->family == FAMILY_6, b->now);
	return b->index == NO_ENTRY ? REASON_NONE : REASON_FLOW;
}

static __always_inline __u32 used_ports(__u32 number, __u32 class)
{
	__u32 map = number * PORT_CLASSES + class;
	struct port_map *m = bpf_map_lookup_elem(&port_maps, &map);

	return m ? *(volatile __u32 *)&m->used : 0;
}

// Returns the pool address at which the search begins. The client's address hashes to two
// candidates; the one with fewer used ports wins. Clients keep their pool address (RFC 4787 REQ-2),
// so this choice fills the pool evenly.
static __always_inline __u32 first_address(const union addr *a, __u32 first, __u32 len, __u32 class)
{
	__u32 h = (a->w[0] ^ a->w[1] ^ a->w[2] ^ a->w[3]) * 0x9e3779b1U;
	__u32 one = (__u64)h * len >> 32, two = (__u64)(h * 0x85ebca6bU) * len >> 32;

	return len > 1 && used_ports(pool_number(first + two), class) < used_ports(pool_number(first + one), class) ?
		       two :
		       one;
}

static __always_inline __u32 first_tried(const struct bind *b, const struct port_request *r)
{
	if (have_mappings && b->place)
		return b->place - 1;
	return first_address(&b->inside.saddr, r->pool, r->pool_len, port_class(b->inside.l4_proto));
}

static __always_inline bool set_pool(const struct bind *b, struct port_request *r)
{
	__u32 id = b->rule;
	struct nat_rule *rule = bpf_map_lookup_elem(&nat_rules, &id);

	if (!rule)
		return false;
	r->pool = b->outside_family == FAMILY_6 ? rule->pool6 : rule->pool;
	r->pool_len = b->outside_family == FAMILY_6 ? rule->pool6_len : rule->pool_len;
	return true;
}

#define POOL_TRIES 16 // number of pool addresses that are tried for a new client

// The verifier checks the functions below one by one. They look up the client again after
// bind_allocate has counted it. The key is in the working memory and needs no stack.
static __always_inline struct client *client_again(void)
{
	struct work *w = the_work();

	return w ? bpf_map_lookup_elem(&clients, &w->who) : (void *)0;
}

// Assigns the pool address of a newly taken port to the client. It frees the port if another CPU
// chose another address.
static __always_inline bool pair(struct client *client, struct port_request *r)
{
	__u32 mine = r->map / PORT_CLASSES + 1, owned = __sync_val_compare_and_swap(&client->pool, 0, mine);

	if (!owned || owned == mine)
		return true;
	give_port(r->map, r->port);
	r->owned = owned;
	return false;
}

#define POOL_PARTING 0xffffffffU // not an address number: one CPU is freeing the blocks of the client

// Releases a client from a pool address that left the pool of the rule. A client with blocks keeps
// the address until its ports have passed their hold-down, because no other client may use them
// before. The exception is an address that the host lost. Returns 0 if the caller has to try again.
// w->request.owned becomes the client's address if the pool still contains it.
__noinline int part(struct client *c, __u32 rule)
{
	struct work *w = the_work();
	struct pool_addr *address;
	__u32 owned, number;

	if (!w || !c)
		return 0;
	owned = *(volatile __u32 *)&c->pool;
	number = owned - 1;
	if (!owned || in_pool(number, rule)) {
		w->request.owned = owned;
		return 1;
	}
	if (!have_blocks || !*(volatile __u32 *)&c->blocks[0]) {
		__sync_val_compare_and_swap(&c->pool, owned, 0);
		return 1;
	}
	address = bpf_map_lookup_elem(&pools, &number);
	if (address && !address->lost)
		return 1;
	if (owned == POOL_PARTING || __sync_val_compare_and_swap(&c->pool, owned, POOL_PARTING) != owned)
		return 0;
	release_blocks(&w->who, number);
	*(volatile __u32 *)&c->pool = 0;
	return 1;
}

// Takes a port of the client's pool address. A client without one tries the address at "at".
// REASON_NO_PORT: another address may have a port, if the client had none before.
__noinline enum reason take_at(const struct bind *b, struct port_request *r, __u32 at)
{
	struct client *client;

	if (!b || !r)
		return REASON_INTERNAL;
	r->map = (r->owned ? r->owned - 1 : pool_number(r->pool + at)) * PORT_CLASSES + port_class(b->inside.l4_proto);
	if (choose_wanted(r) != REASON_NONE)
		return REASON_NO_PORT;
	if (r->owned || !b->client_seen)
		return REASON_NONE;
	client = client_again();
	return client && pair(client, r) ? REASON_NONE : REASON_NO_PORT;
}

// Takes a port and tries the pool addresses in turn.
__noinline enum reason take_paired(const struct bind *b, struct port_request *r)
{
	__u32 at;

	if (!b || !r || !set_pool(b, r))
		return REASON_INTERNAL;
	at = first_tried(b, r);
	for (__u32 i = 0; i < POOL_TRIES && i < r->pool_len; i++) {
		bool owned = r->owned;
		enum reason reason = take_at(b, r, at);

		if (reason != REASON_NO_PORT || owned)
			return reason;
		at = at + 1 < r->pool_len ? at + 1 : 0;
	}
	return REASON_NO_PORT;
}

// Sets the port range of r to the i-th block of a client. It allocates the block if the client has
// none there.
__noinline enum reason block_of(const struct bind *b, struct port_request *r, __u32 i)
{
	__u32 at, number, owned, block, id;
	struct nat_rule *rule;
	struct client *c;

	if (!b || !r || i >= CLIENT_BLOCKS)
		return REASON_INTERNAL;
	id = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	c = client_again();
	if (!rule || !c || !set_pool(b, r))
		return REASON_INTERNAL;
	at = first_tried(b, r);
	for (__u32 k = 0; k < POOL_TRIES && k < r->pool_len; k++) {
		block = *(volatile __u32 *)&c->blocks[i];
		owned = *(volatile __u32 *)&c->pool;
		if (block && owned)
			goto found;
		number = owned ? owned - 1 : pool_number(r->pool + at);
		block = take_block(number) + 1;
		if (!block) {
			if (owned)
				return REASON_NO_PORT;
			at = at + 1 < r->pool_len ? at + 1 : 0;
			continue;
		}
		owned = owned ? owned : __sync_val_compare_and_swap(&c->pool, 0, number + 1);
		if ((!owned || owned == number + 1) && !__sync_val_compare_and_swap(&c->blocks[i], 0, block)) {
			owned = number + 1;
			log_block(id, &b->inside.saddr, number, block - 1, true);
			goto found;
		}
		release_block(number, block - 1); // another CPU took a block first
	}
	return REASON_NO_PORT;
found:
	r->first = rule->port_first + (block - 1) * rule->block;
	r->last = r->first + rule->block - 1;
	r->map = (owned - 1) * PORT_CLASSES + port_class(b->inside.l4_proto);
	return REASON_NONE;
}

// Takes a port from the blocks of the client.
static __always_inline enum reason take_blocked(const struct bind *b, struct port_request *r)
{
	for (__u32 i = 0; i < CLIENT_BLOCKS; i++) {
		enum reason reason = block_of(b, r, i);

		if (reason != REASON_NONE)
			return reason;
		if (take_port(r) == REASON_NONE)
			return REASON_NONE;
	}
	return REASON_NO_PORT;
}

// Computes pool address and block from the client's address (RFC 7422), more exactly from its
// position among the sources of the rule. The value of a prefix in LIST_BLOCKS is 1 << 63 |
// position of its first address << 8 | host bits. Returns false if the rule has no block for the
// client.
static __always_inline bool compute_block(const struct bind *b, struct port_request *r, const struct nat_rule *rule,
					  __u32 id)
{
	__u32 low, bits, count;
	__u64 value, place;
	bool v6, out6;

	v6 = b->family == FAMILY_6;
	out6 = b->outside_family == FAMILY_6;
	value = member_of(&b->inside.saddr, LIST_BLOCKS | id << 16, v6);
	low = bpf_ntohl(v6 ? b->inside.saddr.w[3] : b->inside.saddr.w[0]);
	bits = value & 0xff;
	count = blocks_of(rule);
	place = (value << 1 >> 9) + (bits < 32 ? low & ((1U << bits) - 1) : low);
	if (!value || !count || place / count >= (out6 ? rule->pool6_len : rule->pool_len))
		return false;
	r->first = rule->port_first + (__u32)(place % count) * rule->block;
	r->last = r->first + rule->block - 1;
	r->map = pool_number((out6 ? rule->pool6 : rule->pool) + (__u32)(place / count)) * PORT_CLASSES +
		 port_class(b->inside.l4_proto);
	return true;
}

__noinline enum reason take_computed(const struct bind *b, struct port_request *r)
{
	struct nat_rule *rule;
	__u32 id;

	if (!b || !r)
		return REASON_INTERNAL;
	id = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_INTERNAL;
	return compute_block(b, r, rule, id) ? take_port(r) : REASON_NO_PORT;
}

static __always_inline void port_range(const struct nat_rule *rule, const struct bind *b, struct port_request *r)
{
	bool icmp = b->inside.l4_proto == IPPROTO_ICMP || b->inside.l4_proto == IPPROTO_ICMPV6;

	r->want = b->want ? b->want : bpf_ntohs(b->inside.sport);
	r->exact = b->want;
	r->whole = icmp;
	r->first = rule->port_first;
	r->last = rule->port_last;
	if (icmp && !rule->block) {
		r->first = 0;
		r->last = 0xffff;
	}
}

#endif
