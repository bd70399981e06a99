// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The fast path: packets of learned flows, in XDP and in TC.
#ifndef SLUICE_ACCELERATE_FAST_H
#define SLUICE_ACCELERATE_FAST_H

#include "frame.h"
#include "kernel.h"

/* Removes both directions of a connection, so that its packets take the slow path. */
static __always_inline void end_flow(const struct flow_key *key, const struct flow_entry *e)
{
	struct flow_key back = reverse(e, key);

	bpf_map_delete_elem(&flows, &back);
	bpf_map_delete_elem(&flows, key);
	count(COUNT_ENDED, 1);
}

/* Compares the conntrack entry with the flow, and renews its lifetime. False: the flow has ended, and
 * the packet takes the slow path. The next renewal may be RENEW_SECONDS after the last packet, so the
 * lifetime is longer by that time. It never becomes shorter, except by a RST that the kernel would
 * call invalid: it is before the last acknowledgement that the kernel has seen. Such a RST takes the
 * fast path. */
static __always_inline bool renew(struct nf_conn *ct, const struct headers *h, const struct flow_entry *e, __u32 dir)
{
	const __u64 needed = IPS_SEEN_REPLY | IPS_CONFIRMED;
	__be32 saddr[4], daddr[4];
	__be16 sport, dport;
	__u32 maxack;
	__u8 flags;

#define OUTPUT(opposite)                                                    \
	do {                                                                \
		read_address(saddr, &ct->tuplehash[opposite].tuple.dst.u3); \
		read_address(daddr, &ct->tuplehash[opposite].tuple.src.u3); \
		sport = ct->tuplehash[opposite].tuple.dst.u.all;            \
		dport = ct->tuplehash[opposite].tuple.src.u.all;            \
		maxack = ct->proto.tcp.seen[opposite].td_maxack;            \
		flags = ct->proto.tcp.seen[opposite].flags;                 \
	} while (0)
	if (dir)
		OUTPUT(0);
	else
		OUTPUT(1);
#undef OUTPUT
	if ((ct->status & (needed | IPS_DYING | IPS_EXCLUDED)) != needed || mark_of(ct) != e->mark ||
	    !same_address(saddr, e->saddr) || !same_address(daddr, e->daddr) || sport != e->sport || dport != e->dport)
		return false;
	if (h->key.l4_proto == IPPROTO_TCP && (ct->proto.tcp.state != TCP_CONNTRACK_ESTABLISHED || !is_liberal(ct)))
		return false;
	if (h->flags & RST) {
		if (!(flags & IP_CT_TCP_FLAG_MAXACK_SET) || (__s32)(h->seq - maxack) >= 0)
			return false;
		bpf_ct_change_timeout(ct, 10000); /* nf_conntrack_tcp_timeout_close */
		return true;
	}
	if (ends_before(ct, e->lifetime + RENEW_SECONDS * 1000ULL))
		bpf_ct_change_timeout(ct, e->lifetime + RENEW_SECONDS * 1000);
	return true;
}

/* Fills the tuple of a look-up and returns its size. */
static __always_inline __u32 ct_key(const struct headers *h, struct bpf_sock_tuple *t, struct bpf_ct_opts___short *opts)
{
	opts->netns_id = BPF_F_CURRENT_NETNS;
	opts->l4proto = h->key.l4_proto;
	if (h->key.family == AF_INET6) {
		__builtin_memcpy(t->ipv6.saddr, h->key.saddr, sizeof(t->ipv6.saddr));
		__builtin_memcpy(t->ipv6.daddr, h->key.daddr, sizeof(t->ipv6.daddr));
		t->ipv6.sport = h->key.sport;
		t->ipv6.dport = h->key.dport;
		return sizeof(t->ipv6);
	}
	t->ipv4.saddr = h->key.saddr[0];
	t->ipv4.daddr = h->key.daddr[0];
	t->ipv4.sport = h->key.sport;
	t->ipv4.dport = h->key.dport;
	return sizeof(t->ipv4);
}

static __noinline bool xdp_renew(struct xdp_md *ctx, struct headers *h, struct flow_entry *e)
{
	struct bpf_ct_opts___short opts = {};
	struct bpf_sock_tuple t = {};
	struct nf_conn *ct;
	bool valid;

	if (ct_key(h, &t, &opts) == sizeof(t.ipv6))
		ct = bpf_xdp_ct_lookup(ctx, &t, sizeof(t.ipv6), &opts, sizeof(opts));
	else
		ct = bpf_xdp_ct_lookup(ctx, &t, sizeof(t.ipv4), &opts, sizeof(opts));
	if (!ct)
		return false;
	valid = renew(ct, h, e, opts.dir);
	bpf_ct_release(ct);
	return valid;
}

