// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* These programs copy packet headers to user space at three points: where packets
 * enter the host, leave it, or are dropped. User space computes from these events
 * which connections fail, and at which point.
 *
 * Every SYN, RST and ICMP error causes an event. For other packets, only the first
 * one of each flow, point and size class causes an event in each epoch, and for DNS
 * the first one of each transaction. User space begins a new epoch several times a
 * second. A segment that repeats in several epochs is a retransmission.
 *
 * The ring buffer is polled: a wake-up of user space for each event would cost more
 * than the programs themselves.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "drops.h"
#include "kernel.h"
#include "observe.h"
#include "packet_state.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define ARPHRD_ETHER 1
#define ETH_P_IP 0x0800
#define ETH_P_ARP 0x0806
#define ETH_P_8021Q 0x8100
#define ETH_P_IPV6 0x86dd
#define ETH_HLEN 14
#define VLAN_HLEN 4
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ICMPV6 58
#define IPPROTO_SCTP 132
#define IPPROTO_UDPLITE 136
#define IP_OFFSET 0x1fff /* mask of the fragment offset in its field */
#define DNS_PORT 53
#define TCP_HLEN 20
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define L4_BYTES 24    /* of the transport header: up to the target of a neighbour solicitation */
#define LARGE_BYTES 1000 /* packets from this length on are a size class of their own */
#define BURST_NS 1000000000ULL

const struct packet_event *_export_event __attribute__((unused));
const enum packet_point *_export_point __attribute__((unused));
const enum packet_counter *_export_counter __attribute__((unused));

/* Set before load. The verifier removes the code of disabled options. */
const volatile bool have_rx_sk;	      /* kfree_skb has a fourth argument (6.11) */
const volatile bool have_conntrack;   /* the kernel has the types of connection tracking */
const volatile __u32 netfilter_drop;  /* SKB_DROP_REASON_NETFILTER_DROP of this kernel */
const volatile __u32 only_netns;      /* 0: all */
const volatile __u32 interval_ns[2];  /* time of one token, of openings and errors and of other packets */

/* Incremented by user space. */
volatile __u32 epoch = 1;

/* User space reads the events every 50 ms; 4 MiB hold 14,000. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} packet_events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PACKET_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} packet_counters SEC(".maps");

/* When the next event of each kind may be sent: openings and errors, and other packets. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} next_event SEC(".maps");

#define WAYS 4
#define SETS 16384

/* A slot holds the upper half of a packet's hash and the epoch in which it was sent. A slot of
 * an older epoch is free. No slot is evicted: packets without a slot are counted. */
struct seen_set {
	__u64 slot[WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SETS);
	__type(key, __u32);
	__type(value, struct seen_set);
} seen_packets SEC(".maps");

struct header {
	__u8 l3[40] __attribute__((aligned(8)));
	__u8 l4[L4_BYTES];
	__be16 eth_type;
	__u8 l4_proto;
	bool later; /* a fragment without a transport header */
};

static __always_inline void count(__u32 which)
{
	__u64 *n = bpf_map_lookup_elem(&packet_counters, &which);

	if (n)
		*n += 1;
}

static __always_inline bool take_token(__u32 kind, __u64 *now)
{
	__u64 *next = bpf_map_lookup_elem(&next_event, &kind);
	__u64 earliest;

	if (!next)
		return false;
	*now = bpf_ktime_get_ns();
	if (*next > *now) {
		count(kind ? SAMPLES_OVER_RATE : PACKETS_OVER_RATE);
		return false;
	}
	earliest = *now > BURST_NS ? *now - BURST_NS : 0;
	if (*next < earliest)
		*next = earliest;
	*next += interval_ns[kind & 1];
	return true;
}

static __always_inline void mix(__u64 *h, __u64 word)
{
	*h = (*h ^ word) * 0x9e3779b97f4a7c15ULL;
	*h ^= *h >> 29;
}

/* Resolvers send several queries from one socket. */
static __always_inline bool is_dns(const struct header *p)
{
	const __be16 *ports = (const __be16 *)p->l4;

	return p->l4_proto == IPPROTO_UDP && (ports[0] == bpf_htons(DNS_PORT) || ports[1] == bpf_htons(DNS_PORT));
}

/* Identifies the flow of a packet in one direction, its size class and where it was seen. The hop
 * limit tells the rounds of a packet in a loop apart. */
