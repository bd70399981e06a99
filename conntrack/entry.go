// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// Addr is an address of either family in 16 bytes; IPv4 is mapped (::ffff:0:0/96).
type Addr [16]byte

// AddrOf returns a in 16 bytes.
func AddrOf(a netip.Addr) Addr { return a.As16() }

// Netip returns the address in its own family.
func (a Addr) Netip() netip.Addr { return netip.AddrFrom16(a).Unmap() }

// Is4 reports whether a is a mapped IPv4 address.
func (a *Addr) Is4() bool {
	return a[10] == 0xff && a[11] == 0xff && binary.NativeEndian.Uint64(a[:]) == 0 && a[8] == 0 && a[9] == 0
}

// Tuple is one direction of an entry. Ports are in host byte order; for ICMP and
// ICMPv6 both hold the query identifier, for GRE the call keys.
type Tuple struct {
	Source, Dest         Addr
	SourcePort, DestPort uint16
	ICMPType, ICMPCode   uint8 // as in the kernel's entry; 0 for other protocols
}

// Status holds the kernel's bits for an entry (enum ip_conntrack_status).
type Status uint32

// The bits of Status that this package and its callers use.
const (
	Expected  Status = 1 << 0
	SeenReply Status = 1 << 1
	Assured   Status = 1 << 2
	Confirmed Status = 1 << 3
	SourceNAT Status = 1 << 4
	DestNAT   Status = 1 << 5
	Dying     Status = 1 << 9
	// FixedTimeout entries expire at their timeout, whatever packets they see.
	FixedTimeout Status = 1 << 10
	Offloaded    Status = 1 << 14
)

// TCPState is the kernel's state of a TCP connection (enum tcp_conntrack).
type TCPState uint8

// TCP states in the kernel's order.
const (
	TCPNone TCPState = iota
	TCPSynSent
	TCPSynRecv
	TCPEstablished
	TCPFinWait
	TCPCloseWait
	TCPLastAck
	TCPTimeWait
	TCPClose
	TCPSynSent2
)

var tcpStates = [...]string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT",
	"LAST_ACK", "TIME_WAIT", "CLOSE", "SYN_SENT2"}

var sctpStates = [...]string{"NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED",
	"SHUTDOWN_SENT", "SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT", "HEARTBEAT_ACKED"}

// Entry is one tracked connection. Dump and Listener.Read reuse one Entry for all calls of visit: copy any data that
// must outlive the call.
type Entry struct {
	Original, Reply Tuple
	Family          uint8 // unix.AF_INET or unix.AF_INET6
	Protocol        flow.Protocol
	State           uint8 // of TCP (TCPState), SCTP or DCCP; 0 for others
	Counted         bool  // Packets and Bytes are valid (nf_conntrack_acct).
	Helped          bool  // A helper such as FTP watches the connection.
	Zone            uint16
	Status          Status
	Timeout         uint32 // seconds left while the connection stays idle
	Mark            uint32
	ID              uint32 // the kernel's; 0 if not reported
	Packets, Bytes  [2]uint64
	Start, Stop     uint64 // ns since 1970; 0 without nf_conntrack_timestamp
}

// mappedPrefix is the prefix of an IPv4 address in an Addr.
var mappedPrefix = Addr{10: 0xff, 11: 0xff}

// decode fills e from the body of a conntrack message: nfgenmsg and attributes.
func (e *Entry) decode(body []byte) error {
	*e = Entry{}
	if len(body) < genericLen {
		return errTruncated
	}
	e.Family = body[0]
	b := body[genericLen:]
	for len(b) > 0 {
		kind, v, rest, ok := next(b)
		if !ok {
			return errTruncated
		}
		b = rest
		if err := e.attribute(kind, v); err != nil {
			return err
		}
	}
	return nil
}

