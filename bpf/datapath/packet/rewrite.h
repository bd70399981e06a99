// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Rewriting within one family, and sending, for both hooks. "xdp" is a constant that the compiler
// removes, so that common code exists once.
#ifndef SLUICE_REWRITE_H
#define SLUICE_REWRITE_H

#include "packet/bytes.h"
#include "packet/route.h"

#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2

// ---- transport checksums ----

// Updates a transport checksum. "pseudo" is the change of the pseudo-header; "payload" is the
// change of bytes that the checksum covers.
static __always_inline bool fix_check(void *ctx, __u32 off, __u8 l4_proto, __u64 pseudo, __u64 payload, const bool xdp)
{
	__u16 check;

	off += check_offset(l4_proto);
	if (xdp) {
		if (!get(ctx, off, &check, 2, true))
			return false;
		if (l4_proto == IPPROTO_UDP && !check)
			return true;
		check = check_after(check, pseudo + payload);
		if (l4_proto == IPPROTO_UDP && !check)
			check = 0xffff;
		return put(ctx, off, &check, 2, true);
	}
	__u64 mangled = l4_proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 changed = fold32(payload);

	if (pseudo && bpf_l4_csum_replace(ctx, off, 0, fold32(pseudo), BPF_F_PSEUDO_HDR | mangled))
		return false;
	// Unchanged ports sum to the other representation of zero in one's complement.
	return !changed || changed == 0xffffffff || !bpf_l4_csum_replace(ctx, off, 0, changed, mangled);
}

// Writes the ports. fix_check updates the transport checksum, which covers the ports. On TC, the
// packet's sum must therefore not include their change a second time. UDP without a checksum is the
// exception.
static __always_inline bool put_ports(void *ctx, __u32 off, const struct ports *ports, __u8 l4_proto, const bool xdp)
{
	__u16 check = 1;

	if (xdp)
		return put(ctx, off, ports, sizeof(*ports), true);
	if (l4_proto == IPPROTO_UDP && !get(ctx, off + UDP_CHECK, &check, 2, false))
		return false;
	return !bpf_skb_store_bytes(ctx, off, ports, sizeof(*ports), check ? 0 : BPF_F_RECOMPUTE_CSUM);
}

// ---- within one family ----

// Changes of the checksums by the rewrite.
struct deltas {
	__u64 addrs;
	__u64 ports;
};

static __always_inline void deltas_of(struct deltas *d, const struct packet *p, const struct plan *plan, const bool v6)
{
	d->addrs = minus(sum_addr(&p->tuple.saddr, v6)) + minus(sum_addr(&p->tuple.daddr, v6)) +
		   sum_addr(&plan->to.saddr, v6) + sum_addr(&plan->to.daddr, v6);
	d->ports = change(p->tuple.sport, plan->to.sport) + change(p->tuple.dport, plan->to.dport);
}

// Returns the decrement of the TTL or hop limit. It is 0 if the kernel sends the packet, because
// the kernel decrements the field itself. With a tunnel, the kernel decrements only the outer
// header.
static __always_inline __u8 hops_down(const struct plan *plan)
{
	return plan->flags & PLAN_KERNEL && !plan->encap ? 0 : 1;
}

// Returns the checksum change of a TTL decrement. The TTL is the high byte of its word: a decrement
// adds ~0x0100 + 0 in wire order.
static __always_inline __u32 ttl_change(__u8 down)
{
	return down ? (__u16)~bpf_htons(0x0100) : 0;
}

static __always_inline void write_ip(void *l3, const struct plan *plan, __u64 addrs, const bool v6)
{
	__u8 down = hops_down(plan);

	if (v6) {
		struct ipv6hdr *ip = l3;

		__builtin_memcpy(&ip->saddr, &plan->to.saddr, 16);
		__builtin_memcpy(&ip->daddr, &plan->to.daddr, 16);
		ip->hop_limit -= down;
		return;
	}
	struct iphdr *ip = l3;

	ip->saddr = plan->to.saddr.w[0];
	ip->daddr = plan->to.daddr.w[0];
	ip->ttl -= down;
	ip->check = check_after(ip->check, addrs + ttl_change(down));
}

