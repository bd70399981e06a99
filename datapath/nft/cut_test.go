// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestARackGoesDown removes most backends at once. Only their connections end.
func TestARackGoesDown(t *testing.T) {
	b := newBench(t, lab.Balancer())
	const rack, each = 40, 250
	s := config.Service{Name: "dns", Protocol: flow.UDP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
		Listen: []config.Listen{listen("192.0.2.30", "53", "853", "5353"), listen("192.0.2.31", "53", "853", "5353")}}
	states := make([]datapath.State, rack+1)
	for i := range states {
		s.Backends = append(s.Backends, backend(fmt.Sprint("b", i), fmt.Sprintf("10.0.2.%d", i+2), 53))
		states[i] = datapath.Down
	}
	states[rack] = datapath.Drain
	snapshot := b.snapshot(one(s))
	b.applySnapshot(snapshot)
	conn, err := b.d.tracking.Sibling()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var entries []conntrack.Entry
	add := func(listener string, port uint16, server string) {
		n := len(entries)
		client := conntrack.AddrOf(netip.AddrFrom4([4]byte{10, 64, byte(n >> 8), byte(n)}))
		entries = append(entries, conntrack.Entry{Family: unix.AF_INET, Protocol: flow.UDP, Timeout: 600,
			Original: conntrack.Tuple{Source: client, SourcePort: 4000, Dest: conntrack.AddrOf(netip.MustParseAddr(listener)), DestPort: port},
			Reply:    conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr(server)), SourcePort: 53, Dest: client, DestPort: 4000}})
	}
	for i := range rack * each {
		add([]string{"192.0.2.30", "192.0.2.31"}[i%2], []uint16{53, 853, 5353}[i%3], fmt.Sprintf("10.0.2.%d", i%rack+2))
	}
	stay := len(entries)
	add("192.0.2.30", 53, fmt.Sprintf("10.0.2.%d", rack+2)) // the backend that is drained
	add("192.0.2.30", 54, "10.0.2.2")                       // not the service's port
	add("192.0.2.32", 53, "10.0.2.2")                       // nor its address
	if n, err := conn.Insert(t.Context(), entries); err != nil || n != len(entries) {
		t.Fatalf("%d of %d connections: %v", n, len(entries), err)
	}
	down := *snapshot
	down.Services = []datapath.Service{{Service: snapshot.Services[0].Service, State: states}}
	b.applySnapshot(&down)
	left := 0
	err = conn.Dump(t.Context(), nil, func(e *conntrack.Entry) error {
		if e.Original.SourcePort == 4000 {
			left++
		}
		return nil
	})
	if err != nil || left != len(entries)-stay || b.d.endError != nil {
		t.Errorf("%d connections are left, want %d; %v, %v", left, len(entries)-stay, err, b.d.endError)
	}
}
