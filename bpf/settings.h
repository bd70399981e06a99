// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// What user space writes for the programs, and what they keep and tell beside the
// flow tables: listeners, services and backends, clients, NAT rules and pools,
// prefixes, fragments, events. Rules of types.h hold here too.
#ifndef SLUICE_SETTINGS_H
#define SLUICE_SETTINGS_H

#include "types.h"

// A listener of a service: exact, or by port prefix in the trie.
struct listener_key {
	__u8 l4_proto; // 0: any
	__u8 family;
	__u8 addr[16];
	__be16 port;
};
ASSERT_SIZE(struct listener_key, 20);

struct listener_prefix {
	__u32 prefix_len; // bits of key that count
	struct listener_key key;
};
ASSERT_SIZE(struct listener_prefix, 24);

struct listener {
	__u32 service;
	__u32 ifindex; // 0: any
};

// A listener of an address that listeners are bound to by different interfaces. ifindex:
// where packets come in; or ANY_IFACE_OF_SERVICE and the service, for all that it listens on.
struct iface_listener_key {
	__u32 prefix_len; // bits of what follows that count
	__u32 ifindex;
	struct listener_key key;
};
ASSERT_SIZE(struct iface_listener_key, 28);

enum iface_key {
	ANY_IFACE_OF_SERVICE = 0xc0000000U, // no interface's index
};

// Value of source_checks: how the kernel checks the sources of IPv4 packets that an interface receives.
enum source_check {
	SOURCE_STRICT = 0x01, // rp_filter 1
	SOURCE_LOOSE = 0x02,  // rp_filter 2
	SOURCE_ACCEPT_LOCAL = 0x04,
};

// Value of own_sources.
enum own_kind {
	OWN_ADDRESS = 1,
	OWN_BROADCAST = 2,
};

// A bit for each address of own_sources, by hash, so that most other sources need no lookup.
struct own_filter {
	__u64 words[64];
};
ASSERT_SIZE(struct own_filter, 512);

// Routes of an interface. bpf_fib_lookup reports the MTU of locked ones only.
struct route_mtu_key {
	__u32 prefix_len; // bits of what follows that count
	__u32 ifindex;
	__u8 addr[16]; // IPv4: ::ffff:0:0/96
};
ASSERT_SIZE(struct route_mtu_key, 24);

// A backend's endpoint, back to the virtual endpoint that it answers for.
struct reverse {
	union addr vip;
	__be16 port; // of an entry without a port: added to that of the answer
	__u16 service;
	__u16 ambiguous; // several services share the backend: only a flow can tell
	__u16 backend;
};
ASSERT_SIZE(struct reverse, 24);

// service.flags
enum service_flag {
	SERVICE_SYN_STATELESS = 0x01, // hash scheduler and unambiguous replies
	SERVICE_STRICT_TCP = 0x02,
	SERVICE_ANSWER_RESET = 0x04, // when no backend is usable
	SERVICE_ANSWER_REJECT = 0x08,
	SERVICE_SESSIONS = 0x10,     // has pinned clients
	SERVICE_PORT_FORWARD = 0x20, // stands for a port-forward rule that inside hosts may use
	SERVICE_MSS_CLAMP = 0x40,
	SERVICE_TOA = 0x100,	     // fullnat: the client's address in a TCP option
	SERVICE_PROXY = 0x200,	     // fullnat: the client's address in a PROXY protocol header
	SERVICE_MAC_KEYS = 0x80,     // persistence looks at hardware addresses
	SERVICE_COOKIES = 0x400,     // SYNs are answered by cookies when handshakes pile up
	SERVICE_KEEPS_FLOWS = 0x800, // persistence or a limit of connections needs them, whatever the mode
	SERVICE_ARRIVES = 0x1000,    // comes from nftables, which has its connections still
	SERVICE_LEAVES = 0x2000,     // goes to nftables: nothing opens here any more
};

enum no_rule {
	NO_RULE = 0xffff,
};

