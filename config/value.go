// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration written as "500ms", "5m" or "2h4m".
type Duration time.Duration

// D returns d as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// String returns the shortest form that parses back: "5m" rather than "5m0s".
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("duration %q: write a number with a unit, for example 500ms, 5m or 2h4m", b)
	}
	*d = Duration(v)
	return nil
}

// Rate is a number of events per unit of time; the zero value means no limit.
type Rate struct {
	Count int
	Per   time.Duration // time.Second, time.Minute, time.Hour or 24 hours
}

var rateUnits = map[string]time.Duration{
	"s": time.Second, "sec": time.Second, "second": time.Second,
	"m": time.Minute, "min": time.Minute, "minute": time.Minute,
	"h": time.Hour, "hour": time.Hour, "d": 24 * time.Hour, "day": 24 * time.Hour,
}

// IsZero reports whether r sets no limit.
func (r Rate) IsZero() bool { return r.Count == 0 }

// PerSecond returns the rate in events per second.
func (r Rate) PerSecond() float64 {
	if r.Per == 0 {
		return 0
	}
	return float64(r.Count) / r.Per.Seconds()
}

// String returns "1000/second".
func (r Rate) String() string {
	if r.IsZero() {
		return ""
	}
	unit := map[time.Duration]string{time.Second: "second", time.Minute: "minute", time.Hour: "hour", 24 * time.Hour: "day"}[r.Per]
	return fmt.Sprintf("%d/%s", r.Count, unit)
}

// MarshalText implements encoding.TextMarshaler.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rate) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*r = Rate{}
		return nil
	}
	num, unit, ok := strings.Cut(string(b), "/")
	n, err := strconv.Atoi(strings.TrimSpace(num))
	per, known := rateUnits[strings.TrimSpace(unit)]
	if !ok || err != nil || n <= 0 || !known {
		return fmt.Errorf("rate %q: write a positive number and a unit, for example 1000/s or 6/minute", b)
	}
	*r = Rate{Count: n, Per: per}
	return nil
}

// TrafficClass is the octet of translated packets; the zero value copies the packet's.
type TrafficClass struct {
	Fixed bool
	Octet uint8
}

// String returns "copy" or the octet.
func (c TrafficClass) String() string {
	if !c.Fixed {
		return "copy"
	}
	return strconv.Itoa(int(c.Octet))
}

// MarshalText implements encoding.TextMarshaler.
func (c TrafficClass) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (c *TrafficClass) UnmarshalText(b []byte) error {
	if len(b) == 0 || string(b) == "copy" {
		*c = TrafficClass{}
		return nil
	}
	n, err := strconv.ParseUint(string(b), 0, 8)
	if err != nil {
		return fmt.Errorf("traffic class %q: write copy, or a number from 0 to 255", b)
	}
	*c = TrafficClass{Fixed: true, Octet: uint8(n)}
	return nil
}

// AddressRange is an address, a range "10.0.2.100-10.0.2.103" or a prefix, as
// first and last address inclusive.
type AddressRange struct {
	First, Last netip.Addr
}

// Contains reports whether a lies in the range.
func (r AddressRange) Contains(a netip.Addr) bool {
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// Is4 reports whether the range is one of IPv4 addresses.
func (r AddressRange) Is4() bool { return r.First.Is4() }

// String returns the shortest form that parses back.
func (r AddressRange) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	if p, ok := r.prefix(); ok {
		return p.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

func (r AddressRange) prefix() (netip.Prefix, bool) {
	for bits := r.First.BitLen(); bits >= 0; bits-- {
		p := netip.PrefixFrom(r.First, bits)
		if p.Masked().Addr() != r.First {
			break
		}
		if lastAddr(p) == r.Last {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// rangeOf returns the addresses of p; the zero value, which overlaps nothing, when
// p is not valid.
func rangeOf(p netip.Prefix) AddressRange {
	if !p.IsValid() {
		return AddressRange{}
	}
	p = p.Masked()
	return AddressRange{p.Addr(), lastAddr(p)}
}

// lastAddr returns the highest address of p, which must be valid.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// MarshalText implements encoding.TextMarshaler.
func (r AddressRange) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *AddressRange) UnmarshalText(b []byte) error {
	s := string(b)
	if p, err := netip.ParsePrefix(s); err == nil {
		*r = rangeOf(p)
		return nil
	}
	lo, hi, ranged := strings.Cut(s, "-")
	first, err := netip.ParseAddr(strings.TrimSpace(lo))
	if err != nil {
		return fmt.Errorf("%q: not an address, a range (10.0.0.1-10.0.0.9) or a prefix", s)
	}
	last := first
	if ranged {
		if last, err = netip.ParseAddr(strings.TrimSpace(hi)); err != nil {
			return fmt.Errorf("range %q: %q is not an address", s, hi)
		}
	}
	if first.BitLen() != last.BitLen() {
		return fmt.Errorf("range %q: its ends are of two families", s)
	}
	if last.Less(first) {
		return fmt.Errorf("range %q is reversed: write %s-%s", s, last, first)
	}
	*r = AddressRange{first, last}
	return nil
}

// MAC is a 48-bit hardware address; the zero value means none.
type MAC [6]byte

// String returns "02:00:00:00:00:01", or "" for the zero value.
func (m MAC) String() string {
	if m == (MAC{}) {
		return ""
	}
	return net.HardwareAddr(m[:]).String()
}

// MarshalText implements encoding.TextMarshaler.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *MAC) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*m = MAC{}
		return nil
	}
	hw, err := net.ParseMAC(string(b))
	if err != nil || len(hw) != 6 {
		return fmt.Errorf("mac %q: write six hexadecimal bytes, for example 02:00:00:00:00:01", b)
	}
	copy(m[:], hw)
	return nil
}

// Match is a condition on an address: a named set, or one prefix.
type Match struct {
	Set    string // name without the "@"; valid when not empty
	Prefix netip.Prefix
}

// IsZero reports whether m matches everything.
func (m Match) IsZero() bool { return m == Match{} }

// String returns "@name" or the prefix.
func (m Match) String() string {
	switch {
	case m.Set != "":
		return "@" + m.Set
	case m.Prefix.IsValid():
		return m.Prefix.String()
	}
	return ""
}

// MarshalText implements encoding.TextMarshaler.
func (m Match) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *Match) UnmarshalText(b []byte) error {
	s := string(b)
	if s == "" {
		*m = Match{}
		return nil
	}
	if name, ok := strings.CutPrefix(s, "@"); ok && name != "" {
		*m = Match{Set: name}
		return nil
	}
	p, err := parsePrefix(s)
	if err != nil {
		return fmt.Errorf("%q: not a set (@name), a prefix or an address", s)
	}
	*m = Match{Prefix: p}
	return nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" { // a prefix has no zone
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}
