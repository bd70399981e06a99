// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* CPU time by kernel stack: runs at each tick of a per-CPU clock event.
 *
 * The map has a 64-bit hash of the frames as its key. The kernel's own stack map
 * gives each stack one slot by a 32-bit hash and loses stacks that collide: a
 * third of all samples on a busy host.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <linux/bpf_perf_event.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#define TASK_COMM_LEN 16
#define STACK_FRAMES 96
#define FNV_OFFSET 0xcbf29ce484222325ULL /* offset basis of FNV-1a, which is used over 64-bit words */
#define FNV_PRIME 0x100000001b3ULL

struct profile_key {
	__u64 hash; /* hash of the frames; 0 in user space */
	char comm[TASK_COMM_LEN];
};

struct profile_stack {
	__u64 samples;
	__u32 frames;
	__u32 pad;
	__u64 ips[STACK_FRAMES]; /* return addresses, innermost first */
};

/* Samples by process and stack. User space reads them at the end. A busy router has
 * some thousands of distinct kernel stacks in ten seconds, of 800 bytes each: 8192
 * elements have room for them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct profile_key);
	__type(value, struct profile_stack);
} profile_stacks SEC(".maps");

/* Buffer in which a CPU assembles the stack, too large for the BPF stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct profile_stack);
} scratch SEC(".maps");

/* [0]: samples without room in profile_stacks. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} profile_lost SEC(".maps");

static __always_inline __u64 hash_frames(const struct profile_stack *s)
{
	__u64 hash = FNV_OFFSET;

	for (__u32 i = 0; i < STACK_FRAMES; i++) {
		if (i >= s->frames)
			break;
		hash = (hash ^ s->ips[i]) * FNV_PRIME;
	}
	return hash;
}

SEC("perf_event")
int profile_cpu(struct bpf_perf_event_data *ctx)
{
	struct profile_key key = {};
	struct profile_stack *s, *seen;
	__u32 zero = 0;
	__u64 *lost;
	long n;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!s)
		return 0;
	n = bpf_get_stack(ctx, s->ips, sizeof(s->ips), 0);
	s->samples = 1;
	s->frames = n > 0 ? (__u32)n / sizeof(s->ips[0]) : 0;
	if (s->frames)
		key.hash = hash_frames(s);
	bpf_get_current_comm(key.comm, sizeof(key.comm));
	seen = bpf_map_lookup_elem(&profile_stacks, &key);
	if (seen) {
		__sync_fetch_and_add(&seen->samples, 1);
		return 0;
	}
	if (!bpf_map_update_elem(&profile_stacks, &key, s, BPF_NOEXIST))
		return 0;
	lost = bpf_map_lookup_elem(&profile_lost, &zero);
	if (lost)
		*lost += 1;
	return 0;
}