func (e *Entry) attribute(kind uint16, v []byte) error {
	switch kind {
	case ctaTupleOrig:
		return e.tuple(&e.Original, v)
	case ctaTupleReply:
		return e.tuple(&e.Reply, v)
	case ctaProtoInfo:
		return e.protoInfo(v)
	case ctaStatus:
		e.Status = Status(be32(v))
	case ctaTimeout:
		e.Timeout = be32(v)
	case ctaMark:
		e.Mark = be32(v)
	case ctaID:
		e.ID = be32(v)
	case ctaZone:
		e.Zone = be16(v)
	case ctaHelp:
		e.Helped = true
	case ctaCountersOrig:
		return e.counters(flow.Original, v)
	case ctaCountersRepl:
		return e.counters(flow.Reply, v)
	case ctaTimestamp:
		return forEachAttribute(v, func(kind uint16, v []byte) {
			switch kind {
			case ctaTimeStart:
				e.Start = be64(v)
			case ctaTimeStop:
				e.Stop = be64(v)
			}
		})
	}
	return nil
}

func (e *Entry) tuple(t *Tuple, b []byte) error {
	for len(b) > 0 {
		kind, v, rest, ok := next(b)
		if !ok {
			return errTruncated
		}
		b = rest
		switch kind {
		case ctaTupleIP:
			ok = t.addresses(v)
		case ctaTupleProto:
			ok = e.ports(t, v)
		case ctaTupleZone:
			e.Zone = be16(v)
		}
		if !ok {
			return errTruncated
		}
	}
	return nil
}

func (t *Tuple) addresses(b []byte) bool {
	for len(b) > 0 {
		kind, v, rest, ok := next(b)
		if !ok {
			return false
		}
		b = rest
		switch {
		case kind == ctaIPv4Src && len(v) == 4:
			t.Source = mappedPrefix
			copy(t.Source[12:], v)
		case kind == ctaIPv4Dst && len(v) == 4:
			t.Dest = mappedPrefix
			copy(t.Dest[12:], v)
		case kind == ctaIPv6Src && len(v) == 16:
			copy(t.Source[:], v)
		case kind == ctaIPv6Dst && len(v) == 16:
			copy(t.Dest[:], v)
		}
	}
	return true
}

func (e *Entry) ports(t *Tuple, b []byte) bool {
	for len(b) > 0 {
		kind, v, rest, ok := next(b)
		if !ok || len(v) == 0 {
			return false
		}
		b = rest
		switch kind {
		case ctaProtoNum:
			e.Protocol = flow.Protocol(v[0])
		case ctaProtoSrcPort:
			t.SourcePort = be16(v)
		case ctaProtoDstPort:
			t.DestPort = be16(v)
		case ctaProtoICMPID, ctaProtoICMPv6ID:
			t.SourcePort = be16(v)
			t.DestPort = t.SourcePort
		case ctaProtoICMPType, ctaProtoICMPv6Type:
			t.ICMPType = v[0]
		case ctaProtoICMPCode, ctaProtoICMPv6Code:
			t.ICMPCode = v[0]
		}
	}
	return true
}

func (e *Entry) protoInfo(b []byte) error {
	kind, v, _, ok := next(b)
	if !ok {
		return errTruncated
	}
	if kind < ctaInfoTCP || kind > ctaInfoSCTP {
		return nil
	}
	if kind, v, _, ok = next(v); !ok {
		return errTruncated
	}
	if kind == ctaState && len(v) == 1 {
		e.State = v[0]
	}
	return nil
}

func (e *Entry) counters(d flow.Direction, b []byte) error {
	e.Counted = true
	return forEachAttribute(b, func(kind uint16, v []byte) {
		switch kind {
		case ctaCounterPackets:
			e.Packets[d] = be64(v)
		case ctaCounterBytes:
			e.Bytes[d] = be64(v)
		}
	})
}

// forEachAttribute calls visit for every attribute of b.
func forEachAttribute(b []byte, visit func(kind uint16, v []byte)) error {
	for len(b) > 0 {
		kind, v, rest, ok := next(b)
		if !ok {
			return errTruncated
		}
		visit(kind, v)
		b = rest
	}
	return nil
}

func be16(v []byte) uint16 {
	if len(v) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(v)
}

func be32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

func be64(v []byte) uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

// StateName returns the protocol's state as conntrack prints it. For protocols without states it returns UNREPLIED,
// REPLIED or ASSURED from the status bits.
func (e *Entry) StateName() string {
	switch {
	case e.Protocol == flow.TCP && int(e.State) < len(tcpStates):
		return tcpStates[e.State]
	case e.Protocol == flow.SCTP && int(e.State) < len(sctpStates):
		return sctpStates[e.State]
	case e.Status&Assured != 0:
		return "ASSURED"
	case e.Status&SeenReply != 0:
		return "REPLIED"
	}
	return "UNREPLIED"
}