static __noinline bool tc_renew(struct __sk_buff *ctx, struct headers *h, struct flow_entry *e)
{
	struct bpf_ct_opts___short opts = {};
	struct bpf_sock_tuple t = {};
	struct nf_conn *ct;
	bool valid;

	if (ct_key(h, &t, &opts) == sizeof(t.ipv6))
		ct = bpf_skb_ct_lookup(ctx, &t, sizeof(t.ipv6), &opts, sizeof(opts));
	else
		ct = bpf_skb_ct_lookup(ctx, &t, sizeof(t.ipv4), &opts, sizeof(opts));
	if (!ct)
		return false;
	valid = renew(ct, h, e, opts.dir);
	bpf_ct_release(ct);
	return valid;
}

/* Returns the learned flow of a packet, if it is valid now and applies to the packet. */
static __always_inline struct flow_entry *valid_flow(void *data, const struct headers *h, __u32 ifindex, __u64 now,
						     __u32 current, const bool xdp)
{
	struct flow_entry *e = bpf_map_lookup_elem(&flows, &h->key);
	struct port *p;

	if (!e || e->epoch != current || e->dscp != h->dscp || elapsed(now, e->learned, RELEARN_SECONDS * SECOND) ||
	    elapsed(now, heartbeat, HEARTBEAT_SECONDS * SECOND))
		return 0;
	if (e->in != ifindex) {
		if (xdp || e->in == e->l3)
			return 0;
		p = bpf_map_lookup_elem(&ports, &ifindex);
		if (p && p->l3 == e->l3)
			e->in = ifindex; /* the port of the bridge; from the next packet on */
		return 0;
	}
	if (__builtin_memcmp(data, e->in_mac, sizeof(e->in_mac)))
		return 0;
	return e;
}

/* Reports whether the kernel must handle a packet of a learned flow. FIN and SYN end the flow. The
 * size is the length of the packet, or of each of its segments. */
static __always_inline bool for_kernel(const struct headers *h, const struct flow_entry *e, __u32 size)
{
	if (h->flags & (FIN | SYN)) {
		end_flow(&h->key, e);
		return true;
	}
	return !(h->flags & (ACK | RST)) || (h->flags & (RST | URG)) == (RST | URG) || size > e->mtu;
}

/* Reports whether a packet requires a look at its conntrack entry. */
static __always_inline bool due(const struct headers *h, struct flow_entry *e, __u64 now)
{
	if (!elapsed(now, e->renewed, RENEW_SECONDS * SECOND) && !(h->flags & RST))
		return false;
	e->renewed = now;
	return true;
}

static __always_inline __u32 sum_offset(const struct headers *h, const bool v6)
{
	return l4_offset(v6) + (h->key.l4_proto == IPPROTO_TCP ? 16 : 6);
}

