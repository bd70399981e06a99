// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// ICMP errors, TCP resets and SYN cookies that Sluice sends to the sender of a packet.
#ifndef SLUICE_ANSWER_H
#define SLUICE_ANSWER_H

#include "error/errorxlat.h"
#include "error/hold.h"

#define RESETS_PER_SECOND 1000
#define QUOTE4_MAX (576 - 28)  // RFC 1812 §4.3.2.3
#define QUOTE6_MAX (1280 - 48) // RFC 4443 §2.4 (c)

// Returns the type of answer for a reason. For most reasons, the plan specifies it.
static __always_inline __u8 answer_of(const struct plan *plan, __u32 reason)
{
	switch (reason) {
	case REASON_TTL_EXCEEDED:
		return ANSWER_TTL_EXCEEDED;
	case REASON_TOO_BIG:
		return ANSWER_TOO_BIG;
	}
	return plan->answer;
}

// Reports whether a packet may be answered. ICMP errors, later fragments, and packets without a
// single sender are never answered (RFC 1812 §4.3.2.7, RFC 4443 §2.4 (e)).
static __always_inline bool answerable(const struct packet *p)
{
	__u32 first = bpf_ntohl(p->tuple.saddr.w[0]) >> 24, dest = bpf_ntohl(p->tuple.daddr.w[0]) >> 24;

	if (p->flags & (PACKET_ERROR | PACKET_LATER_FRAGMENT) || p->tcp_flags & TCP_RST)
		return false;
	if (is_icmp(p->tuple.l4_proto) && p->flags & PACKET_NO_FLOW)
		return false;
	if (p->family == FAMILY_6)
		return first != 0xff && dest != 0xff &&
		       (p->tuple.saddr.d[0] || p->tuple.saddr.w[2] || bpf_ntohl(p->tuple.saddr.w[3]) > 1);
	return first != 0 && first != 127 && first < 224 && dest < 224;
}

// Limits the answers per second, over all CPUs (RFC 1812 §4.3.2.8, RFC 4443 §2.4 (f)).
static __always_inline bool answer_credit(__u32 now, __u32 most)
{
	struct control *c = the_control();

	if (!c)
		return false;
	if (now - c->answer_tick >= hz) {
		c->answer_tick = now;
		c->answers = 0;
	}
	return __sync_fetch_and_add(&c->answers, 1) < most;
}

static __always_inline void icmp_words(struct icmp_header *icmp, const struct plan *plan, __u8 answer, const bool v6)
{
	__builtin_memset(icmp, 0, sizeof(*icmp));
	switch (answer) {
	case ANSWER_TTL_EXCEEDED:
		icmp->type = v6 ? ICMP6_TIME_EXCEEDED : ICMP4_TIME_EXCEEDED;
		return;
	case ANSWER_TOO_BIG:
		icmp->type = v6 ? ICMP6_TOO_BIG : ICMP4_UNREACHABLE;
		icmp->code = v6 ? 0 : 4;
		*(__be32 *)&icmp->id = bpf_htonl(plan->mtu);
		return;
	case ANSWER_SOURCE_ROUTE:
		icmp->type = v6 ? ICMP6_PARAMETER : ICMP4_UNREACHABLE;
		icmp->code = v6 ? 0 : 5;
		if (v6)
			*(__be32 *)&icmp->id = bpf_htonl(plan->mtu); // for a parameter problem, mtu holds the pointer
		return;
	case ANSWER_PROHIBITED:
		icmp->type = v6 ? ICMP6_UNREACHABLE : ICMP4_UNREACHABLE;
		icmp->code = v6 ? 1 : 13;
		return;
	case ANSWER_NO_ROUTE:
		icmp->type = v6 ? ICMP6_UNREACHABLE : ICMP4_UNREACHABLE;
		return;
	case ANSWER_UNREACHABLE_HOST:
	case ANSWER_UNREACHABLE_ROUTE:
		icmp->type = v6 ? ICMP6_UNREACHABLE : ICMP4_UNREACHABLE;
		icmp->code = !v6 ? 1 : answer == ANSWER_UNREACHABLE_HOST ? 3 : 0;
		return;
	}
	icmp->type = v6 ? ICMP6_UNREACHABLE : ICMP4_UNREACHABLE;
	icmp->code = v6 ? 4 : 3;
}

// ICMP errors have precedence 6 (internetwork control) and the type of service of the packet that
// caused them (RFC 1812 §4.3.2.5; icmp_send in Linux).
#define OWN_ERROR_TOS(tos) (0xc0 | ((tos) & 0x1e))

