// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SYNs in the tuple of a closed connection to a service. The SYN passes all checks and is scheduled
// like any other. If the scheduler selects the same backend, the connection continues in the flow
// of the closed one, with its keys, rewrites, port and next hop. Frequent reuse of tuples therefore
// needs no room in the table and no route lookup. Otherwise the flow ends.
#ifndef SLUICE_CLOSED_H
#define SLUICE_CLOSED_H

#include "nat/pool.h"
#include "service/admit.h"

static __always_inline bool has_closed(const struct work *w)
{
	return w->closed.index != NO_ENTRY;
}

// Records the flow of a closed connection. "index" is its primary entry m.
static __always_inline void record_closed(struct closed *c, struct entry_meta *m, struct entry_meta *twin, __u32 index,
					  const bool v6)
{
	c->index = index;
	c->twin = m->twin;
	c->port = m->flags & ENTRY_PORT ? *ref_of(twin) : 0;
	c->owner = m->owner;
	c->backend = m->backend;
	c->hop = m->hop;
	c->hop_gen = m->hop_gen;
	c->twin_family = v6 != !!(m->flags & ENTRY_CROSS) ? FAMILY_6 : FAMILY_4;
}

// Reports whether a closed flow may serve another connection. Only the sweeper releases a binding.
static __always_inline bool reusable(const struct entry_meta *m)
{
	return m->heard & HEARD_CLOSED && !(m->flags & ENTRY_BOUND);
}

// Reports whether a reply entry has the destination of a plan and, if it has no source from a pool,
// also its source.
static __always_inline bool same_ends(const struct plan *plan, __u32 twin, bool sourced, const bool v6)
{
	void *e = entry_at(twin, v6);

	if (!e)
		return false;
	if (v6) {
		struct tuple *key = &((struct flow6 *)e)->key;

		return key->saddr.d[0] == plan->to.daddr.d[0] && key->saddr.d[1] == plan->to.daddr.d[1] &&
		       key->sport == plan->to.dport &&
		       (sourced || (key->daddr.d[0] == plan->to.saddr.d[0] && key->daddr.d[1] == plan->to.saddr.d[1] &&
				    key->dport == plan->to.sport));
	}
	struct tuple4 *key = &((struct flow4 *)e)->key;

	return key->saddr == plan->to.daddr.w[0] && key->sport == plan->to.dport &&
	       (sourced || (key->daddr == plan->to.saddr.w[0] && key->dport == plan->to.sport));
}

// Reports whether the flow of the closed connection has the rewrites of a plan. "sourced": the
// source is from a pool, and may differ.
__noinline int goes_there(const struct plan *plan, const struct closed *c, __u32 sourced)
{
	if (!plan || !c || c->index == NO_ENTRY || c->owner != plan->owner || c->backend != plan->backend)
		return 0;
	if (c->twin == NO_ENTRY || plan->flags & PLAN_SAME)
		return c->twin == NO_ENTRY && plan->flags & PLAN_SAME;
	if (c->twin_family != plan->family || !c->port != !sourced)
		return 0;
	return plan->family == FAMILY_6 ? same_ends(plan, c->twin, sourced, true) :
					  same_ends(plan, c->twin, sourced, false);
}

// Returns HEARD_EDITED if the programs edit the TCP headers of the clients' packets.
static __always_inline __u8 edited(const struct service *s)
{
	return s->flags & (SERVICE_TOA | SERVICE_PROXY) ? HEARD_EDITED : 0;
}

// Returns HEARD_EDITED if the programs edit the TCP headers of the replies.
static __always_inline __u8 back_edited(const struct service *s)
{
	return s->flags & SERVICE_PROXY ? HEARD_EDITED : 0;
}

// Reports whether a pool address belongs to the pool of a backend, provided that the numbers of the
// pool are consecutive.
static __always_inline bool in_backend_pool(__u32 number, const struct backend *b)
{
	__u32 at = number - pool_number(b->pool);

	return at < b->pool_len && pool_number(b->pool + at) == number;
}

// Gives a plan the source of the closed connection, if its address still belongs to the pool of the
// backend.
__noinline int source_again(struct plan *plan, const struct closed *c)
{
	struct pool_addr *address;
	struct backend *b;
	__u32 port, number, id;
	__be16 sport;

	if (!plan || !c || !c->port || c->twin == NO_ENTRY)
		return 0;
	port = c->port;
	number = (port >> 16) / PORT_CLASSES;
	id = plan->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	address = bpf_map_lookup_elem(&pools, &number);
	if (!b || !address || !in_backend_pool(number, b) || (address->local && (port & 0xffff) > local_port_last))
		return 0;
	sport = bpf_htons(port);
	if (plan->family == FAMILY_6) {
		struct flow6 *f = entry_at(c->twin, true);

		if (!f || f->key.dport != sport || f->key.daddr.d[0] != address->addr.d[0] ||
		    f->key.daddr.d[1] != address->addr.d[1])
			return 0;
	} else {
		struct flow4 *f = entry_at(c->twin, false);

		if (!f || f->key.dport != sport || f->key.daddr != address->addr.w[0])
			return 0;
	}
	plan->to.saddr = address->addr;
	plan->to.sport = sport;
	return 1;
}

