// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Structures of the running kernel. They declare only the members that the programs read; the
// loader relocates them by the kernel's BTF.
#ifndef SLUICE_KERNEL_H
#define SLUICE_KERNEL_H

#include <linux/types.h>

#include "../kernel/conntrack.h"
#include "../kernel/net.h"

#define IFNAMSIZ 16
#define IFF_LOOPBACK 0x8
#define IPS_CONFIRMED 0x8	/* linux/netfilter/nf_conntrack_common.h */
#define NFCT_INFO_MASK 7UL	/* low bits of skb->_nfct: enum ip_conntrack_info */
#define NFCT_UNTRACKED 7UL	/* IP_CT_UNTRACKED */
#define SKB_DST_FLAGS 1UL	/* SKB_DST_NOREF, low bit of skb->_skb_refdst */
#define MAC_HEADER_UNSET 0xffff /* skb_mac_header_was_set() */

struct net_device {
	possible_net_t nd_net;
	int ifindex;
	unsigned int flags;
	unsigned short type; /* ARPHRD_* */
	char name[IFNAMSIZ];
} CO_RE;

struct sock_common {
	__be16 skc_dport;
	__u16 skc_num;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
} CO_RE;

struct sock {
	struct sock_common __sk_common;
	__u8 sk_userlocks;
} CO_RE;

struct udp_sock; /* begins with its struct sock */
struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} CO_RE;

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
} CO_RE;

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
} CO_RE;

struct dst_entry {
	struct net_device *dev;
} CO_RE;

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned long _skb_refdst;
	unsigned long _nfct;
	unsigned int len;
	int skb_iif;
	__u32 mark;
	__be16 protocol;
	__u16 network_header;
	__u16 mac_header;
	unsigned int tail;
	unsigned int end;
	unsigned char *head;
	unsigned char *data;
} CO_RE;

struct skb_shared_info { /* at head + end */
	unsigned short gso_size;
	unsigned short gso_segs;
} CO_RE;

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
} CO_RE;

#endif
