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

// Reports whether a route back to the source leads through an interface with strict rp_filter. The
// lookup returns only one next hop of a multipath route. A route with the same metric through the
// interface then also counts.
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

// Reports whether rp_filter of the interface refuses a source. "to" is the translated destination,
// because rules of "ip rule" may match it on the way back.
static __noinline bool without_way_back(void *ctx, __u32 ifindex, __be32 source, __be32 to, __u32 flags)
{
	struct bpf_fib_lookup back = {};

	back.family = AF_INET;
	back.ifindex = ifindex;
	back.tot_len = 1; // otherwise TC checks the size of the packet
	back.ipv4_dst = source;
	back.ipv4_src = to;
	switch (bpf_fib_lookup(ctx, &back, sizeof(back), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return flags & SOURCE_STRICT && !strict_back(ctx, ifindex, source, &back, checks_now());
	case BPF_FIB_LKUP_RET_FWD_DISABLED: // the route lookup of the packet also detects this
		return false;
	}
	return true;
}

// Reports whether the kernel refuses to forward packets from this source. "known" means that "to"
// is the translated destination. Otherwise, with rules of "ip rule", the function checks only the
// source itself.
static __noinline bool checks_source(void *ctx, __u32 ifindex, __be32 source, __be32 to, bool known)
{
	__u32 checks = checks_now(), *kind = 0, *flags = 0, have = 0;

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
	return (known || !(checks & CHECK_RULES)) && without_way_back(ctx, ifindex, source, to, have);
}

// Reports the same as checks_source. Avoids the call if no check can refuse the source.
static __always_inline bool refuses_source(void *ctx, __u32 ifindex, __be32 source, __be32 to, bool known)
{
	return (maybe_own(source) || checks_now() & CHECK_RP_FILTER) && checks_source(ctx, ifindex, source, to, known);
}

#endif
