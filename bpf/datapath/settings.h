// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Structures that user space writes for the programs, and state of the programs outside the flow
// tables: listeners, services and backends, clients, firewall rules, fragments. nat/rules.h has those
// of NAT rules. The rules of types.h apply here too.
#ifndef SLUICE_SETTINGS_H
#define SLUICE_SETTINGS_H

#include "nat/rules.h"
#include "types.h"

// A listener of a service: with one port, or with a port prefix in the trie.
struct listener_key {
	__u8 l4_proto; // 0: any
	__u8 family;
	__u8 addr[16];
	__be16 port;
};
ASSERT_SIZE(struct listener_key, 20);

struct listener_prefix {
	__u32 prefix_len; // significant bits of key
	struct listener_key key;
};
ASSERT_SIZE(struct listener_prefix, 24);

struct listener {
	__u32 service;
	__u32 ifindex; // 0: any
};

// A listener on an address that has listeners on different interfaces. "ifindex" is the ingress
// interface. ANY_IFACE_OF_SERVICE | service finds the listener of a service on any interface.
struct iface_listener_key {
	__u32 prefix_len; // significant bits of the fields below
	__u32 ifindex;
	struct listener_key key;
};
ASSERT_SIZE(struct iface_listener_key, 28);

enum iface_key {
	ANY_IFACE_OF_SERVICE = 0xc0000000U, // not an interface index
};

// Value of source_checks: the kernel's checks of IPv4 packets on an ingress interface.
enum source_check {
	SOURCE_STRICT = 0x01, // rp_filter 1
	SOURCE_LOOSE = 0x02,  // rp_filter 2
	SOURCE_ACCEPT_LOCAL = 0x04,
	SOURCE_FORWARDING_OFF = 0x08, // forwarding 0
};

// Value of own_sources.
enum own_kind {
	OWN_ADDRESS = 1,
	OWN_BROADCAST = 2,
};

// Filter for own_sources: a bit per address, by hash. Most other sources need no lookup then.
struct own_filter {
	__u64 words[64];
};
ASSERT_SIZE(struct own_filter, 512);

// route_mtu_key.ifindex of IPv4 routes. It separates the families: the IPv6 default route contains ::ffff:0:0/96.
enum route_mtu_family {
	ROUTE_MTU_IPV4 = 0x40000000,
};

// Routes of an interface that have an MTU. bpf_fib_lookup reports locked MTUs only.
struct route_mtu_key {
	__u32 prefix_len; // significant bits of the fields below
	__u32 ifindex;	  // IPv4: with ROUTE_MTU_IPV4
	__u8 addr[16];	  // IPv4: ::ffff:0:0/96
};
ASSERT_SIZE(struct route_mtu_key, 24);

// Maps the endpoint of a backend to the virtual endpoint for which it replies.
struct reverse {
	union addr vip;
	__be16 port; // entry without a port: offset to add to the reply's port
	__u16 service;
	__u16 ambiguous; // several services share the backend: only a flow can distinguish them
	__u16 backend;
};
ASSERT_SIZE(struct reverse, 24);

// service.flags
enum service_flag {
	SERVICE_SYN_STATELESS = 0x01, // SYNs need no flow: the scheduler is a hash, replies are unambiguous
	SERVICE_STRICT_TCP = 0x02,
	SERVICE_ANSWER_RESET = 0x04, // answer if no backend is usable
	SERVICE_ANSWER_REJECT = 0x08,
	SERVICE_SESSIONS = 0x10,     // has pinned clients
	SERVICE_PORT_FORWARD = 0x20, // implements a port-forward rule that inside hosts may use
	SERVICE_MSS_CLAMP = 0x40,
	SERVICE_TOA = 0x100,	     // fullnat: the client's address in a TCP option
	SERVICE_PROXY = 0x200,	     // fullnat: the client's address in a PROXY protocol header
	SERVICE_MAC_KEYS = 0x80,     // persistence uses hardware addresses
	SERVICE_COOKIES = 0x400,     // cookies answer SYNs while many handshakes are in progress
	SERVICE_KEEPS_FLOWS = 0x800, // persistence or a connection limit needs flows in every mode
	SERVICE_ARRIVES = 0x1000,    // moves here from nftables, which may still have its connections
	SERVICE_LEAVES = 0x2000,     // moves to nftables: no flow opens here
	SERVICE_NODES = 0x4000,	     // other nodes of the cluster may have the flow of a reply
};

