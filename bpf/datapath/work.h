// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The working memory of one packet: the parsed packet, the plan, and intermediate results. Only
// "guess" persists across packets.
#ifndef SLUICE_WORK_H
#define SLUICE_WORK_H

#include "message.h"

// packet.flags
enum packet_flag {
	PACKET_LATER_FRAGMENT = 0x01,
	PACKET_FIRST_FRAGMENT = 0x02, // more fragments follow
	PACKET_ERROR = 0x04,	      // ICMP error
	PACKET_DF = 0x08,
	PACKET_EXTENDED = 0x10, // IPv6 extension headers
	PACKET_QUERY = 0x20,	// ICMP echo request
	PACKET_NO_FLOW = 0x40,	// ports cannot change, or ICMP that is neither query, reply nor error
	PACKET_MORE = 0x80,	// fragment that is not the last one
};

// interface_addr.flags
enum interface_flag {
	INTERFACE_XDP = 0x01, // the interface accepts redirects from XDP
};

// Properties of an interface: source addresses of ICMP errors sent there, and data that the routing
// table does not provide while a neighbour is unresolved. Written by user space.
struct interface_addr {
	union addr v4;
	union addr v6;
	__u8 mac[ETH_ALEN];
	__u16 pad;
	__u32 mtu;
	__u32 flags;
	__u64 lists; // bit n: list n of interfaces contains it
};
ASSERT_SIZE(struct interface_addr, 56);

// A parsed packet.
struct packet {
	struct tuple tuple;
	__u32 l3_len;  // bytes from the network header onwards
	__u32 ifindex; // ingress interface
	// egress interface of the untranslated destination, or of the server of a port-forward; 0
	// if not known. NO_ENTRY: there is none, as for packets to this host.
	__u32 out;
	__u32 cross_out; // egress interface after a change of family; 0 and NO_ENTRY as in out
	__be32 frag_id;
	__u32 segment;	// largest network packet on the wire after GSO, else l3_len
	__u16 l4_off;	// offset in the frame
	__u16 frag_off; // fragment offset in bytes
	__u8 family;
	__u8 flags;
	__u8 tcp_flags; // low byte: FIN 1, SYN 2, RST 4, PSH 8, ACK 16
	__u8 ttl;
	__u8 tos;
	__u8 icmp_type;
	__u8 icmp_code;
	__u8 inner_proto; // protocol number as on the wire
	__u8 dmac[ETH_ALEN];
	__u8 smac[ETH_ALEN];
	__u32 now;	    // tick
	__u32 frame_len;    // bytes of the whole frame
	__u16 source_route; // offset of a nonzero "segments left" from the network header; 0: none
	__u16 fragment_at;  // offset of the IPv6 fragment header from the network header; 0: none
	__u8 fragment_next; // its next header field
	__u8 pad[3];
};
ASSERT_SIZE(struct packet, 104);

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

enum no_entry {
	NO_ENTRY = 0xffffffff,
};

// plan.owner_nat
enum plan_owner {
	OWNER_SERVICE,
	OWNER_SOURCE, // a source NAT rule
	OWNER_NONE,
	OWNER_STATELESS, // a NAT rule without flows
};

// plan.flags
enum plan_flag {
	PLAN_ROUTED = 0x01,   // hop is valid
	PLAN_SAME = 0x02,     // the packet is forwarded unchanged
	PLAN_NO_L4 = 0x04,    // no transport header to touch (later fragment, other protocol)
	PLAN_ADMITTED = 0x08, // its SYN was admitted without a flow: no limit refuses the rest of the handshake
	PLAN_EXISTING = 0x10, // the flow existed before
	PLAN_KERNEL = 0x20,   // rewritten, then left to the kernel to send
	PLAN_ERROR = 0x40,    // an ICMP error: its quotation is rewritten too
	PLAN_REPLY = 0x80,    // reply of a backend without a flow
};
// A reply of a backend to this host itself (a health check), which remains unchanged.
#define PLAN_HERE (PLAN_REPLY | PLAN_SAME)

// plan.edits: changes to a TCP header beyond its ports.
#define EDIT_MSS 0x01	  // SYN: lower the MSS option to the MTU of the next link
#define EDIT_TOA 0x02	  // add the option with the client's address
#define EDIT_PROXY 0x04	  // from the client: insert the PROXY header and shift sequence numbers
#define EDIT_ANSWER 0x08  // to the client: subtract the PROXY header from acknowledgements
#define EDIT_ROOM 0x10	  // SYN to the client: reserve room for the growth of its segments
#define EDIT_SPLICE 0x20  // from the client of a cookie: the SYN until the backend replies, then its numbers
#define EDIT_SPLICED 0x40 // to the client of a cookie

