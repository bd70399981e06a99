// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The fast path: whole TCP or UDP packets of existing flows with a cached next hop. It consists of
// the steps of the full path, with the packet and the plan in registers. All other packets are left
// to the full path, unmodified.
#ifndef SLUICE_FAST_H
#define SLUICE_FAST_H

#include "packet/xlat.h"

// Reports whether a frame may contain a packet for the fast path: plain TCP or UDP headers. This
// check precedes parsing, so that the compiler omits all other cases from the parser.
static __always_inline bool fast_frame(void *data, void *end, const bool v6)
{
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct iphdr *ip = data + ETH_HLEN;

	if (v6)
		return (void *)(ip6 + 1) <= end && (ip6->nexthdr == IPPROTO_TCP || ip6->nexthdr == IPPROTO_UDP) &&
		       ip6->hop_limit > 1;
	return (void *)(ip + 1) <= end && *(__u8 *)ip == 0x45 && !(ip->frag_off & bpf_htons(~IP_DF & 0xffff)) &&
	       (ip->protocol == IPPROTO_TCP || ip->protocol == IPPROTO_UDP) && ip->ttl > 1;
}

// Reports whether the full path handles packets with these TCP flags: a SYN may open a connection, a
// reset may be refused.
static __always_inline bool full_only(__u8 tcp_flags)
{
	if (have_edits)
		return tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST);
	return tcp_flags & TCP_RST || (tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

// Reports whether the full path handles a packet with plain headers because of its TCP flags.
static __always_inline bool opens_or_resets(void *data, void *end, const bool v6)
{
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct iphdr *ip = data + ETH_HLEN;
	__u8 *tcp = v6 ? (void *)(ip6 + 1) : (void *)(ip + 1);

	return (v6 ? ip6->nexthdr : ip->protocol) == IPPROTO_TCP && (void *)(tcp + 14) <= end && full_only(tcp[13]);
}

// Returns the length of the largest segment of a packet on the wire. gso_size: 0 if the packet is
// not segmented. Each TCP segment has all options.
static __always_inline __u32 segment_of(const struct packet *p, void *data, void *end, __u32 gso_size)
{
	__u8 *tcp = data + (p->l4_off & 0x7ff);
	__u32 header = sizeof(struct udphdr);

	if (!gso_size)
		return p->l3_len;
	if (p->tuple.l4_proto == IPPROTO_TCP) {
		header = sizeof(struct tcphdr);
		if ((void *)(tcp + header) <= end)
			header = (tcp[12] >> 4) * 4;
	}
	if (p->l3_len > sizeof(struct ipv6hdr) + 0xffff && p->flags & PACKET_EXTENDED)
		header -= JUMBO_SIZE; // TCP segments have no jumbogram option
	return p->l4_off - ETH_HLEN + header + gso_size;
}

// The flow of a packet.
struct found {
	void *entry;
	__u32 index; // index of the entry
	struct hop *hop;
	bool cross;  // the packet is translated to the other family
	__be16 id;   // identification of the new IPv4 header
	bool absent; // the table has no flow of the packet
};

// Results of the fast path for packets that it leaves to the full path.
#define NOT_FAST -1
#define NO_FLOW_HERE -2 // the table has no flow of the packet, so that the full path need not search
#define FOR_GROUP -3 // a broadcast or multicast packet, which the fast path does not examine

// Returns an IPv4 identification. Each flow counts from an unpredictable start (RFC 7739 §5.3), so
// that no value repeats within 65,536 packets.
static __always_inline __be16 fast_id(__u32 index, __u64 packets)
{
	return (index * hash_multiplier >> 48) + packets;
}

// Reports whether an IPv4 UDP datagram has a checksum, or can get one for IPv6 (see udp_checksum).
static __always_inline bool summable(const struct packet *p, void *data, void *end)
{
	struct udphdr *udp = data + ETH_HLEN + sizeof(struct iphdr);

	if (p->tuple.l4_proto != IPPROTO_UDP)
		return true;
	if ((void *)(udp + 1) > end)
		return false;
	return udp->check || (bpf_ntohs(udp->len) == p->l3_len - sizeof(struct iphdr) && p->l3_len <= SUM_MOST);
}

// Updates the state of the flow for a packet that is sent. This is the last step, because few
// registers are then in use.
static __always_inline void fast_state(const struct packet *p, const struct found *s, const bool v6)
{
	struct entry_meta *m = meta_of(s->entry, v6);

	if (!have_edits && !conn_plain(p, m) && conn_changed(p, m, v6))
		flow_closed(s->index, v6);
}

// Looks up the flow and the next hop of a packet, and adds the packet to the flow's counters. The
// caller must then send it.
static __always_inline bool fast_flow(const struct packet *p, struct found *s, void *data, void *end, const bool v6,
				      const bool xdp)
{
	const __u8 other = v6 ? FAMILY_4 : FAMILY_6;
	__u32 index, size = p->segment;
	struct entry_meta *m;

	s->entry = search_hinted(&p->tuple, &index, p->tcp_flags & (TCP_SYN | TCP_FIN), v6);
	if (!s->entry) {
		s->absent = true;
		return false;
	}
	m = meta_of(s->entry, v6);
	if (m->twin == NO_ENTRY || m->heard & HEARD_EDITED || (have_edits && !conn_plain(p, m)))
		return false;
	s->hop = hop_remembered(m->hop, m->hop_gen, p->ifindex);
	if (!s->hop || !hop_fresh(s->hop, p->now) || !hop_usable(s->hop, xdp))
		return false;
	s->cross = m->flags & ENTRY_CROSS;
	if (s->cross && !v6 && !summable(p, data, end))
		return false;
	if (s->cross)
		size += v6 ? -20 : 20;
	if (size > largest(p, s->cross ? other : p->family, s->hop->mtu))
		return false;
	touch(p, s->entry, v6);
	s->index = index;
	s->id = fast_id(index, *(__u64 *)s->entry);
	return true;
}

// Counts a packet, and stores the outcome for tests.
static __always_inline void fast_count(const struct found *s, const bool v6)
{
	struct work *w;

	count_one(v6 ? FAMILY_6 : FAMILY_4, ACTION_FORWARD, REASON_FLOW);
	if (!observed)
		return;
	w = the_work();
	if (!w)
		return;
	w->plan.action = ACTION_FORWARD;
	w->plan.reason = REASON_FLOW;
	w->plan.hop = meta_of(s->entry, v6)->hop;
}

// Parses a packet and looks up its flow. False: the packet takes the full path.
static __always_inline bool fast_find(struct packet *p, struct found *s, void *data, void *end, __u32 gso_size,
				      const bool v6, const bool xdp)
{
	p->now = now_ticks(); // before the packet is read, because a call makes the compiler read the packet again
	if (have_rules || dry_run || straight_off || !fast_frame(data, end, v6) || opens_or_resets(data, end, v6))
		return false;
	p->family = v6 ? FAMILY_6 : FAMILY_4;
	if ((v6 ? parse_ipv6(data, end, p, gso_size) : parse_ipv4(data, end, p, gso_size)) != REASON_NONE)
		return false;
	if (p->frame_len < ETH_HLEN + p->l3_len)
		return false;
	p->segment = segment_of(p, data, end, gso_size);
	return fast_flow(p, s, data, end, v6, xdp);
}

// Translates a packet to the other family and sends it, like translate. Plain headers have known
// sizes, so that one bounds check before the translation and one after it are sufficient.
static __always_inline int xdp_cross(struct xdp_md *ctx, const struct packet *p, struct plan *plan,
				     const struct found *s, const bool to_v6)
{
	const int now = to_v6 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	const int then = to_v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ports *ports = data + ETH_HLEN + now;
	bool udp = p->tuple.l4_proto == IPPROTO_UDP;
	__u16 *check = (void *)ports + (udp ? UDP_CHECK : TCP_CHECK);
	__u32 payload = p->l3_len - now;
	struct ethhdr *eth;
	__u64 delta;

	if ((void *)(ports + 2) > end || (void *)(check + 1) > end)
		return XDP_ABORTED;
	if (udp && !*check) // the checksum must be computed, or remains absent
		return translate(ctx, p, plan, to_v6, true) == REASON_NONE ? xdp_send(ctx, s->hop) : XDP_ABORTED;
	delta = minus(sum_ends(&p->tuple.saddr, &p->tuple.daddr, !to_v6)) +
		sum_ends(&plan->to.saddr, &plan->to.daddr, to_v6) + change(p->tuple.sport, plan->to.sport) +
		change(p->tuple.dport, plan->to.dport);
	*check = check_after(*check, delta);
	if (udp && !*check)
		*check = 0xffff;
	ports->source = plan->to.sport;
	ports->dest = plan->to.dport;
	if (bpf_xdp_adjust_head(ctx, now - then))
		return XDP_ABORTED;
	eth = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if ((void *)(eth + 1) + then > end)
		return XDP_ABORTED;
	eth->h_proto = to_v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	if (to_v6)
		header6((void *)(eth + 1), p, plan, payload);
	else
		header4((void *)(eth + 1), p, plan, payload, s->id);
	return xdp_send(ctx, s->hop);
}

// Returns the verdict for a packet, NOT_FAST or NO_FLOW_HERE.
static __always_inline int xdp_fast(struct xdp_md *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct found s = {};
	struct plan plan = {};
	struct packet p = {};
	int verdict = XDP_ABORTED;

	p.frame_len = end - data;
	p.ifindex = ctx->ingress_ifindex;
	if (!fast_find(&p, &s, data, end, 0, v6, true))
		return s.absent ? NO_FLOW_HERE : NOT_FAST;
	fast_count(&s, v6);
	if (have_family_change && s.cross) {
		plan_cross(&plan, s.entry, v6);
		plan.to.l4_proto = p.tuple.l4_proto; // TCP and UDP have the same number in both families
		verdict = xdp_cross(ctx, &p, &plan, &s, !v6);
	} else {
		plan_same(&plan, s.entry, v6);
		if (xdp_rewrite(ctx, &p, &plan, v6) == REASON_NONE)
			verdict = xdp_send(ctx, s.hop);
	}
	fast_state(&p, &s, v6);
	return verdict;
}

static __always_inline int tc_fast(struct __sk_buff *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	enum reason reason;
	struct found s = {};
	struct plan plan = {};
	struct packet p = {};

	p.frame_len = ctx->len;
	p.ifindex = ctx->ingress_ifindex;
	if (!fast_find(&p, &s, data, end, ctx->gso_size, v6, false))
		return s.absent ? NO_FLOW_HERE : NOT_FAST;
	if (have_family_change && s.cross) {
		plan_cross(&plan, s.entry, v6);
		reason = translate(ctx, &p, &plan, !v6, false);
	} else {
		plan_same(&plan, s.entry, v6);
		reason = tc_rewrite(ctx, &p, &plan, v6);
	}
	if (reason != REASON_NONE)
		return TC_ACT_SHOT;
	fast_count(&s, v6);
	fast_state(&p, &s, v6);
	return tc_send(ctx, s.hop);
}

// Separate stack frames, so that spills of the fast path do not add to the stack of the full path.
BOTH_HOOKS(static int, fast4, BY_HOOK(fast, ctx, false))

BOTH_HOOKS(static int, fast6, BY_HOOK(fast, ctx, true))

#endif
