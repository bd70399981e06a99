// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// TCP connections that ended because their backend went down, while both endpoints consider them
// open.
#ifndef SLUICE_ENDED_H
#define SLUICE_ENDED_H

#include "flow/conn.h"

// Writes the tuple of an entry to the map of ended connections.
static __always_inline void remember_ended_half(__u32 index, __u32 of, const bool v6)
{
	void *e = entry_at(index, v6);
	struct tuple key = {};

	if (!e)
		return;
	if (v6) {
		key = ((struct flow6 *)e)->key;
		key.state = 0;
	} else {
		struct tuple4 *k = &((struct flow4 *)e)->key;

		key.saddr.w[0] = k->saddr;
		key.daddr.w[0] = k->daddr;
		key.sport = k->sport;
		key.dport = k->dport;
		key.l4_proto = k->l4_proto;
	}
	bpf_map_update_elem(&ended, &key, &of, BPF_ANY);
}

// Stores the tuple of one direction of an ended connection. index: the entry of the direction; of:
// service << 16 | backend. A separate stack frame from the end of the flow.
__noinline int remember_ended(__u32 index, __u32 of, __u32 v6)
{
	struct control *c = the_control();

	if (v6)
		remember_ended_half(index, of, true);
	else
		remember_ended_half(index, of, false);
	if (c && !c->ended)
		c->ended = 1;
	return 0;
}

// Reports whether the map of ended connections has had entries.
static __always_inline bool any_ended(void)
{
	struct control *c = the_control();

	return c && c->ended;
}

// Reports whether a TCP segment without a flow belongs to an ended connection, while its backend is
// still down. The sender then gets a reset. A SYN belongs to a new connection and removes the
// tuple.
__noinline int was_ended(const struct packet *p)
{
	__u32 *of, owner, backend;
	struct service *s;
	struct backend *b;
	struct tuple key;

	if (!p || p->tuple.l4_proto != IPPROTO_TCP || p->tcp_flags & TCP_RST ||
	    p->flags & (PACKET_ERROR | PACKET_LATER_FRAGMENT))
		return 0;
	key = p->tuple;
	key.state = 0;
	of = bpf_map_lookup_elem(&ended, &key);
	if (!of)
		return 0;
	owner = *of >> 16;
	backend = *of & 0xffff;
	if (p->tcp_flags & TCP_SYN) {
		if (!dry_run)
			bpf_map_delete_elem(&ended, &key);
		return 0;
	}
	s = bpf_map_lookup_elem(&services, &owner);
	b = bpf_map_lookup_elem(&backends, &backend);
	return s && s->active && b && b->service == owner && b->state == BACKEND_DOWN;
}

#endif