enum no_rule {
	NO_RULE = 0xffff,
};

// The first cache line holds the fields that every packet without a flow reads.
struct service {
	__u64 slots; // first slot << 32 | number of slots: one word, to switch tables atomically
	__u16 flags;
	__u8 mode;
	__u8 scheduler;
	__u8 encap;
	__u8 active; // entry in use
	__be16 encap_port;
	__u32 sticky_ticks; // persistence, 0 for none
	__u16 sticky_keys;  // STICKY_*
	__u16 nat_rule;	    // port-forward to an IPv6 host: nat64 rule that embeds IPv4 clients; else NO_RULE
	__u64 allow;	    // sets that may connect, 0 for all
	__u64 deny;	    // sets that may not
	__u32 max_flows;    // 0 for no limit
	__u32 max_client_flows;
	__u32 max_backend_flows;
	__u32 mark;
	__u64 reset_ns; // interval between resets from clients, 0 for no limit
	__u64 reset_burst_ns;
	__u64 rate_ns;	// interval between new connections, 0 for no limit
	__u64 burst_ns; // burst credit
	__u64 client_rate_ns;
	__u64 client_burst_ns;
	__u64 log_ns; // interval between logged connections, 0 for none
	__u64 log_burst_ns;
	__u16 shift; // port-forward of a range: offset of each port
	__u8 pad[6];
};
ASSERT_SIZE(struct service, 128);

enum sticky_field {
	STICKY_SADDR = 0x01,
	STICKY_SPORT = 0x02,
	STICKY_DADDR = 0x04,
	STICKY_DPORT = 0x08,
	STICKY_SMAC = 0x10,
	STICKY_DMAC = 0x20,
};

enum backend_state {
	BACKEND_UP = 1,
	BACKEND_DRAIN = 2,
	BACKEND_DOWN = 0,
};

struct backend {
	union addr addr;
	__be16 port; // 0 means that the destination port is kept
	__u8 family;
	__u8 state; // BACKEND_*
	__u16 service;
	__u16 weight;
	__u32 max_flows;
	__u8 mac[ETH_ALEN]; // mode dsr; 0: use the neighbour table
	// first element of its pool in runs, for mode fullnat and for clients of network_len
	__u16 pool;
	__u16 pool_len;
	__u8 network_len; // mode dnat: clients in the backend's prefix of this length get a pool source; 0: none
	__u8 pad;
};
ASSERT_SIZE(struct backend, 40);

// Next hop of a backend, for packets without a flow.
struct backend_hop {
	__u64 way;     // hop << 32 | generation: one word, because CPUs write it concurrently
	__be32 source; // tunnel over IPv4: outer source address
	__u32 pad;
};
ASSERT_SIZE(struct backend_hop, 16);

// A listener with one IPv4 port, of a service without flows and without checks of its packets. The
// fast path forwards its packets directly.
struct direct {
	__u64 key; // daddr | dport << 32 | l4_proto << 48; 0: free
	__u32 service;
	__u32 ifindex; // 0: any
	__u8 mode;
	__u8 scheduler;
	__u8 encap;
	__u8 pad[5];
	__u64 pad2;
};
ASSERT_SIZE(struct direct, 32);

// Counters of a service or a backend. They include ended flows and packets without a flow.
struct load {
	__u64 flows; // total of all flows
	__u64 packets;
	__u64 bytes;
	__u64 refused;
	__s64 active;	 // current flows
	__u64 tat;	 // limit on new connections: time of the next conforming one (ns)
	__u64 reset_tat; // limit on resets: time of the next conforming one (ns)
	__u32 sequence;	 // position of SCHEDULER_SEQUENCE
	__u32 cookie;	 // service: tick of the last SYN answered by a cookie, 0 for none
};
ASSERT_SIZE(struct load, 64);

