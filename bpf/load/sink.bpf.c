// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The far end: counts and drops test packets. It optionally checks checksums, sequence numbers and
// latency. It passes other traffic (ARP, neighbour discovery, multicast) to the kernel.
#include "frame.h"

#define SENDERS 64
#define CHECKED_MAX 9216 // maximum bytes of a datagram to verify

// Optional checks. Set before load.
const volatile struct {
	__u32 checksums; // verify IPv4 and transport checksums
	__u32 stamps;	 // read sequence numbers and latency
} settings = {};

// Packets that one CPU received.
struct received {
	__u64 packets;
	__u64 bytes; // frame bytes without FCS
	__u64 bad_ip_checksum;
	__u64 bad_l4_checksum;
	__u64 fragments; // fragments; their datagrams are not checked
	__u64 unchecked; // packets of protocols other than TCP, UDP and ICMP
	__u64 unstamped; // packets without the expected stamp
	__u64 passed;	 // other traffic, passed to the kernel
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct received);
} load_received SEC(".maps");

// Sequence state by sender. One CPU delivers the packets of one sender; an
// interface that spreads flows over CPUs makes packets late.
struct sequence {
	__u64 lost; // sequence numbers skipped and not seen since
	__u64 late; // packets older than a previous one
	__u32 next; // expected stamp; it starts over after 2^32 packets
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SENDERS);
	__type(key, __u32);
	__type(value, struct sequence);
} load_sequence SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HIST_BUCKETS);
	__type(key, __u32);
	__type(value, __u64);
} load_latency SEC(".maps");

// Positions of the parts of a received frame.
struct parts {
	__u8 *l4;     // transport header
	int l4_len;   // bytes of transport header and payload, from the IP header
	__u64 pseudo; // sum of the pseudo-header without the length
	__u8 l4_proto;
	__u8 v6;
	__u8 fragment; // 1: a fragment
};

enum seen { SEEN_TEST, SEEN_OTHER, SEEN_BAD_IP };

static __always_inline __u64 sum_words(const void *from, int bytes)
{
	const __u16 *w = from;
	__u64 sum = 0;

	for (int i = 0; i < bytes / 2; i++)
		sum += w[i];
	return sum;
}

static __always_inline enum seen parse_v4(__u8 *l3, __u8 *end, struct parts *p)
{
	struct iphdr *ip = (struct iphdr *)l3;

	if ((__u8 *)(ip + 1) > end || ip->ihl != 5)
		return SEEN_OTHER;
	if ((bpf_ntohl(ip->daddr) >> 28) >= 14)
		return SEEN_OTHER;
	p->l4 = l3 + sizeof(*ip);
	p->l4_len = bpf_ntohs(ip->tot_len) - (int)sizeof(*ip);
	p->l4_proto = ip->protocol;
	p->fragment = (ip->frag_off & bpf_htons(0x3fff)) != 0;
	if (!settings.checksums)
		return SEEN_TEST;
	p->pseudo = sum_words(&ip->saddr, 8) + bpf_htons(ip->protocol);
	return csum_fold(sum_words(ip, sizeof(*ip))) ? SEEN_BAD_IP : SEEN_TEST;
}

static __always_inline enum seen parse_v6(__u8 *l3, __u8 *end, struct parts *p)
{
	struct ipv6hdr *ip = (struct ipv6hdr *)l3;

	if ((__u8 *)(ip + 1) > end)
		return SEEN_OTHER;
	if (ip->daddr.s6_addr[0] == 0xff || ip->daddr.s6_addr[0] == 0xfe)
		return SEEN_OTHER;
	p->l4 = l3 + sizeof(*ip);
	p->l4_len = bpf_ntohs(ip->payload_len);
	p->l4_proto = ip->nexthdr;
	p->v6 = 1;
	p->fragment = ip->nexthdr == IPPROTO_FRAGMENT;
	// Neighbour discovery may use a global address.
	if (ip->nexthdr == IPPROTO_ICMPV6 && p->l4 + 1 <= end && *p->l4 >= 133 && *p->l4 <= 137)
		return SEEN_OTHER;
	p->pseudo = sum_words(&ip->saddr, 32) + bpf_htons(ip->nexthdr);
	return SEEN_TEST;
}

// Reports whether the program can verify the checksum of the protocol. For IPv6, only without
// extension headers.
static __always_inline int is_checkable(const struct parts *p)
{
	switch (p->l4_proto) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
		return 1;
	case IPPROTO_ICMP:
		return !p->v6;
	case IPPROTO_ICMPV6:
		return p->v6;
	}
	return 0;
}

// Verifies the checksum of the datagram, which ends with the frame, in steps of 32, 4 and 1 bytes.
static __always_inline int l4_checksum_good(struct parts *p, __u8 *end)
{
	__u8 *at = p->l4;
	long len = end - at;
	__u64 sum = p->pseudo + bpf_htons((__u16)len);
	int i;

	if (len != p->l4_len)
		return 0; // the packet is truncated
	if (p->l4_proto == IPPROTO_ICMP)
		sum = 0;
	if (p->l4_proto == IPPROTO_UDP && at + 8 <= end && !*(__u16 *)(at + 6))
		return !p->v6; // the sender computed none, which IPv6 forbids (RFC 8200 section 8.1)
	for (i = 0; i < CHECKED_MAX / 32 && at + 32 <= end; i++, at += 32) {
		__u32 *w = (__u32 *)at;

		sum += (__u64)w[0] + w[1] + w[2] + w[3] + w[4] + w[5] + w[6] + w[7];
	}
	for (i = 0; i < 8 && at + 4 <= end; i++, at += 4)
		sum += *(__u32 *)at;
	if (at + 2 <= end) {
		sum += *(__u16 *)at;
		at += 2;
	}
	if (at + 1 <= end)
		sum += *at;
	return csum_fold(sum) == 0;
}

