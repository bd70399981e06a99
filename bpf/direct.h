// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The straight way of services that keep no flow (dsr, tunnel, stateless by a
// hash): IPv4 to a listener with one port, when nothing has to be found out. All
// else, and the first packet of every second, goes the long way, which decides
// the same and looks after what is remembered here.
#ifndef SLUICE_DIRECT_H
#define SLUICE_DIRECT_H

#include "encap.h"

#define NOT_DIRECT -1

static __always_inline struct direct *direct_of(__u64 key)
{
	__u32 at = key * DIRECT_MULTIPLIER >> (64 - DIRECT_BITS);
	struct direct *d = bpf_map_lookup_elem(&directs, &at);

	if (d && d->key == key)
		return d;
	at ^= 1;
	d = bpf_map_lookup_elem(&directs, &at);
	return d && d->key == key ? d : (void *)0;
}

static __always_inline __u32 direct_hash(const struct iphdr *ip, const struct ports *ports, __u8 scheduler)
{
	struct tuple t;

	t.saddr.w[0] = ip->saddr;
	t.daddr.w[0] = ip->daddr;
	t.sport = ports->source;
	t.dport = ports->dest;
	return hash_of(&t, scheduler, false);
}

// The backend of a packet, as service_pick chooses it.
static __always_inline __u32 direct_backend(__u32 service, __u32 hash)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	__u64 table;

	if (!s)
		return NO_ENTRY;
	table = *(volatile __u64 *)&s->slots;
	if (!(__u32)table)
		return NO_ENTRY;
	return slot_at((table >> 32) + ((__u64)hash * (__u32)table >> 32));
}

// The next hop that the backend's packets took last, while it is fresh.
static __always_inline struct hop *direct_hop(const struct backend_hop *b)
{
	struct control *c = the_control();
	__u32 at = b->hop;
	struct hop *h;

	if (!cache_hops || !c || !at || b->gen != *(volatile __u32 *)&c->generation)
		return 0;
	h = bpf_map_lookup_elem(&hops, &at);
	return h && now_ticks() - h->checked <= hz ? h : (void *)0;
}

// mode stateless: destination, port and checksums as xdp_rewrite makes them.
static __always_inline bool direct_rewrite(struct iphdr *ip, struct ports *ports, void *end, const struct backend *b)
{
	__be16 port = b->port ? b->port : ports->dest;
	__u64 addrs = change(ip->daddr, b->addr.w[0]), delta = addrs + change(ports->dest, port);
	__u16 *check = (void *)ports + (ip->protocol == IPPROTO_TCP ? TCP_CHECK : UDP_CHECK);

	if ((void *)(check + 1) > end)
		return false;
	if (ip->protocol == IPPROTO_TCP) {
		*check = check_after(*check, delta);
	} else if (*check) {
		*check = check_after(*check, delta);
		if (!*check)
			*check = 0xffff;
	}
	ports->dest = port;
	ip->daddr = b->addr.w[0];
	ip->check = check_after(ip->check, addrs);
	return true;
}

// mode tunnel: the outer IPv4 header in front of the frame's.
static __always_inline bool direct_wrap(struct xdp_md *ctx, const struct backend *b, __be32 source, __u32 payload)
{
	struct iphdr ip = {
		.version = 4, .ihl = 5, .tot_len = bpf_htons(sizeof(ip) + payload), .frag_off = bpf_htons(IP_DF),
		.ttl = 64, .protocol = IPPROTO_IPIP, .saddr = source, .daddr = b->addr.w[0],
	};
	__be16 type = bpf_htons(ETH_P_IP);
	__u32 *w = (__u32 *)&ip;

	ip.check = ~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	return put(ctx, 2 * ETH_ALEN, &type, 2, true) && put(ctx, ETH_HLEN, &ip, sizeof(ip), true);
}

// What the tests and the counters see, as of every packet.
static __always_inline void direct_count(__u32 backend, __u32 bytes, __u32 hop)
{
	struct work *w;

	count_stateless(backend, bytes);
	count(FAMILY_4, ACTION_FORWARD, REASON_STATELESS);
	if (!observed)
		return;
	w = the_work();
	if (!w)
		return;
	w->plan.action = ACTION_FORWARD;
	w->plan.reason = REASON_STATELESS;
	w->plan.hop = hop;
}

// A frame of its own: Linux 6.1 adds up the stacks of all that is called from one.
static __noinline int xdp_direct(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct ports *ports = (void *)(ip + 1);
	__u32 length, id, grow = 0;
	struct backend_hop *way;
	struct backend *b;
	struct direct *d;
	struct hop *h;

	if ((void *)ports + sizeof(struct udphdr) > end || *(__u8 *)ip != 0x45) // no options
		return NOT_DIRECT;
	d = direct_of(ip->daddr | (__u64)ports->dest << 32 | (__u64)ip->protocol << 48);
	if (!d || (d->ifindex && d->ifindex != ctx->ingress_ifindex))
		return NOT_DIRECT;
	length = bpf_ntohs(ip->tot_len);
	if (ip->frag_off & bpf_htons(IP_MF | IP_OFFSET) || ip->ttl <= 1 ||
	    length < sizeof(*ip) + (ip->protocol == IPPROTO_TCP ? sizeof(struct tcphdr) : sizeof(struct udphdr)) ||
	    (void *)ip + length > end || (ip->protocol == IPPROTO_TCP && (void *)ports + sizeof(struct tcphdr) > end))
		return NOT_DIRECT;
	id = direct_backend(d->service, direct_hash(ip, ports, d->scheduler));
	b = bpf_map_lookup_elem(&backends, &id);
	way = bpf_map_lookup_elem(&backend_hops, &id);
	if (!b || !way)
		return NOT_DIRECT;
	if (d->mode == MODE_TUNNEL) {
		if (d->encap != ENCAP_IPIP || b->family != FAMILY_4 || !way->source)
			return NOT_DIRECT;
		grow = sizeof(*ip);
	}
	h = direct_hop(way);
	if (!h || length + grow > h->mtu)
		return NOT_DIRECT;
	if (d->mode == MODE_STATELESS && !direct_rewrite(ip, ports, end, b))
		return NOT_DIRECT;
	ip->ttl--;
	ip->check = check_after(ip->check, (__u16)~bpf_htons(0x0100));
	direct_count(id, length, way->hop);
	if (grow && (bpf_xdp_adjust_head(ctx, -(int)sizeof(*ip)) || !direct_wrap(ctx, b, way->source, length)))
		return XDP_ABORTED;
	return xdp_send(ctx, h);
}

#endif
