// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Sources that the kernel forwards no IPv4 packets from: rp_filter, and addresses of this host
// (fib_validate_source). The kernel has no such check for IPv6. A refused packet is passed to the kernel as
// it arrived, so that the kernel drops, counts and logs it (log_martians).
#ifndef SLUICE_SOURCE_H
#define SLUICE_SOURCE_H

#include "hop.h"

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

// Reports whether a strict interface has a route of its own back to a source. A route over several next
// hops leads back by each of them, and the lookup returns one: then a route with the same metric by the
// interface counts.
static __always_inline bool strict_back(void *ctx, __u32 ifindex, __be32 source, struct bpf_fib_lookup *back,
					__u32 checks)
{
	__u32 metric = back->rt_metric;

	if (back->ifindex == ifindex)
		return true;
	if (!(checks & CHECK_MULTIPATH))
		return false;
	__builtin_memset(back, 0, sizeof(*back));
	back->family = AF_INET;
	back->ifindex = ifindex;
	back->tot_len = 1;
	back->ipv4_dst = source;
	switch (bpf_fib_lookup(ctx, back, sizeof(*back), BPF_FIB_LOOKUP_OUTPUT)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return back->rt_metric == metric;
	}
	return false;
}

// Reports whether rp_filter of the interface refuses a source. to: the destination after its translation,
// which "ip rule" may choose the way back by.
static __noinline bool without_way_back(void *ctx, __u32 ifindex, __be32 source, __be32 to, __u32 flags)
{
	struct bpf_fib_lookup back = {};

	back.family = AF_INET;
	back.ifindex = ifindex;
	back.tot_len = 1; // or TC measures the packet
	back.ipv4_dst = source;
	back.ipv4_src = to;
	switch (bpf_fib_lookup(ctx, &back, sizeof(back), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return flags & SOURCE_STRICT && !strict_back(ctx, ifindex, source, &back, checks_now());
	case BPF_FIB_LKUP_RET_FWD_DISABLED: // the route lookup of the packet finds that too
		return false;
	}
	return true;
}

// Reports whether the kernel forwards no packet from this source. known: "to" is the destination after its
// translation; otherwise, if there are rules of "ip rule", only the source itself is checked.
static __noinline bool refuses_source(void *ctx, __u32 ifindex, __be32 source, __be32 to, bool known)
{
	__u32 checks = checks_now(), *kind = 0, *flags = 0, have = 0;

	if (maybe_own(source))
		kind = bpf_map_lookup_elem(&own_sources, &source);
	if (!kind && !(checks & CHECK_RP_FILTER))
		return false;
	flags = bpf_map_lookup_elem(&source_checks, &ifindex);
	if (flags)
		have = *flags;
	if (kind && *kind == OWN_ADDRESS)
		return !(have & SOURCE_ACCEPT_LOCAL);
	if (!(have & (SOURCE_STRICT | SOURCE_LOOSE)))
		return false;
	if (kind) // a broadcast address
		return true;
	return (known || !(checks & CHECK_RULES)) && without_way_back(ctx, ifindex, source, to, have);
}

#endif
