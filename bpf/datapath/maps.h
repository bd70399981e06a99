// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// All maps, with flow_maps.h and nat/maps.h. The loader sets the sizes marked "set at load" from the
// configuration or the machine's memory. All maps but "works" are pinned and outlive the daemon.
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

#include "flow_maps.h"
#include "nat/maps.h"
#include "switches.h"
#include "work.h"

// Global words of the datapath. User space and the programs increment the generation.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

// Next hops, placed by a hash of their content. Written by the programs, which may overwrite an
// entry of an earlier generation. About 1,024 neighbours in use have places of their own. More
// neighbours share places, and the programs look them up again.
#define HOPS 4096
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HOPS);
	__type(key, __u32);
	__type(value, struct hop);
} hops SEC(".maps");

// Reverse path settings of the interfaces, and the IPv4 and broadcast addresses of this host, for
// the check of sources. User space writes them when addresses or settings change.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} source_checks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, __u32);
} own_sources SEC(".maps");

// IPv6 addresses of this host, to distinguish them from destinations without a route. Written by
// user space when addresses change.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, union addr);
	__type(value, __u32);
} own_addresses6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct own_filter);
} own_filter SEC(".maps");

// MTUs of routes in bytes. A more specific route without an MTU has the value 0. Written and
// deleted by user space.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct route_mtu_key);
	__type(value, __u32);
} route_mtus SEC(".maps");

// Packets by [family][action][reason]. Read by user space.
#define COUNTERS (FAMILY_COUNT * 3 * REASONS_STRIDE)
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} reasons SEC(".maps");

// Listeners with one port. Written and deleted by user space; set at load.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct listener_key);
	__type(value, struct listener);
} listeners SEC(".maps");

// Listeners with port ranges, cut into port prefixes, and listeners on all ports.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct listener_prefix);
	__type(value, struct listener);
} listener_ranges SEC(".maps");

// Service numbers by interface and listener, for addresses that have listeners on different
// interfaces. Written and deleted by user space; as many as listener_ranges may have.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct iface_listener_key);
	__type(value, __u32);
} iface_listeners SEC(".maps");

// Listeners of services without flows, in buckets of two. A key is in the slot of its hash or in
// the other slot of the same bucket. A search therefore reads one cache line. A listener without a
// free slot takes the full path, with the same result. User space writes the elements through mmap,
// the key last.
enum direct_place {
	DIRECT_BITS = 13,
	DIRECT_MULTIPLIER = 0x9e3779b97f4a7c15ULL,
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << DIRECT_BITS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct direct);
} directs SEC(".maps");

// Maps the endpoint of a backend to the virtual endpoint. Written by user space.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct listener_key);
	__type(value, struct reverse);
} reverses SEC(".maps");

// Services and backends by id. Written by user space through mmap.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct service);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct backend);
} backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct backend_hop);
} backend_hops SEC(".maps");

// Scheduler tables, one region per service, of backend ids. User space allocates the regions. It
// writes the new table into a free region and then switches service.slots.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 22);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64); // four slots of 16 bits
} slots SEC(".maps");

// Counters of services and of backends. Written by the programs.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct load);
} service_loads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct load);
} backend_loads SEC(".maps");

// Packets and bytes without a flow, by backend and CPU. A reused flow adds the counters of its
// closed connection.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct tally);
} tallies SEC(".maps");

// Persistence: the backend of each client. The map evicts the least recently used client. An
// evicted client loses its backend for new connections, not its open connections.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct sticky_key);
	__type(value, struct sticky);
} stickies SEC(".maps");

// Clients under a quota. The programs create an element with the first flow and delete it with the
// last one. A full map admits no further client to a service or rule with a quota.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct client_key);
	__type(value, struct client);
} clients SEC(".maps");

// Mappings that inside hosts requested. Each one holds a reference to its binding. map_open creates
// and map_close deletes them; user space writes the expiry times.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mapping_key);
	__type(value, struct mapping);
} mappings SEC(".maps");

// Rates of clients. The map evicts the least recently used client.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct client_key);
	__type(value, struct client);
} client_rates SEC(".maps");

// Clients pinned to a backend. Written by user space.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct session_key);
	__type(value, __u32);
} sessions SEC(".maps");

// Prefixes and the sets, rules and exceptions they belong to. The value of a prefix includes the
// bits of all shorter prefixes that cover it, so that one search suffices.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u64);
} members SEC(".maps");

// Single addresses of the same lists, looked up first. An address without room here is in the trie.
// Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct host_key);
	__type(value, __u64);
} hosts SEC(".maps");

// The table of denied sources, absent while no rule denies sources without a condition. User space
// creates each table with the size of its content.
struct denied_table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DENIED_LINES);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, struct denied_line);
};

PARTS(denied, struct denied_table);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct firewall_rule);
} firewall_rules SEC(".maps");

// Directions of TCP connections to a backend that is down. The value is service << 16 | backend.
// The programs answer further packets with a reset. The map evicts the least recently used
// direction; its sender then gets no reset. Written by the programs.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct tuple);
	__type(value, __u32);
} ended SEC(".maps");

// Decisions on first fragments. An evicted one costs one datagram.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

// Later fragments that arrived before their first fragment: room for about 1,000.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 21);
	__type(value, struct held);
} early SEC(".maps");

// Addresses, hardware addresses and MTUs of the interfaces. Written by user space.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct interface_addr);
} interfaces SEC(".maps");

// Hardware addresses of this host, to which frames may be addressed. "stations" holds all
// addresses. "own_stations" holds the address of each interface and the low 16 bits of its index,
// in the element index % size. An element of another interface has other low bits. Written by user
// space.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct station_key);
	__type(value, __u32);
} stations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STATIONS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} own_stations SEC(".maps");

// SYNs that were forwarded without a flow: a fingerprint of client and service, and the backend.
// The fingerprint distinguishes the SYN-ACK from other packets of the backend. It also keeps the
// rest of the handshake on this backend when the scheduler's table changes. A slot holds the last
// SYN with its hash, so that the table cannot fill up and needs no expiry. At a million SYNs per
// second, one handshake in a thousand with a delay of one millisecond finds its slot overwritten.
// The client then sends its SYN again.
#define RECENT_SYNS (1 << 20)
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RECENT_SYNS);
	__type(key, __u32);
	__type(value, __u64); // fingerprint << 32 | backend
} recent_syns SEC(".maps");

// Refused SYNs to services: a fingerprint of the tuple and the initial sequence number. It
// recognizes retransmissions, so that the counters count one connection. A slot holds the last SYN
// with its hash.
#define REFUSED_SYNS (1 << 16)
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REFUSED_SYNS);
	__type(key, __u32);
	__type(value, __u32);
} refused_syns SEC(".maps");

// Flows with changed sequence numbers, by the index of their primary entry, with bit 31 set for
// flows6. The client's SYN or cookie creates an element; the sweeper deletes it. The map is small
// until a configuration needs edits of TCP headers; then set at load.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct adjust);
} adjusts SEC(".maps");

#define ADJUST_6 0x80000000U

// Requests and notifications to user space.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
	__type(value, struct event);
} events SEC(".maps");

// Working memory of each CPU, because the stacks of the programs are small. The programs of one CPU
// run one after the other. "sluice explain" loads its own instance and reads the plan there.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct work);
} works SEC(".maps");

// The timer of the sweeper.
struct sweeper {
	struct bpf_timer timer;
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sweeper);
} sweepers SEC(".maps");

static __always_inline struct control *the_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

static __always_inline struct work *the_work(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&works, &zero);
}

#endif
