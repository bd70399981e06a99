// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Applies a plan to a packet: next hop, size check, rewrite, transmission.
#ifndef SLUICE_APPLY_H
#define SLUICE_APPLY_H

#include "error/answer.h"
#include "packet/source.h"

// Marks the plan for the kernel if the route lookup was inconclusive. REASON_NONE: send.
static __always_inline enum reason after_route(struct plan *plan, enum reason routed)
{
	if (routed != REASON_NONE && routed != REASON_NO_ROUTE)
		plan->flags |= PLAN_KERNEL; // the kernel can route the packet
	return routed;
}

// Returns the change of the packet's length in bytes.
static __always_inline int growth(const struct packet *p, const struct plan *plan)
{
	int more = (int)header_then(p, plan) - (int)header_now(p);

	if (plan->flags & PLAN_ERROR) // errors are truncated to the size that fits
		return 0;
	if (plan->family == FAMILY_6 && p->family == FAMILY_4 && p->l3_len - header_now(p) > 0xffff)
		more -= JUMBO_SIZE; // the segments of a GSO packet have no jumbo option
	if (have_edits)
		more += (int)edit_growth(p, plan);
	return more + (int)encap_size(plan);
}

// Sets the next hop of the plan to the stored next hop of the backend.
static __always_inline void backend_route(struct plan *plan)
{
	__u32 at = plan->backend_hop;
	struct backend_hop *b = bpf_map_lookup_elem(&backend_hops, &at);
	__u64 way;

	if (!b)
		return;
	way = *(volatile __u64 *)&b->way;
	plan->hop = way >> 32;
	plan->hop_gen = way;
}

// Reports whether a packet may be fragmented: it has no DF bit, or it becomes an IPv4 packet
// without DF (RFC 7915 §5.1, §5.1.1). "len" is the length after translation.
static __always_inline bool fragmentable(const struct packet *p, const struct plan *plan, __u32 len)
{
	if (p->family == FAMILY_6 && plan->family == FAMILY_4)
		return p->fragment_at || len <= SMALL_PACKET;
	return !(p->flags & PACKET_DF);
}

// Reports whether the route of an inside host's flow has changed to an interface that its rule does
// not cover. Replies to the translated source would not arrive on that interface. Linux masquerade
// ends such flows too.
static __always_inline bool rerouted(const struct packet *p, const struct plan *plan)
{
	struct entry_meta *m;
	struct nat_rule *r;
	struct hop *h;
	__u32 id;

	if (plan->entry == NO_ENTRY || plan->backend_hop != NO_ENTRY || plan->flags & PLAN_ERROR)
		return false;
	m = meta_at(plan->entry, p->family == FAMILY_6);
	if (!m || (m->flags & (ENTRY_NAT | ENTRY_PRIMARY)) != (ENTRY_NAT | ENTRY_PRIMARY))
		return false;
	// A hairpin flow, or a flow opened from outside.
	if (plan->family == p->family ?
		    plan->to.daddr.d[0] != p->tuple.daddr.d[0] || plan->to.daddr.d[1] != p->tuple.daddr.d[1] :
		    p->family == FAMILY_4)
		return false;
	id = m->owner;
	r = bpf_map_lookup_elem(&nat_rules, &id);
	h = hop_of(plan);
	return r && h && !includes(r->out, h->ifindex);
}

static __noinline enum reason end_rerouted(const struct packet *p, const struct plan *plan)
{
	if (!rerouted(p, plan))
		return REASON_NONE;
	if (!dry_run)
		p->family == FAMILY_6 ? sweep_one6(plan->entry, p->now, SWEEP_END) :
					sweep_one4(plan->entry, p->now, SWEEP_END);
	return REASON_REROUTED;
}

// Checks the next hop and the packet size, for both hooks. A packet that is too big is refused whether
// or not the next hop has a known hardware address, as in the kernel. A separate stack frame, which
// is released before the packet is rewritten.
static __noinline enum reason ready(const struct packet *p, struct plan *plan, enum reason routed)
{
	struct hop *h = hop_of(plan);
	int more, most;

	if (!h)
		return REASON_INTERNAL;
	plan->mtu = h->mtu;
	if (routed != REASON_NONE && routed != REASON_NO_NEIGHBOUR)
		return routed;
	if (plan->flags & PLAN_ERROR && plan->family != p->family)
		return routed; // the error is truncated to the minimum MTU
	more = growth(p, plan);
	most = largest(p, plan->family, h->mtu);
	if ((int)p->segment + more <= most)
		return routed;
	plan->mtu = most - more;
	if (p->family == FAMILY_6 && plan->mtu < LOWEST_IPV6_MTU)
		plan->mtu = LOWEST_IPV6_MTU; // hosts discard less (RFC 8201 §4); such a packet becomes IPv4 without DF
	if (!fragmentable(p, plan, p->l3_len + more) || (plan->encap && plan->gateway_family == FAMILY_6))
		return REASON_TOO_BIG;
	if (routed == REASON_NO_NEIGHBOUR || (!hold_fragments && !dry_run))
		return routed; // user space fragments the output of its own program
	if (plan->family == FAMILY_6 || p->family == FAMILY_6)
		return REASON_TO_FRAGMENT6;
	plan->flags |= PLAN_KERNEL;
	return REASON_TO_FRAGMENT;
}

