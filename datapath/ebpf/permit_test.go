// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/model"
)

// TestPermitsGiveWay lets an inside endpoint send to ever more hosts through a rule with address-dependent
// filtering, so that its binding never ends. Permits are evicted when the table fills up, but permits of hosts
// with flows remain.
func TestPermitsGiveWay(t *testing.T) {
	s := office(t, ", filtering: address-dependent")
	to := func(host int) string {
		return fmt.Sprintf("ip4(src=10.0.2.2,dst=198.18.%d.%d)/udp(sport=4000,dport=53)", host/250, 1+host%250)
	}
	permits := func() int { return count(s, wire.KindPermit, wire.EntryLive) }
	outside := sentFrom(t, send(t, s, "lan0", to(0)))
	var port int
	fmt.Sscanf(outside, "203.0.113.1:%d", &port)
	from := func(host int) model.Reason {
		return send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.%d.%d,dst=203.0.113.1)/udp(sport=99,dport=%d)", host/250, 1+host%250, port)).Reason
	}
	for host := 1; host <= 100; host++ {
		send(t, s, "lan0", to(host))
	}
	advance := func() {
		t.Helper()
		for range 2 {
			if err := s.Advance(200 * time.Second); err != nil {
				t.Fatal(err)
			}
			send(t, s, "lan0", to(0))
		}
	}
	advance()
	if n := permits(); n != 101 {
		t.Fatalf("%d permits while there is room, want 101", n)
	}
	s.d.t.Control.Values[0].Used4 = s.d.t.Entries4 * 4 / 5 // the value that the sweeper of the timer computes
	send(t, s, "lan0", to(1))                              // another flow to the first host
	if err := s.sweep(); err != nil {
		t.Fatal(err)
	}
	if n := permits(); n != 1 {
		t.Errorf("%d permits in a full table, want that of the host sent to last", n)
	}
	if reason := from(1); reason != model.ReasonNewFlow {
		t.Errorf("from the host sent to last: %s", reason)
	}
	if reason := from(2); reason != model.ReasonFiltered {
		t.Errorf("from one that was given up: %s", reason)
	}
	send(t, s, "lan0", to(2))
	if reason := from(2); reason != model.ReasonNewFlow {
		t.Errorf("from one that was sent to again: %s", reason)
	}
}
