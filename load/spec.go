// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// Range is a sequence of consecutive addresses with a range of ports each.
type Range struct {
	First netip.Addr `json:"first"`
	// Count of addresses; 0 means 1. The addresses differ in their last 32 bits only.
	Count int `json:"count"`
	// Ports of each address; for ICMP the source ports are identifiers. The zero value means the single port 0.
	Ports flow.Ports `json:"ports"`
}

// ParseRange reads "192.0.2.1", "192.0.2.1:80", "192.0.2.0/24:1024-65535",
// "192.0.2.1+1000:80" (1000 addresses from there) or the same with IPv6
// addresses in brackets, "[2001:db8::1]:80".
func ParseRange(s string) (Range, error) {
	host, ports := s, ""
	if strings.HasPrefix(s, "[") {
		inner, rest, ok := strings.Cut(s[1:], "]")
		if !ok {
			return Range{}, fmt.Errorf("address range %q: no closing bracket", s)
		}
		tail, p, given := strings.Cut(rest, ":")
		if tail != "" && tail[0] != '/' && tail[0] != '+' || given && p == "" {
			return Range{}, fmt.Errorf("address range %q: behind the bracket: want /BITS or +COUNT, and :PORTS", s)
		}
		host, ports = inner+tail, p
	} else if i := strings.LastIndexByte(s, ':'); i >= 0 && strings.Count(s, ":") == 1 {
		if host, ports = s[:i], s[i+1:]; ports == "" {
			return Range{}, fmt.Errorf("address range %q: no port behind the colon", s)
		}
	}
	r := Range{Count: 1}
	var err error
	if ports != "" {
		if r.Ports, err = flow.ParsePorts(ports); err != nil {
			return Range{}, fmt.Errorf("address range %q: %w", s, err)
		}
	}
	if addr, n, ok := strings.Cut(host, "+"); ok {
		host = addr
		count, err := strconv.ParseUint(n, 10, 32)
		if err != nil || count < 1 {
			return Range{}, fmt.Errorf("address range %q: %q is not a number of addresses", s, n)
		}
		r.Count = int(count)
	}
	if p, err := netip.ParsePrefix(host); err == nil {
		if r.Count != 1 {
			return Range{}, fmt.Errorf("address range %q: a CIDR has its number of addresses; write FIRST+COUNT", s)
		}
		if bits := p.Addr().BitLen() - p.Bits(); bits > 24 {
			return Range{}, fmt.Errorf("address range %q: more than 2^24 addresses; write FIRST+COUNT", s)
		} else {
			r.Count = 1 << bits
		}
		r.First = p.Masked().Addr()
		return r, nil
	}
	if r.First, err = netip.ParseAddr(host); err != nil {
		return Range{}, fmt.Errorf("address range %q: %w", s, err)
	}
	return r, r.check()
}

// check returns an error for ranges that a program cannot count through.
func (r Range) check() error {
	if r.Count < 0 || uint64(lastWord(r.First))+uint64(r.addresses()) > 1<<32 {
		return fmt.Errorf("address range %s: %d addresses from there go beyond the last 32 bits", r, r.Count)
	}
	return nil
}

// String renders the range as ParseRange reads it.
func (r Range) String() string {
	s := r.First.String()
	if r.First.Is6() {
		s = "[" + s + "]"
	}
	if r.Count > 1 {
		s += fmt.Sprintf("+%d", r.Count)
	}
	if r.Ports != (flow.Ports{}) {
		s += ":" + r.Ports.String()
	}
	return s
}

func (r Range) addresses() uint32 { return uint32(max(r.Count, 1)) }

func (r Range) ports() uint32 {
	if r.Ports == (flow.Ports{}) {
		return 1
	}
	return uint32(r.Ports.Len())
}

// At returns the n-th endpoint of the range: consecutive numbers differ in the port first.
func (r Range) At(n int) netip.AddrPort {
	ports := int(r.ports())
	return netip.AddrPortFrom(addAddr(r.First, uint32(n/ports)), r.Ports.First+uint16(n%ports))
}

