// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The flow of a service: its creation, its charges to quotas, and its source in mode fullnat.
#ifndef SLUICE_SERVICE_FLOW_H
#define SLUICE_SERVICE_FLOW_H

#include "nat/hairpin.h"
#include "service/closed.h"
#include "service/listener.h"
#include "service/syn.h"

// Reports whether the service of a packet is a port-forward that inside hosts may use. If so,
// plan->gateway becomes the server.
__noinline int to_server(const struct packet *p, struct plan *plan, __u32 service)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct backend *b;
	__u32 id;

	if (!p || !plan)
		return 0;
	if (!s || !(s->flags & SERVICE_PORT_FORWARD))
		return 0;
	id = slot_at(s->slots >> 32);
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b || b->family != p->family)
		return 0;
	plan->gateway = b->addr;
	return 1;
}

static __always_inline struct new_flow *new_flow_of(struct work *w, const struct packet *p, const struct plan *plan)
{
	struct new_flow *b = &w->new_flow;

	__builtin_memset(b, 0, sizeof(*b));
	b->key = p->tuple;
	b->to = plan->to;
	b->to.kind = KIND_FLOW;
	b->to.state = ENTRY_LIVE;
	reverse_tuple(&b->back, &b->to);
	reverse_tuple(&b->from, &b->key);
	b->now = p->now;
	b->family = p->family;
	b->to_family = plan->family;
	b->owner = plan->owner;
	b->backend = plan->backend;
	b->bytes = p->l3_len;
	b->one_way = !!(plan->flags & PLAN_SAME);
	if (p->tuple.l4_proto == IPPROTO_TCP)
		b->heard = (p->tcp_flags & TCP_SYN ? HEARD_SYN : HEARD_ACK) | (p->tcp_flags & TCP_FIN ? HEARD_FIN : 0);
	else
		b->heard = HEARD_ACK;
	return b;
}

static __always_inline void refuse(struct plan *plan, enum reason reason, enum answer answer)
{
	plan->action = ACTION_DROP;
	plan->reason = reason;
	plan->answer = answer;
}

// Fills work.new_flow for a service and charges the quota of the client. Returns REASON_NONE if the
// flow may be made.
__noinline enum reason new_service_flow(const struct packet *p, const struct plan *plan, __u32 flags, __u32 ref)
{
	struct work *w = the_work();
	struct service *s;
	struct new_flow *b;
	enum reason reason;
	__u32 id;

	if (!p || !plan || !w)
		return REASON_INTERNAL;
	id = plan->owner;
	s = bpf_map_lookup_elem(&services, &id);
	if (!s)
		return REASON_INTERNAL;
	b = new_flow_of(w, p, plan);
	b->flags = flags;
	b->ref = ref;
	b->edited = edited(s);
	b->back_edited = back_edited(s);
	if (plan->edits & EDIT_SPLICE)
		b->edited = b->back_edited = HEARD_EDITED;
	if (!s->max_client_flows)
		return REASON_NONE;
	client_of(&w->who, &p->tuple.saddr, id, p->family == FAMILY_6);
	reason = client_charge(&w->who, CLIENT_FLOW, plan->flags & PLAN_ADMITTED ? CLIENT_COUNT : s->max_client_flows);
	if (reason == REASON_NONE)
		b->flags |= ENTRY_CLIENT;
	return plan->flags & PLAN_ADMITTED ? REASON_NONE : reason;
}

// Counts a connection of a service and records the edits that its packets need. index: its primary
// entry.
static __always_inline enum reason made(const struct packet *p, struct plan *plan, const struct service *s, __u32 index)
{
	__u32 id = plan->owner, backend = plan->backend;
	struct load *l, *bl;

	l = bpf_map_lookup_elem(&service_loads, &id);
	bl = bpf_map_lookup_elem(&backend_loads, &backend);
	if (!l || !bl)
		return REASON_INTERNAL;
	__sync_fetch_and_add(&l->flows, 1);
	__sync_fetch_and_add(&l->active, 1);
	__sync_fetch_and_add(&bl->flows, 1);
	__sync_fetch_and_add(&bl->active, 1);
	if (s->log_ns)
		log_connection(p, id);
	plan->entry = index;
	plan->record = index | (p->family == FAMILY_6 ? ADJUST_6 : 0);
	if (s->flags & SERVICE_TOA)
		plan->edits |= EDIT_TOA;
	if (s->flags & SERVICE_PROXY)
		plan->edits |= EDIT_PROXY;
	return REASON_NEW_FLOW;
}

__noinline enum reason service_made(const struct packet *p, struct plan *plan, __u32 index)
{
	struct service *s;
	__u32 id;

	if (!p || !plan)
		return REASON_INTERNAL;
	id = plan->owner;
	s = bpf_map_lookup_elem(&services, &id);
	return s ? made(p, plan, s, index) : REASON_INTERNAL;
}

