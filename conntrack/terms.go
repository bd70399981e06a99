// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// FilterTerms are the names that [Filter.Set] accepts.
var FilterTerms = []string{"proto", "src", "dst", "nat-src", "nat-dst", "sport", "port", "mark", "state", "zone"}

// Set sets one condition from its text. An error describes the text and not the term.
//
//   - proto: a protocol's name or number;
//   - src, dst: an address or prefix of the original tuple;
//   - nat-src, nat-dst: an address or prefix that the responder sees as source, or has itself;
//   - sport, port: a port or a range of the original tuple;
//   - mark: MARK or MARK/MASK;
//   - state: see [CheckState];
//   - zone: a number from 0 to 65535.
func (f *Filter) Set(term, text string) (err error) {
	switch term {
	case "proto":
		f.Protocol, err = flow.ParseProtocol(text)
	case "src":
		f.Source, err = parsePrefix(text)
	case "dst":
		f.Dest, err = parsePrefix(text)
	case "nat-src":
		f.TranslatedSource, err = parsePrefix(text)
	case "nat-dst":
		f.TranslatedDest, err = parsePrefix(text)
	case "sport":
		f.SourcePort, err = flow.ParsePorts(text)
	case "port":
		f.DestPort, err = flow.ParsePorts(text)
	case "mark":
		f.Mark, f.MarkMask, err = parseMark(text)
	case "state":
		f.State, err = text, CheckState(text)
	case "zone":
		zone, bad := strconv.ParseUint(text, 10, 16)
		if bad != nil {
			return fmt.Errorf("%s: not a number from 0 to 65535", text)
		}
		f.Zone, f.HasZone = uint16(zone), true
	default:
		return fmt.Errorf("%q: not one of %s", term, strings.Join(FilterTerms, ", "))
	}
	return err
}

// parsePrefix reads a prefix or a single address.
func parsePrefix(s string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("%q: neither an address nor a prefix such as 192.0.2.0/24", s)
	}
	return p.Masked(), nil
}

// parseMark reads MARK or MARK/MASK.
func parseMark(s string) (mark, mask uint32, err error) {
	m, k, masked := strings.Cut(s, "/")
	v, err := strconv.ParseUint(m, 0, 32)
	if err != nil {
		return 0, 0, fmt.Errorf("%q: not a number", m)
	}
	if !masked {
		return uint32(v), 0xffffffff, nil
	}
	bits, err := strconv.ParseUint(k, 0, 32)
	if err != nil {
		return 0, 0, fmt.Errorf("mask %q: not a number", k)
	}
	if bits == 0 {
		return 0, 0, fmt.Errorf("%q: every mark fits mask 0", s)
	}
	return uint32(v), uint32(bits), nil
}
