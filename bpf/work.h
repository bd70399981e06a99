// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The working memory of one packet: what was parsed, what is to be done, and what
// the steps in between hand on. Only `guess` persists across packets.
#ifndef SLUICE_WORK_H
#define SLUICE_WORK_H

#include "message.h"

// packet.flags
#define PACKET_LATER_FRAGMENT 0x01
#define PACKET_FIRST_FRAGMENT 0x02 // more fragments follow
#define PACKET_ERROR 0x04	   // ICMP error
#define PACKET_DF 0x08
#define PACKET_EXTENDED 0x10 // IPv6 extension headers
#define PACKET_QUERY 0x20    // ICMP echo request
#define PACKET_MORE 0x80     // fragment that is not the last one
#define PACKET_NO_FLOW 0x40  // protocol whose ports cannot be changed, or ICMP that is neither query, reply nor error

// interface_addr.flags
enum interface_flag {
	INTERFACE_XDP = 0x01, // frames that XDP hands to it arrive
};

// What is known of an interface: sources of the errors sent there, and what the
// routing table does not tell while a neighbour is unknown. Written by user space.
struct interface_addr {
	union addr v4;
	union addr v6;
	__u8 mac[ETH_ALEN];
	__u16 pad;
	__u32 mtu;
	__u32 flags;
	__u64 lists; // bit n: it is one of the list of interfaces with that number
};
ASSERT_SIZE(struct interface_addr, 56);

// A parsed packet.
struct packet {
	struct tuple tuple;
	__u32 l3_len;  // bytes from the network header on
	__u32 ifindex; // where it came in
	// where its untranslated destination, or the server of a port-forward, is routed; 0 if not known,
	// NO_ENTRY if nowhere, as what is for this host
	__u32 out;
	__u32 cross_out; // where the packet is routed once it has changed its family; 0 and NO_ENTRY as in out
	__be32 frag_id;
	__u32 segment;	// largest network packet it will be on the wire (GSO), else l3_len
	__u16 l4_off;	// from the start of the frame
	__u16 frag_off; // bytes
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
	__u16 source_route; // where a routing header with segments left says so, from the network header; else 0
	__u16 fragment_at;  // IPv6 fragment header, from the network header; 0: there is none
	__u8 fragment_next; // what it says that follows
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
	OWNER_SOURCE, // a NAT rule that translates sources
	OWNER_NONE,
	OWNER_STATELESS, // a NAT rule without flows
};

// plan.flags
enum plan_flag {
	PLAN_ROUTED = 0x01,   // hop is valid
	PLAN_SAME = 0x02,     // the packet goes on unchanged
	PLAN_NO_L4 = 0x04,    // no transport header to touch (later fragment, other protocol)
	PLAN_ADMITTED = 0x08, // its SYN was admitted, without a flow: no limit refuses the rest of the handshake
	PLAN_EXISTING = 0x10, // a flow was there before
	PLAN_KERNEL = 0x20,   // rewritten, then left to the kernel to send
	PLAN_ERROR = 0x40,    // an ICMP error: what is quoted in it is rewritten too
	PLAN_REPLY = 0x80,    // of a backend, without a flow
};
// A reply to this host, which has asked the backend (a health check): left as it is.
#define PLAN_HERE (PLAN_REPLY | PLAN_SAME)

// plan.edits: changes to a TCP header beyond its ports.
#define EDIT_MSS 0x01	  // of a SYN: lower the MSS option to what the next link carries
#define EDIT_TOA 0x02	  // add the option that names the client
#define EDIT_PROXY 0x04	  // from the client: put the PROXY header in front of the first byte, count it
#define EDIT_ANSWER 0x08  // to the client: do not count the PROXY header
#define EDIT_ROOM 0x10	  // SYN to the client: leave room for what its segments will grow by
#define EDIT_SPLICE 0x20  // from the client of a cookie: the SYN until the backend has answered, then its numbers
#define EDIT_SPLICED 0x40 // to that client