static __always_inline __u64 packet_hash(const struct header *p, __u32 where, bool large)
{
	const __u32 *halves = (const __u32 *)p->l3; /* the stack allows aligned reads only */
	const __u64 *words = (const __u64 *)p->l3;
	__u64 h = (__u64)where << 32 | (__u64)large << 24 | (__u64)p->l4_proto << 16 | p->eth_type;

	mix(&h, 0);
	if (p->eth_type == bpf_htons(ETH_P_IPV6)) {
		mix(&h, words[1]);
		mix(&h, words[2]);
		mix(&h, words[3]);
		mix(&h, words[4]);
		mix(&h, p->l3[7]);
	} else if (p->eth_type == bpf_htons(ETH_P_IP)) {
		mix(&h, (__u64)halves[3] << 32 | halves[4]);
		mix(&h, p->l3[8]);
	} else { /* ARP: operation, addresses of sender and target */
		mix(&h, (__u64)halves[4] << 32 | halves[6]);
		mix(&h, halves[3]);
		mix(&h, p->l3[7]);
	}
	if (p->l4_proto == IPPROTO_ICMPV6) {
		mix(&h, *(const __u64 *)p->l4 & bpf_cpu_to_be64(0xffff0000ffffffffULL));
		mix(&h, *(const __u64 *)(p->l4 + 16));
	} else if (p->l4_proto == IPPROTO_ICMP) { /* type, code and identifier */
		mix(&h, *(const __u64 *)p->l4 & bpf_cpu_to_be64(0xffff0000ffff0000ULL));
	} else {
		mix(&h, *(const __u32 *)p->l4);
		if (is_dns(p)) /* hashes the DNS transaction id, too */
			mix(&h, *(const __u16 *)(p->l4 + 8));
	}
	return h;
}

static __always_inline bool first_in_epoch(__u64 h, __u64 *now)
{
	__u32 set = (__u32)h & (SETS - 1), current = epoch, i;
	__u64 mine = (h & 0xffffffff00000000ULL) | current;
	struct seen_set *s = bpf_map_lookup_elem(&seen_packets, &set);
	__u64 *slot = (void *)0;

	if (!s)
		return false;
	for (i = 0; i < WAYS; i++) {
		if (s->slot[i] == mine)
			return false;
		if ((__u32)s->slot[i] != current)
			slot = &s->slot[i];
	}
	if (!slot) {
		count(SAMPLES_TABLE_FULL);
		return false;
	}
	if (!take_token(1, now)) /* first, so that a flow without a token is not taken for sent */
		return false;
	*slot = mine;
	return true;
}

/* Reads the headers from layer 3, which begins at offset l3 of skb->head. */
static __always_inline bool read_header(struct sk_buff *skb, __u32 l3, struct header *p)
{
	__u32 tail = skb->tail, l4 = l3 + 40;
	unsigned char *head = skb->head;

	__builtin_memset(p->l4, 0, sizeof(p->l4));
	p->l4_proto = 0;
	p->later = false;
	if (p->eth_type == bpf_htons(ETH_P_ARP))
		return l3 + 28 <= tail && !bpf_probe_read_kernel(p->l3, 28, head + l3);
	if (p->eth_type == bpf_htons(ETH_P_IP)) {
		if (l3 + 20 > tail || bpf_probe_read_kernel(p->l3, 20, head + l3))
			return false;
		p->l4_proto = p->l3[9];
		p->later = ((p->l3[6] << 8 | p->l3[7]) & IP_OFFSET) != 0;
		l4 = l3 + (p->l3[0] & 0xf) * 4;
	} else {
		if (l3 + 40 > tail || bpf_probe_read_kernel(p->l3, 40, head + l3))
			return false;
		p->l4_proto = p->l3[6];
	}
	if (p->later)
		return true;
	if (l4 + L4_BYTES <= tail)
		return !bpf_probe_read_kernel(p->l4, L4_BYTES, head + l4);
	if (l4 + TCP_HLEN <= tail) /* a reset has no options */
		return !bpf_probe_read_kernel(p->l4, TCP_HLEN, head + l4);
	if (l4 + 8 <= tail) /* UDP without data, a short ICMP message */
		return !bpf_probe_read_kernel(p->l4, 8, head + l4);
	return p->l4_proto != IPPROTO_TCP && p->l4_proto != IPPROTO_UDP;
}

/* Openings and errors, each of which is sent. */
static __always_inline bool opens_or_fails(const struct header *p)
{
	if (p->later)
		return false;
	if (p->l4_proto == IPPROTO_TCP)
		return p->l4[13] & (TCP_SYN | TCP_RST);
	if (p->l4_proto == IPPROTO_ICMP)
		return p->l4[0] == 3 || p->l4[0] == 5 || p->l4[0] == 11 || p->l4[0] == 12;
	return p->l4_proto == IPPROTO_ICMPV6 && p->l4[0] < 128;
}

static __always_inline bool wanted(const struct header *p, struct sk_buff *skb, __u32 ifindex, __u8 point, __u32 len,
				   __u64 *now)
{
	if (opens_or_fails(p))
		return take_token(0, now);
	/* Established connections are followed where they leave and where they are dropped. A receive window
	 * of 0 is also seen where it arrives: the sender may be this host. */
	if (p->l4_proto == IPPROTO_TCP && point == PACKET_RECEIVED && (p->later || *(const __u16 *)(p->l4 + 14)))
		return false;
	return first_in_epoch(packet_hash(p, ifindex << 2 | point, len >= LARGE_BYTES), now);
}

