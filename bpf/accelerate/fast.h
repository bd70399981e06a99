// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The fast path: packets of learned flows, in XDP and in TC.
#ifndef SLUICE_ACCELERATE_FAST_H
#define SLUICE_ACCELERATE_FAST_H

#include "frame.h"
#include "kernel.h"

/* Removes both directions of a connection, so that its packets take the slow path. */
static __always_inline void end_flow(const struct flow_key *key, const struct flow_entry *e)
{
	struct flow_key back = reverse(e, key->l4_proto);

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
	__be32 saddr, daddr;
	__be16 sport, dport;
	__u32 maxack;
	__u8 flags;

	if (dir) {
		saddr = ct->tuplehash[0].tuple.dst.u3.all[0];
		daddr = ct->tuplehash[0].tuple.src.u3.all[0];
		sport = ct->tuplehash[0].tuple.dst.u.all;
		dport = ct->tuplehash[0].tuple.src.u.all;
		maxack = ct->proto.tcp.seen[0].td_maxack;
		flags = ct->proto.tcp.seen[0].flags;
	} else {
		saddr = ct->tuplehash[1].tuple.dst.u3.all[0];
		daddr = ct->tuplehash[1].tuple.src.u3.all[0];
		sport = ct->tuplehash[1].tuple.dst.u.all;
		dport = ct->tuplehash[1].tuple.src.u.all;
		maxack = ct->proto.tcp.seen[1].td_maxack;
		flags = ct->proto.tcp.seen[1].flags;
	}
	if ((ct->status & (needed | IPS_DYING | IPS_EXCLUDED)) != needed || mark_of(ct) != e->mark ||
	    saddr != e->saddr || daddr != e->daddr || sport != e->sport || dport != e->dport)
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

static __always_inline void ct_key(const struct headers *h, struct bpf_sock_tuple *t, struct bpf_ct_opts___short *opts)
{
	t->ipv4.saddr = h->key.saddr;
	t->ipv4.daddr = h->key.daddr;
	t->ipv4.sport = h->key.sport;
	t->ipv4.dport = h->key.dport;
	opts->netns_id = BPF_F_CURRENT_NETNS;
	opts->l4proto = h->key.l4_proto;
}

static __noinline bool xdp_renew(struct xdp_md *ctx, struct headers *h, struct flow_entry *e)
{
	struct bpf_ct_opts___short opts = {};
	struct bpf_sock_tuple t = {};
	struct nf_conn *ct;
	bool valid;

	ct_key(h, &t, &opts);
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

	ct_key(h, &t, &opts);
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

static __always_inline __u32 sum_offset(const struct headers *h)
{
	return L4_OFFSET + (h->key.l4_proto == IPPROTO_TCP ? 16 : 6);
}

/* Counts a packet that takes the fast path. */
static __always_inline void account(const struct headers *h, struct flow_entry *e, __u32 hook)
{
	__u32 bytes = sizeof(struct iphdr) + h->l4_len;

	e->packets++;
	e->bytes += bytes;
	count(hook, 1);
	count(COUNT_BYTES, bytes);
	if (h->flags & RST)
		end_flow(&h->key, e);
}

static __always_inline int xdp_fast(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 frame_len = end - data, len, current = epoch;
	struct flow_entry *e;
	struct headers h = {};
	__u16 *check, sum;
	__u64 now;

	if (!current || !read_headers(data, end, frame_len, &h) || ((struct iphdr *)(data + ETH_HLEN))->ttl <= 1)
		return XDP_PASS;
	now = bpf_ktime_get_coarse_ns();
	e = valid_flow(data, &h, ctx->ingress_ifindex, now, current, true);
	if (!e || !e->xdp || for_kernel(&h, e, sizeof(struct iphdr) + h.l4_len))
		return XDP_PASS;
	check = data + sum_offset(&h);
	if ((void *)(check + 1) > end)
		return XDP_PASS;
	if ((*check || h.key.l4_proto == IPPROTO_TCP) && !sum_valid(data, end, h.l4_len))
		return XDP_PASS;
	if (due(&h, e, now) && !xdp_renew(ctx, &h, e)) {
		end_flow(&h.key, e);
		return XDP_PASS;
	}
	len = L4_OFFSET + h.l4_len;
	if (frame_len > len) { /* padding, which the kernel removes too */
		if (bpf_xdp_adjust_tail(ctx, (int)(len - frame_len)))
			return XDP_PASS;
		data = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
		check = data + sum_offset(&h);
		if (data + L4_OFFSET > end || (void *)(check + 1) > end)
			return XDP_PASS;
	}
	sum = *check;
	if (sum || h.key.l4_proto == IPPROTO_TCP) {
		sum = ~fold((__u64)(__u16)~sum + e->l4_delta);
		*check = sum || h.key.l4_proto == IPPROTO_TCP ? sum : 0xffff;
	}
	if (!write_headers(data, end, e))
		return XDP_PASS;
	account(&h, e, COUNT_XDP);
	return bpf_redirect(e->out, 0);
}

/* Reports whether the checksum of a packet is right, left to the device, or checked by it. */
static __always_inline bool tc_sum_valid(struct __sk_buff *ctx, __u8 summed, __u32 l4_len)
{
	if (summed == CHECKSUM_PARTIAL || summed == CHECKSUM_UNNECESSARY)
		return true;
	if (l4_len > SUMMED_MOST || bpf_skb_pull_data(ctx, ctx->len))
		return false;
	return sum_valid((void *)(long)ctx->data, (void *)(long)ctx->data_end, l4_len);
}

/* Changes the L4 checksum. The helper knows a checksum that is left to the device. */
static __always_inline void tc_write_sum(struct __sk_buff *ctx, const struct flow_key *key, const struct flow_entry *e,
					 __u32 at)
{
	__u64 flags = key->l4_proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;

	if (key->saddr != e->saddr)
		bpf_l4_csum_replace(ctx, at, key->saddr, e->saddr, flags | BPF_F_PSEUDO_HDR | 4);
	if (key->daddr != e->daddr)
		bpf_l4_csum_replace(ctx, at, key->daddr, e->daddr, flags | BPF_F_PSEUDO_HDR | 4);
	if (key->sport != e->sport)
		bpf_l4_csum_replace(ctx, at, key->sport, e->sport, flags | 2);
	if (key->dport != e->dport)
		bpf_l4_csum_replace(ctx, at, key->dport, e->dport, flags | 2);
}

static __always_inline int tc_fast(struct __sk_buff *ctx)
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

	if (!current || ctx->vlan_present || !read_headers(data, end, ctx->len, &h) ||
	    ((struct iphdr *)(data + ETH_HLEN))->ttl <= 1)
		return TC_ACT_UNSPEC;
	now = bpf_ktime_get_coarse_ns();
	e = valid_flow(data, &h, ctx->ifindex, now, current, false);
	if (!e)
		return TC_ACT_UNSPEC;
	size = sizeof(struct iphdr) + h.l4_len;
	if (ctx->gso_size)
		size = sizeof(struct iphdr) + h.header + ctx->gso_size;
	if (for_kernel(&h, e, size))
		return TC_ACT_UNSPEC;
	at = sum_offset(&h);
	check = data + at;
	if ((void *)(check + 1) > end)
		return TC_ACT_UNSPEC;
	summed = *check || h.key.l4_proto == IPPROTO_TCP;
	skb = bpf_cast_to_kern_ctx(ctx);
	by = BPF_CORE_READ_BITFIELD(skb, ip_summed);
	if (!summed && by == CHECKSUM_PARTIAL) /* the sum of the pseudo header happens to be zero */
		return TC_ACT_UNSPEC;
	if (summed && !tc_sum_valid(ctx, by, h.l4_len))
		return TC_ACT_UNSPEC;
	if (due(&h, e, now) && !tc_renew(ctx, &h, e)) {
		end_flow(&h.key, e);
		return TC_ACT_UNSPEC;
	}
	len = L4_OFFSET + h.l4_len;
	if (ctx->len > len && bpf_skb_change_tail(ctx, len, 0))
		return TC_ACT_UNSPEC;
	if (summed)
		tc_write_sum(ctx, &h.key, e, at);
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (!write_headers(data, end, e))
		return TC_ACT_SHOT; /* cannot happen: the headers were there */
	account(&h, e, COUNT_TC);
	return bpf_redirect(e->out, 0);
}

#endif
