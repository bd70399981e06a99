// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Headers of a frame, their checks and their translation. The kernel does the same checks before it
// translates a packet; a packet that fails one takes the slow path.
#ifndef SLUICE_ACCELERATE_FRAME_H
#define SLUICE_ACCELERATE_FRAME_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#include "kernel.h"

#define IP_DF 0x4000
#define SUMMED_MOST 2048 /* bytes; the programs verify no checksum of longer datagrams */
#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10
#define URG 0x20
#define DSCP_MASK 0xfc

struct headers {
	struct flow_key key;
	__u32 l4_len; /* of header and data */
	__u32 header; /* bytes of the L4 header */
	__u32 seq;    /* of TCP */
	__u8 flags;   /* of TCP */
	__u8 dscp, ttl;
};

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u32 ip_size(const bool v6)
{
	return v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
}

static __always_inline __u32 l4_offset(const bool v6)
{
	return ETH_HLEN + ip_size(v6);
}

static __always_inline bool same_address(const __be32 *a, const __be32 *b)
{
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]));
}

/* Returns the key of the opposite direction. */
static __always_inline struct flow_key reverse(const struct flow_entry *e, const struct flow_key *key)
{
	struct flow_key back = {
		.sport = e->dport,
		.dport = e->sport,
		.l4_proto = key->l4_proto,
		.family = key->family,
	};

	__builtin_memcpy(back.saddr, e->daddr, sizeof(back.saddr));
	__builtin_memcpy(back.daddr, e->saddr, sizeof(back.daddr));
	return back;
}

/* Reads the IP header. Returns the length of the packet behind it; 0 if the packet takes the slow path. */
static __always_inline __u32 read_ipv4(void *data, __u32 frame_len, struct headers *h)
{
	struct iphdr *ip = data + ETH_HLEN;
	const __u32 *word = data + ETH_HLEN;
	__u32 len = bpf_ntohs(ip->tot_len);

	if (*(__u8 *)ip != 0x45 || ip->frag_off & bpf_htons(~IP_DF & 0xffff) || len > frame_len - ETH_HLEN ||
	    len < sizeof(*ip) || fold((__u64)word[0] + word[1] + word[2] + word[3] + word[4]) != 0xffff)
		return 0;
	h->key.family = AF_INET;
	h->key.saddr[0] = ip->saddr;
	h->key.daddr[0] = ip->daddr;
	h->key.l4_proto = ip->protocol;
	h->dscp = ip->tos & DSCP_MASK;
	h->ttl = ip->ttl;
	return len - sizeof(*ip);
}

/* Headers of extensions and fragments are no transport protocols. */
static __always_inline __u32 read_ipv6(void *data, __u32 frame_len, struct headers *h)
{
	struct ipv6hdr *ip = data + ETH_HLEN;
	__u32 len = bpf_ntohs(ip->payload_len);

	if (*(__u8 *)ip >> 4 != 6 || len > frame_len - l4_offset(true))
		return 0;
	h->key.family = AF_INET6;
	__builtin_memcpy(h->key.saddr, &ip->saddr, sizeof(h->key.saddr));
	__builtin_memcpy(h->key.daddr, &ip->daddr, sizeof(h->key.daddr));
	h->key.l4_proto = ip->nexthdr;
	h->dscp = bpf_ntohs(*(__be16 *)ip) >> 4 & DSCP_MASK;
	h->ttl = ip->hop_limit;
	return len;
}

