// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// The packet sender. BPF_PROG_TEST_RUN with BPF_F_TEST_XDP_LIVE_FRAMES runs it once per packet, in
// one long call per CPU. The kernel recycles the pages, and the forwarder of the previous packet
// has changed its headers. Therefore the program writes every header byte again.
#include "frame.h"

#define HEAD_MAX 128

// The plan of a sender. User space sets it before load; the verifier then removes the branches that
// the plan does not need. Offsets count from the start of the frame. An offset of 0 means that the
// field does not exist, or that its value in the template is constant.
struct plan {
	__u64 head[HEAD_MAX / 8]; // template in network order
	__u32 head_len;		  // length of the template to write, even
	__u32 ifindex;		  // egress interface
	__u32 flows;		  // distinct tuples, at least 1
	__u32 first;		  // index of this sender's first tuple
	__u32 stride;		  // step from tuple to tuple, coprime to flows
	__u32 source;		  // lowest source address, low 32 bits, host order
	__u32 source_count;
	__u32 source_port; // lowest source port (ICMP: identifier), host order
	__u32 source_port_count;
	__u32 dest; // range of addresses, as source
	__u32 dest_count;
	__u32 dest_port;
	__u32 dest_port_count;
	__u16 source_off; // offset of the low 32 bits of the source address
	__u16 dest_off;
	__u16 source_port_off;
	__u16 dest_port_off;
	__u16 l4_off; // offset of the transport header
	__u16 ip_csum_off;
	__u16 l4_csum_off;
	__u16 stamp_off;
	__u16 frag_off; // offset of the 16-bit fragment offset field
	__u32 ip_sum;	// sum of the IPv4 header without checksum and varied fields
	__u32 l4_sum;	// sum of pseudo-header and datagram without varied fields
	__u16 pseudo;	// addresses are part of the transport checksum
	__u16 sender;
	__u16 senders;	  // number of sending CPUs, for distinct datagram identifications
	__u16 fragments;  // fragments per datagram, 1: not fragmented
	__u16 frag_words; // payload per fragment in 8-byte units
	__u16 frag_v6;	  // the fragment field is in an IPv6 header
	__u16 ident_off;  // offset of the low 16 bits of the datagram's identification
	__u64 limit;	  // stop after so many packets
	__u64 interval;	  // interval between packets in 2^-16 ns; 0: no limit
};

const volatile struct plan plan = {};

// State of the one CPU that runs this program.
struct progress {
	__u64 sent;	// packets handed to the interface, which may refuse them
	__u64 check;	// value of sent at which is_open checks the limit and the clock
	__u64 start_ns; // time of the first packet and start of the schedule
	__u64 end_ns;	// time of the last packet within the plan's limit
	__u32 tuple;	// index of the next tuple
	__u32 seq;	// next stamp
	__u32 fragment; // next fragment of the datagram
	__u32 datagram; // identification of the datagram
};

struct progress progress = {};

// Returns the plan. The compiler may read each field once and keep the value in a register, but
// must not know it. Only the verifier knows the value, and removes the branches that the plan does
// not take. Volatile reads in these branches would remain.
static __always_inline const struct plan *the_plan(void)
{
	const struct plan *p = (const struct plan *)&plan;

	asm volatile("" : "+r"(p));
	return p;
}

// Copies head_len (even) bytes of the template.
static __always_inline void write_head(const struct plan *p, __u8 *frame)
{
	const __u16 *tail = (const __u16 *)p->head;

	// Unrolled, because the verifier decides each branch at load time.
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < HEAD_MAX / 8; i++) {
		if (p->head_len >= 8 * (i + 1)) {
			*(__u64 *)(frame + 8 * i) = p->head[i];
			continue;
		}
		if (p->head_len >= 8 * i + 2)
			*(__u16 *)(frame + 8 * i) = tail[4 * i];
		if (p->head_len >= 8 * i + 4)
			*(__u16 *)(frame + 8 * i + 2) = tail[4 * i + 1];
		if (p->head_len >= 8 * i + 6)
			*(__u16 *)(frame + 8 * i + 4) = tail[4 * i + 2];
	}
}

static __always_inline __u32 put_address(__u8 *at, __u32 host)
{
	__be32 wire = bpf_htonl(host);

	*(__be32 *)at = wire;
	return (wire & 0xffff) + (wire >> 16);
}

static __always_inline __u32 put_port(__u8 *at, __u32 host)
{
	__be16 wire = bpf_htons((__u16)host);

	*(__be16 *)at = wire;
	return wire;
}

// Removes the lowest digit of a mixed-radix number, unless no higher digits are in use.
static __always_inline __u32 cut(__u32 *rest, __u32 radix, __u32 more)
{
	__u32 digit = *rest;

	if (more) {
		digit %= radix;
		*rest /= radix;
	}
	return digit;
}

// Writes the variable addresses and ports. Returns their contribution to the checksums: addresses
// in the low half, ports in the high half. The template contains constant fields, which have no
// offset.
static __always_inline __u64 write_tuple(const struct plan *p, __u8 *frame, __u32 rest)
{
	__u32 addresses = 0, ports = 0;

	if (p->source_port_off)
		ports += put_port(frame + p->source_port_off,
				  p->source_port + cut(&rest, p->source_port_count,
						       p->source_off || p->dest_off || p->dest_port_off));
	if (p->source_off)
		addresses += put_address(frame + p->source_off,
					 p->source + cut(&rest, p->source_count, p->dest_off || p->dest_port_off));
	if (p->dest_off)
		addresses += put_address(frame + p->dest_off, p->dest + cut(&rest, p->dest_count, p->dest_port_off));
	if (p->dest_port_off)
		ports += put_port(frame + p->dest_port_off, p->dest_port + rest);
	return (__u64)ports << 32 | addresses;
}

