// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Every switch, and the sizes and times that the configuration decides.
#ifndef SLUICE_SWITCHES_H
#define SLUICE_SWITCHES_H

#include "types.h"

// Switches and sizes, set before load and constant afterwards: the verifier
// removes the branches that they close.
const volatile __u32 hash_key[12];	  // secret; pinned with the tables
const volatile __u64 hash_multiplier = 1; // secret and odd
const volatile __u32 hint_mask4 = 0;	  // elements of hints4 - 1
const volatile __u32 hint_mask6 = 0;
const volatile __u32 entry_mask4 = 0xf; // bits of a slot that number an entry
const volatile __u32 entry_mask6 = 0xf;
const volatile __u32 hz = 250;		      // ticks a second
const volatile __u32 timeout_established = 1; // ticks
const volatile __u32 timeout_transitory = 1;
const volatile __u32 timeout_udp = 1;
const volatile __u32 timeout_icmp = 1;
const volatile __u32 timeout_other = 1;
const volatile __u32 hold_ticks = 0; // freed ports are held back (RFC 6888 REQ-8)
const volatile __u32 half_open_max = 0xffffffff;
const volatile __u32 hash_seed = 0;	// of the schedulers: balance.Seed
const volatile __u32 sweep_ms = 2000;	// one pass over the tables
const volatile bool cache_hops = true;	// flows and backends remember their next hop
const volatile bool have_rules = false; // firewall rules at the first hook
const volatile __u32 rule_count = 0;
const volatile bool have_services = true;
const volatile bool have_owned = false;	 // addresses that are not left to the kernel where no service takes a packet
const volatile bool have_ranges = false; // listeners with port ranges, or with every port
const volatile bool have_iface_listeners = false; // addresses with listeners of different interfaces
const volatile bool have_any = false;		  // services of every protocol
const volatile bool have_direct = false;	  // IPv4 listeners whose packets are sent on at once
const volatile bool have_mac_keys = false;	  // persistence by hardware address
const volatile bool have_edits = false;		  // services or rules that change more of TCP headers than ports
const volatile bool have_cookies = false;	  // services that answer SYNs by cookies, or flows of such
const volatile bool have_resets = false;	  // services that limit resets
const volatile bool have_forwards = false;	  // port-forwards that inside hosts may use
const volatile __u32 local_port_last = 65535; // of those given out on addresses of this host: below ip_local_port_range
const volatile bool have_reverse = false;     // services whose replies need no flow
const volatile bool have_nat = false;	      // rules that translate sources
const volatile bool nat_by_egress = false;    // some of them ask for the egress interface, or whether there is one
const volatile bool have_prefixes = false;
const volatile bool have_crossing = false;	// of them: siit
const volatile bool have_family_change = false; // packets that change their family: siit, nat64, services with both
const volatile bool cross_by_egress = false;	// rules between the families ask where the translated packet leaves
const volatile bool have_pools = false;
const volatile bool hold_fragments = true; // hand early ones to user space, and what is to be fragmented for IPv6
const volatile __u32 lowest_ipv6_mtu =
	0; // IPv4 packets without DF become no larger in IPv6; 0: than the next link carries
const volatile __u32 errors_per_second = 1000; // ICMP errors of its own, of all CPUs; 0: none
const volatile bool have_blocks = false;       // of ports
const volatile bool have_mappings = false;     // rules whose hosts may ask for mappings
const volatile __u32 host_lists = 0;	       // bit LIST_*: some of its members are in hosts
const volatile __u32 trie_lists = 0;	       // some are in members
const volatile __u32 summed_at = 0;	       // bits before ip_summed in struct sk_buff; 0: it cannot be read
const volatile bool tc_behind = false; // XDP carries what goes straight and leaves the rest to TC on the same interface
const volatile bool dry_run = false;   // explain: write nothing, leave the plan in the map works
const volatile bool straight_off = false; // every packet takes the full path: from user space, and in tests
const volatile bool observed = false;	  // tests: the straight path leaves its plan there too

#endif
