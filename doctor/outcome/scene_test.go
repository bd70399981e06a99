// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// scene makes the packets of a gateway with lan0 (10.0.0.1/24) and wan0 (203.0.113.1/24).
type scene struct {
	packets []trace.Packet
	now     time.Duration
	buffer  uint64
	ends    time.Duration // of the window; 0: 3 s after the last packet
}

var sceneHost = Host{
	Addresses: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.1"): true, netip.MustParseAddr("203.0.113.1"): true},
	Networks:  []Network{{netip.MustParsePrefix("10.0.0.0/24"), "lan0"}, {netip.MustParsePrefix("203.0.113.0/24"), "wan0"}},
	Ports:     map[string]string{"eth1": "br0"},
	MACs:      map[[6]byte]bool{{2, 0, 0, 0, 0, 1}: true},
}

func tuple(protocol flow.Protocol, from, to string) flow.Tuple {
	return flow.Tuple{Protocol: protocol, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)}
}

// see adds a packet 1 ms after the last one.
func (s *scene) see(point trace.Point, iface string, t flow.Tuple, change ...func(p *trace.Packet)) *trace.Packet {
	s.now += time.Millisecond
	p := trace.Packet{Time: s.now, Point: point, Interface: iface, Tuple: t, TTL: 64, Buffer: s.buffer, Length: 60, Window: 100}
	if point != trace.Received {
		p.InIfIndex = 2
	}
	for _, f := range change {
		f(&p)
	}
	s.packets = append(s.packets, p)
	return &s.packets[len(s.packets)-1]
}

func flags(f byte) func(p *trace.Packet) { return func(p *trace.Packet) { p.TCPFlags = f } }

func window(n uint16) func(p *trace.Packet) { return func(p *trace.Packet) { p.Window = n } }

func tracked(original, reply flow.Tuple, d flow.Direction) func(p *trace.Packet) {
	return func(p *trace.Packet) {
		p.Original, p.Reply, p.Direction, p.Tracked, p.Connection = original, reply, d, trace.TrackedConfirmed, 1
	}
}

func hop(mac byte) func(p *trace.Packet) {
	return func(p *trace.Packet) { p.HasMACs, p.DestMAC = true, [6]byte{2, 0, 0, 0, 0, mac} }
}

func dropped(cause trace.Cause) func(p *trace.Packet) {
	return func(p *trace.Packet) { p.Cause = cause }
}

func own(p *trace.Packet) { p.InIfIndex = 0 }

const (
	syn    = trace.TCPSyn
	synAck = trace.TCPSyn | trace.TCPAck
	rst    = trace.TCPRst | trace.TCPAck
)

// connection is one of a client behind the gateway, masqueraded.
type connection struct{ request, reply flow.Tuple }

func outbound(i int, server string) connection {
	return connection{tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 2000+i), server), tuple(flow.TCP, server, fmt.Sprintf("203.0.113.1:%d", 2000+i))}
}

// opens adds the SYN as it arrives and leaves, n times.
func (s *scene) opens(c connection, mac byte, n int) {
	for range n {
		s.buffer++
		s.see(trace.Received, "lan0", c.request, flags(syn))
		s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original), hop(mac))
	}
}

// answers adds the answer as it arrives and leaves.
func (s *scene) answers(c connection, f byte) {
	s.see(trace.Received, "wan0", c.reply, flags(f))
	s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(f), tracked(c.request, c.reply, flow.Reply))
}

// unread adds the acknowledgements of a server that does not read.
func (s *scene) unread(c connection) {
	for range 4 {
		s.later(400 * time.Millisecond)
		s.see(trace.Received, "wan0", c.reply, flags(trace.TCPAck), window(0))
		s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Reply), window(0))
	}
}

func (s *scene) healthy(from, n int) {
	for i := range n {
		c := outbound(from+i, "198.51.100.7:443")
		s.opens(c, 7, 1)
		s.answers(c, synAck)
	}
}

// later lets time pass.
func (s *scene) later(d time.Duration) { s.now += d }

func (s *scene) report(lost trace.PacketLoss) *Report {
	c := NewCollector(sceneHost, NewBudget())
	for i := range s.packets {
		c.Add(&s.packets[i])
	}
	return c.Report(cmp.Or(s.ends, s.now+3*time.Second), lost, nil)
}
