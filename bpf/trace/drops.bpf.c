// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* Dropped packets of the whole host. The tracepoint skb:kfree_skb covers every
 * drop with a reason.
 *
 * Every drop is counted by location and reason. Only a few drops of each kind
 * are sampled (headers, both tuples, stack), because a stack costs five times as
 * much as a count. The hook of a drop is derived from the state of the packet
 * instead of the stack. Counters alone therefore distinguish "table full" from
 * "no free port".
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "drops.h"
#include "kernel.h"
#include "packet_state.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_HLEN 14
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_SCTP 132
#define IPPROTO_UDPLITE 136
#define IP_OFFSET 0x1fff /* mask of the fragment offset in its field */

const struct drop_sample *_export_sample __attribute__((unused));
const struct drop_tuple *_export_tuple __attribute__((unused));
const enum drop_hook *_export_hook __attribute__((unused));
const enum drop_ct *_export_ct __attribute__((unused));

/* Set before load. The verifier removes the code of disabled options. */
const volatile bool have_rx_sk;		 /* the tracepoint has a fourth argument (6.11) */
const volatile __u32 netfilter_drop;	 /* SKB_DROP_REASON_NETFILTER_DROP of this kernel */
const volatile __u64 sample_interval_ns; /* per key and CPU; 0: no samples */
const volatile __u64 sample_burst_ns;
const volatile bool sample_stacks;
const volatile __u32 only_netns; /* 0: all */
const volatile bool filter_packet;
const volatile __u8 filter_proto;    /* 0: any */
const volatile __u16 filter_port;    /* host order, 0: any, matches source or destination */
const volatile __u8 filter_family;   /* AF_*, 0: no address filter */
const volatile __u32 filter_addr[4]; /* network order, matches source or destination */
const volatile __u32 filter_mask[4];

/* One entry for each kind of drop, written by the programs below. User space
 * reads it; it is removed with the object. 4096: kinds are code locations ×
 * namespaces × devices, and a busy container host has some hundreds. If the map
 * is full, drops are counted in drops_missed. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct drop_key);
	__type(value, struct drop_count);
} drops SEC(".maps");

/* [0]: drops not counted because the map was full; [1]: samples lost because the
 * ring was full; [2]: drops counted by the second program because the first did
 * not run; [3]: all drops seen by a program. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4);
	__type(key, __u32);
	__type(value, __u64);
} drops_missed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} samples SEC(".maps");

/* The kernel does not run a program on a CPU that already runs the same program.
 * A burst of drops in a softirq that interrupts drops_first would therefore not
 * be counted. So every drop passes two programs, one after the other. The first
 * counts the drop and pushes the packet here. The second removes the packet, and
 * counts packets that are missing here. This is a stack, because interrupts
 * nest; the levels are task, softirq and hardirq. An interrupt in the last
 * instructions of drops_again leaves stale entries. Each one can hide one later
 * drop at the same address, four at most. */
#define SEEN_DEPTH 4

struct seen {
	__u32 depth;
	__u32 paired; /* drops_again, which is attached second, has run on this CPU */
	unsigned long skb[SEEN_DEPTH];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct seen);
} drops_seen SEC(".maps");

static __always_inline void count_missed(__u32 which)
{
	__u64 *n = bpf_map_lookup_elem(&drops_missed, &which);

	if (n)
		*n += 1;
}

static __always_inline bool take_token(struct drop_count *count)
{
	__u64 now, earliest;

	if (!sample_interval_ns)
		return false;
	now = bpf_ktime_get_ns();
	if (count->next_ns > now)
		return false;
	earliest = now > sample_burst_ns ? now - sample_burst_ns : 0;
	if (count->next_ns < earliest)
		count->next_ns = earliest;
	count->next_ns += sample_interval_ns;
	return true;
}

static __always_inline bool addr_matches(const __u32 *addr)
{
	int words = filter_family == 2 ? 1 : 4;

	for (int i = 0; i < 4; i++)
		if (i < words && (addr[i] & filter_mask[i]) != filter_addr[i])
			return false;
	return true;
}

