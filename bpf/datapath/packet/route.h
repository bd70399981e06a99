// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Route lookups of packets. A flow or a backend keeps the next hop of its last lookup.
#ifndef SLUICE_ROUTE_H
#define SLUICE_ROUTE_H

#include "packet/hop.h"

// Reports whether the route lookup uses the original source: the packet belongs to a flow and stays
// in its family. The kernel also routes before it translates the source.
static __always_inline bool routed_by_own(const struct packet *p, const struct plan *plan)
{
	return (plan->entry != NO_ENTRY || (dry_run && plan->owner_nat == OWNER_SOURCE)) &&
	       plan->backend_hop == NO_ENTRY && plan->family == p->family;
}

// Sets the further fields by which "ip rule" and multipath routes select: protocol and ports, as
// for a packet that the kernel forwards. The source port is the one before translation. Clients
// share the next hop of a backend unless a rule distinguishes them, so that its lookup has no
// source port and no traffic class. An ICMP error is routed by its own protocol, not by the
// protocol and ports of the quoted packet.
static __always_inline void fib_transport(struct bpf_fib_lookup *fib, const struct control *c, const struct packet *p,
					  const struct plan *plan)
{
	bool shared = plan->backend_hop != NO_ENTRY && !(c->checks & CHECK_CLIENT);
	const struct tuple *t = &plan->to;

	fib->l4_protocol = t->l4_proto;
	if (plan->flags & PLAN_ERROR)
		fib->l4_protocol = plan->family == FAMILY_6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	if (!shared) {
		if (plan->gateway_family == FAMILY_6)
			fib->flowinfo = bpf_htonl((__u32)p->tos << 20);
		else
			fib->tos = p->tos;
	}
	if (fib->l4_protocol != IPPROTO_TCP && fib->l4_protocol != IPPROTO_UDP && fib->l4_protocol != IPPROTO_SCTP)
		return;
	fib->dport = t->dport;
	if (!shared)
		fib->sport = routed_by_own(p, plan) ? p->tuple.sport : t->sport;
}

static __always_inline void fib_request(struct bpf_fib_lookup *fib, const struct control *c, const struct packet *p,
					const struct plan *plan)
{
	const union addr *source = routed_by_own(p, plan) ? &p->tuple.saddr : &plan->to.saddr;

	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = p->ifindex;
	fib->tot_len = 1; // ask for the MTU
	fib_transport(fib, c, p, plan);
	if (plan->gateway_family == FAMILY_6) {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_dst, &plan->gateway, 16);
		if (plan->family == FAMILY_6)
			__builtin_memcpy(fib->ipv6_src, source, 16);
	} else {
		fib->family = AF_INET;
		fib->ipv4_dst = plan->gateway.w[0];
		if (plan->family == FAMILY_4)
			fib->ipv4_src = source->w[0];
	}
}

#define LOOPBACK_IFINDEX 1

// Looks up a route. For IPv6, Linux checks the forwarding setting of all interfaces, but
// bpf_fib_lookup checks the setting of the interface of arrival. That setting is off on links with
// an MTU below 1280, which have no IPv6. The lookup for such a packet uses the loopback interface.
static __always_inline int fib_found(void *ctx, struct bpf_fib_lookup *fib)
{
	__u32 ifindex = fib->ifindex;
	int found = bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);

	if (found != BPF_FIB_LKUP_RET_FWD_DISABLED || fib->family != AF_INET6)
		return found;
	fib->ifindex = LOOPBACK_IFINDEX;
	found = bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
	if (fib->ifindex == LOOPBACK_IFINDEX)
		fib->ifindex = ifindex;
	return found;
}

// Returns the current generation of next hops, or 0 if it cannot be read.
static __noinline __u32 generation_now(void)
{
	struct control *c = the_control();

	return c ? *(volatile __u32 *)&c->generation : 0;
}

// Returns a number that is added to the generation in a flow's entry while interfaces have
// rp_filter 1 or IPv4 forwarding off, or select routes. Packets that arrive by another interface
// then find no cached next hop. The interface and the source are checked, and the route is looked
// up.
static __always_inline __u32 arrival(const struct control *c, __u32 ifindex)
{
	return c->checks & (CHECK_STRICT | CHECK_FORWARDING | CHECK_INPUT) ? ifindex * 0x9e3779b1U : 0;
}

