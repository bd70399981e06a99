// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The datapath: one core, two hooks. Read in this order: types.h, maps.h,
// parse.h, conn.h, nat.h, schedule.h, lb.h, snat.h, stateless.h, decide.h,
// rewrite.h, sweep.h; each packet goes parse -> decide -> plan -> apply, and
// leaves through one exit that counts why.
#include "rewrite.h"
#include "sweep.h"

char _license[] SEC("license") = "Dual BSD/GPL";

static __always_inline void init(struct packet *p, struct plan *plan, __u32 ifindex, int drop,
				 const bool v6)
{
	__builtin_memset(p, 0, sizeof(*p));
	__builtin_memset(plan, 0, sizeof(*plan));
	p->family = v6 ? FAMILY_6 : FAMILY_4;
	p->ifindex = ifindex;
	p->now = now_ticks();
	p->tuple.state = ENTRY_LIVE;
	plan->entry = NO_ENTRY;
	plan->backend_hop = NO_ENTRY;
	plan->verdict = drop;
}

// A local socket goes before a binding of the same port.
static __always_inline bool socket_here(void *ctx, const struct packet *p)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 size;

	if (p->family == FAMILY_6) {
		__builtin_memcpy(t.ipv6.saddr, &p->tuple.saddr, 16);
		__builtin_memcpy(t.ipv6.daddr, &p->tuple.daddr, 16);
		t.ipv6.sport = p->tuple.sport;
		t.ipv6.dport = p->tuple.dport;
		size = sizeof(t.ipv6);
	} else {
		t.ipv4.saddr = p->tuple.saddr.w[0];
		t.ipv4.daddr = p->tuple.daddr.w[0];
		t.ipv4.sport = p->tuple.sport;
		t.ipv4.dport = p->tuple.dport;
		size = sizeof(t.ipv4);
	}
	if (p->tuple.l4_proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, &t, size, BPF_F_CURRENT_NETNS, 0);
	else if (p->tuple.l4_proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, &t, size, BPF_F_CURRENT_NETNS, 0);
	else
		return false;
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

static __always_inline bool to_local_pool(const struct packet *p)
{
	__u32 *number = bpf_map_lookup_elem(&pool_numbers, &p->tuple.daddr), n;
	struct pool_addr *address;

	if (!number)
		return false;
	n = *number;
	address = bpf_map_lookup_elem(&pools, &n);
	return address && address->local;
}

// Everything that happens once a flow: sockets and routes of the untranslated
// packet, then the decision.
static __always_inline int miss(void *ctx, struct packet *p, struct plan *plan)
{
	if (have_pools && to_local_pool(p) && socket_here(ctx, p))
		return REASON_LOCAL_SOCKET;
	if (have_nat && nat_by_egress) {
		struct work *w = the_work();
		struct bpf_fib_lookup *fib;

		if (!w)
			return REASON_INTERNAL;
		plan->to = p->tuple;
		plan->family = p->family;
		plan->gateway = p->tuple.daddr;
		plan->gateway_family = p->family;
		fib = (void *)w->fib;
		fib_request(fib, p, plan);
		switch (bpf_fib_lookup(ctx, fib, sizeof(*fib), 0)) {
		case BPF_FIB_LKUP_RET_SUCCESS:
		case BPF_FIB_LKUP_RET_NO_NEIGH:
			p->out = fib->ifindex;
		}
	}
	return decide_miss(p, plan);
}

__noinline int xdp_miss(struct xdp_md *ctx, struct packet *p, struct plan *plan)
{
	return p && plan ? miss(ctx, p, plan) : REASON_INTERNAL;
}

__noinline int tc_miss(struct __sk_buff *ctx, struct packet *p, struct plan *plan)
{
	return p && plan ? miss(ctx, p, plan) : REASON_INTERNAL;
}

__noinline int xdp_extensions(struct xdp_md *ctx, struct packet *p)
{
	return p ? parse_extensions((void *)(long)ctx->data, (void *)(long)ctx->data_end, p) : REASON_INTERNAL;
}

__noinline int tc_extensions(struct __sk_buff *ctx, struct packet *p)
{
	return p ? parse_extensions((void *)(long)ctx->data, (void *)(long)ctx->data_end, p) : REASON_INTERNAL;
}