// What every packet without a flow looks at stands in the first cache line.
struct service {
	__u64 slots; // first slot << 32 | number of slots: one word, so that a table is switched at once
	__u16 flags;
	__u8 mode;
	__u8 scheduler;
	__u8 encap;
	__u8 active; // entry in use
	__be16 encap_port;
	__u32 sticky_ticks; // persistence, 0 for none
	__u16 sticky_keys;  // STICKY_*
	__u16 nat_rule; // of a port-forward to an IPv6 host: the nat64 rule whose prefix IPv4 clients get; else NO_RULE
	__u64 allow;	// sets that may connect, 0 for all
	__u64 deny;	// sets that may not
	__u32 max_flows; // 0 for no limit
	__u32 max_client_flows;
	__u32 max_backend_flows;
	__u32 mark;
	__u64 reset_ns; // one reset from a client in this time, 0 for no limit
	__u64 reset_burst_ns;
	__u64 rate_ns;	// one new connection in this time, 0 for no limit
	__u64 burst_ns; // credit that may gather
	__u64 client_rate_ns;
	__u64 client_burst_ns;
	__u64 log_ns; // one new connection in this time is logged, 0 for none
	__u64 log_burst_ns;
	__u16 shift; // of a port-forward of a range: added to each port
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
	__be16 port; // 0 keeps the port
	__u8 family;
	__u8 state; // BACKEND_*
	__u16 service;
	__u16 weight;
	__u32 max_flows;
	__u8 mac[ETH_ALEN]; // of mode dsr; 0: from the neighbour table
	// where the pool addresses of its family begin in runs: of mode fullnat, and of clients of
	// network_len
	__u16 pool;
	__u16 pool_len;
	__u8 network_len; // mode dnat: clients with so many bits of its address get a source of the pool; 0: none do
	__u8 pad;
};
ASSERT_SIZE(struct backend, 40);

// Next hop of a backend, for packets without a flow.
struct backend_hop {
	__u64 way;     // hop << 32 | generation: one word, because CPUs write it at once
	__be32 source; // of a tunnel over IPv4: outer source address
	__u32 pad;
};
ASSERT_SIZE(struct backend_hop, 16);

// A listener with one IPv4 port of a service that keeps no flow and asks
// nothing of a packet but where it goes: its packets are sent on at once.
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