// Closing reports whether the connection has ended and only its entry remains. The kernel's garbage collector may
// remove it early if the table is more than 95 % full (nf_ct_can_evict in net/netfilter/nf_conntrack_core.c).
func (e *Entry) Closing() bool {
	if e.Protocol == flow.TCP {
		s := TCPState(e.State)
		return s >= TCPFinWait && s <= TCPClose
	}
	return e.Protocol == flow.SCTP && e.State >= 5 && e.State <= 7
}

// Evictable reports whether the kernel can evict the entry to make room. An entry that is not assured is evicted at
// once (early drop). A closing entry is removed at the garbage collector's next run.
func (e *Entry) Evictable() bool { return e.Status&Assured == 0 || e.Closing() }

// CutOff reports whether Conn.CutOff has closed the entry.
func (e *Entry) CutOff() bool {
	const both = FixedTimeout | DestNAT
	return e.Protocol == flow.TCP && e.Status&both == both
}

// SourceTranslated reports whether the initiator's endpoint is rewritten.
func (e *Entry) SourceTranslated() bool {
	return e.Reply.Dest != e.Original.Source || e.Reply.DestPort != e.Original.SourcePort
}

// DestTranslated reports whether the responder's endpoint is rewritten. A query identifier occupies both ports but
// belongs to the initiator, so only source NAT changes it.
func (e *Entry) DestTranslated() bool {
	return e.Reply.Source != e.Original.Dest ||
		e.Reply.SourcePort != e.Original.DestPort && e.Protocol != flow.ICMP && e.Protocol != flow.ICMPv6
}

// Flow returns the entry as a flow.Flow.
func (e *Entry) Flow() flow.Flow {
	f := flow.Flow{
		Original: e.flowTuple(&e.Original), Reply: e.flowTuple(&e.Reply),
		Replied: e.Status&SeenReply != 0, Assured: e.Status&Assured != 0, Offloaded: e.Status&Offloaded != 0,
		Timeout: time.Duration(e.Timeout) * time.Second,
		Counted: e.Counted, Packets: e.Packets, Bytes: e.Bytes,
		Mark: e.Mark, Zone: e.Zone, Datapath: "kernel",
	}
	if e.Protocol == flow.TCP || e.Protocol == flow.SCTP {
		f.State = e.StateName()
	}
	return f
}

func (e *Entry) flowTuple(t *Tuple) flow.Tuple {
	return flow.Tuple{Protocol: e.Protocol,
		Source: netip.AddrPortFrom(t.Source.Netip(), t.SourcePort),
		Dest:   netip.AddrPortFrom(t.Dest.Netip(), t.DestPort)}
}

// SetFlow fills e from a flow of another table, so that a Summary can count it.
func (e *Entry) SetFlow(f *flow.Flow) {
	*e = Entry{Protocol: f.Original.Protocol, Family: unix.AF_INET6, Counted: f.Counted,
		Original: tupleOf(f.Original), Reply: tupleOf(f.Reply),
		Packets: f.Packets, Bytes: f.Bytes, Mark: f.Mark, Zone: f.Zone,
		Timeout: uint32(f.Timeout / time.Second)}
	if f.Original.Source.Addr().Is4() {
		e.Family = unix.AF_INET
	}
	e.Status = bit(SeenReply, f.Replied) | bit(Assured, f.Assured) | bit(Offloaded, f.Offloaded) |
		bit(SourceNAT, f.SourceTranslated()) | bit(DestNAT, f.DestTranslated())
	e.State = stateNumber(e.Protocol, f.State)
}

func bit(s Status, set bool) Status {
	if set {
		return s
	}
	return 0
}

func tupleOf(t flow.Tuple) Tuple {
	return Tuple{Source: t.Source.Addr().As16(), Dest: t.Dest.Addr().As16(),
		SourcePort: t.Source.Port(), DestPort: t.Dest.Port()}
}

// stateNumber is the inverse of StateName for protocols that have states.
func stateNumber(p flow.Protocol, name string) uint8 {
	names := tcpStates[:]
	switch p {
	case flow.TCP:
	case flow.SCTP:
		names = sctpStates[:]
	default:
		return 0
	}
	for i, n := range names {
		if n == name {
			return uint8(i)
		}
	}
	return 0
}
