// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The maps of the flow tables: entries, index, hints to the index, and free list.
#ifndef SLUICE_FLOW_MAPS_H
#define SLUICE_FLOW_MAPS_H

#include "types.h"

// A flow table and its index are maps of maps. All inner maps (parts) have the same size. User
// space adds parts as the number of flows grows, so that a gateway with few flows needs little
// memory. Entries never move. Both lookups are inlined. User space maps the parts. They begin on a
// page, so that a bucket is one cache line.
#define PARTS(name, part)                                 \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS); \
		__uint(max_entries, 1);                   \
		__type(key, __u32);                       \
		__array(values, part);                    \
	} name SEC(".maps")

// Flow tables. The programs write the entries; user space reads them by mmap and never writes. The
// sweeper frees entries. The maximum number of parts is set at load time. The tables survive
// restarts.
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

// Index of the flow tables, hints to the index, and free list. The programs write them. Only the
// fast path writes hints, and nothing removes them. The outer maps of the index have room for two
// indexes: the current one, and a larger one that replaces it.
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
