// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

/* Reads the hash table of connection tracking, without ctnetlink's messages.
 *
 * No symbol names the table in every kernel. But the first node of a chain points back to its bucket, and the end of a
 * chain contains the number of its bucket. find_table follows a known connection to both. The number also detects that
 * a chain changed while it was read: then its end belongs to another bucket, and the bucket is read again.
 *
 * User space runs the programs in the network namespace of the connections. They change nothing.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../kernel/conntrack.h"
#include "../kernel/net.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define BPF_F_CURRENT_NETNS (-1)
#define TC_ACT_OK 0
#define IPPROTO_TCP 6
#define IPPROTO_SCTP 132
#define IPS_OFFLOAD (1 << 14) /* enum ip_conntrack_status */

#define CHAIN_MAX 256	   /* nodes that find_table reads before and behind a connection */
#define NODE_MAX 128	   /* bytes of struct nf_conntrack_tuple_hash, */
#define CONNECTION_MAX 512 /* and of struct nf_conn, at most */
#define RECORDS 1024	   /* connections that one run returns */
#define BUCKET_RECORDS 256 /* connections of one bucket */
#define STEPS 8192	   /* nodes and buckets that one run reads */
#define ATTEMPTS 8	   /* reads of a bucket that changes */

struct ip_ct_tcp {
	__u8 state;
} CO_RE;

enum sctp_conntrack {
	SCTP_CONNTRACK_NONE,
};

struct ip_ct_sctp {
	enum sctp_conntrack state;
} CO_RE;

struct nf_conn {
	__u32 timeout; /* in jiffies */
	struct nf_conntrack_zone zone;
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
	possible_net_t ct_net;
	__u32 mark;
	struct nf_ct_ext *ext;
	union {
		struct ip_ct_tcp tcp;
		struct ip_ct_sctp sctp;
	} proto;
} CO_RE;

enum nf_ct_ext_id {
	NF_CT_EXT_HELPER,
	NF_CT_EXT_ACCT,
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple, __u32 size,
					 struct bpf_ct_opts___short *opts, __u32 opts_size) __ksym;
extern void bpf_ct_release(struct nf_conn *ct) __ksym;

struct endpoint {
	__u32 address[4]; /* in network byte order */
	__u16 port;
};

struct record {
	struct endpoint source[2], dest[2]; /* of the original direction and of the reply */
	__u32 status, mark, seconds;
	__u16 zone, family;
	__u8 protocol, state;
	bool counted, helped;
};

/* One run of read_buckets. */
struct chunk {
	__u32 bucket, end; /* in: the buckets to read; out: bucket is the next one */
	__u32 namespace;   /* inode number */
	__u32 records;
	__u32 failed; /* buckets that could not be read */
	__u32 pad;
	__u64 node[NODE_MAX / 8], connection[CONNECTION_MAX / 8]; /* copies of the kernel's structures */
	struct record record[RECORDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 4);
	__type(key, __u32);
	__type(value, struct chunk);
} chunks SEC(".maps");

const volatile __u32 hz = 250; /* jiffies per second */

/* Written by user space: a connection that find_table looks up, and the table that read_buckets reads. */
struct connection {
	struct bpf_sock_tuple tuple;
	__u32 size;
	__u32 protocol;
};
struct connection anchor = {};
__u64 table = 0;

/* Written by find_table: the bucket of the connection, and the places that may be this bucket. */
__u32 found_bucket = 0;
__u32 places = 0;
__u64 place[CHAIN_MAX] = {};

static __always_inline __u64 read_word(__u64 address)
{
	__u64 word = 0;

	bpf_probe_read_kernel(&word, sizeof(word), (void *)address);
	return word;
}

SEC("tc")
int find_table(struct __sk_buff *skb)
{
	struct bpf_ct_opts___short opts = { .netns_id = BPF_F_CURRENT_NETNS };
	struct bpf_sock_tuple tuple = anchor.tuple;
	struct nf_conn *ct;
	__u64 node, before;
	__u32 i;

	places = 0;
	opts.l4proto = anchor.protocol;
	if (anchor.size == sizeof(tuple.ipv6))
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv6), &opts, sizeof(opts));
	else
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	if (!ct)
		return TC_ACT_OK;
	node = read_word((__u64)&ct->tuplehash[0].hnnode.next);
	before = read_word((__u64)&ct->tuplehash[0].hnnode.pprev); /* the bucket, or the node before */
	for (i = 0; i < CHAIN_MAX && node && !(node & 1); i++)
		node = read_word(node); /* next is the first member */
	found_bucket = node >> 1;
	for (i = 0; i < CHAIN_MAX && (node & 1) && before; i++) {
		place[i] = before;
		places = i + 1;
		before = read_word(before + sizeof(__u64));
	}
	bpf_ct_release(ct);
	return TC_ACT_OK;
}

/* A walk over the buckets of a chunk. */
struct walk {
	struct chunk *chunk;
	__u64 node;  /* 0 at the start of a bucket */
	__u64 net;   /* the last network namespace, */
	__u32 inode; /* and its inode number */
	__u32 jiffies;
	__u32 begin; /* records before the bucket */
	__u32 attempts;
};

static __always_inline __u32 namespace_of(struct walk *w, struct net *net)
{
	if ((__u64)net != w->net) {
		w->net = (__u64)net;
		w->inode = BPF_CORE_READ(net, ns.inum);
	}
	return w->inode;
}

