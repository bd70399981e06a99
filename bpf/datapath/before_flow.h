// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Checks before the flow lookup: firewall rules, addresses that are never routed, fragments.
#ifndef SLUICE_BEFORE_FLOW_H
#define SLUICE_BEFORE_FLOW_H

#include "denied.h"
#include "nat/inward.h"
#include "nat/stateless.h"
#include "service/cookie.h"

// Returns the action of a reason. Reasons are ordered by action, except the newest ones: counters
// in a pinned map are indexed by the number, so numbers never change.
static __always_inline __u8 action_of(__u32 reason)
{
	if (reason <= REASON_NONE)
		return ACTION_DROP;
	if (reason <= REASON_FRAGMENT)
		return ACTION_FORWARD;
	if (reason <= REASON_FORWARDING_OFF || reason == REASON_OTHER_STATION || reason == REASON_MOVING)
		return ACTION_PASS;
	return ACTION_DROP;
}

// Evaluates the deny and allow rules of the first hook, in order. REASON_NONE: no rule denies the
// packet.
__noinline enum reason firewall(const struct packet *p)
{
	__u64 sources, dests;
	bool v6;

	if (!p)
		return REASON_INTERNAL;
	v6 = p->family == FAMILY_6;
	sources = member_of(&p->tuple.saddr, LIST_SETS, v6);
	dests = member_of(&p->tuple.daddr, LIST_SETS, v6);
	for (__u32 i = 0; i < 64; i++) {
		struct firewall_rule *r;
		__u32 at = i;
		__u16 port;

		if (i >= rule_count)
			break;
		r = bpf_map_lookup_elem(&firewall_rules, &at);
		if (!r)
			break;
		if ((r->sources && !(r->sources & sources)) || (r->dests && !(r->dests & dests)))
			continue;
		if ((r->ifindex && r->ifindex != p->ifindex) || (r->l4_proto && r->l4_proto != p->tuple.l4_proto))
			continue;
		port = bpf_ntohs(p->tuple.dport);
		if (r->first && (port < r->first || port > r->last))
			continue;
		if (r->rate_ns && (dry_run || rate_take(&r->tat, r->rate_ns, r->burst_ns)))
			continue; // within the rate, the rule does not match
		return r->action == ACTION_DROP ? REASON_DENIED : REASON_NONE;
	}
	return REASON_NONE;
}

// Reports whether rules deny the source of a packet without any other condition.
static __always_inline bool source_denied(const struct packet *p)
{
	const union addr *source = &p->tuple.saddr;

	return have_denied && (p->family == FAMILY_6 ? denied6(source->d[0], source->d[1]) : denied4(source->w[0]));
}

static __always_inline void fragment_key_of(struct fragment_key *key, const struct packet *p)
{
	key->saddr = p->tuple.saddr;
	key->daddr = p->tuple.daddr;
	key->id = p->frag_id;
	if (p->family == FAMILY_4) // RFC 8200 §4.5: the protocol does not identify an IPv6 packet
		key->l4_proto = p->inner_proto;
}

// Reports whether an IPv6 source address is never routed (ip6_rcv_core, ip6_forward; RFC 4291
// §2.5.6).
static __always_inline bool never_from6(const union addr *a)
{
	__u32 from = bpf_ntohl(a->w[0]);

	return from >> 24 == 0xff || from >> 22 == 0x3fa ||
	       (!a->d[0] &&
		(a->w[2] ? a->w[2] == bpf_htonl(0xffff) : bpf_ntohl(a->w[3]) <= 1)); // mapped; unspecified, loopback
}

// Reports whether a packet is never routed: its destination is multicast, broadcast, link-local or
// 0.0.0.0, or its source is invalid. A separate stack frame, so that its spills do not add to the stack of
// the miss path.
static __noinline bool never_routed(const struct packet *p)
{
	__u32 to = bpf_ntohl(p->tuple.daddr.w[0]);

	if (p->family == FAMILY_6)
		return to >> 24 == 0xff || to >> 22 == 0x3fa || never_from6(&p->tuple.saddr);
	return !to || to >> 28 == 0xe || to == 0xffffffff || martian4(p->tuple.saddr.w[0]);
}

#define FRAGMENT_SECONDS 30 // RFC 791 and RFC 8200 let hosts wait up to 60

// Stores the tuple and the reason of a first fragment for the later fragments.
__noinline int fragment_first(const struct packet *p, __u32 reason)
{
	struct fragment_key key = {};
	struct fragment f = {};
	struct control *c;

	if (!p || dry_run)
		return 0;
	fragment_key_of(&key, p);
	f.tuple = p->tuple;
	f.seen = p->now;
	f.reason = reason;
	f.tcp_flags = p->tcp_flags;
	bpf_map_update_elem(&fragments, &key, &f, BPF_ANY);
	c = the_control();
	if (c && c->holding)
		bpf_ringbuf_output(&early, &key, sizeof(key), 0);
	return 0;
}

// Copies the ports of the first fragment to a later one. REASON_NONE: the fragment is handled like
// the first one. Other reasons are the outcome of the first fragment.
__noinline enum reason fragment_later(struct packet *p)
{
	struct fragment_key key = {};
	struct fragment *f;

	if (!p)
		return REASON_INTERNAL;
	fragment_key_of(&key, p);
	f = bpf_map_lookup_elem(&fragments, &key);
	if (!f || elapsed(p->now, f->seen, FRAGMENT_SECONDS * hz))
		return REASON_ORPHAN_FRAGMENT;
	p->tuple = f->tuple;
	p->tcp_flags = f->tcp_flags;
	return action_of(f->reason) == ACTION_FORWARD ? REASON_NONE : f->reason;
}

// Handles a later fragment without a stored first fragment. If no ports are needed, it is
// translated. Unrelated packets pass.
__noinline enum reason fragment_orphan(const struct packet *p, struct plan *plan)
{
	struct pool_addr *address;
	bool v6;
	__u32 number;
	enum reason reason;

	if (!p || !plan)
		return REASON_INTERNAL;
	if (never_routed(p))
		return REASON_NOT_ROUTED;
	v6 = p->family == FAMILY_6;
	if (have_prefixes) {
		reason = stateless(p, plan);
		if (reason != REASON_NONE)
			return reason;
	}
	if (have_pools) {
		address = pool_of(&p->tuple.daddr, &number);
		if (address)
			return REASON_ORPHAN_FRAGMENT;
	}
	if (have_services && (member_of(&p->tuple.daddr, LIST_SERVED, v6) & SERVED_LISTENER ||
			      member_of(&p->tuple.saddr, LIST_SERVED, v6) & SERVED_BACKEND))
		return REASON_ORPHAN_FRAGMENT;
	return have_nat && translates(p) ? REASON_ORPHAN_FRAGMENT : REASON_NOT_OURS;
}

#endif
