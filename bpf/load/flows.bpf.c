// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Complete TCP connections with an HTTP request and a response, without a TCP stack. The programs
// rewrite each received packet into its reply.
//
//	client end                          server end
//	SYN               --------------->
//	                  <---------------  SYN ACK
//	ACK, request      --------------->
//	                  <---------------  response, FIN unless kept alive
//	ACK, FIN          --------------->
//	                  <---------------  ACK
//
// The server end has no state. The client end has 32 bytes of state per connection, for the
// retransmission timer and the clock. The injector runs on live frames. It opens connections when
// they are due, and retransmits lost packets.
#include "server.h"
#include "slots.h"

// --- the client end -------------------------------------------------------

// Returns the slot of a reply's tuple. Addresses vary slowest, ports fastest.
static __always_inline __u32 slot_of(const struct arrival *a)
{
	__u32 address = a->dest_low - plan.source_low;
	__u32 port = (__u32)bpf_ntohs(a->dest) - plan.source_port;
	__u64 index = (__u64)address * plan.ports + port;

	if (a->source != bpf_htons((__u16)plan.dest_port) || port >= plan.ports || index >= plan.slots)
		return ~0U;
	return index;
}

// Reports whether a packet is between the service and the clients, apart from the address bits that
// vary. Other packets belong to the kernel of the host.
static __always_inline int is_pair4(__be32 service)
{
	return service == ((const volatile __u32 *)plan.dest)[3];
}

static __always_inline int is_pair6(const struct in6_addr *service, const struct in6_addr *client)
{
	const volatile __u32 *dest = (const volatile __u32 *)plan.dest;
	const volatile __u32 *source = (const volatile __u32 *)plan.source;
	int same = service->s6_addr32[3] == dest[3];

	for (int i = 0; i < 3; i++)
		same &= service->s6_addr32[i] == dest[i] && client->s6_addr32[i] == source[i];
	return same;
}

#define ICMP_HEADER 8

// The quotation of an ICMP error: headers without options, and ports and sequence number of TCP
// (RFC 792).
struct quoted4 {
	struct iphdr ip;
	__be16 source, dest;
	__be32 seq;
} __attribute__((packed));

struct quoted6 {
	struct ipv6hdr ip;
	__be16 source, dest;
	__be32 seq;
} __attribute__((packed));

// Reads the packet that an ICMP error quotes, as if it were its reply. Echo messages do not match.
static __always_inline int read_quoted4(struct xdp_md *ctx, struct arrival *a)
{
	struct quoted4 *q = (void *)(long)ctx->data + sizeof(struct ethhdr) + sizeof(struct iphdr) + ICMP_HEADER;
	struct iphdr *ip = (void *)q;

	if ((void *)(q + 1) > (void *)(long)ctx->data_end || ip->ihl != 5 || ip->protocol != IPPROTO_TCP)
		return 0;
	a->source = q->dest;
	a->dest = q->source;
	a->dest_low = bpf_ntohl(ip->saddr);
	return is_pair4(ip->daddr);
}

static __always_inline int read_quoted6(struct xdp_md *ctx, struct arrival *a)
{
	struct quoted6 *q = (void *)(long)ctx->data + sizeof(struct ethhdr) + sizeof(struct ipv6hdr) + ICMP_HEADER;
	struct ipv6hdr *ip = (void *)q;

	if ((void *)(q + 1) > (void *)(long)ctx->data_end || ip->nexthdr != IPPROTO_TCP)
		return 0;
	a->source = q->dest;
	a->dest = q->source;
	a->dest_low = bpf_ntohl(ip->saddr.s6_addr32[3]);
	return is_pair6(&ip->daddr, &ip->saddr);
}

// Reads a reply to a connection, or an ICMP error. The error gets the tuple of the missing reply.
static __always_inline enum arrived read_caused4(struct xdp_md *ctx, struct arrival *a)
{
	enum arrived what = read4(ctx, a);
	struct segment4 *s = (void *)(long)ctx->data;
	int ours = 0;

	if (what == ARRIVED_ICMP)
		ours = read_quoted4(ctx, a);
	else if (what == ARRIVED_TCP && (void *)(s + 1) <= (void *)(long)ctx->data_end)
		ours = is_pair4(ip4_of(s)->saddr);
	return ours ? what : ARRIVED_OTHER;
}

