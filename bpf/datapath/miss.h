// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Lookups in the kernel before a packet may open a flow: sockets and routes.
#ifndef SLUICE_MISS_H
#define SLUICE_MISS_H

#include "packet/rewrite.h"
#include "packet/source.h"

// Reports whether a local socket receives the packet: it has precedence over a binding of the same
// port. A separate function, so that its tuple does not occupy the stack frame of miss.
static __noinline bool socket_here(void *ctx, const struct packet *p)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 size;

	if (p->family == FAMILY_6) {
		__builtin_memcpy(t.ipv6.saddr, &p->tuple.saddr, 16);
		__builtin_memcpy(t.ipv6.daddr, &p->tuple.daddr, 16);
		t.ipv6.sport = p->tuple.sport;
		t.ipv6.dport = p->tuple.dport;
		size = sizeof(t.ipv6);
	} else {
		t.ipv4.saddr = p->tuple.saddr.w[0];
		t.ipv4.daddr = p->tuple.daddr.w[0];
		t.ipv4.sport = p->tuple.sport;
		t.ipv4.dport = p->tuple.dport;
		size = sizeof(t.ipv4);
	}
	if (p->tuple.l4_proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, &t, size, BPF_F_CURRENT_NETNS, 0);
	else if (p->tuple.l4_proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, &t, size, BPF_F_CURRENT_NETNS, 0);
	else
		return false;
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

static __always_inline bool to_local_pool(const struct packet *p)
{
	__u32 number;
	struct pool_addr *address = pool_of(&p->tuple.daddr, &number);

	return address && address->local;
}

// Reports whether a SYN to a service has the source, the route and the interface of arrival of the
// closed connection, while the generation of next hops is the same. The checks of the source and
// the route then have the same result as for that connection.
static __always_inline bool checked_before(const struct packet *p, __u32 service)
{
	struct work *w = the_work();
	struct service *s;
	struct hop *h;

	if (!have_services || !w || !has_closed(w) || service != w->closed.owner)
		return false;
	s = bpf_map_lookup_elem(&services, &service);
	if (!s || s->flags & SERVICE_PORT_FORWARD)
		return false;
	h = hop_remembered(w->closed.hop, w->closed.hop_gen, p->ifindex);
	return h && hop_fresh(h, p->now);
}

// Reads the TCP header of a packet that may carry a cookie or need one. An unreadable header gets
// the length 0, so that no cookie applies.
static __always_inline int cookie_read(void *ctx, const struct packet *p, const bool xdp)
{
	struct work *w = the_work();
	__u32 end;

	if (!w)
		return 0;
	if (!get(ctx, p->l4_off, w->cookie.tcp, sizeof(struct tcphdr), xdp))
		w->cookie.tcp[12] = 0;
	end = (w->cookie.tcp[12] >> 4) * 4;
	bounded(end); // keeps the explicit bound of the loop in the code: Linux 6.1 needs it
	for (__u32 at = sizeof(struct tcphdr); at < sizeof(w->cookie.tcp) && at < end; at += 4) {
		if (get(ctx, p->l4_off + at, w->cookie.tcp + at, 4, xdp))
			continue;
		w->cookie.tcp[12] = 0;
		break;
	}
	return 1;
}

BOTH_HOOKS(int, read_tcp, p ? cookie_read(ctx, p, xdp) : 0, const struct packet *p)

// Looks up sockets and routes of the untranslated packet, once per flow. service: the service that
// listens on its destination, or NO_ENTRY. Returns REASON_NONE if the decision may proceed.
static __always_inline enum reason miss(void *ctx, struct packet *p, struct plan *plan, __u32 service, const bool xdp)
{
	if (have_mac_keys && !get(ctx, 0, p->dmac, 2 * ETH_ALEN, xdp))
		return REASON_INTERNAL;
	if (have_cookies && may_prove(p))
		BY_HOOK(read_tcp, ctx, p);
	if (checked_before(p, service))
		return have_pools && to_local_pool(p) && socket_here(ctx, p) ? REASON_LOCAL_SOCKET : REASON_NONE;
	if (never_routed(p) || (p->family == FAMILY_4 &&
				refuses_source(ctx, p, ANSWERED_FROM(p->tuple.daddr.w[0], p->tuple.dport), false)))
		return REASON_NOT_ROUTED;
	if (have_pools && to_local_pool(p) && socket_here(ctx, p))
		return REASON_LOCAL_SOCKET;
	if (cross_by_egress)
		BY_HOOK(cross_egress, ctx, p);
	if (!egress(ctx, p, plan, have_forwards && to_server(p, plan, service)))
		return REASON_INTERNAL;
	return REASON_NONE;
}

BOTH_HOOKS(enum reason, miss, !p || !plan ? REASON_INTERNAL : miss(ctx, p, plan, service, xdp), struct packet *p,
	   struct plan *plan, __u32 service)

#endif
