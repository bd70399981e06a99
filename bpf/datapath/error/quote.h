// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The packet that an ICMP error quotes.
#ifndef SLUICE_QUOTE_H
#define SLUICE_QUOTE_H

#include "packet/encap.h"

#define ICMP_SIZE 8

// Skips the extension headers of a quoted IPv6 packet. Returns false if they do not end within the
// quotation. Returns false also for a later fragment, because no host may send errors about one
// (RFC 4443 §2.4 (e)).
static __always_inline bool quoted_extensions(void *ctx, struct quote *q, const bool xdp)
{
	for (int i = 0; i < EXTENSIONS_MAX && is_extension(q->l4_proto); i++) {
		struct fragment_header h; // all extension headers share the first two fields

		if (q->l4_at + sizeof(h) > q->end || !get(ctx, q->l4_at, &h, sizeof(h), xdp))
			return false;
		switch (q->l4_proto) {
		case NEXT_FRAGMENT:
			if (q->fragment || h.offset & bpf_htons(0xfff8))
				return false;
			q->fragment = QUOTE_FRAGMENT | (h.offset & bpf_htons(1) ? QUOTE_MORE : 0);
			q->frag_id = h.id;
			q->l4_at += sizeof(h);
			break;
		case NEXT_AUTH:
			q->l4_at += (h.reserved + 2) * 4;
			break;
		default:
			q->l4_at += (h.reserved + 1) * 8;
		}
		q->l4_proto = h.next;
		if (q->l4_at - q->at > sizeof(struct ipv6hdr) + EXTENSIONS_BYTES)
			return false;
	}
	return !is_extension(q->l4_proto) && q->l4_at <= q->end;
}

#define FIELD_MIN 128 // RFC 4884 §3: minimum length of the quoted packet before an extension

// Returns the padded length of the quoted packet if an extension follows it in the error (RFC 4884
// §4), otherwise 0.
static __always_inline __u32 quoted_field(void *ctx, const struct packet *p, const bool xdp)
{
	bool v6 = p->family == FAMILY_6;
	__u32 at = p->l4_off + (v6 ? 4 : 5), field;
	__u8 length;

	if (v6 ? p->icmp_type != ICMP6_UNREACHABLE && p->icmp_type != ICMP6_TIME_EXCEEDED :
		 p->icmp_type != ICMP4_UNREACHABLE && p->icmp_type != ICMP4_TIME_EXCEEDED &&
			    p->icmp_type != ICMP4_PARAMETER)
		return 0;
	if (!get(ctx, at, &length, 1, xdp))
		return 0;
	field = length * (v6 ? 8 : 4);
	return field >= FIELD_MIN && p->l4_off + ICMP_SIZE + field < ETH_HLEN + p->l3_len ? field : 0;
}

// Computes the end of the quotation: the end of the quoted packet, the start of an extension, or
// the end of the error.
static __always_inline void quote_ends(struct quote *q, const struct packet *p, __u32 len)
{
	__u32 end = q->field ? q->at + q->field : ETH_HLEN + p->l3_len;

	q->end = q->at + len < end ? q->at + len : end;
}

static __always_inline bool read_quote6(void *ctx, const struct packet *p, struct quote *q, const bool xdp)
{
	struct ipv6hdr ip;

	if (q->at + sizeof(ip) > ETH_HLEN + p->l3_len || !get(ctx, q->at, &ip, sizeof(ip), xdp) || ip.version != 6)
		return false;
	quote_ends(q, p, sizeof(ip) + bpf_ntohs(ip.payload_len));
	__builtin_memcpy(&q->saddr, &ip.saddr, 16);
	__builtin_memcpy(&q->daddr, &ip.daddr, 16);
	q->l4_proto = ip.nexthdr;
	q->tos = ip.priority << 4 | ip.flow_lbl[0] >> 4;
	q->ttl = ip.hop_limit;
	q->len = ip.payload_len;
	q->l4_at = q->at + sizeof(ip);
	return quoted_extensions(ctx, q, xdp);
}

