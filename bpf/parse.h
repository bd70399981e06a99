// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// From frame to struct packet. Nothing here writes a packet or knows a hook.
#ifndef SLUICE_PARSE_H
#define SLUICE_PARSE_H

#include "maps.h"

#define IP_MF 0x2000
#define IP_DF 0x4000
#define IP_OFFSET 0x1fff

#define ICMP4_ECHO_REPLY 0
#define ICMP4_UNREACHABLE 3
#define ICMP4_QUENCH 4
#define ICMP4_REDIRECT 5
#define ICMP4_ECHO 8
#define ICMP4_TIME_EXCEEDED 11
#define ICMP4_PARAMETER 12
#define ICMP6_UNREACHABLE 1
#define ICMP6_TOO_BIG 2
#define ICMP6_TIME_EXCEEDED 3
#define ICMP6_PARAMETER 4
#define ICMP6_ECHO 128
#define ICMP6_ECHO_REPLY 129

#define NEXT_HOP_BY_HOP 0
#define NEXT_ROUTING 43
#define NEXT_FRAGMENT 44
#define NEXT_AUTH 51
#define NEXT_NONE 59
#define NEXT_DEST 60
#define EXTENSIONS_MAX 8 // headers walked before a packet is called bad

struct ports {
	__be16 source;
	__be16 dest;
};

struct icmp_header {
	__u8 type;
	__u8 code;
	__u16 check;
	__be16 id;
	__be16 seq;
};

struct fragment_header {
	__u8 next;
	__u8 reserved;
	__be16 offset; // 8-byte units << 3, M in the lowest bit
	__be32 id;
};

static __always_inline __u32 now_ticks(void)
{
	return (__u32)bpf_jiffies64();
}

// ICMP and ICMPv6: which types are queries, answers and errors.
static __always_inline enum reason parse_icmp(const struct icmp_header *icmp, struct packet *p, const bool v6)
{
	__u8 type = icmp->type;

	p->icmp_type = type;
	p->icmp_code = icmp->code;
	if (v6 ? type == ICMP6_ECHO || type == ICMP6_ECHO_REPLY : type == ICMP4_ECHO || type == ICMP4_ECHO_REPLY) {
		p->tuple.sport = icmp->id;
		p->tuple.dport = icmp->id;
		if (type == (v6 ? ICMP6_ECHO : ICMP4_ECHO))
			p->flags |= PACKET_QUERY;
		return REASON_NONE;
	}
	if (v6 ? type >= ICMP6_UNREACHABLE && type <= ICMP6_PARAMETER :
		 type == ICMP4_UNREACHABLE || type == ICMP4_TIME_EXCEEDED || type == ICMP4_PARAMETER ||
			 type == ICMP4_QUENCH || type == ICMP4_REDIRECT) {
		p->flags |= PACKET_ERROR;
		return REASON_NONE;
	}
	if (v6 && type >= 130 && type <= 137) // MLD, neighbour discovery, redirect
		return REASON_NOT_ROUTED;
	p->flags |= PACKET_NO_FLOW;
	return REASON_NONE;
}

// Transport header at l4, which ends before end.
static __always_inline enum reason parse_l4(void *l4, void *end, struct packet *p, const bool v6)
{
	struct ports *ports = l4;

	switch (p->tuple.l4_proto) {
	case IPPROTO_TCP: {
		struct tcphdr *tcp = l4;

		if ((void *)(tcp + 1) > end)
			return REASON_TRUNCATED;
		p->tcp_flags = ((__u8 *)tcp)[13];
		break;
	}
	case IPPROTO_UDP:
		if (l4 + sizeof(struct udphdr) > end)
			return REASON_TRUNCATED;
		break;
	case IPPROTO_SCTP:
		if (l4 + 12 > end) // its common header (RFC 9260 §3.1)
			return REASON_TRUNCATED;
		p->flags |= PACKET_NO_FLOW; // but of a service: its ports are never changed
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if (l4 + sizeof(struct icmp_header) > end)
			return REASON_TRUNCATED;
		if ((p->tuple.l4_proto == IPPROTO_ICMPV6) != v6) {
			p->flags |= PACKET_NO_FLOW;
			return REASON_NONE;
		}
		return parse_icmp(l4, p, v6);
	default:
		p->flags |= PACKET_NO_FLOW;
		return REASON_NONE;
	}
	p->tuple.sport = ports->source;
	p->tuple.dport = ports->dest;
	return REASON_NONE;
}

