// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// TestEmbed uses the table of RFC 6052 §2.4.
func TestEmbed(t *testing.T) {
	v4 := netip.MustParseAddr("192.0.2.33")
	for prefix, want := range map[string]string{
		"2001:db8::/32":         "2001:db8:c000:221::",
		"2001:db8:100::/40":     "2001:db8:1c0:2:21::",
		"2001:db8:122::/48":     "2001:db8:122:c000:2:2100::",
		"2001:db8:122:300::/56": "2001:db8:122:3c0:0:221::",
		"2001:db8:122:344::/64": "2001:db8:122:344:c0:2:2100::",
		"2001:db8:122:344::/96": "2001:db8:122:344::c000:221",
		"64:ff9b::/96":          "64:ff9b::c000:221",
	} {
		p := netip.MustParsePrefix(prefix)
		got := Embed(p, v4)
		if got != netip.MustParseAddr(want) {
			t.Errorf("%s in %s: want %s, got %s", v4, prefix, want, got)
		}
		if back, ok := extract(p, got); !ok || back != v4 {
			t.Errorf("out of %s comes %s", got, back)
		}
	}
}

// TestNPT66 uses the example of RFC 6296 §3.3. It also checks that each translation is reversible
// and checksum-neutral.
func TestNPT66(t *testing.T) {
	inside, outside := netip.MustParsePrefix("fd01:203:405::/48"), netip.MustParsePrefix("2001:db8:1::/48")
	got, ok := npt66(inside, outside, netip.MustParseAddr("fd01:203:405:1::1234"))
	if want := netip.MustParseAddr("2001:db8:1:d550::1234"); !ok || got != want {
		t.Errorf("want %s, got %s", want, got)
	}
	for _, pair := range [][2]string{{"fd01:203:405::/48", "2001:db8:1::/48"}, {"fd01:203:405:bb00::/56", "2001:db8:1:aa00::/56"}, {"fd01::/32", "2001:db8::/32"}} {
		in, out := netip.MustParsePrefix(pair[0]), netip.MustParsePrefix(pair[1])
		for i := range 2000 {
			b := in.Addr().As16()
			b[7], b[8], b[15] = byte(i), byte(i>>3), byte(i>>5)
			if in.Bits() < 48 {
				b[5] = byte(i)
			}
			a := netip.AddrFrom16(b)
			there, ok := npt66(in, out, a)
			if !ok {
				t.Fatalf("%s cannot be mapped", a)
			}
			if back, ok := npt66(out, in, there); !ok || back != a {
				t.Fatalf("%s became %s became %s", a, there, back)
			}
			x, y := a.As16(), there.As16()
			if packet.Checksum(x[:]) != packet.Checksum(y[:]) {
				t.Fatalf("%s and %s have different sums", a, there)
			}
		}
	}
}

// TestDeterministicBlock checks that no two inside addresses share a port and that the blocks use
// the whole pool (RFC 7422 §2).
func TestDeterministicBlock(t *testing.T) {
	sources := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/26"), netip.MustParsePrefix("10.9.0.0/26")}
	pool := addressRange("203.0.113.0", 4)
	ports := flow.Ports{First: 1024, Last: 65535}
	taken := map[portBlock]netip.Addr{}
	for _, p := range sources {
		for a := p.Addr(); p.Contains(a); a = a.Next() {
			b, ok := deterministicBlock(sources, pool, ports, 2016, a)
			if !ok {
				t.Fatalf("%s has no block", a)
			}
			if other, twice := taken[b]; twice {
				t.Fatalf("%s and %s share %v", a, other, b)
			}
			if b.ports.First < ports.First || b.ports.Last < b.ports.First {
				t.Fatalf("%s has %v", a, b)
			}
			taken[b] = a
		}
	}
	if len(taken) != 128 {
		t.Errorf("%d blocks", len(taken))
	}
	if _, ok := deterministicBlock(sources, pool[:1], ports, 2016, netip.MustParseAddr("10.9.0.63")); ok {
		t.Error("a block beyond the pool")
	}
}

func addressRange(first string, n int) []netip.Addr {
	a := netip.MustParseAddr(first)
	var out []netip.Addr
	for range n {
		out = append(out, a)
		a = a.Next()
	}
	return out
}

