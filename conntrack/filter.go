// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// Filter selects entries. Every nonzero field must match.
type Filter struct {
	// Family is unix.AF_INET, unix.AF_INET6, or 0 for both.
	Family uint8
	// Protocol is the transport protocol; flow.Any for all.
	Protocol flow.Protocol
	// Source and Dest match the original tuple, as the initiator sent it.
	Source, Dest netip.Prefix
	// TranslatedSource is the source that the responder sees (the SNAT address). TranslatedDest is the real
	// destination (the backend).
	TranslatedSource, TranslatedDest netip.Prefix
	// SourcePort and DestPort are the initiator's, TranslatedDestPort the responder's; zero matches all.
	SourcePort, DestPort, TranslatedDestPort flow.Ports
	// State is a name as returned by StateName, in any case.
	State string
	// Status bits that must be set among StatusMask; a StatusMask of 0 with a
	// Status that is not 0 means that all bits of Status must be set.
	Status, StatusMask Status
	// Mark among MarkMask; a MarkMask of 0 ignores Mark.
	Mark, MarkMask uint32
	// Zone, when HasZone is true (zone 0 is a zone).
	Zone    uint16
	HasZone bool
	// RemainingAtMost is the upper limit of the remaining time; 0 matches all.
	RemainingAtMost time.Duration
	// Translated matches only entries with SNAT or DNAT.
	Translated bool
}

func (f *Filter) family() uint8 {
	if f == nil {
		return unix.AF_UNSPEC
	}
	if f.Family == unix.AF_UNSPEC {
		for _, p := range []netip.Prefix{f.Source, f.Dest} {
			if p.IsValid() && p.Addr().Unmap().Is4() {
				return unix.AF_INET
			} else if p.IsValid() {
				return unix.AF_INET6
			}
		}
	}
	return f.Family
}

// attributes appends the conditions that the kernel can apply. Kernels before 5.8 ignore CTA_FILTER and kernels
// before 6.8 ignore the zone, so match checks everything again.
func (f *Filter) attributes(b []byte) []byte {
	if f == nil {
		return b
	}
	if f.MarkMask != 0 {
		b = attribute32(b, ctaMark, f.Mark&f.MarkMask) // the kernel compares the whole value
		b = attribute32(b, ctaMarkMask, f.MarkMask)
	}
	if f.Status|f.StatusMask != 0 {
		b = attribute32(b, ctaStatus, uint32(f.Status))
		b = attribute32(b, ctaStatusMask, uint32(f.statusMask()))
	}
	if f.HasZone {
		b = attribute16(b, ctaZone, f.Zone)
	}
	return f.tupleFilter(b)
}

// tupleFilter appends CTA_FILTER with the exact parts of the original tuple. The kernel accepts it for one family
// only. For both families the entries are filtered here, which is cheaper than two dumps. IPv6 addresses are filtered
// here too: the kernel returns exactly the entries that differ (seen on 6.18; ctnetlink_filter_match_tuple uses
// ipv6_addr_cmp in place of ipv6_addr_equal).
func (f *Filter) tupleFilter(b []byte) []byte {
	if f.family() == unix.AF_UNSPEC {
		return b
	}
	flags := uint32(0)
	if f.family() == unix.AF_INET {
		flags = flagIf(filterIPSrc, isSingleAddress(f.Source)) | flagIf(filterIPDst, isSingleAddress(f.Dest))
	}
	if f.Protocol != flow.Any {
		flags |= filterProtoNum
		if f.Protocol.HasPorts() {
			flags |= flagIf(filterSrcPort, f.SourcePort.Len() == 1) | flagIf(filterDstPort, f.DestPort.Len() == 1)
		}
	}
	if flags == 0 {
		return b
	}
	b, outer := openNest(b, ctaFilter)
	b = attribute(b, ctaFilterOrigFlags, host.AppendUint32(nil, flags)...)
	b = attribute(b, ctaFilterReplyFlags, 0, 0, 0, 0)
	b = closeNest(b, outer)
	b, tuple := openNest(b, ctaTupleOrig)
	b = f.tupleAddresses(b, flags)
	if flags&filterProtoNum != 0 {
		var proto int
		b, proto = openNest(b, ctaTupleProto)
		b = attribute(b, ctaProtoNum, byte(f.Protocol))
		if flags&filterSrcPort != 0 {
			b = attribute16(b, ctaProtoSrcPort, f.SourcePort.First)
		}
		if flags&filterDstPort != 0 {
			b = attribute16(b, ctaProtoDstPort, f.DestPort.First)
		}
		b = closeNest(b, proto)
	}
	return closeNest(b, tuple)
}