// Reports whether IPv4 forwarding is off on an interface. Backends cache next hops for packets of
// all interfaces.
static __always_inline bool forwarding_off(__u32 ifindex)
{
	struct control *c = the_control();
	__u32 *flags;

	if (!c || !(*(volatile __u32 *)&c->checks & CHECK_FORWARDING))
		return false;
	flags = bpf_map_lookup_elem(&source_checks, &ifindex);
	return flags && *flags & SOURCE_FORWARDING_OFF;
}

// Returns the next hop in a slot if it was stored in the current generation, or null. ifindex: the
// interface of arrival for the entry of a flow; 0 for other next hops.
static __always_inline struct hop *hop_remembered(__u32 at, __u32 gen, __u32 ifindex)
{
	struct control *c = the_control();

	if (!cache_hops || !c || gen - arrival(c, ifindex) != *(volatile __u32 *)&c->generation || !at)
		return 0;
	return bpf_map_lookup_elem(&hops, &at);
}

static __always_inline bool hop_fresh(const struct hop *h, __u32 now)
{
	return now - h->checked <= hz;
}

// Returns the place of a recent route lookup for the destination of a plan.
static __always_inline struct recent_route *recent_route_of(struct work *w, const struct plan *plan)
{
	return &w->recent_routes[plan->gateway.w[0] * 0x9e3779b1U >> (32 - RECENT_ROUTE_BITS)];
}

// Reports whether destination, traffic class and interface of arrival determine the route of a plan
// for IPv4: no rule and no multipath route selects it by other fields.
static __always_inline bool route_is_plain(const struct control *c, const struct plan *plan)
{
	return cache_hops && !dry_run && plan->gateway_family == FAMILY_4 && plan->family == FAMILY_4 &&
	       plan->backend_hop == NO_ENTRY && !(c->checks & (CHECK_RULES | CHECK_MULTIPATH));
}

// Returns the next hop of a recent lookup for the route of a plan, or null. New flows to one server
// then share a lookup. Its result is valid as long as the next hop in the entry of a flow.
static __always_inline struct hop *recall_route(struct work *w, const struct control *c, const struct packet *p,
						const struct plan *plan, __u32 *at)
{
	struct recent_route *r = recent_route_of(w, plan);
	struct hop *h;

	if (!route_is_plain(c, plan) || r->gateway != plan->gateway.w[0] || r->ifindex != p->ifindex ||
	    r->tos != p->tos)
		return 0;
	*at = r->hop;
	h = hop_remembered(*at, r->gen, 0);
	return h && hop_fresh(h, p->now) ? h : (void *)0;
}

static __always_inline void store_route(struct work *w, const struct control *c, const struct packet *p,
					const struct plan *plan, __u32 gen)
{
	struct recent_route *r = recent_route_of(w, plan);

	if (!route_is_plain(c, plan) || !plan->hop)
		return;
	r->gateway = plan->gateway.w[0];
	r->ifindex = p->ifindex;
	r->gen = gen;
	r->hop = plan->hop;
	r->tos = p->tos;
}

// Determines the egress interface of the untranslated packet, if NAT rules depend on it. forward:
// the egress interface towards the server in plan->gateway. Returns false if there is no working
// memory.
static __always_inline bool egress(void *ctx, struct packet *p, struct plan *plan, bool forward)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct bpf_fib_lookup *fib;
	struct hop *h;
	__u32 at;

	if (!nat_by_egress && !forward)
		return true;
	if (!w || !c)
		return false;
	plan->to = p->tuple;
	plan->family = p->family;
	if (!forward) {
		plan->gateway = p->tuple.daddr;
		plan->asked = generation_now();
	}
	plan->gateway_family = p->family;
	h = forward ? (void *)0 : recall_route(w, c, p, plan, &at);
	if (h) {
		plan->asked = 0;
		p->out = h->ifindex;
		return true;
	}
	fib = (void *)w->fib;
	fib_request(fib, c, p, plan);
	switch (fib_found(ctx, fib)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		p->out = fib->ifindex;
		return true; // plan->asked remains valid
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		p->out = fib->ifindex;
		break;
	case BPF_FIB_LKUP_RET_NOT_FWDED:
		p->out = NO_ENTRY;
	}
	plan->asked = 0;
	return true;
}

