// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Services: the checks of a packet, the choice of its backend, and the flow.
#ifndef SLUICE_LB_H
#define SLUICE_LB_H

#include "service/service_flow.h"

// Returns the protocol number of a packet in a family: ICMP has one number in IPv4 and another in
// IPv6.
static __always_inline __u8 proto_in(__u8 l4_proto, __u8 family)
{
	if (l4_proto == IPPROTO_ICMP || l4_proto == IPPROTO_ICMPV6)
		return family == FAMILY_6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	return l4_proto;
}

// Writes the IPv4 client of a port-forward as an IPv6 host sees it: behind the prefix of a nat64
// rule.
__noinline int embed_client(struct plan *plan, __u32 rule)
{
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &rule);

	if (!plan || !r)
		return 0;
	embed(&plan->to.saddr, &r->prefix, r->prefix_len, plan->to.saddr.w[0]);
	return 1;
}

static __always_inline __be16 server_port(const struct service *s, const struct backend *b, __be16 port)
{
	if (b->port)
		return b->port;
	return bpf_htons(bpf_ntohs(port) + s->shift);
}

// Directs a plan to a backend, according to the mode of the service.
static __always_inline void aim(const struct packet *p, struct plan *plan, const struct service *s,
				const struct backend *b, __u32 id)
{
	plan->backend = id;
	plan->to = p->tuple;
	plan->family = p->family;
	plan->gateway = b->addr;
	plan->gateway_family = b->family;
	switch (s->mode) {
	case MODE_DSR:
		plan->flags |= PLAN_SAME | PLAN_NO_L4;
		plan->backend_hop = id;
		return;
	case MODE_TUNNEL:
		plan->flags |= PLAN_SAME | PLAN_NO_L4;
		plan->encap = s->encap;
		plan->encap_port = s->encap_port;
		plan->backend_hop = id;
		return;
	case MODE_STATELESS:
		plan->backend_hop = id;
		break;
	}
	if (p->flags & PACKET_NO_FLOW)
		plan->flags |= PLAN_NO_L4;
	plan->to.daddr = b->addr;
	plan->to.dport = server_port(s, b, p->tuple.dport);
	plan->family = b->family;
	plan->to.l4_proto = proto_in(p->tuple.l4_proto, b->family);
	if (s->nat_rule != NO_RULE && p->family != b->family)
		embed_client(plan, s->nat_rule);
}

// Counts a packet that keeps no flow.
static __always_inline void count_stateless(__u32 backend, __u32 bytes)
{
	if (!dry_run && bytes) // no bytes: the quotation in an ICMP error
		tally(backend, 1, bytes);
}

static __always_inline bool by_hash(const struct service *s)
{
	return s->scheduler == SCHEDULER_MAGLEV || s->scheduler == SCHEDULER_SOURCE ||
	       s->scheduler == SCHEDULER_SYMMETRIC;
}

// Reports whether a service keeps no flows. Its replies bypass the gateway or need no flow, and its
// scheduler finds the same backend for every packet.
static __always_inline bool service_stateless(const struct service *s)
{
	return s->mode >= MODE_DSR && by_hash(s) && !(s->flags & SERVICE_KEEPS_FLOWS);
}

static __always_inline enum answer when_down(const struct packet *p, const struct service *s)
{
	if (s->flags & SERVICE_ANSWER_RESET)
		return p->tuple.l4_proto == IPPROTO_TCP ? ANSWER_RESET : ANSWER_UNREACHABLE_PORT;
	return s->flags & SERVICE_ANSWER_REJECT ? ANSWER_UNREACHABLE_PORT : ANSWER_NONE;
}

#define SOURCE_TRIES 8

// Reports whether a flow may get another source port, as in Linux, if its replies would be taken
// for packets of another flow.
static __always_inline bool moves_source(const struct packet *p, const struct service *s)
{
	return s->mode != MODE_DSR && s->mode != MODE_TUNNEL &&
	       (p->tuple.l4_proto == IPPROTO_TCP || p->tuple.l4_proto == IPPROTO_UDP);
}