func (f *Filter) tupleAddresses(b []byte, flags uint32) []byte {
	if flags&(filterIPSrc|filterIPDst) == 0 {
		return b
	}
	b, ip := openNest(b, ctaTupleIP)
	if flags&filterIPSrc != 0 {
		b = attribute(b, ctaIPv4Src, f.Source.Addr().Unmap().AsSlice()...)
	}
	if flags&filterIPDst != 0 {
		b = attribute(b, ctaIPv4Dst, f.Dest.Addr().Unmap().AsSlice()...)
	}
	return closeNest(b, ip)
}

func (f *Filter) statusMask() Status {
	if f.StatusMask == 0 {
		return f.Status
	}
	return f.StatusMask
}

func flagIf(flag uint32, set bool) uint32 {
	if set {
		return flag
	}
	return 0
}

func isSingleAddress(p netip.Prefix) bool { return p.IsValid() && p.IsSingleIP() }

// matcher is a Filter prepared for comparing entries.
type matcher struct {
	Filter
	source, dest, translatedSource, translatedDest prefix
	state                                          string
	remaining                                      uint32
}

// prefix compares the leading bits of an Addr; a zero mask matches all.
type prefix struct{ addr, mask Addr }

func prefixOf(p netip.Prefix) prefix {
	if !p.IsValid() {
		return prefix{}
	}
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	out := prefix{addr: p.Addr().As16()}
	for i := range out.mask {
		switch n := bits - i*8; {
		case n >= 8:
			out.mask[i] = 0xff
		case n > 0:
			out.mask[i] = 0xff << (8 - n)
		}
		out.addr[i] &= out.mask[i]
	}
	return out
}

func (p *prefix) contains(a *Addr) bool {
	for i, m := range p.mask {
		if a[i]&m != p.addr[i] {
			return false
		}
	}
	return true
}

// compile checks and prepares f; a nil matcher matches every entry.
func (f *Filter) compile() (*matcher, error) {
	if f == nil || *f == (Filter{}) {
		return nil, nil
	}
	m := &matcher{Filter: *f, state: strings.ToUpper(f.State)}
	m.Family = f.family() // ::/0 has no bits that exclude IPv4
	m.source, m.dest = prefixOf(f.Source), prefixOf(f.Dest)
	m.translatedSource, m.translatedDest = prefixOf(f.TranslatedSource), prefixOf(f.TranslatedDest)
	m.remaining = uint32((f.RemainingAtMost + time.Second - 1) / time.Second)
	if err := CheckState(f.State); err != nil {
		return nil, err
	}
	if f.Family != 0 && f.family() != unix.AF_INET && f.family() != unix.AF_INET6 {
		return nil, fmt.Errorf("address family %d: neither IPv4 (%d) nor IPv6 (%d)", f.Family, unix.AF_INET, unix.AF_INET6)
	}
	return m, nil
}

// CheckState returns an error for a name that is not a connection state, in any case; "" is valid.
func CheckState(name string) error {
	upper := strings.ToUpper(name)
	for _, list := range [][]string{tcpStates[:], sctpStates[:], {"", "UNREPLIED", "REPLIED", "ASSURED"}} {
		if slices.Contains(list, upper) {
			return nil
		}
	}
	return fmt.Errorf("state %q: not a state of a connection; TCP has %s; other protocols have UNREPLIED, REPLIED, ASSURED",
		name, strings.Join(tcpStates[1:9], ", "))
}

func (m *matcher) match(e *Entry) bool {
	switch {
	case m.Protocol != flow.Any && e.Protocol != m.Protocol,
		m.Family != 0 && e.Family != m.Family,
		m.Status|m.StatusMask != 0 && e.Status&m.statusMask() != m.Status,
		m.MarkMask != 0 && e.Mark&m.MarkMask != m.Mark&m.MarkMask,
		m.HasZone && e.Zone != m.Zone,
		!m.SourcePort.Contains(e.Original.SourcePort),
		!m.TranslatedDestPort.Contains(e.Reply.SourcePort),
		!m.DestPort.Contains(e.Original.DestPort),
		m.remaining != 0 && e.Timeout > m.remaining,
		m.Translated && !e.SourceTranslated() && !e.DestTranslated(),
		!m.source.contains(&e.Original.Source),
		!m.dest.contains(&e.Original.Dest),
		!m.translatedSource.contains(&e.Reply.Dest),
		!m.translatedDest.contains(&e.Reply.Source):
		return false
	}
	return m.state == "" || m.hasState(e)
}

// hasState compares by name. So UNREPLIED also finds TCP entries without a reply, and ASSURED finds entries that the
// kernel does not evict.
func (m *matcher) hasState(e *Entry) bool {
	switch m.state {
	case "UNREPLIED":
		return e.Status&SeenReply == 0
	case "REPLIED":
		return e.Status&SeenReply != 0
	case "ASSURED":
		return e.Status&Assured != 0
	}
	return e.StateName() == m.state
}

// Matches reports whether e matches f, without the kernel's help. It is for single entries; Dump compiles the filter
// once.
func (f *Filter) Matches(e *Entry) bool {
	m, err := f.compile()
	return err == nil && (m == nil || m.match(e))
}
