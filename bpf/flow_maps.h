// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The maps of the flow tables: entries, their index, hints to it, and what is free.
#ifndef SLUICE_FLOW_MAPS_H
#define SLUICE_FLOW_MAPS_H

#include "types.h"

// A flow table and its index are maps of maps, whose elements are parts of one size: user
// space adds parts as flows come, so that a gateway with few of them takes little memory,
// and no entry ever moves. Both lookups are inlined. Parts are mapped in user space, and
// begin on a page, so that a bucket is one cache line.
#define PARTS(name, part)                                 \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS); \
		__uint(max_entries, 1);                   \
		__type(key, __u32);                       \
		__array(values, part);                    \
	} name SEC(".maps")

// Flow tables. Written by the programs; user space reads them through mmap and
// never writes. Freed by the sweeper. How many parts they may have is set at load.
// Survive restarts.
struct part4 {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << PART_BITS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow4);
};

struct part6 {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << PART_BITS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow6);
};

PARTS(flows4, struct part4);
PARTS(flows6, struct part6);

// The index of the flow tables, hints to it, and the entries that can be taken. Written by
// the programs, hints by their straight path alone, where nobody takes them back. The maps
// of the index have room for two: that in force, and a larger one that takes its place.
struct index_part {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << INDEX_PART_BITS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct bucket);
};

PARTS(index4, struct index_part);
PARTS(index6, struct index_part);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct hint);
} hints4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct hint);
} hints6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct stock);
} stock4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct stock);
} stock6 SEC(".maps");

#endif
