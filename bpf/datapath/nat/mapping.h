// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Mappings that inside hosts request (PCP, RFC 6887): bindings that live without flows and admit
// every outside host.
#ifndef SLUICE_MAPPING_H
#define SLUICE_MAPPING_H

#include "nat/nat.h"

// Reports whether an inside endpoint, the translated destination of a packet, has a mapping. The
// filter of the rule then does not apply.
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

// Creates or finds the binding of a mapping and takes a reference for the mapping.
static __always_inline enum reason map_bind(const struct mapping_key *key, const struct mapping *m, __u32 exact,
					    __u32 place, struct bind *b)
{
	enum reason reason;

	__builtin_memset(b, 0, sizeof(*b));
	b->inside.saddr = key->addr;
	b->inside.sport = key->port;
	b->inside.l4_proto = key->l4_proto;
	b->family = key->family;
	b->outside_family = m->outside_family;
	b->rule = key->rule;
	b->now = now_ticks();
	b->exact = exact;
	b->charged = 1; // mappings have a limit on their number instead of a rate
	b->want = bpf_ntohs(m->port);
	b->place = place;
	reason = bind(b);
	if (reason != REASON_FLOW || !exact)
		return reason;
	// The inside endpoint already had a binding. It must have the requested outside endpoint.
	if ((b->want && b->port != m->port) ||
	    (place && (m->outside.d[0] != b->outside.d[0] || m->outside.d[1] != b->outside.d[1]))) {
		binding_put(b->index, b->family == FAMILY_6, b->now);
		return REASON_NO_PORT;
	}
	return reason;
}

// Returns the request that user space passes in place of a frame. The programs are of type XDP,
// because programs of type syscall cannot search LPM tries.
static __always_inline struct mapping_request *request_of(struct xdp_md *ctx)
{
	struct mapping_request *r = (void *)(long)ctx->data;

	return (void *)(r + 1) <= (void *)(long)ctx->data_end ? r : (void *)0;
}

// Creates a mapping; user space runs this program. The kernel completes the run even if the daemon
// is killed: either both the reference and the mapping exist, or neither.
SEC("xdp")
int map_open(struct xdp_md *ctx)
{
	struct mapping_request *r = request_of(ctx);
	struct work *w = the_work();
	struct mapping_key key;
	struct mapping m;
	struct bind *b;
	enum reason reason;

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

// Removes a mapping; user space runs this program.
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
