// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* Frames that the kernel loses after the verdict of an XDP program: the interface
 * accepts no redirects, its driver refuses the frames, or the program aborts. The
 * frames have no socket buffer yet. Therefore skb:kfree_skb, which drops.bpf.c
 * counts, does not see them.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"

char _license[] SEC("license") = "Dual BSD/GPL";

struct bpf_prog_aux {
	char name[16];
} CO_RE;

struct bpf_prog {
	struct bpf_prog_aux *aux;
} CO_RE;

enum loss_kind {
	LOSS_REDIRECT, /* the redirect was refused: xdp:xdp_redirect_err */
	LOSS_SEND,     /* the driver refused the frames: xdp:xdp_devmap_xmit */
	LOSS_ABORTED,  /* the program failed, or an XDP_TX: xdp:xdp_exception */
};

struct loss_key {
	__u32 netns;	  /* inode of the network namespace */
	__u32 from;	  /* ingress interface */
	__u32 to;	  /* egress interface; 0: not known */
	__s32 error;	  /* negative errno; 0: none */
	__u32 kind;	  /* enum loss_kind */
	char program[16]; /* name; empty if the tracepoint does not report it */
};

const enum loss_kind *_export_kind __attribute__((unused));

/* Lost frames by kind. The programs below write them; user space empties the map
 * when a watch begins. Kinds include pairs of interfaces: a kind without room in
 * the map is not counted. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct loss_key);
	__type(value, __u64);
} losses SEC(".maps");

static __always_inline void lose(struct loss_key *key, struct net_device *from, struct bpf_prog *prog, __u64 frames)
{
	__u64 *count, none = 0;

	key->netns = BPF_CORE_READ(from, nd_net.net, ns.inum);
	key->from = (__u32)BPF_CORE_READ(from, ifindex);
	if (prog)
		BPF_CORE_READ_STR_INTO(&key->program, prog, aux, name);
	count = bpf_map_lookup_elem(&losses, key);
	if (!count) {
		bpf_map_update_elem(&losses, key, &none, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&losses, key);
	}
	if (count)
		__sync_fetch_and_add(count, frames);
}

/* (device, program, target, error, map type, map, index). For a redirect without a map,
 * the index is the interface. For a device map, the target begins with its device. */
SEC("tp_btf/xdp_redirect_err")
int redirect_err(__u64 *ctx)
{
	struct loss_key key = { .kind = LOSS_REDIRECT, .error = (__s32)ctx[3] };
	__u32 map = (__u32)ctx[4];
	struct net_device *to = (struct net_device *)0;

	if (map == BPF_MAP_TYPE_UNSPEC) {
		key.to = (__u32)ctx[6];
	} else if ((map == BPF_MAP_TYPE_DEVMAP || map == BPF_MAP_TYPE_DEVMAP_HASH) && ctx[2]) {
		bpf_probe_read_kernel(&to, sizeof(to), (void *)ctx[2]);
		key.to = (__u32)BPF_CORE_READ(to, ifindex);
	}
	lose(&key, (struct net_device *)ctx[0], (struct bpf_prog *)ctx[1], 1);
	return 0;
}

/* (from, to, sent, lost, error), once for up to 16 frames. */
SEC("tp_btf/xdp_devmap_xmit")
int devmap_xmit(__u64 *ctx)
{
	struct loss_key key = { .kind = LOSS_SEND, .error = (__s32)ctx[4] };
	__s32 lost = (__s32)ctx[3];

	if (lost <= 0)
		return 0;
	key.to = (__u32)BPF_CORE_READ((struct net_device *)ctx[1], ifindex);
	lose(&key, (struct net_device *)ctx[0], (struct bpf_prog *)0, (__u32)lost);
	return 0;
}

/* (device, program, action). xdp_redirect_err reports failed redirects. */
SEC("tp_btf/xdp_exception")
int exception(__u64 *ctx)
{
	struct loss_key key = { .kind = LOSS_ABORTED };

	if ((__u32)ctx[2] == XDP_REDIRECT)
		return 0;
	lose(&key, (struct net_device *)ctx[0], (struct bpf_prog *)ctx[1], 1);
	return 0;
}
