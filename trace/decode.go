// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// headerTuple reads addresses and ports from an IP header; the result is invalid
// when there is none.
func headerTuple(b []byte) flow.Tuple {
	var src, dst netip.Addr
	var protocol flow.Protocol
	var l4 []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		src, _ = netip.AddrFromSlice(b[12:16])
		dst, _ = netip.AddrFromSlice(b[16:20])
		protocol = flow.Protocol(b[9])
		fragment := binary.BigEndian.Uint16(b[6:]) & 0x1fff
		if n := int(b[0]&0xf) * 4; fragment == 0 && n >= 20 && n <= len(b) {
			l4 = b[n:]
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		src, _ = netip.AddrFromSlice(b[8:24])
		dst, _ = netip.AddrFromSlice(b[24:40])
		protocol = flow.Protocol(b[6])
		l4 = b[40:]
	default:
		return flow.Tuple{}
	}
	var sport, dport uint16
	switch {
	case protocol.HasPorts() && len(l4) >= 4:
		sport, dport = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	case (protocol == flow.ICMP || protocol == flow.ICMPv6) && len(l4) >= 8 && isEcho(protocol, l4[0]):
		sport = binary.BigEndian.Uint16(l4[4:])
		dport = sport
	}
	return flow.Tuple{Protocol: protocol, Source: netip.AddrPortFrom(src, sport), Dest: netip.AddrPortFrom(dst, dport)}
}

// isEcho reports whether an ICMP type carries an identifier.
func isEcho(p flow.Protocol, kind byte) bool {
	if p == flow.ICMP {
		return kind == 0 || kind == 8
	}
	return kind == 128 || kind == 129
}

// wireTuple converts one direction of a tracked flow.
func wireTuple(t *dropsDropTuple) flow.Tuple {
	n := 16
	switch t.Family {
	case unix.AF_INET:
		n = 4
	case unix.AF_INET6:
	default:
		return flow.Tuple{}
	}
	src, _ := netip.AddrFromSlice(t.Src[:n])
	dst, _ := netip.AddrFromSlice(t.Dst[:n])
	out := flow.Tuple{Protocol: flow.Protocol(t.L4Proto)}
	sport, dport := networkOrder(t.SrcPort), networkOrder(t.DstPort)
	if out.Protocol == flow.ICMP || out.Protocol == flow.ICMPv6 {
		dport = sport // the other holds type and code
	}
	out.Source, out.Dest = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return out
}

// networkOrder decodes a number in network byte order.
func networkOrder(v uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], v)
	return binary.BigEndian.Uint16(b[:])
}

// cString reads a string that ends at the first zero.
func cString(b []int8) string {
	var s strings.Builder
	for _, c := range b {
		if c == 0 {
			break
		}
		s.WriteByte(byte(c))
	}
	return s.String()
}

// KernelVersion returns the first two numbers of the running kernel's release, or 0, 0 if unknown.
func KernelVersion() (major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return 0, 0
	}
	release := unix.ByteSliceToString(u.Release[:])
	parts := strings.FieldsFunc(release, func(r rune) bool { return r < '0' || r > '9' })
	if len(parts) < 2 {
		return 0, 0
	}
	major, _ = strconv.Atoi(parts[0])
	minor, _ = strconv.Atoi(parts[1])
	return major, minor
}