// What is to be done with a packet: all that "apply" looks at.
struct plan {
	struct tuple to;    // source and destination as they become
	union addr gateway; // what is looked up in the routing table
	__u32 entry;	    // own flow table entry (to cache the hop), or NO_ENTRY
	__u32 backend_hop;  // backend whose hop cache is used, or NO_ENTRY
	__u32 hop_gen;	    // hop may be used in this generation
	__u32 mtu;	    // of the next hop, for an error that tells it
	__u16 owner;	    // service or NAT rule
	__u16 backend;
	__u16 hop;
	__be16 encap_port;
	__u8 action;
	__u8 reason;
	__u8 family; // of the packet that leaves
	__u8 gateway_family;
	__u8 encap;
	__u8 answer;
	__u8 flags;
	__u8 owner_nat; // enum plan_owner: what owner is
	__s32 verdict;	// of the hook
	__u32 edits;	// EDIT_*
	__u32 record;	// key in adjusts, of EDIT_PROXY, EDIT_ANSWER and EDIT_SPLICE*; of ANSWER_COOKIE the cookie
	__u32 asked;	// generation in which work.fib was the answer for the packet's own destination; 0: it is not
	// Of a siit rule:
	__be32 pool;   // first source of errors from routers without an IPv4 address
	__u8 pool_len; // 0: there is none
	__u8 choices;  // CHOICE_*
	__u8 tos;      // of CHOICE_CLASS
	__u8 pad;
};
ASSERT_SIZE(struct plan, 112);

// What a new flow is to be.
struct new_flow {
	struct tuple key;  // of the opening packet
	struct tuple to;   // what it becomes
	struct tuple back; // of the answer: to, turned round
	struct tuple from; // what the answer becomes: key, turned round
	__u32 now;
	__u32 ref; // binding of ENTRY_BOUND; NO_ENTRY: the flow is to hold it
	__u16 owner;
	__u16 backend;
	__u8 family;	// of key
	__u8 to_family; // of to
	__u8 flags;
	__u8 heard;
	__u8 one_way;	  // dsr, tunnel: answers do not come back this way
	__u8 edited;	  // HEARD_EDITED of the opener
	__u8 back_edited; // of the answers
	__u8 pad;
	__u32 bytes; // of the opening packet
	__u32 index; // out: entry of key's direction
};

// A flow of a service that the SYN of the packet has ended. Its entries, their slots in the index and
// its port belong to this CPU until the packet is decided: the connection that the SYN opens takes
// them over where it gets the same keys and rewrites, else they are given up. The primary entry is
// dead, as of now; the reply entry still is live.
struct vacated {
	__u32 index; // primary entry, in the packet's family; NO_ENTRY: none
	__u32 twin;  // reply entry; NO_ENTRY: of one direction
	__u32 port;  // map << 16 | port; 0: none, or taken over
	__u16 owner;
	__u16 backend;
	__u32 twin_family;
};
ASSERT_SIZE(struct vacated, 20);

// What port is wanted, and which came out. Host order.
struct port_request {
	__u32 map;   // element of port_maps
	__u16 want;  // its parity and range are kept when possible
	__u16 first; // inclusive
	__u16 last;
	__u16 port;  // out
	__u16 whole; // no privileged range: ICMP identifiers
	__u16 exact; // try want itself before others
	// Of the search, which has little stack.
	__u32 odd;  // parity that is searched
	__u32 from; // half-ports, inclusive
	__u32 to;
	__u32 pool; // where the pool begins in runs
	__u32 pool_len;
	__u32 owned; // the client's pool address, number + 1; 0: none yet
};

