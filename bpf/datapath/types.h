// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// All structures and enumerations that the datapath shares with user space. bpf2go generates the Go
// side from the BTF of this file. Padding is explicit and sizes are asserted, because the same
// bytes are map keys, mapped memory and arguments of global functions.
//
// Byte order: __beNN is network order, everything else is host order. A "tick" is one jiffy of the
// kernel (bpf_jiffies64), truncated to 32 bits.
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

// Incremented when the meaning of a pinned map changes. A daemon refuses maps of another layout.
enum layout {
	LAYOUT = 11,
};

// Sizes that user space also uses.
enum map_size {
	MAX_SERVICES = 16384,
	MAX_BACKENDS = 65536, // the last one means none
	MAX_NAT_RULES = 64,   // source NAT rules: bits of a word
	MAX_STATIONS = 512,   // elements of own_stations
	REASONS_STRIDE = 64,  // elements per action in the map reasons
	PART_BITS = 14,	      // a part of a flow table has 2^14 entries: 1 MB of IPv4, 2 MB of IPv6
	INDEX_PART_BITS = 12, // a part of its index has 2^12 buckets: 256 kB, enough for two parts of the table
};

#define ASSERT_SIZE(t, n) _Static_assert(sizeof(t) == (n), "size of " #t)

// Defines xdp_NAME and tc_NAME, one function per hook with the context type of that hook. "call" is
// the returned expression, in which "xdp" identifies the hook. The other arguments are parameters.
// clang-format off
#define BOTH_HOOKS(type, name, call, ...)                               \
	__noinline type xdp_##name(struct xdp_md *ctx, ##__VA_ARGS__)   \
	{                                                               \
		const bool xdp __attribute__((unused)) = true;          \
		return call;                                            \
	}                                                               \
	__noinline type tc_##name(struct __sk_buff *ctx, ##__VA_ARGS__) \
	{                                                               \
		const bool xdp __attribute__((unused)) = false;         \
		return call;                                            \
	}

