// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Learning at TC egress: the finished frame and its conntrack entry are available together. The
// entry contains the tuple of the packet as it arrived, so no record of the input is needed.
#ifndef SLUICE_ACCELERATE_LEARN_H
#define SLUICE_ACCELERATE_LEARN_H

#include "frame.h"
#include "kernel.h"

#define CAST(address, type) ((struct type *)bpf_rdonly_cast((void *)(address), bpf_core_type_id_kernel(struct type)))

static __always_inline __u32 halves(__u32 word)
{
	return (word & 0xffff) + (word >> 16);
}

/* Returns the summand for a complemented sum of 16-bit words when the addresses change. */
static __always_inline __u32 address_delta(const struct flow_key *from, const struct flow_entry *to)
{
	__u32 sum = 0;

	if (same_address(from->saddr, to->saddr) && same_address(from->daddr, to->daddr))
		return 0;
	for (int i = 0; i < 4; i++)
		sum += halves(~from->saddr[i]) + halves(~from->daddr[i]) + halves(to->saddr[i]) + halves(to->daddr[i]);
	return sum;
}

static __always_inline __u32 port_delta(const struct flow_key *from, const struct flow_entry *to)
{
	if (from->sport == to->sport && from->dport == to->dport)
		return 0;
	return (__u16)~from->sport + (__u16)~from->dport + to->sport + to->dport;
}

static __always_inline bool has_extension(const struct nf_ct_ext *ext, __u32 id)
{
	return ext && ((const __u8 *)ext->offset)[id & 15];
}

/* Returns the reason that excludes a connection for ever, or SLOW_YOUNG. */
static __always_inline __u32 excluded(struct nf_conn *ct, __u64 status)
{
	struct nf_ct_ext *ext = ct->ext;
	struct nf_ct_ext *e = CAST(ext, nf_ct_ext);

	if (status & (IPS_OFFLOAD | IPS_HW_OFFLOAD))
		return SLOW_OFFLOADED;
	if (status & (IPS_FIXED_TIMEOUT | IPS_NAT_CLASH))
		return SLOW_FIXED;
	if (status & (IPS_SEQ_ADJUST | IPS_HELPER))
		return SLOW_HELPER;
	if (bpf_core_field_exists(ct->zone) && ct->zone.id)
		return SLOW_ZONE;
	if (!ext)
		return SLOW_YOUNG;
	if (has_extension(e, bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_HELPER)) ||
	    has_extension(e, bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_SEQADJ)))
		return SLOW_HELPER;
	if (bpf_core_enum_value_exists(enum nf_ct_ext_id, NF_CT_EXT_SYNPROXY) &&
	    has_extension(e, bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_SYNPROXY)))
		return SLOW_HELPER;
	if (bpf_core_enum_value_exists(enum nf_ct_ext_id, NF_CT_EXT_TIMEOUT) &&
	    has_extension(e, bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_TIMEOUT)))
		return SLOW_POLICY;
	return SLOW_YOUNG;
}

/* Returns the MTU of the route of a packet, as ip_forward() and ip6_forward() compute it; 0 if the route is unknown. */
static __always_inline __u32 route_mtu(unsigned long refdst, const bool v6)
{
	struct dst_entry *dst = CAST(refdst & ~SKB_DST_FLAGS, dst_entry);
	unsigned long metrics;
	struct net_device *dev;
	struct inet6_dev *dev6;
	__u32 mtu = 0, lock = 0;

	if (!(refdst & ~SKB_DST_FLAGS))
		return 0;
	metrics = dst->_metrics & ~(unsigned long)DST_METRICS_FLAGS;
	if (metrics) {
		bpf_probe_read_kernel(&mtu, sizeof(mtu), (void *)(metrics + (RTAX_MTU - 1) * sizeof(__u32)));
		bpf_probe_read_kernel(&lock, sizeof(lock), (void *)(metrics + (RTAX_LOCK - 1) * sizeof(__u32)));
	}
	if (mtu && (!v6 || lock & 1 << RTAX_MTU))
		return mtu;
	dev = dst->dev;
	if (!dev)
		return 0;
	if (!v6)
		return CAST(dev, net_device)->mtu;
	if (!bpf_core_type_exists(struct inet6_dev)) /* IPv6 is a module */
		return 0;
	dev6 = CAST(dev, net_device)->ip6_ptr;
	return dev6 ? CAST(dev6, inet6_dev)->cnf.mtu6 : 0;
}

