// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// TCP segments without a TCP stack: reads a segment and rewrites it in place into its reply.
#ifndef SLUICE_LOAD_TCP_H
#define SLUICE_LOAD_TCP_H

#include "frame.h"

#define REQUEST_MAX 256
#define RESPONSE_HEAD_MAX 128

// The plan of the connections. Set before load.
struct flow_plan {
	__u32 ifindex;	    // egress interface of the injector
	__u32 slots;	    // concurrent connections
	__u32 first_slot;   // this injector's first slot
	__u32 own_slots;    // number of its slots
	__u32 ports;	    // source ports per source address
	__u32 source_port;  // lowest source port
	__u32 source_low;   // lowest source address, low 32 bits
	__u32 dest_port;    // port of the service
	__u32 request_len;  // bytes
	__u32 response_len; // bytes
	__u32 request_sum;  // checksum words of the request
	__u32 window;	    // maximum turns in progress on all CPUs, without a schedule
	__u32 requests;	    // requests per connection
	__u32 hold;	    // connections stay open between their turns
	__u32 max_tries;    // transmissions per packet
	__u32 v6;	    // family of the client end
	__u64 interval;	    // interval between turns in 2^-16 ns; 0: no schedule
	__u64 limit;	    // number of turns
	__u64 timeout_ns;   // retransmission timer
	__u8 source[16];    // lowest source address on the wire, IPv4 in the last 4 bytes
	__u8 dest[16];	    // address of the service
	__u8 source_mac[6];
	__u8 dest_mac[6];
	__u8 request[REQUEST_MAX];
};

const volatile struct flow_plan plan = {};

#define AF4 4
#define AF6 6

#define FLAG_FIN 0x01
#define FLAG_SYN 0x02
#define FLAG_RST 0x04
#define FLAG_PSH 0x08
#define FLAG_ACK 0x10

// A TCP segment at fixed offsets: no IPv4 options, no extension headers.
struct segment4 {
	struct ethhdr eth;
	struct iphdr ip;
	struct tcphdr tcp;
} __attribute__((packed));

struct segment6 {
	struct ethhdr eth;
	struct ipv6hdr ip;
	struct tcphdr tcp;
} __attribute__((packed));

static __always_inline struct iphdr *ip4_of(struct segment4 *s)
{
	return (void *)((__u8 *)s + sizeof(struct ethhdr));
}

static __always_inline struct tcphdr *tcp4_of(struct segment4 *s)
{
	return (void *)((__u8 *)s + sizeof(struct ethhdr) + sizeof(struct iphdr));
}

static __always_inline struct ipv6hdr *ip6_of(struct segment6 *s)
{
	return (void *)((__u8 *)s + sizeof(struct ethhdr));
}

static __always_inline struct tcphdr *tcp6_of(struct segment6 *s)
{
	return (void *)((__u8 *)s + sizeof(struct ethhdr) + sizeof(struct ipv6hdr));
}

// The 16-bit words of a TCP header as they are checksummed and written.
struct tcp_fields {
	__be16 source, dest;
	__u32 seq, ack; // host order
	__u8 flags;
	__u16 payload_len;
};

static __always_inline __u8 tcp_flags(const struct tcphdr *tcp)
{
	return ((const __u8 *)tcp)[13];
}

static __always_inline __u64 sum32(const void *at, int words)
{
	const __u32 *w = at;
	__u64 sum = 0;

	for (int i = 0; i < words; i++)
		sum += w[i];
	return sum;
}

// Writes the TCP header and its checksum. sum holds the words of addresses and payload.
static __always_inline void write_tcp(struct tcphdr *tcp, const struct tcp_fields *f, __u64 sum)
{
	__u32 *w = (__u32 *)tcp;
	__u16 csum;

	w[0] = (__u32)f->source | (__u32)f->dest << 16;
	w[1] = bpf_htonl(f->seq);
	w[2] = bpf_htonl(f->ack);
	w[3] = 0x50 | (__u32)f->flags << 8 | (__u32)0xffff << 16;
	sum += sum32(tcp, 4);
	sum += bpf_htons(sizeof(*tcp) + f->payload_len);
	sum += bpf_htons(IPPROTO_TCP);
	csum = csum_fold(sum);
	w[4] = csum;
}

// Writes the complete IPv4 header.
static __always_inline void write_ip4(struct iphdr *ip, __be32 from, __be32 to, __u16 l4_len)
{
	__u32 *w = (__u32 *)ip;

	w[0] = 0x0045 | (__u32)bpf_htons(sizeof(*ip) + l4_len) << 16;
	w[1] = (__u32)bpf_htons(0x4000) << 16; // DF
	w[2] = 64 | IPPROTO_TCP << 8;
	w[3] = from;
	w[4] = to;
	ip->check = csum_fold(sum32(ip, 5));
}

