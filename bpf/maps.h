// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Every map. Sizes marked "set at load" come from the
// configuration or the machine's memory. All maps but "works" are pinned and
// outlive the daemon.
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

#include "flow_maps.h"
#include "switches.h"
#include "work.h"

// Words of the datapath as a whole. Generation: user space and programs.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

// Next hops, placed by a hash of their content. Written by the programs; an
// entry of an earlier generation may be overwritten. 1,024 neighbours that are
// in use at once have room; more share places and are looked up again.
#define HOPS 4096
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HOPS);
	__type(key, __u32);
	__type(value, struct hop);
} hops SEC(".maps");

// Settings of interfaces, and IPv4 addresses and broadcast addresses of this host, for the check of
// sources. Written by user space when addresses or settings change.
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

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct own_filter);
} own_filter SEC(".maps");

// MTUs of routes that have one, in bytes; 0 for more specific routes that have none. Written and deleted
// by user space.
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

// Listeners with port ranges, cut into port prefixes, and with every port.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct listener_prefix);
	__type(value, struct listener);
} listener_ranges SEC(".maps");

// Numbers of services by interface and listener, where an address has listeners of different
// interfaces. Written and deleted by user space; as many as there can be of ranges.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct iface_listener_key);
	__type(value, __u32);
} iface_listeners SEC(".maps");

// Listeners without flows, in pairs: a key stands at the place of its hash or
// beside it, and one cache line tells. What finds no place goes the long way,
// with the same outcome. Written by user space through mmap, the key last.
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

// Endpoint of a backend to the virtual endpoint. Written by user space.
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

// Scheduler tables, one region a service: backend ids. User space allocates the
// regions, writes a new one beside the old and then switches service.slots.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 22);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64); // four slots of 16 bits
} slots SEC(".maps");

// Counts of services and of backends. Written by the programs.
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

// Packets and bytes that keep no flow, by backend and CPU.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct tally);
} tallies SEC(".maps");

// Persistence: the backend of a client. Least recently used goes first: losing
// one costs a client its backend, not its connection.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct sticky_key);
	__type(value, struct sticky);
} stickies SEC(".maps");

// Clients under a quota. Made with their first flow, deleted with the last.
// When it is full no further client is admitted to what has a quota.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct client_key);
	__type(value, struct client);
} clients SEC(".maps");

// Mappings that inside hosts have asked for. Each holds a reference to its binding.
// Made and deleted by map_open and map_close; user space writes the times.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mapping_key);
	__type(value, struct mapping);
} mappings SEC(".maps");

// Rates of clients; the least recently used is forgotten.
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

// Prefixes and the sets, rules and exceptions that they belong to. A prefix
// holds the bits of every shorter one that covers it, so one search is enough.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u64);
} members SEC(".maps");

// Single addresses of such lists, looked up first. What has no room here stands in
// the trie. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct host_key);
	__type(value, __u64);
} hosts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct firewall_rule);
} firewall_rules SEC(".maps");

// Rules that translate sources. User space writes all but the counts.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_NAT_RULES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_rule);
} nat_rules SEC(".maps");

// Their order, and the one that is being written. Written by user space through mmap.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct nat_order);
} nat_orders SEC(".maps");

// Pool addresses by number, and numbers by address.
#define POOL_MAX 65536
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pool_addr);
} pools SEC(".maps");

// The NAT rules whose pool an address is in, by its number: bit n: rule n. Written by
// user space. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} pool_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, POOL_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, union addr);
	__type(value, __u32);
} pool_numbers SEC(".maps");

// Numbers of pool addresses, those of each pool one behind the other: a rule and a
// backend say where theirs begin. The first ones are the numbers themselves, where
// a pool of neighbours needs no run of its own. Written by user space; set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} runs SEC(".maps");

// Ports: element number * 3 + class (0 TCP, 1 UDP, 2 ICMP). Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 3);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct port_map);
} port_maps SEC(".maps");

// Blocks of ports, by pool address: user space marks those that there are not as
// taken. Set at load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct block_map);
} block_maps SEC(".maps");

// Binding of an outside port: (number * 3 + class) << 16 | port to the index of
// the entry that leads to it + 1; bit 31: in flows6. 0: none. Two an element, which
// has eight bytes at least. A part has the ports of one class of one address; user space
// makes it when the address comes into use. How many there may be is set at load.
struct owner_part {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 15);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct owner_pair);
};

PARTS(port_owners, struct owner_part);

// Stateless prefixes, by their role, and those of nat64.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct prefix);
} prefixes SEC(".maps");

// Directions of TCP connections whose backend went down, and their service << 16 | backend: what
// is still sent in them is answered by a reset. The least recently used is forgotten: who sends
// in it is not told. Written by the programs.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct tuple);
	__type(value, __u32);
} ended SEC(".maps");

// First fragments. Lost ones cost one datagram.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

// Fragments that came before their first one: 1,000 of them.
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

// Hardware addresses at which frames are for this host: all of them, and those of the interfaces
// themselves at the place of their index, with the low 16 bits of it (0: another interface
// has the place). Written by user space.
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

// SYNs that were sent on without a flow: a fingerprint of client and service and
// the backend, so that the answer is told from other connections of the backend,
// and the rest of the handshake stays on it when the scheduler's table changes.
// A slot holds the last SYN that hashed to it: nothing to fill up, nothing to
// expire. At a million SYNs a second one answer in a thousand that takes a
// millisecond finds its slot taken; its client sends the SYN again.
#define RECENT_SYNS (1 << 20)
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RECENT_SYNS);
	__type(key, __u32);
	__type(value, __u64); // fingerprint << 32 | backend
} recent_syns SEC(".maps");

// SYNs to services that were refused: a fingerprint of the tuple and its first number, so that what
// is sent again for want of an answer is counted as one connection. A slot holds the last one
// that hashed to it.
#define REFUSED_SYNS (1 << 16)
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REFUSED_SYNS);
	__type(key, __u32);
	__type(value, __u32);
} refused_syns SEC(".maps");

// Flows whose sequence numbers are changed, by the index of their primary entry;
// bit 31: in flows6. Made by the client's SYN or cookie, deleted by the sweeper. Small
// until programs edit TCP headers; then set at load.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct adjust);
} adjusts SEC(".maps");

#define ADJUST_6 0x80000000U

// What user space is asked to do.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
	__type(value, struct event);
} events SEC(".maps");

// Working memory of a CPU: programs run one after the other, and their stacks
// are small. Explain has its own, where it leaves the plan.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct work);
} works SEC(".maps");

// The one timer, that sweeps.
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