// What a binding is asked for, and what it is.
struct bind {
	struct tuple inside; // in: saddr, sport, l4_proto
	union addr outside;  // out
	__be16 port;	     // out
	__u8 family;	     // in: of inside
	__u8 outside_family; // in
	__u32 rule;	     // in
	__u32 index;	     // out: entry of the binding, in the family of inside; NO_ENTRY: none yet
	__u32 now;	     // in
	__u32 slot;	     // out: key of the port in port_owners
	__u8 client_seen;    // the client's quota has been charged
	__u8 alone;	     // in: the caller makes a flow that can hold a new binding
	__u8 exact;	     // in: nothing but what is wanted will do
	__u8 charged;	     // in: the client's rate of new connections is not asked (again)
	__u16 want;	     // in: outside port that is wanted, host order; 0: the inside one's like
	__u16 place;	     // in: pool address that is wanted, its place in the pool + 1; 0: any
};

_Static_assert(sizeof(struct bpf_fib_lookup) == 64, "work.fib");

#define QUOTE_FRAGMENT 1   // a first fragment, or an atomic one of IPv6
#define QUOTE_MORE 2	   // more follow
#define QUOTE_OTHER_ICMP 2 // no_l4 of an ICMP message of its IP version that is neither query, reply nor error

// The packet that an ICMP error quotes.
struct quote {
	union addr saddr;
	union addr daddr;
	__be16 sport;
	__be16 dport;
	__u16 at;    // of its IP header in the frame
	__u16 l4_at; // of its transport header
	__u8 l4_proto;
	__u8 tos;
	__u8 ttl;
	__u8 bad;	// its IP header's checksum is wrong
	__be16 len;	// of the header: total or payload length
	__u8 fragment;	// QUOTE_*
	__u8 no_l4;	// a protocol without ports: only addresses change; or QUOTE_OTHER_ICMP
	__be32 frag_id; // of IPv4 in the high half of the word
	__u16 end;	// of the quotation in the frame, as far as it is there
	__u16 field;	// bytes that stand for it before an extension (RFC 4884); 0: there is none
};
ASSERT_SIZE(struct quote, 56);

// What a flow's sequence numbers are changed by.
struct adjust {
	__u32 base;  // the client's first byte
	__u32 flags; // ADJUST_*
	// Of a flow that a cookie opened:
	__u32 cookie;  // initial sequence number that the client knows
	__u32 ahead;   // of the backend's own by so much; from ADJUST_HEARD on
	__be16 window; // that the client offered
	__u16 mss;     // that the client can take at least
};
ASSERT_SIZE(struct adjust, 20);

#define ADJUST_SENT 0x01   // the PROXY header has gone to the backend
#define ADJUST_LOST 0x02   // the backend still waits for it
#define ADJUST_COOKIE 0x04 // a cookie opened the flow
#define ADJUST_HEARD 0x08  // the backend has answered the SYN

// A handshake that is answered, or checked, by a cookie.
struct cookie {
	__u64 ip[sizeof(struct ipv6hdr) / 8]; // an IPv4 or IPv6 header
	__u8 tcp[60];			      // header and options, as they came
	__u32 mss;			      // of a valid one: what the client can take at least
};
ASSERT_SIZE(struct cookie, 104);

#define EXTENSION_MAX 2048 // of an ICMP error that changes its family, rounded up: 1280 bytes hold the error

// What the next packet may be like, by those before it: what it needs is read early.
struct guess {
	__u32 rule;  // NAT rule that bound last
	__u32 opens; // the last packet that no hint knew had no flow
};

// Working memory for one packet.
struct work {
	struct packet packet;
	struct plan plan;
	struct hop hop; // of a plan whose hop is 0
	struct new_flow new_flow;
	struct vacated vacated;
	struct bind bound;
	struct bind source; // hairpin: of the sender
	struct port_request request;
	__u64 fib[8]; // struct bpf_fib_lookup
	struct client_key who;
	struct sticky_key sticky;
	struct tuple key;
	struct packet about; // what an ICMP error is about, turned round
	struct quote quote;
	union addr from;	       // source that an ICMP error goes on with
	__u8 extension[EXTENSION_MAX]; // of an ICMP error, while it is moved
	struct cookie cookie;
	struct guess guess;
};

#endif
