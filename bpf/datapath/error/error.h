// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// ICMP errors about packets that this host has forwarded. The quoted packet identifies the flow,
// and is rewritten back. Errors never create, refresh or end a flow (RFC 4787 REQ-12, RFC 5508
// REQ-6).
#ifndef SLUICE_ERROR_H
#define SLUICE_ERROR_H

#include "error/quote.h"

// Finds the backend of a quoted packet again, for services that keep no flow.
static __always_inline enum reason error_of_service(const struct packet *about, struct plan *plan)
{
	__u32 id = service_of(about), backend;
	struct backend *b;
	struct service *s;

	if (id == NO_ENTRY)
		return have_reverse ? service_reply(about, plan) : REASON_NONE;
	s = bpf_map_lookup_elem(&services, &id);
	if (!s || !by_hash(s) || s->mode == MODE_FULLNAT)
		return REASON_NONE;
	backend = s->flags & SERVICE_SESSIONS ? schedule_session(about, id) : NO_ENTRY;
	if (backend == NO_ENTRY)
		backend = schedule(about, id, true);
	b = bpf_map_lookup_elem(&backends, &backend);
	if (!b)
		return REASON_NONE;
	plan->owner = id;
	aim(about, plan, s, b, backend);
	return REASON_STATELESS;
}

// Makes the plan of a packet that answers the quoted packet.
__noinline enum reason error_plan(const struct packet *about, struct plan *plan)
{
	__u32 index;
	enum reason reason;

	if (!about || !plan)
		return REASON_INTERNAL;
	index = find(&about->tuple, about->family == FAMILY_6);
	if (index != NO_ENTRY) {
		struct entry_meta *m = meta_at(index, about->family == FAMILY_6);
		void *e;

		if (!m)
			return REASON_INTERNAL;
		if (lost_reply_half(m->twin, m->owner))
			return REASON_ERROR_WITHOUT_FLOW;
		if (about->family == FAMILY_6) {
			e = entry_at(index, true);
			if (e)
				plan_flow(plan, e, index, true);
		} else {
			e = entry_at(index, false);
			if (e)
				plan_flow(plan, e, index, false);
		}
		if (m->twin == NO_ENTRY)
			plan_without_reply(about, plan, m->owner, m->backend);
		if (have_cookies && m->flags & ENTRY_PRIMARY && m->heard & HEARD_EDITED) {
			plan->record = index | (about->family == FAMILY_6 ? ADJUST_6 : 0);
			plan->edits = EDIT_SPLICE;
		}
		return REASON_FLOW;
	}
	reason = have_services ? error_of_service(about, plan) : REASON_NONE;
	if (reason == REASON_NONE && have_prefixes)
		reason = stateless(about, plan);
	return reason == REASON_NONE ? REASON_ERROR_WITHOUT_FLOW : reason;
}

// Handles an error that belongs to no flow. An error to a pool is dropped. An error with a source
// that a rule would translate is dropped too, because it could expose an inside address (RFC 5508
// REQ-4, REQ-5). Other errors pass.
__noinline enum reason unrelated_error(const struct packet *p)
{
	struct pool_addr *address;
	__u32 number;

	if (!p)
		return REASON_INTERNAL;
	if (have_pools) {
		address = pool_of(&p->tuple.daddr, &number);
		if (address && !address->local)
			return REASON_ERROR_WITHOUT_FLOW;
	}
	return have_nat && translates(p) ? REASON_ERROR_WITHOUT_FLOW : REASON_NOT_OURS;
}

// Verifies the checksums of an error and of the quoted IP header (RFC 5508 REQ-3). The checksum of
// a fragmented error cannot be verified, so that it is refused. Hosts send errors below that size
// (RFC 1812 §4.3.2.3, RFC 4443 §2.4 (c)).
static __always_inline bool error_valid(void *ctx, const struct packet *p, const struct quote *q, const bool xdp)
{
	__u32 len = p->l3_len - header_now(p);
	__u64 sum;

	if (q->bad || p->flags & PACKET_FIRST_FRAGMENT)
		return false;
	sum = sum_of(ctx, p->l4_off, len, xdp);
	if (p->family == FAMILY_6)
		sum += sum_ends(&p->tuple.saddr, &p->tuple.daddr, true) + bpf_htons(len) + bpf_htons(IPPROTO_ICMPV6);
	return fold16(sum) == 0xffff;
}