// Returns the next source port to try: at least 1024, and far from the previous one.
static __always_inline __be16 next_source(__be16 port)
{
	return bpf_htons(1024 + (bpf_ntohs(port) + 16381) % (65536 - 1024));
}

// Prepares a plan for a packet that a client sends directly to a server. Its endpoint already has a
// flow to this server through a service. The replies would be taken for packets of that flow,
// unless service_keep chooses another source port. Returns 0 for any other packet.
__noinline int beside_flow(struct packet *p, struct plan *plan)
{
	bool syn = p && (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN, v6;
	struct entry_meta *m, *primary;
	struct work *w = the_work();

	if (!p || !plan || !w || p->flags & PACKET_LATER_FRAGMENT ||
	    !(p->tuple.l4_proto == IPPROTO_UDP || (p->tuple.l4_proto == IPPROTO_TCP && syn)))
		return 0;
	v6 = p->family == FAMILY_6;
	if (!(member_of(&p->tuple.daddr, LIST_SERVED, v6) & SERVED_BACKEND))
		return 0;
	reverse_tuple(&w->key, &p->tuple);
	w->key.kind = KIND_FLOW;
	w->key.state = ENTRY_LIVE;
	m = meta_at(find(&w->key, v6), v6);
	if (!m || m->flags & (ENTRY_PRIMARY | ENTRY_NAT))
		return 0;
	primary = twin_meta(m, v6);
	if (!primary)
		return 0;
	plan->owner = primary->owner;
	plan->owner_nat = OWNER_SERVICE;
	plan->backend = primary->backend;
	plan->to = p->tuple;
	plan->family = p->family;
	plan->gateway = p->tuple.daddr;
	plan->gateway_family = p->family;
	p->out = 0; // not the hairpin of a port-forward
	return 1;
}

// Makes the flow of a plan, with its port and its half-open quota. Returns REASON_SYN if the packet
// can have no flow; service_syn then handles it.
__noinline enum reason service_keep(const struct packet *p, struct plan *plan)
{
	struct control *c = the_control();
	struct work *w = the_work();
	__u32 flags, ref = 0, id;
	struct service *s;
	struct backend *b;
	bool sourced; // the flow gets a source address and port of the backend's pool
	enum reason reason;

	if (!p || !plan || !c || !w)
		return REASON_INTERNAL;
	id = plan->owner;
	s = bpf_map_lookup_elem(&services, &id);
	id = plan->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (!s || !b)
		return REASON_INTERNAL;
	sourced = s->mode == MODE_FULLNAT || answers_directly(p, b);
	// A valid cookie proves the address of the client: no half-open quota applies.
	flags = p->tuple.l4_proto == IPPROTO_TCP && !(plan->edits & EDIT_SPLICE) && !dry_run ? ENTRY_HALF_OPEN : 0;
	__builtin_memset(&w->request, 0, sizeof(w->request));
	if (flags && !half_open_take(c)) {
		// The hash finds the backend again without state, so that a SYN flood cannot
		// exhaust the table. A packet that needs a port is refused.
		return sourced || plan->family != p->family ? REASON_HALF_OPEN_FULL : REASON_SYN;
	}
	if (have_forwards && s->flags & SERVICE_PORT_FORWARD && p->out == p->ifindex &&
	    plan->family == p->family) { // otherwise the server's reply returns through the gateway anyway
		__builtin_memset(&w->source, 0, sizeof(w->source));
		reason = hairpin_source(p, plan, &w->source, NO_ENTRY);
		if (reason != REASON_FLOW && reason != REASON_NONE)
			goto refused;
		if (w->source.now)
			sourced = false; // a NAT rule translates the source of this client
		if (reason == REASON_FLOW && !portless(p)) {
			flags |= ENTRY_BOUND;
			ref = w->source.index;
		}
	}
	if (sourced) {
		reason = service_source(p, plan, &w->request);
		if (reason != REASON_NONE)
			goto refused;
		flags |= ENTRY_PORT;
		ref = w->request.map << 16 | w->request.port;
	}
	if (dry_run)
		return REASON_NEW_FLOW;
#pragma clang loop unroll(disable)
	for (int i = 0; i < SOURCE_TRIES; i++) {
		reason = service_flow(p, plan, w, flags, ref);
		if (reason == REASON_NEW_FLOW)
			return reason;
		flags &= w->new_flow.flags; // another CPU may have released the half-open quota
		if (reason != REASON_CLASH || flags & (ENTRY_PORT | ENTRY_BOUND) || !moves_source(p, s))
			break;
		plan->to.sport = next_source(plan->to.sport);
	}
	if (flags & ENTRY_PORT)
		give_port(ref >> 16, ref & 0xffff);
	if (flags & ENTRY_BOUND)
		binding_put(ref, p->family == FAMILY_6, p->now);
refused:
	if (flags & ENTRY_HALF_OPEN)
		half_open_give(c);
	return reason;
}

// Chooses the backend of a packet. "remember" records the client's persistence, because the caller
// will make a flow.
static __always_inline __u32 service_pick(const struct packet *p, const struct service *s, __u32 id, bool hash_only,
					  bool remember)
{
	__u32 backend = NO_ENTRY;
	struct backend *b;

	if (hash_only && p->tuple.l4_proto == IPPROTO_TCP && s->mode == MODE_DNAT) {
		backend = syn_backend(&p->tuple, p->family);
		b = bpf_map_lookup_elem(&backends, &backend);
		if (b && b->service == id && b->state != BACKEND_DOWN)
			return backend; // the backend that received the SYN
		backend = NO_ENTRY;
	}
	if (s->flags & SERVICE_SESSIONS)
		backend = schedule_session(p, id);
	if (backend == NO_ENTRY && s->sticky_ticks)
		backend = sticky_get(p, id);
	if (backend != NO_ENTRY)
		return backend;
	backend = schedule(p, id, hash_only);
	if (backend != NO_ENTRY && s->sticky_ticks && remember)
		sticky_put(backend, p->now);
	return backend;
}

// Reports whether the checksum of a packet would be wrong if the service changed its addresses and
// left its transport header unchanged.
static __always_inline bool checksums_addresses(const struct packet *p, const struct service *s)
{
	if (s->mode == MODE_DSR || s->mode == MODE_TUNNEL)
		return false;
	return s->mode == MODE_FULLNAT || p->tuple.l4_proto == PROTO_DCCP || p->tuple.l4_proto == PROTO_UDPLITE;
}

// Returns REASON_NONE if a TCP packet without a flow may begin one.
static __always_inline enum reason tcp_begins(const struct packet *p, const struct plan *plan, const struct service *s,
					      bool syn, bool stateless)
{
	const bool strict = s->flags & SERVICE_STRICT_TCP;

	// Data in a later fragment of the SYN would precede the PROXY header.
	if (syn && s->flags & SERVICE_PROXY && p->flags & PACKET_FIRST_FRAGMENT)
		return REASON_STRICT_TCP;
	if (syn)
		return strict && p->tcp_flags & TCP_FIN ? REASON_STRICT_TCP : REASON_NONE;
	if (stateless)
		return REASON_NONE;
	if (p->tcp_flags & TCP_RST)
		return REASON_NO_FLOW;
	return strict && !(plan->flags & PLAN_ADMITTED) ? REASON_STRICT_TCP : REASON_NONE;
}

// Reports whether the packet continues a handshake that was admitted with its SYN, without a flow.
static __always_inline bool was_admitted(const struct packet *p, const struct plan *plan, const struct service *s,
					 bool syn)
{
	return plan->edits & EDIT_SPLICE || (!syn && s->mode == MODE_DNAT && shakes_hands(p));
}

// Reports whether nftables may have the connection of a packet that has no flow here, because its
// service moves between the datapaths.
static __always_inline bool moves(const struct packet *p, const struct service *s, bool syn)
{
	if (!(s->flags & (SERVICE_ARRIVES | SERVICE_LEAVES)))
		return false;
	return syn ? s->flags & SERVICE_LEAVES : !shakes_hands(p);
}

// Forwards a SYN without a flow. The function records the backend, provided that the table has room
// for the flow that the rest of the handshake makes.
static __always_inline enum reason syn_passes(const struct packet *p, __u32 backend)
{
	if (!table_has_room(p->family == FAMILY_6))
		return REASON_TABLE_FULL;
	count_stateless(backend, p->l3_len);
	return syn_remember(p, backend);
}

// Handles the first packet of a flow, or every packet of a service without flows. Returns
// REASON_NEW_FLOW if service_keep has to make a flow.
__noinline enum reason service_new(const struct packet *p, struct plan *plan, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct work *w = the_work();
	bool syn, stateless;
	enum reason reason;
	struct backend *b;
	__u32 backend;

	if (!p || !plan || !s)
		return REASON_INTERNAL;
	plan->owner = id;
	plan->owner_nat = OWNER_SERVICE;
	syn = p->tuple.l4_proto == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
	stateless = service_stateless(s);
	if (moves(p, s, syn))
		return REASON_MOVING;
	reason = service_lists(p, s); // first: a refused client must learn nothing about the backends
	if (reason != REASON_NONE)
		return reason;
	if (p->flags & PACKET_NO_FLOW && checksums_addresses(p, s))
		return REASON_UNSUPPORTED_PROTOCOL;
	if (have_resets && resets(p) && stateless && reset_refused(id))
		return REASON_LIMIT_RESETS;
	if (was_admitted(p, plan, s, syn))
		plan->flags |= PLAN_ADMITTED;
	reason = p->tuple.l4_proto == IPPROTO_TCP ? tcp_begins(p, plan, s, syn, stateless) : REASON_NONE;
	if (reason != REASON_NONE)
		return reason;
	if (!(__u32)s->slots) {
		refuse(plan, REASON_NO_BACKEND, when_down(p, s));
		return REASON_NO_BACKEND;
	}
	reason = stateless && !syn ? REASON_NONE : service_admit(p, plan, s, id);
	if (reason != REASON_NONE)
		return reason;
	backend = service_pick(p, s, id, stateless || (p->tuple.l4_proto == IPPROTO_TCP && !syn), !stateless);
	if (backend == NO_ENTRY && plan->flags & PLAN_ADMITTED)
		backend = service_pick(p, s, id, true, false);
	b = bpf_map_lookup_elem(&backends, &backend);
	if (!b || (!stateless && !syn && p->tuple.l4_proto == IPPROTO_TCP && !(plan->flags & PLAN_ADMITTED) &&
		   !backend_room(id, backend)))
		return REASON_LIMIT_BACKEND; // the connection would break on any other backend
	if (s->flags & SERVICE_MSS_CLAMP && p->tcp_flags & TCP_SYN)
		plan->edits |= EDIT_MSS;
	aim(p, plan, s, b, backend);
	if (stateless) {
		count_stateless(backend, p->l3_len);
		return REASON_STATELESS;
	}
	// A connection that continues the flow of a closed one needs no room in the table.
	if (syn && s->flags & SERVICE_SYN_STATELESS && !answers_directly(p, b) &&
	    !(w && goes_there(plan, &w->closed, false)))
		return syn_passes(p, backend);
	return REASON_NEW_FLOW;
}

// Forwards a SYN that can have no flow. The hash decides its backend, as for the packets after it.
__noinline enum reason service_syn(const struct packet *p, struct plan *plan)
{
	struct service *s;
	struct backend *b;
	__u32 id, backend;

	if (!p || !plan)
		return REASON_INTERNAL;
	id = plan->owner;
	s = bpf_map_lookup_elem(&services, &id);
	if (!s)
		return REASON_INTERNAL;
	backend = service_pick(p, s, id, true, false);
	b = bpf_map_lookup_elem(&backends, &backend);
	if (!b)
		return REASON_NO_BACKEND;
	if (!backend_room(id, backend))
		return REASON_LIMIT_BACKEND;
	aim(p, plan, s, b, backend);
	return syn_passes(p, backend);
}

// Returns the backend that the hash selects for the request of a reply. "reply" is the tuple of the reply on its way to
// the client.
__noinline __u32 backend_of_reply(const struct tuple *reply, __u32 service, bool v6)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct tuple request;
	__u32 slot, count;
	__u64 table;

	if (!reply || !s)
		return NO_ENTRY;
	reverse_tuple(&request, reply);
	table = *(volatile __u64 *)&s->slots;
	count = (__u32)table;
	if (!count)
		return NO_ENTRY;
	slot = v6 ? hash_of(&request, s->scheduler, true) : hash_of(&request, s->scheduler, false);
	return slot_at((table >> 32) + ((__u64)slot * count >> 32));
}

