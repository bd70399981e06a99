// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Listeners: finds the service of a packet by its destination and ingress interface.
#ifndef SLUICE_LISTENER_H
#define SLUICE_LISTENER_H

#include "maps.h"

static __always_inline struct listener *listener_find(const struct listener_key *key)
{
	struct listener *l = bpf_map_lookup_elem(&listeners, key);
	struct listener_prefix prefix;

	if (l || !have_ranges)
		return l;
	prefix.prefix_len = sizeof(*key) * 8;
	prefix.key = *key;
	return bpf_map_lookup_elem(&listener_ranges, &prefix);
}

// Returns the service that listens on an interface, or NO_ENTRY. It covers only addresses that have
// listeners on different interfaces.
static __always_inline __u32 listens_at(const struct listener_key *key, __u32 ifindex)
{
	struct iface_listener_key at = { .prefix_len = (sizeof(at) - sizeof(at.prefix_len)) * 8,
					 .ifindex = ifindex,
					 .key = *key };
	__u32 *service = bpf_map_lookup_elem(&iface_listeners, &at);

	return service ? *service : NO_ENTRY;
}

static __always_inline __u32 listening(const struct listener_key *key, __u32 ifindex)
{
	__u32 service = have_iface_listeners ? listens_at(key, ifindex) : NO_ENTRY;
	struct listener *l;

	if (service != NO_ENTRY)
		return service;
	l = listener_find(key);
	return l && (!l->ifindex || l->ifindex == ifindex) ? l->service : NO_ENTRY;
}

// Returns the service that listens on a packet's destination, or NO_ENTRY.
__noinline __u32 service_of(const struct packet *p)
{
	struct listener_key key = {};
	__u32 service;

	// A service accepts ICMP echo requests only. A later fragment may pass this check: it
	// follows the decision of its first fragment.
	if (!p || p->flags & PACKET_ERROR ||
	    ((p->tuple.l4_proto == IPPROTO_ICMP || p->tuple.l4_proto == IPPROTO_ICMPV6) &&
	     !(p->flags & (PACKET_QUERY | PACKET_LATER_FRAGMENT))))
		return NO_ENTRY;
	key.l4_proto = p->tuple.l4_proto;
	key.family = p->family;
	key.port = p->tuple.dport;
	__builtin_memcpy(key.addr, &p->tuple.daddr, sizeof(key.addr));
	service = listening(&key, p->ifindex);
	if (service == NO_ENTRY && have_any) {
		key.l4_proto = 0;
		key.port = 0;
		service = listening(&key, p->ifindex);
	}
	return service;
}

// Reports whether the service listens on the source port of a backend's reply. The backend kept
// that port.
static __always_inline bool listens_on(struct listener_key *key, const union addr *vip, __be16 port, __u32 service)
{
	struct listener *l;

	key->port = port;
	__builtin_memcpy(key->addr, vip, sizeof(key->addr));
	if (have_iface_listeners && listens_at(key, ANY_IFACE_OF_SERVICE | service) == service)
		return true;
	l = listener_find(key);
	return l && l->service == service;
}

#endif