// Returns the offset of the checksum in a quoted segment, or 0 if the quotation ends before it.
static __always_inline __u32 quoted_check(const struct quote *q)
{
	__u32 at = q->l4_at + check_offset(q->l4_proto);

	return at + 2 <= q->end ? at : 0;
}

// Rewrites the quoted packet in place. Returns the change of the error's sum, or all ones on
// failure.
static __always_inline __u64 rewrite_quote(void *ctx, const struct plan *plan, const struct quote *q, const bool v6,
					   const bool xdp)
{
	// The quoted packet has the opposite direction.
	__u64 addrs = minus(sum_ends(&q->saddr, &q->daddr, v6)) + sum_ends(&plan->to.saddr, &plan->to.daddr, v6);
	struct ports ports = { plan->to.dport, plan->to.sport };
	__u64 delta = 0, covered = 0;
	__u32 at = quoted_check(q);
	__u16 check, was;

	if (v6) {
		if (!put(ctx, q->at + 8, &plan->to.daddr, 16, xdp) || !put(ctx, q->at + 24, &plan->to.saddr, 16, xdp))
			return ~0ULL;
		delta = addrs;
	} else {
		__be32 ends[2] = { plan->to.daddr.w[0], plan->to.saddr.w[0] };

		if (!put(ctx, q->at + 12, ends, sizeof(ends), xdp) || !get(ctx, q->at + IPV4_CHECK, &check, 2, xdp))
			return ~0ULL;
		check = check_after(check, addrs); // the sum of the header remains the same
		if (!put(ctx, q->at + IPV4_CHECK, &check, 2, xdp))
			return ~0ULL;
	}
	if (q->no_l4 && !(v6 && q->no_l4 == QUOTE_OTHER_ICMP)) // all ICMPv6 messages have a pseudo-header
		return fold32(delta);
	if (!q->no_l4 && is_icmp(q->l4_proto)) {
		covered = change(q->sport, plan->to.dport);
		if (!put(ctx, q->l4_at + 4, &plan->to.dport, 2, xdp))
			return ~0ULL;
	} else if (!q->no_l4) {
		covered = change(q->sport, ports.source) + change(q->dport, ports.dest);
		if (!put(ctx, q->l4_at, &ports, sizeof(ports), xdp))
			return ~0ULL;
	}
	delta += covered;
	if (!at || !get(ctx, at, &check, 2, xdp))
		return fold32(delta);
	if (!is_icmp(q->l4_proto) || v6)
		covered += addrs;
	// No checksum, or a checksum-neutral change (RFC 6296). An update would replace a zero by
	// its other representation.
	if ((q->l4_proto == IPPROTO_UDP && !check) || fold16(covered) == 0 || fold16(covered) == 0xffff)
		return fold32(delta);
	was = check;
	check = check_after(check, covered);
	if (q->l4_proto == IPPROTO_UDP && !check)
		check = 0xffff;
	if (!put(ctx, at, &check, 2, xdp))
		return ~0ULL;
	return fold32(delta + change(was, check));
}

// Rewrites an error and its quoted packet, within one family.
static __always_inline enum reason rewrite_error(void *ctx, const struct packet *p, const struct plan *plan,
						 const struct quote *q, const union addr *from, const bool v6,
						 const bool xdp)
{
	__u64 outer = minus(sum_ends(&p->tuple.saddr, &p->tuple.daddr, v6)) + sum_addr(from, v6) +
		      sum_addr(&plan->to.daddr, v6),
	      delta;
	__u8 down = hops_down(plan), ttl = p->ttl - down;
	__u16 check;

	delta = rewrite_quote(ctx, plan, q, v6, xdp);
	if (delta == ~0ULL || !get(ctx, p->l4_off + ICMP_CHECK, &check, 2, xdp))
		return REASON_INTERNAL;
	check = check_after(check, delta + (v6 ? outer : 0));
	if (!put(ctx, p->l4_off + ICMP_CHECK, &check, 2, xdp))
		return REASON_INTERNAL;
	if (v6) {
		if (!put(ctx, ETH_HLEN + 7, &ttl, 1, xdp) || !put(ctx, ETH_HLEN + 8, from, 16, xdp) ||
		    !put(ctx, ETH_HLEN + 24, &plan->to.daddr, 16, xdp))
			return REASON_INTERNAL;
		return REASON_NONE;
	}
	__be32 ends[2] = { from->w[0], plan->to.daddr.w[0] };

	if (!get(ctx, ETH_HLEN + IPV4_CHECK, &check, 2, xdp))
		return REASON_INTERNAL;
	check = check_after(check, outer + ttl_change(down));
	if (!put(ctx, ETH_HLEN + 8, &ttl, 1, xdp) || !put(ctx, ETH_HLEN + IPV4_CHECK, &check, 2, xdp) ||
	    !put(ctx, ETH_HLEN + 12, ends, sizeof(ends), xdp))
		return REASON_INTERNAL;
	return REASON_NONE;
}

