// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/packet"
)

// encapsulation is the tunnel to a backend.
type encapsulation struct {
	*config.Tunnel
	to netip.Addr
}

// size returns the number of bytes that the encapsulation adds.
func (e *encapsulation) size() int {
	if e == nil {
		return 0
	}
	size := 20
	if e.to.Is6() {
		size = 40
	}
	if e.Type == config.TunnelGUE {
		size += 12
	}
	return size
}

// wrap encapsulates the packet. The outer source is an address of the egress interface. The outer
// header has DF, so that the inner sender discovers the path MTU (RFC 4459 §3.1). It copies the
// inner ECN field (RFC 6040 §4.1).
func (e *encapsulation) wrap(m *Model, b []byte, next hop) []byte {
	src, ok := next.address(e.to.Is6())
	if !ok {
		return b
	}
	var outer packet.Packet
	inner := packet.ParseIP(b)
	ecn := b[1] & 3
	if b[0]>>4 == 6 {
		ecn = b[1] >> 4 & 3
	}
	if e.to.Is6() {
		outer = packet.Packet{&packet.IPv6{Src: src, Dst: e.to, HopLimit: 64, TrafficClass: ecn}}
	} else {
		outer = packet.Packet{&packet.IPv4{Src: src, Dst: e.to, TTL: 64, DF: true, TOS: ecn, ID: m.choices.Identification(true)}}
	}
	if e.Type == config.TunnelGUE {
		u := &packet.UDP{SrcPort: m.gueSource(b), DstPort: e.Port}
		u.Checksum = packet.Force(0) // RFC 6935: the inner packet has a checksum
		outer = append(outer, u, &packet.GUE{})
	}
	return append(outer, inner...).Build()
}

// gueSource returns the UDP source port: a hash of the inner flow. Receivers use it to spread flows
// over queues. Any port from 1024 on is legal.
func (m *Model) gueSource(b []byte) uint16 {
	if a, ok := m.observedSource(); ok && a.Port() >= 1024 {
		return a.Port()
	}
	v, reason := readIP(b)
	if reason != "" {
		return 49152
	}
	s := &service{Service: &config.Service{Scheduler: config.SchedulerMaglev}}
	return 49152 | uint16(balance.JHash(s.hashInput(v), balance.Seed)&0x3fff)
}