/* Reports whether one of two addresses fulfils a condition. */
static __always_inline bool covers(const __be32 *to, const __be32 *mask, const __be32 *a, const __be32 *b)
{
	__u32 x = 0, y = 0;

	barrier(); /* or the compiler loads all conditions at once, to the stack */
	for (int i = 0; i < 4; i++) {
		x |= (a[i] ^ to[i]) & mask[i];
		y |= (b[i] ^ to[i]) & mask[i];
	}
	return !x || !y;
}

static __always_inline bool covers_port(const __u16 *range, __be16 a, __be16 b)
{
	__u16 x = bpf_ntohs(a), y = bpf_ntohs(b);

	return !range[1] || (range[0] <= x && x <= range[1]) || (range[0] <= y && y <= range[1]);
}

/* Reports whether packets of a flow may fulfil the conditions of a rule, in either direction. A hook
 * sees each address and port before or after its translation. The verifier checks a global function once. */
__noinline int applies(const struct exclusion *x, const struct flow_key *key, const struct flow_entry *e, __u32 in,
		       __u32 out)
{
	if (!x || !key || !e || (x->family && x->family != key->family) ||
	    (x->l4_proto && x->l4_proto != key->l4_proto))
		return false;
	if (covers(x->saddr, x->smask, key->saddr, e->saddr) && covers(x->daddr, x->dmask, key->daddr, e->daddr) &&
	    covers_port(x->sport, key->sport, e->sport) && covers_port(x->dport, key->dport, e->dport) &&
	    (!x->in || x->in == in) && (!x->out || x->out == out))
		return true;
	return covers(x->saddr, x->smask, key->daddr, e->daddr) && covers(x->daddr, x->dmask, key->saddr, e->saddr) &&
	       covers_port(x->sport, key->dport, e->dport) && covers_port(x->dport, key->sport, e->sport) &&
	       (!x->in || x->in == out) && (!x->out || x->out == in);
}

/* Returns the rule that excludes a flow, 0 if there is none. */
static __always_inline __u32 excluding_rule(const struct flow_key *key, const struct flow_entry *e, __u32 in, __u32 out)
{
	struct exclusion *x;
	__u32 i;

	for (i = 0; i < EXCLUSIONS && i < exclusions_used; i++) {
		x = bpf_map_lookup_elem(&exclusions, &i);
		if (x && applies(x, key, e, in, out))
			return x->id;
	}
	return 0;
}

/* Fills the entry from the frame, its route and the ports of its path. Returns SLOW_YOUNG if the
 * entry is complete, else the reason. */
static __always_inline __u32 describe(struct __sk_buff *ctx, const struct flow_key *key, unsigned long refdst,
				      struct flow_entry *e, __u32 *rule, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 in = ctx->ingress_ifindex, out = ctx->ifindex, mtu;
	struct port *from, *to;
	struct headers h = {};

	from = bpf_map_lookup_elem(&ports, &in);
	to = bpf_map_lookup_elem(&ports, &out);
	if (!from || !to || to->flags & PORT_BRIDGE)
		return SLOW_INTERFACE;
	if (from->l3 == to->l3)
		return SLOW_HAIRPIN;
	if (ctx->vlan_present || !read_headers(data, end, ctx->len, &h, v6) || data + sizeof(e->macs) > end)
		return SLOW_FRAME;
	if (!same_address(h.key.saddr, e->saddr) || !same_address(h.key.daddr, e->daddr) || h.key.sport != e->sport ||
	    h.key.dport != e->dport || h.key.l4_proto != key->l4_proto || *(__u8 *)data & 1)
		return SLOW_FRAME;
	*rule = excluding_rule(key, e, in, to->l3);
	if (*rule)
		return SLOW_RULE;
	mtu = route_mtu(refdst, v6);
	if (!mtu)
		return SLOW_ROUTE;
	e->mtu = mtu < to->mtu ? mtu : to->mtu;
	__builtin_memcpy(e->macs, data, sizeof(e->macs));
	__builtin_memcpy(e->in_mac, from->mac, sizeof(e->in_mac));
	e->l3 = in;
	if (!(from->flags & PORT_BRIDGE))
		e->in = in;
	e->out = out;
	e->dscp = h.dscp;
	e->xdp = !!(to->flags & PORT_TAKES_XDP);
	e->addr_delta = address_delta(key, e);
	e->port_delta = port_delta(key, e);
	return SLOW_YOUNG;
}