// Counts of a service or a backend; of ended flows and packets without one.
struct load {
	__u64 flows; // ever
	__u64 packets;
	__u64 bytes;
	__u64 refused;
	__s64 active;	 // flows now
	__u64 tat;	 // limit on new connections: when the next one conforms (ns)
	__u64 reset_tat; // limit on resets: when the next one conforms (ns)
	__u32 sequence;	 // of SCHEDULER_SEQUENCE
	__u32 cookie;	 // of a service: tick of the last SYN that a cookie answered, 0 for none
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

// A client under a quota: of a service, or of a NAT rule (owner | 0x10000).
struct client_key {
	union addr addr; // IPv6 clients of a service count by /64
	__u32 owner;
	__u32 pad;
};
ASSERT_SIZE(struct client_key, 24);

#define CLIENT_BLOCKS 8
#define CLIENT_GONE 0x80000000 // in flows and ports: the client is being forgotten
struct client {
	__u64 tat;   // limit on new connections (ns)
	__u32 flows; // alive now; with ports one word, see client_drop
	__u32 ports; // bindings that have a port now, held ones included
	__u32 pool;  // number of its pool address + 1, 0 for none yet
	__u32 pad;
	__u32 blocks[CLIENT_BLOCKS]; // of ports on that address: number + 1, 0 for none
};
ASSERT_SIZE(struct client, 56);

// A mapping that an inside host has asked for (PCP): an inside endpoint that everybody
// outside may reach.
struct mapping_key {
	union addr addr;
	__be16 port;
	__u8 l4_proto;
	__u8 rule;
	__u32 family; // of addr
};
ASSERT_SIZE(struct mapping_key, 24);

struct mapping {
	union addr outside;
	__u64 expires;	// ns of CLOCK_BOOTTIME; user space sees to it
	__u8 nonce[12]; // who may change it
	__be16 port;	// outside
	__u8 outside_family;
	__u8 pad;
	__u32 index; // entry of its binding, in the family of the inside
	__u32 pad2;
};
ASSERT_SIZE(struct mapping, 48);

// A flow of a service that nftables had, as user space asks for it.
struct flow_request {
	struct tuple key; // of the opener's packets
	struct tuple to;  // what they become
	__u16 owner;	  // service
	__u16 backend;
	__u8 family;
	__u8 heard; // HEARD_*, of both sides
	__u8 open;  // an open TCP connection
	__u8 pad;
	__u32 reason; // out: REASON_NEW_FLOW, or why there is none
	__u32 pad2;
};
ASSERT_SIZE(struct flow_request, 96);

// What map_open and map_close are called with.
struct mapping_request {
	struct mapping_key key;
	struct mapping mapping; // open: outside and port are what is wanted, 0 for any; out: what it is
	__u32 exact;		// no other outside endpoint will do
	__u32 place;		// open: of the outside address in the rule's pool + 1, 0 for any
	__u32 reason;		// out: REASON_NONE, or why not
	__u32 pad;
};
ASSERT_SIZE(struct mapping_request, 88);

struct session_key {
	__u32 prefix_len;
	__u32 service;
	__u8 addr[16];
};

// A prefix in a set, a source of a NAT rule, an exception: which objects it
// belongs to.
struct member_key {
	__u32 prefix_len;
	__u32 list; // LIST_* | family << 8; of LIST_PREFIX and LIST_BLOCKS also | rule << 16
	__u8 addr[16];
};
ASSERT_SIZE(struct member_key, 24);

// The same of one address.
struct host_key {
	__u32 list;
	__u8 addr[16];
};
_Static_assert(sizeof(struct host_key) == sizeof(struct member_key) - 4, "a member_key ends in a host_key");

enum served {
	SERVED_LISTENER = 0x01, // address of a listener
	SERVED_BACKEND = 0x02,	// of a backend
	SERVED_OWNED = 0x04,	// of a listener: what nothing listens for is refused
	SERVED_RESET = 0x08,	// answered by a TCP reset or port unreachable
	SERVED_REJECT = 0x10,	// answered by port unreachable
	SERVED_BOUND = 0x20,	// only what would leave by the interface that it came by is refused
};

enum list {
	LIST_SETS = 0,	  // bit n: firewall set n
	LIST_SOURCES = 1, // bit n: the NAT rule with id n translates this source
	LIST_EXCEPT = 2,  // bit n: NAT rule n leaves this destination alone
	LIST_SERVED = 3,  // SERVED_*
	// | rule << 16: which rule's part, id + 1, of a masquerade rule is for an IPv4 next hop or IPv6
	// destination
	LIST_TOWARDS = 7,
	LIST_BLOCKS = 5, // | rule << 16: sources of a rule with deterministic blocks, see take_computed
	LIST_PREFIX = 4, // | rule << 16: destinations that a static, npt66 or siit rule leaves alone
	LIST_ROUTED = 6, // length of the most specific route to this destination inside a mapping between the families
};
enum routed {
	ROUTED_HERE = 0x100, // of LIST_ROUTED: an address of this host
};

// A firewall rule at the first hook.
struct firewall_rule {
	__u64 sources; // sets, 0 for all
	__u64 dests;
	__u32 ifindex; // 0: any
	__u8 l4_proto; // 0: any
	__u8 action;   // enum action: drop, or pass for accept
	__be16 first;  // ports, host order; first 0 for all
	__u16 last;
	__u16 pad;
	__u32 pad2;
	__u64 rate_ns;	// drop: only what is above one packet in this time, 0 for all
	__u64 burst_ns; // credit that may gather
	__u64 tat;	// when the next packet conforms (ns)
	__u64 pad3;
};
ASSERT_SIZE(struct firewall_rule, 64);

// nat_rule.flags
enum nat_flag {
	NAT_MAP_REMOTE = 0x01, // address-and-port-dependent mapping: a binding for each remote endpoint
	NAT_HAIRPIN = 0x02,    // its sources are inside, and may use outside endpoints of each other
	NAT_PROHIBITED = 0x04, // answer 3/13 rather than 3/1 when no port is left
	NAT_DETERMINISTIC = 0x08,
	NAT_MSS_CLAMP = 0x10,
	NAT_RANDOM = 0x20, // no port preservation
};

// In the place of an interface's index: the rest is the number of a list of interfaces.
enum interface_key {
	INTERFACE_LIST = 0x40000000,
};

// A rule that translates sources: snat, masquerade, nat64.
struct nat_rule {
	__u32 out;  // egress interface or INTERFACE_LIST, 0 for any
	__u32 in;   // ingress interface or INTERFACE_LIST, 0 for any
	__u16 pool; // where its pool addresses begin in runs
	__u16 pool_len;
	__u16 pool6;
	__u16 pool6_len;
	__u16 port_first; // inclusive
	__u16 port_last;
	__u16 block; // ports of a block, 0 for none
	__u8 flags;
	__u8 filtering;	 // enum filtering
	__u32 max_ports; // per client, 0 for none
	__u32 max_flows; // per client, 0 for none
	__u64 rate_ns;	 // between new connections of a client, 0 for no limit
	__u64 burst_ns;	 // credit that may gather
	__u64 packets;
	__u64 bytes;
	__u64 flows;
	__u8 active;
	__u8 prefix_len; // nat64: length of prefix, 0 for other rules
	__u8 group;	 // of a part of a masquerade rule: id + 1 of the rule, see LIST_TOWARDS
	__u8 pad[5];
	union addr prefix; // nat64
};
ASSERT_SIZE(struct nat_rule, 96);

// The rules in the order of the configuration, of which the first that takes a packet
// translates it: id + 1 of each, then 0.
struct nat_order {
	__u8 rules[MAX_NAT_RULES];
};

// An address whose ports are allocated.
struct pool_addr {
	union addr addr;
	__u8 family;
	__u8 local; // also an address of this host: its sockets go first
	__u8 lost;  // it was, and is neither that nor in a pool any more: its flows end
	__u8 pad;
	__u32 pad2;
};
ASSERT_SIZE(struct pool_addr, 24);

// Ports of one (pool address, protocol class). Even ports stand before odd
// ones: bit (port & 1) << 15 | port >> 1, so that a parity is a run of words.
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

// Blocks of ports of one pool address that are taken.
#define BLOCK_WORDS 16
struct block_map {
	__u64 words[BLOCK_WORDS];
};
ASSERT_SIZE(struct block_map, 128);

// Which addresses a prefix is looked up for.
enum prefix_role {
	ROLE_DEST,     // destinations of a rule within one family
	ROLE_SOURCE,   // its sources
	ROLE_CROSSING, // both, of a rule between the families
};

// A prefix that is rewritten without state.
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
	__u32 in;  // leaving packets come in here, or INTERFACE_LIST; 0 for any interface
	__u32 out; // and would go out here
	__u16 rule;
	// npt66: what to add to a checksum-neutral word (RFC 6296); siit: traffic class, with CHOICE_CLASS
	__u16 adjust;
	__u8 kind;	// enum prefix_kind
	__u8 len;	// bits of the matched prefix
	__u8 to_len;	// bits of the replacement
	__u8 embed_len; // 0: the rule has no such prefix
	__u8 except;	// the rule leaves some destinations alone
	__u8 clamp;	// the rule lowers the MSS
	__u8 pool_len;	// siit: addresses from pool on
	__u8 choices;	// siit: CHOICE_*
	__u8 pool[4];	// siit: sources of errors from IPv6 routers without an IPv4 address (RFC 6791), the first
};
ASSERT_SIZE(struct prefix, 72);

// prefix.choices, plan.choices: what RFC 7915 leaves to the operator.
enum choice {
	CHOICE_CLASS = 0x01,  // every packet gets one traffic class (§4.1, §5.1)
	CHOICE_SUMMED = 0x02, // UDP without a checksum is dropped (§4.5)
};

// First fragment seen: where the later ones go.
struct fragment_key {
	union addr saddr;
	union addr daddr;
	__be32 id;
	__u8 l4_proto;
	__u8 pad[3];
};
ASSERT_SIZE(struct fragment_key, 40);

struct fragment {
	struct tuple tuple; // of the whole packet
	__u32 seen;
	__u16 reason; // of the first fragment: the later ones meet the same
	__u8 tcp_flags;
	__u8 pad;
};

// A hardware address at which frames are for this host. Written by user space.
struct station_key {
	__u64 destination; // in the high six bytes, as it stands in a frame
	__u32 ifindex;	   // where they come in
	__u32 pad;
};
ASSERT_SIZE(struct station_key, 16);

#endif
