// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Access lists, connection limits, rates and connection counters of services.
#ifndef SLUICE_ADMIT_H
#define SLUICE_ADMIT_H

#include "event.h"
#include "nat/nat.h"
#include "service/schedule.h"
#include "service/syn.h"

// Checks the client's address against the allow and deny lists of a service.
static __always_inline enum reason service_lists(const struct packet *p, const struct service *s)
{
	__u64 sets;

	if (!(s->allow | s->deny))
		return REASON_NONE;
	sets = member_of(&p->tuple.saddr, LIST_SETS, p->family == FAMILY_6);
	if (sets & s->deny)
		return REASON_DENIED;
	return s->allow && !(sets & s->allow) ? REASON_NOT_ALLOWED : REASON_NONE;
}

// Checks the connection limits of a service and of the client. Returns the reason for a refusal, or
// REASON_NONE. It changes no counter: a SYN that creates no flow passes the same check as a SYN
// that creates one.
__noinline enum reason service_full(const struct packet *p, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);
	struct client_key who = {};

	if (!p || !s || !l)
		return REASON_INTERNAL;
	if (s->max_flows && l->active >= (__s64)s->max_flows)
		return REASON_LIMIT_CONNECTIONS;
	if (!s->max_client_flows)
		return REASON_NONE;
	client_of(&who, &p->tuple.saddr, id, p->family == FAMILY_6);
	return client_full(&who, s->max_client_flows) ? REASON_CLIENT_FLOWS : REASON_NONE;
}

// Charges one connection to the rates of a service. If the connection has been admitted before, it
// is charged while the rate has room, and never refused.
__noinline enum reason service_rates(const struct packet *p, __u32 id, __u32 admitted)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);
	struct client_key who = {};

	if (!p || !s || !l)
		return REASON_INTERNAL;
	if (s->client_rate_ns) {
		client_of(&who, &p->tuple.saddr, id, p->family == FAMILY_6);
		if (!client_may(&who, s->client_rate_ns, s->client_burst_ns, true) && !admitted)
			return REASON_LIMIT_CLIENT_RATE;
	}
	if (s->rate_ns && !rate_take(&l->tat, s->rate_ns, s->burst_ns) && !admitted)
		return REASON_LIMIT_RATE;
	return REASON_NONE;
}

// Checks the connection limits and rates of a service. A connection is refused at its SYN or not at
// all, because an answered client considers the connection open. If the SYN created no flow
// (PLAN_ADMITTED), it passed the check of the rates. The proof of a cookie then only charges the
// rates.
static __always_inline enum reason service_admit(const struct packet *p, const struct plan *plan,
						 const struct service *s, __u32 id)
{
	bool admitted = plan->flags & PLAN_ADMITTED, cookie = plan->edits & EDIT_SPLICE;
	enum reason reason;

	if (dry_run || p->flags & PACKET_LATER_FRAGMENT || (admitted && !cookie))
		return REASON_NONE;
	reason = admitted || !(s->max_flows | s->max_client_flows) ? REASON_NONE : service_full(p, id);
	if (reason != REASON_NONE || !(s->client_rate_ns | s->rate_ns))
		return reason;
	return service_rates(p, id, admitted);
}

// Adds traffic to the counters of a backend and its service on this CPU.
static __always_inline void tally(__u32 backend, __u64 packets, __u64 bytes)
{
	struct tally *t = bpf_map_lookup_elem(&tallies, &backend);

	if (!t)
		return;
	t->packets += packets;
	t->bytes += bytes;
}

// Adds the traffic of an ended flow to the counters of its service and backend.
static __always_inline void add_traffic(__u32 owner, __u32 backend, __u64 packets, __u64 bytes)
{
	struct load *l = bpf_map_lookup_elem(&service_loads, &owner);
	struct load *b = bpf_map_lookup_elem(&backend_loads, &backend);

	if (l) {
		__sync_fetch_and_add(&l->packets, packets);
		__sync_fetch_and_add(&l->bytes, bytes);
	}
	if (b) {
		__sync_fetch_and_add(&b->packets, packets);
		__sync_fetch_and_add(&b->bytes, bytes);
	}
}

// Removes a closed or expired connection from the counters of its service, backend and client.
static __always_inline void service_uncount(const union addr *from, __u32 owner, __u32 backend, __u8 flags, __u8 family)
{
	struct load *l = bpf_map_lookup_elem(&service_loads, &owner);
	struct load *b = bpf_map_lookup_elem(&backend_loads, &backend);
	struct client_key who = {};

	if (l)
		__sync_fetch_and_sub(&l->active, 1);
	if (b)
		__sync_fetch_and_sub(&b->active, 1);
	if (flags & ENTRY_CLIENT) {
		client_of(&who, from, owner, family == FAMILY_6);
		service_flow_put(&who);
	}
}

