// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Makes a plan for a parsed packet. Order: firewall, fragment, flow, service, reply of a backend,
// binding, stateless prefix, NAT rule.
#ifndef SLUICE_DECIDE_H
#define SLUICE_DECIDE_H

#include "before_flow.h"
#include "flow/sweep.h"

// Plans the rewrite of a flow's entry within one family.
static __always_inline void plan_same(struct plan *plan, const void *e, const bool v6)
{
	if (v6) {
		const struct flow6 *f = e;

		plan->to.saddr = f->to_saddr;
		plan->to.daddr = f->to_daddr;
		plan->to.sport = f->to_sport;
		plan->to.dport = f->to_dport;
		plan->to.l4_proto = f->key.l4_proto;
		plan->family = FAMILY_6;
		return;
	}
	const struct flow4 *f = e;

	plan->to.saddr.w[0] = f->to_saddr;
	plan->to.daddr.w[0] = f->to_daddr;
	plan->to.sport = f->to_sport;
	plan->to.dport = f->to_dport;
	plan->to.l4_proto = f->key.l4_proto;
	plan->family = FAMILY_4;
}

// Plans the rewrite of a flow's entry into the other family. An IPv4 entry has no room for IPv6
// addresses; they are read from the entry of the other direction.
static __always_inline void plan_cross(struct plan *plan, void *e, const bool v6)
{
	struct flow6 *six;

	if (v6) {
		plan_same(plan, e, true);
		plan->to.l4_proto = proto_in(plan->to.l4_proto, FAMILY_4);
		plan->family = FAMILY_4;
		return;
	}
	six = entry_at(meta_of(e, false)->twin, true);
	if (six)
		reverse_tuple(&plan->to, &six->key);
	plan->family = FAMILY_6;
}

static __always_inline void plan_flow(struct plan *plan, void *e, __u32 index, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);

	plan->entry = index;
	plan->hop = m->hop;
	plan->hop_gen = m->hop_gen;
	if (m->flags & ENTRY_CROSS)
		plan_cross(plan, e, v6);
	else
		plan_same(plan, e, v6);
	plan->gateway_family = plan->family;
}

static __always_inline void touch(const struct packet *p, void *e, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u64 *counts = e; // packets, bytes

	if (m->seen != p->now)
		m->seen = p->now;
	counts[0]++;
	counts[1] += p->l3_len;
}

// Plans a packet of a flow without a reply entry (dsr or tunnel with a sequence scheduler). The
// flow stores only the backend.
__noinline enum reason plan_without_reply(const struct packet *p, struct plan *plan, __u32 service, __u32 backend)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct backend *b = bpf_map_lookup_elem(&backends, &backend);

	if (!p || !plan || !s || !b)
		return REASON_INTERNAL;
	plan->owner = service;
	plan->owner_nat = OWNER_SERVICE;
	aim(p, plan, s, b, backend);
	return REASON_FLOW;
}

// Reports whether the client's bytes contain a PROXY header or will contain it. A flow created with
// a header keeps it, even if its service has changed.
static __always_inline bool proxied(bool first, const struct entry_meta *m, const struct entry_meta *twin)
{
	return (first ? twin : m)->heard & HEARD_EDITED;
}

// Returns the edits that the flow's service requires for a packet. first: the packet is from the
// client. m: the entry of the packet. Only a flow created with a PROXY header gets one; its replies
// are edited too.
static __always_inline __u32 service_edits(const struct packet *p, __u32 id, bool first, struct entry_meta *m,
					   const struct entry_meta *twin)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	__u32 edits = 0;
	bool proxy;

	if (!s)
		return 0;
	proxy = proxied(first, m, twin);
	if (p->tcp_flags & TCP_SYN) {
		if (s->flags & SERVICE_MSS_CLAMP)
			edits |= EDIT_MSS;
		if (!first && (proxy || s->flags & (SERVICE_TOA | SERVICE_PROXY)))
			edits |= EDIT_ROOM;
	}
	if (proxy)
		return edits | (first ? EDIT_PROXY : EDIT_ANSWER);
	if (!first || !(s->flags & SERVICE_TOA) || dry_run)
		return edits;
	// All packets that may complete the handshake carry the option. When the backend has sent
	// more than its SYN-ACK, it has received the option.
	if (!(twin->heard & HEARD_ACK))
		edits |= EDIT_TOA;
	if (p->tcp_flags & TCP_SYN)
		__sync_fetch_and_or(flags_word(m), HEARD_EDITED << HEARD_SHIFT);
	else if (twin->heard & HEARD_ACK)
		__sync_fetch_and_and(flags_word(m), ~(HEARD_EDITED << HEARD_SHIFT));
	return edits;
}