// model builds a model with one rule on a host between two networks.
func model(t *testing.T, r config.NATRule) *Model {
	t.Helper()
	c := &config.Config{NAT: []config.NATRule{r}}
	c.SetDefaults()
	h := Host{
		Interfaces: []Interface{
			{Name: "wan0", MAC: packet.MAC{2, 1}, MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}},
			{Name: "lan0", MAC: packet.MAC{2, 2}, MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}},
		Routes:     []Route{{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("198.51.100.2"), Interface: "wan0"}},
		Neighbours: []Neighbour{{"wan0", netip.MustParseAddr("198.51.100.2"), packet.MAC{2, 3}}},
	}
	m, err := New(c, h, 1)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func udp(src string, port uint16) Arrival {
	p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: packet.MAC{2, 2}},
		&packet.IPv4{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr("192.0.2.9"), TTL: 64},
		&packet.UDP{SrcPort: port, DstPort: 53}}
	return Arrival{"lan0", p.Build()}
}

func snatRule(ports flow.Ports, pool string, n int) config.NATRule {
	first := netip.MustParseAddr(pool)
	last := first
	for range n - 1 {
		last = last.Next()
	}
	return config.NATRule{Name: "office", Type: config.NATSNAT, Out: "wan0", Ports: config.PortSet{ports},
		To: config.Target{Addresses: []config.AddressRange{{First: first, Last: last}}}}
}

// TestEveryPortIsUsed opens flows until the pool is empty. The model allocates each port exactly
// once, and no flow loses its port.
func TestEveryPortIsUsed(t *testing.T) {
	m := model(t, snatRule(flow.Ports{First: 1000, Last: 1299}, "203.0.113.1", 2))
	given := map[netip.AddrPort]bool{}
	for i := 0; ; i++ {
		o := m.Receive(udp(fmt.Sprintf("10.0.%d.%d", i/100, i%100+2), uint16(4000+i)))
		if o.Reason == ReasonNoPort {
			break
		}
		v, _, _ := read(o.Out[0].Frame)
		if given[v.src] {
			t.Fatalf("%s was given twice", v.src)
		}
		given[v.src] = true
	}
	if len(given) != 600 || len(m.Flows()) != 600 {
		t.Errorf("%d of 600 ports were given, %d flows live", len(given), len(m.Flows()))
	}
}

// TestPairedUnderExhaustion checks that a client with an address gets no port of another address
// (RFC 6888 REQ-2).
func TestPairedUnderExhaustion(t *testing.T) {
	m := model(t, snatRule(flow.Ports{First: 2000, Last: 2009}, "203.0.113.1", 2))
	seen := map[netip.Addr]int{}
	for i := range 20 {
		if o := m.Receive(udp("10.0.0.2", uint16(4000+i))); o.Action == Forward {
			v, _, _ := read(o.Out[0].Frame)
			seen[v.src.Addr()]++
		}
	}
	if len(seen) != 1 {
		t.Errorf("the client was seen as %v", seen)
	}
	if o := m.Receive(udp("10.0.0.3", 5000)); o.Action != Forward {
		t.Errorf("another client: %s %s", o.Action, o.Reason)
	}
}

// TestTCPStates checks the state transitions of RFC 6146 §3.5.2.
func TestTCPStates(t *testing.T) {
	const S, A, F, R = packet.SYN, packet.ACK, packet.FIN, packet.RST
	type packetOf struct {
		d flow.Direction
		f packet.TCPFlags
	}
	o, r := flow.Original, flow.Reply
	for _, tc := range []struct {
		name    string
		packets []packetOf
		want    string
	}{
		{"SYN", []packetOf{{o, S}}, "SYN_SENT"},
		{"SYN again", []packetOf{{o, S}, {o, S}}, "SYN_SENT"},
		{"SYN, SYN-ACK", []packetOf{{o, S}, {r, S | A}}, "SYN_RECV"},
		{"handshake", []packetOf{{o, S}, {r, S | A}, {o, A}}, "ESTABLISHED"},
		{"crossed SYNs", []packetOf{{o, S}, {r, S}, {o, S | A}, {r, A}}, "ESTABLISHED"},
		{"one FIN", []packetOf{{o, S}, {r, S | A}, {o, A}, {o, F | A}}, "FIN_WAIT"},
		{"the other FIN", []packetOf{{o, S}, {r, S | A}, {o, A}, {r, F | A}}, "FIN_WAIT"},
		{"both FINs", []packetOf{{o, S}, {r, S | A}, {o, A}, {r, F | A}, {o, F | A}}, "TIME_WAIT"},
		{"reset", []packetOf{{o, S}, {r, S | A}, {o, A}, {r, R}}, "CLOSE"},
		{"reset and data", []packetOf{{o, S}, {r, S | A}, {o, A}, {r, R}, {r, A}}, "ESTABLISHED"},
		{"picked up in the middle", []packetOf{{o, A}}, "SYN_SENT"},
		{"picked up, answered", []packetOf{{o, A}, {r, A}}, "ESTABLISHED"},
		{"reset of a handshake", []packetOf{{o, S}, {r, R | A}}, "CLOSE"},
	} {
		s := &session{}
		s.tuple[0].Protocol = flow.TCP
		for _, p := range tc.packets {
			s.updateState(p.d, p.f)
		}
		if got := s.State(); got != tc.want {
			t.Errorf("%s: want %s, got %s", tc.name, tc.want, got)
		}
	}
}