struct tally {
	__u64 packets;
	__u64 bytes;
};

struct sticky_key {
	union addr saddr;
	union addr daddr;
	__be16 sport;
	__be16 dport;
	__u8 smac[ETH_ALEN];
	__u8 dmac[ETH_ALEN];
	__u32 service;
	__u32 pad;
};
ASSERT_SIZE(struct sticky_key, 56);

struct sticky {
	__u32 backend;
	__u32 seen;
};

// A client under a quota of a service (owner), or of a NAT rule (owner | 0x10000).
struct client_key {
	union addr addr; // a service counts IPv6 clients by /64
	__u32 owner;
	__u32 pad;
};
ASSERT_SIZE(struct client_key, 24);

#define CLIENT_BLOCKS 8

// client.flows and client.ports count in their low bits. Their high bits identify the entry.
enum client_bits {
	CLIENT_COUNT = 0xffffff,
};
#define CLIENT_FLOW 1ULL // one flow, in the word of flows and ports
#define CLIENT_PORT (1ULL << 32)
#define CLIENT_HELD (CLIENT_COUNT * (CLIENT_FLOW + CLIENT_PORT)) // all bits set: a CPU is deleting the client

struct client {
	__u64 tat;   // limit on new connections: time of the next conforming one (ns)
	__u32 flows; // current flows; one word with ports, see client_charge
	__u32 ports; // bindings with a port, including ports in hold-down
	__u32 pool;  // number of its pool address + 1, 0 for none yet
	__u32 pad;
	__u32 blocks[CLIENT_BLOCKS]; // blocks of ports on that address: number + 1, 0 for none
};
ASSERT_SIZE(struct client, 56);

// A mapping that an inside host requested (PCP): every outside host may reach the inside endpoint.
struct mapping_key {
	union addr addr;
	__be16 port;
	__u8 l4_proto;
	__u8 rule;
	__u32 family; // family of addr
};
ASSERT_SIZE(struct mapping_key, 24);

struct mapping {
	union addr outside;
	__u64 expires;	// ns of CLOCK_BOOTTIME; user space deletes expired mappings
	__u8 nonce[12]; // only requests with this nonce may change the mapping
	__be16 port;	// outside port
	__u8 outside_family;
	__u8 pad;
	__u32 index; // index of the binding's entry, in the inside family
	__u32 pad2;
};
ASSERT_SIZE(struct mapping, 48);

// A request from user space to take over a flow that nftables had.
struct flow_request {
	struct tuple key; // tuple of the opener's packets
	struct tuple to;  // translated tuple
	__u16 owner;	  // service
	__u16 backend;
	__u8 family;
	__u8 heard; // HEARD_* of both sides
	__u8 open;  // an open TCP connection
	__u8 pad;
	__u32 reason; // out: REASON_NEW_FLOW, or the cause of the failure
	__u32 pad2;
};
ASSERT_SIZE(struct flow_request, 96);

// Argument of map_open and map_close.
struct mapping_request {
	struct mapping_key key;
	struct mapping mapping; // open: in: requested outside endpoint, 0 for any; out: the endpoint
	__u32 exact;		// the requested endpoint is mandatory
	__u32 place;		// open: position of the outside address in the pool + 1, 0 for any
	__u32 reason;		// out: REASON_NONE, or the cause of the failure
	__u32 pad;
};
ASSERT_SIZE(struct mapping_request, 88);

struct session_key {
	__u32 prefix_len;
	__u32 service;
	__u8 addr[16];
};

// A prefix in a set, among the sources of NAT rules or among exceptions. The value lists the
// objects that contain it.
struct member_key {
	__u32 prefix_len;
	__u32 list; // LIST_* | family << 8; for LIST_PREFIX and LIST_BLOCKS also | rule << 16
	__u8 addr[16];
};
ASSERT_SIZE(struct member_key, 24);

