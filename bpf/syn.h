// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SYNs that leave no flow behind: a table of fingerprints tells which backend one went
// to, for the client's acknowledgement and the backend's answer.
#ifndef SLUICE_SYN_H
#define SLUICE_SYN_H

#include "conn.h"

// The slot of a SYN from a client to a service, and the fingerprint it must hold.
static __always_inline __u64 *recent_syn(const struct tuple *t, __u8 family, __u32 *mark)
{
	__u64 h = family == FAMILY_6 ? tuple_hash(t, true) : tuple_hash(t, false);
	__u32 slot = h & (RECENT_SYNS - 1);

	*mark = h >> 32;
	return bpf_map_lookup_elem(&recent_syns, &slot);
}

static __always_inline enum reason syn_remember(const struct packet *p, __u32 backend)
{
	__u32 mark;
	__u64 *slot = recent_syn(&p->tuple, p->family, &mark);

	if (slot && !dry_run)
		*slot = (__u64)mark << 32 | backend;
	return REASON_SYN;
}

// The backend that a SYN of this tuple was sent on to, or NO_ENTRY.
static __always_inline __u32 syn_backend(const struct tuple *t, __u8 family)
{
	__u32 mark;
	__u64 *slot = recent_syn(t, family, &mark);

	if (!slot || *slot >> 32 != mark || !mark)
		return NO_ENTRY;
	return (__u32)*slot;
}

// Whether a packet of a client goes on with a handshake whose SYN was sent on without a flow.
__noinline int shakes_hands(const struct packet *p)
{
	if (!p || p->tuple.l4_proto != IPPROTO_TCP || p->tcp_flags & (TCP_SYN | TCP_RST))
		return 0;
	return syn_backend(&p->tuple, p->family) != NO_ENTRY;
}

// Whether a packet of a backend, as the client would get it, answers a SYN that
// was sent on to that backend without a flow.
static __always_inline bool answers_syn(const struct packet *p, const struct tuple *as)
{
	struct backend *b;
	struct tuple syn;
	__u32 backend;

	reverse_tuple(&syn, as);
	backend = syn_backend(&syn, p->family);
	b = bpf_map_lookup_elem(&backends, &backend);
	return b && b->addr.d[0] == p->tuple.saddr.d[0] && b->addr.d[1] == p->tuple.saddr.d[1];
}

#endif