// Firewall and fragments: what comes before the flow table, when it comes.
static __always_inline enum reason before_flow(struct packet *p, struct plan *plan)
{
	enum reason reason;

	if (p->flags & PACKET_LATER_FRAGMENT) {
		reason = fragment_later(p);
		if (reason != REASON_NONE)
			return reason;
		plan->flags |= PLAN_NO_L4;
	}
	if (have_rules) {
		reason = firewall(p);
		if (reason != REASON_NONE)
			return reason;
	}
	if (p->flags & PACKET_FIRST_FRAGMENT)
		fragment_first(p);
	return REASON_NONE;
}

static __always_inline bool before_flow_needed(const struct packet *p)
{
	return have_rules || p->flags & (PACKET_LATER_FRAGMENT | PACKET_FIRST_FRAGMENT);
}

// What a plan's route decides. REASON_NONE: send.
static __always_inline enum reason after_route(struct plan *plan, enum reason routed)
{
	if (routed != REASON_NONE && routed != REASON_NO_ROUTE)
		plan->flags |= PLAN_KERNEL; // the kernel knows more
	return routed;
}

// The common part of both hooks' apply: next hop, TTL, size. h: null when the
// kernel is to send it.
static __always_inline enum reason ready(const struct packet *p, struct plan *plan, enum reason routed, struct hop **h)
{
	*h = 0;
	if (routed == REASON_NO_ROUTE)
		return routed;
	if (p->ttl <= 1)
		return REASON_TTL_EXCEEDED;
	if (plan->flags & PLAN_KERNEL)
		return routed;
	*h = hop_of(plan);
	if (!*h)
		return REASON_INTERNAL;
	if (p->segment > (*h)->mtu) {
		if (p->flags & PACKET_DF) {
			plan->mtu = (*h)->mtu;
			return REASON_TOO_BIG;
		}
		*h = 0;
		plan->flags |= PLAN_KERNEL;
		return REASON_TO_FRAGMENT;
	}
	return REASON_NONE;
}

static __always_inline int xdp_apply(struct xdp_md *ctx, struct packet *p, struct plan *plan, const bool v6)
{
	enum reason reason = REASON_NONE;
	struct hop *h;

	if (!hop_current(plan, plan->hop_gen, p->now))
		reason = after_route(plan, xdp_route(ctx, p, plan));
	reason = ready(p, plan, reason, &h);
	if (dry_run || (reason != REASON_NONE && action_of(reason) == ACTION_DROP))
		return reason;
	if (xdp_rewrite(ctx, p, plan, v6) != REASON_NONE)
		return REASON_INTERNAL;
	if (h)
		plan->verdict = xdp_send(ctx, p, h);
	return reason;
}

static __always_inline int tc_apply(struct __sk_buff *ctx, struct packet *p, struct plan *plan, const bool v6)
{
	enum reason reason = REASON_NONE;
	struct hop *h;

	if (!hop_current(plan, plan->hop_gen, p->now))
		reason = after_route(plan, tc_route(ctx, p, plan));
	reason = ready(p, plan, reason, &h);
	if (dry_run || (reason != REASON_NONE && action_of(reason) == ACTION_DROP))
		return reason;
	if (tc_rewrite(ctx, p, plan, v6) != REASON_NONE)
		return REASON_INTERNAL;
	if (h)
		plan->verdict = tc_send(ctx, h);
	return reason;
}

static __noinline int xdp_apply4(struct xdp_md *ctx, struct packet *p, struct plan *plan)
{
	return xdp_apply(ctx, p, plan, false);
}

static __noinline int xdp_apply6(struct xdp_md *ctx, struct packet *p, struct plan *plan)
{
	return xdp_apply(ctx, p, plan, true);
}

