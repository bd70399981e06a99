// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Bytes is an amount of memory or data in bytes, written "512MiB", "2GB" or "1500".
type Bytes uint64

// Binary units.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
)

// BitRate is a rate in bit/s, written "100Mbit", "10Gbit" or "64000".
type BitRate uint64

// unit is a suffix and its factor.
type unit struct {
	suffix string
	factor float64
}

var byteUnits = []unit{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1}, {"", 1},
}

var rateUnits = []unit{
	{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {"bit", 1},
	{"k", 1e3}, {"m", 1e6}, {"g", 1e9}, {"t", 1e12}, {"", 1},
}

// ParseBytes reads "512MiB", "512M" (binary), "2GB" (decimal) or plain bytes.
func ParseBytes(s string) (Bytes, error) {
	v, err := parse(s, byteUnits)
	if err != nil {
		return 0, fmt.Errorf("size %q: not a number with a unit such as 512MiB, 2GB or 1500", s)
	}
	return Bytes(v), nil
}

// ParseBitRate reads "100Mbit", "10G" or plain bits a second; "/s" and "ps" may follow.
func ParseBitRate(s string) (BitRate, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	text = strings.TrimSuffix(text, "/s")
	if bits, ok := strings.CutSuffix(text, "bps"); ok {
		text = bits + "bit"
	}
	v, err := parse(text, rateUnits)
	if err != nil {
		return 0, fmt.Errorf("bandwidth %q: not a number with a unit such as 100Mbit or 10Gbit", s)
	}
	return BitRate(v), nil
}

func parse(s string, units []unit) (float64, error) {
	s = strings.ToLower(strings.TrimSpace(s))
	for _, u := range units {
		number, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil || math.IsNaN(v) || v < 0 || v*u.factor > 1<<62 {
			return 0, strconv.ErrSyntax
		}
		return v * u.factor, nil
	}
	return 0, strconv.ErrSyntax
}

// String renders with a binary unit and at most one decimal: "49.2 MiB".
func (b Bytes) String() string {
	switch {
	case b >= GiB:
		return trim(float64(b)/float64(GiB)) + " GiB"
	case b >= MiB:
		return trim(float64(b)/float64(MiB)) + " MiB"
	case b >= KiB:
		return trim(float64(b)/float64(KiB)) + " KiB"
	}
	return strconv.FormatUint(uint64(b), 10) + " B"
}

// String renders with a decimal unit: "460.8 kbit/s".
func (r BitRate) String() string {
	switch v := float64(r); {
	case v >= 1e9:
		return trim(v/1e9) + " Gbit/s"
	case v >= 1e6:
		return trim(v/1e6) + " Mbit/s"
	case v >= 1e3:
		return trim(v/1e3) + " kbit/s"
	}
	return strconv.FormatUint(uint64(r), 10) + " bit/s"
}

func trim(v float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0")
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *Bytes) UnmarshalText(text []byte) error {
	v, err := ParseBytes(string(text))
	if err == nil {
		*b = v
	}
	return err
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *BitRate) UnmarshalText(text []byte) error {
	v, err := ParseBitRate(string(text))
	if err == nil {
		*r = v
	}
	return err
}

// UnmarshalJSON accepts a number, as in marshalled JSON, or a string with a unit.
func (b *Bytes) UnmarshalJSON(text []byte) error {
	return b.UnmarshalText(bytes.Trim(text, `"`))
}

// UnmarshalJSON accepts a number, as in marshalled JSON, or a string with a unit.
func (r *BitRate) UnmarshalJSON(text []byte) error {
	return r.UnmarshalText(bytes.Trim(text, `"`))
}

// Set parses s.
func (b *Bytes) Set(s string) error { return b.UnmarshalText([]byte(s)) }

// Type names the kind of value in a command's help.
func (b *Bytes) Type() string { return "size" }

// Set parses s.
func (r *BitRate) Set(s string) error { return r.UnmarshalText([]byte(s)) }

// Type names the kind of value in a command's help.
func (r *BitRate) Type() string { return "rate" }