/* Reads the headers of a plain TCP or UDP packet. False: the packet takes the slow path. */
static __always_inline bool read_headers(void *data, void *end, __u32 frame_len, struct headers *h, const bool v6)
{
	struct ethhdr *eth = data;
	struct udphdr *udp = data + l4_offset(v6);
	struct tcphdr *tcp = data + l4_offset(v6);

	if ((void *)(udp + 1) > end || eth->h_proto != bpf_htons(v6 ? ETH_P_IPV6 : ETH_P_IP))
		return false;
	h->l4_len = v6 ? read_ipv6(data, frame_len, h) : read_ipv4(data, frame_len, h);
	if (h->l4_len < sizeof(*udp))
		return false;
	h->key.sport = udp->source;
	h->key.dport = udp->dest;
	h->flags = ACK;
	h->header = sizeof(*udp);
	if (h->key.l4_proto == IPPROTO_UDP)
		return bpf_ntohs(udp->len) == h->l4_len;
	if (h->key.l4_proto != IPPROTO_TCP || (void *)(tcp + 1) > end)
		return false;
	h->flags = ((__u8 *)tcp)[13];
	h->header = (((__u8 *)tcp)[12] >> 4) * 4;
	h->seq = bpf_ntohl(tcp->seq);
	return h->header >= sizeof(*tcp) && h->header <= h->l4_len;
}

/* Reports whether the L4 checksum of a packet in memory is right. It is not if the sender left the
 * sum to its network card, as local senders on a veth do. */
static __always_inline bool sum_words(void *data, void *end, const struct headers *h, const bool v6)
{
	const __be32 *from = h->key.saddr, *to = h->key.daddr;
	__u32 *at = data + l4_offset(v6), left = h->l4_len;
	__u64 sum;
	int i;

	if ((void *)at > end || left > SUMMED_MOST)
		return false;
	sum = (__u64)from[0] + from[1] + from[2] + from[3] + to[0] + to[1] + to[2] + to[3] +
	      bpf_htonl(h->key.l4_proto) + bpf_htonl(left);
	for (i = 0; i < SUMMED_MOST / 32 && left >= 32; i++, left -= 32, at += 8) {
		if ((void *)(at + 8) > end)
			return false;
		sum += (__u64)at[0] + at[1] + at[2] + at[3] + at[4] + at[5] + at[6] + at[7];
	}
	for (i = 0; i < 8 && left >= 4; i++, left -= 4, at++) {
		if ((void *)(at + 1) > end)
			return false;
		sum += *at;
	}
	if (left >= 2) {
		if ((void *)at + 2 > end)
			return false;
		sum += *(__u16 *)at;
		at = (void *)at + 2;
		left -= 2;
	}
	if (left) {
		if ((void *)at + 1 > end)
			return false;
		sum += *(__u8 *)at;
	}
	return fold(sum) == 0xffff;
}

static __noinline bool sum_valid4(void *data, void *end, const struct headers *h)
{
	return sum_words(data, end, h, false);
}

static __noinline bool sum_valid6(void *data, void *end, const struct headers *h)
{
	return sum_words(data, end, h, true);
}

static __always_inline bool sum_valid(void *data, void *end, const struct headers *h, const bool v6)
{
	return v6 ? sum_valid6(data, end, h) : sum_valid4(data, end, h);
}

/* Writes the MAC addresses, the IP header and the ports. Returns false if the frame is too short. */
static __always_inline bool write_headers(void *data, void *end, const struct flow_entry *e, const bool v6)
{
	struct iphdr *ip = data + ETH_HLEN;
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct udphdr *udp = data + l4_offset(v6);

	if ((void *)(udp + 1) > end)
		return false;
	__builtin_memcpy(data, e->macs, sizeof(e->macs));
	if (v6) {
		__builtin_memcpy(&ip6->saddr, e->saddr, sizeof(e->saddr));
		__builtin_memcpy(&ip6->daddr, e->daddr, sizeof(e->daddr));
		ip6->hop_limit--;
	} else {
		ip->saddr = e->saddr[0];
		ip->daddr = e->daddr[0];
		ip->ttl--;
		ip->check = ~fold((__u64)(__u16)~ip->check + e->addr_delta + 0xfffe); /* of the TTL */
	}
	udp->source = e->sport;
	udp->dest = e->dport;
	return true;
}

#endif