/* Counts a packet that takes the fast path. */
static __always_inline void account(const struct headers *h, struct flow_entry *e, __u32 hook)
{
	__u32 bytes = (h->key.family == AF_INET6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + h->l4_len;

	e->packets++;
	e->bytes += bytes;
	count(hook, 1);
	count(COUNT_BYTES, bytes);
	if (h->flags & RST)
		end_flow(&h->key, e);
}

static __always_inline int xdp_forward(struct xdp_md *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 frame_len = end - data, len, current = epoch;
	struct flow_entry *e;
	struct headers h = {};
	__u16 *check, sum;
	__u64 now;

	if (!current || !read_headers(data, end, frame_len, &h, v6) || h.ttl <= 1)
		return XDP_PASS;
	now = bpf_ktime_get_coarse_ns();
	e = valid_flow(data, &h, ctx->ingress_ifindex, now, current, true);
	if (!e || !e->xdp || for_kernel(&h, e, ip_size(v6) + h.l4_len))
		return XDP_PASS;
	check = data + sum_offset(&h, v6);
	if ((void *)(check + 1) > end)
		return XDP_PASS;
	if ((*check || h.key.l4_proto == IPPROTO_TCP) && !sum_valid(data, end, &h, v6))
		return XDP_PASS;
	if (due(&h, e, now) && !xdp_renew(ctx, &h, e)) {
		end_flow(&h.key, e);
		return XDP_PASS;
	}
	len = l4_offset(v6) + h.l4_len;
	if (frame_len > len) { /* padding, which the kernel removes too */
		if (bpf_xdp_adjust_tail(ctx, (int)(len - frame_len)))
			return XDP_PASS;
		data = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
		check = data + sum_offset(&h, v6);
		if (data + l4_offset(v6) > end || (void *)(check + 1) > end)
			return XDP_PASS;
	}
	sum = *check;
	if (sum || h.key.l4_proto == IPPROTO_TCP) {
		sum = ~fold((__u64)(__u16)~sum + e->addr_delta + e->port_delta);
		*check = sum || h.key.l4_proto == IPPROTO_TCP ? sum : 0xffff;
	}
	if (!write_headers(data, end, e, v6))
		return XDP_PASS;
	account(&h, e, COUNT_XDP);
	return bpf_redirect(e->out, 0);
}

/* Reports whether the checksum of a packet is right, left to the device, or checked by it. */
static __always_inline bool tc_sum_valid(struct __sk_buff *ctx, __u8 summed, const struct headers *h, const bool v6)
{
	if (summed == CHECKSUM_PARTIAL || summed == CHECKSUM_UNNECESSARY)
		return true;
	if (h->l4_len > SUMMED_MOST || bpf_skb_pull_data(ctx, ctx->len))
		return false;
	return sum_valid((void *)(long)ctx->data, (void *)(long)ctx->data_end, h, v6);
}

/* Changes the L4 checksum. The helper knows a checksum that is left to the device. */
static __always_inline void tc_write_sum(struct __sk_buff *ctx, const struct flow_key *key, const struct flow_entry *e,
					 __u32 at)
{
	__u64 flags = key->l4_proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;

	if (e->addr_delta)
		bpf_l4_csum_replace(ctx, at, 0, e->addr_delta, flags | BPF_F_PSEUDO_HDR);
	if (e->port_delta)
		bpf_l4_csum_replace(ctx, at, 0, e->port_delta, flags);
}

static __always_inline int tc_forward(struct __sk_buff *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 len, size, at, current = epoch;
	struct flow_entry *e;
	struct headers h = {};
	__u16 *check;
	struct sk_buff *skb;
	bool summed;
	__u8 by;
	__u64 now;

	if (!current || ctx->vlan_present || !read_headers(data, end, ctx->len, &h, v6) || h.ttl <= 1)
		return TC_ACT_UNSPEC;
	now = bpf_ktime_get_coarse_ns();
	e = valid_flow(data, &h, ctx->ifindex, now, current, false);
	if (!e)
		return TC_ACT_UNSPEC;
	size = ip_size(v6) + h.l4_len;
	if (ctx->gso_size)
		size = ip_size(v6) + h.header + ctx->gso_size;
	if (for_kernel(&h, e, size))
		return TC_ACT_UNSPEC;
	at = sum_offset(&h, v6);
	check = data + at;
	if ((void *)(check + 1) > end)
		return TC_ACT_UNSPEC;
	summed = *check || h.key.l4_proto == IPPROTO_TCP;
	skb = bpf_cast_to_kern_ctx(ctx);
	by = BPF_CORE_READ_BITFIELD(skb, ip_summed);
	if (!summed && by == CHECKSUM_PARTIAL) /* the sum of the pseudo header happens to be zero */
		return TC_ACT_UNSPEC;
	if (summed && !tc_sum_valid(ctx, by, &h, v6))
		return TC_ACT_UNSPEC;
	if (due(&h, e, now) && !tc_renew(ctx, &h, e)) {
		end_flow(&h.key, e);
		return TC_ACT_UNSPEC;
	}
	len = l4_offset(v6) + h.l4_len;
	if (ctx->len > len && bpf_skb_change_tail(ctx, len, 0))
		return TC_ACT_UNSPEC;
	if (summed)
		tc_write_sum(ctx, &h.key, e, at);
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (!write_headers(data, end, e, v6))
		return TC_ACT_SHOT; /* cannot happen: the headers were there */
	/* A checksum over the whole packet (CHECKSUM_COMPLETE). In IPv4, the checksum of the header
	 * compensates for the changes of the header. */
	if (v6)
		bpf_csum_update(ctx, fold((__u64)e->addr_delta + (__u16)~bpf_htons(1)));
	account(&h, e, COUNT_TC);
	return bpf_redirect(e->out, 0);
}

static __always_inline int xdp_fast(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	return eth->h_proto == bpf_htons(ETH_P_IPV6) ? xdp_forward(ctx, true) : xdp_forward(ctx, false);
}

static __always_inline int tc_fast(struct __sk_buff *ctx)
{
	return ctx->protocol == bpf_htons(ETH_P_IPV6) ? tc_forward(ctx, true) : tc_forward(ctx, false);
}

#endif