static __always_inline __u32 l4_header_len(const struct parts *p)
{
	return p->l4_proto == IPPROTO_TCP ? sizeof(struct tcphdr) : 8;
}

static __always_inline int read_stamp(struct parts *p, __u8 *end)
{
	struct stamp *stamp = (struct stamp *)(p->l4 + l4_header_len(p));
	struct sequence *s;
	__u32 sender;
	__s32 ahead;
	__u64 now;

	if ((__u8 *)(stamp + 1) > end || stamp->magic != STAMP_MAGIC)
		return 0;
	now = bpf_ktime_get_ns();
	hist_count(&load_latency, now > stamp->time_ns ? now - stamp->time_ns : 0);
	sender = stamp->sender;
	s = bpf_map_lookup_elem(&load_sequence, &sender);
	if (!s)
		return 0;
	ahead = (__s32)(stamp->seq - s->next);
	if (ahead >= 0) {
		s->lost += ahead;
		s->next = stamp->seq + 1;
	} else {
		s->late++;
		s->lost -= s->lost > 0;
	}
	return 1;
}

static __always_inline void examine(struct received *r, struct parts *p, __u8 *end)
{
	if (settings.checksums) {
		if (p->fragment)
			r->fragments++;
		else if (!is_checkable(p))
			r->unchecked++;
		else if (!l4_checksum_good(p, end))
			r->bad_l4_checksum++;
	}
	if (settings.stamps && !p->fragment && !read_stamp(p, end))
		r->unstamped++;
}

// Removes bytes after the datagram in a frame, such as padding.
static __always_inline void cut_padding(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = (void *)(eth + 1);
	struct ipv6hdr *ip6 = (void *)(eth + 1);
	long more = end - (void *)ip;

	if ((void *)(ip + 1) > end)
		return;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		more -= bpf_ntohs(ip->tot_len);
	else if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		more -= (long)sizeof(*ip6) + bpf_ntohs(ip6->payload_len);
	else
		return;
	if (more > 0)
		bpf_xdp_adjust_tail(ctx, -(int)more); // succeeds for every frame of at least header length
}

SEC("xdp")
int load_sink(struct xdp_md *ctx)
{
	const __u64 bytes = (__u64)ctx->data_end - ctx->data;
	struct parts parts = {};
	enum seen seen = SEEN_OTHER;
	struct received *r;
	struct ethhdr *eth;
	__u8 *frame, *end;
	__u32 zero = 0;

	if (settings.checksums)
		cut_padding(ctx);
	frame = (__u8 *)(long)ctx->data;
	end = (__u8 *)(long)ctx->data_end;
	eth = (struct ethhdr *)frame;
	r = bpf_map_lookup_elem(&load_received, &zero);
	if (!r || frame + sizeof(*eth) > end)
		return XDP_ABORTED;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		seen = parse_v4(frame + sizeof(*eth), end, &parts);
	else if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		seen = parse_v6(frame + sizeof(*eth), end, &parts);
	if (seen == SEEN_OTHER) {
		r->passed++;
		return XDP_PASS;
	}
	r->packets++;
	r->bytes += bytes;
	if (seen == SEEN_BAD_IP)
		r->bad_ip_checksum++;
	else if (settings.checksums || settings.stamps)
		examine(r, &parts, end);
	return XDP_DROP;
}

// Reflects datagrams, to measure both directions. Swapped addresses and ports leave every checksum
// valid.
static __always_inline void swap_ends(void *a, void *b, int words)
{
	__u32 *x = a, *y = b;

	for (int i = 0; i < words; i++) {
		__u32 w = x[i];

		x[i] = y[i];
		y[i] = w;
	}
}

static __always_inline int reflect_udp(struct xdp_md *ctx, struct ethhdr *eth, __u8 *l4, __u8 *end)
{
	__u16 *port = (__u16 *)l4;
	__u16 source;
	__u8 mac[ETH_ALEN];

	if (l4 + sizeof(struct udphdr) > end)
		return XDP_PASS;
	source = port[0];
	port[0] = port[1];
	port[1] = source;
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
	return bpf_redirect(ctx->ingress_ifindex, 0);
}

SEC("xdp")
int load_reflect(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	__u8 *end = (__u8 *)(long)ctx->data_end;
	__u8 *l3 = (__u8 *)(eth + 1);

	if (l3 + sizeof(struct iphdr) > end)
		return XDP_PASS;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (struct iphdr *)l3;

		if (ip->protocol != IPPROTO_UDP || ip->ihl != 5)
			return XDP_PASS;
		swap_ends(&ip->saddr, &ip->daddr, 1);
		return reflect_udp(ctx, eth, (__u8 *)(ip + 1), end);
	}
	if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (struct ipv6hdr *)l3;

		if ((__u8 *)(ip + 1) > end || ip->nexthdr != IPPROTO_UDP)
			return XDP_PASS;
		swap_ends(&ip->saddr, &ip->daddr, 4);
		return reflect_udp(ctx, eth, (__u8 *)(ip + 1), end);
	}
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
