// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The straight path of plain traffic: a whole TCP or UDP packet of a settled flow
// with a next hop that is known. It is made of the steps of the full path, with the
// packet and the plan in registers, and leaves to the full path whatever is not
// plain before it has written anything.
#ifndef SLUICE_FAST_H
#define SLUICE_FAST_H

#include "xlat.h"

// Whether a frame may hold a packet that the straight path knows: it has plain
// headers of TCP or UDP. Looked at before parsing, so that the compiler leaves all
// else out of it.
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

// The largest network packet that a packet becomes on the wire; gso_size is 0 for
// one that is not cut.
static __always_inline __u32 segment_of(const struct packet *p, __u32 gso_size)
{
	if (!gso_size)
		return p->l3_len;
	return p->l4_off - ETH_HLEN + (p->tuple.l4_proto == IPPROTO_TCP ? sizeof(struct tcphdr) : 8) + gso_size;
}

// The flow and the next hop of a packet, or null. The flow counts the packet: after
// this it is sent.
static __always_inline struct hop *fast_flow(const struct packet *p, struct plan *plan, const bool v6)
{
	__u32 index, at, size;
	void *e = search_entry(&p->tuple, &index, v6);
	struct entry_meta *m;
	struct hop *h;

	if (!e)
		return 0;
	m = meta_of(e, v6);
	if (m->twin == NO_ENTRY || !conn_plain(p, m))
		return 0;
	plan_flow(plan, e, index, v6);
	if (p->flags & PACKET_NO_FLOW)
		plan->flags |= PLAN_NO_L4;
	if (!hop_current(plan, m->hop_gen, p->now, false))
		return 0;
	at = plan->hop;
	h = bpf_map_lookup_elem(&hops, &at);
	if (!h)
		return 0;
	size = p->segment;
	if (plan->family != p->family)
		size += v6 ? -20 : 20;
	if (size > largest(p, plan, h->mtu))
		return 0;
	touch(p, e, v6);
	return h;
}

// Counts a packet, and leaves what tests look at.
static __always_inline void fast_count(const struct plan *plan, const bool v6)
{
	struct work *w;

	count(v6 ? FAMILY_6 : FAMILY_4, ACTION_FORWARD, REASON_FLOW);
	if (!observed)
		return;
	w = the_work();
	if (!w)
		return;
	w->plan.action = ACTION_FORWARD;
	w->plan.reason = REASON_FLOW;
	w->plan.hop = plan->hop;
}

// Parses and finds the flow; null for the full path.
static __always_inline struct hop *fast_hop(struct packet *p, struct plan *plan, void *data, void *end, __u32 gso_size,
					    const bool v6)
{
	if (have_rules || dry_run || straight_off || !fast_frame(data, end, v6))
		return 0;
	p->family = v6 ? FAMILY_6 : FAMILY_4;
	p->now = now_ticks();
	if ((v6 ? parse_ipv6(data, end, p) : parse_ipv4(data, end, p)) != REASON_NONE)
		return 0;
	if (p->frame_len < ETH_HLEN + p->l3_len)
		return 0;
	p->segment = segment_of(p, gso_size);
	return fast_flow(p, plan, v6);
}

// Into the other family, as translate does it, and on to the next hop: plain headers
// have known sizes, so that each side of the change takes one comparison.
static __always_inline int xdp_cross(struct xdp_md *ctx, const struct packet *p, struct plan *plan, const struct hop *h,
				     const bool to_v6)
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
	if (udp && !*check) // needs a checksum made, or has none
		return translate(ctx, p, plan, to_v6, true) == REASON_NONE ? xdp_send(ctx, h) : XDP_ABORTED;
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
		header4((void *)(eth + 1), p, plan, payload);
	return xdp_send(ctx, h);
}

// The verdict for a packet, or -1 for the full path.
static __always_inline int xdp_fast(struct xdp_md *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct plan plan = {};
	struct packet p = {};
	struct hop *h;

	p.frame_len = end - data;
	h = fast_hop(&p, &plan, data, end, 0, v6);
	if (!h)
		return -1;
	fast_count(&plan, v6);
	if (plan.family != p.family)
		return xdp_cross(ctx, &p, &plan, h, !v6);
	return xdp_rewrite(ctx, &p, &plan, v6) == REASON_NONE ? xdp_send(ctx, h) : XDP_ABORTED;
}

static __always_inline int tc_fast(struct __sk_buff *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct plan plan = {};
	struct packet p = {};
	enum reason reason;
	struct hop *h;

	p.frame_len = ctx->len;
	h = fast_hop(&p, &plan, data, end, ctx->gso_size, v6);
	if (!h)
		return -1;
	reason = plan.family == p.family ? tc_rewrite(ctx, &p, &plan, v6) : translate(ctx, &p, &plan, !v6, false);
	if (reason != REASON_NONE)
		return TC_ACT_SHOT;
	fast_count(&plan, v6);
	return tc_send(ctx, h);
}

// Frames of their own: what the straight path spills is gone when the full path
// goes deep.
static __noinline int xdp_fast4(struct xdp_md *ctx)
{
	return xdp_fast(ctx, false);
}

static __noinline int xdp_fast6(struct xdp_md *ctx)
{
	return xdp_fast(ctx, true);
}

static __noinline int tc_fast4(struct __sk_buff *ctx)
{
	return tc_fast(ctx, false);
}

static __noinline int tc_fast6(struct __sk_buff *ctx)
{
	return tc_fast(ctx, true);
}

#endif