static __always_inline bool tuple_matches(const struct drop_tuple *t)
{
	if (filter_proto && t->l4_proto != filter_proto)
		return false;
	if (filter_port && bpf_ntohs(t->src_port) != filter_port && bpf_ntohs(t->dst_port) != filter_port)
		return false;
	if (!filter_family)
		return true;
	return t->family == filter_family &&
	       (addr_matches((const __u32 *)t->src) || addr_matches((const __u32 *)t->dst));
}

static __always_inline bool has_ports(__u8 l4_proto)
{
	return l4_proto == IPPROTO_TCP || l4_proto == IPPROTO_UDP || l4_proto == IPPROTO_SCTP ||
	       l4_proto == IPPROTO_UDPLITE;
}

/* Reads the present addresses and ports of the packet. */
static __always_inline bool packet_tuple(struct sk_buff *skb, struct drop_tuple *t)
{
	unsigned char *l3 = skb->head + skb->network_header;
	unsigned char *l4;
	bool later = false; /* a fragment without a transport header */
	__u8 head[40];

	if (bpf_probe_read_kernel(head, sizeof(head), l3))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		t->family = 2;
		t->l4_proto = head[9];
		__builtin_memcpy(t->src, head + 12, 4);
		__builtin_memcpy(t->dst, head + 16, 4);
		l4 = l3 + (head[0] & 0xf) * 4;
		later = ((head[6] << 8 | head[7]) & IP_OFFSET) != 0;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		t->family = 10;
		t->l4_proto = head[6];
		__builtin_memcpy(t->src, head + 8, 16);
		__builtin_memcpy(t->dst, head + 24, 16);
		l4 = l3 + 40;
	} else {
		return false;
	}
	if (has_ports(t->l4_proto) && !later)
		bpf_probe_read_kernel(&t->src_port, 4, l4);
	return true;
}

static __always_inline bool passes_filter(struct sk_buff *skb, unsigned long nfct)
{
	struct drop_tuple t = {};
	struct nf_conn *ct;

	if (!filter_packet)
		return true;
	if (packet_tuple(skb, &t) && tuple_matches(&t))
		return true;
	ct = skb_conn(nfct);
	if (!ct)
		return false;
	READ_TUPLE(&t, ct, 0);
	return tuple_matches(&t);
}

/* Copies the packet from its Ethernet header on, or from the network header if
 * the packet has no valid Ethernet header. */
static __always_inline void copy_packet(struct sk_buff *skb, struct drop_sample *s)
{
	__u32 start = skb->network_header, mac = skb->mac_header;
	__u32 len;

	s->l3_offset = 0;
	if (mac != MAC_HEADER_UNSET && mac + ETH_HLEN == start) {
		start = mac;
		s->l3_offset = ETH_HLEN;
	}
	s->data_len = 0;
	/* For a packet to this host, skb->len excludes the headers before skb->data. */
	s->frame_len = (__u32)(skb->data - skb->head) + skb->len - start;
	if (skb->tail <= start)
		return;
	len = skb->tail - start;
	if (len > SNAP_BYTES)
		len = SNAP_BYTES;
	if (!bpf_probe_read_kernel(s->data, len, skb->head + start))
		s->data_len = (__u16)len;
}

static __always_inline void describe(void *ctx, struct sk_buff *skb, struct net_device *dev, unsigned long nfct,
				     const struct drop_key *key)
{
	struct drop_sample *s = bpf_ringbuf_reserve(&samples, sizeof(*s), 0);
	struct nf_conn *ct = skb_conn(nfct);
	long n;

	if (!s) {
		count_missed(1);
		return;
	}
	s->key = *key;
	s->time_ns = bpf_ktime_get_ns();
	s->len = skb->len;
	s->mark = skb->mark;
	s->in_ifindex = (__u32)skb->skb_iif;
	s->ct_status = 0;
	__builtin_memset(&s->orig, 0, sizeof(s->orig));
	__builtin_memset(&s->reply, 0, sizeof(s->reply));
	__builtin_memset(s->ifname, 0, sizeof(s->ifname));
	if (dev)
		bpf_probe_read_kernel(s->ifname, sizeof(s->ifname), dev->name);
	if (ct) {
		s->ct_status = (__u32)BPF_CORE_READ(ct, status);
		READ_TUPLE(&s->orig, ct, 0);
		READ_TUPLE(&s->reply, ct, 1);
	}
	copy_packet(skb, s);
	n = sample_stacks ? bpf_get_stack(ctx, s->stack, sizeof(s->stack), 0) : 0;
	s->stack_bytes = n > 0 ? (__u32)n : 0;
	bpf_ringbuf_submit(s, 0);
}

