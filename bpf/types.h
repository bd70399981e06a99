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
#define LAYOUT 6

#define ASSERT_SIZE(t, n) _Static_assert(sizeof(t) == (n), "size of " #t)

// What happens to a packet.
enum action {
	ACTION_PASS,	// to the kernel's own stack, perhaps rewritten
	ACTION_DROP,	// thrown away
	ACTION_FORWARD, // rewritten and sent out
};

// Why it happens. The comment of each line is its entry in docs/reasons.md.
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
	REASON_NOT_IP,		     // neither IPv4 nor IPv6, or behind a VLAN tag
	REASON_NOT_OURS,	     // no service, binding or rule wants it
	REASON_NOT_ROUTED,	     // a local address, multicast, or another protocol of the host's own
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
	REASON_UNTRANSLATABLE,	     // has no meaning in the other IP version
	REASON_UNSUPPORTED_PROTOCOL, // a protocol that the matching rule cannot translate
	REASON_INTERNAL,	     // a helper of the kernel refused its work
	REASON_TO_FRAGMENT6,	     // IPv4 packet without DF too large for IPv6: the daemon translates it and sends it in fragments
	REASON_COUNT,		     // number of reasons
};

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
};

// Life of a flow table entry. A reader compares it as part of the key.
enum entry_state {
	ENTRY_FREE, // also: claimed and being filled
	ENTRY_LIVE,
	ENTRY_DEAD, // not found any more; freed one second later at the earliest
	ENTRY_HOLD, // dead, and keeps the port of its binding (RFC 6888 REQ-8)
	ENTRY_LOOSE, // free, and on its way back to the stock
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
#define ENTRY_PRIMARY 0x01  // direction of the packet that opened the flow
#define ENTRY_CROSS 0x02    // the twin is in the other family's table
#define ENTRY_SETTLED 0x04  // both sides were heard (TCP: handshake complete)
#define ENTRY_PORT 0x08	    // the reply's destination port is this flow's; with ENTRY_NAT its binding's (bore_binding)
#define ENTRY_BOUND 0x10    // the flow refers to a binding (ref_of its reply)
#define ENTRY_HALF_OPEN 0x20 // counted against the half-open quota
#define ENTRY_CLIENT 0x40   // counted in the clients map
#define ENTRY_NAT 0x80	    // owner is a NAT rule, not a service

// entry_meta.heard: what packets of this direction have said. Each direction
// writes only its own, so no two CPUs write the same byte of a flow.
#define HEARD_SYN 0x01
#define HEARD_FIN 0x02
#define HEARD_RST 0x04
#define HEARD_ACK 0x08 // anything that is neither SYN nor RST
#define HEARD_CLOSED 0x10 // primary: closed, and no longer counted as a connection
#define HEARD_EDITED 0x20 // every packet of this direction is looked at: its TCP header is changed
// Of a primary entry that was made with its binding:
#define HEARD_CHARGED 0x40 // the binding is counted in the clients map
#define HEARD_REMOTE 0x80  // its key has the remote endpoint (NAT_MAP_REMOTE)
#define HEARD_KEPT (HEARD_CLOSED | HEARD_EDITED | HEARD_CHARGED | HEARD_REMOTE) // when the ports are used again

// What an entry keeps beside its key and rewrite.
struct entry_meta {
	__u32 twin;  // index of the other direction; of a binding: its outside port owner slot
	__u32 seen;  // tick of the last packet; of a dead entry: of its death
	__u8 flags;
	__u8 heard;
	__u16 hop;     // index into hops, 0 for none
	__u32 hop_gen; // hop is valid while this is the table's generation
	__u16 owner;   // primary: service or NAT rule; of other entries see ref_of
	__u16 backend; // primary: index into backends; one that was made with its binding: number of the pool address
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

// Half a cache line of the index. A slot is an entry's number + 1 below a tag, or 0.
struct bucket {
	__u32 slots[8];
};
ASSERT_SIZE(struct bucket, 32);

// Entries that can be taken.
struct stock {
	__u64 top;   // stack of freed entries, linked by meta.twin: changes << 32 | number + 1
	__u32 fresh; // entries from here on were never used
	__u32 pad[13];
};
ASSERT_SIZE(struct stock, 64);

// A next hop.
struct hop {
	__u32 ifindex;
	__u32 gen;     // generation in which it was looked up
	__u32 checked; // tick of the last look at the routing table
	__u16 mtu;
	__u8 dmac[ETH_ALEN];
	__u8 smac[ETH_ALEN];
	__u16 pad;
	__u32 pad2;
};
ASSERT_SIZE(struct hop, 32);

// Words of the datapath as a whole; one element. Every packet reads the first
// cache line, which is seldom written.
struct control {
	__u32 generation; // of next hops; grows when a route, neighbour, address or link changes
	__u32 lost_logs;  // lines of the log that the ring had no room for
	__u32 spliced;	  // not 0: a flow was opened by a cookie, so that programs must know how to go on with it
	__u32 pad[13];
	__u32 half_open;  // handshakes in progress
	__u32 sweep4;	  // next entry to sweep
	__u32 sweep6;
	__u32 holding;	  // user space holds fragments and wants to know of first ones
	__u64 swept4; // complete sweeps
	__u64 swept6;
	__u32 used4; // entries in use, as of the last complete sweep
	__u32 used6;
	__u32 count4; // counted so far in this sweep
	__u32 count6;
	__u32 answers;	    // ICMP errors and resets sent in the second "answer_tick"
	__u32 answer_tick;
	__u32 held;	    // fragments handed over in the second "held_tick"
	__u32 held_tick;
};
ASSERT_SIZE(struct control, 128);

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

// A backend's endpoint, back to the virtual endpoint that it answers for.
struct reverse {
	union addr vip;
	__be16 port; // 0 keeps the port
	__u16 service;
	__u16 ambiguous; // several services share the backend: only a flow can tell
	__u16 backend;
};
ASSERT_SIZE(struct reverse, 24);

// service.flags
#define SERVICE_SYN_STATELESS 0x01 // hash scheduler and unambiguous replies
#define SERVICE_STRICT_TCP 0x02
#define SERVICE_ANSWER_RESET 0x04  // when no backend is usable
#define SERVICE_ANSWER_REJECT 0x08
#define SERVICE_SESSIONS 0x10	   // has pinned clients
#define SERVICE_PORT_FORWARD 0x20  // stands for a port-forward rule
#define SERVICE_MSS_CLAMP 0x40

#define SERVICE_TOA 0x100	   // fullnat: the client's address in a TCP option
#define SERVICE_PROXY 0x200	   // fullnat: the client's address in a PROXY protocol header
#define SERVICE_MAC_KEYS 0x80	   // persistence looks at hardware addresses
#define SERVICE_COOKIES 0x400	   // SYNs are answered by cookies when handshakes pile up

// What every packet without a flow looks at stands in the first cache line.
struct service {
	__u64 slots;	 // first slot << 32 | number of slots: one word, so that a table is switched at once
	__u16 flags;
	__u8 mode;
	__u8 scheduler;
	__u8 encap;
	__u8 active; // entry in use
	__be16 encap_port;
	__u32 sticky_ticks; // persistence, 0 for none
	__u16 sticky_keys;  // STICKY_*
	__u16 nat_rule;	 // of a port-forward, else 0xffff
	__u64 allow;	 // sets that may connect, 0 for all
	__u64 deny;	 // sets that may not
	__u32 max_flows; // 0 for no limit
	__u32 max_client_flows;
	__u32 max_backend_flows;
	__u32 mark;
	__u64 reset_ns;	 // one reset from a client in this time, 0 for no limit
	__u64 reset_burst_ns;
	__u64 rate_ns;	 // one new connection in this time, 0 for no limit
	__u64 burst_ns;	 // credit that may gather
	__u64 client_rate_ns;
	__u64 client_burst_ns;
	__u64 log_ns;	 // one new connection in this time is logged, 0 for none
	__u64 log_burst_ns;
	__u64 pad;
};
ASSERT_SIZE(struct service, 128);

#define STICKY_SADDR 0x01
#define STICKY_SPORT 0x02
#define STICKY_DADDR 0x04
#define STICKY_DPORT 0x08
#define STICKY_SMAC 0x10
#define STICKY_DMAC 0x20

#define BACKEND_UP 1
#define BACKEND_DRAIN 2
#define BACKEND_DOWN 0

struct backend {
	union addr addr;
	__be16 port; // 0 keeps the port
	__u8 family;
	__u8 state; // BACKEND_*
	__u16 service;
	__u16 weight;
	__u32 max_flows;
	__u8 mac[ETH_ALEN]; // of mode dsr; 0: from the neighbour table
	__u16 pool;	    // mode fullnat: first of the pool addresses of its family
	__u16 pool_len;
	__u16 pad;
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
	__u64 key;     // daddr | dport << 32 | l4_proto << 48; 0: free
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
	__u64 flows;	// ever
	__u64 packets;
	__u64 bytes;
	__u64 refused;
	__s64 active;	// flows now
	__u64 tat;	// limit on new connections: when the next one conforms (ns)
	__u64 reset_tat; // limit on resets: when the next one conforms (ns)
	__u32 sequence; // of SCHEDULER_SEQUENCE
	__u32 cookie;	// of a service: tick of the last SYN that a cookie answered, 0 for none
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
	__u64 expires; // ns of CLOCK_BOOTTIME; user space sees to it
	__u8 nonce[12]; // who may change it
	__be16 port;   // outside
	__u8 outside_family;
	__u8 pad;
	__u32 index; // entry of its binding, in the family of the inside
	__u32 pad2;
};
ASSERT_SIZE(struct mapping, 48);

// What map_open and map_close are called with.
struct mapping_request {
	struct mapping_key key;
	struct mapping mapping; // open: outside and port are what is wanted, 0 for any; out: what it is
	__u32 exact;		// no other outside endpoint will do
	__u32 reason;		// out: REASON_NONE, or why not
};
ASSERT_SIZE(struct mapping_request, 80);

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

#define LIST_SETS 0    // bit n: firewall set n
#define LIST_SOURCES 1 // bit n: NAT rule n translates this source
#define LIST_EXCEPT 2  // bit n: NAT rule n leaves this destination alone
#define LIST_SERVED 3  // 1: address of a listener, 2: of a backend
#define LIST_BLOCKS 5  // | rule << 16: sources of a rule with deterministic blocks, see take_computed
#define LIST_PREFIX 4  // | rule << 16: destinations that a static, npt66 or siit rule leaves alone

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
#define NAT_MAP_REMOTE 0x01  // address-and-port-dependent mapping: a binding for each remote endpoint
#define NAT_HAIRPIN 0x02
#define NAT_PROHIBITED 0x04  // answer 3/13 rather than 3/1 when no port is left
#define NAT_DETERMINISTIC 0x08
#define NAT_MSS_CLAMP 0x10
#define NAT_RANDOM 0x20	     // no port preservation

// A rule that translates sources: snat, masquerade, nat64.
struct nat_rule {
	__u32 out;	// egress interface, 0 for any
	__u32 in;	// ingress interface, 0 for any
	__u16 pool;	// first of its pool addresses
	__u16 pool_len;
	__u16 pool6;
	__u16 pool6_len;
	__u16 port_first; // inclusive
	__u16 port_last;
	__u16 block;	  // ports of a block, 0 for none
	__u8 flags;
	__u8 filtering;	  // enum filtering
	__u32 max_ports;  // per client, 0 for none
	__u32 max_flows;  // per client, 0 for none
	__u64 packets;
	__u64 bytes;
	__u64 flows;
	__u8 active;
	__u8 prefix_len; // nat64: length of prefix, 0 for other rules
	__u8 pad[6];
	union addr prefix; // nat64
};
ASSERT_SIZE(struct nat_rule, 80);

// An address whose ports are allocated.
struct pool_addr {
	union addr addr;
	__u8 family;
	__u8 local; // also an address of this host: its sockets go first
	__u16 pad;
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
	__u32 in;      // leaving packets come in here, 0 for any interface
	__u32 out;     // and would go out here
	__u16 rule;
	__u16 adjust;  // npt66: what to add to a checksum-neutral word (RFC 6296)
	__u8 kind;     // enum prefix_kind
	__u8 len;      // bits of the matched prefix
	__u8 to_len;   // bits of the replacement
	__u8 embed_len; // 0: the rule has no such prefix
	__u8 except;   // the rule leaves some destinations alone
	__u8 pad[7];
};
ASSERT_SIZE(struct prefix, 72);

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

// A later fragment for user space to hold; without a frame, the first one that it
// waits for. Without a key it is a packet that user space is to fragment.
#define HELD_FRAME 2048
struct held {
	struct fragment_key key;
	__u64 at; // ns of the monotonic clock
	__u32 ifindex;
	__u32 len;
	__u8 frame[HELD_FRAME];
};
ASSERT_SIZE(struct held, 2104);

enum event_kind {
	EVENT_NEIGHBOUR,  // addr wants to be resolved
	EVENT_CONNECTION, // addr has opened a connection to a service that logs them
	EVENT_BLOCK,	  // a client was given a block of ports, or has it no longer
};

struct event {
	__u32 kind;
	__u32 ifindex;
	__u32 reason;
	__u32 len; // EVENT_CONNECTION: bytes of the packet, from the network header on
	union addr addr;
	__u32 family;
	__u32 owner; // EVENT_CONNECTION: service; so to the end
	union addr to;
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

// Keeps the enumerations in the BTF that user space reads their names from.
const enum action *export_action __attribute__((unused));
const enum reason *export_reason __attribute__((unused));
const enum family *export_family __attribute__((unused));
const enum mode *export_mode __attribute__((unused));
const enum scheduler *export_scheduler __attribute__((unused));
const enum filtering *export_filtering __attribute__((unused));
const enum entry_kind *export_entry_kind __attribute__((unused));
const enum entry_state *export_entry_state __attribute__((unused));
const enum encap *export_encap __attribute__((unused));
const enum answer *export_answer __attribute__((unused));
const enum prefix_kind *export_prefix_kind __attribute__((unused));
const enum prefix_role *export_prefix_role __attribute__((unused));
const enum event_kind *export_event_kind __attribute__((unused));
const struct block_event *export_block_event __attribute__((unused));
const struct mapping_request *export_mapping_request __attribute__((unused));

#endif
