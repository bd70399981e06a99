// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Parts of connection tracking that several programs read, as the running kernel has them. The
// structures declare only the members that the programs read; the loader relocates them.
#ifndef SLUICE_KERNEL_CONNTRACK_H
#define SLUICE_KERNEL_CONNTRACK_H

#include <linux/types.h>

#include "co_re.h"

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

struct nf_conntrack_zone {
	__u16 id;
} CO_RE;

struct nf_ct_ext {
	__u8 offset[4];
} CO_RE;

/* The first 12 bytes; later kernels accept this size too. */
struct bpf_ct_opts___short {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

#endif
