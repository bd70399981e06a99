// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* Local ports that programs bound by number: ports of TCP listeners, and of UDP
 * sockets without a remote side.
 *
 * The kernel records this fact, because such a port outlives a disconnect. No file
 * and no netlink message shows it. An iterator walks the sockets of the network
 * namespace in which it was opened.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define TCP_LISTEN 10
#define SOCK_BINDPORT_LOCK 8 /* bind() chose the port (include/net/sock.h) */

struct asked_port {
	__u16 port;
	__u8 protocol;
	__u8 pad;
};

const struct asked_port *_export_port __attribute__((unused));

static __always_inline void tell(struct bpf_iter_meta *meta, struct sock *sk, __u8 protocol)
{
	struct asked_port asked = { .protocol = protocol };

	/* A bit field up to Linux 6.1, a byte later. */
	if (!(BPF_CORE_READ_BITFIELD_PROBED(sk, sk_userlocks) & SOCK_BINDPORT_LOCK))
		return;
	asked.port = BPF_CORE_READ(sk, __sk_common.skc_num);
	bpf_seq_write(meta->seq, &asked, sizeof(asked));
}

SEC("iter/tcp")
int ports_tcp(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;

	if (sk && sk->skc_state == TCP_LISTEN)
		tell(ctx->meta, (struct sock *)sk, IPPROTO_TCP);
	return 0;
}

SEC("iter/udp")
int ports_udp(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;

	if (sk && !BPF_CORE_READ(sk, __sk_common.skc_dport))
		tell(ctx->meta, sk, IPPROTO_UDP);
	return 0;
}