/* Requests liberal window checks of a TCP connection from user space. */
static __always_inline void request_liberal(struct nf_conn *ct)
{
	struct flow_key *k = bpf_ringbuf_reserve(&requests, sizeof(*k), 0);

	if (!k)
		return; /* a later packet requests it again */
	read_address(k->saddr, &ct->tuplehash[0].tuple.src.u3);
	read_address(k->daddr, &ct->tuplehash[0].tuple.dst.u3);
	k->family = ct->tuplehash[0].tuple.src.l3num;
	k->sport = ct->tuplehash[0].tuple.src.u.all;
	k->dport = ct->tuplehash[0].tuple.dst.u.all;
	k->l4_proto = IPPROTO_TCP;
	bpf_ringbuf_submit(k, 0);
}

/* Reports whether the connection is in the state in which flows are learned. */
static __always_inline bool established(struct nf_conn *ct, __u64 status, __u32 l4_proto)
{
	const __u64 needed = IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED;

	if ((status & (needed | IPS_DYING)) != needed || !(status & (IPS_SRC_NAT | IPS_DST_NAT)))
		return false;
	return l4_proto == IPPROTO_UDP || (l4_proto == IPPROTO_TCP && ct->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED);
}

/* Reports whether the flow has sent enough packets, and its connection is ready, to be learned. */
static __always_inline bool ripe(struct candidate *c, struct nf_conn *ct, __u32 l4_proto, __u32 out)
{
	if (c->out != out) { /* a bridge without an entry for the station sends to all ports */
		c->out = out;
		c->count = 0;
	}
	if (++c->count < LEARN_AFTER)
		return false;
	if (l4_proto == IPPROTO_TCP && !is_liberal(ct)) {
		if (c->count % LEARN_AFTER == 0)
			request_liberal(ct);
		return false;
	}
	return true;
}

static __always_inline __u32 lifetime_of(struct nf_conn *ct, __u32 l4_proto)
{
	if (l4_proto == IPPROTO_TCP)
		return tcp_lifetime;
	return (__u64)(__u32)(ct->timeout - (__u32)bpf_jiffies64()) * 1000 / hz;
}

/* Returns the time after which a packet of a valid flow is learned again. */
static __always_inline __u64 relearn_after(struct __sk_buff *ctx, const struct flow_entry *old, bool v6)
{
	__u8 *ip = (void *)(long)ctx->data + ETH_HLEN, dscp;

	if ((void *)(ip + 2) > (void *)(long)ctx->data_end)
		return SECOND;
	dscp = v6 ? (__u8)(ip[0] << 4 | ip[1] >> 4) : ip[1];
	return (dscp & DSCP_MASK) == old->dscp ? (RELEARN_SECONDS - 1) * SECOND : SECOND;
}

/* Makes the next packets of both directions renew the lifetime of a TCP connection. The kernel has
 * made it shorter, because it has not seen the acknowledgement of this packet. */
static __always_inline void renew_soon(struct nf_conn *ct, struct flow_entry *old, const struct flow_key *key,
				       const struct flow_entry *e, __u64 now)
{
	struct flow_key back = reverse(e, key);
	struct flow_entry *opposite;

	if (!ends_before(ct, tcp_lifetime))
		return;
	if (old)
		old->renewed = now - 2 * RENEW_SECONDS * SECOND;
	opposite = bpf_map_lookup_elem(&flows, &back);
	if (opposite)
		opposite->renewed = now - 2 * RENEW_SECONDS * SECOND;
}

