// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Parses a frame into struct packet. This file writes no packet and is independent of the hook.
#ifndef SLUICE_PARSE_H
#define SLUICE_PARSE_H

#include "maps.h"

#define IP_MF 0x2000
#define IP_DF 0x4000
#define IP_OFFSET 0x1fff

#define ICMP4_ECHO_REPLY 0
#define ICMP4_UNREACHABLE 3
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

#define PROTO_DCCP 33
#define PROTO_UDPLITE 136

#define NEXT_HOP_BY_HOP 0
#define NEXT_ROUTING 43
#define NEXT_FRAGMENT 44
#define NEXT_AUTH 51
#define NEXT_NONE 59
#define NEXT_DEST 60
#define OPTION_JUMBO 0xc2    // RFC 2675, in a hop-by-hop header
#define JUMBO_SIZE 8	     // bytes of such a header, as in BIG TCP packets of IPv6
#define EXTENSIONS_MAX 7     // at most so many extension headers,
#define EXTENSIONS_BYTES 960 // and so many bytes (RFC 8504 §5.3)
#define EXTENDED_OFF 0x3ff   // mask for ETH_HLEN + 40 + EXTENSIONS_BYTES, the highest offset of a header

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

// Returns the length field of an IP or UDP header. It is 0 if the field is too small. The kernel
// does the same for packets that it segments later (BIG TCP).
static __always_inline __be16 stated_len(__u32 len)
{
	return len > 0xffff ? 0 : bpf_htons(len);
}

static __always_inline __u32 now_ticks(void)
{
	return (__u32)bpf_jiffies64();
}

// Reports whether more than "ticks" ticks have passed since "then". Another CPU may have recorded
// "then" slightly after "now" was read.
static __always_inline bool elapsed(__u32 now, __u32 then, __u32 ticks)
{
	return now + hz - then > ticks + hz;
}

static __always_inline bool icmp_is_echo(__u8 type, const bool v6)
{
	return v6 ? type == ICMP6_ECHO || type == ICMP6_ECHO_REPLY : type == ICMP4_ECHO || type == ICMP4_ECHO_REPLY;
}

static __always_inline bool icmp_is_error(__u8 type, const bool v6)
{
	if (v6)
		return type >= ICMP6_UNREACHABLE && type <= ICMP6_PARAMETER;
	// Source quench is not included: it is obsolete (RFC 5508 REQ-10c, RFC 6633).
	return type == ICMP4_UNREACHABLE || type == ICMP4_TIME_EXCEEDED || type == ICMP4_PARAMETER ||
	       type == ICMP4_REDIRECT;
}

// Classifies ICMP and ICMPv6 types as queries, replies and errors.
static __always_inline enum reason parse_icmp(const struct icmp_header *icmp, struct packet *p, const bool v6)
{
	__u8 type = icmp->type;

	p->icmp_type = type;
	p->icmp_code = icmp->code;
	if (icmp_is_echo(type, v6)) {
		p->tuple.sport = icmp->id;
		p->tuple.dport = icmp->id;
		if (type == (v6 ? ICMP6_ECHO : ICMP4_ECHO))
			p->flags |= PACKET_QUERY;
		return REASON_NONE;
	}
	if (icmp_is_error(type, v6)) {
		p->flags |= PACKET_ERROR;
		return REASON_NONE;
	}
	if (v6 && type >= 130 && type <= 137) // MLD, neighbour discovery, redirect
		return REASON_NOT_ROUTED;
	p->flags |= PACKET_NO_FLOW;
	p->tuple.kind = KIND_NONE; // the tuple must not match a flow with the identifier 0
	return REASON_NONE;
}

// Parses the transport header at l4. It must end before "end" and within the packet.
static __always_inline enum reason parse_l4(void *l4, void *end, struct packet *p, const bool v6)
{
	int room = (int)(ETH_HLEN + p->l3_len) - (int)p->l4_off;
	struct ports *ports = l4;

	switch (p->tuple.l4_proto) {
	case IPPROTO_TCP: {
		struct tcphdr *tcp = l4;

		if ((void *)(tcp + 1) > end || room < (int)sizeof(*tcp))
			return REASON_TRUNCATED;
		p->tcp_flags = ((__u8 *)tcp)[13];
		break;
	}
	case IPPROTO_UDP:
		if (l4 + sizeof(struct udphdr) > end || room < (int)sizeof(struct udphdr))
			return REASON_TRUNCATED;
		break;
	case IPPROTO_SCTP:
		if (l4 + 12 > end || room < 12) // SCTP common header (RFC 9260 §3.1)
			return REASON_TRUNCATED;
		p->flags |= PACKET_NO_FLOW; // flows of services only: SCTP ports never change
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if ((p->tuple.l4_proto == IPPROTO_ICMPV6) != v6) {
			p->flags |= PACKET_NO_FLOW;
			return REASON_NONE;
		}
		if (l4 + sizeof(struct icmp_header) > end || room < (int)sizeof(struct icmp_header))
			return REASON_TRUNCATED;
		return parse_icmp(l4, p, v6);
	default:
		p->flags |= PACKET_NO_FLOW;
		return REASON_NONE;
	}
	p->tuple.sport = ports->source;
	p->tuple.dport = ports->dest;
	return REASON_NONE;
}

