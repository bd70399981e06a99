// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Reads and writes bytes of a packet for both hooks, and computes checksums. "xdp" is a constant
// that the compiler removes, so that common code exists once.
#ifndef SLUICE_BYTES_H
#define SLUICE_BYTES_H

#include "types.h"

#define IPV4_CHECK 10 // offsets of checksum fields in their headers
#define TCP_CHECK 16
#define UDP_CHECK 6
#define UDP_LENGTH 4
#define ICMP_CHECK 2

// ---- checksums (RFC 1624: one's complement sums of wire words) ----

static __always_inline __u64 fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

static __always_inline __u16 fold16(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

// Returns the amount that a change of one word adds to a sum.
static __always_inline __u64 change(__u32 was, __u32 is)
{
	return (__u64)(__u32)~was + is;
}

static __always_inline __u64 sum_addr(const union addr *a, const bool v6)
{
	if (!v6)
		return a->w[0];
	return (__u64)a->w[0] + a->w[1] + a->w[2] + a->w[3];
}

static __always_inline __u64 minus(__u64 sum)
{
	return (__u32)~fold32(sum);
}

static __always_inline __u16 check_after(__u16 check, __u64 delta)
{
	return ~fold16((__u64)(__u16)~check + delta);
}

// ---- bytes of the packet, by either hook ----

// Hides the value of x from the compiler. Without it, the compiler may remove a bounds check that
// the verifier requires.
#define bounded(x) asm volatile("" : "+r"(x))

#define FRAME_MAX 0x3fff

typedef __u32 __attribute__((may_alias)) word32;
typedef __u16 __attribute__((may_alias)) word16;

// Copies in words of four and two bytes. Without known alignment, clang would copy single bytes on
// this target.
static __always_inline void copy(void *to, const void *from, const __u32 len)
{
	__u32 i = 0;

	for (; i + 4 <= len; i += 4)
		*(word32 *)(to + i) = *(const word32 *)(from + i);
	for (; i + 2 <= len; i += 2)
		*(word16 *)(to + i) = *(const word16 *)(from + i);
	for (; i < len; i++)
		*(__u8 *)(to + i) = *(const __u8 *)(from + i);
}

static __always_inline bool put(void *ctx, __u32 off, const void *from, const __u32 len, const bool xdp)
{
	if (!xdp)
		return !bpf_skb_store_bytes(ctx, off, from, len, BPF_F_RECOMPUTE_CSUM);
	struct xdp_md *md = ctx;
	void *end = (void *)(long)md->data_end, *at = (void *)(long)md->data + (off & FRAME_MAX);

	bounded(end); // each access needs its own bounds check
	if (at + len > end)
		return false;
	copy(at, from, len);
	return true;
}

static __always_inline bool get(void *ctx, __u32 off, void *to, const __u32 len, const bool xdp)
{
	if (!xdp)
		return !bpf_skb_load_bytes(ctx, off, to, len);
	struct xdp_md *md = ctx;
	void *end = (void *)(long)md->data_end, *at = (void *)(long)md->data + (off & FRAME_MAX);

	bounded(end);
	if (at + len > end)
		return false;
	copy(to, at, len);
	return true;
}

// Reads bytes through a helper. It accepts a variable length, and it saves verifier instructions
// where the direct access needs many.
static __always_inline bool load(void *ctx, __u32 off, void *to, __u32 len, const bool xdp)
{
	return xdp ? !bpf_xdp_load_bytes(ctx, off, to, len) : !bpf_skb_load_bytes(ctx, off, to, len);
}

static __always_inline __u32 check_offset(__u8 l4_proto)
{
	switch (l4_proto) {
	case IPPROTO_TCP:
		return TCP_CHECK;
	case IPPROTO_UDP:
		return UDP_CHECK;
	}
	return ICMP_CHECK;
}

static __always_inline bool is_icmp(__u8 l4_proto)
{
	return l4_proto == IPPROTO_ICMP || l4_proto == IPPROTO_ICMPV6;
}

#endif
