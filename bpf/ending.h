// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The end of a flow: when it is due, and what is given back.
#ifndef SLUICE_ENDING_H
#define SLUICE_ENDING_H

#include "ended.h"
#include "event.h"
#include "inward.h"

// The end of a flow, gathered from both directions.
struct ending {
	union addr client; // who opened it
	union addr pool;   // destination of its answers
	__be16 pool_port;
	__u8 l4_proto;
	__u8 flags;
	__u16 owner;
	__u16 backend;
	__u32 ref; // binding of ENTRY_BOUND, or own entry; of a service with ENTRY_PORT the port, as map << 16 | port
	__u32 twin;
	__u64 packets;
	__u64 bytes;
	__u32 now;
	__u8 family;
	__u8 twin_family;
	__u8 heard; // by the opener
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

// TCP is transitory before the handshake is complete, and when it has ended (RFC
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

// Asks user space to probe the IPv6 host of a connection. index: of the entry of what the
// host sends.
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

// RFC 6146 §3.5.2.2: an established connection of nat64 whose time is over has the
// transitory one for an answer to a probe (TRANS). False: it ends. index: of its entry e.
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

// Whether the service, backend or rule of a flow has been taken away, or serves otherwise, or the address that
// it is translated to from this host: nobody else answers there. A pool address that was
// never the host's own is led here by others, and its flows live on until they end.
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

// Whether a connection was open when its backend went down, and both sides' packets come this way.
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

static __always_inline void pay_service(const struct ending *end)
{
	__u32 owner = end->owner, backend = end->backend;
	struct load *l = bpf_map_lookup_elem(&service_loads, &owner);
	struct load *b = bpf_map_lookup_elem(&backend_loads, &backend);

	if (l) {
		__sync_fetch_and_add(&l->packets, end->packets);
		__sync_fetch_and_add(&l->bytes, end->bytes);
	}
	if (b) {
		__sync_fetch_and_add(&b->packets, end->packets);
		__sync_fetch_and_add(&b->bytes, end->bytes);
	}
	if (!(end->heard & HEARD_CLOSED))
		service_uncount(&end->client, end->owner, end->backend, end->flags, end->family);
}

// Whether a flow's binding is in IPv6: that of the inside end, of nat64 the IPv6 one's.
static __always_inline bool bound_in6(const struct ending *end)
{
	return end->flags & ENTRY_CROSS ? !(end->ref & REF_4) : end->family == FAMILY_6;
}

static __always_inline void pay_nat(const struct ending *end)
{
	__u32 owner = end->owner, index = end->ref & ~REF_4;
	struct nat_rule *r = bpf_map_lookup_elem(&nat_rules, &owner);
	struct client_key who = {};

	if (r) {
		__sync_fetch_and_add(&r->packets, end->packets);
		__sync_fetch_and_add(&r->bytes, end->bytes);
	}
	if (end->flags & ENTRY_CLIENT) {
		if (!(end->flags & ENTRY_BOUND)) { // it held its binding alone, or has none: its opener is inside
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

// Gives back everything that a flow held.
__noinline int pay(const struct ending *end)
{
	struct control *c = the_control();
	union addr pool;
	__u32 *number;

	if (!end)
		return 0;
	if (end->flags & ENTRY_NAT)
		pay_nat(end);
	else
		pay_service(end);
	if (end->flags & ENTRY_BOUND)
		binding_put(end->ref & ~REF_4, bound_in6(end), end->now);
	if (end->flags & ENTRY_HALF_OPEN && c)
		half_open_give(c);
	if ((end->flags & (ENTRY_PORT | ENTRY_NAT)) == ENTRY_PORT) {
		if (end->ref) {
			give_port(end->ref >> 16, end->ref & 0xffff);
			return 0;
		}
		pool = end->pool; // of a program that did not keep it in ref
		number = bpf_map_lookup_elem(&pool_numbers, &pool);
		if (number)
			give_port(*number * PORT_CLASSES + port_class(end->l4_proto), bpf_ntohs(end->pool_port));
	}
	return 0;
}

#endif