static __always_inline enum arrived read_caused6(struct xdp_md *ctx, struct arrival *a)
{
	enum arrived what = read6(ctx, a);
	struct segment6 *s = (void *)(long)ctx->data;
	int ours = 0;

	if (what == ARRIVED_ICMP)
		ours = read_quoted6(ctx, a);
	else if (what == ARRIVED_TCP && (void *)(s + 1) <= (void *)(long)ctx->data_end)
		ours = is_pair6(&ip6_of(s)->saddr, &ip6_of(s)->daddr);
	return ours ? what : ARRIVED_OTHER;
}

static __always_inline int is_last_request(const struct slot *s)
{
	return s->request + 1U >= plan.requests;
}

static __always_inline int on_established(struct xdp_md *ctx, const int family, const struct arrival *a, struct slot *s,
					  struct flow_counts *c, __u64 now)
{
	struct answer r = { .seq = a->ack, .ack = a->seq + 1, .flags = FLAG_ACK };

	c->established++;
	hist_count(&load_connect, now > s->due_ns ? now - s->due_ns : 0);
	s->seq = r.seq;
	s->ack = r.ack;
	s->tries = 1;
	s->sent_ns = now;
	if (plan.hold) {
		s->stage = STAGE_IDLE;
		count_ended();
		return send_back(ctx, family, a, &r, PAYLOAD_NONE);
	}
	c->requests++;
	s->stage = STAGE_REQUEST;
	s->last = is_last_request(s);
	r.close = s->last;
	r.flags |= FLAG_PSH;
	return send_back(ctx, family, a, &r, PAYLOAD_REQUEST);
}

static __always_inline int on_response(struct xdp_md *ctx, const int family, const struct arrival *a, struct slot *s,
				       struct flow_counts *c, __u64 now)
{
	struct answer r = { .seq = a->ack, .ack = a->seq + a->payload_len, .flags = FLAG_ACK };

	c->responses++;
	c->wrong_length += a->payload_len != plan.response_len;
	hist_count(&load_response, now > s->due_ns ? now - s->due_ns : 0);
	s->request++;
	s->seq = r.seq;
	s->tries = 1;
	s->sent_ns = now;
	if (a->flags & FLAG_FIN) {
		r.ack++;
		r.flags |= FLAG_FIN;
		s->ack = r.ack;
		s->stage = STAGE_CLOSING;
		return send_back(ctx, family, a, &r, PAYLOAD_NONE);
	}
	s->ack = r.ack;
	if (plan.hold) {
		s->stage = STAGE_IDLE;
		count_ended();
		return send_back(ctx, family, a, &r, PAYLOAD_NONE);
	}
	c->requests++;
	s->due_ns = now;
	s->last = is_last_request(s);
	r.close = s->last;
	r.flags |= FLAG_PSH;
	return send_back(ctx, family, a, &r, PAYLOAD_REQUEST);
}

// Reports whether a reset ends a connection: it answers the SYN, or has the next sequence number
// (RFC 9293 section 3.10.7.3, RFC 5961 section 3.2). Any other reset is late or forged.
static __always_inline int is_reset(const struct slot *s, const struct arrival *a)
{
	if (s->stage == STAGE_SYN)
		return (a->flags & FLAG_ACK) && a->ack == s->seq + 1;
	return s->stage != STAGE_CLOSED && a->seq == s->ack;
}

static __always_inline void on_reset(struct slot *s, struct flow_counts *c)
{
	c->resets++;
	c->resets_syn += s->stage == STAGE_SYN;
	c->resets_request += s->stage == STAGE_REQUEST;
	if (is_busy(s->stage))
		count_ended();
	s->stage = STAGE_CLOSED;
}

static __always_inline int receive(struct xdp_md *ctx, const int family, const struct arrival *a, struct slot *s,
				   struct flow_counts *c)
{
	__u64 now;

	if (a->flags & FLAG_RST) {
		if (is_reset(s, a))
			on_reset(s, c);
		else
			c->stray++;
		return XDP_DROP;
	}
	switch (s->stage) {
	case STAGE_SYN:
		if ((a->flags & (FLAG_SYN | FLAG_ACK)) != (FLAG_SYN | FLAG_ACK) || a->ack != s->seq + 1)
			break;
		now = bpf_ktime_get_ns();
		return on_established(ctx, family, a, s, c, now);
	case STAGE_REQUEST:
		if (!a->payload_len || a->ack != s->seq + plan.request_len || a->seq != s->ack)
			break;
		now = bpf_ktime_get_ns();
		return on_response(ctx, family, a, s, c, now);
	case STAGE_CLOSING:
		if (a->payload_len || a->ack != s->seq + 1)
			break;
		c->completed++;
		count_ended();
		s->stage = STAGE_CLOSED;
		return XDP_DROP;
	}
	c->stray++;
	return XDP_DROP;
}