// Maps an offset in the IPv4 header to the same field in the IPv6 header, or to -1 (RFC 7915 figure
// 3). pointer4 is the inverse (figure 6).
static __always_inline int pointer6(__u8 at)
{
	switch (at) {
	case 0:
	case 1:
		return at;
	case 2:
	case 3:
		return 4;
	case 8:
		return 7;
	case 9:
		return 6;
	}
	if (at >= 12 && at < 16)
		return 8;
	return at >= 16 && at < 20 ? 24 : -1;
}

static __always_inline int pointer4(__u32 at)
{
	switch (at) {
	case 0:
	case 1:
		return at;
	case 4:
	case 5:
		return 2;
	case 6:
		return 9;
	case 7:
		return 8;
	}
	if (at >= 8 && at < 24)
		return 12;
	return at >= 24 && at < 40 ? 16 : -1;
}

// Returns the largest MTU plateau below a length (RFC 1191), for routers that report no MTU.
static __always_inline __u32 plateau(__u32 length)
{
	const __u16 plateaus[] = { 65535, 32000, 17914, 8166, 4352, 2002, 1492, 1006, 508, 296 };

	for (__u32 i = 0; i < sizeof(plateaus) / sizeof(plateaus[0]); i++)
		if (plateaus[i] < length)
			return plateaus[i];
	return 68;
}

// Converts type, code and second word of an ICMP error from IPv4 to IPv6 (RFC 7915 §4.2). mtu:
// upper limit of a reported MTU. Returns false if the message has no counterpart.
static __always_inline bool message6(struct icmp_header *m, const struct quote *q, __u32 mtu)
{
	__u32 rest = bpf_ntohl(*(__be32 *)&m->id), size;
	__u8 code = m->code;
	int pointer;

	switch (m->type) {
	case ICMP4_UNREACHABLE:
		m->type = ICMP6_UNREACHABLE;
		m->code = 0;
		*(__be32 *)&m->id = 0;
		if (code == 2) {
			m->type = ICMP6_PARAMETER;
			m->code = 1;
			*(__be32 *)&m->id = bpf_htonl(6); // the next header field
		} else if (code == 3) {
			m->code = 4;
		} else if (code == 4) {
			size = rest & 0xffff;
			if (!size)
				size = plateau(bpf_ntohs(q->len));
			size += 20;
			if (size > mtu)
				size = mtu;
			m->type = ICMP6_TOO_BIG;
			*(__be32 *)&m->id = bpf_htonl(size < 1280 ? 1280 : size);
		} else if (code == 9 || code == 10 || code == 13 || code == 15) {
			m->code = 1;
		} else if (code == 14 || code > 15) {
			return false;
		}
		return true;
	case ICMP4_TIME_EXCEEDED:
		m->type = ICMP6_TIME_EXCEEDED;
		*(__be32 *)&m->id = 0;
		return true;
	case ICMP4_PARAMETER:
		pointer = pointer6(rest >> 24);
		if ((code != 0 && code != 2) || pointer < 0)
			return false;
		m->type = ICMP6_PARAMETER;
		m->code = 0;
		*(__be32 *)&m->id = bpf_htonl(pointer);
		return true;
	}
	return false;
}

