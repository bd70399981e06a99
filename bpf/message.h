// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// What the programs tell user space: packets to hold, and events.
#ifndef SLUICE_MESSAGE_H
#define SLUICE_MESSAGE_H

#include "settings.h"

#define HELD_FRAME 2048

enum held_flag {
	HELD_UNSUMMED = 0x80000000, // in len: the checksum of the segment is to be filled in
};

// A packet for user space to send later: with a key a later fragment, which waits for its first
// one; with an "out" one that is translated and waits for the hardware address of its next hop;
// with neither one that is to be fragmented. A key alone is a first fragment that has come.
struct held {
	struct fragment_key key;
	__u64 at;      // ns of the monotonic clock
	__u32 ifindex; // where it came in
	__u32 len;
	union addr next_hop;
	__u32 out;	   // interface of the next hop
	__u32 next_family; // FAMILY_4 or FAMILY_6, of the next hop
	__u8 frame[HELD_FRAME];
};
ASSERT_SIZE(struct held, 2128);

enum event_kind {
	EVENT_NEIGHBOUR,  // addr wants to be resolved
	EVENT_CONNECTION, // addr has opened a connection to a service that logs them
	EVENT_BLOCK,	  // a client was given a block of ports, or has it no longer
	EVENT_PROBE,	  // a connection of nat64, from addr, has been silent for its time: addr is to be probed
};

struct event {
	__u32 kind;
	__u32 ifindex;
	__u32 reason;
	__u32 len; // EVENT_CONNECTION: bytes of the packet, from the network header on
	union addr addr;
	__u32 family;
	__u32 owner;   // EVENT_CONNECTION: service; so to the end
	union addr to; // with the ports: of EVENT_PROBE too
	__be16 sport;
	__be16 dport;
	__u8 l4_proto;
	__u8 pad[3];
};
ASSERT_SIZE(struct event, 64);

// EVENT_BLOCK, in the place of struct event.
struct block_event {
	__u32 kind;
	__u32 rule;
	union addr client;
	union addr outside;
	__u16 first; // ports, inclusive
	__u16 last;
	__u8 client_family;
	__u8 outside_family;
	__u8 given; // 0: taken back
	__u8 pad[17];
};
ASSERT_SIZE(struct block_event, sizeof(struct event));
#endif
