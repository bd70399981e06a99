// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Explainer is a Datapath that explains its treatment of a packet without sending the packet.
type Explainer interface {
	Explain(context.Context, Question) (*Explanation, error)
}

// Question is the packet to explain.
type Question struct {
	Tuple     flow.Tuple
	Interface string // Input interface; empty: the interface of the route to the source.
	Size      int    // Bytes of the network packet; 0 means 60.
}

// ErrIdle reports that a datapath has no services or rules.
var ErrIdle = errors.New("carries nothing")

// initChunk is a minimal SCTP INIT chunk (RFC 9260 section 3.3.2).
var initChunk = []byte{1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1}

// Packet builds the packet from its IP header on. A TCP packet has the given flags. An SCTP packet contains an INIT.
// An ICMP packet is an echo request with the source port as identifier.
func (q Question) Packet(flags packet.TCPFlags) (packet.Packet, error) {
	t := q.Tuple
	if !t.IsValid() {
		return nil, fmt.Errorf("%s: source and destination must be of one family", t)
	}
	var p packet.Packet
	if t.Source.Addr().Is4() {
		p = packet.Packet{&packet.IPv4{Src: t.Source.Addr(), Dst: t.Dest.Addr(), TTL: 64}}
	} else {
		p = packet.Packet{&packet.IPv6{Src: t.Source.Addr(), Dst: t.Dest.Addr(), HopLimit: 64}}
	}
	switch t.Protocol {
	case flow.TCP:
		p = append(p, &packet.TCP{SrcPort: t.Source.Port(), DstPort: t.Dest.Port(), Flags: flags, Window: 65535})
	case flow.UDP:
		p = append(p, &packet.UDP{SrcPort: t.Source.Port(), DstPort: t.Dest.Port()})
	case flow.ICMP, flow.ICMPv6:
		kind := map[flow.Protocol]uint8{flow.ICMP: 8, flow.ICMPv6: 128}[t.Protocol]
		p = append(p, &packet.ICMP{V6: t.Protocol == flow.ICMPv6, Type: kind, Rest: uint32(t.Source.Port()) << 16})
	case flow.SCTP:
		return append(p, &packet.SCTP{SrcPort: t.Source.Port(), DstPort: t.Dest.Port()}, &packet.Data{Bytes: initChunk}), nil
	case flow.Any:
		return nil, errors.New("protocol any: name one, as in tcp, esp or 47")
	default:
		if p = q.withProtocol(p); t.Protocol == flow.UDPLite {
			return p, nil
		}
	}
	size := q.Size
	if size == 0 {
		size = 60
	}
	if rest := size - len(p.Build()); rest > 0 {
		p = append(p, &packet.Data{Bytes: make([]byte, rest)})
	}
	return p, nil
}

// Portless reports whether packets of a protocol have neither ports nor an identifier.
func Portless(p flow.Protocol) bool { return !p.HasPorts() && p != flow.ICMP && p != flow.ICMPv6 }

// withProtocol replaces a packet's protocol and, for UDP-Lite, its header (RFC 3828).
func (q Question) withProtocol(p packet.Packet) packet.Packet {
	switch ip := p[0].(type) {
	case *packet.IPv4:
		ip.Protocol = packet.Force(uint32(q.Tuple.Protocol))
	case *packet.IPv6:
		ip.NextHeader = packet.Force(uint32(q.Tuple.Protocol))
	}
	if q.Tuple.Protocol != flow.UDPLite {
		return p
	}
	head := binary.BigEndian.AppendUint16(nil, q.Tuple.Source.Port())
	head = append(binary.BigEndian.AppendUint16(head, q.Tuple.Dest.Port()), 0, 8, 0, 0) // the checksum covers the header
	binary.BigEndian.PutUint16(head[6:], packet.TransportChecksum(q.Tuple.Source.Addr(), q.Tuple.Dest.Addr(), uint8(flow.UDPLite), head))
	return append(p, &packet.Data{Bytes: head})
}

// Met is a rule that matched the packet.
type Met struct {
	Chain   string `json:"chain"` // "ip prerouting"
	Rule    string `json:"rule"`
	Verdict string `json:"verdict"`         // "continue": the next rule follows.
	Owner   string `json:"owner,omitempty"` // "service web"; or the firewall rule's name.
}

// Explanation is the datapath's decision about one packet.
type Explanation struct {
	// Path lists the datapaths on the packet's path in order; Datapath decides.
	Path      []string   `json:"path,omitempty"`
	Datapath  string     `json:"datapath"`
	Interface string     `json:"interface"`
	Owner     string     `json:"owner,omitempty"`   // Service or NAT rule.
	Backend   string     `json:"backend,omitempty"` // of the service
	Before    flow.Tuple `json:"before"`
	// After is the outgoing packet. An unspecified address or port 0 means that a pool selects the value for a real
	// packet.
	After flow.Tuple `json:"after"`
	Out   string     `json:"out,omitempty"` // output interface
	// Uplink is the selected uplink of the configuration, and UplinkWhy the rule that selects it. Both are empty if the
	// packet does not go to an uplink, or the main routing table decides.
	Uplink    string     `json:"uplink,omitempty"`
	UplinkWhy string     `json:"uplink_why,omitempty"`
	NextHop   netip.Addr `json:"next_hop,omitzero"`
	Action    string     `json:"action"` // forward, drop, pass
	Reason    string     `json:"reason"`
	Existing  bool       `json:"existing"`        // An existing flow decided.
	Rules     []Met      `json:"rules,omitempty"` // of nftables
	Steps     []string   `json:"steps,omitempty"`
	// Notes describes how a real packet may be treated differently.
	Notes []string `json:"notes,omitempty"`
}
