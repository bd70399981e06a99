// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The maps of NAT rules, pools, ports and prefixes.
#ifndef SLUICE_NAT_MAPS_H
#define SLUICE_NAT_MAPS_H

#include "flow_maps.h"
#include "nat/rules.h"

// Source NAT rules. User space writes everything but the counters.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_NAT_RULES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_rule);
} nat_rules SEC(".maps");

// Two orders of the NAT rules: the one in force, and the one that user space prepares. Written by
// user space through mmap.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_order);
} nat_orders SEC(".maps");

// Pool addresses by number, and numbers by address.
#define POOL_MAX 65536
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pool_addr);
} pools SEC(".maps");

// NAT rules of each pool address, indexed by the number of the address: bit n is set if the pool of
// rule n contains it. Written by user space. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} pool_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, POOL_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, union addr);
	__type(value, __u32);
} pool_numbers SEC(".maps");

// Numbers of pool addresses, with the addresses of each pool in consecutive elements. A rule and a
// backend store the first element of their pool. The first elements contain their own index, so
// that a pool with consecutive numbers needs no run of its own. Written by user space. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} runs SEC(".maps");

// Port bitmaps: the element is number * 3 + class (0 TCP, 1 UDP, 2 ICMP). Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 3);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct port_map);
} port_maps SEC(".maps");

// Blocks of ports by pool address. User space marks blocks that do not exist as taken. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct block_map);
} block_maps SEC(".maps");

// Bindings by outside port. The key is (number * 3 + class) << 16 | port. The value is the index +
// 1 of the entry that leads to the binding, with bit 31 set for flows6, or 0. An array element has
// at least eight bytes and therefore holds two ports. A part covers the ports of one class of one
// address. User space creates it when the address is first used. The number of parts is set at
// load.
struct owner_part {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 15);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct owner_pair);
};

PARTS(port_owners, struct owner_part);

// Prefixes of stateless rules, by role, and prefixes of nat64 rules.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct prefix);
} prefixes SEC(".maps");

#endif