static __always_inline void write_macs(struct ethhdr *eth)
{
	const volatile __u16 *dest = (const volatile __u16 *)plan.dest_mac;
	const volatile __u16 *source = (const volatile __u16 *)plan.source_mac;
	__u16 *w = (__u16 *)eth;

	for (int i = 0; i < ETH_ALEN / 2; i++) {
		w[i] = dest[i];
		w[i + ETH_ALEN / 2] = source[i];
	}
}

// Sets the MAC addresses of a reply. The client end has an egress interface and knows its gateway;
// replies of servers may bypass the gateway. The server end returns the frame to its sender.
static __always_inline void turn_macs(struct ethhdr *eth)
{
	__u8 mac[ETH_ALEN];

	if (plan.ifindex) {
		write_macs(eth);
		return;
	}
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
}

// A received segment.
struct arrival {
	__u32 seq, ack;
	__u16 payload_len;
	__be16 source, dest; // ports
	__u32 dest_low;	     // low 32 bits of the destination, host order
	__u8 flags;
	__u8 first; // first byte of the payload that the ends read
};

enum arrived { ARRIVED_TCP, ARRIVED_ICMP, ARRIVED_OTHER };

// Offset of the byte that asks the server to close or to keep the connection: 'c' of "close" or 'k'
// of "keep-alive".
#define CLOSE_OFFSET 28

static __always_inline void read_tcp(struct arrival *a, const struct tcphdr *tcp)
{
	a->seq = bpf_ntohl(tcp->seq);
	a->ack = bpf_ntohl(tcp->ack_seq);
	a->source = tcp->source;
	a->dest = tcp->dest;
	a->flags = tcp_flags(tcp);
}

static __always_inline enum arrived read4(struct xdp_md *ctx, struct arrival *a)
{
	struct segment4 *s = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u8 *payload;
	__u32 header, total;

	if ((void *)(s + 1) > end || s->ip.ihl != 5)
		return ARRIVED_OTHER;
	if (s->ip.protocol == IPPROTO_ICMP)
		return ARRIVED_ICMP;
	if (s->ip.protocol != IPPROTO_TCP)
		return ARRIVED_OTHER;
	header = sizeof(s->ip) + s->tcp.doff * 4;
	total = bpf_ntohs(s->ip.tot_len);
	if (total < header || s->tcp.doff < 5)
		return ARRIVED_OTHER;
	read_tcp(a, tcp4_of(s));
	a->payload_len = total - header;
	a->dest_low = bpf_ntohl(s->ip.daddr);
	payload = (__u8 *)(s + 1) + CLOSE_OFFSET;
	if (a->payload_len > CLOSE_OFFSET && payload + 1 <= (__u8 *)end)
		a->first = *payload;
	return ARRIVED_TCP;
}

static __always_inline enum arrived read6(struct xdp_md *ctx, struct arrival *a)
{
	struct segment6 *s = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u8 *payload;
	__u32 header, total;

	if ((void *)(s + 1) > end)
		return ARRIVED_OTHER;
	// Neighbour discovery (133 … 137) belongs to the kernel.
	if (s->ip.nexthdr == IPPROTO_ICMPV6)
		return *(__u8 *)tcp6_of(s) < 128 ? ARRIVED_ICMP : ARRIVED_OTHER;
	if (s->ip.nexthdr != IPPROTO_TCP)
		return ARRIVED_OTHER;
	header = s->tcp.doff * 4;
	total = bpf_ntohs(s->ip.payload_len);
	if (total < header || s->tcp.doff < 5)
		return ARRIVED_OTHER;
	read_tcp(a, tcp6_of(s));
	a->payload_len = total - header;
	a->dest_low = bpf_ntohl(s->ip.daddr.s6_addr32[3]);
	payload = (__u8 *)(s + 1) + CLOSE_OFFSET;
	if (a->payload_len > CLOSE_OFFSET && payload + 1 <= (__u8 *)end)
		a->first = *payload;
	return ARRIVED_TCP;
}

// A reply: flags, sequence numbers, and the payload.
struct answer {
	__u32 seq, ack;
	__u8 flags;
	__u8 close; // the request asks to close the connection
};

// The byte that distinguishes a closing request changes the sum by a constant. Go computes
// request_sum with 'c'.
#define REQUEST_CLOSE 'c'
#define REQUEST_KEEP 'k'

static __always_inline void write_request(__u8 *payload, int close)
{
	// Unrolled: the length is known at load time.
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < REQUEST_MAX / 8; i++) {
		if (plan.request_len >= 8 * (i + 1))
			*(__u64 *)(payload + 8 * i) = *(const volatile __u64 *)(plan.request + 8 * i);
	}
	if (plan.request_len > CLOSE_OFFSET)
		payload[CLOSE_OFFSET] = close ? REQUEST_CLOSE : REQUEST_KEEP;
}

