// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Who may use a service, how much of it, and how its connections are counted.
#ifndef SLUICE_ADMIT_H
#define SLUICE_ADMIT_H

#include "event.h"
#include "nat.h"
#include "schedule.h"
#include "syn.h"

// Who may use a service at all.
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

// Numbers and rates of a service's connections. The rates were asked at the SYN already of a
// handshake that left no flow, and at the first fragment of a packet.
__noinline int service_admit(const struct packet *p, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);
	struct client_key who = {};

	if (!p || !s || !l)
		return REASON_INTERNAL;
	if (dry_run || p->flags & PACKET_LATER_FRAGMENT)
		return REASON_NONE;
	if (s->max_flows && l->active >= (__s64)s->max_flows)
		return REASON_LIMIT_CONNECTIONS;
	if (!(s->client_rate_ns | s->rate_ns) || (s->mode == MODE_DNAT && shakes_hands(p)))
		return REASON_NONE;
	if (s->client_rate_ns) {
		client_of(&who, &p->tuple.saddr, id, p->family == FAMILY_6);
		if (!client_may(&who, s->client_rate_ns, s->client_burst_ns, true))
			return REASON_LIMIT_CLIENT_RATE;
	}
	if (s->rate_ns && !rate_take(&l->tat, s->rate_ns, s->burst_ns))
		return REASON_LIMIT_RATE;
	return REASON_NONE;
}

// A connection of a service is no more: it has closed, or its flow has expired.
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
		client_flow_put(&who);
	}
}

// Stops counting a flow that a packet with the given entry has closed; what it
// holds besides stays until it expires (RFC 5382 REQ-5).
__noinline int flow_closed(const struct packet *p, __u32 index)
{
	struct entry_meta *m;
	union addr from = {};
	void *e;
	bool v6;

	if (!p)
		return 0;
	v6 = p->family == FAMILY_6;
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

// Counts a flow again that a SYN with the given entry, its opener's, opens once more after
// it was closed. REASON_NONE, or why it may not.
__noinline int flow_reopened(const struct packet *p, __u32 index)
{
	__u32 owner, backend, was, *state;
	struct client_key who = {};
	struct load *l, *b;
	struct entry_meta *m;
	struct service *s;
	void *e;
	int reason;
	bool v6;

	if (!p)
		return REASON_INTERNAL;
	v6 = p->family == FAMILY_6;
	e = v6 ? entry_at(index, true) : entry_at(index, false);
	if (!e)
		return REASON_INTERNAL;
	m = v6 ? meta_of(e, true) : meta_of(e, false);
	state = v6 ? state_word(e, true) : state_word(e, false);
	owner = m->owner;
	backend = m->backend;
	s = bpf_map_lookup_elem(&services, &owner);
	l = bpf_map_lookup_elem(&service_loads, &owner);
	b = bpf_map_lookup_elem(&backend_loads, &backend);
	if (!s || !l || !b)
		return REASON_INTERNAL;
	reason = service_admit(p, owner);
	if (reason != REASON_NONE)
		return reason;
	if (m->flags & ENTRY_CLIENT) {
		client_of(&who, &p->tuple.saddr, owner, v6);
		reason = client_flow_get(&who, s->max_client_flows ? s->max_client_flows : CLIENT_GONE);
		if (reason != REASON_NONE)
			return reason;
	}
	__sync_fetch_and_add(&l->active, 1);
	__sync_fetch_and_add(&b->active, 1);
	was = __sync_fetch_and_and(flags_word(m), ~(HEARD_CLOSED << HEARD_SHIFT));
	// Another CPU may have counted it, or the sweeper just ended it: who changes the bit owes.
	if (!(was & HEARD_CLOSED << HEARD_SHIFT) ||
	    (*(volatile __u32 *)state >> STATE_SHIFT != ENTRY_LIVE &&
	     !(__sync_fetch_and_or(flags_word(m), HEARD_CLOSED << HEARD_SHIFT) & HEARD_CLOSED << HEARD_SHIFT)))
		service_uncount(&p->tuple.saddr, owner, backend, m->flags, p->family);
	return REASON_NONE;
}

// Tells user space of a new connection, as often as the service's log may.
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

// A reset, of whose fragments the first one counts.
static __always_inline bool resets(const struct packet *p)
{
	return p->tcp_flags & TCP_RST && !(p->flags & PACKET_LATER_FRAGMENT);
}

// Limit on resets from clients: true when this one is too many.
__noinline int reset_refused(__u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);

	return s && l && s->reset_ns && !dry_run && !rate_take(&l->reset_tat, s->reset_ns, s->reset_burst_ns);
}

// Whether nobody serves a flow any more: its service or backend has been taken away, or is down.
static __always_inline bool unserved(__u32 owner, __u32 backend)
{
	struct service *s = bpf_map_lookup_elem(&services, &owner);
	struct backend *b = bpf_map_lookup_elem(&backends, &backend);

	return !s || !s->active || !b || b->state == BACKEND_DOWN || b->service != owner;
}

// Whether a flow of one direction, which does not know what its packets become, is of a
// service that has been given a mode with two.
static __always_inline bool estranged(__u32 twin, __u32 owner)
{
	struct service *s = twin == NO_ENTRY ? bpf_map_lookup_elem(&services, &owner) : (void *)0;

	return s && s->mode != MODE_DSR && s->mode != MODE_TUNNEL;
}

#endif