// Balances the subtraction of a connection that was closed before it was counted as open.
static __always_inline void count_again(__u32 owner, __u32 backend)
{
	struct load *l = bpf_map_lookup_elem(&service_loads, &owner);
	struct load *b = bpf_map_lookup_elem(&backend_loads, &backend);

	if (l)
		__sync_fetch_and_add(&l->active, 1);
	if (b)
		__sync_fetch_and_add(&b->active, 1);
}

// Removes a flow from the counters when a packet has closed it. index: the entry of the packet's
// direction, of family v6. The entries and ports of the flow remain until it expires (RFC 5382
// REQ-5).
__noinline int flow_closed(__u32 index, __u32 v6)
{
	struct entry_meta *m;
	union addr from = {};
	void *e;

	e = v6 ? entry_at(index, true) : entry_at(index, false);
	if (!e)
		return 0;
	m = v6 ? meta_of(e, true) : meta_of(e, false);
	if (!(m->flags & ENTRY_PRIMARY)) {
		index = m->twin;
		v6 = v6 != !!(m->flags & ENTRY_CROSS);
	}
	if (v6) {
		struct flow6 *f = entry_at(index, true);

		if (!f)
			return 0;
		from = f->key.saddr;
		m = &f->meta;
	} else {
		struct flow4 *f = entry_at(index, false);

		if (!f)
			return 0;
		from.w[0] = f->key.saddr;
		m = &f->meta;
	}
	if (!(m->flags & ENTRY_NAT))
		service_uncount(&from, m->owner, m->backend, m->flags, v6 ? FAMILY_6 : FAMILY_4);
	return 0;
}

// Reports a new connection to user space, within the rate limit of the service's log.
__noinline int log_connection(const struct packet *p, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct client_key who = { .owner = CLIENT_LOG | id };
	struct event *e;

	if (!p || !s || !client_may(&who, s->log_ns, s->log_burst_ns, false))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = EVENT_CONNECTION;
	e->ifindex = p->ifindex;
	e->len = p->l3_len;
	e->addr = p->tuple.saddr;
	e->to = p->tuple.daddr;
	e->sport = p->tuple.sport;
	e->dport = p->tuple.dport;
	e->l4_proto = p->tuple.l4_proto;
	e->family = p->family;
	e->owner = id;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

// Reports whether the packet is a TCP reset. Later fragments are excluded, because they have no TCP
// header.
static __always_inline bool resets(const struct packet *p)
{
	return p->tcp_flags & TCP_RST && !(p->flags & PACKET_LATER_FRAGMENT);
}

// Reports whether a client's reset exceeds the rate limit of the service.
__noinline int reset_refused(__u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);

	return s && l && s->reset_ns && !dry_run && !rate_take(&l->reset_tat, s->reset_ns, s->reset_burst_ns);
}

// The reason why an entry is removed.
enum sweep_why {
	SWEEP_PASS,  // periodic pass of the sweeper
	SWEEP_OPENS, // a SYN with the flow's key opens a new connection (used_again)
	SWEEP_END,   // user space ends the flow
};

// Reports whether the service or backend of a flow has been removed or is down.
static __always_inline bool unserved(__u32 owner, __u32 backend)
{
	struct service *s = bpf_map_lookup_elem(&services, &owner);
	struct backend *b = bpf_map_lookup_elem(&backends, &backend);

	return !s || !s->active || !b || b->state == BACKEND_DOWN || b->service != owner;
}

// Reports whether a SYN with the tuple of a flow opens another connection (RFC 9293 §3.6.1). This
// is so if the old connection has ended, or if its backend never answered and accepts no new
// connections. The new connection is scheduled like any other.
static __always_inline bool used_again(__u32 backend, __u8 heard, __u32 seen, __u8 twin_heard, __u32 twin_seen,
				       bool answers)
{
	struct backend *b;

	if (tcp_over(heard, seen, twin_heard, twin_seen))
		return true;
	if (answers ? twin_heard & HEARD_ANY : heard & HEARD_ACK)
		return false;
	b = bpf_map_lookup_elem(&backends, &backend);
	return b && b->state != BACKEND_UP;
}

// Reports whether a flow without a reply entry belongs to a service with a mode that needs one. The
// mode of the service has changed. The entry contains no rewrite for the packets.
static __always_inline bool lost_reply_half(__u32 twin, __u32 owner)
{
	struct service *s = twin == NO_ENTRY ? bpf_map_lookup_elem(&services, &owner) : (void *)0;

	return s && s->mode != MODE_DSR && s->mode != MODE_TUNNEL;
}

#endif
