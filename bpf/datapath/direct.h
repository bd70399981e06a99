// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The direct path of services without flows (dsr, tunnel, stateless, with a hash scheduler). It
// handles IPv4 packets to a listener with one port, if all lookups are cached. All other packets,
// and the first packet of every second, take the full path. The full path makes the same decisions
// and refreshes the cache.
#ifndef SLUICE_DIRECT_H
#define SLUICE_DIRECT_H

#include "packet/encap.h"
#include "packet/source.h"

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

// Returns the backend of a packet. service_pick makes the same choice.
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

// Returns the cached next hop if it was checked within the last second, or null.
static __always_inline struct hop *direct_hop(__u64 way)
{
	struct hop *h = hop_remembered(way >> 32, way, 0);

	return h && hop_fresh(h, now_ticks()) ? h : (void *)0;
}

// Decrements the TTL. The TTL is the high byte of its word, so that the header checksum grows by
// one in its high byte. The carry is added at the low end (RFC 1624).
static __always_inline void direct_age(struct iphdr *ip)
{
	__u32 check = ip->check + bpf_htons(0x0100);

	ip->ttl--;
	ip->check = check + (check >= 0xffff);
}

// Rewrites a packet of a service in mode stateless: its destination becomes the backend's address and port.
// The bytes are those that xdp_rewrite makes.
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

// Counts a packet, and stores the outcome for tests.
static __always_inline void direct_count(__u32 backend, __u32 bytes, __u32 hop)
{
	struct work *w;

	tally(backend, 1, bytes);
	count_one(FAMILY_4, ACTION_FORWARD, REASON_STATELESS);
	if (!observed)
		return;
	w = the_work();
	if (!w)
		return;
	w->plan.action = ACTION_FORWARD;
	w->plan.reason = REASON_STATELESS;
	w->plan.hop = hop;
}

// State of a packet on the direct path.
struct direct_packet {
	struct iphdr *ip;
	struct ports *ports;
	struct backend *to;  // mode stateless: its new destination
	struct backend *far; // mode tunnel: the remote end
	struct hop *hop;
	__u64 way;
	__u32 id;      // backend
	__u32 length;  // length of the packet
	__be32 source; // source of the outer header
	__u8 ecn;      // ECN field of the packet
};

// Reads the state that the mode of the service requires. False: the packet takes the full path.
static __always_inline bool direct_mode(struct direct_packet *s, const struct direct *d, const struct backend_hop *way,
					__u32 *grow)
{
	struct backend *b;
	__u32 id = s->id;

	if (d->mode == MODE_DSR)
		return true;
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b)
		return false;
	if (d->mode != MODE_TUNNEL) {
		s->to = b;
		return true;
	}
	s->far = b;
	s->source = way->source;
	*grow = sizeof(struct iphdr);
	return d->encap == ENCAP_IPIP && b->family == FAMILY_4 && s->source;
}

// Fills the state of a packet. False: the packet takes the full path. frame_len: length of the
// whole frame; on TC, the linear memory may contain only its start.
static __always_inline bool direct_find(struct direct_packet *s, void *data, void *end, __u32 frame_len, __u32 ifindex)
{
	struct iphdr *ip = data + ETH_HLEN;
	struct ports *ports = (void *)(ip + 1);
	struct backend_hop *way;
	__u32 header, id, grow = 0;
	struct direct *d;

	if ((void *)ports + sizeof(struct udphdr) > end || *(__u8 *)ip != 0x45) // IPv4 without options
		return false;
	d = direct_of(ip->daddr | (__u64)ports->dest << 32 | (__u64)ip->protocol << 48);
	if (!d || (d->ifindex && d->ifindex != ifindex) || martian4(ip->saddr) ||
	    maybe_own(ip->saddr) || checks_now() & CHECK_EACH || forwarding_off(ifindex))
		return false;
	s->length = bpf_ntohs(ip->tot_len);
	s->ecn = ip->tos & ECN_MASK;
	header = ip->protocol == IPPROTO_TCP ? sizeof(struct tcphdr) : sizeof(struct udphdr);
	if (ip->frag_off & bpf_htons(IP_MF | IP_OFFSET) || ip->ttl <= 1 || s->length < sizeof(*ip) + header ||
	    ETH_HLEN + s->length > frame_len || (void *)ports + header > end)
		return false;
	id = direct_backend(d->service, direct_hash(ip, ports, d->scheduler));
	way = bpf_map_lookup_elem(&backend_hops, &id);
	if (!way)
		return false;
	s->id = id;
	s->ip = ip;
	s->ports = ports;
	s->way = *(volatile __u64 *)&way->way;
	if (!direct_mode(s, d, way, &grow))
		return false;
	s->hop = direct_hop(s->way);
	return s->hop && s->length + grow <= s->hop->mtu;
}