// TestResetIgnored checks that packets of the other side restore a session one second after a
// reset. Packets in flight at the time of the reset do not.
func TestResetIgnored(t *testing.T) {
	s := &session{}
	s.tuple[0].Protocol = flow.TCP
	for _, p := range []packet.TCPFlags{packet.SYN, packet.ACK} {
		s.updateState(flow.Original, p)
		s.updateState(flow.Reply, p)
	}
	s.updateState(flow.Original, packet.RST)
	s.seen = [2]time.Duration{10 * time.Second, 10*time.Second + 500*time.Millisecond}
	if s.State() != "CLOSE" {
		t.Errorf("half a second after the reset: %s", s.State())
	}
	s.seen[1] = 12 * time.Second
	if s.State() != "ESTABLISHED" {
		t.Errorf("two seconds after the reset: %s", s.State())
	}
}

// TestMessagesBetweenFamilies uses the table of RFC 7915 §4.2 and §5.2, with the second word if it
// has a meaning.
func TestMessagesBetweenFamilies(t *testing.T) {
	mtu := func(m uint32) uint32 { return m + 20 }
	quoted := &view{ip: []byte{0x45, 0, 5, 0xdc}} // 1500 bytes
	for _, tc := range []struct {
		kind, code uint8
		rest       uint32
		want       message
		word       uint32
		ok         bool
	}{
		{8, 0, 7, message{128, 0}, 7, true}, {0, 0, 7, message{129, 0}, 7, true},
		{3, 0, 0, message{1, 0}, 0, true}, {3, 1, 0, message{1, 0}, 0, true}, {3, 2, 0, message{4, 1}, 6, true},
		{3, 3, 0, message{1, 4}, 0, true}, {3, 4, 1400, message{2, 0}, 1420, true}, {3, 4, 0, message{2, 0}, 1492 + 20, true},
		{3, 9, 0, message{1, 1}, 0, true}, {3, 10, 0, message{1, 1}, 0, true}, {3, 13, 0, message{1, 1}, 0, true},
		{3, 15, 0, message{1, 1}, 0, true}, {3, 14, 0, message{}, 0, false}, {3, 16, 0, message{}, 0, false},
		{11, 0, 0, message{3, 0}, 0, true}, {11, 1, 0, message{3, 1}, 0, true}, {12, 0, 9 << 24, message{4, 0}, 6, true},
		{12, 0, 5 << 24, message{}, 0, false}, {12, 1, 0, message{}, 0, false}, {4, 0, 0, message{}, 0, false},
		{5, 0, 0, message{}, 0, false}, {13, 0, 0, message{}, 0, false},
	} {
		m, word, ok := toICMPv6(&view{icmpType: tc.kind, icmpCode: tc.code, quoted: quoted}, translationParams{mtu: mtu}, tc.rest)
		if ok != tc.ok || ok && (m != tc.want || word != tc.word) {
			t.Errorf("icmp %d/%d: want %v %d, got %v %d %v", tc.kind, tc.code, tc.want, tc.word, m, word, ok)
		}
	}
	mtu = func(m uint32) uint32 { return m - 20 }
	for _, tc := range []struct {
		kind, code uint8
		rest       uint32
		want       message
		word       uint32
		ok         bool
	}{
		{128, 0, 7, message{8, 0}, 7, true}, {129, 0, 7, message{0, 0}, 7, true}, {1, 0, 0, message{3, 1}, 0, true},
		{1, 1, 0, message{3, 10}, 0, true}, {1, 2, 0, message{3, 1}, 0, true}, {1, 3, 0, message{3, 1}, 0, true},
		{1, 4, 0, message{3, 3}, 0, true}, {1, 5, 0, message{}, 0, false}, {2, 0, 1420, message{3, 4}, 1400, true},
		{3, 0, 0, message{11, 0}, 0, true}, {4, 0, 6, message{12, 0}, 9 << 24, true}, {4, 0, 41, message{}, 0, false},
		{4, 1, 6, message{3, 2}, 0, true}, {4, 2, 0, message{}, 0, false}, {135, 0, 0, message{}, 0, false},
	} {
		m, word, ok := toICMPv4(&view{v6: true, icmpType: tc.kind, icmpCode: tc.code}, translationParams{mtu: mtu}, tc.rest)
		if ok != tc.ok || ok && (m != tc.want || word != tc.word) {
			t.Errorf("icmp6 %d/%d: want %v %d, got %v %d %v", tc.kind, tc.code, tc.want, tc.word, m, word, ok)
		}
	}
}

