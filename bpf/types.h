// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Every structure and enumeration that the datapath shares with user space.
// bpf2go makes the Go side from this file's BTF; nothing is kept in step by
// hand. Padding is explicit and sizes are asserted, because the same bytes are
// map keys, mapped memory and arguments of separately verified functions.
//
// Byte order: __beNN is the wire's, everything else the machine's. A "tick" is
// one jiffy of the kernel (bpf_jiffies64), truncated to 32 bits.
#ifndef SLUICE_TYPES_H
#define SLUICE_TYPES_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// Changes when the meaning of a pinned map changes; a daemon refuses maps of
// another layout.
enum layout {
	LAYOUT = 11,
};

// Sizes that user space has to know too.
enum map_size {
	MAX_SERVICES = 16384,
	MAX_BACKENDS = 65536, // the last one stands for none
	MAX_NAT_RULES = 64,   // that translate sources: bits of a word
	MAX_STATIONS = 512,   // places of own_stations
	REASONS_STRIDE = 64,  // room for each action in the map reasons
	PART_BITS = 14,	      // a part of a flow table has 2^14 entries: 1 MB of IPv4, 2 MB of IPv6
	INDEX_PART_BITS = 12, // a part of its index has 2^12 buckets: 256 kB, enough for two parts of the table
};

#define ASSERT_SIZE(t, n) _Static_assert(sizeof(t) == (n), "size of " #t)

// A function that both hooks call, each with a context of its own type: xdp_NAME and tc_NAME. call is
// what it returns; there xdp tells which of them it is. What follows are its other parameters.
// clang-format off
#define BOTH_HOOKS(name, call, ...)                                 \
	__noinline int xdp_##name(struct xdp_md *ctx, __VA_ARGS__)  \
	{                                                           \
		const bool xdp __attribute__((unused)) = true;      \
		return call;                                        \
	}                                                           \
	__noinline int tc_##name(struct __sk_buff *ctx, __VA_ARGS__) \
	{                                                           \
		const bool xdp __attribute__((unused)) = false;     \
		return call;                                        \
	}
// clang-format on

// What happens to a packet.
enum action {
	ACTION_PASS,	// to the kernel's own stack, perhaps rewritten
	ACTION_DROP,	// thrown away
	ACTION_FORWARD, // rewritten and sent out
};

