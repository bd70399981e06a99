// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// All switches, sizes and times that follow from the configuration.
#ifndef SLUICE_SWITCHES_H
#define SLUICE_SWITCHES_H

#include "types.h"

// Switches and sizes. They are set before load and constant afterwards, so that the verifier
// removes disabled branches.
const volatile __u32 hash_key[12];	  // secret; pinned with the tables
const volatile __u64 hash_multiplier = 1; // secret and odd
const volatile __u32 hint_mask4 = 0;	  // elements of hints4 - 1
const volatile __u32 hint_mask6 = 0;
const volatile __u32 entry_mask4 = 0xf; // bits of a slot that hold the entry number
const volatile __u32 entry_mask6 = 0xf;
const volatile __u32 hz = 250;		      // ticks per second
const volatile __u32 timeout_established = 1; // ticks
const volatile __u32 timeout_transitory = 1;
const volatile __u32 timeout_udp = 1;
const volatile __u32 timeout_icmp = 1;
const volatile __u32 timeout_other = 1;
const volatile __u32 hold_ticks = 0; // hold-down of freed ports (RFC 6888 REQ-8)
const volatile __u32 half_open_max = 0xffffffff;
const volatile __u32 hash_seed = 0;	// seed of the schedulers: balance.Seed
const volatile __u32 sweep_ms = 2000;	// duration of a pass over the tables
const volatile bool cache_hops = true;	// flows and backends cache their next hop
const volatile bool have_rules = false; // firewall rules at the first hook
const volatile __u32 rule_count = 0;
const volatile bool have_denied = false; // sources that rules drop without another condition
const volatile bool have_services = true;
const volatile bool have_owned = false;	 // virtual addresses, which refuse packets without a service
const volatile bool have_ranges = false; // listeners with port ranges or on all ports
const volatile bool have_iface_listeners = false; // addresses with listeners on different interfaces
const volatile bool have_any = false;		  // services of every protocol
const volatile bool have_direct = false;	  // IPv4 listeners that the fast path forwards directly
const volatile bool have_mac_keys = false;	  // persistence by hardware address
const volatile bool have_edits = false;		  // services or rules that edit TCP headers beyond the ports
const volatile bool have_cookies = false;	  // services that answer SYNs by cookies, or flows opened by cookies
const volatile bool have_resets = false;	  // services that limit resets
const volatile bool have_forwards = false;	  // port-forwards that inside hosts may use
const volatile __u32 local_port_last = 65535; // addresses of this host: last preferred port
const volatile bool have_reverse = false;     // services with replies that need no flow
const volatile bool have_nat = false;	      // rules that translate sources
const volatile bool nat_by_egress = false;    // some NAT rules match the egress interface, or whether there is one
const volatile bool have_prefixes = false;
const volatile bool have_crossing = false;	// stateless rules between families: siit
const volatile bool have_family_change = false; // packets that change their family: siit, nat64, services with both
const volatile bool cross_by_egress = false;	// rules match the egress of the translated packet
const volatile bool have_pools = false;
const volatile bool hold_fragments = true; // pass early fragments to user space, and packets to fragment for IPv6
const volatile __u32 lowest_ipv6_mtu =
	0; // maximum IPv6 size of IPv4 packets without DF; 0: the MTU of the next link
const volatile __u32 errors_per_second = 1000; // limit for ICMP errors of the gateway on all CPUs; 0: none
const volatile bool have_blocks = false;       // blocks of ports
const volatile bool have_mappings = false;     // rules that let hosts request mappings
const volatile __u32 host_lists = 0;	       // bit LIST_*: some members of the list are in hosts
const volatile __u32 trie_lists = 0;	       // bit LIST_*: some members of the list are in the trie
const volatile __u32 summed_at = 0;	       // bit offset of ip_summed in struct sk_buff; 0: not readable
const volatile bool tc_behind = false; // XDP handles the fast path and leaves other packets to TC on the same interface
const volatile bool dry_run = false;   // for sluice explain: write nothing and leave the plan in the map works
const volatile bool straight_off = false; // every packet takes the full path: for user space and tests
const volatile bool observed = false;	  // tests: the fast path also leaves its plan in works

#endif