// Determines the egress interface of a packet in the other family, if rules between the families
// depend on it. This must precede egress, which leaves its result in the working memory.
static __always_inline int cross_egress(void *ctx, struct packet *p)
{
	struct work *w = the_work();
	struct bpf_fib_lookup *fib;

	if (!cross_by_egress || !w || !crossed_dest(p, &w->from))
		return 0;
	fib = (void *)w->fib;
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = p->ifindex;
	fib->tot_len = 1; // otherwise TC checks the present length of the packet
	if (p->family == FAMILY_6) {
		fib->family = AF_INET;
		fib->ipv4_dst = w->from.w[0];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_dst, &w->from, 16);
	}
	switch (fib_found(ctx, fib)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		p->cross_out = fib->ifindex;
		return 0;
	}
	p->cross_out = NO_ENTRY;
	return 0;
}

BOTH_HOOKS(int, cross_egress, p ? cross_egress(ctx, p) : 0, struct packet *p)

static __always_inline enum reason fib_reason(int ret)
{
	switch (ret) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		return REASON_NONE;
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return REASON_NO_NEIGHBOUR;
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return REASON_FORWARDING_OFF;
	case BPF_FIB_LKUP_RET_BLACKHOLE:
	case BPF_FIB_LKUP_RET_UNREACHABLE:
	case BPF_FIB_LKUP_RET_PROHIBIT:
		return REASON_NO_ROUTE;
	}
	return REASON_NOT_ROUTED;
}

// Caches the next hop of a plan in its flow or backend. Where the fields of single packets or
// clients select routes, the generation is an invalid one, so that every packet looks its route up.
// The fast paths thus need no check of their own.
static __always_inline void hop_remember(const struct control *c, const struct packet *p, const struct plan *plan,
					 __u32 gen)
{
	bool kept = plan->hop && !(c->checks & (plan->backend_hop != NO_ENTRY ? CHECK_CLIENT : CHECK_CLASS));
	struct entry_meta *m;

	if (plan->backend_hop != NO_ENTRY) {
		__u32 at = plan->backend_hop;
		struct backend_hop *b = bpf_map_lookup_elem(&backend_hops, &at);

		if (b) {
			*(volatile __u64 *)&b->way = (__u64)plan->hop << 32 | (kept ? gen : ~gen);
		}
		return;
	}
	if (plan->entry == NO_ENTRY)
		return;
	m = meta_at(plan->entry, p->family == FAMILY_6);
	if (!m)
		return;
	m->hop = plan->hop;
	m->hop_gen = kept ? gen + arrival(c, p->ifindex) : ~gen;
}

// Applies the configured hardware address of a backend. It has precedence over the neighbour table,
// and needs no entry in it.
static __always_inline enum reason hop_configured(const struct plan *plan, struct bpf_fib_lookup *fib,
						  enum reason reason)
{
	__u32 at = plan->backend_hop, ifindex = fib->ifindex;
	struct backend *b = bpf_map_lookup_elem(&backends, &at);
	struct interface_addr *own = bpf_map_lookup_elem(&interfaces, &ifindex);

	if (!b || !own || !(b->mac[0] | b->mac[1] | b->mac[2] | b->mac[3] | b->mac[4] | b->mac[5]))
		return reason;
	__builtin_memcpy(fib->dmac, b->mac, ETH_ALEN);
	if (reason == REASON_NO_NEIGHBOUR) {
		__builtin_memcpy(fib->smac, own->mac, ETH_ALEN);
		fib->tot_len = own->mtu;
	}
	return REASON_NONE;
}

