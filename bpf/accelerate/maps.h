// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The learned flows, the flows that are about to be learned, and the state that user space sets.
#ifndef SLUICE_ACCELERATE_MAPS_H
#define SLUICE_ACCELERATE_MAPS_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#define SECOND 1000000000ULL /* in ns */

enum limit {
	LEARN_AFTER = 16,	  /* packets of an established flow in one direction */
	HEARTBEAT_SECONDS = 5,	  /* after which the programs leave all packets to the kernel */
	RELEARN_SECONDS = 30,	  /* after which one packet takes the slow path */
	RENEW_SECONDS = 1,	  /* between two renewals of a conntrack entry */
	SETTLE_MILLISECONDS = 20, /* after a change; older packets may have passed the old rules */
	EXCLUSIONS = 64,	  /* rules that exclude some flows */
};

/* One direction of a connection, as its packets arrive. An IPv4 address is the first word. */
struct flow_key {
	__be32 saddr[4], daddr[4];
	__be16 sport, dport;
	__u16 l4_proto;
	__u16 family; /* AF_INET or AF_INET6 */
};

struct flow_entry {
	__u32 epoch;		   /* valid while it equals the current one */
	__u32 in;		   /* input interface; 0 until a packet has shown the port of the bridge */
	__u32 out;		   /* output interface */
	__u32 l3;		   /* routed input interface: "in", or its bridge */
	__be32 saddr[4], daddr[4]; /* after the translation */
	__be16 sport, dport;
	__u32 addr_delta; /* change of the sum of both addresses, see fold; 0 if both stay the same */
	__u32 port_delta;
	__u8 in_mac[6]; /* of the routed input interface */
	__u16 mtu;
	__u8 macs[12];		/* destination and source of the sent frame */
	__u32 lifetime;		/* of the conntrack entry after a packet, in ms */
	__u32 xdp;		/* the output interface accepts frames of XDP */
	__u32 mark;		/* of the conntrack entry */
	__u32 dscp;		/* routing rules may depend on it, so packets with another one take the slow path */
	__u64 learned, renewed; /* times in ns since boot, without suspension */
	__u64 packets, bytes;	/* that took the fast path */
};

/* Why a translated flow takes the slow path. */
enum slow {
	SLOW_YOUNG,	/* it has sent fewer than LEARN_AFTER packets, or awaits its liberal window checks */
	SLOW_HELPER,	/* a helper, sequence adjustment or SYN proxy reads or changes its packets */
	SLOW_ZONE,	/* it is in a conntrack zone */
	SLOW_OFFLOADED, /* a flowtable forwards it */
	SLOW_FIXED,	/* its timeout is fixed, or two connections share its tuple */
	SLOW_INTERFACE, /* an interface of its path is not accelerated */
	SLOW_FRAME,	/* its frames have a VLAN tag, IP options or fragments, or differ from the conntrack entry */
	SLOW_HAIRPIN,	/* it leaves by the interface of its arrival */
	SLOW_ROUTE,	/* its route is unknown at the output */
	SLOW_FULL,	/* the table of learned flows is full */
	SLOW_POLICY,	/* a conntrack timeout policy applies to its TCP connection */
	SLOW_RULE,	/* it may traverse a rule that depends on single packets */
};

struct candidate {
	__u32 count; /* packets seen */
	__u32 out;
	__u32 reason; /* enum slow */
	__u32 rule;   /* of SLOW_RULE: "id" of its exclusion */
};

/* Conditions of a rule that depends on single packets. A flow whose packets may fulfil them is not
 * learned. Zeros are no condition. */
struct exclusion {
	__be32 saddr[4], smask[4], daddr[4], dmask[4];
	__u16 sport[2], dport[2]; /* first and last, in host byte order */
	__u16 l4_proto, family;
	__u32 in, out; /* routed interfaces */
	__u32 id;
};

/* A port is an interface of the accelerated set, or a bridge above such interfaces. */
struct port {
	__u32 l3;    /* the interface itself, or its bridge */
	__u32 flags; /* enum port_flag */
	__u8 mac[6]; /* of the routed interface */
	__u16 mtu;
};

enum port_flag {
	PORT_BRIDGE = 1,
	PORT_TAKES_XDP = 2, /* accepts frames that XDP redirects */
};

enum counter {
	COUNT_XDP,     /* packets forwarded in XDP */
	COUNT_TC,      /* packets forwarded in TC */
	COUNT_BYTES,   /* their bytes */
	COUNT_LEARNED, /* entries made */
	COUNT_ENDED,   /* entries removed by FIN, RST, SYN or the end of the conntrack entry */
	COUNTERS,
};

/* The egress program inserts; the fast path and the sweeper remove. The size is set at load time. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__type(key, struct flow_key);
	__type(value, struct flow_entry);
} flows SEC(".maps");

/* The egress program inserts; the kernel evicts the least recently used. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct candidate);
} candidates SEC(".maps");

/* User space writes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct port);
} ports SEC(".maps");

/* User space writes while nothing is accelerated. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, EXCLUSIONS);
	__type(key, __u32);
	__type(value, struct exclusion);
} exclusions SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* Original tuples of TCP connections for which user space sets liberal window checks. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} requests SEC(".maps");

/* Written by user space while the programs run. */
volatile __u32 epoch;	     /* 0: nothing is accelerated */
volatile __u64 changed;	     /* time of the last change of the epoch, in ns */
volatile __u64 heartbeat;    /* time of the last sign of life, in ns */
volatile __u32 without_ipv6; /* a rule depends on single packets of IPv6 */
volatile __u32 exclusions_used;
volatile __u32 tcp_lifetime; /* of established TCP connections, in ms */

/* Set before the programs are loaded. */
const volatile __u32 hz = 250; /* jiffies per second */

/* Types that user space reads. */
const enum slow *export_slow __attribute__((unused));
const enum port_flag *export_port_flag __attribute__((unused));
const enum counter *export_counter __attribute__((unused));
const enum limit *export_limit __attribute__((unused));

/* Reports whether more than a time has passed. The coarse clock of the programs may be behind the
 * times that user space and other CPUs have written. */
static __always_inline bool elapsed(__u64 now, __u64 since, __u64 time)
{
	return (__s64)(now - since) > (__s64)time;
}

static __always_inline void count(__u32 what, __u64 n)
{
	__u64 *at = bpf_map_lookup_elem(&counters, &what);

	if (at)
		*at += n;
}

#endif
