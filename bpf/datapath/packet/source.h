// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Checks of IPv4 sources that the kernel also makes when it forwards: rp_filter, and addresses of
// this host (fib_validate_source). The kernel has no such check for IPv6. The programs pass a
// refused packet to the kernel unchanged, so that the kernel drops, counts and logs it
// (log_martians). They drop it themselves if rules of "ip rule" may match the translated
// destination. A broadcast address is no valid source (RFC 1812 §5.3.7); the kernel refuses it only
// with rp_filter or rules of "ip rule".
#ifndef SLUICE_SOURCE_H
#define SLUICE_SOURCE_H

#include "packet/route.h"

// Reports whether an address may be in own_sources.
static __always_inline bool maybe_own(__be32 address)
{
	__u32 zero = 0, bit = address * 0x9e3779b1U >> 20;
	struct own_filter *f = bpf_map_lookup_elem(&own_filter, &zero);

	return f && f->words[bit / 64] >> bit % 64 & 1;
}

static __always_inline __u32 checks_now(void)
{
	struct control *c = the_control();

	return c ? *(volatile __u32 *)&c->checks : 0;
}

// Destination of a packet after its translation: the port and the IPv4 address.
#define ANSWERED_FROM(addr, port) ((__u64)(port) << 32 | (addr))

// Looks up the route back to the source of a packet. Rules of "ip rule" see the answer: from "to" to
// the source, with the type of service and the protocol of the packet, and its ports exchanged. They
// see the interface of arrival; in the kernel, they see the interface by which the packet leaves.
static __always_inline bool route_back(void *ctx, struct bpf_fib_lookup *back, const struct packet *p, __u64 to,
				       __u32 flags)
{
	__u8 l4_proto = p->flags & PACKET_ERROR ? IPPROTO_ICMP : p->tuple.l4_proto;
	int found;

	__builtin_memset(back, 0, sizeof(*back));
	back->family = AF_INET;
	back->ifindex = p->ifindex;
	back->tot_len = 1; // otherwise TC checks the size of the packet
	back->tos = p->tos;
	back->l4_protocol = l4_proto;
	if (l4_proto == IPPROTO_TCP || l4_proto == IPPROTO_UDP || l4_proto == IPPROTO_SCTP) {
		back->sport = to >> 32;
		back->dport = p->tuple.sport;
	}
	back->ipv4_dst = p->tuple.saddr.w[0];
	back->ipv4_src = to;
	found = bpf_fib_lookup(ctx, back, sizeof(*back), flags);
	// The route lookup of the packet also detects that forwarding is off.
	return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH ||
	       found == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

// Reports whether rp_filter of the interface refuses the source of a packet. The lookup returns only
// one next hop of a multipath route. A route with the same metric through the interface then also
// counts.
static __noinline bool without_way_back(void *ctx, const struct packet *p, __u64 to, __u32 flags)
{
	struct bpf_fib_lookup back;
	__u32 metric;

	if (!route_back(ctx, &back, p, to, 0))
		return true;
	if (!(flags & SOURCE_STRICT) || back.ifindex == p->ifindex)
		return false;
	metric = back.rt_metric;
	return !(checks_now() & CHECK_MULTIPATH) || !route_back(ctx, &back, p, to, BPF_FIB_LOOKUP_OUTPUT) ||
	       back.rt_metric != metric;
}

// Reports whether the kernel refuses to forward a packet because of its source. "known" means that
// "to" is the translated destination. Otherwise, with rules of "ip rule", the function checks only
// the source itself.
static __noinline bool checks_source(void *ctx, const struct packet *p, __u64 to, bool known)
{
	__u32 checks = checks_now(), *kind = 0, *flags = 0, have = 0, ifindex = p->ifindex;
	__be32 source = p->tuple.saddr.w[0];

	if (maybe_own(source))
		kind = bpf_map_lookup_elem(&own_sources, &source);
	if (!kind && !(checks & CHECK_RP_FILTER))
		return false;
	flags = bpf_map_lookup_elem(&source_checks, &ifindex);
	if (flags)
		have = *flags;
	if (kind)
		return *kind == OWN_BROADCAST || !(have & SOURCE_ACCEPT_LOCAL);
	if (!(have & (SOURCE_STRICT | SOURCE_LOOSE)))
		return false;
	return (known || !(checks & CHECK_RULES)) && without_way_back(ctx, p, to, have);
}

// Reports the same as checks_source. Avoids the call if no check can refuse the source.
static __always_inline bool refuses_source(void *ctx, const struct packet *p, __u64 to, bool known)
{
	return (maybe_own(p->tuple.saddr.w[0]) || checks_now() & CHECK_RP_FILTER) && checks_source(ctx, p, to, known);
}

#endif
