// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"regexp"
	"strings"
)

// Phase is a part of the network stack's work.
type Phase struct {
	Name  string `json:"name"`
	Color string `json:"color"` // colour in the flame graph, #rrggbb
	// functions that belong to it; a trailing * matches a prefix
	functions []string
}

// phases in the order in which they are printed: a packet's way through the
// stack. The innermost function of a stack that has a phase decides, since the
// leaf is often a lock or a copy that everybody uses.
var phases = []Phase{
	{"driver", "#8c8c8c", []string{"veth_xmit", "veth_poll", "veth_xdp_rcv*", "virtnet_*", "start_xmit", "mlx5e_*", "mlx4_en_*", "ixgbe_*", "i40e_*",
		"ice_*", "igb_*", "ena_*", "bnxt_*", "e1000*", "gve_*", "skb_xmit_done", "vring_*", "virtqueue_*"}},
	{"xdp", "#17becf", []string{"bpf_prog_run_xdp", "do_xdp_generic", "xdp_do_redirect*", "bpf_prog_run_generic_xdp", "xdp_do_flush*", "dev_map_*",
		"cpu_map_*", "veth_xdp_xmit", "veth_ndo_xdp_xmit"}},
	{"receive", "#4e79a7", []string{"net_rx_action", "process_backlog", "gro_receive_skb", "napi_gro_receive", "dev_gro_receive", "napi_complete_done",
		"__netif_receive_skb_core", "netif_receive_skb_list_internal", "__netif_receive_skb_list_core", "inet_gro_receive", "tcp4_gro_receive",
		"udp4_gro_receive", "enqueue_to_backlog", "netif_rx_internal", "__napi_poll", "gro_normal_list", "napi_gro_flush"}},
	{"tc", "#76b7b2", []string{"tcf_classify", "cls_bpf_classify", "tcx_run", "sch_handle_ingress", "sch_handle_egress", "tc_run", "mini_qdisc*"}},
	{"bridge", "#59a14f", []string{"br_handle_frame*", "br_forward", "__br_forward", "br_dev_xmit", "br_dev_queue_push_xmit", "br_fdb_*"}},
	{"bridge netfilter", "#8cd17d", []string{"br_nf_*", "setup_pre_routing", "nf_bridge_*"}},
	{"defragmentation", "#b6992d", []string{"ipv4_conntrack_defrag", "ip_defrag", "ipv6_defrag", "nf_ct_frag6_gather", "inet_frag_*", "ip_fragment",
		"ip_do_fragment"}},
	{"conntrack lookup", "#e15759", []string{"nf_conntrack_in", "init_conntrack", "__nf_conntrack_alloc", "__nf_conntrack_find_get", "nf_conntrack_find_get",
		"early_drop", "nf_conntrack_tcp_packet", "nf_conntrack_udp_packet", "nf_conntrack_icmp*", "nf_conntrack_double_lock", "resolve_normal_ct",
		"ipv4_conntrack_in", "ipv4_conntrack_local", "ipv6_conntrack_in", "nf_ct_get_tuple", "hash_conntrack_raw", "tcp_in_window", "__nf_ct_refresh_acct",
		"nf_ct_seq_adjust"}},
	{"conntrack confirm", "#ff9d9a", []string{"nf_confirm", "__nf_conntrack_confirm", "ipv4_confirm", "ipv6_confirm", "nf_conntrack_hash_insert",
		"__nf_conntrack_insert_prepare"}},
	{"conntrack gc", "#b07aa1", []string{"gc_worker", "nf_ct_gc_expired", "nf_ct_delete", "nf_conntrack_free", "nf_ct_destroy", "death_by_timeout",
		"destroy_conntrack"}},
	{"conntrack events", "#d37295", []string{"nf_conntrack_eventmask_report", "ctnetlink_conntrack_event", "nf_ct_deliver_cached_events", "__nf_conntrack_eventmask_report"}},
	{"conntrack dump", "#fabfd2", []string{"ctnetlink_dump_table", "ctnetlink_fill_info", "ct_seq_show", "ct_seq_next"}},
	{"NAT", "#f28e2b", []string{"nf_nat_*", "nft_nat_*", "nft_masq_*", "get_unique_tuple", "iptable_nat_*", "nf_conntrack_tuple_taken",
		"nf_conntrack_alter_reply", "masquerade_tg", "inet_cmp", "xt_snat_target*", "xt_dnat_target*"}},
	{"rules", "#edc948", []string{"nft_*", "ipt_do_table", "ip6t_do_table", "arpt_do_table", "ebt_do_table", "iptable_filter_hook", "tcp_mt", "udp_mt",
		"conntrack_mt*", "comment_mt"}},
	{"hook glue", "#f1ce63", []string{"nf_hook_slow*", "nf_hook_run_bpf", "nf_hook", "nf_queue*"}},
	{"flowtable", "#86bcb6", []string{"nf_flow_*", "flow_offload_*"}},
	{"ipvs", "#499894", []string{"ip_vs_*"}},
	{"routing", "#9c755f", []string{"ip_route_input*", "fib_table_lookup", "fib_validate_source", "ip_route_output*", "ip6_route_input*", "fib6_*",
		"ip6_pol_route*", "__mkroute_*", "fib_rules_lookup", "ip_rt_*", "bpf_ipv4_fib_lookup", "bpf_ipv6_fib_lookup", "bpf_fib_lookup"}},
	{"forward", "#a0cbe8", []string{"ip_rcv", "ip_rcv_core", "ip_rcv_finish*", "ip_list_rcv", "ip_sublist_rcv*", "ip_forward*", "ip6_forward*", "ipv6_rcv*",
		"ipv6_list_rcv", "ip6_rcv_*"}},
	{"output", "#bab0ac", []string{"ip_output", "ip_finish_output*", "__ip_finish_output", "ip6_output", "ip6_finish_output*", "neigh_resolve_output",
		"neigh_hh_output", "neigh_event_send", "ip_local_out", "__ip_local_out"}},
	{"transmit", "#7f7673", []string{"__dev_queue_xmit", "sch_direct_xmit", "dev_hard_start_xmit", "net_tx_action", "__qdisc_run", "qdisc_*", "fq_codel_*",
		"pfifo_fast_*", "fq_enqueue", "fq_dequeue", "htb_*", "validate_xmit_*", "skb_segment", "tbf_*"}},
	{"packet memory", "#d7b5a6", []string{"kfree_skb*", "sk_skb_reason_drop", "consume_skb", "napi_consume_skb", "__alloc_skb", "__napi_alloc_skb", "napi_alloc_skb",
		"napi_skb_*", "skb_release_*", "build_skb*", "page_pool_*", "skb_copy_*", "skb_clone", "pskb_*", "napi_build_skb"}},
	{"bpf program", "#1f9e89", []string{"bpf_dispatcher_*", loadedProgram, "bpf_prog_run_clear_cb", "cls_bpf_*", "__bpf_prog_run*", "___bpf_prog_run"}},
	{"local tcp", "#c5b0d5", []string{"tcp_v4_rcv", "tcp_v6_rcv", "tcp_v4_do_rcv", "tcp_rcv_*", "tcp_sendmsg*", "tcp_recvmsg*", "tcp_write_xmit", "__tcp_*", "tcp_*",
		"inet_*", "ip_local_deliver*", "ip_protocol_deliver_rcu", "__inet_*", "__ip_queue_xmit", "ip_queue_xmit", "ep_poll*", "sock_*"}},
	{"local udp", "#dbdb8d", []string{"udp_*", "__udp4_lib_rcv", "__udp6_lib_rcv", "udpv6_*", "ip_make_skb", "ip_append_data", "ip_send_skb"}},
}