// Drops one in lose_every received packets, to test the timers. 0: none.
const volatile __u32 lose_every = 0;
static __u32 arrivals = 0;

SEC("xdp")
int load_client(struct xdp_md *ctx)
{
	struct flow_counts *c = counts();
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct arrival a = {};
	enum arrived what;
	struct slot *s;
	__u32 index;

	if (!c || (void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	if (eth->h_proto != bpf_htons(plan.v6 ? ETH_P_IPV6 : ETH_P_IP))
		return XDP_PASS;
	what = plan.v6 ? read_caused6(ctx, &a) : read_caused4(ctx, &a);
	index = slot_of(&a);
	s = bpf_map_lookup_elem(&load_slots, &index);
	if (what == ARRIVED_OTHER || !s)
		return XDP_PASS;
	if (what == ARRIVED_ICMP) {
		c->unreachable++;
		return XDP_DROP;
	}
	if (lose_every && ++arrivals % lose_every == 0)
		return XDP_DROP;
	return plan.v6 ? receive(ctx, AF6, &a, s, c) : receive(ctx, AF4, &a, s, c);
}

// --- the injector ---------------------------------------------------------

// A gateway may add headers (tunnels, IPv4 to IPv6). veth copies a frame with less headroom than
// XDP_PACKET_HEADROOM into a buffer without room for a reply. The injector adds this headroom in
// advance.
#define SPARE_HEADROOM 64

// Builds a complete packet of a connection, because the page holds the bytes of a previous packet.
static __always_inline int inject(struct xdp_md *ctx, __u32 index, const struct answer *r, const int with_request)
{
	const enum payload p = with_request ? PAYLOAD_REQUEST : PAYLOAD_NONE;
	struct tcp_fields f = {
		.source = bpf_htons((__u16)(plan.source_port + index % plan.ports)),
		.dest = bpf_htons((__u16)plan.dest_port),
		.seq = r->seq,
		.ack = r->ack,
		.flags = r->flags,
		.payload_len = payload_len(p),
	};
	const __u32 headers = plan.v6 ? sizeof(struct segment6) : sizeof(struct segment4);
	__be32 low = bpf_htonl(plan.source_low + index / plan.ports);
	__u64 sum = payload_sum(p, r->close);
	struct ethhdr *eth;
	void *end;

	if (bpf_xdp_adjust_head(ctx, SPARE_HEADROOM) || resize(ctx, headers, f.payload_len))
		return XDP_ABORTED;
	eth = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if ((void *)(eth + 1) > end)
		return XDP_ABORTED;
	write_macs(eth);
	if (!plan.v6) {
		struct segment4 *s = (void *)eth;

		if ((void *)(s + 1) > end || write_payload((__u8 *)(s + 1), end, p, r->close))
			return XDP_ABORTED;
		eth->h_proto = bpf_htons(ETH_P_IP);
		write_ip4(ip4_of(s), low, *(const volatile __u32 *)(plan.dest + 12), sizeof(s->tcp) + f.payload_len);
		sum += sum32(&ip4_of(s)->saddr, 2);
		write_tcp(tcp4_of(s), &f, sum);
	} else {
		struct segment6 *s = (void *)eth;

		if ((void *)(s + 1) > end || write_payload((__u8 *)(s + 1), end, p, r->close))
			return XDP_ABORTED;
		eth->h_proto = bpf_htons(ETH_P_IPV6);
		*(__u32 *)ip6_of(s) = bpf_htonl(6U << 28);
		s->ip.payload_len = bpf_htons(sizeof(s->tcp) + f.payload_len);
		s->ip.nexthdr = IPPROTO_TCP;
		s->ip.hop_limit = 64;
		for (int i = 0; i < 4; i++) {
			s->ip.saddr.s6_addr32[i] = ((const volatile __u32 *)plan.source)[i];
			s->ip.daddr.s6_addr32[i] = ((const volatile __u32 *)plan.dest)[i];
		}
		s->ip.saddr.s6_addr32[3] = low;
		sum += sum32(&ip6_of(s)->saddr, 8);
		write_tcp(tcp6_of(s), &f, sum);
	}
	return bpf_redirect(plan.ifindex, 0);
}

// Counts a retransmission, or closes the connection after too many.
static __always_inline int may_retry(struct slot *s, __u64 *again, __u64 *gave_up)
{
	if (s->tries >= plan.max_tries) {
		++*gave_up;
		count_ended();
		s->stage = STAGE_CLOSED;
		return 0;
	}
	s->tries++;
	++*again;
	return 1;
}

// Retransmits the packet that a connection waits to have answered.
static __always_inline int repeat(struct xdp_md *ctx, __u32 index, struct slot *s, struct flow_counts *c, __u64 now)
{
	struct answer r = { .seq = s->seq, .ack = s->ack, .flags = FLAG_ACK, .close = (__u8)s->last };

	s->sent_ns = now;
	switch (s->stage) {
	case STAGE_SYN:
		if (!may_retry(s, &c->again_syn, &c->gave_up_syn))
			return XDP_DROP;
		r.ack = 0;
		r.flags = FLAG_SYN;
		return inject(ctx, index, &r, 0);
	case STAGE_REQUEST:
		if (!may_retry(s, &c->again_request, &c->gave_up_request))
			return XDP_DROP;
		r.flags |= FLAG_PSH;
		return inject(ctx, index, &r, 1);
	case STAGE_CLOSING:
		if (!may_retry(s, &c->again_fin, &c->gave_up_fin))
			return XDP_DROP;
		r.flags |= FLAG_FIN;
		return inject(ctx, index, &r, 0);
	}
	return XDP_DROP;
}

// Reports whether the retransmission timer has expired. Another CPU may have sent a packet after
// this one read the clock: the difference is signed.
static __always_inline int overdue(const struct slot *s, __u64 now)
{
	return is_busy(s->stage) && (__s64)(now - s->sent_ns) > (__s64)plan.timeout_ns;
}

// Checks the timer of one slot.
static __always_inline int sweep(struct xdp_md *ctx, struct flow_counts *c, __u64 now)
{
	__u32 index = plan.first_slot + injector.sweep;
	struct slot *s = bpf_map_lookup_elem(&load_slots, &index);

	if (++injector.sweep >= plan.own_slots)
		injector.sweep = 0;
	if (!s || !overdue(s, now))
		return XDP_DROP;
	return repeat(ctx, index, s, c, now);
}

// Opens the connection of a slot.
static __always_inline int open_slot(struct xdp_md *ctx, __u32 index, struct slot *s, struct flow_counts *c, __u64 now,
				     __u64 due)
{
	struct answer r = { .flags = FLAG_SYN };

	c->started++;
	count_begun();
	// Above any sequence number of the previous connection (RFC 6191).
	s->seq += 65536;
	s->ack = 0;
	s->due_ns = due;
	s->sent_ns = now;
	s->stage = STAGE_SYN;
	s->tries = 1;
	s->request = 0;
	s->last = 0;
	r.seq = s->seq;
	return inject(ctx, index, &r, 0);
}

// Sends the next request on an open connection.
static __always_inline int next_request(struct xdp_md *ctx, __u32 index, struct slot *s, struct flow_counts *c,
					__u64 now, __u64 due)
{
	struct answer r = { .seq = s->seq, .ack = s->ack, .flags = FLAG_ACK | FLAG_PSH };

	c->requests++;
	count_begun();
	s->due_ns = due;
	s->sent_ns = now;
	s->stage = STAGE_REQUEST;
	s->tries = 1;
	s->last = is_last_request(s);
	r.close = (__u8)s->last;
	return inject(ctx, index, &r, 1);
}

SEC("xdp")
int load_inject(struct xdp_md *ctx)
{
	struct flow_counts *c = counts();
	__u64 now = bpf_ktime_get_ns(), due = now;
	struct slot *s;
	__u32 index;

	if (!c)
		return XDP_ABORTED;
	if (!injector.start_ns)
		injector.start_ns = now;
	if (injector.turns >= plan.limit)
		return sweep(ctx, c, now);
	if (plan.interval) {
		due = injector.start_ns + schedule_ns(injector.turns, plan.interval);
		if (now < due)
			return sweep(ctx, c, now);
	} else if (under_way() >= plan.window) {
		return sweep(ctx, c, now);
	}
	index = plan.first_slot + injector.cursor;
	s = bpf_map_lookup_elem(&load_slots, &index);
	if (!s)
		return XDP_ABORTED;
	if (++injector.cursor >= plan.own_slots)
		injector.cursor = 0;
	// Without a schedule, a turn waits for its slot.
	if (!plan.interval && is_busy(s->stage))
		return sweep(ctx, c, now);
	injector.turns++;
	switch (s->stage) {
	case STAGE_CLOSED:
		return open_slot(ctx, index, s, c, now, due);
	case STAGE_IDLE:
		return next_request(ctx, index, s, c, now, due);
	}
	c->overdue++;
	return overdue(s, now) ? repeat(ctx, index, s, c, now) : XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
