// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// TestEntries sorts single entries of a router with 203.0.113.1 outside and 10.0.0.1 inside.
func TestEntries(t *testing.T) {
	links := []Link{{Name: "lo", Loopback: true, Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
		{Name: "wan0", Addresses: []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24")}},
		{Name: "lan0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}}
	const replied, established, synRecv = conntrack.SeenReply, conntrack.TCPEstablished, conntrack.TCPSynRecv
	for _, tc := range []struct {
		name                                 string
		protocol                             flow.Protocol
		from, to, backFrom, backTo           string
		status                               conntrack.Status
		state                                conntrack.TCPState
		hairpin, leak, old, host, stuck, ftp bool
	}{
		{name: "masquerade", protocol: flow.TCP, from: "10.0.0.2:1000", to: "198.51.100.7:443", backFrom: "198.51.100.7:443", backTo: "203.0.113.1:1000", status: replied, state: established},
		{name: "an address that is gone", protocol: flow.UDP, from: "10.0.0.2:5060", to: "198.51.100.7:5060", backFrom: "198.51.100.7:5060", backTo: "203.0.113.9:5060", status: replied, old: true},
		{name: "a port forward from inside", protocol: flow.TCP, from: "10.0.0.2:1000", to: "203.0.113.1:80", backFrom: "10.0.0.3:80", backTo: "10.0.0.2:1000", state: conntrack.TCPSynSent, hairpin: true},
		{name: "a port forward from inside that bridge netfilter answers", protocol: flow.TCP, from: "10.0.0.2:1000", to: "203.0.113.1:80", backFrom: "10.0.0.3:80", backTo: "10.0.0.2:1000", status: replied, state: established},
		{name: "a port forward from inside with masquerade", protocol: flow.TCP, from: "10.0.0.2:1000", to: "203.0.113.1:80", backFrom: "10.0.0.3:80", backTo: "10.0.0.1:1000", state: conntrack.TCPSynSent},
		{name: "a port forward from outside to a server that is off", protocol: flow.TCP, from: "198.51.100.7:1000", to: "203.0.113.1:80", backFrom: "10.0.0.3:80", backTo: "198.51.100.7:1000", state: conntrack.TCPSynSent},
		{name: "a handshake that is not finished", protocol: flow.TCP, from: "198.51.100.7:1000", to: "203.0.113.1:80", backFrom: "10.0.0.3:80", backTo: "198.51.100.7:1000", status: replied, state: synRecv, stuck: true},
		{name: "a tunnel that is older than the port forward", protocol: flow.UDP, from: "198.51.100.7:51820", to: "203.0.113.1:51820", backFrom: "203.0.113.1:51820", backTo: "198.51.100.7:51820", host: true},
		{name: "a tunnel of the host", protocol: flow.UDP, from: "198.51.100.7:51820", to: "203.0.113.1:51820", backFrom: "203.0.113.1:51820", backTo: "198.51.100.7:51820", status: replied},
		{name: "a phone that is older than masquerade", protocol: flow.UDP, from: "10.0.0.2:5060", to: "198.51.100.7:5060", backFrom: "198.51.100.7:5060", backTo: "10.0.0.2:5060", leak: true},
		{name: "a query between two inside networks", protocol: flow.UDP, from: "10.0.0.2:5060", to: "10.0.1.7:53", backFrom: "10.0.1.7:53", backTo: "10.0.0.2:5060"},
		{name: "multicast", protocol: flow.UDP, from: "10.0.0.2:5353", to: "224.0.0.251:5353", backFrom: "224.0.0.251:5353", backTo: "10.0.0.2:5353"},
		{name: "FTP", protocol: flow.TCP, from: "10.0.0.2:1000", to: "198.51.100.7:21", backFrom: "198.51.100.7:21", backTo: "203.0.113.1:1000", status: replied, state: established, ftp: true},
		{name: "a helper's connection", protocol: flow.TCP, from: "198.51.100.7:20", to: "203.0.113.1:2000", backFrom: "10.0.0.2:2000", backTo: "198.51.100.7:20", status: replied | conntrack.Expected, state: established},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s Entries
			s.add(&conntrack.Entry{Protocol: tc.protocol, State: uint8(tc.state), Status: tc.status, Original: tuple(tc.from, tc.to), Reply: tuple(tc.backFrom, tc.backTo)}, placingOf(&NamespaceReading{Links: links}))
			s.finish()
			own := netip.MustParseAddr("203.0.113.1")
			got := [...]bool{s.Hairpin.Entries > 0, len(s.Leaks) > 0, len(s.OldSources) > 0, len(s.ToHost) > 0, s.Handshakes[own] != nil && s.Handshakes[own].Stuck.Entries > 0, len(s.FTP) > 0}
			if want := [...]bool{tc.hairpin, tc.leak, tc.old, tc.host, tc.stuck, tc.ftp}; got != want {
				t.Errorf("hairpin, leak, old source, to the host, stuck, FTP: %v, want %v", got, want)
			}
		})
	}
}

// TestReached: entries of closed connections linger, and count for some seconds only.
func TestReached(t *testing.T) {
	p := &placing{lingers: map[conntrack.TCPState]uint32{conntrack.TCPTimeWait: 120}}
	for _, tc := range []struct {
		state conntrack.TCPState
		left  uint32
		want  bool
	}{
		{conntrack.TCPEstablished, 10, true}, {conntrack.TCPSynSent, 100, true}, {conntrack.TCPTimeWait, 118, true},
		{conntrack.TCPTimeWait, 100, false}, {conntrack.TCPClose, 9, false}, // not known how long those stay
	} {
		var s Entries
		s.add(&conntrack.Entry{Protocol: flow.TCP, State: uint8(tc.state), Timeout: tc.left, Status: conntrack.DestNAT,
			Original: conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("192.0.2.2")), Dest: conntrack.AddrOf(netip.MustParseAddr("192.0.2.1")), DestPort: 8080},
			Reply:    conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("198.51.100.2")), SourcePort: 80, Dest: conntrack.AddrOf(netip.MustParseAddr("192.0.2.2"))}}, p)
		if got := s.Reached[netip.MustParseAddrPort("198.51.100.2:80")]; got != tc.want {
			t.Errorf("state %d, %d s left: %v", tc.state, tc.left, got)
		}
	}
}

// TestLeaksOfOthers: a network that no rule translates may be routed as it is.
func TestLeaksOfOthers(t *testing.T) {
	where := placingOf(&NamespaceReading{Links: []Link{{Name: "wan0", Addresses: []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24")}}}})
	for network, want := range map[string]int{"10.0.0.9:2000": 1, "10.0.7.9:2000": 0} {
		var s Entries
		s.add(&conntrack.Entry{Protocol: flow.UDP, Original: tuple("10.0.0.2:1000", "198.51.100.7:53"), Reply: tuple("198.51.100.7:53", "203.0.113.1:1000")}, where)
		s.add(&conntrack.Entry{Protocol: flow.UDP, Original: tuple(network, "198.51.100.7:53"), Reply: tuple("198.51.100.7:53", network)}, where)
		if s.finish(); len(s.Leaks) != want {
			t.Errorf("from %s: %d leaks, want %d", network, len(s.Leaks), want)
		}
	}
}

func tuple(source, dest string) conntrack.Tuple {
	s, d := netip.MustParseAddrPort(source), netip.MustParseAddrPort(dest)
	return conntrack.Tuple{Source: conntrack.AddrOf(s.Addr()), Dest: conntrack.AddrOf(d.Addr()), SourcePort: s.Port(), DestPort: d.Port()}
}
