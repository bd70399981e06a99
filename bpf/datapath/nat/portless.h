// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Source NAT of protocols without ports: ESP, GRE, tunnels, and SCTP, which keeps its ports. A rule
// translates only the address. Such a packet has no outside port that could distinguish inside
// hosts, and therefore no binding. On each pool address, only one inside host may talk to a given
// peer by a protocol, or for SCTP by the same two ports. Conntrack has the same limit. The reply
// entry of the flow records the inside host.
#ifndef SLUICE_PORTLESS_H
#define SLUICE_PORTLESS_H

#include "nat/nat.h"

// Reports whether a packet has a protocol without ports. DCCP and UDP-Lite are excluded, because
// their checksums cover the addresses. ICMP has a flow by its identifier, or none.
static __always_inline bool portless(const struct packet *p)
{
	switch (p->tuple.l4_proto) {
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
	case PROTO_DCCP:
	case PROTO_UDPLITE:
		return false;
	}
	return p->flags & PACKET_NO_FLOW;
}

#define PORTLESS_TRIES (POOL_TRIES + 1)

// Returns the i-th pool address to try, or NO_ENTRY. The first is the address on which the client
// has ports, so that ESP uses the address of its key exchange. A rule with deterministic blocks has
// only one address per client.
__noinline __u32 nth_address(struct bind *b, __u32 i)
{
	struct work *w = the_work();
	struct port_request *r;
	struct nat_rule *rule;
	struct client *client;
	__u32 id, at, hash;

	if (!b || !w)
		return NO_ENTRY;
	r = &w->request;
	id = b->rule;
	rule = bpf_map_lookup_elem(&nat_rules, &id);
	if (!rule || !set_pool(b, r) || !r->pool_len)
		return NO_ENTRY;
	if (have_blocks && rule->flags & NAT_DETERMINISTIC)
		return !i && compute_block(b, r, rule, id) ? r->map / PORT_CLASSES : NO_ENTRY;
	if (!i) {
		client_of(&w->who, &b->inside.saddr, CLIENT_NAT | id, b->family == FAMILY_6);
		client = client_again();
		at = client ? *(volatile __u32 *)&client->pool - 1 : NO_ENTRY;
		return at != NO_ENTRY && in_pool(at, id) ? at : NO_ENTRY;
	}
	if (i > r->pool_len)
		return NO_ENTRY;
	hash = (b->inside.saddr.w[0] ^ b->inside.saddr.w[1] ^ b->inside.saddr.w[2] ^ b->inside.saddr.w[3]) *
	       0x9e3779b1U;
	return pool_number(r->pool + (hash % r->pool_len + i - 1) % r->pool_len);
}

// Gives a packet the pool address with this number, unless its replies would match another flow.
__noinline enum reason take_number(struct plan *plan, __u32 number)
{
	struct pool_addr *address = bpf_map_lookup_elem(&pools, &number);
	struct work *w = the_work();

	if (!plan || !address || !w)
		return REASON_NO_PORT;
	plan->to.saddr = address->addr;
	reverse_tuple(&w->key, &plan->to);
	w->key.kind = KIND_FLOW;
	return find(&w->key, plan->family == FAMILY_6) == NO_ENTRY ? REASON_NONE : REASON_CLASH;
}

// Chooses a pool address for a packet with a planned destination. b->slot records the address.
__noinline enum reason take_address(struct plan *plan, struct bind *b)
{
	enum reason reason = REASON_NO_PORT;

	if (!plan || !b)
		return REASON_INTERNAL;
	if (!dry_run && !bind_may(b))
		return REASON_LIMIT_CLIENT_RATE;
	for (__u32 i = 0; i < PORTLESS_TRIES; i++) {
		__u32 number = nth_address(b, i);

		if (number == NO_ENTRY)
			continue;
		reason = take_number(plan, number);
		b->slot = number * PORT_CLASSES << 16;
		if (reason == REASON_NONE)
			break;
	}
	return reason;
}

#endif
