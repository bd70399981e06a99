// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Structures of NAT rules, pools and prefixes that user space writes for the programs.
#ifndef SLUICE_RULES_H
#define SLUICE_RULES_H

#include "types.h"

// nat_rule.flags
enum nat_flag {
	NAT_MAP_REMOTE = 0x01, // address-and-port-dependent mapping: a binding for each remote endpoint
	NAT_HAIRPIN = 0x02,    // sources are inside hosts and may use each other's outside endpoints
	NAT_PROHIBITED = 0x04, // answer 3/13, not 3/1, if no port is left
	NAT_DETERMINISTIC = 0x08,
	NAT_MSS_CLAMP = 0x10,
	NAT_RANDOM = 0x20, // do not preserve the client's port
};

// Flag in an interface index: the other bits are the number of a list of interfaces.
enum interface_key {
	INTERFACE_LIST = 0x40000000,
};

// A source NAT rule: snat, masquerade, nat64.
struct nat_rule {
	__u32 out;  // egress interface or INTERFACE_LIST, 0 for any
	__u32 in;   // ingress interface or INTERFACE_LIST, 0 for any
	__u16 pool; // first element of its pool in runs
	__u16 pool_len;
	__u16 pool6;
	__u16 pool6_len;
	__u16 port_first; // inclusive
	__u16 port_last;
	__u16 block; // ports per block, 0 for none
	__u8 flags;
	__u8 filtering;	 // enum filtering
	__u32 max_ports; // per client, 0 for none
	__u32 max_flows; // per client, 0 for none
	__u64 rate_ns;	 // interval between new connections of a client, 0 for no limit
	__u64 burst_ns;	 // burst credit
	__u64 packets;
	__u64 bytes;
	__u64 flows;
	__u8 active;
	__u8 prefix_len; // nat64: length of prefix, 0 for other rules
	__u8 group;	 // part of a masquerade rule: id + 1 of the rule, see LIST_TOWARDS
	__u8 pad[5];
	union addr prefix; // prefix of a nat64 rule
};
ASSERT_SIZE(struct nat_rule, 96);

// NAT rules in the order of the configuration: id + 1 of each, then 0. The first rule that matches
// a packet translates it.
struct nat_order {
	__u8 rules[MAX_NAT_RULES];
};

// A pool address, which has a bitmap of ports.
struct pool_addr {
	union addr addr;
	__u8 family;
	__u8 local; // also an address of this host: local sockets have precedence
	__u8 lost;  // no longer an address of this host, nor in a pool: its flows end
	__u8 pad;
	__u32 pad2;
};
ASSERT_SIZE(struct pool_addr, 24);

// Ports of one (pool address, protocol class). Even ports precede odd ones: bit (port & 1) << 15 |
// port >> 1. The ports of one parity are thus consecutive words.
#define PORT_WORDS 1024
#define PORT_SUMMARY 16
struct port_map {
	__u64 words[PORT_WORDS];
	__u64 full[PORT_SUMMARY]; // bit n of word m: words[m * 64 + n] has no free bit
	__u32 used;		  // allocated ports
	__u32 pad[31];
};
ASSERT_SIZE(struct port_map, 8448);

// Owners of two neighbouring ports.
struct owner_pair {
	__u32 owner[2];
};
ASSERT_SIZE(struct owner_pair, 8);

// Allocated blocks of ports of one pool address.
#define BLOCK_WORDS 16
struct block_map {
	__u64 words[BLOCK_WORDS];
};
ASSERT_SIZE(struct block_map, 128);

// The addresses for which a prefix is looked up.
enum prefix_role {
	ROLE_DEST,     // destinations of a rule within one family
	ROLE_SOURCE,   // sources of a rule within one family
	ROLE_CROSSING, // both, for a rule between the families
};

// A prefix of a stateless rule.
struct prefix_key {
	__u32 prefix_len;
	__u8 role; // enum prefix_role
	__u8 family;
	__u16 pad;
	__u8 addr[16];
};
ASSERT_SIZE(struct prefix_key, 24);

struct prefix {
	union addr to;
	union addr embed; // between families: the rule's RFC 6052 prefix
	__u64 packets;
	__u64 bytes;
	__u32 in;  // ingress interface of outbound packets, or INTERFACE_LIST; 0 for any
	__u32 out; // their egress interface, likewise
	__u16 rule;
	// npt66: amount to add to a checksum-neutral word (RFC 6296); siit: traffic class, with
	// CHOICE_CLASS
	__u16 adjust;
	__u8 kind;	// enum prefix_kind
	__u8 len;	// bits of the matched prefix
	__u8 to_len;	// bits of the replacement
	__u8 embed_len; // 0: the rule has no prefix to embed addresses
	__u8 except;	// the rule has exceptions
	__u8 clamp;	// the rule lowers the MSS
	__u8 pool_len;	// siit: number of addresses from pool onwards
	__u8 choices;	// siit: CHOICE_*
	__u8 pool[4];	// siit: first source of errors from IPv6 routers without an IPv4 address (RFC 6791)
};
ASSERT_SIZE(struct prefix, 72);

// prefix.choices, plan.choices: options that RFC 7915 leaves to the operator.
enum choice {
	CHOICE_CLASS = 0x01,  // every packet gets one traffic class (§4.1, §5.1)
	CHOICE_SUMMED = 0x02, // UDP without a checksum is dropped (§4.5)
};

#endif
