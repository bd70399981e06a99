// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-lb/sluice/flow"
)

// DropSample describes one dropped packet.
type DropSample struct {
	DropCount
	Time      time.Duration `json:"-"`      // Since boot, without suspend (CLOCK_MONOTONIC).
	Length    int           `json:"length"` // of the packet in bytes, as the kernel held it
	Mark      uint32        `json:"mark,omitempty"`
	Interface string        `json:"interface,omitempty"`
	InIfIndex uint32        `json:"in_ifindex,omitempty"` // Input interface; 0 for packets of this host.
	Packet    flow.Tuple    `json:"packet,omitzero"`      // as the header says; invalid when not IP
	Original  flow.Tuple    `json:"original,omitzero"`    // Before NAT; invalid when not tracked.
	Reply     flow.Tuple    `json:"reply,omitzero"`       // Tuple of the reply packets.
	Stack     []Symbol      `json:"stack,omitempty"`      // Callers of the place, innermost first.
	Data      []byte        `json:"data,omitempty"`       // The packet's first bytes.
	Blamed    []string      `json:"-"`                    // Rules that may have dropped it, by firewall.Rule.ID.
	L3Offset  int           `json:"l3_offset"`            // Where the IP header starts in Data; 14 after an Ethernet header, else 0.

	whole int // length of the packet from where Data begins
}

// transport is what follows the IP header of a first fragment, with its protocol.
func (s *DropSample) transport() (flow.Protocol, []byte) {
	if len(s.Data) <= s.L3Offset {
		return 0, nil
	}
	b := s.Data[s.L3Offset:]
	switch {
	case len(b) >= 20 && b[0]>>4 == 4 && binary.BigEndian.Uint16(b[6:])&0x1fff == 0:
		return flow.Protocol(b[9]), b[min(int(b[0]&0xf)*4, len(b)):]
	case len(b) >= 40 && b[0]>>4 == 6:
		return flow.Protocol(b[6]), b[40:]
	}
	return 0, nil
}

// TCPFlags returns the flags of a TCP segment (RFC 9293 §3.1).
func (s *DropSample) TCPFlags() (flags byte, there bool) {
	if protocol, b := s.transport(); protocol == flow.TCP && len(b) >= 14 {
		return b[13], true
	}
	return 0, false
}

// ICMP is the type and code of an ICMP or ICMPv6 message.
func (s *DropSample) ICMP() (kind, code byte, there bool) {
	if protocol, b := s.transport(); (protocol == flow.ICMP || protocol == flow.ICMPv6) && len(b) >= 2 {
		return b[0], b[1], true
	}
	return 0, 0, false
}

// TooBig reports whether the packet is an ICMP error that carries the path MTU.
func (s *DropSample) TooBig() bool {
	kind, code, there := s.ICMP()
	if protocol, _ := s.transport(); protocol == flow.ICMPv6 {
		return there && kind == 2
	}
	return there && kind == 3 && code == 4
}

// Error reports whether the packet is an ICMP error.
func (s *DropSample) Error() bool {
	kind, _, there := s.ICMP()
	if protocol, _ := s.transport(); protocol == flow.ICMPv6 {
		return there && kind < 128
	}
	return there && (kind == 3 || kind == 11 || kind == 12)
}

// Bridged reports whether a frame was dropped while being bridged. A packet that a bridge receives for the host itself
// has functions of the bridge further out on its stack.
func (s *DropSample) Bridged() bool {
	is := func(name string, prefixes ...string) bool {
		return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	}
	for _, f := range s.Stack {
		switch {
		case is(f.Name, "br_nf_", "br_forward"):
			return true
		case is(f.Name, "br_pass_frame_up", "__netif_receive_skb", "netif_receive_skb", "ip_rcv", "ip_forward", "ip_local_deliver", "ip6_forward", "ip6_input", "ipv6_rcv"):
			return false
		}
	}
	return false
}

// Samples calls visit for every sampled packet until ctx ends.
func (d *Drops) Samples(ctx context.Context, visit func(*DropSample)) error {
	if d.ring == nil {
		<-ctx.Done()
		return nil
	}
	stop := context.AfterFunc(ctx, func() { _ = d.ring.Flush() }) // samples already in the ring are still read
	defer stop()
	var record ringbuf.Record
	for {
		err := d.ring.ReadInto(&record)
		switch {
		case errors.Is(err, ringbuf.ErrFlushed) || errors.Is(err, ringbuf.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("drops: read samples: %w", err)
		}
		if len(record.RawSample) < int(unsafe.Sizeof(dropsDropSample{})) {
			continue
		}
		raw := (*dropsDropSample)(unsafe.Pointer(&record.RawSample[0]))
		visit(d.sample(raw))
	}
}

// sample converts a record of the probe.
func (d *Drops) sample(raw *dropsDropSample) *DropSample {
	s := &DropSample{
		DropCount: d.describe(raw.Key),
		Time:      time.Duration(raw.TimeNs),
		Length:    int(raw.Len), Mark: raw.Mark, InIfIndex: raw.InIfindex,
		Interface: cString(raw.Ifname[:]),
		Data:      append([]byte(nil), raw.Data[:min(int(raw.DataLen), len(raw.Data))]...),
		L3Offset:  int(raw.L3Offset),
		whole:     int(raw.FrameLen),
	}
	s.Packets, s.Bytes = 1, uint64(raw.Len)
	if s.EthType == EtherARP { // has no route, from which the probe derives the hook
		s.Hook = HookOutput
		if s.InIfIndex != 0 {
			s.Hook = HookInput
		}
	}
	if len(s.Data) > s.L3Offset {
		s.Packet = headerTuple(s.Data[s.L3Offset:])
	}
	if s.Tracked == TrackedNew || s.Tracked == TrackedConfirmed {
		s.Original = wireTuple(&raw.Orig)
		s.Reply = wireTuple(&raw.Reply)
	}
	for _, address := range raw.Stack[:min(int(raw.StackBytes)/8, len(raw.Stack))] {
		s.Stack = append(s.Stack, d.symbols.Find(address))
	}
	s.Stack = callers(s.Stack, s.Location)
	return s
}

// callers removes the tracer's own frames from a stack, so that the stack starts with the function
// that dropped.
func callers(stack []Symbol, location Symbol) []Symbol {
	for i, s := range stack {
		if s == location {
			return stack[i:]
		}
	}
	for i, s := range stack {
		if s.Name == location.Name {
			return stack[i:]
		}
	}
	return stack
}