static __always_inline bool read_quote4(void *ctx, const struct packet *p, struct quote *q, const bool xdp)
{
	struct iphdr ip;
	__u32 header;

	if (q->at + sizeof(ip) > ETH_HLEN + p->l3_len || !get(ctx, q->at, &ip, sizeof(ip), xdp))
		return false;
	header = ip.ihl * 4;
	if (ip.version != 4 || ip.ihl < 5 || bpf_ntohs(ip.tot_len) < header || ip.frag_off & bpf_htons(IP_OFFSET))
		return false;
	quote_ends(q, p, bpf_ntohs(ip.tot_len));
	if (q->at + header > q->end)
		return false;
	q->saddr.w[0] = ip.saddr;
	q->daddr.w[0] = ip.daddr;
	q->l4_proto = ip.protocol;
	q->tos = ip.tos;
	q->ttl = ip.ttl;
	q->len = ip.tot_len;
	q->frag_id = (__u32)ip.id << 16;
	if (ip.frag_off & bpf_htons(IP_MF))
		q->fragment = QUOTE_FRAGMENT | QUOTE_MORE;
	q->l4_at = q->at + header;
	q->bad = fold16(sum_of(ctx, q->at, header, xdp)) != 0xffff;
	return true;
}

// Reads the ports or the identifier of the quoted packet. Returns false if the quotation is too
// short. Returns false also if the quoted packet is an error: no host may send an error about one
// (RFC 1122 §3.2.2).
static __always_inline bool read_quoted_l4(void *ctx, const struct packet *p, struct quote *q, const bool xdp)
{
	struct icmp_header head; // eight bytes, the minimum of RFC 792
	bool v6 = p->family == FAMILY_6;

	q->no_l4 = 1;
	switch (q->l4_proto) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_SCTP: // the ports identify the flow and never change
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if ((q->l4_proto == IPPROTO_ICMPV6) == v6)
			break;
		// fall through
	default:
		return true;
	}
	if (q->l4_at + sizeof(head) > q->end || !get(ctx, q->l4_at, &head, sizeof(head), xdp))
		return false;
	if (is_icmp(q->l4_proto)) {
		if (icmp_is_error(head.type, v6))
			return false;
		if (!icmp_is_echo(head.type, v6)) {
			q->no_l4 = QUOTE_OTHER_ICMP;
			return true;
		}
		q->sport = head.id;
		q->dport = head.id;
	} else {
		struct ports *ports = (void *)&head;

		q->sport = ports->source;
		q->dport = ports->dest;
	}
	q->no_l4 = q->l4_proto == IPPROTO_SCTP;
	return true;
}

// Reads the headers of the quoted packet and swaps its endpoints: "about" then describes a reply to
// the quoted packet. Returns false if the headers are incomplete.
static __always_inline bool read_quote(void *ctx, const struct packet *p, struct work *w, const bool xdp)
{
	struct packet *about = &w->about;
	struct quote *q = &w->quote;

	__builtin_memset(q, 0, sizeof(*q));
	__builtin_memset(about, 0, sizeof(*about));
	q->at = p->l4_off + ICMP_SIZE;
	q->field = quoted_field(ctx, p, xdp);
	if (!(p->family == FAMILY_6 ? read_quote6(ctx, p, q, xdp) : read_quote4(ctx, p, q, xdp)) ||
	    !read_quoted_l4(ctx, p, q, xdp))
		return false;
	about->tuple.saddr = q->daddr;
	about->tuple.daddr = q->saddr;
	about->tuple.sport = q->dport;
	about->tuple.dport = q->sport;
	about->tuple.l4_proto = q->l4_proto;
	about->tuple.kind = q->no_l4 == QUOTE_OTHER_ICMP ? KIND_NONE : KIND_FLOW;
	about->tuple.state = ENTRY_LIVE;
	about->tcp_flags = TCP_SYN | TCP_ACK; // like the SYN-ACK of a backend
	about->family = p->family;
	about->ifindex = p->ifindex;
	about->now = p->now;
	about->flags = q->no_l4 ? PACKET_NO_FLOW : 0;
	return true;
}

#endif