// TestSwap maps suffixes between prefixes of both families (RFC 7757 §3.2).
func TestSwap(t *testing.T) {
	for _, tc := range [][4]string{
		{"203.0.113.16/28", "fd00:2::10/124", "203.0.113.18", "fd00:2::12"},
		{"fd00:2::10/124", "203.0.113.16/28", "fd00:2::1f", "203.0.113.31"},
		{"198.51.100.128/25", "10.1.9.128/25", "198.51.100.130", "10.1.9.130"},
		{"192.0.2.1/32", "2001:db8::1/128", "192.0.2.1", "2001:db8::1"},
	} {
		got := swap(netip.MustParsePrefix(tc[0]), netip.MustParsePrefix(tc[1]), netip.MustParseAddr(tc[2]))
		if got != netip.MustParseAddr(tc[3]) {
			t.Errorf("%v: got %s", tc, got)
		}
	}
}

// forgetful evicts every SYN that the model permits to evict.
type forgetful struct{ Chance }

func (forgetful) ForgetsSYN(int) bool { return true }

// TestForgottenSYNs checks that a later SYN may evict a SYN permanently.
func TestForgottenSYNs(t *testing.T) {
	m := &Model{synsSent: map[flow.Tuple]int{}}
	answer := func(i int) flow.Tuple {
		return flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort("10.0.2.2:80"),
			Dest: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.5"), uint16(i))}
	}
	for i := 1; i <= 2; i++ {
		m.syns++
		m.synsSent[answer(i).Reverse()] = m.syns
	}
	m.choices = Chance{}
	if !m.answersSYN(answer(1)) {
		t.Error("forgotten by chance")
	}
	m.choices = forgetful{}
	if !m.answersSYN(answer(2)) {
		t.Error("the last SYN may be forgotten")
	}
	if m.answersSYN(answer(1)) {
		t.Error("the first SYN is not forgotten")
	}
	m.choices = Chance{}
	if m.answersSYN(answer(1)) {
		t.Error("a forgotten SYN is known again")
	}
}

// TestAddressOrder checks the order of the kernel's address list, with primary and secondary
// addresses.
func TestAddressOrder(t *testing.T) {
	i := Interface{}
	for _, step := range []struct{ change, want string }{
		{"+10.0.2.1/24", "10.0.2.1"}, {"+10.0.2.77/24", "10.0.2.1 10.0.2.77"}, {"-10.0.2.1/24", "10.0.2.77"}, {"+10.0.2.1/24", "10.0.2.77 10.0.2.1"},
		{"+192.168.9.1/24", "10.0.2.77 192.168.9.1 10.0.2.1"}, {"-10.0.2.77/24", "192.168.9.1 10.0.2.1"}, {"+192.168.9.2/24", "192.168.9.1 10.0.2.1 192.168.9.2"},
	} {
		if p := netip.MustParsePrefix(step.change[1:]); step.change[0] == '+' {
			i.AddAddress(p)
		} else {
			i.RemoveAddress(p)
		}
		var got []string
		for _, p := range i.Addresses {
			got = append(got, p.Addr().String())
		}
		if s := strings.Join(got, " "); s != step.want {
			t.Errorf("%s: %s, want %s", step.change, s, step.want)
		}
	}
}
