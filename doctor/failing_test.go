// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// exchanges gives the namespace connections of clients behind lan0 to servers behind wan0: good ones that are
// answered, and bad ones that see what follows their first packet.
func exchanges(s *observe.Sample, good, bad int, lost trace.PacketLoss, follows func(request flow.Tuple) []trace.Packet) {
	c := outcome.NewCollector(outcome.Host{Addresses: map[netip.Addr]bool{netip.MustParseAddr("203.0.113.1"): true}}, outcome.NewBudget())
	now := time.Duration(0)
	add := func(list ...trace.Packet) {
		for _, p := range list {
			now += time.Millisecond
			p.Time, p.TTL = now, 64
			c.Add(&p)
		}
	}
	for i := range good + bad {
		request := flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.2:%d", 2000+i)), Dest: netip.MustParseAddrPort("198.51.100.7:443")}
		if i >= good {
			request.Dest = netip.MustParseAddrPort("198.51.100.8:443")
		}
		add(trace.Packet{Point: trace.Received, Interface: "lan0", Tuple: request, TCPFlags: trace.TCPSyn})
		if i >= good {
			add(follows(request)...)
			continue
		}
		add(trace.Packet{Point: trace.Transmitted, Interface: "wan0", InIfIndex: 3, Tuple: request, TCPFlags: trace.TCPSyn},
			trace.Packet{Point: trace.Received, Interface: "wan0", Tuple: request.Reverse(), TCPFlags: trace.TCPSyn | trace.TCPAck},
			trace.Packet{Point: trace.Transmitted, Interface: "lan0", InIfIndex: 2, Tuple: request.Reverse(), TCPFlags: trace.TCPSyn | trace.TCPAck})
	}
	s.Namespaces[0].Traffic = c.Report(now+3*time.Second, lost, nil)
}

func dropsOf(cause trace.Cause, answer bool) func(request flow.Tuple) []trace.Packet {
	return func(request flow.Tuple) []trace.Packet {
		if !answer {
			return []trace.Packet{{Point: trace.Dropped, Interface: "lan0", InIfIndex: 3, Tuple: request, TCPFlags: trace.TCPSyn, Cause: cause}}
		}
		return []trace.Packet{{Point: trace.Transmitted, Interface: "wan0", InIfIndex: 3, Tuple: request, TCPFlags: trace.TCPSyn},
			{Point: trace.Received, Interface: "wan0", Tuple: request.Reverse(), TCPFlags: trace.TCPSyn | trace.TCPAck},
			{Point: trace.Dropped, Interface: "wan0", InIfIndex: 2, Tuple: request.Reverse(), TCPFlags: trace.TCPSyn | trace.TCPAck, Cause: cause}}
	}
}

