// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SYNs without a flow: a table of fingerprints records the backend of each one, for the client's
// acknowledgement and the backend's reply.
#ifndef SLUICE_SYN_H
#define SLUICE_SYN_H

#include "flow/conn.h"

// Returns the slot of a SYN from a client to a service, and the fingerprint to compare.
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

// Returns the backend to which a SYN of this tuple was forwarded, or NO_ENTRY.
static __always_inline __u32 syn_backend(const struct tuple *t, __u8 family)
{
	__u32 mark;
	__u64 *slot = recent_syn(t, family, &mark);

	if (!slot || *slot >> 32 != mark || !mark)
		return NO_ENTRY;
	return (__u32)*slot;
}

// Reports whether a packet of a client continues a handshake that began with a forwarded SYN
// without a flow.
__noinline int shakes_hands(const struct packet *p)
{
	if (!p || p->tuple.l4_proto != IPPROTO_TCP || p->tcp_flags & (TCP_SYN | TCP_RST))
		return 0;
	return syn_backend(&p->tuple, p->family) != NO_ENTRY;
}

// Reports whether a packet of a backend answers a SYN that was forwarded to it without a flow. "as"
// is the tuple of the packet on its way to the client.
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