#define write_endpoint(to, from)                       \
	do {                                           \
		(to)->address[0] = (from)->u3.all[0];  \
		(to)->address[1] = (from)->u3.all[1];  \
		(to)->address[2] = (from)->u3.all[2];  \
		(to)->address[3] = (from)->u3.all[3];  \
		(to)->port = bpf_ntohs((from)->u.all); \
	} while (0)

/* Reads the offsets of the extensions, one byte each. */
static __always_inline void read_extensions(struct record *r, struct nf_ct_ext *ext)
{
	__u64 offsets = ext ? read_word((__u64)ext) : 0;
	__u8 offset = offsets >> (8 * bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_HELPER));

	r->counted = (offsets >> (8 * bpf_core_enum_value(enum nf_ct_ext_id, NF_CT_EXT_ACCT))) & 0xff;
	r->helped = offset && read_word((__u64)ext + offset); /* struct nf_conn_help begins with the helper */
}

/* Writes the connection to the next record, unless it has expired or belongs to another namespace. */
static __always_inline void write_connection(struct walk *w, const struct nf_conn *ct)
{
	__u32 n = w->chunk->records;
	__s32 left = ct->timeout - w->jiffies;
	struct record *r;

	if (left <= 0 || n >= RECORDS || namespace_of(w, ct->ct_net.net) != w->chunk->namespace)
		return;
	r = &w->chunk->record[n];
	write_endpoint(&r->source[0], &ct->tuplehash[0].tuple.src);
	write_endpoint(&r->dest[0], &ct->tuplehash[0].tuple.dst);
	write_endpoint(&r->source[1], &ct->tuplehash[1].tuple.src);
	write_endpoint(&r->dest[1], &ct->tuplehash[1].tuple.dst);
	r->family = ct->tuplehash[0].tuple.src.l3num;
	r->protocol = ct->tuplehash[0].tuple.dst.protonum;
	r->status = ct->status;
	r->mark = bpf_core_field_exists(ct->mark) ? ct->mark : 0;
	r->zone = bpf_core_field_exists(ct->zone) ? ct->zone.id : 0;
	r->seconds = r->state = 0;
	if (!(r->status & IPS_OFFLOAD)) { /* as in ctnetlink_fill_info() */
		r->seconds = (__u32)left / hz;
		if (r->protocol == IPPROTO_TCP)
			r->state = ct->proto.tcp.state;
		else if (r->protocol == IPPROTO_SCTP)
			r->state = ct->proto.sctp.state;
	}
	read_extensions(r, ct->ext);
	w->chunk->records = n + 1;
}

/* Copies a structure of the kernel, or as much of it as there is room for. */
#define copy(to, type, address)                                                                                  \
	bpf_probe_read_kernel(to, bpf_core_type_size(type) < sizeof(to) ? bpf_core_type_size(type) : sizeof(to), \
			      (void *)(address))

static __always_inline void skip_bucket(struct walk *w)
{
	w->chunk->failed++;
	w->chunk->bucket++;
	w->attempts = 0;
}

/* Ends a bucket, or repeats it if the chain led to another one or was cut. */
static __always_inline bool end_bucket(struct walk *w)
{
	struct chunk *c = w->chunk;
	__u64 node = w->node;

	w->node = 0;
	if ((node & 1) && node >> 1 == c->bucket && c->records - w->begin <= BUCKET_RECORDS) {
		c->bucket++;
		w->attempts = 0;
		return c->records <= RECORDS - BUCKET_RECORDS - 1;
	}
	c->records = w->begin;
	if (++w->attempts == ATTEMPTS)
		skip_bucket(w);
	return true;
}

/* Reads one node or the head of one bucket. Returns 1 to end the run. */
static long step(__u64 index, void *data)
{
	struct walk *w = data;
	struct chunk *c = w->chunk;
	struct nf_conntrack_tuple_hash *h;

	if (!w->node) {
		if (c->bucket >= c->end)
			return 1;
		w->begin = c->records;
		w->node = read_word(table + (__u64)c->bucket * sizeof(__u64));
		return !w->node && !end_bucket(w);
	}
	if (w->node & 1)
		return !end_bucket(w);
	h = (void *)c->node;
	if (copy(c->node, struct nf_conntrack_tuple_hash, w->node)) {
		w->node = 0;
		return !end_bucket(w);
	}
	if (!h->tuple.dst.dir &&
	    !copy(c->connection, struct nf_conn, w->node - bpf_core_field_offset(struct nf_conn, tuplehash)))
		write_connection(w, (void *)c->connection);
	w->node = (__u64)h->hnnode.next;
	return !w->node && !end_bucket(w);
}

/* Reads buckets into the chunk whose number is in the packet. */
SEC("tc")
int read_buckets(struct __sk_buff *skb)
{
	struct walk w = {};
	__u32 number = 0, bucket;

	bpf_skb_load_bytes(skb, 0, &number, sizeof(number));
	w.chunk = bpf_map_lookup_elem(&chunks, &number);
	if (!w.chunk)
		return TC_ACT_OK;
	w.chunk->records = w.chunk->failed = 0;
	bucket = w.chunk->bucket;
	w.jiffies = bpf_jiffies64();
	bpf_loop(STEPS, step, &w, 0);
	if (w.node) { /* the run ended within a bucket */
		w.chunk->records = w.begin;
		if (w.chunk->bucket == bucket)
			skip_bucket(&w);
	}
	return TC_ACT_OK;
}
