// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// A fast path for connections that the kernel translates. The kernel's rules and connection
// tracking decide; the programs repeat the decision for later packets of the same connection.
#include "fast.h"
#include "learn.h"

SEC("xdp")
int accel_xdp(struct xdp_md *ctx)
{
	return xdp_fast(ctx);
}

SEC("tcx/ingress")
int accel_tc(struct __sk_buff *ctx)
{
	return tc_fast(ctx);
}

SEC("tcx/egress")
int accel_learn(struct __sk_buff *ctx)
{
	if (ctx->ingress_ifindex) /* not of this host's own sockets */
		learn_packet(ctx);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "GPL";