static __always_inline int xdp_ip(struct xdp_md *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct work *w = the_work();
	int verdict = XDP_DROP;
	enum reason reason, applied;
	struct packet *p;
	struct plan *plan;
	__u8 action;

	if (!w)
		return XDP_ABORTED;
	p = &w->packet;
	plan = &w->plan;
	init(p, plan, ctx->ingress_ifindex, verdict, v6);
	reason = v6 ? parse_ipv6(data, end, p) : parse_ipv4(data, end, p);
	if (v6 && p->flags & PACKET_EXTENDED && reason == REASON_NONE)
		reason = xdp_extensions(ctx, p);
	p->segment = p->l3_len;
	if (reason == REASON_NONE && before_flow_needed(p))
		reason = before_flow(p, plan);
	if (reason == REASON_NONE)
		reason = v6 ? decide_flow6(p, plan) : decide_flow4(p, plan);
	if (reason == REASON_NONE)
		reason = xdp_miss(ctx, p, plan);
	action = action_of(reason);
	if (action == ACTION_FORWARD) {
		applied = v6 ? xdp_apply6(ctx, p, plan) : xdp_apply4(ctx, p, plan);
		verdict = plan->verdict;
		if (applied != REASON_NONE) {
			reason = applied;
			action = action_of(reason);
		}
	}
	if (action == ACTION_PASS)
		verdict = XDP_PASS;
	plan->action = action;
	plan->reason = reason;
	count(v6 ? FAMILY_6 : FAMILY_4, action, reason);
	return verdict;
}

SEC("xdp")
int sluice_xdp(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return xdp_ip(ctx, false);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return xdp_ip(ctx, true);
	count(FAMILY_OTHER, ACTION_PASS, REASON_NOT_IP);
	return XDP_PASS;
}

// Bytes of headers that the parser wants in one piece.
#define TC_HEADERS 128

// The largest packet that a GSO packet becomes on the wire.
static __always_inline __u32 segment_of(struct __sk_buff *ctx, const struct packet *p)
{
	if (!ctx->gso_size)
		return p->l3_len;
	return p->l4_off - ETH_HLEN + (p->tuple.l4_proto == IPPROTO_TCP ? sizeof(struct tcphdr) : 8) + ctx->gso_size;
}

static __noinline int tc_apply4(struct __sk_buff *ctx, struct packet *p, struct plan *plan)
{
	return tc_apply(ctx, p, plan, false);
}

static __noinline int tc_apply6(struct __sk_buff *ctx, struct packet *p, struct plan *plan)
{
	return tc_apply(ctx, p, plan, true);
}

static __always_inline int tc_ip(struct __sk_buff *ctx, const bool v6)
{
	void *data, *end;
	struct work *w = the_work();
	int verdict = TC_ACT_SHOT;
	enum reason reason, applied;
	struct packet *p;
	struct plan *plan;
	__u8 action;

	if (!w)
		return TC_ACT_SHOT;
	p = &w->packet;
	plan = &w->plan;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + TC_HEADERS > end) {
		bpf_skb_pull_data(ctx, ctx->len < TC_HEADERS ? ctx->len : TC_HEADERS);
		data = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
	}
	init(p, plan, ctx->ingress_ifindex, verdict, v6);
	reason = v6 ? parse_ipv6(data, end, p) : parse_ipv4(data, end, p);
	if (v6 && p->flags & PACKET_EXTENDED && reason == REASON_NONE)
		reason = tc_extensions(ctx, p);
	p->segment = segment_of(ctx, p);
	if (reason == REASON_NONE && before_flow_needed(p))
		reason = before_flow(p, plan);
	if (reason == REASON_NONE)
		reason = v6 ? decide_flow6(p, plan) : decide_flow4(p, plan);
	if (reason == REASON_NONE)
		reason = tc_miss(ctx, p, plan);
	action = action_of(reason);
	if (action == ACTION_FORWARD) {
		applied = v6 ? tc_apply6(ctx, p, plan) : tc_apply4(ctx, p, plan);
		verdict = plan->verdict;
		if (applied != REASON_NONE) {
			reason = applied;
			action = action_of(reason);
		}
	}
	if (action == ACTION_PASS)
		verdict = TC_ACT_OK;
	plan->action = action;
	plan->reason = reason;
	count(v6 ? FAMILY_6 : FAMILY_4, action, reason);
	return verdict;
}

SEC("tc")
int sluice_tc(struct __sk_buff *ctx)
{
	if (ctx->protocol == bpf_htons(ETH_P_IP))
		return tc_ip(ctx, false);
	if (ctx->protocol == bpf_htons(ETH_P_IPV6))
		return tc_ip(ctx, true);
	count(FAMILY_OTHER, ACTION_PASS, REASON_NOT_IP);
	return TC_ACT_OK;
}
