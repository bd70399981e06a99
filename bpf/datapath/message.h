// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Messages from the programs to user space: packets to hold, and events.
#ifndef SLUICE_MESSAGE_H
#define SLUICE_MESSAGE_H

#include "settings.h"

#define HELD_FRAME 2048

enum held_flag {
	HELD_UNSUMMED = 0x80000000, // bit of len: user space has to compute the checksum of the segment
};

// A packet that user space sends later. With a key and a frame, it is a later fragment that waits
// for its first fragment. With "out", it is a translated packet that waits for the hardware address
// of its next hop. With neither, user space translates it and sends it in fragments. A key without
// a frame reports that a first fragment arrived.
struct held {
	struct fragment_key key;
	__u64 at;      // CLOCK_MONOTONIC, in ns
	__u32 ifindex; // ingress interface
	__u32 len;
	union addr next_hop;
	__u32 out;	   // egress interface, of the next hop
	__u32 next_family; // FAMILY_4 or FAMILY_6, of the next hop
	__u8 frame[HELD_FRAME];
};
ASSERT_SIZE(struct held, 2128);

enum event_kind {
	EVENT_NEIGHBOUR,  // user space has to resolve addr
	EVENT_CONNECTION, // addr opened a connection to a service with a log of connections
	EVENT_BLOCK,	  // a client received a block of ports, or returned it
	EVENT_PROBE,	  // a TCP connection of nat64 from addr was idle for its timeout: user space has to probe addr
};

struct event {
	__u32 kind;
	__u32 ifindex;
	__u32 reason;
	__u32 len; // EVENT_CONNECTION: bytes of the packet, from the network header
	union addr addr;
	__u32 family;
	__u32 owner;   // EVENT_CONNECTION: service; the fields below are also its own
	union addr to; // EVENT_PROBE also uses "to" and the ports
	__be16 sport;
	__be16 dport;
	__u8 l4_proto;
	__u8 pad[3];
};
ASSERT_SIZE(struct event, 64);

// EVENT_BLOCK; replaces struct event.
struct block_event {
	__u32 kind;
	__u32 rule;
	union addr client;
	union addr outside;
	__u16 first; // ports, inclusive
	__u16 last;
	__u8 client_family;
	__u8 outside_family;
	__u8 given; // 0: the client returned the block
	__u8 pad[17];
};
ASSERT_SIZE(struct block_event, sizeof(struct event));
#endif
