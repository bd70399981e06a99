// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Network namespaces, as the running kernel has them.
#ifndef SLUICE_KERNEL_NET_H
#define SLUICE_KERNEL_NET_H

#include "co_re.h"

struct ns_common {
	unsigned int inum;
} CO_RE;

struct net {
	struct ns_common ns;
} CO_RE;

typedef struct {
	struct net *net;
} CO_RE possible_net_t;

#endif