// Writes the outer IPv4 header (mode tunnel). Its ECN field is copied from the inner header (RFC
// 6040 §4.1).
static __always_inline bool direct_wrap(void *ctx, const struct direct_packet *s, const bool xdp)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tos = s->ecn,
		.tot_len = bpf_htons(sizeof(ip) + s->length),
		.frag_off = bpf_htons(IP_DF),
		.ttl = 64,
		.protocol = IPPROTO_IPIP,
		.saddr = s->source,
		.daddr = s->far->addr.w[0],
	};
	__be16 type = bpf_htons(ETH_P_IP);
	__u32 *w = (__u32 *)&ip;

	ip.check = ~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	return (xdp ? put(ctx, 2 * ETH_ALEN, &type, 2, true) : !bpf_skb_store_bytes(ctx, 2 * ETH_ALEN, &type, 2, 0)) &&
	       put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp);
}

// A separate stack frame, because Linux 6.1 adds up the stacks of all functions called from one.
static __noinline int xdp_direct(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct direct_packet s = {};

	if (!direct_find(&s, data, end, end - data, ctx->ingress_ifindex) || !hop_usable(s.hop, true))
		return NOT_DIRECT;
	if (s.to && !direct_rewrite(s.ip, s.ports, end, s.to))
		return NOT_DIRECT;
	direct_age(s.ip);
	direct_count(s.id, s.length, s.way >> 32);
	if (s.far && (bpf_xdp_adjust_head(ctx, -(int)sizeof(struct iphdr)) ||
		      !direct_wrap(ctx, &s, true)))
		return XDP_ABORTED;
	return xdp_send(ctx, s.hop);
}

// Rewrites a packet on TC (mode stateless). On TC, the kernel's checksum state must be updated too.
static __always_inline enum reason tc_direct_rewrite(struct __sk_buff *ctx, const struct direct_packet *s)
{
	struct plan plan = {};
	struct packet p = {};

	p.tuple.saddr.w[0] = s->ip->saddr;
	p.tuple.daddr.w[0] = s->ip->daddr;
	p.tuple.sport = s->ports->source;
	p.tuple.dport = s->ports->dest;
	p.tuple.l4_proto = s->ip->protocol;
	p.l4_off = ETH_HLEN + sizeof(*s->ip);
	plan.to = p.tuple;
	plan.to.daddr.w[0] = s->to->addr.w[0];
	if (s->to->port)
		plan.to.dport = s->to->port;
	return tc_rewrite(ctx, &p, &plan, false);
}

// On TC, GSO packets take the full path.
static __noinline int tc_direct(struct __sk_buff *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct direct_packet s = {};

	if (ctx->gso_size || !direct_find(&s, data, end, ctx->len, ctx->ingress_ifindex))
		return NOT_DIRECT;
	direct_count(s.id, s.length, s.way >> 32);
	if (!s.to)
		direct_age(s.ip);
	else if (tc_direct_rewrite(ctx, &s) != REASON_NONE)
		return TC_ACT_SHOT;
	if (s.far && (bpf_skb_adjust_room(ctx, sizeof(struct iphdr), BPF_ADJ_ROOM_MAC,
					  BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4) ||
		      !direct_wrap(ctx, &s, false)))
		return TC_ACT_SHOT;
	return tc_send(ctx, s.hop);
}

#endif