// Why it happens. The comment of each line is its entry in docs/reference/reasons.md.
// clang-format off
enum reason {
	REASON_NONE,		     // no decision was reached; never counted
	REASON_FLOW,		     // belongs to a flow that was there before
	REASON_NEW_FLOW,	     // opened a flow of a service or NAT rule
	REASON_STATELESS,	     // rewritten by a service that keeps no flow for it
	REASON_SYN,		     // SYN of a service that keeps no state before the handshake is complete
	REASON_SYN_ACK,		     // answer of a backend to such a SYN
	REASON_STATIC,		     // rewritten by a static, npt66 or siit rule
	REASON_ICMP_ERROR,	     // ICMP error translated with the packet quoted in it
	REASON_FRAGMENT,	     // later fragment that follows its first one
	REASON_NOT_IP,		     // neither IPv4 nor IPv6, or behind the tag of a VLAN (VLAN 0 is none)
	REASON_NOT_OURS,	     // no service, binding or rule wants it
	REASON_NOT_ROUTED,	     // a local, multicast or loopback address, one that no route leads to, an address of this host inside a mapping of siit, or another protocol of the host's own: the kernel decides, and routes none of it
	REASON_EXCEPTED,	     // destination that the rule's "except" leaves alone
	REASON_LOCAL_SOCKET,	     // a socket of this host owns the port
	REASON_NO_NEIGHBOUR,	     // next hop's hardware address unknown: the kernel resolves it and sends the packet
	REASON_TO_FRAGMENT,	     // larger than the MTU without DF: the kernel fragments it
	REASON_FORWARDING_OFF,	     // the kernel does not forward on this interface (net.ipv4.ip_forward, net.ipv6.conf.*.forwarding)
	REASON_NO_ROUTE,	     // no route to the translated destination
	REASON_DENIED,		     // a firewall rule or a service's deny list
	REASON_NOT_ALLOWED,	     // source not on the service's allow list
	REASON_TRUNCATED,	     // shorter than its headers say
	REASON_BAD_HEADER,	     // a header that no host may send
	REASON_BAD_CHECKSUM,	     // ICMP error with a wrong checksum, or with one in the quoted IP header
	REASON_TTL_EXCEEDED,	     // TTL or hop limit used up
	REASON_TOO_BIG,		     // larger than the next hop's MTU and not to be fragmented
	REASON_TABLE_FULL,	     // no room for another flow
	REASON_HALF_OPEN_FULL,	     // quota of handshakes in progress is used up
	REASON_NO_PORT,		     // no port left on the pool's addresses
	REASON_NO_ADDRESS,	     // the interface that a masquerade rule's packet would leave by has no address of its family
	REASON_CLASH,		     // the answers would look like packets of another flow
	REASON_CLIENT_PORTS,	     // the client's quota of ports is used up
	REASON_CLIENT_FLOWS,	     // the client's quota of flows is used up
	REASON_CLIENTS_FULL,	     // no room to count another client
	REASON_NO_BACKEND,	     // no backend of the service is usable
	REASON_LIMIT_RATE,	     // more new connections a second than the service takes
	REASON_LIMIT_CLIENT_RATE,    // more new connections a second than one client may open
	REASON_LIMIT_CONNECTIONS,    // more connections at once than the service takes
	REASON_LIMIT_BACKEND,	     // every backend has all the connections it may have
	REASON_LIMIT_RESETS,	     // more TCP resets a second from clients than the service takes
	REASON_STRICT_TCP,	     // new TCP flow that does not begin with a plain SYN
	REASON_COOKIE,		     // SYN of a service that is answered by a cookie: half the quota of handshakes is used up
	REASON_BAD_COOKIE,	     // packet without a flow that proves no cookie, while SYNs are answered by cookies
	REASON_FILTERED,	     // the mapping's filter does not know the sender
	REASON_NO_BINDING,	     // nobody inside has a mapping for this outside endpoint
	REASON_NO_FLOW,		     // packet that may not open a flow and belongs to none
	REASON_ERROR_WITHOUT_FLOW,   // ICMP error about a packet of no known flow
	REASON_HELD_FRAGMENT,	     // later fragment that waits for its first one, and is then looked at again
	REASON_ORPHAN_FRAGMENT,	     // later fragment whose first one was never seen, and nobody or no room to hold it
	REASON_LOOP,		     // IPv6 source inside the translation prefix
	REASON_UNTRANSLATABLE,	     // has no meaning in the other IP version, or is for or from an IPv4 address that nothing is routed to; or a fragment, or several segments in one, where a whole one has to change; or UDP without a checksum that a rule drops
	REASON_UNSUPPORTED_PROTOCOL, // a protocol that the matching rule cannot translate
	REASON_INTERNAL,	     // a helper of the kernel refused its work
	REASON_TO_FRAGMENT6,	     // packet that may be fragmented, is too large for the next link, and changes its IP version or leaves with an address of this host: the daemon translates it and sends it in fragments
	REASON_UNSERVED,	     // for a virtual address of the gateway, and a port or protocol that no service takes there; answered as when-down says
	REASON_OTHER_STATION,	     // frame for another station's hardware address, or for all of a group (broadcast, multicast) with a packet for one host: the kernel forwards neither
	REASON_UNRESOLVED,	     // next hop's hardware address unknown, and the packet leaves with an address of this host, so that the kernel would not forward it: the daemon sends it as soon as the address is known
	REASON_MOVING,		     // of no flow here, and of a service or port-forward that is moving from or to nftables, where it may have one: the kernel decides
	REASON_REROUTED,	     // of a flow of a source NAT rule whose "out" the route does not lead by any more, as after a failover: the flow ends, and what is sent again opens another
	REASON_COUNT,		     // number of reasons
};
// clang-format on

enum family {
	FAMILY_OTHER,
	FAMILY_4,
	FAMILY_6,
	FAMILY_COUNT,
};

enum mode {
	MODE_DNAT,
	MODE_FULLNAT,
	MODE_DSR,
	MODE_TUNNEL,
	MODE_STATELESS,
};

enum scheduler {
	SCHEDULER_SEQUENCE, // rr, wrr: the slots in turn
	SCHEDULER_RANDOM,
	SCHEDULER_SOURCE,    // jhash of the source address
	SCHEDULER_SYMMETRIC, // jhash that both directions agree on
	SCHEDULER_MAGLEV,    // jhash of addresses and ports
	SCHEDULER_LEAST,     // lc, wlc: fewest flows per weight
};

enum filtering {
	FILTERING_ENDPOINT_INDEPENDENT,
	FILTERING_ADDRESS,
	FILTERING_ADDRESS_PORT,
};

// What a flow table entry is.
enum entry_kind {
	KIND_FLOW,    // one direction of a flow
	KIND_BINDING, // inside endpoint to its outside endpoint; daddr and dport 0, or of NAT_MAP_REMOTE the remote's
	KIND_PERMIT,  // remote address that a binding's owner has sent to
	KIND_NONE,    // no entry: of ICMP messages, which have no flow, that are neither query, reply nor error
};