static __always_inline struct drop_count *count_drop(const struct drop_key *key, __u32 bytes)
{
	struct drop_count *count = bpf_map_lookup_elem(&drops, key);

	if (!count) {
		struct drop_count zero = {};

		bpf_map_update_elem(&drops, key, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&drops, key);
		if (!count) {
			count_missed(0);
			return count;
		}
	}
	/* Atomic, because an interrupt may count the same kind. */
	__sync_fetch_and_add(&count->packets, 1);
	__sync_fetch_and_add(&count->bytes, bytes);
	return count;
}

static __always_inline void drop(__u64 *ctx)
{
	struct sk_buff *skb = (struct sk_buff *)ctx[0];
	struct sock *rx_sk = have_rx_sk ? (struct sock *)ctx[3] : (struct sock *)0;
	struct net_device *dev = skb->dev;
	unsigned long nfct = skb->_nfct;
	struct drop_key key = {
		.location = ctx[1],
		.reason = (__u32)ctx[2],
		.eth_type = skb->protocol,
	};
	struct drop_count *count;

	count_missed(3);
	key.netns = skb_netns(skb, dev, rx_sk);
	if (only_netns && key.netns != only_netns)
		return;
	if (!passes_filter(skb, nfct))
		return;
	if (dev)
		key.ifindex = (__u32)dev->ifindex;
	key.ct = (__u8)classify_ct(nfct);
	if (key.reason == netfilter_drop)
		key.hook = (__u8)classify_hook(skb, dev);
	count = count_drop(&key, skb->len);
	if (count && take_token(count))
		describe(ctx, skb, dev, nfct, &key);
}

static __always_inline struct seen *this_cpu_seen(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&drops_seen, &zero);
}

static __always_inline void push_seen(struct seen *s, unsigned long skb)
{
	__u32 at;

	if (!s || !s->paired)
		return;
	/* Entries above this depth are left over from an interrupt of drops_again,
	 * which removes them when it continues. */
	at = s->depth < SEEN_DEPTH ? s->depth : SEEN_DEPTH - 1;
	s->skb[at & (SEEN_DEPTH - 1)] = skb;
	s->depth = at + 1;
}

static __always_inline bool pop_seen(struct seen *s, unsigned long skb)
{
	if (!s)
		return true;
	if (!s->paired) { /* the first program has counted it without an entry */
		s->paired = 1;
		return true;
	}
	for (__u32 i = 0; i < SEEN_DEPTH; i++) {
		if (i < s->depth && s->skb[i] == skb) {
			s->depth = i;
			return true;
		}
	}
	return false;
}

SEC("tp_btf/kfree_skb")
int drops_first(__u64 *ctx)
{
	drop(ctx);
	push_seen(this_cpu_seen(), ctx[0]);
	return 0;
}

SEC("tp_btf/kfree_skb")
int drops_again(__u64 *ctx)
{
	if (!pop_seen(this_cpu_seen(), ctx[0])) {
		count_missed(2);
		drop(ctx);
	}
	return 0;
}

/* For kernels without BTF: counts by location and reason only. */
SEC("raw_tp/kfree_skb")
int drops_raw(struct bpf_raw_tracepoint_args *ctx)
{
	struct drop_key key = {
		.location = ctx->args[1],
		.reason = (__u32)ctx->args[2],
	};

	count_drop(&key, 0);
	return 0;
}
