// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Ports of the pool addresses: bitmaps with random allocation.
#ifndef SLUICE_PORT_H
#define SLUICE_PORT_H

#include "nat/binding.h"

// Returns the bit number of a port in its bitmap: even ports precede odd ports.
static __always_inline __u32 bit_of(__u16 port)
{
	return (port & 1) << 15 | port >> 1;
}

// Returns the bits of word w that represent half-ports first..last. A half-port is a port / 2; w
// counts the words of one parity.
static __always_inline __u64 usable(__u32 w, __u32 first, __u32 last)
{
	__u64 mask = ~0ULL;

	if (w == first / 64)
		mask &= ~0ULL << (first % 64);
	if (w == last / 64)
		mask &= ~0ULL >> (63 - last % 64);
	return mask;
}

// Takes a free bit of one word. Returns its bit number, or -1.
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

// Returns the first word at or after w that the summary does not mark as full. The search wraps
// around within from..to. It returns w itself if all words are full.
__noinline __u32 open_word(__u32 map, __u32 w, __u32 from, __u32 to)
{
	struct port_map *m = bpf_map_lookup_elem(&port_maps, &map);
	__u32 at = w;

	if (!m)
		return w;
#pragma clang loop unroll(disable)
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

// Takes a port of parity r->odd within half-ports r->from..r->to. The search begins at a random
// word and continues with the next word that is not full. At any load, two steps nearly always
// suffice.
__noinline int take_half(struct port_request *r)
{
	__u32 w;

	if (!r || r->from > r->to || r->to > 0x7fff)
		return -1;
	w = r->from / 64 + ((__u64)bpf_get_prandom_u32() * (r->to / 64 - r->from / 64 + 1) >> 32);
	for (int i = 0; i < 16; i++) {
		__u32 base = r->odd ? PORT_WORDS / 2 : 0;
		int bit = take_word(r->map, base + w, usable(w, r->from, r->to));

		if (bit >= 0)
			return bit;
		base = r->odd ? PORT_WORDS / 2 : 0;
		w = w < r->to / 64 ? w + 1 : r->from / 64;
		w = open_word(r->map, base + w, base + r->from / 64, base + r->to / 64) - base;
	}
	return -1;
}

// Takes a port of one parity within first..last.
static __always_inline int take_parity(struct port_request *r, __u32 odd, __u32 first, __u32 last)
{
	if (first > last || last < odd)
		return -1;
	r->odd = odd;
	r->from = (first + !odd) >> 1;
	r->to = (last - odd) >> 1;
	return take_half(r);
}

// Takes a port within first..last, preferably of the same parity as r->want.
static __always_inline int take_range(struct port_request *r, __u32 first, __u32 last)
{
	int bit = take_parity(r, r->want & 1, first, last);

	return bit >= 0 ? bit : take_parity(r, !(r->want & 1), first, last);
}

// Takes exactly the port r->want.
__noinline int take_exact(struct port_request *r)
{
	__u32 bit;

	if (!r || r->want < r->first || r->want > r->last)
		return 0;
	bit = bit_of(r->want);
	if (take_word(r->map, bit / 64, 1ULL << bit % 64) < 0)
		return 0;
	r->port = r->want;
	return 1;
}

// Takes a port within first..last. On an address of this host, the ports of ip_local_port_range are
// the last choice: connections of the host itself then rarely conflict with a flow.
static __always_inline int take_upper(struct port_request *r, __u32 first, __u32 last)
{
	__u32 number = r->map / PORT_CLASSES;
	struct pool_addr *address;
	int bit = -1;

	if (first <= local_port_last && last > local_port_last) {
		address = bpf_map_lookup_elem(&pools, &number);
		if (address && address->local) {
			bit = take_range(r, first, local_port_last);
			first = local_port_last + 1;
		}
	}
	return bit >= 0 ? bit : take_range(r, first, last);
}

// Takes a port and returns REASON_NONE with r->port, or REASON_NO_PORT. Ports below 1024 map to
// ports below 1024, and higher ports to higher ports, as long as one is free (RFC 4787 REQ-3a).
static __always_inline enum reason choose_port(struct port_request *r)
{
	int bit;

	if (r->whole || r->last < 1024) {
		bit = take_range(r, r->first, r->last);
	} else if (r->first >= 1024) {
		bit = take_upper(r, r->first, r->last);
	} else {
		bit = r->want < 1024 ? take_range(r, r->first, 1023) : take_upper(r, 1024, r->last);
		if (bit < 0)
			bit = r->want < 1024 ? take_upper(r, 1024, r->last) : take_range(r, r->first, 1023);
	}
	if (bit < 0)
		return REASON_NO_PORT;
	r->port = (bit & 0x7fff) << 1 | bit >> 15;
	return REASON_NONE;
}

// Takes the exact port if the request requires it and it is free, otherwise any other.
static __always_inline enum reason choose_wanted(struct port_request *r)
{
	if (have_mappings && r->exact && take_exact(r))
		return REASON_NONE;
	return choose_port(r);
}

// Takes a port; a global function that the verifier checks once.
__noinline enum reason take_port(struct port_request *r)
{
	return r ? choose_wanted(r) : REASON_INTERNAL;
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

#endif
