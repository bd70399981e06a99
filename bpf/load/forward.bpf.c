// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Reference forwarders: upper limits for the other rows of a benchmark. They do the least work that
// moves a packet. They have no services, state or ICMP and are not gateways.
#include "frame.h"

const volatile __u32 out_ifindex = 0;

#define AF_INET 2
#define AF_INET6 10

static __always_inline int is_ip(const struct ethhdr *eth)
{
	return eth->h_proto == bpf_htons(ETH_P_IP) || eth->h_proto == bpf_htons(ETH_P_IPV6);
}

// Swaps the MAC addresses of an IP packet.
static __always_inline int swap_macs(struct ethhdr *eth, void *end)
{
	__u8 mac[ETH_ALEN];

	if ((void *)(eth + 1) > end || !is_ip(eth))
		return 0;
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
	return 1;
}

// Swaps the MAC addresses and redirects: no forwarder can be faster.
SEC("xdp")
int load_redirect(struct xdp_md *ctx)
{
	if (!swap_macs((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		return XDP_PASS;
	return bpf_redirect(out_ifindex, 0);
}

#define ROOM ((int)(sizeof(struct ipv6hdr) - sizeof(struct iphdr)))

static __always_inline int to_ipv4(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ipv6hdr *was = data + sizeof(struct ethhdr);
	struct ethhdr *eth = data + ROOM;
	struct iphdr ip = {
		.version = 4, .ihl = 5, .ttl = 64, .saddr = bpf_htonl(0x0a000001), .daddr = bpf_htonl(0x0a000002)
	};

	if ((void *)(was + 1) > end)
		return XDP_PASS;
	ip.protocol = was->nexthdr;
	ip.tot_len = bpf_htons(bpf_ntohs(was->payload_len) + sizeof(ip));
	__builtin_memcpy(eth, data, 2 * ETH_ALEN);
	eth->h_proto = bpf_htons(ETH_P_IP);
	__builtin_memcpy(eth + 1, &ip, sizeof(ip));
	return bpf_xdp_adjust_head(ctx, ROOM) ? XDP_ABORTED : bpf_redirect(out_ifindex, 0);
}

static __always_inline int to_ipv6(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data, macs;
	struct iphdr *was = (void *)(eth + 1);
	struct ipv6hdr ip = { .version = 6,
			      .hop_limit = 64,
			      .saddr.s6_addr = { 0x20, 1, 0xd, 0xb8, 1 },
			      .daddr.s6_addr = { 0x20, 1, 0xd, 0xb8, 2 } };

	if ((void *)(was + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	ip.nexthdr = was->protocol;
	ip.payload_len = bpf_htons(bpf_ntohs(was->tot_len) - sizeof(*was));
	macs = *eth;
	macs.h_proto = bpf_htons(ETH_P_IPV6);
	if (bpf_xdp_adjust_head(ctx, -ROOM))
		return XDP_ABORTED;
	eth = (void *)(long)ctx->data;
	if ((void *)(eth + 1) + sizeof(ip) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	*eth = macs;
	__builtin_memcpy(eth + 1, &ip, sizeof(ip));
	return bpf_redirect(out_ifindex, 0);
}

// Swaps the MAC addresses, replaces the IP header by a constant one of the other family, and
// redirects: no translation between families can be faster.
SEC("xdp")
int load_cross(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if (!swap_macs(eth, (void *)(long)ctx->data_end))
		return XDP_PASS;
	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	return eth->h_proto == bpf_htons(ETH_P_IPV6) ? to_ipv4(ctx) : to_ipv6(ctx);
}

// Like load_redirect, on TC: the base cost of a packet with a socket buffer.
SEC("tc")
int load_redirect_tc(struct __sk_buff *ctx)
{
	if (!swap_macs((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		return TC_ACT_UNSPEC;
	return bpf_redirect(out_ifindex, 0);
}

// Drops every IP packet at once.
SEC("xdp")
int load_drop(struct xdp_md *ctx)
{
	struct ethhdr *eth = (struct ethhdr *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end || !is_ip(eth))
		return XDP_PASS;
	return XDP_DROP;
}

// One flow of a minimal DNAT. Addresses and ports in network order.
struct bare_key {
	__be32 source, dest;
	__be16 source_port, dest_port;
	__u32 l4_proto;
};

struct bare_flow {
	__be32 dest;
	__be16 dest_port;
	__u8 dest_mac[ETH_ALEN];
	__u8 source_mac[ETH_ALEN];
	__u16 pad;
	__u32 ifindex;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); // user space sets it to the number of flows
	__type(key, struct bare_key);
	__type(value, struct bare_flow);
} bare_flows SEC(".maps");

// Returns the checksum after a change of a 32-bit or 16-bit word (RFC 1624).
static __always_inline __u16 csum_replace(__u16 csum, __u32 was, __u32 is)
{
	__u64 sum = (__u16)~csum;

	sum += (__u32)~was;
	sum += is;
	return csum_fold(sum);
}

// Minimal DNAT of UDP over IPv4: one hash lookup returns the backend and the next hop.
SEC("xdp")
int load_bare_dnat(struct xdp_md *ctx)
{
	struct ethhdr *eth = (struct ethhdr *)(long)ctx->data;
	struct iphdr *ip = (struct iphdr *)(eth + 1);
	struct udphdr *udp = (struct udphdr *)(ip + 1);
	struct bare_key key = {};
	struct bare_flow *flow;
	__u32 ports;

	if ((void *)(udp + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	if (eth->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5 || ip->protocol != IPPROTO_UDP)
		return XDP_PASS;
	key.source = ip->saddr;
	key.dest = ip->daddr;
	key.source_port = udp->source;
	key.dest_port = udp->dest;
	key.l4_proto = ip->protocol;
	flow = bpf_map_lookup_elem(&bare_flows, &key);
	if (!flow)
		return XDP_PASS;
	ports = flow->dest_port;
	if (udp->check) {
		udp->check = csum_replace(udp->check, ip->daddr, flow->dest);
		udp->check = csum_replace(udp->check, udp->dest, ports);
	}
	ip->check = csum_replace(ip->check, ip->daddr, flow->dest);
	ip->check = csum_replace(ip->check, bpf_htons(0x0100), 0); // TTL - 1
	ip->ttl--;
	ip->daddr = flow->dest;
	udp->dest = ports;
	__builtin_memcpy(eth->h_dest, flow->dest_mac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, flow->source_mac, ETH_ALEN);
	return bpf_redirect(flow->ifindex, 0);
}

// Looks up the kernel's route for every packet, IPv4 and IPv6.
SEC("xdp")
int load_fib(struct xdp_md *ctx)
{
	struct ethhdr *eth = (struct ethhdr *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct bpf_fib_lookup fib = { .ifindex = ctx->ingress_ifindex };
	struct iphdr *ip = (struct iphdr *)(eth + 1);
	struct ipv6hdr *ip6 = (struct ipv6hdr *)(eth + 1);

	if ((void *)(ip + 1) > end)
		return XDP_PASS;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		fib.family = AF_INET;
		fib.ipv4_src = ip->saddr;
		fib.ipv4_dst = ip->daddr;
		ip->check = csum_replace(ip->check, bpf_htons(0x0100), 0);
		ip->ttl--;
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6) && (void *)(ip6 + 1) <= end) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, &ip6->saddr, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, &ip6->daddr, sizeof(fib.ipv6_dst));
		ip6->hop_limit--;
	} else {
		return XDP_PASS;
	}
	if (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return XDP_PASS;
	__builtin_memcpy(eth->h_dest, fib.dmac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, fib.smac, ETH_ALEN);
	return bpf_redirect(fib.ifindex, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