// The plan for a packet: all input of apply.
struct plan {
	struct tuple to;    // translated source and destination
	union addr gateway; // address for the route lookup
	__u32 entry;	    // flow table entry of the packet, to cache the hop, or NO_ENTRY
	__u32 backend_hop;  // backend with the hop cache to use, or NO_ENTRY
	__u32 hop_gen;	    // generation in which hop is valid
	__u32 mtu;	    // MTU of the next hop, for an error that reports it
	__u16 owner;	    // service or NAT rule
	__u16 backend;
	__u16 hop;
	__be16 encap_port;
	__u8 action;
	__u8 reason;
	__u8 family; // family of the outbound packet
	__u8 gateway_family;
	__u8 encap;
	__u8 answer;
	__u8 flags;
	__u8 owner_nat; // enum plan_owner: the kind of owner
	__s32 verdict;	// verdict of the hook
	__u32 edits;	// EDIT_*
	__u32 record;	// key in adjusts for EDIT_PROXY, EDIT_ANSWER and EDIT_SPLICE*; for ANSWER_COOKIE the cookie
	__u32 asked;	// generation in which work.fib is the route to the packet's own destination; 0: it is not
	// Options of a siit rule:
	__be32 pool;   // first source of errors from routers without an IPv4 address
	__u8 pool_len; // number of such sources; 0: none
	__u8 choices;  // CHOICE_*
	__u8 tos;      // traffic class for CHOICE_CLASS
	__u8 absent;   // the fast path has found no flow
};
ASSERT_SIZE(struct plan, 112);

// The properties of a new flow.
struct new_flow {
	struct tuple key;  // tuple of the opening packet
	struct tuple to;   // translated tuple
	struct tuple back; // tuple of the reply: "to" reversed
	struct tuple from; // translated tuple of the reply: "key" reversed
	__u32 now;
	__u32 ref; // binding of ENTRY_BOUND; NO_ENTRY: the flow itself holds it
	__u16 owner;
	__u16 backend;
	__u8 family;	// family of key
	__u8 to_family; // family of to
	__u8 flags;
	__u8 heard;
	__u8 one_way;	  // dsr, tunnel: replies bypass this host
	__u8 edited;	  // HEARD_EDITED of the opener's direction
	__u8 back_edited; // HEARD_EDITED of the replies
	__u8 uncounted;	  // out: another CPU has subtracted the withdrawn flow from the open connections
	__u32 bytes;	  // bytes of the opening packet
	__u32 index;	  // out: entry with this key
};

// The live flow of a closed connection to a service, whose tuple the SYN of the packet has.
struct closed {
	__u32 index; // primary entry, in the packet's family; NO_ENTRY: none
	__u32 twin;  // reply entry; NO_ENTRY: a flow of one direction
	__u32 port;  // source from a pool, as map << 16 | port; 0: none
	__u32 hop_gen;
	__u16 owner;
	__u16 backend;
	__u16 hop;
	__u16 twin_family;
};
ASSERT_SIZE(struct closed, 24);

// A request for a port and its result. Host order.
struct port_request {
	__u32 map;   // element of port_maps
	__u16 want;  // preferred port: the result has its parity and range if possible
	__u16 first; // inclusive
	__u16 last;
	__u16 port;  // out
	__u16 whole; // use the whole range regardless of 1024: ICMP identifiers
	__u16 exact; // try want itself first
	// State of the search, which has little stack.
	__u32 odd;  // parity in search
	__u32 from; // half-ports, inclusive
	__u32 to;
	__u32 pool; // first element of the pool in runs
	__u32 pool_len;
	__u32 owned; // number + 1 of the client's pool address; 0: none yet
};