// Life of a flow table entry. A reader compares it as part of the key.
enum entry_state {
	ENTRY_FREE, // also: claimed and being filled
	ENTRY_LIVE,
	ENTRY_DEAD,	 // not found any more; freed one second later at the earliest
	ENTRY_HOLD,	 // dead, and keeps the port of its binding (RFC 6888 REQ-8)
	ENTRY_RETURNING, // removed from the table, not yet on the free list
};

enum answer {
	ANSWER_NONE,
	ANSWER_UNREACHABLE_HOST,
	ANSWER_UNREACHABLE_PORT,
	ANSWER_PROHIBITED,
	ANSWER_TTL_EXCEEDED,
	ANSWER_TOO_BIG,
	ANSWER_RESET,
	ANSWER_SOURCE_ROUTE,
	ANSWER_COOKIE,
	ANSWER_UNREACHABLE_ROUTE,
};

enum encap {
	ENCAP_NONE,
	ENCAP_IPIP,
	ENCAP_GUE,
};

enum prefix_kind {
	PREFIX_STATIC, // 1:1 within one family
	PREFIX_NPT66,
	PREFIX_NAT64, // RFC 6052 prefix of a nat64 rule
	PREFIX_SIIT,  // RFC 6052 prefix of a siit rule
	PREFIX_EAM,   // explicit address mapping of a siit rule
};

// An address; IPv4 stands in w[0], the other words are 0.
union addr {
	__be32 w[4];
	__u64 d[2];
	__u8 b[16];
};

// Who sends to whom. For ICMP queries both ports hold the identifier.
struct tuple {
	union addr saddr;
	union addr daddr;
	__be16 sport;
	__be16 dport;
	__u8 l4_proto;
	__u8 kind;  // enum entry_kind
	__u8 zone;  // NAT rule of a binding, else 0
	__u8 state; // enum entry_state; ENTRY_LIVE in every search
};
ASSERT_SIZE(struct tuple, 40);

struct tuple4 {
	__be32 saddr;
	__be32 daddr;
	__be16 sport;
	__be16 dport;
	__u8 l4_proto;
	__u8 kind;
	__u8 zone;
	__u8 state;
};
ASSERT_SIZE(struct tuple4, 16);

// entry_meta.flags
enum entry_flag {
	ENTRY_PRIMARY = 0x01, // direction of the packet that opened the flow
	ENTRY_CROSS = 0x02,   // the twin is in the other family's table
	ENTRY_SETTLED = 0x04, // both sides were heard (TCP: handshake complete)
	// the reply's destination port is this flow's (ref_of its reply); with ENTRY_NAT its binding's
	// (made_with_binding)
	ENTRY_PORT = 0x08,
	ENTRY_BOUND = 0x10,	// the flow refers to a binding (ref_of its reply)
	ENTRY_HALF_OPEN = 0x20, // counted against the half-open quota
	ENTRY_CLIENT = 0x40,	// counted in the clients map
	ENTRY_NAT = 0x80,	// owner is a NAT rule, not a service
};

// entry_meta.heard: what packets of this direction have said. Each direction
// writes only its own, so no two CPUs write the same byte of a flow.
enum heard {
	HEARD_SYN = 0x01,
	HEARD_FIN = 0x02,
	HEARD_RST = 0x04,
	HEARD_ACK = 0x08,    // anything that is neither SYN nor RST
	HEARD_ANY = 0x0f,    // any of these
	HEARD_CLOSED = 0x10, // primary: closed, and no longer counted as a connection
	HEARD_EDITED = 0x20, // every packet of this direction is looked at: its TCP header is changed
	// Of a primary entry that was made with its binding:
	HEARD_CHARGED = 0x40, // the binding is counted in the clients map
	HEARD_REMOTE = 0x80,  // its key has the remote endpoint (NAT_MAP_REMOTE)
};
#define HEARD_KEPT (HEARD_CLOSED | HEARD_EDITED | HEARD_CHARGED | HEARD_REMOTE) // when the ports are used again

// What an entry keeps beside its key and rewrite.
struct entry_meta {
	__u32 twin; // index of the other direction; of a binding: its outside port owner slot
	__u32 seen; // tick of the last packet; of a dead entry: of its death
	__u8 flags;
	__u8 heard;
	__u16 hop;     // index into hops, 0 for none
	__u32 hop_gen; // hop is valid while this is the table's generation
	__u16 owner;   // primary: service or NAT rule; of other entries see ref_of
	__u16 backend; // primary: index into backends; of a NAT rule number of the pool address
};
ASSERT_SIZE(struct entry_meta, 20);