// The start of every response. The rest of the body is zeros, which bpf_xdp_adjust_tail leaves in a
// frame that grows.
const volatile __u8 response_head[RESPONSE_HEAD_MAX] = {};
const volatile __u32 response_head_len = 0;
const volatile __u32 response_sum = 0;
const volatile __u32 reply_ifindex = 0; // egress interface of the server end; 0: the ingress interface

static __always_inline void write_response(__u8 *payload)
{
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < RESPONSE_HEAD_MAX / 8; i++) {
		if (response_head_len >= 8 * (i + 1))
			*(__u64 *)(payload + 8 * i) = *(const volatile __u64 *)(response_head + 8 * i);
	}
}

// Makes the frame as long as the reply. It shrinks the frame first, so that the kernel
// zeroes the bytes added after that.
static __always_inline int resize(struct xdp_md *ctx, __u32 headers, __u32 payload_len)
{
	long have = (long)ctx->data_end - (long)ctx->data;

	if (have > (long)headers && bpf_xdp_adjust_tail(ctx, (int)((long)headers - have)))
		return -1;
	have = (long)ctx->data_end - (long)ctx->data;
	if (have == (long)(headers + payload_len))
		return 0;
	return bpf_xdp_adjust_tail(ctx, (int)((long)(headers + payload_len) - have));
}

enum payload { PAYLOAD_NONE, PAYLOAD_REQUEST, PAYLOAD_RESPONSE };

static __always_inline __u32 payload_len(enum payload p)
{
	return p == PAYLOAD_REQUEST ? plan.request_len : p == PAYLOAD_RESPONSE ? plan.response_len : 0;
}

static __always_inline __u32 payload_sum(enum payload p, int close)
{
	if (p == PAYLOAD_REQUEST) // CLOSE_OFFSET is even: it is the low byte of a word
		return plan.request_sum + (close ? 0 : REQUEST_KEEP - REQUEST_CLOSE);
	return p == PAYLOAD_RESPONSE ? response_sum : 0;
}

static __always_inline int write_payload(__u8 *at, void *end, enum payload p, int close)
{
	if (p == PAYLOAD_REQUEST) {
		if (at + plan.request_len > (__u8 *)end)
			return -1;
		write_request(at, close);
	} else if (p == PAYLOAD_RESPONSE) {
		if (at + response_head_len > (__u8 *)end)
			return -1;
		write_response(at);
	}
	return 0;
}

// Rewrites a received frame into its reply and sends it back.
static __always_inline int send_back(struct xdp_md *ctx, const int family, const struct arrival *a,
				     const struct answer *r, const enum payload p)
{
	struct tcp_fields f = {
		.source = a->dest,
		.dest = a->source,
		.seq = r->seq,
		.ack = r->ack,
		.flags = r->flags,
		.payload_len = payload_len(p),
	};
	const __u32 headers = family == AF4 ? sizeof(struct segment4) : sizeof(struct segment6);
	__u64 sum = payload_sum(p, r->close);
	void *end;

	if (resize(ctx, headers, f.payload_len))
		return XDP_ABORTED;
	end = (void *)(long)ctx->data_end;
	if (family == AF4) {
		struct segment4 *s = (void *)(long)ctx->data;

		if ((void *)(s + 1) > end || write_payload((__u8 *)(s + 1), end, p, r->close))
			return XDP_ABORTED;
		turn_macs(&s->eth);
		write_ip4(ip4_of(s), s->ip.daddr, s->ip.saddr, sizeof(s->tcp) + f.payload_len);
		sum += sum32(&ip4_of(s)->saddr, 2);
		write_tcp(tcp4_of(s), &f, sum);
	} else {
		struct segment6 *s = (void *)(long)ctx->data;
		struct in6_addr was_source, was_dest;

		if ((void *)(s + 1) > end || write_payload((__u8 *)(s + 1), end, p, r->close))
			return XDP_ABORTED;
		turn_macs(&s->eth);
		was_source = s->ip.saddr;
		was_dest = s->ip.daddr;
		*(__u32 *)ip6_of(s) = bpf_htonl(6U << 28);
		s->ip.payload_len = bpf_htons(sizeof(s->tcp) + f.payload_len);
		s->ip.nexthdr = IPPROTO_TCP;
		s->ip.hop_limit = 64;
		s->ip.saddr = was_dest;
		s->ip.daddr = was_source;
		sum += sum32(&ip6_of(s)->saddr, 8);
		write_tcp(tcp6_of(s), &f, sum);
	}
	// Not XDP_TX: with it, veth wakes the peer only if the peer has an XDP program
	// (veth_xdp_flush, kernel 6.18). A gateway may have none.
	if (plan.ifindex)
		return bpf_redirect(plan.ifindex, 0);
	return bpf_redirect(reply_ifindex ? reply_ifindex : ctx->ingress_ifindex, 0);
}

#endif