// Reports whether the kernel refuses the source of a packet that the miss path did not check. These
// are:
//   - packets of a flow without a current next hop for this interface
//   - ICMP errors
//   - new flows, if "ip rule" may select the return route by the translated destination
static __always_inline bool refused_late(void *ctx, const struct packet *p, const struct plan *plan, bool current)
{
	if (p->flags & PACKET_ERROR) {
		if (plan->family != p->family)
			return false; // the kernel does not see its original source
	} else if (plan->flags & PLAN_EXISTING ? current : !(checks_now() & CHECK_RULES)) {
		return false;
	}
	return refuses_source(ctx, p, plan->family == FAMILY_4 ? ANSWERED_FROM(plan->to.daddr.w[0], plan->to.dport) : 0,
			      true);
}

static __always_inline enum reason prepare(void *ctx, const struct packet *p, struct plan *plan, const bool xdp)
{
	enum reason reason = REASON_NONE;
	bool current;

	if (plan->backend_hop != NO_ENTRY)
		backend_route(plan);
	current = hop_current(p, plan);
	if (p->family == FAMILY_4 && refused_late(ctx, p, plan, current)) {
		if (checks_now() & CHECK_RULES) { // the kernel would check the source with the original destination
			plan->answer = ANSWER_NONE;
			return REASON_SOURCE_REFUSED;
		}
		plan->flags |= PLAN_HERE;
		return REASON_NOT_ROUTED;
	}
	if (!current) {
		reason = after_route(plan, BY_HOOK(route, ctx, p, plan));
		if (have_nat && (reason == REASON_NONE || reason == REASON_NO_NEIGHBOUR) &&
		    end_rerouted(p, plan) != REASON_NONE)
			return REASON_REROUTED;
	}
	// Linux drops packets with a source route unless accept_source_route is set, before it sends an error.
	if (p->family == FAMILY_4 && plan->family == FAMILY_4 && header_now(p) > sizeof(struct iphdr) &&
	    BY_HOOK(source_routed, ctx, header_now(p))) {
		plan->answer = ANSWER_NONE;
		return REASON_UNTRANSLATABLE;
	}
	if (p->ttl <= 1 && reason != REASON_NO_ROUTE && reason != REASON_FORWARDING_OFF &&
	    (plan->flags & PLAN_HERE) != PLAN_HERE)
		return REASON_TTL_EXCEEDED;
	return ready(p, plan, reason);
}

BOTH_HOOKS(enum reason, rewrite4, !p || !plan ? REASON_INTERNAL : BY_HOOK(rewrite, ctx, p, plan, false),
	   const struct packet *p, const struct plan *plan)

BOTH_HOOKS(enum reason, rewrite6, !p || !plan ? REASON_INTERNAL : BY_HOOK(rewrite, ctx, p, plan, true),
	   const struct packet *p, const struct plan *plan)

static __always_inline enum reason rewrite(void *ctx, const struct packet *p, const struct plan *plan, const bool v6,
					   const bool xdp)
{
	return v6 ? BY_HOOK(rewrite6, ctx, p, plan) : BY_HOOK(rewrite4, ctx, p, plan);
}

// Applies a plan to a packet. Returns REASON_NONE if the packet was sent as planned, otherwise the
// reason why not.
static __always_inline enum reason apply(void *ctx, struct packet *p, struct plan *plan, const bool v6, const bool xdp)
{
	enum reason reason = prepare(ctx, p, plan, xdp), done;
	__u8 tos = p->tos;
	struct hop *h;

	if (reason == REASON_TO_FRAGMENT6 && !dry_run)
		return BY_HOOK(fragment6, ctx, p);
	if (reason == REASON_TO_FRAGMENT)
		reason = BY_HOOK(fragment4, ctx, p, plan);
	else if (reason == REASON_NO_NEIGHBOUR)
		reason = BY_HOOK(unresolved, ctx, p, plan);
	if (dry_run || (plan->flags & PLAN_HERE) == PLAN_HERE ||
	    (reason != REASON_NONE && action_of(reason) == ACTION_DROP))
		return reason;
	if (plan->choices & CHOICE_CLASS && plan->family != p->family)
		p->tos = plan->tos;
	if (plan->flags & PLAN_ERROR)
		done = apply_error(ctx, p, plan, xdp);
	else if (have_family_change && plan->family != p->family)
		done = BY_HOOK(translate, ctx, p, plan);
	else
		done = rewrite(ctx, p, plan, v6, xdp);
	if (have_edits && done == REASON_NONE && plan->edits && !(plan->flags & PLAN_ERROR))
		done = BY_HOOK(edit, ctx, p, plan);
	if (done == REASON_NONE && plan->encap)
		done = BY_HOOK(encapsulate, ctx, p, plan, leaves_by(p, plan));
	if (done != REASON_NONE) {
		p->tos = tos; // an ICMP error repeats the class of the packet, not of the rule
		return done;
	}
	if (plan->flags & PLAN_KERNEL)
		return reason;
	h = hop_of(plan);
	if (!h)
		return REASON_INTERNAL;
	plan->verdict = BY_HOOK(send, ctx, h);
	return REASON_NONE;
}

#endif
