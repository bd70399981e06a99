// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Headers of packets at the interfaces of the host, shared with user space.
#ifndef SLUICE_OBSERVE_H
#define SLUICE_OBSERVE_H

#include <linux/types.h>

#include "drops.h"

#define OBSERVED_BYTES 112

/* The point in the kernel where a packet was observed. */
enum packet_point {
	PACKET_RECEIVED,
	PACKET_TRANSMITTED,
	PACKET_DROPPED,
};

/* What the programs count, each on its CPU. */
enum packet_counter {
	PACKETS_SENT,	     /* events written to the ring buffer */
	PACKETS_OVER_RATE,   /* not sent: the openings and errors of a CPU exceeded their rate */
	PACKETS_RING_FULL,   /* not sent: user space did not read the ring in time */
	SAMPLES_OVER_RATE,   /* not sent: the other packets of a CPU exceeded their rate */
	SAMPLES_TABLE_FULL,  /* not sent: no free slot in seen_packets */
	PACKETS_UNREADABLE, /* headers outside the linear part of the packet */
	PACKET_COUNTERS,
};

struct packet_event {
	__u64 time_ns;	/* CLOCK_MONOTONIC */
	__u64 skb;	/* address of the sk_buff; reused after milliseconds */
	__u64 ct;	/* address of the conntrack entry, 0 none */
	__u64 location; /* of a drop: return address in the function that dropped the packet */
	struct drop_tuple orig;	 /* conntrack tuple before NAT, valid with ct */
	struct drop_tuple reply; /* of the reply direction, after NAT */
	__u32 netns;
	__u32 ifindex;
	__u32 iif;    /* transmitted, dropped: interface of arrival, 0 local */
	__u32 reason; /* of a drop: enum skb_drop_reason of the running kernel */
	__u32 l3_len; /* of the packet, of all segments of a GSO packet */
	__u32 ct_status;
	__u16 gso_size; /* 0: not a GSO packet */
	__u16 data_len;
	__be16 eth_type;
	__u8 point;   /* enum packet_point */
	__u8 ct_info; /* enum ip_conntrack_info */
	__u8 hook;    /* of a netfilter drop: enum drop_hook */
	__u8 ct_state; /* enum drop_ct */
	__u8 has_macs;
	__u8 pad;
	__u8 macs[12]; /* destination, source */
	char ifname[IFNAMSIZ];
	__u8 data[OBSERVED_BYTES]; /* bytes from the network header onwards */
};

#endif
