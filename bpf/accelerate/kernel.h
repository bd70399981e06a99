// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Structures and functions of the running kernel. The structures declare only the members that the
// programs read; the loader relocates them by the kernel's BTF.
#ifndef SLUICE_ACCELERATE_KERNEL_H
#define SLUICE_ACCELERATE_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "../kernel/conntrack.h"
#include "maps.h"

#define NFCT_INFO_MASK 7UL	    /* low bits of skb->_nfct: enum ip_conntrack_info */
#define IP_CT_ESTABLISHED 0	    /* a packet in the original direction */
#define IP_CT_ESTABLISHED_REPLY 3   /* a packet in the reply direction */
#define TCP_CONNTRACK_ESTABLISHED 3 /* enum tcp_conntrack */
#define IP_CT_TCP_FLAG_BE_LIBERAL 0x08
#define IP_CT_TCP_FLAG_MAXACK_SET 0x20
#define SKB_DST_FLAGS 1UL   /* SKB_DST_NOREF, low bit of skb->_skb_refdst */
#define DST_METRICS_FLAGS 3 /* low bits of dst_entry._metrics */
#define RTAX_LOCK 1	    /* linux/rtnetlink.h, counted from 1 */
#define RTAX_MTU 2
#define CHECKSUM_UNNECESSARY 1
#define CHECKSUM_PARTIAL 3
#define AF_INET 2
#define AF_INET6 10

/* enum ip_conntrack_status */
#define IPS_SEEN_REPLY (1 << 1)
#define IPS_ASSURED (1 << 2)
#define IPS_CONFIRMED (1 << 3)
#define IPS_SRC_NAT (1 << 4)
#define IPS_DST_NAT (1 << 5)
#define IPS_SEQ_ADJUST (1 << 6)
#define IPS_DYING (1 << 9)
#define IPS_FIXED_TIMEOUT (1 << 10)
#define IPS_NAT_CLASH (1 << 12)
#define IPS_HELPER (1 << 13)
#define IPS_OFFLOAD (1 << 14)
#define IPS_HW_OFFLOAD (1 << 15)

/* A connection with one of these is never accelerated. */
#define IPS_EXCLUDED (IPS_SEQ_ADJUST | IPS_FIXED_TIMEOUT | IPS_NAT_CLASH | IPS_HELPER | IPS_OFFLOAD | IPS_HW_OFFLOAD)

struct ipv6_devconf {
	__s32 mtu6;
} CO_RE;

struct inet6_dev {
	struct ipv6_devconf cnf;
} CO_RE;

struct net_device {
	unsigned int mtu;
	struct inet6_dev *ip6_ptr;
} CO_RE;

struct dst_entry {
	struct net_device *dev;
	unsigned long _metrics;
} CO_RE;

struct sk_buff {
	unsigned long _skb_refdst;
	unsigned long _nfct;
	__u8 ip_summed : 2;
} CO_RE;

struct ip_ct_tcp_state {
	__u32 td_maxack;
	__u8 flags;
} CO_RE;

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state;
} CO_RE;

struct nf_conn {
	__u32 timeout; /* in jiffies */
	struct nf_conntrack_zone zone;
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
	__u32 mark;
	struct nf_ct_ext *ext;
	union {
		struct ip_ct_tcp tcp;
	} proto;
} CO_RE;

enum nf_ct_ext_id {
	NF_CT_EXT_HELPER,
	NF_CT_EXT_SEQADJ,
	NF_CT_EXT_TIMEOUT,
	NF_CT_EXT_SYNPROXY,
};

/* Reads an address of a tuple. The words behind an IPv4 address are zero. */
#define read_address(to, from)            \
	do {                              \
		(to)[0] = (from)->all[0]; \
		(to)[1] = (from)->all[1]; \
		(to)[2] = (from)->all[2]; \
		(to)[3] = (from)->all[3]; \
	} while (0)

static __always_inline __u32 mark_of(struct nf_conn *ct)
{
	return bpf_core_field_exists(ct->mark) ? ct->mark : 0;
}

/* Reports whether the window checks of both directions are liberal. */
static __always_inline bool is_liberal(struct nf_conn *ct)
{
	return ct->proto.tcp.seen[0].flags & ct->proto.tcp.seen[1].flags & IP_CT_TCP_FLAG_BE_LIBERAL;
}

/* Reports whether the entry of a connection ends before a time in ms. */
static __always_inline bool ends_before(struct nf_conn *ct, __u64 time)
{
	return (__s64)(__s32)(ct->timeout - (__u32)bpf_jiffies64()) * 1000 < (__s64)(time * hz);
}

extern struct nf_conn *bpf_xdp_ct_lookup(struct xdp_md *ctx, struct bpf_sock_tuple *tuple, __u32 size,
					 struct bpf_ct_opts___short *opts, __u32 opts_size) __ksym;
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple, __u32 size,
					 struct bpf_ct_opts___short *opts, __u32 opts_size) __ksym;
extern void bpf_ct_release(struct nf_conn *ct) __ksym;
extern int bpf_ct_change_timeout(struct nf_conn *ct, __u32 milliseconds) __ksym;
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym;
extern void *bpf_rdonly_cast(const void *address, __u32 type_id) __ksym;

#endif