static __always_inline void read_connection(struct sk_buff *skb, struct packet_event *e)
{
	unsigned long nfct = skb->_nfct;
	struct nf_conn *ct = skb_conn(nfct);

	e->ct_state = (__u8)classify_ct(nfct);
	if (!ct)
		return;
	e->ct = (__u64)ct;
	e->ct_info = nfct & NFCT_INFO_MASK;
	e->ct_status = (__u32)BPF_CORE_READ(ct, status);
	READ_TUPLE(&e->orig, ct, 0);
	READ_TUPLE(&e->reply, ct, 1);
}

static __always_inline void send_event(struct sk_buff *skb, struct net_device *dev, __u32 netns, const struct header *p,
				       __u32 l3, __u32 len, __u8 point, __u64 now, const __u64 *drop)
{
	struct packet_event *e = bpf_ringbuf_reserve(&packet_events, sizeof(*e), 0);
	struct skb_shared_info *shared = (struct skb_shared_info *)(skb->head + skb->end);
	__u32 mac = skb->mac_header, n = skb->tail;

	if (!e) {
		count(PACKETS_RING_FULL);
		return;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time_ns = now;
	e->skb = (__u64)skb;
	e->netns = netns;
	e->iif = (__u32)skb->skb_iif;
	e->l3_len = len;
	e->eth_type = p->eth_type;
	e->point = point;
	e->gso_size = BPF_CORE_READ(shared, gso_size);
	if (have_conntrack)
		read_connection(skb, e);
	if (drop) {
		e->location = drop[1];
		e->reason = (__u32)drop[2];
		if (e->reason == netfilter_drop)
			e->hook = (__u8)classify_hook(skb, dev);
	}
	if (dev) {
		e->ifindex = (__u32)dev->ifindex;
		bpf_probe_read_kernel(e->ifname, sizeof(e->ifname), dev->name);
		if (dev->type == ARPHRD_ETHER && mac != MAC_HEADER_UNSET && mac + ETH_HLEN <= l3 &&
		    point != PACKET_DROPPED)
			e->has_macs = !bpf_probe_read_kernel(e->macs, sizeof(e->macs), skb->head + mac);
	}
	n = n > l3 ? n - l3 : 0;
	if (n > OBSERVED_BYTES)
		n = OBSERVED_BYTES;
	if (!bpf_probe_read_kernel(e->data, n, skb->head + l3))
		e->data_len = (__u16)n;
	count(PACKETS_SENT);
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

/* Steps over one VLAN tag in the frame. */
static __always_inline __u32 untagged(struct sk_buff *skb, __u32 l3, struct header *p)
{
	__be16 inner = 0;

	if (p->eth_type != bpf_htons(ETH_P_8021Q))
		return l3;
	bpf_probe_read_kernel(&inner, sizeof(inner), skb->head + l3 + 2);
	p->eth_type = inner;
	return l3 + VLAN_HLEN;
}

static __always_inline void observe(struct sk_buff *skb, struct net_device *dev, __u32 netns, __u32 l3, __u8 point,
				    const __u64 *drop)
{
	struct header p;
	__u64 now;
	__u32 len;

	if (only_netns && netns != only_netns)
		return;
	if (dev && dev->flags & IFF_LOOPBACK && point != PACKET_DROPPED)
		return;
	p.eth_type = skb->protocol;
	l3 = untagged(skb, l3, &p);
	if (p.eth_type != bpf_htons(ETH_P_IP) && p.eth_type != bpf_htons(ETH_P_IPV6) &&
	    p.eth_type != bpf_htons(ETH_P_ARP))
		return;
	if (!read_header(skb, l3, &p)) {
		count(PACKETS_UNREADABLE);
		return;
	}
	len = (__u32)(skb->data - skb->head) + skb->len - l3;
	if (wanted(&p, skb, dev ? (__u32)dev->ifindex : 0, point, len, &now))
		send_event(skb, dev, netns, &p, l3, len, point, now, drop);
}

/* Here the network header is that of an earlier layer: layer 3 begins at skb->data. */
SEC("tp_btf/netif_receive_skb")
int packet_received(__u64 *ctx)
{
	struct sk_buff *skb = (struct sk_buff *)ctx[0];
	struct net_device *dev = skb->dev;

	observe(skb, dev, dev->nd_net.net->ns.inum, (__u32)(skb->data - skb->head), PACKET_RECEIVED, (void *)0);
	return 0;
}

SEC("tp_btf/net_dev_start_xmit")
int packet_transmitted(__u64 *ctx)
{
	struct sk_buff *skb = (struct sk_buff *)ctx[0];
	struct net_device *dev = (struct net_device *)ctx[1];

	observe(skb, dev, dev->nd_net.net->ns.inum, skb->network_header, PACKET_TRANSMITTED, (void *)0);
	return 0;
}

SEC("tp_btf/kfree_skb")
int packet_dropped(__u64 *ctx)
{
	struct sk_buff *skb = (struct sk_buff *)ctx[0];
	struct sock *rx_sk = have_rx_sk ? (struct sock *)ctx[3] : (struct sock *)0;
	struct net_device *dev = skb->dev;

	observe(skb, dev, skb_netns(skb, dev, rx_sk), skb->network_header, PACKET_DROPPED, ctx);
	return 0;
}
