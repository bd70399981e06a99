// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"
)

func TestInnermostPhaseWins(t *testing.T) {
	index := newPhaseIndex()
	for _, c := range []struct{ stack, want string }{
		{"_raw_spin_unlock_irqrestore nf_nat_setup_info nf_nat_inet_fn nf_hook_slow ip_rcv", "NAT"},
		{"nf_conntrack_tuple_taken nf_nat_setup_info nf_hook_slow", "NAT"},
		{"__nf_conntrack_find_get nf_conntrack_in nf_hook_slow ip_rcv", "conntrack lookup"},
		{"memcpy nft_payload_eval nft_do_chain nft_do_chain_inet nf_hook_slow ip_forward", "rules"},
		{"nft_nat_do_chain nf_hook_slow ip_rcv", "NAT"},
		{"fib_table_lookup ip_route_input_slow ip_rcv_finish_core ip_rcv", "routing"},
		{"pv_native_safe_halt default_idle do_idle cpu_startup_entry", "idle"},
		{"net_rx_action handle_softirqs irq_exit_rcu do_idle", "receive"},
		{"bpf_prog_0123456789abcdef_nat_xdp veth_xdp_rcv", "bpf program"},
		{"do_check bpf_check bpf_prog_load __sys_bpf", "other kernel"},
		{"page_fault do_user_addr_fault", "other kernel"},
	} {
		if got := index.ofStack(strings.Fields(c.stack)); got.Name != c.want {
			t.Errorf("%s: phase %s, want %s", c.stack, got.Name, c.want)
		}
	}
}

// TestPhaseMap: the functions that identify each phase exist, here or on other kernels.
func TestPhaseMap(t *testing.T) {
	index := newPhaseIndex()
	for phase, functions := range map[string]string{
		"conntrack lookup": "nf_conntrack_in init_conntrack __nf_conntrack_alloc __nf_conntrack_find_get early_drop nf_conntrack_tcp_packet " +
			"nf_conntrack_udp_packet nf_conntrack_double_lock resolve_normal_ct ipv4_conntrack_in",
		"conntrack confirm": "nf_confirm __nf_conntrack_confirm ipv4_confirm",
		"conntrack gc":      "gc_worker nf_ct_gc_expired death_by_timeout",
		"conntrack dump":    "ctnetlink_dump_table",
		"NAT": "nf_nat_setup_info nf_nat_inet_fn nf_nat_packet nf_nat_manip_pkt nf_nat_ipv4_pre_routing nf_nat_ipv4_out nf_nat_ipv4_local_in " +
			"nf_nat_ipv4_local_fn nf_nat_masquerade_ipv4 nft_nat_do_chain nft_nat_eval nft_masq_eval get_unique_tuple nf_nat_l4proto_unique_tuple " +
			"nf_nat_used_tuple iptable_nat_do_chain iptable_nat_ipv4_in",
		"rules": "nft_do_chain nft_do_chain_ipv4 nft_do_chain_inet nft_payload_eval nft_meta_get_eval nft_ct_get_eval nft_lookup_eval nft_immediate_eval " +
			"nft_counter_eval nft_rhash_lookup nft_pipapo_lookup nft_pipapo_avx2_lookup nft_rbtree_lookup ipt_do_table ip6t_do_table iptable_filter_hook",
		"hook glue":        "nf_hook_slow nf_hook_slow_list nf_hook_run_bpf",
		"bridge netfilter": "br_nf_pre_routing br_nf_forward_ip br_nf_post_routing br_nf_hook_thresh br_nf_forward_finish",
		"bridge":           "br_handle_frame",
		"defragmentation":  "ipv4_conntrack_defrag ip_defrag",
		"routing":          "ip_route_input_noref ip_route_input_slow fib_table_lookup",
		"forward":          "ip_rcv ip_rcv_core ip_rcv_finish ip_list_rcv ip_forward ip_forward_finish",
		"output":           "ip_output ip_finish_output ip_finish_output2 neigh_resolve_output",
		"transmit":         "__dev_queue_xmit sch_direct_xmit dev_hard_start_xmit net_tx_action",
		"receive": "net_rx_action process_backlog gro_receive_skb dev_gro_receive __netif_receive_skb_core netif_receive_skb_list_internal " +
			"napi_gro_receive",
		"driver":    "veth_xmit veth_poll virtnet_poll mlx5e_napi_poll",
		"flowtable": "nf_flow_offload_ip_hook nf_flow_table_iterate",
	} {
		for _, function := range strings.Fields(functions) {
			if got := index.ofStack([]string{"memcpy", function, "asm_common_interrupt"}); got.Name != phase {
				t.Errorf("%s: phase %s, want %s", function, got.Name, phase)
			}
		}
	}
}

