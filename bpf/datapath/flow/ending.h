// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The end of a flow: timeouts, and release of the resources of the flow.
#ifndef SLUICE_ENDING_H
#define SLUICE_ENDING_H

#include "event.h"
#include "flow/ended.h"
#include "nat/inward.h"

// State of an ending flow, from the entries of both directions.
struct ending {
	union addr client; // source of the opener
	union addr pool;   // destination of its replies
	__be16 pool_port;
	__u8 l4_proto;
	__u8 flags;
	__u16 owner;
	__u16 backend;
	__u32 ref; // ENTRY_BOUND: binding, else own entry; service flow with ENTRY_PORT: the port, as map << 16 | port
	__u32 twin;
	__u64 packets;
	__u64 bytes;
	__u32 now;
	__u8 family;
	__u8 twin_family;
	__u8 heard; // in the opener's direction
	__u8 twin_heard;
	__u32 twin_seen;
	__u32 own_seen;
	__u32 settled;
};

static __always_inline void gather_primary(struct ending *end, void *e, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u64 *counts = e;

	if (v6) {
		struct flow6 *f = e;

		end->client = f->key.saddr;
		end->l4_proto = f->key.l4_proto;
	} else {
		struct flow4 *f = e;

		end->client.d[0] = f->key.saddr;
		end->client.d[1] = 0;
		end->l4_proto = f->key.l4_proto;
	}
	end->flags = m->flags;
	end->heard = m->heard;
	end->owner = m->owner;
	end->backend = m->backend;
	end->twin = m->twin;
	end->own_seen = m->seen;
	end->settled = m->flags & ENTRY_SETTLED;
	end->packets = counts[0];
	end->bytes = counts[1];
	end->family = v6 ? FAMILY_6 : FAMILY_4;
	end->twin_family = v6 != !!(m->flags & ENTRY_CROSS) ? FAMILY_6 : FAMILY_4;
}

static __always_inline void gather_twin(struct ending *end, void *e, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u64 *counts = e;

	if (v6) {
		struct flow6 *f = e;

		end->pool = f->key.daddr;
		end->pool_port = f->key.dport;
	} else {
		struct flow4 *f = e;

		end->pool.d[0] = f->key.daddr;
		end->pool.d[1] = 0;
		end->pool_port = f->key.dport;
	}
	end->ref = *ref_of(m);
	end->twin_heard = m->heard;
	end->twin_seen = m->seen;
	end->settled |= m->flags & ENTRY_SETTLED;
	end->packets += counts[0];
	end->bytes += counts[1];
}

// Reports whether a TCP connection is transitory: its handshake is incomplete, or it has ended (RFC
// 5382 REQ-5, RFC 6146 §3.5.2).
static __always_inline bool tcp_transitory(const struct ending *end)
{
	return !end->settled || tcp_over(end->heard, end->own_seen, end->twin_heard, end->twin_seen);
}

static __always_inline __u32 timeout_of(const struct ending *end)
{
	switch (end->l4_proto) {
	case IPPROTO_TCP:
		return tcp_transitory(end) ? timeout_transitory : timeout_established;
	case IPPROTO_UDP:
		return timeout_udp;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return timeout_icmp;
	}
	return timeout_other;
}

// Requests a probe of the connection's IPv6 host from user space. index: the entry for packets from
// that host.
__noinline int ask_probe(__u32 index)
{
	struct flow6 *f = entry_at(index, true);
	struct event *e;

	if (!f)
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = EVENT_PROBE;
	e->addr = f->key.saddr;
	e->to = f->key.daddr;
	e->sport = f->key.sport;
	e->dport = f->key.dport;
	bpf_ringbuf_submit(e, 0);
	return 1;
}

// Probes an established nat64 connection that has expired. It gets the transitory timeout for the
// answer (RFC 6146 §3.5.2.2, TRANS). Returns false if the connection must end. index: index of the
// primary entry e.
static __always_inline bool probe(const struct ending *end, void *e, __u32 index, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6), *twin = twin_meta(m, v6);
	__u32 owner = end->owner;
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &owner);

	if (end->l4_proto != IPPROTO_TCP || !(end->flags & ENTRY_NAT) || !r || !r->prefix_len || !twin ||
	    tcp_transitory(end) || (end->heard | end->twin_heard) & HEARD_FIN)
		return false;
	m->seen = end->now;
	__sync_fetch_and_and(flags_word(m), ~ENTRY_SETTLED);
	__sync_fetch_and_and(flags_word(twin), ~ENTRY_SETTLED);
	ask_probe(v6 ? index : end->twin);
	return true;
}