// Converts type, code and second word of an ICMP error from IPv6 to IPv4 (RFC 7915 §5.2). A
// reported MTU is reduced by the difference of the headers. If the quoted packet is a fragment, it
// is reduced by the fragment header too.
static __always_inline bool message4(struct icmp_header *m, const struct quote *q, __u32 mtu)
{
	__u32 rest = bpf_ntohl(*(__be32 *)&m->id), less = q->fragment ? 28 : 20, size;
	__u8 code = m->code;
	int pointer;

	switch (m->type) {
	case ICMP6_UNREACHABLE:
		if (code > 4)
			return false;
		m->type = ICMP4_UNREACHABLE;
		m->code = code == 1 ? 10 : code == 4 ? 3 : 1;
		*(__be32 *)&m->id = 0;
		return true;
	case ICMP6_TOO_BIG:
		size = rest > less ? rest - less : 0;
		m->type = ICMP4_UNREACHABLE;
		m->code = 4;
		*(__be32 *)&m->id = bpf_htonl(size < mtu ? size : mtu);
		return true;
	case ICMP6_TIME_EXCEEDED:
		m->type = ICMP4_TIME_EXCEEDED;
		*(__be32 *)&m->id = 0;
		return true;
	case ICMP6_PARAMETER:
		if (code == 1) {
			m->type = ICMP4_UNREACHABLE;
			m->code = 2;
			*(__be32 *)&m->id = 0;
			return true;
		}
		pointer = pointer4(rest);
		if (code != 0 || pointer < 0)
			return false;
		m->type = ICMP4_PARAMETER;
		m->code = 0;
		*(__be32 *)&m->id = bpf_htonl((__u32)pointer << 24);
		return true;
	}
	return false;
}

// Reports whether an IPv4 error has a routable destination. Such an error is translated to IPv6
// even from an invalid source, because it helps to find faults (RFC 7915 §4.1).
static __always_inline bool dest_routable4(const struct packet *p)
{
	__u32 to = bpf_ntohl(p->tuple.daddr.w[0]);

	return p->family == FAMILY_4 && to && to >> 28 != 0xe && to != 0xffffffff;
}

// Makes the plan for an ICMP error from the plan of a reply to the quoted packet.
static __always_inline enum reason error_decide(void *ctx, struct packet *p, struct plan *plan, const bool xdp)
{
	enum reason reason = REASON_NONE;
	bool unroutable = never_routed(p);
	struct work *w = the_work();

	if (!w)
		return REASON_INTERNAL;
	if (unroutable && !dest_routable4(p))
		return REASON_NOT_ROUTED;
	if (read_quote(ctx, p, w, xdp)) {
		if (cross_by_egress)
			BY_HOOK(cross_egress, ctx, &w->about);
		if (have_prefixes && !egress(ctx, &w->about, plan, false))
			return REASON_INTERNAL;
		plan->asked = 0;
		reason = error_plan(&w->about, plan);
	}
	if (unroutable &&
	    (plan->family == p->family || (action_of(reason) != ACTION_FORWARD && reason != REASON_UNTRANSLATABLE)))
		return REASON_NOT_ROUTED;
	if (cross_by_egress)
		BY_HOOK(cross_egress, ctx, p);
	if (action_of(reason) != ACTION_FORWARD && reason != REASON_UNTRANSLATABLE)
		return egress(ctx, p, plan, false) ? unrelated_error(p) : REASON_INTERNAL;
	if (!error_valid(ctx, p, &w->quote, xdp))
		return REASON_BAD_CHECKSUM;
	if (reason == REASON_UNTRANSLATABLE) // the error belongs to a rule and must not pass
		return reason;
	plan->entry = NO_ENTRY; // errors do not update the flow
	plan->hop = 0;
	if (plan->flags & PLAN_SAME) { // dsr, tunnel: unchanged to the backend
		plan->to = p->tuple;
		plan->flags |= PLAN_NO_L4;
		return REASON_ICMP_ERROR;
	}
	plan->flags |= PLAN_ERROR;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = plan->family;
	return REASON_ICMP_ERROR;
}

BOTH_HOOKS(enum reason, error, !p || !plan ? REASON_INTERNAL : error_decide(ctx, p, plan, xdp), struct packet *p,
	   struct plan *plan)

#endif