func noAnswer(request flow.Tuple) []trace.Packet {
	return []trace.Packet{{Point: trace.Transmitted, Interface: "wan0", InIfIndex: 3, Tuple: flow.Tuple{Protocol: flow.TCP,
		Source: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.1"), request.Source.Port()), Dest: request.Dest}, TCPFlags: trace.TCPSyn}}
}

// untranslated leaves by wan1 with its private source, without a connection tracking entry.
func untranslated(request flow.Tuple) []trace.Packet {
	return []trace.Packet{{Point: trace.Transmitted, Interface: "wan1", InIfIndex: 3, Tuple: request, TCPFlags: trace.TCPSyn}}
}

// TestFailingClasses wants the first line to name the connections that fail, and the finding that explains them.
func TestFailingClasses(t *testing.T) {
	for _, tc := range []struct {
		name  string
		bad   int
		what  func(flow.Tuple) []trace.Packet
		count func(n *observe.Namespace)
		check string
		text  []string
	}{
		{"explained by a counter of the same cause", 6, dropsOf(trace.CauseRPFilter, true), func(n *observe.Namespace) {
			n.Delta["TcpExt.IPReversePathFilter"], n.Delta["IpExt.InNoRoutes"] = 6, 400
		}, "FW02", []string{"6 of 6 connections to 198.51.100.8:443 were answered, and the answers were dropped here", "Cause: "}},
		{"not explained by a counter of another one", 6, dropsOf(trace.CauseQdisc, false), func(n *observe.Namespace) {
			n.Delta["TcpExt.IPReversePathFilter"] = 400
		}, outcomesCheck, []string{"6 of 6 connections", "did not leave this host", "queueing discipline"}},
		{"lost a race for a port", 6, dropsOf(trace.CauseConfirmRace, false), func(n *observe.Namespace) {
			n.Delta["conntrack.insert_failed"], n.Delta["conntrack.drop"] = 6, 6
		}, "PT01", []string{"6 of 6 connections", "lost a race", "ports are not short"}},
		{"untracked by a rule", 6, untranslated, func(n *observe.Namespace) {
			n.Rules.Forwards.IPv4, n.Rules.Untracked.IPv4 = 1, 1
		}, "RL16", []string{"6 of 6 connections", "untranslated", "notrack rule keeps"}},
		{"untranslated without a rule", 6, untranslated, func(*observe.Namespace) {}, outcomesCheck, []string{"6 of 6 connections", "untranslated"}},
		{"no check finds anything", 6, noAnswer, func(*observe.Namespace) {}, outcomesCheck, []string{"6 of 6 connections", "198.51.100.8:443", "wan0", "nothing came back"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := examined(t)
			tc.count(s.Namespaces[0])
			exchanges(s, 12, tc.bad, trace.PacketLoss{}, tc.what)
			r := Judge(context.Background(), s)
			c := r.Conclusion[0]
			if c.Check != tc.check || c.Severity < Warn || r.ExitCode() == 0 || c.Do == "" {
				t.Errorf("conclusion of %s, %s, exit code %d: %s", c.Check, c.Severity, r.ExitCode(), c)
			}
			for _, text := range tc.text {
				if !strings.Contains(c.Summary, text) {
					t.Errorf("%q lacks %q", c.Summary, text)
				}
			}
		})
	}
}

// TestCountersWithoutVictims wants counters to be notes where all connections were seen to work, and only there.
func TestCountersWithoutVictims(t *testing.T) {
	for _, tc := range []struct {
		name           string
		answered       int
		lost           trace.PacketLoss
		counters, load Verdict
	}{
		{"all packets seen", 12, trace.PacketLoss{}, Info, Info},
		{"some lost", 12, trace.PacketLoss{Openings: 1}, Warn, Warn},
		{"no connections", 0, trace.PacketLoss{}, Warn, Info},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := examined(t)
			s.Namespaces[0].Delta["IpExt.InNoRoutes"] = 40
			for i := range s.After.Softnet {
				s.After.Softnet[i].Squeezed += 10_000
			}
			s.After.CPUs[0].Total, s.After.CPUs[0].Softirq = s.After.CPUs[0].Total+300, s.After.CPUs[0].Softirq+200
			exchanges(s, tc.answered, min(tc.answered, 1), tc.lost, noAnswer)
			r := Judge(context.Background(), s)
			want := map[string]Verdict{"FW08": tc.counters, "RX02": tc.load, "RX10": tc.load}
			for _, f := range r.Findings {
				if v, judged := want[f.Check]; judged && f.Verdict != v {
					t.Errorf("%s: %s, want %s", f.Summary, f.Verdict, v)
				}
			}
			if tc.answered > 0 && tc.load == Info && !strings.Contains(r.Conclusion[0].Summary, "12 of 13 connections and exchanges were answered; of the other 1: 1 of 1 connection") {
				t.Errorf("conclusion: %s", r.Conclusion[0])
			}
		})
	}
}

// TestWayBack: a loose reverse path filter is a remedy if the next hop of the reverse path is not resolved yet, but not
// if its resolution failed. Where the source belongs to the network of the arrival, the route elsewhere is wrong.
func TestWayBack(t *testing.T) {
	const routedElsewhere = -1
	for state, want := range map[int]string{0: "rp_filter=2", netlink.NUD_FAILED: "", routedElsewhere: "ip route del"} {
		s := examined(t)
		n := s.Namespaces[0]
		lostBy(trace.CauseRPFilter, "wan0", observe.Gateway{Address: netip.MustParseAddr("203.0.113.2"), Interface: "wan0"})(s)
		n.Delta["TcpExt.IPReversePathFilter"] = 60
		for packet, w := range n.Ways {
			w.State = state
			n.Ways[packet] = w
			if state == routedElsewhere {
				from := packet.Packet.Source.Addr()
				n.After.Routing.Detached = append(n.After.Routing.Detached, observe.Detached{Prefix: netip.PrefixFrom(from, from.BitLen()), By: "lan0", Within: "wan0"})
			}
		}
		for _, f := range Judge(context.Background(), s).Findings {
			if f.Check != "FW02" {
				continue
			}
			if command := strings.Join(f.Remedy.Commands, "\n"); !strings.Contains(command, want) || (command == "") != (want == "") {
				t.Errorf("state %d: %s, commands %q", state, f.Remedy.Do, f.Remedy.Commands)
			}
		}
	}
}
