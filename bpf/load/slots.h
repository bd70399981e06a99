// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// State of the connection ends: the client end's slots, counters, clocks, and the injector's
// position in its schedule.
#ifndef SLUICE_LOAD_SLOTS_H
#define SLUICE_LOAD_SLOTS_H

#include "tcp.h"

enum stage {
	STAGE_CLOSED,
	STAGE_SYN,     // SYN sent
	STAGE_REQUEST, // request sent
	STAGE_IDLE,    // open, idle
	STAGE_CLOSING, // FIN sent
};

// Reports whether a turn of a slot is in progress. A turn is a whole connection. If connections are
// held, it is the handshake or one request.
static __always_inline int is_busy(__u8 stage)
{
	return stage != STAGE_CLOSED && stage != STAGE_IDLE;
}

// One connection of the client end. seq and ack belong to the client's next packet. While a request
// or FIN is unanswered, they belong to that packet.
struct slot {
	__u64 due_ns;  // due time of its turn
	__u64 sent_ns; // time of its last packet
	__u32 seq;
	__u32 ack;
	__u8 stage;    // enum stage
	__u8 tries;    // transmissions of the unanswered packet
	__u16 request; // completed requests on this connection
	__u32 last;    // the current request is the connection's last
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
	__u64 established; // expected SYN-ACKs
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
	__u64 resets_syn;     // RST in answer to a SYN
	__u64 resets_request; // RST in answer to a request
	__u64 unreachable;    // ICMP errors about packets of connections
	__u64 wrong_length;   // responses of a wrong size
	__u64 stray;	      // packets that match no turn in progress
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

// Turns begun and ended on all CPUs. The kernel may process the receiving side of a link on another
// CPU than the injector.
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

// State of an injector. Each injector loads its own collection.
struct injector {
	__u64 start_ns;
	__u64 turns;  // turns begun
	__u32 cursor; // slot of the next turn
	__u32 sweep;  // next slot for the timer check
};

struct injector injector = {};

static __always_inline struct flow_counts *counts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&load_counts, &zero);
}

#endif