// Reports whether a flow must end because its service, backend or rule was removed or has changed
// its mode. It must also end if the host has lost the translated address, because no other host
// answers for that address. A pool address that never was an address of this host is routed to it.
// Its flows remain until they expire.
static __always_inline bool owner_gone(const struct ending *end)
{
	__u32 owner = end->owner, backend = end->backend;
	struct pool_addr *address;
	struct nat_rule *r;

	if (end->flags & ENTRY_NAT) {
		r = bpf_map_lookup_elem(&nat_rules, &owner);
		address = bpf_map_lookup_elem(&pools, &backend);
		return !r || !r->active || (address && address->lost);
	}
	return unserved(owner, backend) || lost_reply_half(end->twin, owner);
}

// Reports whether a TCP connection was open at the failure of its backend, with both directions
// through this host.
static __always_inline bool cut_off(const struct ending *end)
{
	__u32 backend = end->backend;
	struct backend *b;

	if (end->l4_proto != IPPROTO_TCP || end->flags & ENTRY_NAT || end->twin == NO_ENTRY ||
	    !(end->heard & HEARD_ACK || end->twin_heard & HEARD_ANY) ||
	    tcp_over(end->heard, end->own_seen, end->twin_heard, end->twin_seen))
		return false;
	b = bpf_map_lookup_elem(&backends, &backend);
	return b && b->service == end->owner && b->state == BACKEND_DOWN;
}

static __always_inline void release_service(const struct ending *end)
{
	add_traffic(end->owner, end->backend, end->packets, end->bytes);
	if (!(end->heard & HEARD_CLOSED))
		service_uncount(&end->client, end->owner, end->backend, end->flags, end->family);
}

// Reports whether the binding of a flow is in the IPv6 table. The binding belongs to the inside
// endpoint, for nat64 to the IPv6 host.
static __always_inline bool bound_in6(const struct ending *end)
{
	return end->flags & ENTRY_CROSS ? !(end->ref & REF_4) : end->family == FAMILY_6;
}

static __always_inline void release_nat(const struct ending *end)
{
	__u32 owner = end->owner, index = end->ref & ~REF_4;
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &owner);
	struct client_key who = {};

	if (r) {
		__sync_fetch_and_add(&r->packets, end->packets);
		__sync_fetch_and_add(&r->bytes, end->bytes);
	}
	if (end->flags & ENTRY_CLIENT) {
		if (!(end->flags & ENTRY_BOUND)) { // no shared binding: the opener is inside
			who.addr = end->client;
		} else if (bound_in6(end)) {
			struct flow6 *f = entry_at(index, true);

			if (f)
				who.addr = f->key.saddr;
		} else {
			struct flow4 *f = entry_at(index, false);

			if (f)
				who.addr.d[0] = f->key.saddr;
		}
		who.owner = CLIENT_NAT | end->owner;
		client_flow_put(&who);
	}
}

// Releases all resources of a flow. Adds its counters to the counters of its owner.
__noinline int release_flow(const struct ending *end)
{
	struct control *c = the_control();
	union addr pool;
	__u32 *number;

	if (!end)
		return 0;
	if (end->flags & ENTRY_NAT)
		release_nat(end);
	else
		release_service(end);
	if (end->flags & ENTRY_BOUND)
		binding_put(end->ref & ~REF_4, bound_in6(end), end->now);
	if (end->flags & ENTRY_HALF_OPEN && c)
		half_open_give(c);
	if ((end->flags & (ENTRY_PORT | ENTRY_NAT)) == ENTRY_PORT) {
		if (end->ref) {
			give_port(end->ref >> 16, end->ref & 0xffff);
			return 0;
		}
		pool = end->pool; // an entry of an older program, which did not store the port in ref
		number = bpf_map_lookup_elem(&pool_numbers, &pool);
		if (number)
			give_port(*number * PORT_CLASSES + port_class(end->l4_proto), bpf_ntohs(end->pool_port));
	}
	return 0;
}

#endif
