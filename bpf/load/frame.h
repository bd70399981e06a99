// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Common parts of the load generator's programs: folding of checksums, the stamp in a payload, and
// the histogram of nanoseconds.
#ifndef SLUICE_LOAD_FRAME_H
#define SLUICE_LOAD_FRAME_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// The stamp that a sender writes into a payload and the far end reads.
struct stamp {
	__u16 magic;   // STAMP_MAGIC
	__u16 sender;  // number of the sending CPU's program
	__u32 seq;     // counts the stamped packets of this sender, from 0
	__u64 time_ns; // CLOCK_MONOTONIC: when it was due (paced) or written
} __attribute__((packed));

#define STAMP_MAGIC 0x534c // magic number: "SL"

// Folds and inverts a one's complement sum of 16-bit words in network order: the value of a
// checksum field.
static __always_inline __u16 csum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)~sum;
}

// Like csum_fold, for a sum that fits into 32 bits.
static __always_inline __u16 csum_fold32(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16) ~(sum + (sum >> 16));
}

// Returns the time of event n in a schedule with an interval in 2^-16 ns. A single product would
// exceed 64 bits after three days.
static __always_inline __u64 schedule_ns(__u64 n, __u64 interval)
{
	return n * (interval >> 16) + (n * (interval & 0xffff) >> 16);
}

// Log-linear histogram of nanoseconds: 32 buckets an octave (3 % wide), up to
// 2^40 ns. Values below 64 have a bucket of their own.
#define HIST_SUB_BITS 5
#define HIST_BUCKETS ((40 - HIST_SUB_BITS + 1) << HIST_SUB_BITS)

static __always_inline __u32 hist_bucket(__u64 ns)
{
	__u32 exp = 0, v;

	if (ns >= 1ULL << 40)
		return HIST_BUCKETS - 1;
	if (ns >> 32) {
		exp = 32;
		v = ns >> 32;
	} else {
		v = ns;
	}
	if (v >> 16) {
		exp += 16;
		v >>= 16;
	}
	if (v >> 8) {
		exp += 8;
		v >>= 8;
	}
	if (v >> 4) {
		exp += 4;
		v >>= 4;
	}
	if (v >> 2) {
		exp += 2;
		v >>= 2;
	}
	exp += v >> 1;
	if (exp < HIST_SUB_BITS)
		return ns;
	exp -= HIST_SUB_BITS;
	return (exp << HIST_SUB_BITS) + (__u32)(ns >> exp);
}

static __always_inline void hist_count(void *hist, __u64 ns)
{
	__u32 b = hist_bucket(ns);
	__u64 *n = bpf_map_lookup_elem(hist, &b);

	if (n)
		++*n;
}

#endif
