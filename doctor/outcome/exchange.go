// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Host describes a namespace.
type Host struct {
	Addresses map[netip.Addr]bool // Its own.
	Networks  []Network           // of its interfaces
	MACs      map[[6]byte]bool    // of its interfaces
	// Ports maps a port of a bridge to the bridge: packets pass both.
	Ports map[string]string
	// IPsec is set if policies encrypt: their packets arrive with sources of other networks.
	IPsec bool
	// Probed are the backends of a Sluice daemon of this host, which checks their health.
	Probed map[netip.Addr]bool
}

// Network is a directly connected network.
type Network struct {
	Prefix    netip.Prefix
	Interface string
}

// network returns the connected network that holds an address.
func (h *Host) network(a netip.Addr) (Network, bool) {
	for _, n := range h.Networks {
		if n.Prefix.Contains(a) && !n.Prefix.IsSingleIP() {
			return n, true
		}
	}
	return Network{}, false
}

// Exchange is a TCP connection, or the datagrams between two endpoints.
type Exchange struct {
	Request flow.Tuple // as the client sends it
	Reply   flow.Tuple // as the server answers it; Request.Reverse() without translation

	request, reply way
	attempts       int           // Openings of TCP, requests of other protocols.
	repeated       int           // Openings after an answer left to the client.
	firstAttempt   time.Duration // of the window's packets
	lastAttempt    time.Duration
	known          bool // connection tracking knows the tuples and the direction
	refused        *Rejection
	resets         int  // Answers of TCP that are resets.
	acknowledged   bool // The client sent a segment that is no opening.
	unrecognised   bool // An answer has a connection of its own.

	into   *Exchange // This exchange was joined to that one; nil: it was not.
	turned bool      // Its requests are the answers of this one.

	Stage  Stage
	Reason Reason
}

// Reason is the evidence for a stage.
type Reason struct {
	Drop      *Drop      // of the request, or of the answer
	Rejection *Rejection // by an ICMP error or a reset
	// Unresolved is the next hop that answers no ARP or neighbour discovery.
	Unresolved   netip.Addr
	UnresolvedOn string         // Interface.
	Unheard      bool           // A rule dropped the question or the answer, which is Drop.
	Network      Network        // of the server, if its request left by another interface
	Loop         bool           // The same packet arrives again and again.
	Bypass       bool           // The client acknowledges an answer that did not pass here.
	Unread       netip.AddrPort // Endpoint that keeps its receive window at 0.
	UnreadFor    time.Duration
	Large        int // Size of the packets that are repeated and never acknowledged.
	// ForeignSource is set if the source was translated to an address that this host does not have.
	ForeignSource bool
	// OtherSource is the own address from which datagrams were answered instead of the one that was asked.
	OtherSource netip.Addr
	// HopLimit is set if the dropped packets arrived with a hop limit of 1, each of them.
	HopLimit bool
	// Unrecognised is set if answers to be translated back were taken for packets to this host.
	Unrecognised bool
	// Elsewhere is the hardware address of another host to which the requests were addressed.
	Elsewhere string
}

// Evident reports whether the packets themselves show why the exchange fails.
func (r *Reason) Evident() bool {
	return r.HopLimit || r.Unrecognised || r.OtherSource.IsValid() || r.Elsewhere != ""
}

// Drop is why and where packets of an exchange were dropped.
type Drop struct {
	Cause     trace.Cause
	Hook      trace.Hook
	Interface string
	Place     string // Function and reason in the kernel's words.
	Answer    bool   // of the answer
}

// dropOf describes a dropped packet.
func dropOf(p *trace.Packet) *Drop {
	return &Drop{Cause: p.Cause, Hook: p.Hook, Interface: p.Interface, Place: p.Place.Name + ", " + p.Reason}
}

// Rejection is an ICMP error about an exchange, or a reset by the server or on its behalf.
type Rejection struct {
	From       netip.Addr
	Type, Code uint8 // of ICMP
	Reset      bool
	Own        bool // sent by this host
}

// way holds the packets of one direction of an exchange.
type way struct {
	received, transmitted, dropped int // sampled packets
	in, out                        string
	portIn, portOut                string        // Ports of a bridge.
	first, last                    time.Duration // of any packet
	lastSent                       time.Duration // Transmitted.
	firstSent                      time.Duration
	mac                            [6]byte // to which it was transmitted
	hasMAC                         bool
	encapsulated                   bool // left in a packet of another protocol
	drop                           *Drop
	ttl                            [2]uint8 // lowest and highest at arrival
	elsewhere                      [6]byte  // the last hardware address at arrival, if it is another host's
	large                          repeats
	small                          repeats
	closed                         repeats    // acknowledgements with a receive window of 0, since the last other one
	ack                            uint32     // Highest acknowledgement in this direction.
	tuple                          flow.Tuple // as transmitted
}

// repeats follows the segments of one size class.
type repeats struct {
	seq   uint32
	size  int
	count int // sightings of the segment with this sequence number
	first time.Duration
	last  time.Duration
}