// Phases that are not the network's work.
var (
	phaseIdle  = Phase{Name: "idle", Color: "#eeeeee"}
	phaseUser  = Phase{Name: "user programs", Color: "#cfe2cf"}
	phaseOther = Phase{Name: "other kernel", Color: "#dddddd"}
)

// idleFunctions are where a CPU waits for work.
var idleFunctions = []string{"do_idle", "cpu_startup_entry", "default_idle*", "cpuidle_*", "pv_native_safe_halt", "acpi_idle*", "intel_idle*", "poll_idle"}

// loadedProgram replaces the names of BPF programs: bpf_prog_, 16 hexadecimal digits, and the
// program's own name. The kernel's functions for loading programs have the same prefix.
const loadedProgram = "bpf_prog_TAG"

var programName = regexp.MustCompile(`^bpf_prog_[0-9a-f]{16}(_|$)`)

// phaseIndex finds phases by function name.
type phaseIndex struct {
	exact    map[string]int
	prefixes []prefixPhase
}

type prefixPhase struct {
	prefix string
	phase  int
}

func newPhaseIndex() *phaseIndex {
	x := &phaseIndex{exact: map[string]int{}}
	for i, p := range phases {
		for _, f := range p.functions {
			if prefix, ok := strings.CutSuffix(f, "*"); ok {
				x.prefixes = append(x.prefixes, prefixPhase{prefix, i})
			} else if _, taken := x.exact[f]; !taken {
				x.exact[f] = i
			}
		}
	}
	return x
}

// phaseOf returns the phase of a function, -1 when it has none of its own; the
// longest pattern that fits decides. The result is kept, so that each name is
// searched once.
func (x *phaseIndex) phaseOf(function string) int {
	if i, ok := x.exact[function]; ok {
		return i
	}
	if programName.MatchString(function) {
		return x.exact[loadedProgram]
	}
	found, length := -1, 0
	for _, p := range x.prefixes {
		if len(p.prefix) > length && strings.HasPrefix(function, p.prefix) {
			found, length = p.phase, len(p.prefix)
		}
	}
	x.exact[function] = found
	return found
}

// ofStack returns the phase of a stack, innermost frame first.
func (x *phaseIndex) ofStack(stack []string) Phase {
	for _, function := range stack {
		if i := x.phaseOf(function); i >= 0 {
			return phases[i]
		}
	}
	for _, function := range stack {
		for _, idle := range idleFunctions {
			if matches(idle, function) {
				return phaseIdle
			}
		}
	}
	return phaseOther
}