// A single address in the same lists.
struct host_key {
	__u32 list;
	__u8 addr[16];
};
_Static_assert(sizeof(struct host_key) == sizeof(struct member_key) - 4, "a member_key ends in a host_key");

enum served {
	SERVED_LISTENER = 0x01, // address of a listener
	SERVED_BACKEND = 0x02,	// address of a backend
	SERVED_OWNED = 0x04,	// virtual address: refuse packets that no service accepts
	SERVED_RESET = 0x08,	// answer with a TCP reset or port unreachable
	SERVED_REJECT = 0x10,	// answer with port unreachable
	SERVED_BOUND = 0x20,	// refuse only packets that would leave through their ingress interface
};

enum list {
	LIST_SETS = 0,	  // bit n: firewall set n
	LIST_SOURCES = 1, // bit n: the NAT rule with id n translates this source
	LIST_EXCEPT = 2,  // bit n: NAT rule n excepts this destination
	LIST_SERVED = 3,  // SERVED_*
	// | rule << 16: id + 1 of the part of a masquerade rule for an IPv4 next hop or IPv6
	// destination
	LIST_TOWARDS = 7,
	LIST_BLOCKS = 5, // | rule << 16: sources of a rule with deterministic blocks, see take_computed
	LIST_PREFIX = 4, // | rule << 16: destinations that a static, npt66 or siit rule excepts
	LIST_ROUTED = 6, // length of the most specific route to a destination within a mapping between families
};
enum routed {
	ROUTED_HERE = 0x100, // in LIST_ROUTED: an address of this host
};

// A line of a table of denied sources, see denied.h.
struct denied_line {
	__u64 w[8]; // 16 prefixes of IPv4, or 4 of IPv6, as in packets; unused ones are 0 and last
};
ASSERT_SIZE(struct denied_line, 64);

// Position of the groups in a table, and bits of a group. A list of groups ends with 0.
enum denied_layout {
	DENIED_GROUPS4 = 0, // first line of the groups
	DENIED_GROUPS6 = 5,
	DENIED_LINES = 22,	 // first line of prefixes
	DENIED_PROBES = 8,	 // a prefix is in one of this many lines
	DENIED_LENGTH = 0xff,	 // length of the prefixes
	DENIED_ZERO = 0x100,	 // contains the prefix 0, which has no place in the lines
	DENIED_PRESENT = 0x200,	 // set in every group
	DENIED_COUNT_SHIFT = 16, // number of lines
	DENIED_FIRST_SHIFT = 40, // first line
	DENIED_BITS = 24,	 // bits of both
};

// A firewall rule at the first hook.
struct firewall_rule {
	__u64 sources; // bits of source sets, 0 for all sources
	__u64 dests;
	__u32 ifindex; // 0: any
	__u8 l4_proto; // 0: any
	__u8 action;   // enum action: drop, or pass for accept
	__be16 first;  // ports, host order; first 0 for all
	__u16 last;
	__u16 pad;
	__u32 pad2;
	__u64 rate_ns;	// drop: interval between packets that still pass, 0: drop all
	__u64 burst_ns; // burst credit
	__u64 tat;	// time of the next conforming packet (ns)
	__u64 pad3;
};
ASSERT_SIZE(struct firewall_rule, 64);

// The decision on a first fragment, for its later fragments.
struct fragment_key {
	union addr saddr;
	union addr daddr;
	__be32 id;
	__u8 l4_proto;
	__u8 pad[3];
};
ASSERT_SIZE(struct fragment_key, 40);

struct fragment {
	struct tuple tuple; // tuple of the unfragmented packet
	__u32 seen;
	__u16 reason; // decision on the first fragment; also applies to later ones
	__u8 tcp_flags;
	__u8 pad;
};

// A hardware address of this host. Written by user space.
struct station_key {
	__u64 destination; // high six bytes, in the order of the frame
	__u32 ifindex;	   // ingress interface
	__u32 pad;
};
ASSERT_SIZE(struct station_key, 16);

#endif