/* Learns the flow of a packet that leaves. */
static __always_inline void learn_packet(struct __sk_buff *ctx)
{
	struct sk_buff *skb = bpf_cast_to_kern_ctx(ctx);
	unsigned long nfct = skb->_nfct;
	__u32 info = nfct & NFCT_INFO_MASK;
	struct candidate *c, fresh = {};
	struct flow_entry e = {}, *old;
	struct flow_key key = {};
	struct nf_conn *ct;
	__u64 status, now;
	__u32 dir, why, rule = 0, current = epoch; /* read before "changed" */
	bool v6;

	if (nfct <= NFCT_INFO_MASK || (info != IP_CT_ESTABLISHED && info != IP_CT_ESTABLISHED_REPLY))
		return;
	dir = info == IP_CT_ESTABLISHED_REPLY;
	ct = CAST(nfct & ~NFCT_INFO_MASK, nf_conn);
	status = ct->status;
	key.l4_proto = ct->tuplehash[0].tuple.dst.protonum;
	key.family = ct->tuplehash[0].tuple.src.l3num;
	v6 = key.family == AF_INET6;
	if ((v6 ? without_ipv6 : key.family != AF_INET) || !established(ct, status, key.l4_proto))
		return;
	now = bpf_ktime_get_coarse_ns();
	if (!current || !elapsed(now, changed, SETTLE_MILLISECONDS * 1000000ULL))
		return;
#define TUPLE(direction)                                                          \
	do {                                                                      \
		read_address(key.saddr, &ct->tuplehash[direction].tuple.src.u3);  \
		read_address(key.daddr, &ct->tuplehash[direction].tuple.dst.u3);  \
		key.sport = ct->tuplehash[direction].tuple.src.u.all;             \
		key.dport = ct->tuplehash[direction].tuple.dst.u.all;             \
		read_address(e.saddr, &ct->tuplehash[!(direction)].tuple.dst.u3); \
		read_address(e.daddr, &ct->tuplehash[!(direction)].tuple.src.u3); \
		e.sport = ct->tuplehash[!(direction)].tuple.dst.u.all;            \
		e.dport = ct->tuplehash[!(direction)].tuple.src.u.all;            \
	} while (0)
	if (dir)
		TUPLE(1);
	else
		TUPLE(0);
#undef TUPLE
	old = bpf_map_lookup_elem(&flows, &key);
	if (key.l4_proto == IPPROTO_TCP)
		renew_soon(ct, old, &key, &e, now);
	if (old && old->epoch == current && !elapsed(now, old->learned, relearn_after(ctx, old, v6)))
		return;
	/* An entry of an earlier connection with the same tuple says nothing about this one. */
	if (old && (old->out != ctx->ifindex || (key.l4_proto == IPPROTO_TCP && !is_liberal(ct)))) {
		bpf_map_delete_elem(&flows, &key);
		old = 0;
	}
	if (!old) {
		c = bpf_map_lookup_elem(&candidates, &key);
		if (!c) {
			fresh.count = 1;
			fresh.out = ctx->ifindex;
			bpf_map_update_elem(&candidates, &key, &fresh, BPF_ANY);
			return;
		}
		if (!ripe(c, ct, key.l4_proto, ctx->ifindex))
			return;
	}
	why = excluded(ct, status);
	if (why == SLOW_POLICY && key.l4_proto == IPPROTO_UDP)
		why = SLOW_YOUNG; /* its packets have the lifetime of the policy */
	if (why == SLOW_YOUNG)
		why = v6 ? describe(ctx, &key, skb->_skb_refdst, &e, &rule, true) :
			   describe(ctx, &key, skb->_skb_refdst, &e, &rule, false);
	if (why == SLOW_YOUNG) {
		e.epoch = current;
		e.learned = now;
		e.renewed = now - 2 * RENEW_SECONDS * SECOND; /* the next packet renews the lifetime */
		e.mark = mark_of(ct);
		e.lifetime = lifetime_of(ct, key.l4_proto);
		if (old) {
			e.packets = old->packets;
			e.bytes = old->bytes;
			if (old->epoch == current && old->l3 == e.l3 && !e.in)
				e.in = old->in;
		}
		if (bpf_map_update_elem(&flows, &key, &e, BPF_ANY)) {
			why = SLOW_FULL;
		} else {
			bpf_map_delete_elem(&candidates, &key);
			if (!old)
				count(COUNT_LEARNED, 1);
			return;
		}
	}
	if (old) { /* it has become unsuitable */
		fresh.count = LEARN_AFTER;
		fresh.out = ctx->ifindex;
		fresh.reason = why;
		fresh.rule = rule;
		bpf_map_update_elem(&candidates, &key, &fresh, BPF_ANY);
		bpf_map_delete_elem(&flows, &key);
	} else if (c) {
		c->rule = rule;
		c->reason = why;
	}
}

#endif
