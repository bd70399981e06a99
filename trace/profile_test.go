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

// TestLostSamples: what found no room was work, and not idle time.
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
