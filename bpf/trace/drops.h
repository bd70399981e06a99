// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Counters and samples of dropped packets, shared with user space.
#ifndef SLUICE_DROPS_H
#define SLUICE_DROPS_H

#include <linux/types.h>

#include "kernel.h"

#define SNAP_BYTES 256
#define STACK_FRAMES 24

/* Where in the network stack a netfilter drop happened. */
enum drop_hook {
	DROP_HOOK_NONE,	      /* not a netfilter drop */
	DROP_HOOK_PREROUTING, /* before the route is known: ingress, raw, conntrack, DNAT */
	DROP_HOOK_INPUT,
	DROP_HOOK_FORWARD,
	DROP_HOOK_OUTPUT,
	DROP_HOOK_POSTROUTING, /* SNAT and the confirmation of new flows */
	DROP_HOOK_HAIRPIN,     /* same device in and out: forward or postrouting */
};

/* Connection tracking state of the packet. */
enum drop_ct {
	DROP_CT_NONE,
	DROP_CT_UNTRACKED,
	DROP_CT_NEW,	   /* the connection is not yet in the conntrack table */
	DROP_CT_CONFIRMED, /* the connection is in the conntrack table */
};

struct drop_key {
	__u64 location; /* return address in the function that dropped the packet */
	__u32 netns;	/* inode of the network namespace, 0 unknown */
	__u32 reason;	/* enum skb_drop_reason of the running kernel */
	__u32 ifindex;	/* skb->dev at the time of the drop, 0 none */
	__be16 eth_type;
	__u8 hook; /* enum drop_hook */
	__u8 ct;   /* enum drop_ct */
};

struct drop_count {
	__u64 packets;
	__u64 bytes;
	__u64 next_ns; /* token bucket: time of the next sample (CLOCK_MONOTONIC) */
};

struct drop_tuple {
	__u8 src[16]; /* IPv4 in the first four bytes */
	__u8 dst[16];
	__be16 src_port; /* TCP, UDP, SCTP port or ICMP id */
	__be16 dst_port;
	__u8 l4_proto;
	__u8 family; /* AF_INET 2, AF_INET6 10 */
	__u8 pad[2];
};

struct drop_sample {
	struct drop_key key;
	__u64 time_ns;	 /* CLOCK_MONOTONIC */
	__u32 len;	 /* skb->len */
	__u32 frame_len; /* length of the packet from the start of data[] */
	__u32 mark;
	__u32 in_ifindex;	 /* skb->skb_iif: interface of arrival, 0 local */
	__u32 ct_status;	 /* IPS_* bits, valid when key.ct is new or confirmed */
	struct drop_tuple orig;	 /* conntrack tuple before NAT */
	struct drop_tuple reply; /* reply direction, after NAT */
	char ifname[IFNAMSIZ];
	__u16 data_len;	 /* number of valid bytes in data[] */
	__u16 l3_offset; /* offset of the network header in data[] */
	__u32 stack_bytes;
	__u64 stack[STACK_FRAMES];
	__u8 data[SNAP_BYTES];
};

#endif