// Plans the changes to a packet of a flow beyond its addresses and ports. index: the entry of the
// packet.
__noinline int flow_edits(const struct packet *p, struct plan *plan, __u32 index)
{
	struct entry_meta *m, *twin, *primary;
	struct nat_rule *r;
	__u32 owner;
	bool v6, first;

	if (!p || !plan)
		return 0;
	v6 = p->family == FAMILY_6;
	m = meta_at(index, v6);
	if (!m)
		return 0;
	twin = m->twin == NO_ENTRY ? m : twin_meta(m, v6);
	if (!twin)
		return 0;
	first = m->flags & ENTRY_PRIMARY;
	primary = first ? m : twin;
	owner = primary->owner;
	if (m->flags & ENTRY_NAT) {
		r = bpf_map_lookup_elem(&nat_rules, &owner);
		if (r && r->flags & NAT_MSS_CLAMP && p->tcp_flags & TCP_SYN)
			plan->edits |= EDIT_MSS;
		return 0;
	}
	plan->record = first ? index : m->twin;
	if (first ? v6 : v6 != !!(m->flags & ENTRY_CROSS))
		plan->record |= ADJUST_6;
	if (have_cookies && splice_edits(p, plan, first, m, twin))
		return 0;
	plan->edits |= service_edits(p, owner, first, m, twin);
	return 0;
}

// Reports whether a SYN that matches the client's entry of a service flow opens another connection.
static __always_inline bool opens_again(const struct entry_meta *m, const struct entry_meta *twin)
{
	return used_again(m->backend, m->heard, m->seen, twin->heard, twin->seen, twin != m);
}