static __always_inline __u64 write_stamp(const struct plan *p, __u8 *at, __u64 now)
{
	struct stamp stamp = {
		.magic = STAMP_MAGIC,
		.sender = p->sender,
		.seq = progress.seq++,
		.time_ns = now,
	};
	__u64 words[2];

	__builtin_memcpy(words, &stamp, sizeof(words));
	*(__u64 *)at = words[0];
	*(__u64 *)(at + 8) = words[1];
	return (words[0] & 0xffffffff) + (words[0] >> 32) + (words[1] & 0xffffffff) + (words[1] >> 32);
}

// Writes the fragment field and the identification. Returns their contribution to the checksum of
// the IPv4 header.
static __always_inline __u32 write_fragment(const struct plan *p, __u8 *frame, __u32 nth)
{
	__u32 more = nth + 1 < p->fragments;
	__u32 units = nth * p->frag_words;
	__be16 field;
	__be16 ident = bpf_htons((__u16)progress.datagram);

	if (p->frag_v6)
		field = bpf_htons((__u16)(units << 3 | more));
	else
		field = bpf_htons((__u16)(units | more << 13));
	*(__be16 *)(frame + p->frag_off) = field;
	*(__be16 *)(frame + p->ident_off) = ident;
	return (__u32)field + ident;
}

// Writes zeros in a later fragment, in place of the transport header.
static __always_inline void clear_transport(const struct plan *p, __u8 *frame)
{
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < HEAD_MAX; i += 2)
		if (i >= p->l4_off && i + 2 <= p->head_len)
			*(__u16 *)(frame + i) = 0;
}

// Advances to the next fragment or tuple. A stride coprime to the number of flows visits every
// tuple once per round, far from its neighbours in memory.
static __always_inline void next_packet(const struct plan *p, __u32 nth)
{
	__u32 tuple;

	if (p->fragments > 1) {
		progress.fragment = nth + 1 < p->fragments ? nth + 1 : 0;
		if (progress.fragment)
			return;
		progress.datagram += p->senders;
	}
	if (p->flows == 1)
		return;
	tuple = progress.tuple + p->stride;
	if (tuple >= p->flows)
		tuple -= p->flows;
	progress.tuple = tuple;
}

// Returns the due time of the next packet, or 0 if it is not due.
static __always_inline __u64 due_now(const struct plan *p)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 due = progress.start_ns + schedule_ns(progress.sent, p->interval);

	return now < due ? 0 : due;
}

// Records the times of the first and the last packet, and closes the plan after its limit. The
// sender calls it only for these packets: for all others, one comparison suffices. Inline, its code
// would take registers from them.
static __noinline int is_open(void)
{
	__u64 now;

	if (progress.sent >= plan.limit)
		return 0;
	now = bpf_ktime_get_ns();
	if (!progress.start_ns)
		progress.start_ns = now;
	if (now < progress.start_ns + schedule_ns(progress.sent, plan.interval))
		return 0; // not due: end_ns must not precede the packet's own time
	progress.end_ns = now;
	progress.check = plan.limit - 1;
	return 1;
}

SEC("xdp")
int load_send(struct xdp_md *ctx)
{
	const struct plan *p = the_plan();
	__u8 *frame = (__u8 *)(long)ctx->data;
	__u8 *end = (__u8 *)(long)ctx->data_end;
	__u64 time = 0, varied = 0, stamp = 0;
	__u32 nth = 0, fragment = 0;

	if (progress.sent >= progress.check && !is_open())
		return XDP_DROP;
	if (p->interval) {
		time = due_now(p);
		if (!time)
			return XDP_DROP;
	} else if (p->stamp_off) {
		time = bpf_ktime_get_ns();
	}
	if (frame + p->head_len > end)
		return XDP_ABORTED;

	write_head(p, frame);
	if (p->flows > 1)
		varied = write_tuple(p, frame, progress.tuple);
	if (p->fragments > 1) {
		nth = progress.fragment;
		fragment = write_fragment(p, frame, nth);
	}
	if (p->ip_csum_off)
		*(__u16 *)(frame + p->ip_csum_off) = csum_fold32(p->ip_sum + (__u32)varied + fragment);
	progress.sent++;
	if (nth)
		clear_transport(p, frame);
	else if (p->stamp_off)
		stamp = write_stamp(p, frame + p->stamp_off, time);
	if (p->l4_csum_off && !nth) {
		__u32 sum = p->l4_sum + (__u32)(varied >> 32) + (p->pseudo ? (__u32)varied : 0);
		__u16 csum = p->stamp_off ? csum_fold(sum + stamp) : csum_fold32(sum);

		*(__u16 *)(frame + p->l4_csum_off) = csum ? csum : 0xffff;
	}
	next_packet(p, nth);
	return bpf_redirect(p->ifindex, 0);
}

// A minimal loop: the same bytes every time, no flows, no checksums. It is the reference for
// load_send.
SEC("xdp")
int load_loop(struct xdp_md *ctx)
{
	const struct plan *p = the_plan();
	__u64 *frame = (__u64 *)(long)ctx->data;

	if ((void *)(frame + 6) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	for (int i = 0; i < 6; i++)
		frame[i] = p->head[i];
	progress.sent++;
	return bpf_redirect(p->ifindex, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
