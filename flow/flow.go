// SPDX-License-Identifier: Apache-2.0

// Package flow holds the value types shared by all packages: protocols, port ranges, tuples and tracked connections.
// All types are comparable and use host byte order; packet and the datapaths convert to network byte order. It
// imports only the standard library.
package flow

import (
	"fmt"
	"net/netip"
	"time"
)

// Tuple names the sender and the receiver of one direction of a connection. For ICMP and ICMPv6 queries both ports
// hold the query identifier. For protocols without ports they are 0.
type Tuple struct {
	Protocol Protocol       `json:"protocol"`
	Source   netip.AddrPort `json:"source"`
	Dest     netip.AddrPort `json:"destination"`
}

// Reverse returns the tuple of a reply to t.
func (t Tuple) Reverse() Tuple {
	return Tuple{Protocol: t.Protocol, Source: t.Dest, Dest: t.Source}
}

// IsValid reports whether both endpoints hold an address of the same family.
func (t Tuple) IsValid() bool {
	s, d := t.Source.Addr(), t.Dest.Addr()
	return s.IsValid() && d.IsValid() && s.Is4() == d.Is4()
}

// String renders t as "tcp 192.0.2.1:1024 -> 198.51.100.1:80".
func (t Tuple) String() string {
	return t.Protocol.String() + " " + t.Source.String() + " -> " + t.Dest.String()
}

// Direction is the direction of a packet within a flow.
type Direction uint8

const (
	// Original is the direction of the packet that opened the flow.
	Original Direction = iota
	// Reply is the opposite direction.
	Reply
)

// String returns "original" or "reply".
func (d Direction) String() string {
	if d == Reply {
		return "reply"
	}
	return "original"
}

// ParseEndpoint reads an address and a port, as in 192.0.2.10:443 or [2001:db8::1]:443.
func ParseEndpoint(s string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return a, fmt.Errorf("%q: not address:port, as in 192.0.2.10:443 or [2001:db8::1]:443", s)
	}
	return a, nil
}

// ParseEnd is ParseEndpoint for a packet of a protocol. For a protocol without ports the port is optional and
// ignored.
func (p Protocol) ParseEnd(s string) (netip.AddrPort, error) {
	if p.HasPorts() || p == ICMP || p == ICMPv6 { // for ICMP, the identifier is written as a port
		return ParseEndpoint(s)
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	a, err := ParseEndpoint(s)
	if err != nil {
		return a, fmt.Errorf("%q: not an address, as in 192.0.2.10 or 2001:db8::1: protocol %s has no ports", s, p)
	}
	return netip.AddrPortFrom(a.Addr(), 0), nil
}

// Flow is one tracked connection as reported by a datapath or by the kernel's connection table. The original tuple is
// that sent by the initiator. The reply tuple is that sent by the responder, before its translation. For an
// untranslated connection Reply equals Original.Reverse().
type Flow struct {
	Original Tuple
	Reply    Tuple
	// Owner is the name of the service or NAT rule that created the flow; empty if unknown.
	Owner string
	// Backend is the name of the service's backend; empty for NAT rules.
	Backend string
	// State is the protocol's state in capital letters as conntrack prints it (ESTABLISHED, TIME_WAIT, ...). It is
	// empty for protocols without states.
	State string
	// Flags that matter for capacity.
	Replied   bool // A packet of the reply direction was seen.
	Assured   bool // The flow is not evicted to make room.
	Offloaded bool // Carried by a flowtable.
	// Timeout is the time until an idle flow is removed.
	Timeout time.Duration
	// Packets and Bytes by direction; valid if Counted is true. Bytes include the network header.
	Counted bool
	Packets [2]uint64
	Bytes   [2]uint64
	// Mark is the connection's mark (32 bits), 0 when none.
	Mark uint32
	// Zone is the connection tracking zone, 0 by default.
	Zone uint16
	// Datapath names the owner of the flow table: "nftables", "ebpf" or "kernel".
	Datapath string
}

// SourceTranslated reports whether the initiator's endpoint is rewritten.
func (f Flow) SourceTranslated() bool { return f.Reply.Dest != f.Original.Source }

// DestTranslated reports whether the responder's endpoint is rewritten. A query identifier occupies both ports but
// belongs to the initiator, so only source NAT changes it.
func (f Flow) DestTranslated() bool {
	if p := f.Original.Protocol; p == ICMP || p == ICMPv6 {
		return f.Reply.Source.Addr() != f.Original.Dest.Addr()
	}
	return f.Reply.Source != f.Original.Dest
}