// Looks up the flow of a packet. REASON_NONE: there is none, or plan->entry has ended and the caller
// sweeps it.
static __always_inline enum reason search_flow(const struct packet *p, struct plan *plan, const bool v6)
{
	struct work *w = the_work();
	struct entry_meta *m, *twin;
	__u32 index;
	bool opens; // a new connection, with the tuple of an existing one to a service
	void *e;

	if (have_nat && p->tcp_flags & TCP_SYN && w)
		touch_binding(w, &p->tuple, v6);
	e = search_by(&p->tuple, &index, NO_ENTRY, key_equal, v6);
	if (!e)
		return REASON_NONE;
	m = meta_of(e, v6);
	opens = have_services && (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN &&
		(m->flags & (ENTRY_PRIMARY | ENTRY_NAT)) == ENTRY_PRIMARY && !(p->flags & PACKET_LATER_FRAGMENT);
	if ((opens && unserved(m->owner, m->backend)) || lost_reply_half(m->twin, m->owner)) {
		plan->entry = index; // the caller removes the entry without waiting for the sweeper
		return REASON_NONE;
	}
	if (opens) {
		twin = m->twin == NO_ENTRY ? m : twin_meta(m, v6);
		if (twin && opens_again(m, twin)) {
			if (w && reusable(m)) {
				record_closed(&w->closed, m, twin, index, v6);
				return REASON_NONE;
			}
			plan->entry = index;
			return REASON_NONE;
		}
	}
	plan_flow(plan, e, index, v6);
	plan->flags |= PLAN_EXISTING;
	if (p->flags & PACKET_NO_FLOW)
		plan->flags |= PLAN_NO_L4;
	if (m->twin == NO_ENTRY)
		plan_without_reply(p, plan, m->owner, m->backend);
	if (have_edits && p->tuple.l4_proto == IPPROTO_TCP && !(p->flags & PACKET_LATER_FRAGMENT) && !conn_plain(p, m))
		flow_edits(p, plan, index);
	if (have_cookies && plan->answer != ANSWER_NONE)
		return REASON_NO_FLOW; // the packet belongs to an older connection of the backend
	if (have_resets && resets(p) && (m->flags & (ENTRY_PRIMARY | ENTRY_NAT)) == ENTRY_PRIMARY &&
	    reset_refused(m->owner)) {
		plan->owner = m->owner;
		plan->owner_nat = OWNER_SERVICE;
		return REASON_LIMIT_RESETS;
	}
	if (!dry_run) {
		// A later fragment has no TCP flags and does not change the state.
		if (!conn_plain(p, m) && !(p->flags & PACKET_LATER_FRAGMENT) && conn_changed(p, m, v6))
			flow_closed(index, v6);
		touch(p, e, v6);
	}
	return REASON_FLOW;
}

__noinline enum reason search_flow4(const struct packet *p, struct plan *plan)
{
	return p && plan ? search_flow(p, plan, false) : REASON_INTERNAL;
}

__noinline enum reason search_flow6(const struct packet *p, struct plan *plan)
{
	return p && plan ? search_flow(p, plan, true) : REASON_INTERNAL;
}

// Ends a flow whose tuple a SYN reuses. Returns REASON_NONE.
__noinline enum reason end_by_syn(__u32 index, __u32 now, __u32 v6)
{
	if (!dry_run && index != NO_ENTRY)
		v6 ? sweep_one6(index, now, SWEEP_OPENS) : sweep_one4(index, now, SWEEP_OPENS);
	return REASON_NONE;
}

// Ends the flow of the closed connection, because no connection continues it. Not nested in the
// steps before it, because each has a deep call chain (Linux 6.1).
static __always_inline void end_closed(struct work *w, bool v6)
{
	__u32 index = w->closed.index;

	w->closed.index = NO_ENTRY;
	end_by_syn(index, w->packet.now, v6);
}

// Looks up the flow of a packet, and sweeps it if it has ended. Each step has a separate stack
// frame. The spills of the lookup then do not add to the stack of the sweep or of the miss path.
static __always_inline enum reason decide_flow(const struct packet *p, struct plan *plan, bool v6)
{
	enum reason reason;
	__u32 index;

	if (plan->absent)
		return REASON_NONE;
	reason = v6 ? search_flow6(p, plan) : search_flow4(p, plan);
	index = plan->entry;
	if (reason != REASON_NONE || index == NO_ENTRY)
		return reason;
	plan->entry = NO_ENTRY;
	return end_by_syn(index, p->now, v6);
}

// Plans a packet of nat64, to the IPv4 address embedded in its IPv6 destination.
static __always_inline enum reason nat64_out(const struct packet *p, struct plan *plan, const struct nat_rule *rule,
					     __u32 id)
{
	struct prefix *by = prefix_of(&p->tuple.saddr, ROLE_CROSSING, true);
	__u32 number = NO_ENTRY;
	enum reason reason;

	if (by && by->kind == PREFIX_NAT64)
		return REASON_LOOP; // RFC 6146 §3.5
	plan->to = p->tuple;
	plan->to.daddr.d[0] = extract(&p->tuple.daddr, rule->prefix_len);
	plan->to.daddr.d[1] = 0;
	if (nowhere4(plan->to.daddr.w[0]))
		return REASON_UNTRANSLATABLE;
	if (!may_open(p))
		return REASON_UNSUPPORTED_PROTOCOL;
	plan->to.l4_proto = proto_in(p->tuple.l4_proto, FAMILY_4);
	plan->family = FAMILY_4;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = FAMILY_4;
	if (pool_of(&plan->to.daddr, &number) || have_forwards) {
		reason = nat64_hairpin(p, plan, id, number);
		if (reason != REASON_NOT_OURS)
			return reason;
	}
	return nat_out(p, plan, id);
}

static __always_inline enum reason decide_nat(const struct packet *p, struct plan *plan)
{
	__u32 id = nat_rule_of(p);
	struct nat_rule *rule;

	if (id == EXCEPTED)
		return REASON_EXCEPTED;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule)
		return REASON_NONE;
	if (rule->prefix_len)
		return nat64_out(p, plan, rule, id);
	if (!(p->family == FAMILY_6 ? rule->pool6_len : rule->pool_len)) { // never with the inside source address
		plan->owner = id;
		plan->owner_nat = OWNER_SOURCE;
		refuse(plan, REASON_NO_ADDRESS,
		       rule->flags & NAT_PROHIBITED ? ANSWER_PROHIBITED : ANSWER_UNREACHABLE_HOST);
		return REASON_NO_ADDRESS;
	}
	if (!may_open(p) && !portless(p))
		return REASON_UNSUPPORTED_PROTOCOL;
	plan->to = p->tuple;
	plan->family = p->family;
	plan->gateway = p->tuple.daddr;
	plan->gateway_family = p->family;
	return portless(p) ? nat_portless(p, plan, id) : nat_out(p, plan, id);
}