// One direction of an IPv4 flow: one cache line. Of a CROSS entry the rewrite
// is the twin's key turned round.
struct flow4 {
	__u64 packets;
	__u64 bytes; // from the network header on
	struct tuple4 key;
	__be32 to_saddr;
	__be32 to_daddr;
	__be16 to_sport;
	__be16 to_dport;
	struct entry_meta meta;
};
ASSERT_SIZE(struct flow4, 64);

// One direction of an IPv6 flow, or the IPv6 side of a flow between families;
// to then holds IPv4.
struct flow6 {
	__u64 packets;
	__u64 bytes;
	struct tuple key;
	union addr to_saddr;
	union addr to_daddr;
	__be16 to_sport;
	__be16 to_dport;
	struct entry_meta meta;
	__u64 pad[2];
};
ASSERT_SIZE(struct flow6, 128);

#define BUCKET_SLOTS 15

// A cache line of the index. A slot is an entry's number + 1 below a tag, or 0.
struct bucket {
	__u32 slots[BUCKET_SLOTS];
	__u32 spilled; // how many that belong here are in their second bucket
};
ASSERT_SIZE(struct bucket, 64);

#define HINT_SLOTS 4

// Slots as in a bucket, of flows whose hashes end alike.
struct hint {
	__u32 slots[HINT_SLOTS];
};
ASSERT_SIZE(struct hint, 16);

// Entries that can be taken.
struct stock {
	__u64 top;   // stack of freed entries, linked by meta.twin: changes << 32 | number + 1
	__u32 fresh; // entries from here on were never used
	__u32 room;  // entries that there are: user space adds parts, and then raises it
	__u32 pad[12];
};
ASSERT_SIZE(struct stock, 64);

// hop.flags
#define HOP_XDP 0x01 // XDP with TC behind it may send there

// A next hop.
struct hop {
	__u32 ifindex;
	__u32 gen;     // generation in which it was looked up
	__u32 checked; // tick of the last look at the routing table
	__u16 mtu;
	__u8 dmac[ETH_ALEN]; // both as the Ethernet header has them
	__u8 smac[ETH_ALEN];
	__u16 flags;
	__u32 pad;
};
ASSERT_SIZE(struct hop, 32);

// control.spliced
enum spliced {
	SPLICED_COOKIE = 0x01,	 // opened by a cookie
	SPLICED_PROXY = 0x02,	 // with a PROXY header; set by user space
	SPLICED_FAMILIES = 0x04, // between IPv4 and IPv6; set by user space
};

// control.checks
enum check {
	CHECK_ROUTE_MTUS = 0x01, // the map route_mtus has entries
	CHECK_RP_FILTER = 0x02,	 // interfaces with rp_filter
	CHECK_STRICT = 0x04,	 // some of them with 1
	CHECK_EACH = 0x08,	 // rp_filter may refuse packets that belong to no flow
	CHECK_MULTIPATH = 0x10,	 // IPv4 routes over several next hops
	CHECK_RULES = 0x20,	 // IPv4 rules of "ip rule" beside the default ones
};

// Words of the datapath as a whole; one element. Every packet reads the first
// cache line, which is seldom written.
struct control {
	__u32 generation; // of next hops; grows when a route, neighbour, address or link changes
	__u32 lost_logs;  // lines of the log that the ring had no room for
	__u32 spliced; // SPLICED_*: what flows may have been made with, so that programs must know how to go on with it
	__u32 nat_order; // which of nat_orders is in force: one word, so that all places change at once
	__u32 ended;	 // something was put into the map of that name
	__u32 checks;	 // CHECK_*, written by user space
	// Where the index of a flow table is in its map: first bucket << 32 | number of buckets. While
	// another one is made ready, new slots are written to both; else "next" is 0.
	__u64 index4;
	__u64 index6;
	__u64 next_index4;
	__u64 next_index6;
	__u64 watched; // ns of CLOCK_MONOTONIC: when user space last probed neighbours; 0: it never did
	__u32 half_open; // handshakes in progress
	__u32 sweep4;	 // next entry to sweep
	__u32 sweep6;
	__u32 holding; // user space holds fragments and wants to know of first ones
	__u64 swept4;  // complete sweeps
	__u64 swept6;
	__u32 used4; // entries in use, as of the last complete sweep
	__u32 used6;
	__u32 count4; // counted so far in this sweep
	__u32 count6;
	__u32 answers; // ICMP errors and resets sent in the second "answer_tick"
	__u32 answer_tick;
	__u32 held; // fragments handed over in the second "held_tick"
	__u32 held_tick;
};
ASSERT_SIZE(struct control, 128);

#endif
