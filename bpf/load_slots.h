// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// What the ends of connections keep: the client end's slots, counters, clocks,
// and the injector's place in its schedule.
#ifndef SLUICE_LOAD_SLOTS_H
#define SLUICE_LOAD_SLOTS_H

#include "load_tcp.h"

enum stage {
	STAGE_CLOSED,
	STAGE_SYN,     // SYN sent
	STAGE_REQUEST, // request sent
	STAGE_IDLE,    // open, nothing under way
	STAGE_CLOSING, // FIN sent
};

// A turn of a slot is under way: a whole connection, or, where connections are
// held, opening one or one request on it.
static __always_inline int is_busy(__u8 stage)
{
	return stage != STAGE_CLOSED && stage != STAGE_IDLE;
}

// One connection of the client end. seq and ack are what the next packet of the
// client carries; while a request or FIN is out they are those of that packet.
struct slot {
	__u64 due_ns;  // when its turn was due
	__u64 sent_ns; // when its last packet left
	__u32 seq;
	__u32 ack;
	__u8 stage;    // enum stage
	__u8 tries;    // of the packet that is out
	__u16 request; // requests done on this connection
	__u32 last;    // the request under way is the connection's last
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); // user space sets it to the number of slots
	__type(key, __u32);
	__type(value, struct slot);
} load_slots SEC(".maps");

// Counters of one CPU.
struct flow_counts {
	__u64 started;	   // SYNs of new connections
	__u64 established; // SYN ACKs that were awaited
	__u64 requests;	   // first transmissions
	__u64 responses;
	__u64 completed; // connections closed in both directions
	__u64 overdue;	 // turns that found their connection still busy
	__u64 again_syn; // retransmissions
	__u64 again_request;
	__u64 again_fin;
	__u64 gave_up_syn; // max_tries reached
	__u64 gave_up_request;
	__u64 gave_up_fin;
	__u64 resets;	      // RST from the other side
	__u64 resets_syn;     // those to a SYN
	__u64 resets_request; // those to a request
	__u64 unreachable;    // ICMP errors about packets of connections
	__u64 wrong_length;   // responses of a wrong size
	__u64 stray;	      // packets that belong to nothing under way
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_counts);
} load_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HIST_BUCKETS);
	__type(key, __u32);
	__type(value, __u64);
} load_connect SEC(".maps"); // from the turn's due time to the SYN ACK

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HIST_BUCKETS);
	__type(key, __u32);
	__type(value, __u64);
} load_response SEC(".maps"); // from the turn's due time to the response

// Turns begun and ended, over all CPUs: the kernel may move the receiving side of
// a link to another CPU than the injector's.
struct balance {
	__u64 begun, ended;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct balance);
} load_balance SEC(".maps");

static __always_inline void count_begun(void)
{
	__u32 zero = 0;
	struct balance *b = bpf_map_lookup_elem(&load_balance, &zero);

	if (b)
		__sync_fetch_and_add(&b->begun, 1);
}

static __always_inline void count_ended(void)
{
	__u32 zero = 0;
	struct balance *b = bpf_map_lookup_elem(&load_balance, &zero);

	if (b)
		__sync_fetch_and_add(&b->ended, 1);
}

static __always_inline __u64 under_way(void)
{
	__u32 zero = 0;
	struct balance *b = bpf_map_lookup_elem(&load_balance, &zero);

	return b ? b->begun - b->ended : 0;
}

// State of the injector; each has a collection of its own.
struct injector {
	__u64 start_ns;
	__u64 turns;  // begun
	__u32 cursor; // slot of the next turn
	__u32 sweep;  // slot that is looked at next for its timer
};

struct injector injector = {};

static __always_inline struct flow_counts *counts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&load_counts, &zero);
}

#endif
