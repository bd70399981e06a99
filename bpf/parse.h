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
#define JUMBO_SIZE 8	     // of such a header, which BIG TCP packets of IPv6 have
#define EXTENSIONS_MAX 7     // headers walked before a packet is called bad,
#define EXTENSIONS_BYTES 960 // and bytes (RFC 8504 §5.3)
#define EXTENDED_OFF 0x3ff   // bits of ETH_HLEN + 40 + EXTENSIONS_BYTES, the furthest that a header begins

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

// A length as an IP or UDP header states it: 0 where the field is too small, as the kernel writes it into packets that
// are segmented later (BIG TCP).
static __always_inline __be16 stated_len(__u32 len)
{
	return len > 0xffff ? 0 : bpf_htons(len);
}

static __always_inline __u32 now_ticks(void)
{
	return (__u32)bpf_jiffies64();
}

// Whether more ticks than so many have passed since then. Another CPU may have noted "then"
// a moment after this one looked at its clock.
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
	// Not source quench, which is nobody's business any more (RFC 5508 REQ-10c, RFC 6633).
	return type == ICMP4_UNREACHABLE || type == ICMP4_TIME_EXCEEDED || type == ICMP4_PARAMETER ||
	       type == ICMP4_REDIRECT;
}

// ICMP and ICMPv6: which types are queries, answers and errors.
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
	p->tuple.kind = KIND_NONE; // or it would be found with the flow whose identifier is 0
	return REASON_NONE;
}

// Transport header at l4, which ends before end, and before the packet does.
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
		if (l4 + 12 > end || room < 12) // its common header (RFC 9260 §3.1)
			return REASON_TRUNCATED;
		p->flags |= PACKET_NO_FLOW; // but of a service: its ports are never changed
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

// IPv4 header at offset 14. joined: the packet is segmented later (GSO), and may be longer than its header can state.
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

// The same of IPv6. Extension headers are left to next_extension.
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

// What a fragment header says.
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

// A walk over the extension headers of a packet.
struct extensions {
	__u32 walked; // headers
	__u32 off;    // of the next one
	__u32 next;   // what it is
	__u32 reason;
};

// Walks over the next one. Not zero: it was the last one, or the packet is dropped.
static __always_inline int next_extension(void *data, void *end, struct packet *p, struct extensions *x)
{
	__u32 off = x->off & EXTENDED_OFF, l3_end = ETH_HLEN + p->l3_len; // as it was, which the verifier must know
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
		if (header[3] && !p->source_route) // segments left
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

// Ends the walk: the transport header behind the extension headers. What follows the header of a later fragment
// is in the first fragment.
static __always_inline enum reason parse_behind(void *data, void *end, struct packet *p, const struct extensions *x)
{
	__u32 off = x->off & EXTENDED_OFF; // as it was

	if (x->reason != REASON_NONE)
		return x->reason;
	p->tuple.l4_proto = x->next;
	p->inner_proto = x->next;
	p->l4_off = off;
	return p->flags & PACKET_LATER_FRAGMENT ? REASON_NONE : parse_l4(data + off, end, p, true);
}

#endif