static __always_inline enum reason decide_pool(const struct packet *p, struct plan *plan)
{
	struct pool_addr *address;
	enum reason reason;
	__u32 n;

	address = pool_of(&p->tuple.daddr, &n);
	if (!address || address->family != p->family)
		return REASON_NONE;
	reason = nat_in(p, plan, n);
	return reason == REASON_NO_BINDING && address->local ? REASON_NOT_OURS : reason;
}

// Plans a packet without a flow to a service. REASON_NONE: the packet is not for a service. The
// steps are not nested, because each calls deep functions (stack limit of Linux 6.1).
static __always_inline enum reason decide_service(struct packet *p, struct plan *plan, __u32 service)
{
	struct work *w = the_work();
	enum reason reason;
	bool keep; // service_keep makes a flow for the plan

	if (!w)
		return REASON_INTERNAL;
	if (service == NO_ENTRY) {
		if (has_closed(w)) // a NAT rule may make a flow with the same tuple
			end_closed(w, p->family == FAMILY_6);
		return REASON_NONE;
	}
	if (have_cookies) {
		reason = cookie_new(p, plan, service);
		if (reason != REASON_NONE)
			return reason;
	}
	reason = service_new(p, plan, service);
	keep = reason == REASON_NEW_FLOW;
	if (keep && has_closed(w)) {
		reason = reopen(p, plan);
		keep = reason == REASON_NONE;
		if (keep)
			end_closed(w, p->family == FAMILY_6);
	}
	if (keep) {
		reason = service_keep(p, plan);
		if (reason == REASON_SYN) // without state, the hash selects the backend, as for the following packets
			reason = service_syn(p, plan);
	}
	return have_cookies && plan->edits & EDIT_SPLICE ? cookie_flow(p, plan, reason) : reason;
}

// Plans a packet without a flow that is not for a service.
__noinline enum reason decide_rest(const struct packet *p, struct plan *plan)
{
	enum reason reason = REASON_NONE;

	if (!p || !plan)
		return REASON_INTERNAL;
	if (have_reverse) {
		reason = service_reply(p, plan);
		if (reason != REASON_NONE)
			return reason;
	}
	if (have_pools) {
		reason = decide_pool(p, plan);
		if (reason != REASON_NONE)
			return reason;
	}
	if (have_prefixes) {
		reason = stateless(p, plan);
		if (reason != REASON_NONE)
			return reason;
	}
	if (have_nat)
		reason = decide_nat(p, plan);
	return reason == REASON_NONE ? REASON_NOT_OURS : reason;
}

// Plans a packet without a flow. service: the service that listens on its destination, or NO_ENTRY.
static __always_inline enum reason decide_miss(struct packet *p, struct plan *plan, __u32 service)
{
	enum reason reason = REASON_NONE;

	plan->owner_nat = OWNER_NONE;
	if (have_services && any_ended() && was_ended(p)) {
		plan->answer = ANSWER_RESET;
		return REASON_NO_FLOW;
	}
	if (have_services)
		reason = decide_service(p, plan, service);
	return reason == REASON_NONE ? decide_rest(p, plan) : reason;
}

#endif