// lastWord returns the last 32 bits of an address.
func lastWord(a netip.Addr) uint32 {
	b := a.AsSlice()
	b = b[len(b)-4:]
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

// addAddr adds n to the last 32 bits of an address.
func addAddr(a netip.Addr, n uint32) netip.Addr {
	b := a.AsSlice()
	low := lastWord(a) + n
	t := b[len(b)-4:]
	t[0], t[1], t[2], t[3] = byte(low>>24), byte(low>>16), byte(low>>8), byte(low)
	out, _ := netip.AddrFromSlice(b)
	return out
}

// PacketSpec configures the packets. The zero value of a field is its default.
type PacketSpec struct {
	// Source and Dest ranges. Consecutive packets use consecutive combinations of source and destination.
	Source Range `json:"source"`
	Dest   Range `json:"dest"`
	// Flows is the number of distinct tuples; 0 means the whole product.
	Flows int `json:"flows"`
	// Skip is the first tuple, counted from 0.
	Skip int `json:"skip,omitempty"`
	// Shuffled uses the tuples in an order that is far from the order in memory. It defeats the processor's
	// prefetching of table entries.
	Shuffled bool `json:"shuffled,omitempty"`
	// Protocol is UDP (default), TCP, ICMP or ICMPv6 (echo requests).
	Protocol flow.Protocol `json:"protocol"`
	// Size of a frame in bytes without FCS; 0 means 60, or the size of the headers if that is larger.
	Size int `json:"size"`
	// Flags of TCP, as "syn", "syn,ack"; empty means "ack".
	Flags string `json:"flags,omitempty"`
	// TTL or hop limit; 0 means 64.
	TTL int `json:"ttl,omitempty"`
	// Fragments is the number of fragments per datagram; 0 and 1 mean unfragmented. Size then applies to one
	// fragment.
	Fragments int `json:"fragments,omitempty"`
	// Stamp puts a sequence number and the time into the payload.
	Stamp bool `json:"stamp,omitempty"`
	// Rate in packets per second over all CPUs, open-loop; 0 means unlimited.
	Rate float64 `json:"rate,omitempty"`
	// Limit is the number of packets to send over all CPUs; 0 means until stopped.
	Limit uint64 `json:"limit,omitempty"`
	// Interface that sends, and the hardware addresses of the frames.
	Interface string           `json:"interface"`
	SourceMAC net.HardwareAddr `json:"-"`
	DestMAC   net.HardwareAddr `json:"-"`
}

// tuples returns the size of the product of both ranges, at most maxFlows.
func (s PacketSpec) tuples() uint64 {
	factors := []uint32{s.Source.addresses(), s.Dest.addresses(), s.Source.ports()}
	if s.hasPorts() {
		factors = append(factors, s.Dest.ports())
	}
	n := uint64(1)
	for _, f := range factors {
		n = min(n*uint64(f), maxFlows)
	}
	return n
}

// maxFlows is the limit of the sender's 32-bit arithmetic.
const maxFlows = 1<<31 - 1

func (s PacketSpec) hasPorts() bool { return s.Protocol == flow.UDP || s.Protocol == flow.TCP }

// maxFragments is the number of values of a fragment's 13-bit offset (RFC 791).
const maxFragments = 1 << 13

// Validate returns an error if the spec is impossible on any interface.
func (s PacketSpec) Validate() error {
	if err := s.normalize(); err != nil {
		return err
	}
	_, err := newTemplate(&s)
	return err
}

// normalize fills in defaults and reports the first invalid field.
func (s *PacketSpec) normalize() error {
	if s.Protocol == flow.Any {
		s.Protocol = flow.UDP
	}
	v6 := s.Source.First.Is6()
	switch {
	case !s.Source.First.IsValid() || !s.Dest.First.IsValid():
		return fmt.Errorf("packets: a source and a destination address are needed")
	case v6 != s.Dest.First.Is6():
		return fmt.Errorf("packets: source %s and destination %s are of different families", s.Source.First, s.Dest.First)
	case s.Protocol == flow.ICMP && v6, s.Protocol == flow.ICMPv6 && !v6:
		return fmt.Errorf("packets: %s does not go with address %s", s.Protocol, s.Dest.First)
	case s.Protocol != flow.ICMP && s.Protocol != flow.ICMPv6 && !s.hasPorts():
		return fmt.Errorf("packets: protocol %s: the sender knows udp, tcp, icmp and icmpv6", s.Protocol)
	case s.Fragments > 1 && s.Protocol == flow.TCP:
		return fmt.Errorf("packets: fragments are sent of udp and icmp datagrams only")
	case s.Fragments > 1 && s.Stamp:
		return fmt.Errorf("packets: stamps are read from whole datagrams only, not from fragments")
	case s.Fragments < 0 || s.Fragments > maxFragments:
		return fmt.Errorf("packets: %d fragments: from 1 to %d", s.Fragments, maxFragments)
	case s.Flags != "" && s.Protocol != flow.TCP:
		return fmt.Errorf("packets: tcp flags %s: the protocol is %s", s.Flags, s.Protocol)
	case !s.hasPorts() && s.Dest.Ports != (flow.Ports{}):
		return fmt.Errorf("packets: destination %s: %s has no destination ports", s.Dest, s.Protocol)
	case s.TTL < 0 || s.TTL > 255:
		return fmt.Errorf("packets: TTL %d: from 1 to 255", s.TTL)
	}
	if err := errors.Join(s.Source.check(), s.Dest.check(), checkRate(s.Rate)); err != nil {
		return fmt.Errorf("packets: %w", err)
	}
	if s.TTL == 0 {
		s.TTL = 64
	}
	all := s.tuples()
	if s.Flows == 0 {
		s.Flows = int(all)
	}
	if s.Flows < 0 || uint64(s.Flows) > all {
		return fmt.Errorf("packets: %d flows asked for, the ranges hold %d tuples", s.Flows, all)
	}
	if s.Skip < 0 || s.Skip >= s.Flows {
		return fmt.Errorf("packets: begin with tuple %d of %d", s.Skip, s.Flows)
	}
	return nil
}
