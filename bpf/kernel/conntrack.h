// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Tuples of connection tracking, as the running kernel has them. The structures declare only the
// members that the programs read; the loader relocates them by the kernel's BTF.
#ifndef SLUICE_KERNEL_CONNTRACK_H
#define SLUICE_KERNEL_CONNTRACK_H

#include <linux/types.h>

#define CO_RE __attribute__((preserve_access_index))

union nf_inet_addr {
	__u32 all[4];
};

union nf_conntrack_man_proto {
	__be16 all;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
	__u16 l3num;
} CO_RE;

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
		__u8 protonum;
		__u8 dir;
	} dst;
} CO_RE;

struct hlist_nulls_node {
	struct hlist_nulls_node *next, **pprev;
} CO_RE;

struct nf_conntrack_tuple_hash {
	struct hlist_nulls_node hnnode;
	struct nf_conntrack_tuple tuple;
} CO_RE;

#endif