// Lowers the MTU from bpf_fib_lookup to the MTU of the route. The kernel sends no larger packets
// (ip_dst_mtu_maybe_forward, ip6_finish_output), whether RTAX_MTU is locked or not.
static __noinline int lower_to_route(const struct plan *plan, struct bpf_fib_lookup *fib)
{
	struct route_mtu_key key = { .prefix_len = 8 * (sizeof(key) - sizeof(key.prefix_len)) };
	__u32 *mtu;

	key.ifindex = fib->ifindex;
	if (plan->gateway_family == FAMILY_6) {
		__builtin_memcpy(key.addr, &plan->gateway, 16);
	} else {
		key.ifindex |= ROUTE_MTU_IPV4;
		key.addr[10] = key.addr[11] = 0xff;
		__builtin_memcpy(key.addr + 12, &plan->gateway, 4);
	}
	mtu = bpf_map_lookup_elem(&route_mtus, &key);
	if (mtu && *mtu && *mtu < fib->tot_len)
		fib->tot_len = *mtu;
	return 0;
}

// Returns the MTU of an interface. bpf_fib_lookup reports it only with a known neighbour. 0xffff: user space
// does not know the interface yet.
static __noinline __u32 interface_mtu(__u32 ifindex)
{
	struct interface_addr *out = bpf_map_lookup_elem(&interfaces, &ifindex);

	return out && out->mtu ? out->mtu : 0xffff;
}