// Handles the reply of a backend without a flow: the virtual endpoint becomes its source.
__noinline enum reason service_reply(const struct packet *p, struct plan *plan)
{
	struct listener_key key = {};
	struct service *s;
	struct reverse *r;
	bool syn_ack;
	__u32 id;

	if (!p || !plan)
		return REASON_INTERNAL;
	key.l4_proto = p->tuple.l4_proto;
	key.family = p->family;
	key.port = p->tuple.sport;
	__builtin_memcpy(key.addr, &p->tuple.saddr, sizeof(key.addr));
	r = bpf_map_lookup_elem(&reverses, &key);
	if (!r) {
		key.port = 0;
		r = bpf_map_lookup_elem(&reverses, &key);
		if (!r && have_any) {
			key.l4_proto = 0;
			r = bpf_map_lookup_elem(&reverses, &key);
		}
	}
	if (!r || r->ambiguous)
		return REASON_NONE;
	id = r->service;
	s = bpf_map_lookup_elem(&services, &id);
	if (!s)
		return REASON_NONE;
	syn_ack = s->mode != MODE_STATELESS && p->tuple.l4_proto == IPPROTO_TCP &&
		  ((p->tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK) || p->tcp_flags & TCP_RST);
	if (s->mode != MODE_STATELESS && !syn_ack && !(s->flags & SERVICE_NODES))
		return REASON_NONE;
	plan->to = p->tuple;
	plan->to.saddr = r->vip;
	if (key.port)
		plan->to.sport = r->port;
	else if (r->port)
		plan->to.sport = bpf_htons(bpf_ntohs(p->tuple.sport) + bpf_ntohs(r->port));
	syn_ack = syn_ack && answers_syn(p, &plan->to);
	if (!syn_ack && s->mode != MODE_STATELESS &&
	    (!(s->flags & SERVICE_NODES) || backend_of_reply(&plan->to, id, p->family == FAMILY_6) != r->backend))
		return REASON_NONE; // a packet of the backend's own connections
	if (!syn_ack && key.l4_proto && !listens_on(&key, &r->vip, plan->to.sport, id))
		return REASON_NONE;
	count_stateless(r->backend, p->l3_len);
	plan->owner = id;
	plan->owner_nat = OWNER_SERVICE;
	plan->flags |= PLAN_REPLY;
	if (p->flags & PACKET_NO_FLOW)
		plan->flags |= PLAN_NO_L4;
	if (s->flags & SERVICE_MSS_CLAMP && p->tcp_flags & TCP_SYN)
		plan->edits |= EDIT_MSS;
	plan->family = p->family;
	plan->gateway = plan->to.daddr;
	plan->gateway_family = p->family;
	return syn_ack ? REASON_SYN_ACK : REASON_STATELESS;
}

#endif
