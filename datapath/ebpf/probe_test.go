// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/model"
)

// TestProbes checks probes of expiring connections: only nat64 sends them, and not after a FIN of one side (RFC
// 6146 §3.5.2.2).
func TestProbes(t *testing.T) {
	s := changing(t, `
nat:
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.1]}
  - {name: v4, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.2]}
`)
	events, err := ringbuf.NewReader(s.d.t.Maps["events"])
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	asked := func() (out []string) {
		t.Helper()
		events.SetDeadline(time.Now())
		for {
			r, err := events.Read()
			if err != nil {
				return out
			}
			e := *(*wire.Event)(unsafe.Pointer(&r.RawSample[0]))
			if e.Kind == wire.EventProbe {
				out = append(out, fmt.Sprint(netip.AddrPortFrom(wire.AddrFrom(e.Addr, true), wire.PortOf(e.Sport)), " ",
					netip.AddrPortFrom(wire.AddrFrom(e.To, true), wire.PortOf(e.Dport))))
			}
		}
	}
	// connect opens a connection and answers it. If fin is set, it ends one direction.
	connect := func(v6 bool, sport int, fin bool) {
		t.Helper()
		inside, server := "ip4(src=10.0.2.2,dst=198.18.0.1)", "203.0.113.2"
		if v6 {
			inside, server = "ip6(src=fd00:2::3,dst=64:ff9b::c612:1)", "203.0.113.1"
		}
		seen := netip.MustParseAddrPort(sentFrom(t, send(t, s, "lan0", fmt.Sprintf("%s/tcp(sport=%d,dport=80,flags=S)", inside, sport))))
		send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.0.1,dst=%s)/tcp(sport=80,dport=%d,flags=SA)", server, seen.Port()))
		flags := "A"
		if fin {
			flags = "FA"
		}
		if out := send(t, s, "lan0", fmt.Sprintf("%s/tcp(sport=%d,dport=80,flags=%s)", inside, sport, flags)); out.Action != model.Forward {
			t.Fatalf("%s %s", out.Action, out.Reason)
		}
	}
	connect(true, 4001, false)
	connect(true, 4002, true)
	connect(false, 4003, false)
	want := []string{"[fd00:2::3]:4001 [64:ff9b::c612:1]:80"}
	for _, step := range []struct {
		after time.Duration
		asked int
	}{{2*time.Hour + 3*time.Minute, 0}, {time.Minute + time.Second, 1}, {3 * time.Minute, 0}, {2 * time.Minute, 0}, {3 * time.Minute, 0}} {
		if err := s.Advance(step.after); err != nil {
			t.Fatal(err)
		}
		if got := asked(); fmt.Sprint(got) != fmt.Sprint(want[:step.asked]) {
			t.Errorf("after %v: asked to probe %v, want %v", step.after, got, want[:step.asked])
		}
	}
	held{}.want(t, s, "no answer has come")
}
