// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Sources that firewall rules drop without any other condition. The programs check them before they
// parse the headers behind the addresses.
//
// All denied prefixes are in one table, an array of cache lines. User space never changes a table.
// It fills another one and replaces the table atomically, so that a prefix in both tables is denied
// at every moment. The prefixes of one family and length form a group, which is a hash table of its
// own. A search masks the source for each group and reads one line of the group. A prefix is in the
// line of its hash, or in one of the next lines if all lines before it are full.
#ifndef SLUICE_DENIED_H
#define SLUICE_DENIED_H

#include "maps.h"

static __always_inline __u64 denied_mix(__u64 key)
{
	key *= hash_multiplier;
	return (key ^ key >> 32) * hash_multiplier;
}

// Returns the first line to search for a prefix in a group of "count" lines.
static __always_inline __u32 denied_line_of(__u64 hash, __u32 count)
{
	return (hash >> 32) * count >> 32;
}

static __always_inline bool denied_group(void *table, __u32 lines, __u32 i, __u64 *group)
{
	__u32 at = lines + i / 8;
	struct denied_line *line = bpf_map_lookup_elem(table, &at);

	if (!line)
		return false;
	*group = line->w[i % 8];
	return *group;
}

static __always_inline bool denied_find(void *table, __u64 group, const __u64 *key, const bool v6)
{
	__u32 first = group >> DENIED_FIRST_SHIFT, count = group >> DENIED_COUNT_SHIFT & ((1 << DENIED_BITS) - 1), at;
	struct denied_line *line;
	__u32 *w;

	if (!key[0] && (!v6 || !key[1]))
		return group & DENIED_ZERO;
	at = first + denied_line_of(v6 ? denied_mix(denied_mix(key[0]) ^ key[1]) : denied_mix(key[0]), count);
	for (int probe = 0; probe < DENIED_PROBES; probe++, at++) {
		line = bpf_map_lookup_elem(table, &at);
		if (!line)
			return false;
		w = (__u32 *)line->w;
		if (v6) {
			for (int i = 0; i < 8; i += 2)
				if (line->w[i] == key[0] && line->w[i + 1] == key[1])
					return true;
			if (!(line->w[6] | line->w[7]))
				return false;
		} else {
			for (int i = 0; i < 16; i++)
				if (w[i] == (__u32)key[0])
					return true;
			if (!w[15])
				return false;
		}
	}
	return false;
}

// Returns the bits of a word of an address that a prefix with "bits" more bits keeps.
static __always_inline __u64 denied_mask(__u32 bits)
{
	return bits >= 64 ? ~0ULL : bits ? bpf_cpu_to_be64(~0ULL << (64 - bits)) : 0;
}

// Reports whether rules deny an IPv4 source.
__noinline int denied4(__be32 source)
{
	__u32 none = 0;
	void *table = bpf_map_lookup_elem(&denied, &none);
	__u64 group, key;

	if (!table)
		return 0;
	for (__u32 i = 0; i <= 32 && denied_group(table, DENIED_GROUPS4, i, &group); i++) {
		key = source & denied_mask(group & DENIED_LENGTH);
		if (denied_find(table, group, &key, false))
			return 1;
	}
	return 0;
}

// The address is in two words, because a packet is no argument of a global function.
__noinline int denied6(__u64 high, __u64 low)
{
	__u32 none = 0;
	void *table = bpf_map_lookup_elem(&denied, &none);
	__u64 group, key[2];

	if (!table)
		return 0;
	for (__u32 i = 0; i <= 128 && denied_group(table, DENIED_GROUPS6, i, &group); i++) {
		__u32 bits = group & DENIED_LENGTH;

		key[0] = high & denied_mask(bits);
		key[1] = low & denied_mask(bits > 64 ? bits - 64 : 0);
		if (denied_find(table, group, key, true))
			return 1;
	}
	return 0;
}

#endif
