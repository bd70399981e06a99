// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Connections that reuse the tuple of a closed one. The SYN ends the old flow and is scheduled like
// any other. If the new flow has the same keys and rewrites, it takes over the entries of the old
// flow. Frequent reuse of tuples therefore needs no additional room in the table.
//
// The keys and rewrites of the entries stay unchanged. A concurrent packet of the old flow may be
// counted for the new one, but its rewrite is correct.
#ifndef SLUICE_VACATE_H
#define SLUICE_VACATE_H

#include "nat/pool.h"

static __always_inline bool vacant(const struct work *w)
{
	return w->vacated.index != NO_ENTRY;
}

// Records a vacated flow. "index" is its primary entry; "port" is as in struct vacated.
static __always_inline void vacate(struct vacated *v, const struct entry_meta *m, __u32 index, __u32 port,
				   const bool v6)
{
	v->index = index;
	v->twin = m->twin;
	v->port = port;
	v->owner = m->owner;
	v->backend = m->backend;
	v->twin_family = v6 != !!(m->flags & ENTRY_CROSS) ? FAMILY_6 : FAMILY_4;
}

// Releases a vacated flow that no other flow replaces.
__noinline int give_up(struct vacated *v, __u32 now)
{
	if (!v || v->index == NO_ENTRY)
		return 0;
	if (v->twin != NO_ENTRY)
		kill_index(v->twin, now, ENTRY_DEAD, v->twin_family == FAMILY_6);
	if (v->port)
		give_port(v->port >> 16, v->port & 0xffff);
	v->index = NO_ENTRY;
	return 0;
}

// Reports whether a plan has the same destination as the vacated flow, according to its reply
// entry. The source from a pool may differ.
__noinline int goes_there(const struct plan *plan, const struct vacated *v)
{
	if (!plan || !v || v->index == NO_ENTRY || v->owner != plan->owner)
		return 0;
	if (v->twin == NO_ENTRY)
		return !!(plan->flags & PLAN_SAME);
	if (v->backend != plan->backend || v->twin_family != plan->family || plan->flags & PLAN_SAME)
		return 0;
	if (plan->family == FAMILY_6) {
		struct flow6 *f = entry_at(v->twin, true);

		return f && f->key.saddr.d[0] == plan->to.daddr.d[0] && f->key.saddr.d[1] == plan->to.daddr.d[1] &&
		       f->key.sport == plan->to.dport;
	}
	struct flow4 *f = entry_at(v->twin, false);

	return f && f->key.saddr == plan->to.daddr.w[0] && f->key.sport == plan->to.dport;
}

// Reports whether a pool address belongs to the pool of a backend, provided that the numbers of the
// pool are consecutive.
static __always_inline bool in_backend_pool(__u32 number, const struct backend *b)
{
	__u32 at = number - pool_number(b->pool);

	return at < b->pool_len && pool_number(b->pool + at) == number;
}

// Reuses the port of the vacated flow for a plan, if its address still belongs to the backend's
// pool. Returns map << 16 | port, or 0.
__noinline int port_again(struct plan *plan, struct vacated *v)
{
	struct pool_addr *address;
	struct backend *b;
	__u32 port, number, id;
	__be16 sport;

	if (!plan || !v || v->index == NO_ENTRY || !v->port || v->twin == NO_ENTRY)
		return 0;
	port = v->port;
	number = (port >> 16) / PORT_CLASSES;
	id = plan->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	address = bpf_map_lookup_elem(&pools, &number);
	if (!b || !address || !in_backend_pool(number, b) || !goes_there(plan, v) ||
	    (address->local && (port & 0xffff) > local_port_last))
		return 0;
	sport = bpf_htons(port);
	if (plan->family == FAMILY_6) {
		struct flow6 *f = entry_at(v->twin, true);

		if (!f || f->key.dport != sport || f->key.daddr.d[0] != address->addr.d[0] ||
		    f->key.daddr.d[1] != address->addr.d[1])
			return 0;
	} else {
		struct flow4 *f = entry_at(v->twin, false);

		if (!f || f->key.dport != sport || f->key.daddr != address->addr.w[0])
			return 0;
	}
	plan->to.saddr = address->addr;
	plan->to.sport = sport;
	if (!dry_run)
		v->port = 0;
	return port;
}

// Resets an entry except for its key, rewrite and next hop. "word" holds the flags and the TCP
// state.
static __always_inline void begin_entry(void *e, __u32 word, __u32 now, __u64 packets, __u64 bytes, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u64 *counts = e;

	counts[0] = packets;
	counts[1] = bytes;
	m->seen = now;
	*(volatile __u32 *)flags_word(m) = word | (__u32)m->hop << 16;
}

static __always_inline bool begin_reply(const struct new_flow *b, __u32 twin, const bool v6)
{
	void *e = entry_at(twin, v6);

	if (!e || !key_equal(e, &b->back, v6))
		return false;
	begin_entry(e, b->flags | (__u32)b->back_edited << HEARD_SHIFT, b->now, 0, 0, v6);
	*ref_of(meta_of(e, v6)) = b->ref;
	return true;
}

static __always_inline bool begin_primary(const struct new_flow *b, __u32 index, const bool v6)
{
	void *e = entry_at(index, v6);
	struct entry_meta *m;
	__u32 *word, was;

	if (!e)
		return false;
	m = meta_of(e, v6);
	word = state_word(e, v6);
	was = *(volatile __u32 *)word;
	if (was >> STATE_SHIFT != ENTRY_DEAD)
		return false;
	begin_entry(e, b->flags | ENTRY_PRIMARY | (__u32)(b->heard | b->edited) << HEARD_SHIFT, b->now, 1, b->bytes,
		    v6);
	m->owner = b->owner;
	m->backend = b->backend;
	return __sync_val_compare_and_swap(word, was, (was & 0xffffff) | (__u32)ENTRY_LIVE << STATE_SHIFT) == was;
}

// Replaces the vacated flow by a new one. Returns REASON_NEW_FLOW. Returns REASON_NONE if they
// differ; the vacated flow is then released. Returns REASON_FLOW like make_flow.
__noinline int take_place(struct new_flow *b, struct vacated *v)
{
	__u32 mine, twin, found;
	bool fits, v6;

	if (!b || !v || v->index == NO_ENTRY)
		return REASON_NONE;
	v6 = b->family == FAMILY_6;
	mine = v->index;
	twin = v->twin;
	fits = v->owner == b->owner && (twin == NO_ENTRY) == !!b->one_way &&
	       (b->one_way || (v->backend == b->backend && v->twin_family == b->to_family));
	if (b->family != b->to_family)
		b->flags |= ENTRY_CROSS;
	if (fits && twin != NO_ENTRY)
		fits = b->to_family == FAMILY_6 ? begin_reply(b, twin, true) : begin_reply(b, twin, false);
	if (fits)
		fits = v6 ? begin_primary(b, mine, true) : begin_primary(b, mine, false);
	if (!fits) {
		give_up(v, b->now);
		return REASON_NONE;
	}
	b->index = mine;
	found = first_flow(&b->key, mine, v6 == (b->to_family == FAMILY_6) ? twin : NO_ENTRY, v6);
	if (found == mine) {
		v->index = NO_ENTRY;
		return REASON_NEW_FLOW;
	}
	kill_index(mine, b->now, ENTRY_DEAD, v6);
	give_up(v, b->now);
	b->index = found;
	return found == NO_ENTRY ? REASON_CLASH : REASON_FLOW;
}

#endif