// A request for a binding and its result.
struct bind {
	struct tuple inside; // in: saddr, sport, l4_proto
	union addr outside;  // out
	__be16 port;	     // out
	__u8 family;	     // in: family of inside
	__u8 outside_family; // in
	__u32 rule;	     // in
	__u32 index;	     // out: entry of the binding in the inside family; NO_ENTRY: none yet
	__u32 now;	     // in
	__u32 slot;	     // out: index of the port in port_owners
	__u8 client_seen;    // the quota of the client is charged
	__u8 alone;	     // in: the caller makes a flow that can hold a new binding
	__u8 exact;	     // in: the requested endpoint is mandatory
	__u8 charged;	     // in: do not charge the client's rate of new connections (again)
	__u16 want;	     // in: requested outside port, host order; 0: similar to the inside port
	__u16 place;	     // in: position + 1 of the requested address in the pool; 0: any
};

_Static_assert(sizeof(struct bpf_fib_lookup) == 64, "work.fib");

#define QUOTE_FRAGMENT 1   // a first fragment, or an atomic IPv6 fragment
#define QUOTE_MORE 2	   // more fragments follow
#define QUOTE_OTHER_ICMP 2 // no_l4: ICMP message that is neither query, reply nor error

// The packet that an ICMP error quotes.
struct quote {
	union addr saddr;
	union addr daddr;
	__be16 sport;
	__be16 dport;
	__u16 at;    // offset of its IP header in the frame
	__u16 l4_at; // offset of its transport header
	__u8 l4_proto;
	__u8 tos;
	__u8 ttl;
	__u8 bad;	// the checksum of its IP header is wrong
	__be16 len;	// total or payload length in its header
	__u8 fragment;	// QUOTE_*
	__u8 no_l4;	// protocol without ports: only addresses change; or QUOTE_OTHER_ICMP
	__be32 frag_id; // IPv4: in the high half of the word
	__u16 end;	// end offset in the frame of the available quotation
	__u16 field;	// padded length before an extension (RFC 4884); 0: no extension
};
ASSERT_SIZE(struct quote, 56);

// Changes to the sequence numbers of a flow.
struct adjust {
	__u32 base;  // sequence number of the client's first byte
	__u32 flags; // ADJUST_*
	// For a flow opened by a cookie:
	__u32 cookie;  // initial sequence number that the client received
	__u32 ahead;   // offset from the backend's sequence numbers; valid with ADJUST_HEARD
	__be16 window; // window that the client offered
	__u16 mss;     // lower bound of the MSS that the client accepts
};
ASSERT_SIZE(struct adjust, 20);

#define ADJUST_SENT 0x01   // the PROXY header was sent to the backend
#define ADJUST_LOST 0x02   // the backend has not acknowledged it, so it is sent again
#define ADJUST_COOKIE 0x04 // a cookie opened the flow
#define ADJUST_HEARD 0x08  // the backend has answered the SYN

// A handshake that a cookie answers or proves.
struct cookie {
	__u64 ip[sizeof(struct ipv6hdr) / 8]; // an IPv4 or IPv6 header
	__u8 tcp[60];			      // TCP header and options of the packet
	__u32 mss;			      // valid cookie: lower bound of the MSS that the client accepts
};
ASSERT_SIZE(struct cookie, 104);

#define EXTENSION_MAX 2048 // extension of an ICMP error that changes its family, rounded up: 1280 bytes hold the error

// Predictions for the next packet from previous ones, for early reads of its memory.
struct guess {
	__u32 rule;  // NAT rule of the last binding
	__u32 opens; // the last packet without a hint had no flow
};

// The next hop of a recent route lookup for IPv4 (see recall_route).
struct recent_route {
	__be32 gateway;
	__u32 ifindex; // of arrival
	__u32 gen;     // generation of the lookup
	__u16 hop;     // index into hops
	__u8 tos;
	__u8 pad;
};
ASSERT_SIZE(struct recent_route, 16);

#define RECENT_ROUTE_BITS 6

// Working memory for one packet.
struct work {
	struct packet packet;
	struct plan plan;
	struct hop hop; // next hop of a plan with hop 0
	struct new_flow new_flow;
	struct closed closed;
	struct bind bound;
	struct bind source; // hairpin: binding of the sender
	struct port_request request;
	__u64 fib[8]; // struct bpf_fib_lookup
	struct client_key who;
	struct sticky_key sticky;
	struct tuple key;
	struct packet about; // reverse of the packet that an ICMP error quotes
	struct quote quote;
	union addr from;	       // translated source of an ICMP error
	__u8 extension[EXTENSION_MAX]; // buffer for the extension of an ICMP error
	struct cookie cookie;
	struct guess guess;
	struct recent_route recent_routes[1 << RECENT_ROUTE_BITS];
};

#endif
