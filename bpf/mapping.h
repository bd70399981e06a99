// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Mappings that inside hosts have asked for (PCP, RFC 6887): a binding that lives
// without flows, and that everybody outside may use.
#ifndef SLUICE_MAPPING_H
#define SLUICE_MAPPING_H

#include "nat.h"

// Whether an inside endpoint, the destination of a packet as it becomes, is mapped: then
// the rule's filter does not matter.
__noinline int mapped(const struct tuple *to, __u32 rule, __u32 family)
{
	struct mapping_key key = {};

	if (!to || !have_mappings)
		return 0;
	key.addr = to->daddr;
	key.port = to->dport;
	key.l4_proto = to->l4_proto;
	key.rule = rule;
	key.family = family;
	return !!bpf_map_lookup_elem(&mappings, &key);
}

// The binding of a mapping, with a reference that the mapping holds.
static __always_inline int map_bind(const struct mapping_key *key, const struct mapping *m, __u32 exact, __u32 place,
				    struct bind *b)
{
	int reason;

	__builtin_memset(b, 0, sizeof(*b));
	b->inside.saddr = key->addr;
	b->inside.sport = key->port;
	b->inside.l4_proto = key->l4_proto;
	b->family = key->family;
	b->outside_family = m->outside_family;
	b->rule = key->rule;
	b->now = now_ticks();
	b->exact = exact;
	b->charged = 1; // mappings have a number for a limit
	b->want = bpf_ntohs(m->port);
	b->place = place;
	reason = bind(b);
	if (reason != REASON_FLOW || !exact)
		return reason;
	// The endpoint was bound before: to what is wanted, or it cannot be.
	if ((b->want && b->port != m->port) ||
	    (place && (m->outside.d[0] != b->outside.d[0] || m->outside.d[1] != b->outside.d[1]))) {
		binding_put(b->index, b->family == FAMILY_6, b->now);
		return REASON_NO_PORT;
	}
	return reason;
}

// The request that user space runs a program with, in the place of a frame: programs
// of type syscall cannot search tries.
static __always_inline struct mapping_request *request_of(struct xdp_md *ctx)
{
	struct mapping_request *r = (void *)(long)ctx->data;

	return (void *)(r + 1) <= (void *)(long)ctx->data_end ? r : (void *)0;
}

// Run by user space: makes a mapping. One step for the kernel, so that a killed daemon
// leaves either both the binding's reference and the mapping, or neither.
SEC("xdp")
int map_open(struct xdp_md *ctx)
{
	struct mapping_request *r = request_of(ctx);
	struct work *w = the_work();
	struct mapping_key key;
	struct mapping m;
	struct bind *b;
	int reason;

	if (!r || !w)
		return XDP_ABORTED;
	key = r->key;
	m = r->mapping;
	b = &w->bound;
	reason = map_bind(&key, &m, r->exact, r->place, b);
	if (reason == REASON_FLOW || reason == REASON_NEW_FLOW) {
		m.outside = b->outside;
		m.port = b->port;
		m.index = b->index;
		reason = REASON_NONE;
		if (bpf_map_update_elem(&mappings, &key, &m, BPF_NOEXIST)) {
			binding_put(b->index, b->family == FAMILY_6, b->now);
			reason = REASON_TABLE_FULL;
		}
	}
	r = request_of(ctx);
	if (!r)
		return XDP_ABORTED;
	r->mapping = m;
	r->reason = reason;
	return XDP_PASS;
}

// Run by user space: ends a mapping.
SEC("xdp")
int map_close(struct xdp_md *ctx)
{
	struct mapping_request *r = request_of(ctx);
	struct mapping_key key;
	struct mapping *m;
	__u32 index;

	if (!r)
		return XDP_ABORTED;
	key = r->key;
	m = bpf_map_lookup_elem(&mappings, &key);
	if (!m)
		return XDP_PASS;
	index = m->index;
	if (!bpf_map_delete_elem(&mappings, &key))
		binding_put(index, key.family == FAMILY_6, now_ticks());
	return XDP_PASS;
}

#endif