// add reports whether the sequence number is a new one.
func (r *repeats) add(p *trace.Packet, size int) bool {
	if r.count == 0 || p.Seq != r.seq {
		*r = repeats{seq: p.Seq, size: size, first: p.Time}
	}
	r.count++
	r.last = p.Time
	return r.count == 1
}

// repeatedFor is from how long on a segment that repeats is stuck: retransmissions begin after 200 ms.
const repeatedFor = 400 * time.Millisecond

// closedFor is from how long on a closed window is a stall: slower readers than their peers close it for moments.
const closedFor = time.Second

// stuck reports whether the last segment was repeated without an acknowledgement of the other way.
func (r *repeats) stuck(other *way) bool {
	return r.count >= 2 && r.last-r.first >= repeatedFor && int32(other.ack-r.seq) <= 0
}

func (w *way) add(p *trace.Packet, port, elsewhere bool) {
	if w.first == 0 {
		w.first = p.Time
	}
	w.last = p.Time
	switch {
	case p.Point == trace.Received && port:
		w.portIn = p.Interface
	case p.Point == trace.Transmitted && port:
		w.portOut = p.Interface
	case p.Point == trace.Received:
		if w.received++; w.in == "" {
			w.in = p.Interface
		}
		if w.ttl[0] == 0 || p.TTL < w.ttl[0] {
			w.ttl[0] = p.TTL
		}
		w.ttl[1] = max(w.ttl[1], p.TTL)
		if w.elsewhere = [6]byte{}; elsewhere {
			w.elsewhere = p.DestMAC
		}
	case p.Point == trace.Transmitted:
		if w.transmitted++; w.out == "" {
			w.out, w.firstSent = p.Interface, p.Time
		}
		w.lastSent, w.tuple = p.Time, p.Tuple
	case !p.Cause.Benign:
		w.dropped++
		w.drop = dropOf(p)
	}
	if p.Point == trace.Transmitted && p.HasMACs {
		w.mac, w.hasMAC = p.DestMAC, true
	}
}

// settle takes ports of a bridge for the interfaces of packets that passed no other.
func (w *way) settle() {
	if w.received == 0 && w.portIn != "" {
		w.received, w.in = 1, w.portIn
	}
	if w.transmitted == 0 && w.portOut != "" {
		w.transmitted, w.out = 1, w.portOut
	}
}

func (w *way) merge(o *way) {
	w.received, w.transmitted, w.dropped = w.received+o.received, w.transmitted+o.transmitted, w.dropped+o.dropped
	if w.in == "" {
		w.in = o.in
	}
	if w.out == "" {
		w.out, w.firstSent, w.mac, w.hasMAC, w.tuple = o.out, o.firstSent, o.mac, o.hasMAC, o.tuple
	}
	if w.portIn == "" {
		w.portIn = o.portIn
	}
	if w.portOut == "" {
		w.portOut = o.portOut
	}
	if w.first == 0 || o.first != 0 && o.first < w.first {
		w.first = o.first
	}
	w.last, w.lastSent = max(w.last, o.last), max(w.lastSent, o.lastSent)
	if w.drop == nil {
		w.drop = o.drop
	}
	if w.ttl[0] == 0 || o.ttl[0] != 0 && o.ttl[0] < w.ttl[0] {
		w.ttl[0] = o.ttl[0]
	}
	w.ttl[1] = max(w.ttl[1], o.ttl[1])
}

// SourceTranslated reports whether the client's endpoint is translated.
func (e *Exchange) SourceTranslated() bool { return e.Reply.Dest.Addr() != e.Request.Source.Addr() }

// Tracked reports whether a packet of the exchange had a connection tracking entry.
func (e *Exchange) Tracked() bool { return e.known }

// DestTranslated reports whether the server's endpoint is translated.
func (e *Exchange) DestTranslated() bool {
	return e.Reply.Source.Addr() != e.Request.Dest.Addr() || e.Request.Protocol.HasPorts() && e.Reply.Source.Port() != e.Request.Dest.Port()
}

// Server is the endpoint that has to answer, after translation.
func (e *Exchange) Server() netip.AddrPort { return e.Reply.Source }

// Client is the endpoint that asks.
func (e *Exchange) Client() netip.AddrPort { return e.Request.Source }

// In is the interface of the request's arrival; "" for requests of this host.
func (e *Exchange) In() string { return e.request.in }

// Out is the interface by which the request left; "" when it did not.
func (e *Exchange) Out() string { return e.request.out }

// AnswerIn is the interface by which the answer arrived; "" when none did.
func (e *Exchange) AnswerIn() string { return e.reply.in }

// AnswerOut is the interface by which the answer left; "" when it did not.
func (e *Exchange) AnswerOut() string { return e.reply.out }

// NextHopMAC is the link address to which the request was sent.
func (e *Exchange) NextHopMAC() (mac [6]byte, known bool) { return e.request.mac, e.request.hasMAC }