// Rewrites a packet that has all its checksums in its headers.
static __always_inline enum reason rewrite_headers(void *data, void *end, const struct packet *p,
						   const struct plan *plan, const bool v6)
{
	void *l3 = data + ETH_HLEN, *l4 = data + (p->l4_off & 0x7ff);
	struct deltas d;
	__u16 *check;
	__u16 was;

	if (l3 + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) > end)
		return REASON_INTERNAL;
	deltas_of(&d, p, plan, v6);
	write_ip(l3, plan, v6 ? 0 : d.addrs, v6);
	if (plan->flags & PLAN_NO_L4)
		return REASON_NONE;
	if (is_icmp(p->tuple.l4_proto)) {
		struct icmp_header *icmp = l4;

		if ((void *)(icmp + 1) > end)
			return REASON_INTERNAL;
		// The checksum covers no changed field. An update would turn the sum of an all-zero
		// message into the other zero.
		if (!v6 && plan->to.dport == p->tuple.dport)
			return REASON_NONE;
		icmp->check = check_after(icmp->check, (v6 ? d.addrs : 0) + change(p->tuple.dport, plan->to.dport));
		if (plan->to.dport != p->tuple.dport) // only some messages have an identifier in this field
			icmp->id = plan->to.dport;
		return REASON_NONE;
	}
	if (l4 + 8 > end)
		return REASON_INTERNAL;
	((struct ports *)l4)->source = plan->to.sport;
	((struct ports *)l4)->dest = plan->to.dport;
	check = l4 + UDP_CHECK;
	if (p->tuple.l4_proto == IPPROTO_TCP) {
		check = l4 + TCP_CHECK;
		if ((void *)(check + 1) > end)
			return REASON_INTERNAL;
		*check = check_after(*check, d.addrs + d.ports);
		return REASON_NONE;
	}
	was = *check;
	if (was) {
		was = check_after(was, d.addrs + d.ports);
		*check = was ? was : 0xffff;
	}
	return REASON_NONE;
}

static __always_inline enum reason xdp_rewrite(struct xdp_md *ctx, const struct packet *p, const struct plan *plan,
					       const bool v6)
{
	return rewrite_headers((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, plan, v6);
}

#define SUMMED_ELSEWHERE 2 // CHECKSUM_COMPLETE, and CHECKSUM_PARTIAL: linux/skbuff.h

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak; // Linux 6.2

// Reports whether the transport header holds the complete checksum of a packet. The rewrite then
// works as in XDP, without helpers.
static __always_inline bool summed_in_header(struct __sk_buff *ctx)
{
	__u8 *summed;

	if (!summed_at)
		return false;
	summed = bpf_cast_to_kern_ctx(ctx);
	return (summed[summed_at / 8] >> summed_at % 8 & 3) < SUMMED_ELSEWHERE;
}

static __always_inline enum reason tc_rewrite(struct __sk_buff *ctx, const struct packet *p, const struct plan *plan,
					      const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	void *l3 = data + ETH_HLEN, *l4 = data + (p->l4_off & 0x7ff);
	bool icmp = is_icmp(p->tuple.l4_proto), no_l4 = plan->flags & PLAN_NO_L4;
	struct deltas d;

	if (summed_in_header(ctx))
		return rewrite_headers(data, end, p, plan, v6);
	if (l3 + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) > end)
		return REASON_INTERNAL;
	deltas_of(&d, p, plan, v6);
	write_ip(l3, plan, v6 ? 0 : d.addrs, v6);
	if (!no_l4) {
		if (l4 + 8 > end)
			return REASON_INTERNAL;
		if (icmp) {
			if (plan->to.dport != p->tuple.dport)
				((struct icmp_header *)l4)->id = plan->to.dport;
			d.ports = change(p->tuple.dport, plan->to.dport);
		} else {
			((struct ports *)l4)->source = plan->to.sport;
			((struct ports *)l4)->dest = plan->to.dport;
			// Without a UDP checksum, nothing compensates for the change of the ports.
			if (p->tuple.l4_proto == IPPROTO_UDP && !*(__u16 *)(l4 + UDP_CHECK))
				bpf_csum_update(ctx, fold32(d.ports));
		}
		if (icmp && !v6)
			d.addrs = 0;
		if (!fix_check(ctx, p->l4_off, p->tuple.l4_proto, d.addrs, d.ports, false))
			return REASON_INTERNAL;
	}
	// A checksum over the whole packet (CHECKSUM_COMPLETE). In IPv4, the update of the header
	// checksum compensates for the other changes of the header.
	if (v6) {
		__u64 header = minus(sum_addr(&p->tuple.saddr, true)) + minus(sum_addr(&p->tuple.daddr, true)) +
			       sum_addr(&plan->to.saddr, true) + sum_addr(&plan->to.daddr, true) +
			       (hops_down(plan) ? (__u16)~bpf_htons(0x0001) : 0);

		bpf_csum_update(ctx, fold32(header));
	}
	return REASON_NONE;
}

// ---- sending ----

// Redirects even to the ingress interface. On a veth, XDP_TX loses packets that a local stack sent
// (TestSNATOffice, port-forward from inside).
static __always_inline int xdp_send(struct xdp_md *ctx, const struct hop *h)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	copy(eth, h->dmac, 2 * ETH_ALEN);
	return bpf_redirect(h->ifindex, 0);
}

static __always_inline int tc_send(struct __sk_buff *ctx, const struct hop *h)
{
	struct ethhdr *eth = (void *)(long)ctx->data; // no checksum covers the Ethernet header

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return TC_ACT_SHOT;
	copy(eth, h->dmac, 2 * ETH_ALEN);
	return bpf_redirect(h->ifindex, 0);
}

#endif
