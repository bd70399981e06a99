// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The cache of next hops.
#ifndef SLUICE_HOP_H
#define SLUICE_HOP_H

#include "decide.h"
#include "event.h"

static __always_inline struct hop *hop_of(const struct plan *plan)
{
	__u32 at = plan->hop;
	struct work *s;

	if (at)
		return bpf_map_lookup_elem(&hops, &at);
	s = the_work();
	return s ? &s->hop : (void *)0;
}

// Returns the egress interface of a plan. Packets from this host have its address as their source.
static __always_inline __u32 leaves_by(const struct packet *p, const struct plan *plan)
{
	struct hop *h = hop_of(plan);

	return h ? h->ifindex : p->ifindex;
}

// Reports whether a hook may send to a next hop. An interface without XDP transmission drops XDP
// frames. If TC runs after XDP, packets to such an interface are left to TC.
static __always_inline bool hop_usable(const struct hop *h, const bool xdp)
{
	return !xdp || !tc_behind || h->flags & HOP_XDP;
}

static __always_inline __u16 hop_flags(__u32 ifindex)
{
	struct interface_addr *out = tc_behind ? bpf_map_lookup_elem(&interfaces, &ifindex) : (void *)0;

	return out && out->flags & INTERFACE_XDP ? HOP_XDP : 0;
}

static __always_inline bool hop_same(const struct hop *h, const struct bpf_fib_lookup *fib)
{
	return h->ifindex == fib->ifindex && h->mtu == fib->tot_len && !__builtin_memcmp(h->dmac, fib->dmac, 6) &&
	       !__builtin_memcmp(h->smac, fib->smac, 6);
}

static __always_inline void hop_write(struct hop *h, const struct bpf_fib_lookup *fib, __u16 flags, __u32 now,
				      __u32 gen)
{
	h->flags = flags;
	h->ifindex = fib->ifindex;
	h->checked = now;
	h->mtu = fib->tot_len;
	__builtin_memcpy(h->dmac, fib->dmac, ETH_ALEN);
	__builtin_memcpy(h->smac, fib->smac, ETH_ALEN);
	__sync_lock_test_and_set(&h->gen, gen);
}

#define HOP_WRITING 0xffffffffU // not a valid generation; they start at 1

// Stores a next hop in a slot, or reports that the slot contains it. Only one CPU writes a slot:
// the CPU that has replaced the generation by HOP_WRITING. A slot of a later generation is not
// taken, because that generation began after the route lookup.
static __always_inline bool hop_save(struct hop *h, const struct bpf_fib_lookup *fib, __u16 flags, __u32 now, __u32 gen)
{
	__u32 was = *(volatile __u32 *)&h->gen;
	bool same;

	if (was == HOP_WRITING)
		return false;
	same = hop_same(h, fib) && h->flags == flags;
	if (!later(gen, was))
		return same;
	if (__sync_val_compare_and_swap(&h->gen, was, same ? gen : HOP_WRITING) != was)
		return false;
	if (!same)
		hop_write(h, fib, flags, now, gen);
	return true;
}

// Returns the slot of a next hop, or 0 if all its slots are in use. The next hop is then only in
// the per-CPU working memory, and not cached.
__noinline __u32 hop_place(const struct bpf_fib_lookup *fib, __u32 now, __u32 gen)
{
	__u16 flags;
	__u32 at;
	struct work *s;

	if (!fib)
		return 0;
	flags = hop_flags(fib->ifindex);
	at = fib->ifindex * 0x9e3779b1U + (fib->dmac[5] | fib->dmac[4] << 8 | fib->dmac[3] << 16) * 0x85ebca6bU;
	at = (at ^ at >> 15) + fib->smac[5];
	for (int i = 0; i < 4; i++) {
		__u32 place = (at + i) % (HOPS - 1) + 1;
		struct hop *h = bpf_map_lookup_elem(&hops, &place);

		if (!h)
			break;
		if (hop_save(h, fib, flags, now, gen)) {
			h->checked = now;
			return place;
		}
	}
	s = the_work();
	if (s)
		hop_write(&s->hop, fib, flags, now, gen);
	return 0;
}

#endif
