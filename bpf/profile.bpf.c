// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* CPU time by kernel stack: runs at each tick of a per-CPU clock event. */
#include <linux/bpf.h>
#include <linux/types.h>
#include <linux/bpf_perf_event.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#define TASK_COMM_LEN 16
#define STACK_DEPTH 127 /* PERF_MAX_STACK_DEPTH */

/* What was running: the stack's number, or why there is none. */
struct profile_key {
	__s32 stack; /* in stacks; -1: the CPU was in user space; -2: not stored */
	__u32 cpu;
	char comm[TASK_COMM_LEN];
};

enum profile_stack {
	PROFILE_STACK_USER = -1,
	PROFILE_STACK_LOST = -2,
};

const enum profile_stack *_export_stack __attribute__((unused));

/* Samples by what ran. Written here, read at the end. 16384: distinct kernel
 * stacks of a busy router in a minute are some thousands. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct profile_key);
	__type(value, __u64);
} profile_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, STACK_DEPTH * sizeof(__u64));
} stacks SEC(".maps");

/* [0]: samples that found no room in profile_counts. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} profile_lost SEC(".maps");

SEC("perf_event")
int profile_cpu(struct bpf_perf_event_data *ctx)
{
	struct profile_key key = {.cpu = bpf_get_smp_processor_id()};
	__u64 one = 1, *count;
	__u32 zero = 0;
	long id = bpf_get_stackid(ctx, &stacks, 0);

	if (id >= 0)
		key.stack = (__s32)id;
	else
		key.stack = id == -17 /* EEXIST: hash collision */ ? PROFILE_STACK_LOST :
								    PROFILE_STACK_USER;
	bpf_get_current_comm(key.comm, sizeof(key.comm));
	count = bpf_map_lookup_elem(&profile_counts, &key);
	if (count) {
		__sync_fetch_and_add(count, 1);
		return 0;
	}
	if (!bpf_map_update_elem(&profile_counts, &key, &one, BPF_NOEXIST))
		return 0;
	count = bpf_map_lookup_elem(&profile_lost, &zero);
	if (count)
		*count += 1;
	return 0;
}