// Calls the function of the hook that "xdp" identifies.
#define BY_HOOK(name, ctx, ...)                                 \
	(xdp ? xdp_##name((void *)(ctx), ##__VA_ARGS__) :       \
	       tc_##name((void *)(ctx), ##__VA_ARGS__))
// clang-format on

// The action on a packet.
enum action {
	ACTION_PASS,	// passed to the kernel's stack, possibly rewritten
	ACTION_DROP,	// dropped
	ACTION_FORWARD, // rewritten and sent
};

// The reason for the action. The comment of each line is its entry in docs/reference/reasons.md.
// clang-format off
enum reason {
	REASON_NONE,		     // no decision was reached; never counted
	REASON_FLOW,		     // belongs to an existing flow
	REASON_NEW_FLOW,	     // opened a flow of a service or NAT rule
	REASON_STATELESS,	     // rewritten by a service that keeps no flow for it
	REASON_SYN,		     // SYN of a service that keeps no state before the handshake is complete
	REASON_SYN_ACK,		     // SYN-ACK of a backend to such a SYN
	REASON_STATIC,		     // rewritten by a static, npt66 or siit rule
	REASON_ICMP_ERROR,	     // ICMP error, translated together with the packet that it quotes
	REASON_FRAGMENT,	     // later fragment, forwarded like its first fragment
	REASON_NOT_IP,		     // neither IPv4 nor IPv6, or with a VLAN tag (except VLAN 0)
	REASON_NOT_OURS,	     // no service, binding or rule matches
	REASON_NOT_ROUTED,	     // a local, multicast or loopback address, an address without a route, a source that the kernel refuses, an address of this host inside a siit mapping, or a local protocol of the kernel such as neighbour discovery: the kernel decides and does not route the packet
	REASON_EXCEPTED,	     // the rule's "except" contains the destination
	REASON_LOCAL_SOCKET,	     // a local socket owns the port
	REASON_NO_NEIGHBOUR,	     // the hardware address of the next hop is unknown, and the daemon does not run or has no room to hold the packet: the kernel resolves the address and sends the packet
	REASON_TO_FRAGMENT,	     // larger than the MTU without DF: the kernel fragments it
	REASON_FORWARDING_OFF,	     // the kernel does not forward on this interface (net.ipv4.ip_forward, net.ipv6.conf.*.forwarding)
	REASON_NO_ROUTE,	     // no route to the translated destination
	REASON_DENIED,		     // denied by a firewall rule or the deny list of a service
	REASON_NOT_ALLOWED,	     // the allow list of the service does not contain the source
	REASON_TRUNCATED,	     // shorter than the lengths in its headers
	REASON_BAD_HEADER,	     // a header that no host may send
	REASON_BAD_CHECKSUM,	     // ICMP error with a wrong checksum, or with one in the quoted IP header
	REASON_TTL_EXCEEDED,	     // TTL or hop limit used up
	REASON_TOO_BIG,		     // larger than the MTU of the next hop, and must not be fragmented
	REASON_TABLE_FULL,	     // no room for another flow
	REASON_HALF_OPEN_FULL,	     // the quota of handshakes in progress is used up
	REASON_NO_PORT,		     // no port left on the pool's addresses
	REASON_NO_ADDRESS,	     // masquerade: the egress interface has no address of the packet's family
	REASON_CLASH,		     // replies would match another flow
	REASON_CLIENT_PORTS,	     // the client's quota of ports is used up
	REASON_CLIENT_FLOWS,	     // the client's quota of flows is used up
	REASON_CLIENTS_FULL,	     // no room to count another client
	REASON_NO_BACKEND,	     // no backend of the service is usable
	REASON_LIMIT_RATE,	     // more new connections per second than the service allows
	REASON_LIMIT_CLIENT_RATE,    // more new connections per second than a client may open
	REASON_LIMIT_CONNECTIONS,    // more concurrent connections than the service allows
	REASON_LIMIT_BACKEND,	     // every backend has reached its limit of connections
	REASON_LIMIT_RESETS,	     // more TCP resets per second from clients than the service allows
	REASON_STRICT_TCP,	     // new TCP flow that does not begin with a plain SYN
	REASON_COOKIE,		     // SYN answered with a cookie, because half the quota of handshakes is used up
	REASON_BAD_COOKIE,	     // packet without a flow and without a valid cookie, while cookies answer SYNs
	REASON_FILTERED,	     // the filter of the binding does not admit the sender
	REASON_NO_BINDING,	     // no inside host has a binding or mapping for this outside endpoint
	REASON_NO_FLOW,		     // packet without a flow that must not open one
	REASON_ERROR_WITHOUT_FLOW,   // ICMP error that quotes a packet without a known flow
	REASON_HELD_FRAGMENT,	     // later fragment, held until its first fragment arrives and then processed again
	REASON_ORPHAN_FRAGMENT,	     // later fragment without a known first fragment, and the daemon does not run or has no room to hold it
	REASON_LOOP,		     // IPv6 source within the translation prefix
	REASON_UNTRANSLATABLE,	     // no counterpart in the other IP version, or an IPv4 address that is never routed; or a fragment or a packet of several segments where only a whole segment can change; or UDP without a checksum that a rule drops
	REASON_UNSUPPORTED_PROTOCOL, // a protocol that the matching rule cannot translate
	REASON_INTERNAL,	     // a kernel helper failed
	REASON_TO_FRAGMENT6,	     // too large for the next link without DF, and changes its IP version or leaves with an address of this host: the daemon translates it and sends it in fragments
	REASON_UNSERVED,	     // to a virtual address of the gateway, but to a port or protocol without a service; answered according to when-down
	REASON_OTHER_STATION,	     // frame to the hardware address of another station, or a group frame (broadcast, multicast) with a packet to one host: the kernel forwards neither
	REASON_UNRESOLVED,	     // the hardware address of the next hop is unknown: the daemon holds the packet and sends it when the address is known, or answers with an ICMP error
	REASON_MOVING,		     // without a flow here, to a service or port-forward that moves from or to nftables, which may have the flow: the kernel decides
	REASON_REROUTED,	     // the route of a source NAT flow no longer leads through the rule's "out", for example after a failover: the flow ends, and a retransmission opens another one
	REASON_SOURCE_REFUSED,	     // rp_filter refuses the source, because a rule of "ip rule" matches the translated destination; the kernel could accept the source together with the original destination
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
	SCHEDULER_SEQUENCE, // rr and wrr: use the slots in turn
	SCHEDULER_RANDOM,
	SCHEDULER_SOURCE,    // jhash of the source address
	SCHEDULER_SYMMETRIC, // jhash with the same value in both directions
	SCHEDULER_MAGLEV,    // jhash of addresses and ports
	SCHEDULER_LEAST,     // lc, wlc: fewest flows per weight
};

enum filtering {
	FILTERING_ENDPOINT_INDEPENDENT,
	FILTERING_ADDRESS,
	FILTERING_ADDRESS_PORT,
};

// Kinds of flow table entries.
enum entry_kind {
	KIND_FLOW,    // one direction of a flow
	KIND_BINDING, // inside to outside endpoint; daddr and dport are 0, or the remote endpoint with NAT_MAP_REMOTE
	KIND_PERMIT,  // remote address to which the owner of a binding has sent
	KIND_NONE,    // never in a table: ICMP messages that are neither query, reply nor error, and have no flow
};

// State of a flow table entry. A search compares it as part of the key.
enum entry_state {
	ENTRY_FREE, // also while an inserter fills it
	ENTRY_LIVE,
	ENTRY_DEAD,	 // not found by searches; freed at least one second later
	ENTRY_HOLD,	 // dead, but its port is in hold-down (RFC 6888 REQ-8)
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
	ANSWER_NO_ROUTE,
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

// An address. IPv4 uses w[0]; the other words are 0.
union addr {
	__be32 w[4];
	__u64 d[2];
	__u8 b[16];
};

// Source and destination of a packet. For ICMP queries, both ports hold the identifier.
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
	ENTRY_SETTLED = 0x04, // both sides have sent (TCP: handshake complete)
	// the flow owns the destination port of its reply (ref_of the reply); with ENTRY_NAT, its
	// binding owns it (made_with_binding)
	ENTRY_PORT = 0x08,
	ENTRY_BOUND = 0x10,	// the flow refers to a binding (ref_of its reply)
	ENTRY_HALF_OPEN = 0x20, // counted against the half-open quota
	ENTRY_CLIENT = 0x40,	// counted in the clients map
	ENTRY_NAT = 0x80,	// owner is a NAT rule, not a service
};

// entry_meta.heard: packet types seen in this direction. Each direction writes only its own byte,
// so that two CPUs do not write the same byte of a flow.
enum heard {
	HEARD_SYN = 0x01,
	HEARD_FIN = 0x02,
	HEARD_RST = 0x04,
	HEARD_ACK = 0x08,    // anything that is neither SYN nor RST
	HEARD_ANY = 0x0f,    // any of the above
	HEARD_CLOSED = 0x10, // primary: closed, and no longer counted as a connection
	HEARD_EDITED = 0x20, // the programs edit TCP headers of this direction, and inspect every packet
	// In a primary entry that was made with its binding:
	HEARD_CHARGED = 0x40, // the binding is counted in the clients map
	HEARD_REMOTE = 0x80,  // the key of the binding includes the remote endpoint (NAT_MAP_REMOTE)
};
#define HEARD_KEPT (HEARD_CLOSED | HEARD_EDITED | HEARD_CHARGED | HEARD_REMOTE) // flags that survive reuse of the ports

// Fields of an entry in addition to its key and rewrite.
struct entry_meta {
	__u32 twin; // index of the other direction; binding: index of its outside port in port_owners
	__u32 seen; // tick of the last packet; dead entry: tick of its death
	__u8 flags;
	__u8 heard;
	__u16 hop;     // index into hops, 0 for none
	__u32 hop_gen; // hop is valid while this is the table's generation
	__u16 owner;   // primary: service or NAT rule; other entries: see ref_of
	__u16 backend; // primary: index into backends; NAT rule: number of the pool address
};
ASSERT_SIZE(struct entry_meta, 20);

// One direction of an IPv4 flow, in one cache line. The rewrite of a CROSS entry is the reverse of
// the twin's key.
struct flow4 {
	__u64 packets;
	__u64 bytes; // from the network header onwards
	struct tuple4 key;
	__be32 to_saddr;
	__be32 to_daddr;
	__be16 to_sport;
	__be16 to_dport;
	struct entry_meta meta;
};
ASSERT_SIZE(struct flow4, 64);

// One direction of an IPv6 flow, or the IPv6 side of a flow between families. In the latter case,
// the "to" fields hold IPv4 addresses.
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

// A cache line of the index. A slot holds the number + 1 of an entry in the low bits, and a tag in
// the high bits; a free slot is 0.
struct bucket {
	__u32 slots[BUCKET_SLOTS];
	__u32 spilled; // number of tuples of this bucket that are in their second bucket
};
ASSERT_SIZE(struct bucket, 64);

#define HINT_SLOTS 4

// Slots as in a bucket, of flows with the same low bits in their hash.
struct hint {
	__u32 slots[HINT_SLOTS];
};
ASSERT_SIZE(struct hint, 16);

// Free entries.
struct stock {
	__u64 top;   // free list, linked by meta.twin: changes << 32 | number + 1
	__u32 fresh; // entries from here onwards were never used
	__u32 room;  // number of entries; user space adds parts first and then increases it
	__u32 pad[12];
};
ASSERT_SIZE(struct stock, 64);

// hop.flags
#define HOP_XDP 0x01 // XDP may send there even if TC handles other packets

// A next hop.
struct hop {
	__u32 ifindex;
	__u32 gen;     // generation of the lookup
	__u32 checked; // tick of the last route lookup
	__u16 mtu;
	__u8 dmac[ETH_ALEN]; // both in the order of the Ethernet header
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
	CHECK_STRICT = 0x04,	 // interfaces with strict rp_filter (1)
	CHECK_EACH = 0x08,	 // rp_filter may refuse packets without a flow
	CHECK_MULTIPATH = 0x10,	 // IPv4 routes over several next hops
	CHECK_RULES = 0x20,	 // IPv4 rules of "ip rule" other than the default ones
	CHECK_RULES6 = 0x40,	 // the same for IPv6
	CHECK_FORWARDING = 0x80, // interfaces with IPv4 forwarding off
	CHECK_OWN4 = 0x100,	 // own_sources has all local IPv4 destinations
	CHECK_OWN6 = 0x200,	 // own_addresses6 has all local IPv6 destinations
	CHECK_INPUT = 0x400,	 // the interface of arrival selects routes ("ip rule")
	CHECK_CLASS = 0x800,	 // the type of service selects routes
	CHECK_CLIENT = 0x1000,	 // more than the destination's address selects routes
};

// Global words of the datapath, in one element. Every packet reads the first cache line, which is
// rarely written.
struct control {
	__u32 generation; // generation of next hops; incremented when a route, neighbour, address or link changes
	__u32 lost_logs;  // log lines lost because the ring buffer was full
	__u32 spliced; // SPLICED_*: kinds of flows that may exist, which programs must be able to continue
	__u32 nat_order; // element of nat_orders in force: one word, so that the order changes atomically
	__u32 ended;	 // the map "ended" has had entries
	__u32 checks;	 // CHECK_*, written by user space
	// The place of a flow table's index in its map: first bucket << 32 | number of buckets.
	// While user space fills another index, the programs add new slots to both. Otherwise
	// "next" is 0.
	__u64 index4;
	__u64 index6;
	__u64 next_index4;
	__u64 next_index6;
	__u64 watched; // ns of CLOCK_MONOTONIC: last probe of neighbours by user space; 0: none; 1: it has stopped
	__u32 half_open; // handshakes in progress
	__u32 sweep4;	 // next entry to sweep
	__u32 sweep6;
	__u32 holding; // user space holds fragments and needs reports of first fragments
	__u64 swept4;  // complete sweeps
	__u64 swept6;
	__u32 used4; // entries in use at the last complete sweep
	__u32 used6;
	__u32 count4; // counted so far in this sweep
	__u32 count6;
	__u32 answers; // ICMP errors and resets sent in the second "answer_tick"
	__u32 answer_tick;
	__u32 held; // fragments passed to user space in the second "held_tick"
	__u32 held_tick;
};
ASSERT_SIZE(struct control, 128);

#endif