func profileOf(stacks ...ProfileStack) *Profile {
	p := &Profile{Rate: 1000, CPUs: 1, Window: time.Second, Packets: 100, Counted: "forwarded packets", Stacks: stacks}
	shares := map[string]*PhaseShare{}
	for _, s := range stacks {
		p.Samples += s.Samples
		shares[s.Phase.Name] = &PhaseShare{Phase: s.Phase.Name, Color: s.Phase.Color, Network: isNetwork(s.Phase), Samples: s.Samples}
	}
	p.finish(shares)
	return p
}

func TestSharesAndMicroseconds(t *testing.T) {
	p := profileOf(ProfileStack{Program: "a", Frames: []string{"nf_conntrack_in"}, Phase: phases[0], Samples: 250})
	if got := p.Share(phases[0].Name); got != 0.25 {
		t.Errorf("share %g, want 0.25", got)
	}
	// 250 samples of 1 ms for 100 packets.
	if got := p.Phases[1].MicrosPerPacket; got != 2500 {
		t.Errorf("%g µs/packet, want 2500: %+v", got, p.Phases)
	}
	if got := p.Share("idle"); got != 0.75 {
		t.Errorf("idle %g, want the missing 0.75", got)
	}
}

// TestNamespaceShare: a namespace that forwards a tenth of the packets has a tenth of the time.
func TestNamespaceShare(t *testing.T) {
	p := &Profile{Rate: 1000, CPUs: 1, Window: time.Second, Samples: 250, Packets: 100, divisor: 1000}
	p.finish(map[string]*PhaseShare{"receive": {Phase: "receive", Network: true, Samples: 250}})
	if got := p.Phases[1].MicrosPerPacket; got != 250 {
		t.Errorf("%g µs/packet, want 250: %+v", got, p.Phases)
	}
}

// TestLostSamples: lost samples count as work, not as idle time.
func TestLostSamples(t *testing.T) {
	p := &Profile{Rate: 1000, CPUs: 1, Window: time.Second, Samples: 250, Lost: 500}
	p.finish(map[string]*PhaseShare{"receive": {Phase: "receive", Network: true, Samples: 250}})
	if receive, idle := p.Share("receive"), p.Share("idle"); receive != 0.25 || idle != 0.25 {
		t.Errorf("receive %g, idle %g, want 0.25 each and the rest unknown", receive, idle)
	}
}

func TestFoldedAndFlameGraph(t *testing.T) {
	p := profileOf(
		ProfileStack{Program: "ksoftirqd/0", Frames: []string{"nf_nat_packet", "<lambda>&", "net_rx_action"}, Phase: phases[12], Samples: 30},
		ProfileStack{Program: "nginx", Phase: phaseUser, Samples: 10})
	want := "ksoftirqd/0;net_rx_action;<lambda>&;nf_nat_packet 30\nnginx;[user programs] 10\n"
	if got := p.Folded(); got != want {
		t.Errorf("folded:\n%swant:\n%s", got, want)
	}
	var svg bytes.Buffer
	if err := p.WriteFlameGraph(&svg); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(bytes.NewReader(svg.Bytes())); ; {
		_, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("not well-formed: %v\n%s", err, svg.String())
		}
	}
	text := svg.String()
	if n := strings.Count(text, `class="f"`); n != 7 {
		t.Errorf("%d boxes, want 7 (all, 2 programs, 4 frames)", n)
	}
	if strings.Contains(strings.ReplaceAll(text, "http://www.w3.org/2000/svg", ""), "http") {
		t.Error("the picture refers to something outside")
	}
	if !strings.Contains(text, phases[12].Color) {
		t.Errorf("the colour of phase %s is missing", phases[12].Name)
	}
}