// IPv4 header at offset 14.
static __always_inline enum reason parse_ipv4(void *data, void *end, struct packet *p)
{
	struct iphdr *ip = data + ETH_HLEN;
	__u32 header;
	__u16 frag;

	if ((void *)(ip + 1) > end)
		return REASON_TRUNCATED;
	header = ip->ihl * 4;
	p->l3_len = bpf_ntohs(ip->tot_len);
	if (ip->version != 4 || header < sizeof(*ip) || p->l3_len < header)
		return REASON_BAD_HEADER;
	p->ttl = ip->ttl;
	p->tos = ip->tos;
	p->tuple.saddr.w[0] = ip->saddr;
	p->tuple.daddr.w[0] = ip->daddr;
	p->tuple.l4_proto = ip->protocol;
	p->inner_proto = ip->protocol;
	p->l4_off = ETH_HLEN + header;
	frag = bpf_ntohs(ip->frag_off);
	if (frag & IP_DF)
		p->flags |= PACKET_DF;
	if (frag & (IP_OFFSET | IP_MF)) {
		p->frag_id = ip->id;
		p->frag_off = (frag & IP_OFFSET) * 8;
		p->flags |= p->frag_off ? PACKET_LATER_FRAGMENT : PACKET_FIRST_FRAGMENT;
		if (frag & IP_MF)
			p->flags |= PACKET_MORE;
		if (p->frag_off)
			return REASON_NONE;
	}
	return parse_l4(data + p->l4_off, end, p, false);
}

// IPv6 header at offset 14. Extension headers are left to parse_extensions.
static __always_inline enum reason parse_ipv6(void *data, void *end, struct packet *p)
{
	struct ipv6hdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > end)
		return REASON_TRUNCATED;
	if (ip->version != 6)
		return REASON_BAD_HEADER;
	p->l3_len = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	p->ttl = ip->hop_limit;
	p->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	__builtin_memcpy(&p->tuple.saddr, &ip->saddr, 16);
	__builtin_memcpy(&p->tuple.daddr, &ip->daddr, 16);
	p->tuple.l4_proto = ip->nexthdr;
	p->inner_proto = ip->nexthdr;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	p->flags |= PACKET_DF; // only the sender fragments
	switch (ip->nexthdr) {
	case NEXT_HOP_BY_HOP:
	case NEXT_ROUTING:
	case NEXT_FRAGMENT:
	case NEXT_AUTH:
	case NEXT_DEST:
		p->flags |= PACKET_EXTENDED;
		return REASON_NONE;
	}
	return parse_l4(data + p->l4_off, end, p, true);
}

// Walks the extension headers of a packet that parse_ipv6 left at the first one.
static __always_inline enum reason parse_extensions(void *data, void *end, struct packet *p)
{
	__u32 off = ETH_HLEN + sizeof(struct ipv6hdr);
	__u8 next = p->tuple.l4_proto;

	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		__u8 *header = data + off;
		__u8 following;

		if (off > 1024 || (void *)header + 8 > end)
			return REASON_TRUNCATED;
		following = header[0];
		switch (next) {
		case NEXT_ROUTING:
			if (header[3]) // segments left
				p->source_route = off - ETH_HLEN + 3;
			off += (header[1] + 1) * 8;
			break;
		case NEXT_HOP_BY_HOP:
		case NEXT_DEST:
			off += (header[1] + 1) * 8;
			break;
		case NEXT_AUTH:
			off += (header[1] + 2) * 4;
			break;
		case NEXT_FRAGMENT: {
			struct fragment_header *f = (void *)header;

			p->frag_id = f->id;
			p->frag_off = bpf_ntohs(f->offset) & 0xfff8;
			if (p->frag_off)
				p->flags |= PACKET_LATER_FRAGMENT;
			else if (f->offset & bpf_htons(1))
				p->flags |= PACKET_FIRST_FRAGMENT;
			if (f->offset & bpf_htons(1))
				p->flags |= PACKET_MORE;
			off += sizeof(*f);
			if (p->frag_off) { // what follows is in the first fragment
				next = following;
				goto transport;
			}
			break;
		}
		default:
			goto transport;
		}
		next = following;
	}
	return REASON_BAD_HEADER;
transport:
	p->tuple.l4_proto = next;
	p->inner_proto = next;
	p->l4_off = off;
	if (p->flags & PACKET_LATER_FRAGMENT)
		return REASON_NONE;
	if (off > 1024)
		return REASON_TRUNCATED;
	return parse_l4(data + off, end, p, true);
}

#endif