#define CLAIM_TRIES 4

// Claims the flow of a closed connection: exactly one CPU replaces its state by "word". Returns the
// previous state, or 0 if the connection is not closed any more.
static __always_inline __u32 claim_closed(struct entry_meta *m, const struct entry_meta *twin, __u32 word)
{
#pragma clang loop unroll(disable)
	for (int i = 0; i < CLAIM_TRIES; i++) { // another CPU may write the next hop
		__u32 was = *(volatile __u32 *)flags_word(m), heard = was >> HEARD_SHIFT & 0xff;

		if (!(heard & HEARD_CLOSED) || !tcp_over(heard, m->seen, twin->heard, twin->seen))
			return 0;
		if (__sync_val_compare_and_swap(flags_word(m), was, word | (was & 0xffff0000)) == was)
			return was;
	}
	return 0;
}

// Moves the counters of an entry to a sum.
static __always_inline void take_counts(void *e, __u64 *packets, __u64 *bytes)
{
	__u64 *counts = e;

	*packets += counts[0];
	*bytes += counts[1];
	counts[0] = counts[1] = 0;
}

// Restarts a reply entry. Key, rewrite, next hop and port remain.
static __always_inline void restart_reply(__u32 index, __u32 word, __u32 now, __u64 *packets, __u64 *bytes,
					  const bool v6)
{
	void *e = entry_at(index, v6);
	struct entry_meta *m;

	if (!e)
		return;
	m = meta_of(e, v6);
	take_counts(e, packets, bytes);
	m->seen = now;
	*(volatile __u32 *)flags_word(m) = word | (__u32)m->hop << 16;
}

static __always_inline void release_half_open(void)
{
	struct control *c = the_control();

	if (c)
		half_open_give(c);
}

// Releases the charges of a connection whose flow the sweeper ended at the same time. The
// connection is not counted as open yet.
static __always_inline void release_charges(struct entry_meta *m, const struct client_key *who)
{
	__u32 was = take_charges(m);

	if (was & ENTRY_HALF_OPEN)
		release_half_open();
	if (was & HEARD_CLOSED << HEARD_SHIFT)
		count_again(m->owner, m->backend);
	else if (m->flags & ENTRY_CLIENT)
		service_flow_put(who);
}

static __always_inline bool is_live(void *e, const bool v6)
{
	return *(volatile __u32 *)state_word(e, v6) >> STATE_SHIFT == ENTRY_LIVE;
}

// Restarts the flow of a closed connection for the connection of a SYN. "flags": charges of the new
// connection, and ENTRY_PORT. Keys and rewrites remain, so that a concurrent packet of the old
// connection is rewritten correctly. It may be counted for the new one. Returns REASON_NEW_FLOW;
// REASON_FLOW if another CPU has changed the flow, with the charges still to release; REASON_CLASH
// if the sweeper has ended it, without charges.
static __always_inline enum reason restart(const struct packet *p, struct work *w, const struct service *s, __u32 flags)
{
	__u32 index = w->closed.index, twin = w->closed.twin, heard = HEARD_SYN | edited(s), was;
	bool v6 = p->family == FAMILY_6;
	void *e = v6 ? entry_at(index, true) : entry_at(index, false);
	struct entry_meta *m, *reply;
	__u64 packets = 0, bytes = 0;

	if (!e)
		return REASON_FLOW;
	m = v6 ? meta_of(e, true) : meta_of(e, false);
	reply = twin == NO_ENTRY ? m : twin_meta(m, v6);
	if (!reply)
		return REASON_FLOW;
	flags |= m->flags & ENTRY_CROSS;
	if (p->tcp_flags & TCP_FIN)
		heard |= HEARD_FIN;
	was = claim_closed(m, reply, flags | ENTRY_PRIMARY | heard << HEARD_SHIFT);
	if (!was)
		return REASON_FLOW;
	was |= (__u32)reply->heard << HEARD_SHIFT;
	take_counts(e, &packets, &bytes);
	*(__u64 *)e = 1;
	*((__u64 *)e + 1) = p->l3_len;
	m->seen = p->now;
	flags |= (__u32)back_edited(s) << HEARD_SHIFT;
	if (twin != NO_ENTRY && w->closed.twin_family == FAMILY_6)
		restart_reply(twin, flags, p->now, &packets, &bytes, true);
	else if (twin != NO_ENTRY)
		restart_reply(twin, flags, p->now, &packets, &bytes, false);
	tally(w->closed.backend, packets, bytes); // the backend belongs to the service (see unserved)
	if (was & ENTRY_HALF_OPEN)
		release_half_open();
	if (was & HEARD_EDITED << HEARD_SHIFT) {
		index |= v6 ? ADJUST_6 : 0;
		bpf_map_delete_elem(&adjusts, &index);
	}
	if (v6 ? is_live(e, true) : is_live(e, false))
		return REASON_NEW_FLOW;
	release_charges(m, &w->who);
	return REASON_CLASH;
}

#endif
