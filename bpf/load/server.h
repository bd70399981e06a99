// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The server end of connections: it answers each packet from the packet itself and has no state.
#ifndef SLUICE_LOAD_SERVER_H
#define SLUICE_LOAD_SERVER_H

#include "tcp.h"

// Computes the server's initial sequence number from the client's one, so that a retransmitted SYN
// gets the same reply.
static __always_inline __u32 server_isn(__u32 client_isn)
{
	return client_isn * 2654435761U;
}

static __always_inline int serve(struct xdp_md *ctx, const int family, const struct arrival *a)
{
	struct answer r = { .seq = a->ack, .ack = a->seq + a->payload_len, .flags = FLAG_ACK };

	if (a->flags & FLAG_RST)
		return XDP_DROP;
	if (a->flags & FLAG_SYN) {
		r.seq = server_isn(a->seq);
		r.ack = a->seq + 1;
		r.flags = FLAG_SYN | FLAG_ACK;
		return send_back(ctx, family, a, &r, PAYLOAD_NONE);
	}
	if (a->payload_len) {
		r.flags = FLAG_ACK | FLAG_PSH;
		if (a->first != REQUEST_KEEP)
			r.flags |= FLAG_FIN;
		return send_back(ctx, family, a, &r, PAYLOAD_RESPONSE);
	}
	if (a->flags & FLAG_FIN) {
		r.ack++;
		return send_back(ctx, family, a, &r, PAYLOAD_NONE);
	}
	return XDP_DROP; // a bare ACK needs no reply
}

// Removes an outer IPv4 or IPv6 header (IPIP), for services in mode tunnel.
static __always_inline int decapsulate(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr saved;
	__u8 inner;
	int outer;

	if ((void *)(eth + 1) + sizeof(struct ipv6hdr) > end)
		return 0;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		inner = ((struct iphdr *)(eth + 1))->protocol;
		outer = sizeof(struct iphdr);
	} else {
		inner = ((struct ipv6hdr *)(eth + 1))->nexthdr;
		outer = sizeof(struct ipv6hdr);
	}
	if (inner != IPPROTO_IPIP && inner != IPPROTO_IPV6)
		return 0;
	saved = *eth;
	saved.h_proto = bpf_htons(inner == IPPROTO_IPIP ? ETH_P_IP : ETH_P_IPV6);
	if (bpf_xdp_adjust_head(ctx, outer))
		return -1;
	eth = (void *)(long)ctx->data;
	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return -1;
	*eth = saved;
	return 0;
}

SEC("xdp")
int load_server(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct arrival a = {};
	enum arrived what;
	int v6;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	if (eth->h_proto != bpf_htons(ETH_P_IP) && eth->h_proto != bpf_htons(ETH_P_IPV6))
		return XDP_PASS;
	if (decapsulate(ctx))
		return XDP_ABORTED;
	eth = (void *)(long)ctx->data;
	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	v6 = eth->h_proto == bpf_htons(ETH_P_IPV6);
	what = v6 ? read6(ctx, &a) : read4(ctx, &a);
	if (what != ARRIVED_TCP)
		return XDP_PASS;
	return v6 ? serve(ctx, AF6, &a) : serve(ctx, AF4, &a);
}

#endif