// Makes the flow of a service with all its charges and counters. It calls the steps one by one,
// because every step has a deep call chain (Linux 6.1).
static __always_inline int service_flow(const struct packet *p, struct plan *plan, struct work *w, __u32 flags,
					__u32 ref)
{
	enum reason reason = new_service_flow(p, plan, flags, ref);

	if (reason != REASON_NONE)
		return reason;
	reason = make_flow(&w->new_flow);
	if (reason == REASON_NEW_FLOW)
		return service_made(p, plan, w->new_flow.index);
	if (w->new_flow.flags & ENTRY_CLIENT)
		client_flow_put(&w->who);
	if (w->new_flow.uncounted)
		count_again(plan->owner, plan->backend);
	return reason;
}

// Reports whether a server would answer a client directly, under its own address: both are on one
// network, or on one host. A port-forward may give such a client the source of a NAT rule instead.
static __always_inline bool answers_directly(const struct packet *p, const struct backend *b)
{
	return b->network_len && (p->tuple.l4_proto == IPPROTO_TCP || p->tuple.l4_proto == IPPROTO_UDP) &&
	       in_prefix(&p->tuple.saddr, &b->addr, b->network_len);
}

// Reports whether the flow of the closed connection has the rewrites of a plan. The function adds
// the source from the pool to the plan.
static __always_inline bool continues(const struct packet *p, struct plan *plan, const struct service *s,
				      const struct closed *was)
{
	__u32 id = plan->backend;
	struct backend *b = bpf_map_lookup_elem(&backends, &id);
	bool sourced;

	if (!b || (have_forwards && s->flags & SERVICE_PORT_FORWARD && p->out == p->ifindex)) // perhaps a hairpin
		return false;
	sourced = s->mode == MODE_FULLNAT || answers_directly(p, b);
	return goes_there(plan, was, sourced) && (!sourced || source_again(plan, was));
}

// Continues the flow of a closed connection with the connection that a SYN opens. Returns
// REASON_NEW_FLOW; REASON_NONE if the connection needs another flow; REASON_FLOW if another CPU has
// changed the flow; REASON_CLASH if the sweeper has ended it meanwhile; or the reason for a refusal.
__noinline enum reason reopen(const struct packet *p, struct plan *plan)
{
	struct control *c = the_control();
	struct work *w = the_work();
	__u32 id, flags, index;
	struct service *s;
	enum reason reason;

	if (!p || !plan || !c || !w)
		return REASON_INTERNAL;
	id = plan->owner;
	s = bpf_map_lookup_elem(&services, &id);
	if (!s || !continues(p, plan, s, &w->closed))
		return REASON_NONE;
	if (dry_run)
		return REASON_NEW_FLOW;
	if (!half_open_take(c))
		return REASON_NONE;
	flags = ENTRY_HALF_OPEN | (w->closed.port ? ENTRY_PORT : 0);
	if (s->max_client_flows) {
		client_of(&w->who, &p->tuple.saddr, id, p->family == FAMILY_6);
		reason = client_charge(&w->who, CLIENT_FLOW, s->max_client_flows);
		if (reason != REASON_NONE)
			goto refused;
		flags |= ENTRY_CLIENT;
	}
	index = w->closed.index;
	reason = restart(p, w, s, flags);
	if (reason == REASON_CLASH)
		return reason;
	w->closed.index = NO_ENTRY;
	if (reason == REASON_NEW_FLOW) {
		plan->hop = w->closed.hop;
		plan->hop_gen = w->closed.hop_gen;
		return made(p, plan, s, index);
	}
	if (flags & ENTRY_CLIENT)
		service_flow_put(&w->who);
refused:
	half_open_give(c);
	return reason;
}

// Chooses the source of a fullnat flow from the backend's pool. On an address of this host, the
// port is below ip_local_port_range, so that it cannot conflict with local sockets.
__noinline enum reason service_source(const struct packet *p, struct plan *plan, struct port_request *r)
{
	__u32 class, id, at, first, len;
	struct pool_addr *address;
	enum reason reason = REASON_NO_PORT;
	struct backend *b;

	if (!p || !plan || !r)
		return REASON_INTERNAL;
	class = port_class(plan->to.l4_proto);
	id = plan->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b)
		return REASON_INTERNAL;
	first = b->pool;
	len = b->pool_len;
	at = (__u64)bpf_get_prandom_u32() * len >> 32;
	r->first = 1024;
	r->want = bpf_ntohs(p->tuple.sport) | 1024;
	if (dry_run && len) {
		at = pool_number(first);
		address = bpf_map_lookup_elem(&pools, &at);
		if (address)
			plan->to.saddr = address->addr;
		plan->to.sport = p->tuple.sport;
		return REASON_NONE;
	}
	for (__u32 i = 0; i < 8; i++) {
		__u32 number = pool_number(first + at);

		if (i >= len)
			break;
		address = bpf_map_lookup_elem(&pools, &number);
		if (!address)
			break;
		r->map = number * PORT_CLASSES + class;
		r->last = address->local ? local_port_last : 65535;
		reason = take_port(r);
		if (reason == REASON_NONE) {
			plan->to.saddr = address->addr;
			plan->to.sport = bpf_htons(r->port);
			return REASON_NONE;
		}
		at = at + 1 < len ? at + 1 : 0;
	}
	return reason;
}

#endif
