// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Encapsulation for backends: IPIP (RFC 2003, RFC 2473) and GUE variant 0 (draft-ietf-intarea-gue).
#ifndef SLUICE_ENCAP_H
#define SLUICE_ENCAP_H

#include "packet/client.h"

#define ECN_MASK 3 // of the traffic class (RFC 3168 §5)

static __always_inline bool push(void *ctx, __u32 size, const struct plan *plan, const bool xdp)
{
	bool v6 = plan->gateway_family == FAMILY_6;
	__be16 type = v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	__u8 macs[2 * ETH_ALEN];
	__u64 flags;

	if (xdp) {
		if (!get(ctx, 0, macs, sizeof(macs), true) || bpf_xdp_adjust_head(ctx, -(int)size))
			return false;
		return put(ctx, 0, macs, sizeof(macs), true) && put(ctx, 2 * ETH_ALEN, &type, 2, true);
	}
	flags = BPF_F_ADJ_ROOM_FIXED_GSO | (v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4);
	if (plan->encap == ENCAP_GUE)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	if (bpf_skb_adjust_room(ctx, size, BPF_ADJ_ROOM_MAC, flags))
		return false;
	return !bpf_skb_store_bytes(ctx, 2 * ETH_ALEN, &type, 2, 0);
}

// Encapsulates a rewritten packet. The outer header has DF set, so that the sender of the inner
// packet finds the path MTU (RFC 4459 §3.1). Its ECN field is copied from the inner header (RFC
// 6040 §4.1).
static __always_inline enum reason encapsulate(void *ctx, const struct packet *p, const struct plan *plan,
					       __u32 ifindex, const bool xdp)
{
	__u32 size = encap_size(plan), payload = p->l3_len;
	struct interface_addr *own = bpf_map_lookup_elem(&interfaces, &ifindex);
	__u8 inner = p->family == FAMILY_6 ? IPPROTO_IPV6 : IPPROTO_IPIP, outer = inner;
	bool v6 = plan->gateway_family == FAMILY_6;
	__u8 outer_hops = plan->flags & PLAN_KERNEL ? 65 : 64; // 64 on the wire: the kernel decrements it
	__u32 at = ETH_HLEN + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)), backend = plan->backend_hop;
	struct backend_hop *b;

	if (!own || !push(ctx, size, plan, xdp))
		return REASON_INTERNAL;
	b = bpf_map_lookup_elem(&backend_hops, &backend);
	if (b && !v6)
		b->source = own->v4.w[0];
	if (plan->encap == ENCAP_GUE) {
		struct gue_header gue = { .proto = inner };

		outer = IPPROTO_UDP;
		payload += sizeof(gue);
		gue.udp.source = bpf_htons(49152 | (hash_endpoints(&p->tuple.saddr, p->tuple.sport, &p->tuple.daddr,
								   p->tuple.dport, true) &
						    0x3fff));
		gue.udp.dest = plan->encap_port;
		gue.udp.len = stated_len(payload);
		if (!put(ctx, at, &gue, sizeof(gue), xdp))
			return REASON_INTERNAL;
	}
	if (v6) {
		struct ipv6hdr ip = {};

		*(__u32 *)&ip = bpf_htonl(6U << 28 | (__u32)(p->tos & ECN_MASK) << 20);
		ip.payload_len = stated_len(payload);
		ip.nexthdr = outer;
		ip.hop_limit = outer_hops;
		__builtin_memcpy(&ip.saddr, &own->v6, 16);
		__builtin_memcpy(&ip.daddr, &plan->gateway, 16);
		return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp) ? REASON_NONE : REASON_INTERNAL;
	}
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tos = p->tos & ECN_MASK,
		.tot_len = stated_len(sizeof(ip) + payload),
		.frag_off = bpf_htons(IP_DF),
		.ttl = outer_hops,
		.protocol = outer,
		.saddr = own->v4.w[0],
		.daddr = plan->gateway.w[0],
	};
	__u32 *w = (__u32 *)&ip;

	ip.check = ~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	return put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp) ? REASON_NONE : REASON_INTERNAL;
}

BOTH_HOOKS(enum reason, encapsulate, !p || !plan ? REASON_INTERNAL : encapsulate(ctx, p, plan, ifindex, xdp),
	   const struct packet *p, const struct plan *plan, __u32 ifindex)

#endif
