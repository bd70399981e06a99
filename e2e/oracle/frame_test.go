// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/packet"
)

// parsed is a frame that was parsed from its line of text.
type parsed struct {
	link  string
	p     packet.Packet
	at    []int // indexes of the IP headers in p: the outer header, then the header of a quoted packet
	error *packet.ICMP
}

// parse reads a line. It returns false if the line is not a frame.
func parse(line string) (f parsed, ok bool) {
	var text string
	f.link, text, _ = strings.Cut(line, " ")
	text, _, _ = strings.Cut(text, " WRONG")
	p, err := packet.Text(text)
	if err != nil || len(p) < 2 {
		return f, false
	}
	f.p = p
	for i, l := range p {
		switch l := l.(type) {
		case *packet.IPv4, *packet.IPv6:
			f.at = append(f.at, i)
		case *packet.ICMP:
			if l.IsError() && f.error == nil {
				f.error = l
			}
		}
	}
	return f, true
}

// ends returns the addresses of the nth IP header.
func (f parsed) ends(n int) (src, dst netip.Addr) {
	if n >= len(f.at) {
		return src, dst
	}
	switch ip := f.p[f.at[n]].(type) {
	case *packet.IPv4:
		return ip.Src, ip.Dst
	case *packet.IPv6:
		return ip.Src, ip.Dst
	}
	return src, dst
}

// without returns the text of a frame with the source, the destination or both of the nth IP header set to zero, and the
// corresponding ports. Exceptions compare such texts.
func (f parsed) without(n int, source, dest bool) string {
	q, err := packet.Text(f.p.String())
	if err != nil || n >= len(f.at) {
		return ""
	}
	none4, none6 := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	last := len(q)
	if n+1 < len(f.at) {
		last = f.at[n+1]
	}
	for _, l := range q[f.at[n]:last] {
		switch l := l.(type) {
		case *packet.IPv4:
			if source {
				l.Src = none4
			}
			if dest {
				l.Dst = none4
			}
			l.Checksum = packet.Forced{}
		case *packet.IPv6:
			if source {
				l.Src = none6
			}
			if dest {
				l.Dst = none6
			}
		case *packet.TCP:
			blank(&l.SrcPort, &l.DstPort, source, dest)
			l.Checksum = packet.Forced{}
		case *packet.UDP:
			blank(&l.SrcPort, &l.DstPort, source, dest)
			l.Checksum = packet.Forced{}
		case *packet.ICMP:
			if l.IsQuery() {
				l.Rest &= 0xffff
			}
			l.Checksum = packet.Forced{}
		}
	}
	return f.link + " " + q.String()
}

func blank(sport, dport *uint16, source, dest bool) {
	if source {
		*sport = 0
	}
	if dest {
		*dport = 0
	}
}

// asksFor is the address that a frame asks for; false when it asks for none.
func (f parsed) asksFor() (netip.Addr, bool) {
	if !asks(f.p) {
		return netip.Addr{}, false
	}
	if a, ok := packet.Find[*packet.ARP](f.p); ok {
		return a.Target, true
	}
	d, ok := packet.Find[*packet.Data](f.p)
	if !ok || len(d.Bytes) < 16 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte(d.Bytes[:16])), true
}

// filter returns the lines of frames that a condition holds for.
func filter(lines []string, holds func(string, parsed) bool) (kept []string) {
	for _, l := range lines {
		if f, ok := parse(l); ok && holds(l, f) {
			kept = append(kept, l)
		}
	}
	return kept
}

// anyWay writes a frame without its source, its hardware addresses and the link. The kernel quotes a packet that is
// too big, or has an unresolved next hop, with the hop limit before or after its decrement.
func (f parsed) anyWay() string {
	f, ok := parse(f.without(0, true, false))
	if !ok {
		return ""
	}
	if len(f.at) > 1 && f.error != nil && (tooBig(f.p) ||
		f.error.V6 && f.error.Type == 1 && f.error.Code == 3 || !f.error.V6 && f.error.Type == 3 && f.error.Code == 1) {
		switch ip := f.p[f.at[1]].(type) {
		case *packet.IPv4:
			ip.TTL = 0
		case *packet.IPv6:
			ip.HopLimit = 0
		}
	}
	return f.p[1:].String()
}

// toAnybody writes a frame without the hardware address of its destination.
func (f parsed) toAnybody() string {
	q, err := packet.Text(f.p.String())
	if err != nil {
		return ""
	}
	if eth, ok := packet.Find[*packet.Ethernet](q); ok {
		eth.Dst = packet.MAC{}
	}
	return f.link + " " + q.String()
}
