// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestApplyEndsWhatDiffers adds connections of another configuration to the table. Connections that the next
// configuration treats differently end, TCP ones by policy. No others end, and the plan predicts their number.
func TestApplyEndsWhatDiffers(t *testing.T) {
	b := newBench(t, lab.Balancer())
	service := func(name string, ports string, backends ...string) config.Service {
		s := config.Service{Name: name, Protocol: flow.UDP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR, Listen: []config.Listen{listen("192.0.2.30", ports)}}
		for _, a := range backends {
			s.Backends = append(s.Backends, backend(a, a, 53))
		}
		return s
	}
	tcp := service("tcp", "80", "10.0.2.2")
	tcp.Protocol = flow.TCP
	tcpMoved := service("tcp", "80", "10.0.2.3")
	tcpMoved.Protocol = flow.TCP
	office := &config.NATRule{Name: "office", Type: config.NATMasquerade, Source: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}}
	web := service("web", "53", "10.0.2.2", "10.0.2.3")
	with := func(policy config.Established, rules []*config.NATRule, services ...config.Service) *datapath.Snapshot {
		s := b.snapshot(&config.Config{Services: services, Established: policy})
		s.NAT = rules
		return s
	}
	conn, err := b.d.tracking.Sibling()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	entry := func(p flow.Protocol, from string, to netip.AddrPort, really string, state uint8) conntrack.Entry {
		src, dst := netip.MustParseAddrPort(from), netip.MustParseAddrPort(really)
		tuple := conntrack.Tuple{Source: conntrack.AddrOf(src.Addr()), SourcePort: src.Port(), Dest: conntrack.AddrOf(to.Addr()), DestPort: to.Port()}
		return conntrack.Entry{Family: unix.AF_INET, Protocol: p, Timeout: 600, State: state, Original: tuple, Reply: conntrack.Tuple{
			Source: conntrack.AddrOf(dst.Addr()), SourcePort: dst.Port(), Dest: tuple.Source, DestPort: tuple.SourcePort}}
	}
	vip, vip80, far := netip.MustParseAddrPort("192.0.2.30:53"), netip.MustParseAddrPort("192.0.2.30:80"), netip.MustParseAddrPort("203.0.113.77:53")
	const established, timeWait = 3, 7
	all := []conntrack.Entry{
		entry(flow.UDP, "203.0.113.1:4000", vip, "10.0.2.2:53", 0),
		entry(flow.UDP, "203.0.113.1:4001", vip, "10.0.2.3:53", 0),
		entry(flow.UDP, "203.0.113.1:4002", vip, "192.0.2.30:53", 0), // older than the service
		entry(flow.TCP, "203.0.113.1:4003", vip80, "10.0.2.2:53", established),
		entry(flow.TCP, "203.0.113.1:4004", vip80, "10.0.2.2:53", timeWait),
		entry(flow.UDP, "10.0.2.9:4005", far, "203.0.113.77:53", 0), // older than the rule
		entry(flow.UDP, "203.0.113.1:4006", far, "203.0.113.77:53", 0),
	}
	for _, c := range []struct {
		name          string
		before, after *datapath.Snapshot
		ends          []uint16
	}{
		{"nothing", with("", nil, web), with("", nil, web), nil},
		{"another service", with("", nil, web), with("", nil, web, tcp), nil},
		{"a service comes", with("", nil), with("", nil, web), []uint16{4002}},
		{"a backend leaves", with("", nil, web), with("", nil, service("web", "53", "10.0.2.2")), []uint16{4001, 4002}},
		{"a service goes", with("", nil, web), with("", nil), []uint16{4000, 4001}},
		{"a TCP backend is replaced", with("", nil, tcp), with("", nil, tcpMoved), []uint16{4004}},
		{"and ends by policy", with("", nil, tcp), with(config.EstablishedEnd, nil, tcpMoved), []uint16{4003, 4004}},
		{"a rule comes", with("", nil, web), with("", []*config.NATRule{office}, web), []uint16{4005}},
	} {
		b.applySnapshot(c.before)
		if _, err := conn.DeleteIf(t.Context(), nil, func(e *conntrack.Entry) bool { return e.Original.SourcePort/100 == 40 }); err != nil {
			t.Fatal(err)
		}
		if n, err := conn.Insert(t.Context(), all); err != nil || n != len(all) {
			t.Fatalf("%d of %d connections: %v", n, len(all), err)
		}
		planned, err := b.d.Plan(t.Context(), c.after)
		if err != nil {
			t.Fatal(err)
		}
		change := b.applySnapshot(c.after)
		var left []uint16
		if err := conn.Dump(t.Context(), nil, func(e *conntrack.Entry) error { left = append(left, e.Original.SourcePort); return nil }); err != nil {
			t.Fatal(err)
		}
		var ended []uint16
		for _, e := range all {
			if !slices.Contains(left, e.Original.SourcePort) {
				ended = append(ended, e.Original.SourcePort)
			}
		}
		if !slices.Equal(ended, c.ends) || planned.Ended != len(ended) || change.Ended != len(ended) {
			t.Errorf("%s: %v have ended, want %v; the plan said %d, the change %d", c.name, ended, c.ends, planned.Ended, change.Ended)
		}
	}
}

// TestLateAnswersOpenNothing sends an answer of an ended connection after an apply. It creates an entry in the
// opposite direction, which must end too, and no other entry from this host.
func TestLateAnswersOpenNothing(t *testing.T) {
	b := newBench(t, lab.Balancer())
	conn, err := b.d.tracking.Sibling()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	inside, outside := conntrack.AddrOf(netip.MustParseAddr("10.0.2.9")), conntrack.AddrOf(netip.MustParseAddr("203.0.113.77"))
	entry := func(from conntrack.Addr, fromPort uint16, to conntrack.Addr, toPort uint16) []conntrack.Entry {
		return []conntrack.Entry{{
			Family: unix.AF_INET, Protocol: flow.UDP, Timeout: 600,
			Original: conntrack.Tuple{Source: from, SourcePort: fromPort, Dest: to, DestPort: toPort},
			Reply:    conntrack.Tuple{Source: to, SourcePort: toPort, Dest: from, DestPort: fromPort},
		}}
	}
	insert := func(list []conntrack.Entry) {
		t.Helper()
		if n, err := conn.Insert(t.Context(), list); err != nil || n != 1 {
			t.Fatalf("%d connections inserted: %v", n, err)
		}
	}
	ports := func() (list []uint16) {
		t.Helper()
		if err := conn.Dump(t.Context(), nil, func(e *conntrack.Entry) error { list = append(list, e.Original.SourcePort); return nil }); err != nil {
			t.Fatal(err)
		}
		slices.Sort(list)
		return list
	}
	b.applySnapshot(b.snapshot(&config.Config{}))
	insert(entry(inside, 4005, outside, 53))
	s := b.snapshot(&config.Config{})
	s.NAT = []*config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}}}
	if change := b.applySnapshot(s); change.Ended != 1 {
		t.Fatalf("%d connections have ended, want that from before there was a rule", change.Ended)
	}
	insert(entry(outside, 53, inside, 4005))
	insert(entry(outside, 54, inside, 4005))
	if got := ports(); !slices.Equal(got, []uint16{53, 54}) {
		t.Fatalf("connections from ports %d, want those that were inserted", got)
	}
	labtest.Eventually(t, 30*time.Second, "the end of what a late answer has opened", func() error {
		if got := ports(); !slices.Equal(got, []uint16{54}) {
			return fmt.Errorf("connections from ports %d, want 54", got)
		}
		return nil
	})
}