// Parses the IPv4 header at offset 14. "joined" marks a packet that the kernel segments later (GSO)
// and that may exceed the length field of its header.
static __always_inline enum reason parse_ipv4(void *data, void *end, struct packet *p, bool joined)
{
	struct iphdr *ip = data + ETH_HLEN;
	__u32 header;
	__u16 frag;

	if ((void *)(ip + 1) > end)
		return REASON_TRUNCATED;
	header = ip->ihl * 4;
	p->l3_len = bpf_ntohs(ip->tot_len);
	if (!p->l3_len && joined)
		p->l3_len = p->frame_len - ETH_HLEN;
	if (ip->version != 4 || header < sizeof(*ip) || p->l3_len < header)
		return REASON_BAD_HEADER;
	if (p->frame_len < ETH_HLEN + p->l3_len)
		return REASON_TRUNCATED;
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

static __always_inline bool is_extension(__u8 next)
{
	switch (next) {
	case NEXT_HOP_BY_HOP:
	case NEXT_ROUTING:
	case NEXT_FRAGMENT:
	case NEXT_AUTH:
	case NEXT_DEST:
		return true;
	}
	return false;
}

// Parses the IPv6 header. next_extension handles extension headers.
static __always_inline enum reason parse_ipv6(void *data, void *end, struct packet *p, bool joined)
{
	struct ipv6hdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > end)
		return REASON_TRUNCATED;
	if (ip->version != 6)
		return REASON_BAD_HEADER;
	p->l3_len = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	if (!ip->payload_len && joined)
		p->l3_len = p->frame_len - ETH_HLEN;
	if (p->frame_len < ETH_HLEN + p->l3_len)
		return REASON_TRUNCATED;
	p->ttl = ip->hop_limit;
	p->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	__builtin_memcpy(&p->tuple.saddr, &ip->saddr, 16);
	__builtin_memcpy(&p->tuple.daddr, &ip->daddr, 16);
	p->tuple.l4_proto = ip->nexthdr;
	p->inner_proto = ip->nexthdr;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	p->flags |= PACKET_DF; // only the sender fragments
	if (is_extension(ip->nexthdr)) {
		p->flags |= PACKET_EXTENDED;
		return REASON_NONE;
	}
	return parse_l4(data + p->l4_off, end, p, true);
}

// Reads a fragment header.
static __always_inline void parse_fragment(const struct fragment_header *f, __u32 off, struct packet *p)
{
	p->fragment_at = off - ETH_HLEN;
	p->fragment_next = f->next;
	p->frag_id = f->id;
	p->frag_off = bpf_ntohs(f->offset) & 0xfff8;
	if (f->offset & bpf_htons(1))
		p->flags |= PACKET_MORE;
	if (p->frag_off)
		p->flags |= PACKET_LATER_FRAGMENT;
	else if (p->flags & PACKET_MORE)
		p->flags |= PACKET_FIRST_FRAGMENT;
}

// The state of a walk over the extension headers of a packet.
struct extensions {
	__u32 walked; // headers
	__u32 off;    // offset of the next header
	__u32 next;   // type of the next header
	__u32 reason;
};

// Skips the next extension header. Returns non-zero at the end of the walk, or to drop the packet.
static __always_inline int next_extension(void *data, void *end, struct packet *p, struct extensions *x)
{
	__u32 off = x->off & EXTENDED_OFF, l3_end = ETH_HLEN + p->l3_len; // unchanged, but the verifier needs the bound
	__u8 *header = data + off;

	if (!is_extension(x->next) || p->flags & PACKET_LATER_FRAGMENT)
		return 1;
	x->reason = REASON_TRUNCATED;
	if ((void *)header + 8 > end || off + 8 > l3_end)
		return 1;
	x->reason = REASON_BAD_HEADER;
	if (x->walked++ == EXTENSIONS_MAX)
		return 1;
	switch (x->next) {
	case NEXT_FRAGMENT:
		if (p->fragment_at) // one at most (RFC 8200 §4.1)
			return 1;
		parse_fragment((void *)header, off, p);
		off += sizeof(struct fragment_header);
		break;
	case NEXT_AUTH:
		off += (header[1] + 2) * 4; // RFC 4302 §2.2
		break;
	case NEXT_ROUTING:
		if (header[3] && !p->source_route) // the field "segments left" is not 0
			p->source_route = off - ETH_HLEN + 3;
		// fall through
	default:
		off += (header[1] + 1) * 8;
	}
	if (off > l3_end) {
		x->reason = REASON_TRUNCATED;
		return 1;
	}
	if (off > ETH_HLEN + sizeof(struct ipv6hdr) + EXTENSIONS_BYTES)
		return 1;
	x->off = off;
	x->next = header[0];
	x->reason = REASON_NONE;
	return 0;
}

static __always_inline struct extensions first_extension(const struct packet *p)
{
	return (struct extensions){ .off = ETH_HLEN + sizeof(struct ipv6hdr), .next = p->tuple.l4_proto };
}

// Ends the walk and parses the transport header after the extension headers. A later fragment has
// no transport header.
static __always_inline enum reason parse_behind(void *data, void *end, struct packet *p, const struct extensions *x)
{
	__u32 off = x->off & EXTENDED_OFF; // unchanged, but the verifier needs the bound

	if (x->reason != REASON_NONE)
		return x->reason;
	p->tuple.l4_proto = x->next;
	p->inner_proto = x->next;
	p->l4_off = off;
	return p->flags & PACKET_LATER_FRAGMENT ? REASON_NONE : parse_l4(data + off, end, p, true);
}

#endif