static __always_inline bool put_own_header(void *ctx, const union addr *from, const union addr *to, __u8 l4_proto,
					   __u8 tos, __u32 payload, __u16 frag, const bool v6, const bool xdp)
{
	if (v6) {
		struct ipv6hdr ip = {};

		*(__u32 *)&ip = bpf_htonl(6U << 28);
		ip.payload_len = bpf_htons(payload);
		ip.nexthdr = l4_proto;
		ip.hop_limit = 64;
		__builtin_memcpy(&ip.saddr, from, 16);
		__builtin_memcpy(&ip.daddr, to, 16);
		return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp);
	}
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tos = tos,
		.tot_len = bpf_htons(sizeof(ip) + payload),
		.frag_off = bpf_htons(frag),
		.ttl = 64,
		.protocol = l4_proto,
		.saddr = from->w[0],
		.daddr = to->w[0],
	};
	__u32 *w = (__u32 *)&ip;

	ip.check = ~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp);
}

// Writes the Ethernet header of an answer, with source and destination swapped.
static __always_inline bool put_own_ethhdr(void *ctx, const __u8 *macs, const bool v6, const bool xdp)
{
	__be16 type = v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	__u8 back[ETH_HLEN];

	__builtin_memcpy(back, macs + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(back + ETH_ALEN, macs, ETH_ALEN);
	__builtin_memcpy(back + 2 * ETH_ALEN, &type, 2);
	if (xdp)
		return put(ctx, 0, back, sizeof(back), true);
	return !bpf_skb_store_bytes(ctx, 0, back, sizeof(back), 0);
}

// Returns the sum of the quoted packet. If "later" is set, the kernel completes the checksum of the
// segment. The quoted part of the segment then sums to the complement of its present checksum
// field.
static __always_inline __u64 sum_quoted(void *ctx, const struct packet *p, __u32 at, __u32 quoted, bool later,
					const bool xdp)
{
	__u32 header = header_now(p), check_at = header + check_offset(p->tuple.l4_proto);
	__u16 seed;

	if (!later || check_at + 2 > quoted || !get(ctx, at + check_at, &seed, 2, xdp))
		return sum_of(ctx, at, quoted, xdp);
	return sum_of(ctx, at, header, xdp) + (__u16)~seed;
}

// Returns the checksum of a segment that replaces the packet, from the sums of its pseudo-header
// and of its words. If the kernel completes the checksum ("later"), the field contains the sum of
// the pseudo-header.
static __always_inline __u16 answer_check(__u64 pseudo, __u64 words, bool later)
{
	return later ? fold16(pseudo) : (__u16)~fold16(pseudo + words);
}

// Replaces the packet by an ICMP error that quotes it.
static __always_inline bool answer_error(void *ctx, const struct packet *p, const struct plan *plan, __u8 answer,
					 const bool v6, const bool xdp)
{
	__u32 ifindex = p->ifindex, quoted = p->l3_len, at, room;
	struct interface_addr *own = bpf_map_lookup_elem(&interfaces, &ifindex);
	const __u32 header = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr), most = v6 ? QUOTE6_MAX : QUOTE4_MAX;
	struct icmp_header icmp;
	__u8 macs[2 * ETH_ALEN];
	union addr from;
	bool later;
	__u64 sum;

	if (!own)
		return false;
	from = v6 ? own->v6 : own->v4;
	if (!from.w[0] || !get(ctx, 0, macs, sizeof(macs), xdp))
		return false;
	if (quoted > most)
		quoted = most;
	room = header + ICMP_SIZE;
	later = summed_later(ctx, p, p->l4_off, xdp);
	if (xdp ? bpf_xdp_adjust_head(ctx, -(int)room) :
		  bpf_skb_adjust_room(ctx, room, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	at = ETH_HLEN + header;
	icmp_words(&icmp, plan, answer, v6);
	if (!put(ctx, at, &icmp, sizeof(icmp), xdp))
		return false;
	sum = sum_of(ctx, at, ICMP_SIZE, xdp) + sum_quoted(ctx, p, at + ICMP_SIZE, quoted, later, xdp);
	if (v6)
		sum += sum_ends(&from, &p->tuple.saddr, true) + bpf_htons(ICMP_SIZE + quoted) +
		       bpf_htons(IPPROTO_ICMPV6);
	icmp.check = ~fold16(sum);
	return put(ctx, at + ICMP_CHECK, &icmp.check, 2, xdp) &&
	       put_own_header(ctx, &from, &p->tuple.saddr, v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP, OWN_ERROR_TOS(p->tos),
			      ICMP_SIZE + quoted, 0, v6, xdp) &&
	       put_own_ethhdr(ctx, macs, v6, xdp) && truncate(ctx, p->frame_len + room, ETH_HLEN + room + quoted, xdp);
}

// Replaces the packet by the TCP reset for a closed port (RFC 9293 §3.10.7.1).
static __always_inline bool answer_reset(void *ctx, const struct packet *p, const bool v6, const bool xdp)
{
	const __u32 header = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u32 now = header_now(p), want = header + sizeof(struct tcphdr), len;
	bool later = summed_later(ctx, p, p->l4_off, xdp);
	struct tcphdr tcp, out = {};
	__u8 macs[2 * ETH_ALEN];
	__u64 sum;

	if ((later && now != header) || // the kernel would write the checksum at the wrong offset
	    !get(ctx, p->l4_off, &tcp, sizeof(tcp), xdp) || !get(ctx, 0, macs, sizeof(macs), xdp))
		return false;
	out.source = tcp.dest;
	out.dest = tcp.source;
	out.doff = sizeof(out) / 4;
	out.rst = 1;
	if (tcp.ack) {
		out.seq = tcp.ack_seq;
	} else {
		len = p->l3_len - now - tcp.doff * 4 + tcp.syn + tcp.fin;
		out.ack = 1;
		out.ack_seq = bpf_htonl(bpf_ntohl(tcp.seq) + len);
	}
	sum = sum_ends(&p->tuple.saddr, &p->tuple.daddr, v6) + bpf_htons(sizeof(out)) + bpf_htons(IPPROTO_TCP);
	out.check = answer_check(sum, sum_words((__u32 *)&out, sizeof(out) / 4), later);
	return put(ctx, ETH_HLEN + header, &out, sizeof(out), xdp) &&
	       put_own_header(ctx, &p->tuple.daddr, &p->tuple.saddr, IPPROTO_TCP, 0, sizeof(out), IP_DF, v6, xdp) &&
	       put_own_ethhdr(ctx, macs, v6, xdp) && truncate(ctx, p->frame_len, ETH_HLEN + want, xdp);
}

// Replaces a SYN by a SYN-ACK with a cookie. Its window is 0, because data that arrives before the
// backend's answer would be lost. If the SYN has no room for the MSS option, the option is omitted.
static __always_inline bool answer_cookie(void *ctx, const struct packet *p, const struct plan *plan, const bool v6,
					  const bool xdp)
{
	const __u32 header = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	struct syn_segment out = { .kind = TCP_OPTION_MSS, .size = TCP_OPTION_MSS_SIZE, .mss = bpf_htons(plan->mtu) };
	bool later = summed_later(ctx, p, p->l4_off, xdp);
	__u32 size = sizeof(out);
	struct tcphdr tcp;
	__u8 macs[2 * ETH_ALEN];
	__u64 sum;

	if ((later && header_now(p) != header) || !get(ctx, p->l4_off, &tcp, sizeof(tcp), xdp) ||
	    !get(ctx, 0, macs, sizeof(macs), xdp))
		return false;
	if (p->l3_len < header_now(p) + size) {
		out.kind = out.size = out.mss = 0;
		size = sizeof(tcp);
	}
	out.tcp.source = tcp.dest;
	out.tcp.dest = tcp.source;
	out.tcp.seq = bpf_htonl(plan->record);
	out.tcp.ack_seq = bpf_htonl(bpf_ntohl(tcp.seq) + 1);
	out.tcp.doff = size / 4;
	out.tcp.syn = 1;
	out.tcp.ack = 1;
	sum = sum_ends(&p->tuple.saddr, &p->tuple.daddr, v6) + bpf_htons(size) + bpf_htons(IPPROTO_TCP);
	out.tcp.check = answer_check(sum, sum_words((__u32 *)&out, sizeof(out) / 4), later);
	if (!(size == sizeof(out) ? put(ctx, ETH_HLEN + header, &out, sizeof(out), xdp) :
				    put(ctx, ETH_HLEN + header, &out.tcp, sizeof(out.tcp), xdp)))
		return false;
	return put_own_header(ctx, &p->tuple.daddr, &p->tuple.saddr, IPPROTO_TCP, 0, size, IP_DF, v6, xdp) &&
	       put_own_ethhdr(ctx, macs, v6, xdp) && truncate(ctx, p->frame_len, ETH_HLEN + header + size, xdp);
}

static __always_inline int answer(void *ctx, const struct packet *p, const struct plan *plan, __u8 kind, const bool xdp)
{
	if (!answerable(p))
		return 0;
	if (have_cookies && kind == ANSWER_COOKIE)
		return p->family == FAMILY_6 ? answer_cookie(ctx, p, plan, true, xdp) :
					       answer_cookie(ctx, p, plan, false, xdp);
	if (!answer_credit(p->now, kind == ANSWER_RESET ? RESETS_PER_SECOND : errors_per_second))
		return 0;
	if (kind == ANSWER_RESET)
		return p->family == FAMILY_6 ? answer_reset(ctx, p, true, xdp) : answer_reset(ctx, p, false, xdp);
	return p->family == FAMILY_6 ? answer_error(ctx, p, plan, kind, true, xdp) :
				       answer_error(ctx, p, plan, kind, false, xdp);
}

// Returns 1 if the frame is now an answer to the packet's sender.
BOTH_HOOKS(int, answer, !p || !plan ? 0 : answer(ctx, p, plan, kind, xdp), const struct packet *p,
	   const struct plan *plan, __u32 kind)

#endif