// Reports whether a packet from an IPv4 address has a return route. Without one, the kernel drops
// the packet as a martian. An address of this host has none.
static __noinline bool way_back(void *ctx, __u32 ifindex, __be32 from)
{
	struct bpf_fib_lookup back = {};

	back.family = AF_INET;
	back.ifindex = ifindex;
	back.ipv4_dst = from;
	switch (bpf_fib_lookup(ctx, &back, sizeof(back), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
	case BPF_FIB_LKUP_RET_FRAG_NEEDED: // TC also checks the packet's length against this MTU
		return true;
	}
	return false;
}

// Reports whether a destination for which bpf_fib_lookup returns NOT_FWDED has no route. Local,
// broadcast and multicast destinations have the same result, and the kernel decides about them.
static __noinline bool without_route(const struct control *c, const struct plan *plan)
{
	union addr to = plan->gateway; // on the stack, as Linux 6.1 requires of keys
	__u32 first = bpf_ntohl(to.w[0]) >> 24;

	if (plan->gateway_family == FAMILY_6)
		return c->checks & CHECK_OWN6 && first != 0xff && first != 0xfe &&
		       !bpf_map_lookup_elem(&own_addresses6, &to);
	return c->checks & CHECK_OWN4 && first != 0 && first != 127 && first < 224 &&
	       !bpf_map_lookup_elem(&own_sources, &to);
}

#define USER_SPACE_GONE_NS 10000000000ULL // user space probes neighbours every second
#define KERNEL_PROBE_SECONDS 5		  // seconds, as the kernel waits before a probe (delay_first_probe_time)

// Reports whether user space has stopped. It writes the time of its last check once a second, and 1
// when it stops in order.
static __always_inline bool user_space_gone(const struct control *c)
{
	return c->watched && bpf_ktime_get_ns() - c->watched >= USER_SPACE_GONE_NS;
}

// Reports whether the kernel should send the packet, because user space is not running.
// bpf_fib_lookup uses STALE neighbours without a probe; the kernel probes the neighbours to which
// it sends. Only packets that refresh a cached next hop qualify.
static __always_inline bool kernel_probes(void *ctx, const struct control *c, const struct packet *p,
					  const struct plan *plan)
{
	if (!user_space_gone(c) || p->now / hz % KERNEL_PROBE_SECONDS)
		return false;
	return !plan->encap && !(plan->flags & PLAN_ERROR) && plan->family == p->family &&
	       (plan->family == FAMILY_6 || way_back(ctx, p->ifindex, plan->to.saddr.w[0]));
}

// Looks up the next hop of a plan and caches it in its flow or backend. If the next hop has
// changed, a new generation invalidates all cached next hops.
static __always_inline enum reason route(void *ctx, const struct packet *p, struct plan *plan)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct bpf_fib_lookup *fib;
	__u32 gen, before = plan->hop, at;
	enum reason reason = REASON_NONE;
	int found = BPF_FIB_LKUP_RET_SUCCESS;
	bool again;

	if (!c || !w)
		return REASON_INTERNAL;
	fib = (void *)w->fib;
	if (plan->entry != NO_ENTRY && plan->backend_hop == NO_ENTRY)
		plan->gateway = plan->to.daddr;
	if (!plan->asked && !(plan->flags & PLAN_ROUTED) && recall_route(w, c, p, plan, &at)) {
		plan->hop = at;
		plan->flags |= PLAN_ROUTED;
		hop_remember(c, p, plan, recent_route_of(w, plan)->gen);
		return REASON_NONE;
	}
	gen = plan->asked;
	plan->asked = 0;
	if (!gen || !routed_by_own(p, plan) || plan->gateway.d[0] != p->tuple.daddr.d[0] ||
	    plan->gateway.d[1] != p->tuple.daddr.d[1]) {
		gen = *(volatile __u32 *)&c->generation;
		fib_request(fib, c, p, plan);
		found = plan->family == p->family && p->ttl > 1 && c->checks & CHECK_RULES6 ?
				(int)bpf_fib_lookup(ctx, fib, sizeof(*fib), 0) : // a rule may match the interface
				fib_found(ctx, fib);
		reason = fib_reason(found);
	}
	if (found == BPF_FIB_LKUP_RET_NOT_FWDED && without_route(c, plan)) {
		plan->answer = ANSWER_NO_ROUTE;
		reason = REASON_NO_ROUTE;
	} else if (found == BPF_FIB_LKUP_RET_NOT_FWDED && plan->flags & PLAN_REPLY) {
		plan->to = p->tuple;
		plan->flags |= PLAN_SAME;
	}
	if (plan->backend_hop != NO_ENTRY && (reason == REASON_NONE || reason == REASON_NO_NEIGHBOUR))
		reason = hop_configured(plan, fib, reason);
	if (reason != REASON_NONE) {
		if (found == BPF_FIB_LKUP_RET_PROHIBIT || found == BPF_FIB_LKUP_RET_UNREACHABLE)
			plan->answer = found == BPF_FIB_LKUP_RET_PROHIBIT ? ANSWER_PROHIBITED :
									    ANSWER_UNREACHABLE_ROUTE;
		plan->hop = 0;
		w->hop.ifindex = fib->ifindex; // the kernel's egress interface, if the result contains it
		fib->tot_len = interface_mtu(fib->ifindex);
		if (c->checks & CHECK_ROUTE_MTUS)
			lower_to_route(plan, fib);
		w->hop.mtu = fib->tot_len;
		return reason;
	}
	if (c->checks & CHECK_ROUTE_MTUS)
		lower_to_route(plan, fib);
	again = plan->flags & PLAN_ROUTED && before;
	if (again) {
		struct hop *h = hop_of(plan);

		if (h && !hop_same(h, fib))
			gen = __sync_fetch_and_add(&c->generation, 1) + 1;
	}
	plan->hop = hop_place(fib, p->now, gen);
	plan->flags |= PLAN_ROUTED;
	if (dry_run)
		return REASON_NONE;
	hop_remember(c, p, plan, gen);
	store_route(w, c, p, plan, gen);
	return again && kernel_probes(ctx, c, p, plan) ? REASON_NO_NEIGHBOUR : REASON_NONE;
}

BOTH_HOOKS(enum reason, route, !p || !plan ? REASON_INTERNAL : route(ctx, p, plan), const struct packet *p,
	   struct plan *plan)

// Reports whether the cached next hop of a plan may still be used. If not, the caller looks up the
// route.
static __always_inline bool hop_current(const struct packet *p, struct plan *plan)
{
	struct hop *h = hop_remembered(plan->hop, plan->hop_gen, plan->backend_hop == NO_ENTRY ? p->ifindex : 0);

	if (!h || (p->family == FAMILY_4 && plan->backend_hop != NO_ENTRY && forwarding_off(p->ifindex)))
		return false;
	plan->flags |= PLAN_ROUTED;
	if (hop_fresh(h, p->now))
		return true;
	h->checked = p->now; // this packet refreshes the next hop for all flows
	return false;
}

#endif
