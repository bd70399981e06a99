// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The state of a packet in the kernel: its namespace, its connection and the netfilter hook that holds it.
#ifndef SLUICE_PACKET_STATE_H
#define SLUICE_PACKET_STATE_H

#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "drops.h"
#include "kernel.h"

static __always_inline struct nf_conn *skb_conn(unsigned long nfct)
{
	return (struct nf_conn *)(nfct & ~NFCT_INFO_MASK);
}

static __always_inline enum drop_ct classify_ct(unsigned long nfct)
{
	struct nf_conn *ct = skb_conn(nfct);

	if (!ct)
		return nfct == NFCT_UNTRACKED ? DROP_CT_UNTRACKED : DROP_CT_NONE;
	if (BPF_CORE_READ(ct, status) & IPS_CONFIRMED)
		return DROP_CT_CONFIRMED;
	return DROP_CT_NEW;
}

/* Returns the netfilter hook of a packet, from its state: a received packet has
 * no route before the end of PREROUTING; ip_output() replaces its device by the
 * device of the route; a local route points to loopback. */
static __always_inline enum drop_hook classify_hook(struct sk_buff *skb, struct net_device *dev)
{
	struct dst_entry *dst = (struct dst_entry *)(skb->_skb_refdst & ~SKB_DST_FLAGS);
	struct net_device *out;

	if (!dst)
		return DROP_HOOK_PREROUTING;
	out = BPF_CORE_READ(dst, dev);
	if (!skb->skb_iif)
		return dev == out ? DROP_HOOK_POSTROUTING : DROP_HOOK_OUTPUT;
	if (dev != out)
		return BPF_CORE_READ(out, flags) & IFF_LOOPBACK ? DROP_HOOK_INPUT : DROP_HOOK_FORWARD;
	if (!dev || dev->ifindex != skb->skb_iif)
		return DROP_HOOK_POSTROUTING;
	return DROP_HOOK_HAIRPIN;
}

static __always_inline __u32 skb_netns(struct sk_buff *skb, struct net_device *dev, struct sock *rx_sk)
{
	struct dst_entry *dst;
	struct sock *sk;

	if (dev)
		return dev->nd_net.net->ns.inum;
	if (rx_sk)
		return rx_sk->__sk_common.skc_net.net->ns.inum;
	sk = skb->sk;
	if (sk)
		return sk->__sk_common.skc_net.net->ns.inum;
	dst = (struct dst_entry *)(skb->_skb_refdst & ~SKB_DST_FLAGS);
	return dst ? BPF_CORE_READ(dst, dev, nd_net.net, ns.inum) : 0;
}

/* Copies one direction of a conntrack entry. */
#define READ_TUPLE(to, ct, dir)                                                                       \
	do {                                                                                          \
		BPF_CORE_READ_INTO((union nf_inet_addr *)(to)->src, ct, tuplehash[dir].tuple.src.u3); \
		BPF_CORE_READ_INTO((union nf_inet_addr *)(to)->dst, ct, tuplehash[dir].tuple.dst.u3); \
		BPF_CORE_READ_INTO(&(to)->src_port, ct, tuplehash[dir].tuple.src.u.all);              \
		BPF_CORE_READ_INTO(&(to)->dst_port, ct, tuplehash[dir].tuple.dst.u.all);              \
		BPF_CORE_READ_INTO(&(to)->l4_proto, ct, tuplehash[dir].tuple.dst.protonum);           \
		(to)->family = (__u8)BPF_CORE_READ(ct, tuplehash[dir].tuple.src.l3num);               \
	} while (0)

#endif
