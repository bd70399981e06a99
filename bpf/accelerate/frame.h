// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Headers of a frame, their checks and their translation. The kernel does the same checks before it
// translates a packet; a packet that fails one takes the slow path.
#ifndef SLUICE_ACCELERATE_FRAME_H
#define SLUICE_ACCELERATE_FRAME_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#include "maps.h"

#define IP_DF 0x4000
#define L4_OFFSET (ETH_HLEN + sizeof(struct iphdr))
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
	__u8 dscp;
};

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Returns the key of the opposite direction. */
static __always_inline struct flow_key reverse(const struct flow_entry *e, __u32 l4_proto)
{
	struct flow_key back = {
		.saddr = e->daddr,
		.daddr = e->saddr,
		.sport = e->dport,
		.dport = e->sport,
		.l4_proto = l4_proto,
	};

	return back;
}

/* Reads the headers of a plain IPv4 TCP or UDP packet. False: the packet takes the slow path. */
static __always_inline bool read_headers(void *data, void *end, __u32 frame_len, struct headers *h)
{
	struct ethhdr *eth = data;
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = data + L4_OFFSET;
	struct tcphdr *tcp = data + L4_OFFSET;
	const __u32 *word = data + ETH_HLEN;
	__u32 len;

	if ((void *)(udp + 1) > end || eth->h_proto != bpf_htons(ETH_P_IP) || *(__u8 *)ip != 0x45 ||
	    ip->frag_off & bpf_htons(~IP_DF & 0xffff))
		return false;
	len = bpf_ntohs(ip->tot_len);
	if (len > frame_len - ETH_HLEN || len < sizeof(*ip) + sizeof(*udp))
		return false;
	if (fold((__u64)word[0] + word[1] + word[2] + word[3] + word[4]) != 0xffff)
		return false;
	h->key.saddr = ip->saddr;
	h->key.daddr = ip->daddr;
	h->key.sport = udp->source;
	h->key.dport = udp->dest;
	h->key.l4_proto = ip->protocol;
	h->dscp = ip->tos & DSCP_MASK;
	h->l4_len = len - sizeof(*ip);
	h->flags = ACK;
	h->header = sizeof(*udp);
	if (ip->protocol == IPPROTO_UDP)
		return bpf_ntohs(udp->len) == h->l4_len;
	if (ip->protocol != IPPROTO_TCP || (void *)(tcp + 1) > end)
		return false;
	h->flags = ((__u8 *)tcp)[13];
	h->header = (((__u8 *)tcp)[12] >> 4) * 4;
	h->seq = bpf_ntohl(tcp->seq);
	return h->header >= sizeof(*tcp) && h->header <= h->l4_len;
}

/* Reports whether the L4 checksum of a packet in memory is right. It is not if the sender left the
 * sum to its network card, as local senders on a veth do. */
static __noinline bool sum_valid(void *data, void *end, __u32 left)
{
	struct iphdr *ip = data + ETH_HLEN;
	__u32 *at = data + L4_OFFSET;
	__u64 sum;
	int i;

	if ((void *)at > end || left > SUMMED_MOST)
		return false;
	sum = (__u64)ip->saddr + ip->daddr + bpf_htonl(ip->protocol) + bpf_htonl(left);
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

/* Writes the MAC addresses, the IPv4 header and the ports. Returns false if the frame is too short. */
static __always_inline bool write_headers(void *data, void *end, const struct flow_entry *e)
{
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = data + L4_OFFSET;

	if ((void *)(udp + 1) > end)
		return false;
	__builtin_memcpy(data, e->macs, sizeof(e->macs));
	ip->saddr = e->saddr;
	ip->daddr = e->daddr;
	ip->ttl--;
	ip->check = ~fold((__u64)(__u16)~ip->check + e->ip_delta);
	udp->source = e->sport;
	udp->dest = e->dport;
	return true;
}

#endif
