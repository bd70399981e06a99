// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The datapath: one core, two hooks. The folders contain the parts: packet/ (parse, route, rewrite),
// flow/ (flow tables), nat/, service/, error/ (ICMP errors and answers). docs/internals/packet-walk.md
// follows a packet through them.
//
// Each packet is parsed, gets a plan (decide.h), and the plan is applied. One exit counts the
// reason. Plain packets of settled flows take the fast path (fast.h). Packets of services without
// flows take the direct path (direct.h).
#include "apply.h"
#include "direct.h"
#include "export.h"
#include "fast.h"
#include "flow/move.h"
#include "flow/reindex.h"
#include "flow/sweep.h"
#include "miss.h"
#include "packet/station.h"
#include "service/owned.h"

// Bytes of headers that the parser needs in linear memory; with extension headers before a TCP
// header.
#define TC_HEADERS 128
#define TC_EXTENDED (ETH_HLEN + sizeof(struct ipv6hdr) + EXTENSIONS_BYTES + sizeof(struct tcphdr))

char _license[] SEC("license") = "Dual BSD/GPL";

static __always_inline void init(struct packet *p, struct plan *plan, __u32 ifindex, int drop, const bool v6)
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
	plan->owner_nat = OWNER_NONE;
}

BOTH_HOOKS(int, next_extension, !p || !x || next_extension((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, x),
	   struct packet *p, struct extensions *x)

__noinline enum reason xdp_extensions(struct xdp_md *ctx, struct packet *p)
{
	struct extensions x;

	if (!p)
		return REASON_INTERNAL;
	x = first_extension(p);
	for (int i = 0; i <= EXTENSIONS_MAX; i++)
		if (xdp_next_extension(ctx, p, &x))
			break;
	return parse_behind((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, &x);
}

__noinline enum reason tc_extensions(struct __sk_buff *ctx, struct packet *p)
{
	struct extensions x;

	if (!p || bpf_skb_pull_data(ctx, ctx->len < TC_EXTENDED ? ctx->len : TC_EXTENDED))
		return REASON_INTERNAL;
	x = first_extension(p);
	for (int i = 0; i <= EXTENSIONS_MAX; i++)
		if (tc_next_extension(ctx, p, &x))
			break;
	return parse_behind((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, &x);
}

static __always_inline enum reason orphan(void *ctx, struct packet *p, struct plan *plan, const bool xdp)
{
	enum reason reason;

	if (cross_by_egress)
		BY_HOOK(cross_egress, ctx, p);
	reason = egress(ctx, p, plan, false) ? fragment_orphan(p, plan) : REASON_INTERNAL;
	return reason == REASON_ORPHAN_FRAGMENT ? hold(ctx, p, xdp) : reason;
}

BOTH_HOOKS(enum reason, orphan, !p || !plan ? REASON_INTERNAL : orphan(ctx, p, plan, xdp), struct packet *p,
	   struct plan *plan)

// Applies the firewall and handles fragments before the flow lookup.
static __always_inline enum reason before_flow(struct packet *p, struct plan *plan)
{
	enum reason known = REASON_NONE, reason;

	if (source_denied(p))
		return REASON_DENIED;
	if (p->flags & PACKET_LATER_FRAGMENT) {
		plan->flags |= PLAN_NO_L4;
		known = fragment_later(p);
		if (known != REASON_NONE && known != REASON_ORPHAN_FRAGMENT)
			return known;
	}
	if (have_rules) {
		reason = firewall(p);
		if (reason != REASON_NONE)
			return reason;
	}
	return known;
}

// Handles a packet in a broadcast or multicast frame. It passes to the host or is dropped, but is
// never forwarded.
static __always_inline enum reason to_group(struct packet *p)
{
	enum reason reason = have_rules ? firewall(p) : REASON_NONE;

	p->flags &= ~PACKET_FIRST_FRAGMENT; // it is not stored for later fragments
	if (source_denied(p))
		return REASON_DENIED;
	if (reason != REASON_NONE)
		return reason;
	return never_routed(p) ? REASON_NOT_ROUTED : REASON_OTHER_STATION;
}

static __always_inline bool before_flow_needed(const struct packet *p)
{
	return have_rules || have_denied || p->flags & (PACKET_LATER_FRAGMENT | PACKET_FIRST_FRAGMENT);
}

// Reports whether a packet was refused by a limit, an access list or for lack of backends.
static __always_inline bool by_policy(__u32 reason)
{
	return reason == REASON_DENIED || reason == REASON_NOT_ALLOWED ||
	       (reason >= REASON_TABLE_FULL && reason <= REASON_STRICT_TCP);
}

// Reports whether a refused packet is the retransmission of a refused SYN.
static __always_inline bool sent_again(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	bool syn = (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN && !(plan->edits & EDIT_SPLICE);
	__u32 number, mark, slot, *seen;
	__u64 h;

	if (!syn || p->flags & PACKET_LATER_FRAGMENT || !get(ctx, p->l4_off + 4, &number, 4, xdp))
		return false;
	h = p->family == FAMILY_6 ? tuple_hash(&p->tuple, true) : tuple_hash(&p->tuple, false);
	slot = h & (REFUSED_SYNS - 1);
	mark = (__u32)(h >> 32 ^ number) ?: 1; // 0: empty slot
	seen = bpf_map_lookup_elem(&refused_syns, &slot);
	if (!seen || *seen == mark)
		return seen;
	*seen = mark;
	return false;
}

BOTH_HOOKS(static int, sent_again, sent_again(ctx, p, plan, xdp), const struct packet *p, const struct plan *plan)

// Counts a refused packet for its service. Reports whether the sender gets an answer.
static __always_inline bool refused(void *ctx, const struct packet *p, const struct plan *plan, __u32 reason,
				    const bool xdp)
{
	__u32 owner = plan->owner;
	struct load *l;

	if (dry_run)
		return false;
	if (plan->owner_nat == OWNER_SERVICE && by_policy(reason) &&
	    !BY_HOOK(sent_again, ctx, p, plan)) {
		l = bpf_map_lookup_elem(&service_loads, &owner);
		if (l)
			__sync_fetch_and_add(&l->refused, 1);
	}
	return answer_of(plan, reason) != ANSWER_NONE;
}

static __always_inline void pull_headers(struct __sk_buff *ctx)
{
	if ((void *)(long)ctx->data + TC_HEADERS > (void *)(long)ctx->data_end)
		bpf_skb_pull_data(ctx, ctx->len < TC_HEADERS ? ctx->len : TC_HEADERS);
}

static __always_inline enum reason parse(struct packet *p, void *data, void *end, bool joined, const bool v6)
{
	return v6 ? parse_ipv6(data, end, p, joined) : parse_ipv4(data, end, p, joined);
}

static __always_inline enum reason xdp_parse(struct xdp_md *ctx, struct packet *p, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	enum reason reason;

	p->frame_len = end - data;
	reason = parse(p, data, end, false, v6);
	if (v6 && p->flags & PACKET_EXTENDED && reason == REASON_NONE)
		reason = xdp_extensions(ctx, p);
	p->segment = p->l3_len;
	return reason;
}

static __always_inline enum reason tc_parse(struct __sk_buff *ctx, struct packet *p, const bool v6)
{
	enum reason reason;

	pull_headers(ctx);
	p->frame_len = ctx->len;
	reason = parse(p, (void *)(long)ctx->data, (void *)(long)ctx->data_end, ctx->gso_size, v6);
	if (v6 && p->flags & PACKET_EXTENDED && reason == REASON_NONE)
		reason = tc_extensions(ctx, p);
	p->segment = segment_of(p, (void *)(long)ctx->data, (void *)(long)ctx->data_end, ctx->gso_size);
	return reason;
}

// Plans a packet again, because another CPU has just created a flow with the same tuple. The packet
// uses that flow.
static __always_inline enum reason decide_again(const struct packet *p, struct plan *plan, const bool v6)
{
	enum reason reason;

	plan->absent = 0;
	plan->flags = 0;
	plan->edits = 0;
	plan->asked = 0;
	plan->entry = NO_ENTRY;
	plan->backend_hop = NO_ENTRY;
	reason = decide_flow(p, plan, v6);
	return reason == REASON_NONE ? REASON_CLASH : reason; // that flow has ended again; a retransmission will pass
}

// Handles a packet on the full path. fast: the result of the fast path. drop and pass are the
// verdicts of the hook. On TC, passed packets continue to other programs and to the kernel.
static __always_inline int full(void *ctx, __u32 ifindex, int fast, const bool v6, const bool xdp)
{
	const int drop = xdp ? XDP_DROP : TC_ACT_SHOT, pass = xdp ? XDP_PASS : TC_ACT_UNSPEC;
	struct work *w = the_work();
	enum reason reason, applied;
	struct packet *p;
	struct plan *plan;
	int verdict = drop;
	__u32 service;
	__u8 action;

	if (!w)
		return drop;
	p = &w->packet;
	plan = &w->plan;
	init(p, plan, ifindex, drop, v6);
	plan->absent = fast == NO_FLOW_HERE;
	w->closed.index = NO_ENTRY;
	reason = BY_HOOK(parse, ctx, p, v6);
	if (reason != REASON_NONE)
		p->flags &= ~PACKET_FIRST_FRAGMENT; // it must not determine the outcome of later fragments
	else if (fast == FOR_GROUP)
		reason = to_group(p);
	else if (before_flow_needed(p))
		reason = before_flow(p, plan);
	if (reason == REASON_ORPHAN_FRAGMENT)
		reason = BY_HOOK(orphan, ctx, p, plan);
	if (reason == REASON_NONE) {
		if (p->flags & PACKET_ERROR)
			reason = BY_HOOK(error, ctx, p, plan);
		else
			reason = decide_flow(p, plan, v6);
	}
	if (reason == REASON_NONE) {
		service = have_services ? service_of(p) : NO_ENTRY;
		reason = BY_HOOK(miss, ctx, p, plan, service);
		if (reason == REASON_NONE)
			reason = decide_miss(p, plan, service);
		if (have_services && has_closed(w))
			end_closed(w, v6);
		if (reason == REASON_FLOW)
			reason = decide_again(p, plan, v6);
	}
	if (have_services && reason == REASON_NOT_OURS && beside_flow(p, plan)) {
		reason = service_keep(p, plan);
		if (reason == REASON_SYN) // no room for a handshake: handled as without a flow
			reason = REASON_NOT_OURS;
	}
	if (have_owned && reason == REASON_NOT_OURS)
		reason = BY_HOOK(unserved, ctx, p, plan);
	if (p->flags & PACKET_FIRST_FRAGMENT)
		fragment_first(p, reason);
	action = action_of(reason);
	if (action == ACTION_FORWARD && p->flags & PACKET_LATER_FRAGMENT) {
		reason = REASON_FRAGMENT;
		plan->edits = 0; // a later fragment has no TCP header
	}
	if (action == ACTION_FORWARD) {
		applied = apply(ctx, p, plan, v6, xdp);
		verdict = plan->verdict;
		if (applied != REASON_NONE) {
			reason = applied;
			action = action_of(reason);
			// The remaining fragments of the packet must neither open a flow nor pass
			// with the inside source.
			if (reason == REASON_REROUTED && p->flags & (PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT))
				fragment_first(p, reason);
		}
	}
	if (action == ACTION_PASS)
		verdict = pass;
	else if (action == ACTION_DROP && refused(ctx, p, plan, reason, xdp) &&
		 BY_HOOK(answer, ctx, p, plan, answer_of(plan, reason)))
		verdict = bpf_redirect(ifindex, 0);
	plan->action = action;
	plan->reason = reason;
	count(v6 ? FAMILY_6 : FAMILY_4, action, reason);
	return verdict;
}

// Counts a packet that is not parsed, and stores the outcome.
static __always_inline void unparsed(enum family family, enum action action, enum reason reason)
{
	struct work *w = the_work();

	if (w) {
		w->plan.action = action;
		w->plan.reason = reason;
	}
	count(family, action, reason);
}

// Counts a packet that passes unexamined.
static __always_inline void other(enum family family, enum reason reason)
{
	unparsed(family, ACTION_PASS, reason);
}

// Reports whether the source of a frame is denied, and counts the packet. Leaves a frame without a
// complete IP header to the full path, and ICMPv6 and extension headers, because neighbour
// discovery of denied sources passes.
static __always_inline bool early_denied(void *data, void *end, const bool v6)
{
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct iphdr *ip = data + ETH_HLEN;
	union addr source;

	if (!have_denied || dry_run)
		return false;
	if (v6) {
		if ((void *)(ip6 + 1) > end || ip6->nexthdr == IPPROTO_ICMPV6 || is_extension(ip6->nexthdr))
			return false;
		__builtin_memcpy(&source, &ip6->saddr, sizeof(source));
		if (!denied6(source.d[0], source.d[1]))
			return false;
	} else if ((void *)(ip + 1) > end || !denied4(ip->saddr)) {
		return false;
	}
	if (observed)
		unparsed(v6 ? FAMILY_6 : FAMILY_4, ACTION_DROP, REASON_DENIED);
	else
		count_one(v6 ? FAMILY_6 : FAMILY_4, ACTION_DROP, REASON_DENIED);
	return true;
}

static __always_inline bool xdp_denied(struct xdp_md *ctx, const bool v6)
{
	return early_denied((void *)(long)ctx->data, (void *)(long)ctx->data_end, v6);
}

static __always_inline bool tc_denied(struct __sk_buff *ctx, const bool v6)
{
	return early_denied((void *)(long)ctx->data, (void *)(long)ctx->data_end, v6);
}

// Reports whether the direct path of services without flows is tried first.
static __always_inline bool direct_first(void)
{
	return have_direct && !have_rules && !dry_run && !straight_off;
}

// Handles a packet that the fast path did not take. The packet is unmodified, so that TC can
// process it if TC runs after XDP.
static __always_inline int xdp_rest(struct xdp_md *ctx, int fast, const bool v6)
{
	return tc_behind ? XDP_PASS : full(ctx, ctx->ingress_ifindex, fast, v6, true);
}

SEC("xdp")
int sluice_xdp(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	int verdict = FOR_GROUP, station;
	__be16 type;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	type = eth->h_proto;
	station = xdp_station(ctx, eth);
	if (!is_ip(type)) {
		type = tc_behind || station == STATION_OTHER ? 0 : xdp_untag(ctx);
		if (!type) {
			if (!tc_behind)
				other(FAMILY_OTHER, REASON_NOT_IP);
			return XDP_PASS;
		}
	}
	if (station == STATION_OTHER) {
		if (!tc_behind)
			other(type == bpf_htons(ETH_P_IP) ? FAMILY_4 : FAMILY_6, REASON_OTHER_STATION);
		return XDP_PASS;
	}
	if (type == bpf_htons(ETH_P_IP)) {
		if (xdp_denied(ctx, false))
			return XDP_DROP;
		if (station == STATION_OWN) {
			verdict = direct_first() ? xdp_direct(ctx) : NOT_DIRECT;
			if (verdict == NOT_DIRECT)
				verdict = xdp_fast4(ctx);
		}
		return verdict >= 0 ? verdict : xdp_rest(ctx, verdict, false);
	}
	if (xdp_denied(ctx, true))
		return XDP_DROP;
	if (station == STATION_OWN)
		verdict = xdp_fast6(ctx);
	return verdict >= 0 ? verdict : xdp_rest(ctx, verdict, true);
}

static __always_inline int tc_packet(struct __sk_buff *ctx)
{
	int verdict = FOR_GROUP, station = tc_station(ctx);
	__be16 type = ctx->protocol;

	if (ctx->vlan_present || !is_ip(type)) {
		type = station == STATION_OTHER ? 0 : tc_untag(ctx);
		if (!type) { // a packet of a VLAN arrives again on the VLAN interface
			other(FAMILY_OTHER, REASON_NOT_IP);
			return TC_ACT_UNSPEC;
		}
	}
	if (station == STATION_OTHER) {
		other(type == bpf_htons(ETH_P_IP) ? FAMILY_4 : FAMILY_6, REASON_OTHER_STATION);
		return TC_ACT_UNSPEC;
	}
	if (type == bpf_htons(ETH_P_IP)) {
		if (tc_denied(ctx, false))
			return TC_ACT_SHOT;
		if (station == STATION_OWN) {
			verdict = direct_first() ? tc_direct(ctx) : NOT_DIRECT;
			if (verdict == NOT_DIRECT)
				verdict = tc_fast4(ctx);
		}
		return verdict >= 0 ? verdict : full(ctx, ctx->ingress_ifindex, verdict, false, false);
	}
	if (tc_denied(ctx, true))
		return TC_ACT_SHOT;
	if (station == STATION_OWN)
		verdict = tc_fast6(ctx);
	return verdict >= 0 ? verdict : full(ctx, ctx->ingress_ifindex, verdict, true, false);
}

SEC("tc")
int sluice_tc(struct __sk_buff *ctx)
{
	return tc_packet(ctx);
}

// Hook for interfaces without a link-layer header (tun, WireGuard, PPP). The packets get an
// Ethernet header, in which only the type matters. The kernel removes it like any Ethernet header.
// A redirect to such an interface removes it too.
SEC("tc")
int sluice_bare(struct __sk_buff *ctx)
{
	__be16 type = ctx->protocol;
	bool v6 = type == bpf_htons(ETH_P_IPV6);

	if ((v6 || type == bpf_htons(ETH_P_IP)) &&
	    (bpf_skb_change_head(ctx, ETH_HLEN, 0) || bpf_skb_store_bytes(ctx, 2 * ETH_ALEN, &type, sizeof(type), 0))) {
		count(v6 ? FAMILY_6 : FAMILY_4, ACTION_DROP, REASON_INTERNAL);
		return TC_ACT_SHOT;
	}
	return tc_packet(ctx);
}
