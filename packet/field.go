// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// field is one named value of a layer in the text form. A field without a key is
// positional (the argument of data).
type field struct {
	key string
	// show returns "key=value", the bare key of a flag, or "" for the default.
	show func() string
	// set parses a value; has is false for a bare key.
	set func(value string, has bool) error
	// forced points to the value of a computed field.
	forced *Forced
}

type unsigned interface{ ~uint8 | ~uint16 | ~uint32 }

// number is a decimal field, shown if it differs from def.
func number[T unsigned](key string, p *T, def T) field {
	return field{key: key, show: func() string {
		if *p == def {
			return ""
		}
		return fmt.Sprintf("%s=%d", key, *p)
	}, set: numberSetter(p)}
}

// shownField is a decimal field that is always shown.
func shownField[T unsigned](key string, p *T) field {
	return field{key: key, show: func() string { return fmt.Sprintf("%s=%d", key, *p) }, set: numberSetter(p)}
}

// hexNumber is a field shown in hexadecimal when it differs from def.
func hexNumber[T unsigned](key string, p *T, def T) field {
	return field{key: key, show: func() string {
		if *p == def {
			return ""
		}
		return fmt.Sprintf("%s=%#x", key, *p)
	}, set: numberSetter(p)}
}

func numberSetter[T unsigned](p *T) func(string, bool) error {
	return func(s string, _ bool) error {
		v, err := strconv.ParseUint(s, 0, 32)
		if err != nil || uint64(T(v)) != v {
			return fmt.Errorf("%q: not a number that fits", s)
		}
		*p = T(v)
		return nil
	}
}

// force is a computed field, shown only if it is forced.
func force(key string, p *Forced, base int) field {
	return field{key: key, forced: p, show: func() string {
		switch {
		case !p.Set:
			return ""
		case base == 16:
			return fmt.Sprintf("%s=%#x", key, p.Value)
		}
		return fmt.Sprintf("%s=%d", key, p.Value)
	}, set: func(s string, _ bool) error {
		v, err := strconv.ParseUint(s, 0, 32)
		if err != nil {
			return fmt.Errorf("%q: not a number", s)
		}
		*p = Force(uint32(v))
		return nil
	}}
}

// flag is present or absent.
func flag(key string, p *bool) field {
	return field{key: key, show: func() string {
		if !*p {
			return ""
		}
		return key
	}, set: func(s string, has bool) error {
		if has {
			return fmt.Errorf("%s takes no value", key)
		}
		*p = true
		return nil
	}}
}

func address(key string, p *netip.Addr) field {
	return field{key: key, show: func() string { return key + "=" + p.String() }, set: func(s string, _ bool) error {
		a, err := netip.ParseAddr(s)
		if err == nil {
			*p = a
		}
		return err
	}}
}

func hardware(key string, p *MAC) field {
	return field{key: key, show: func() string {
		if *p == (MAC{}) {
			return ""
		}
		return key + "=" + p.String()
	}, set: func(s string, _ bool) (err error) { *p, err = ParseMAC(s); return err }}
}

// octets is a field of raw bytes in hexadecimal.
func octets(key string, p *[]byte) field {
	return field{key: key, show: func() string {
		if len(*p) == 0 {
			return ""
		}
		return key + "=0x" + hex.EncodeToString(*p)
	}, set: func(s string, _ bool) (err error) { *p, err = parseHex(s); return err }}
}

func parseHex(s string) ([]byte, error) {
	b, err := hex.DecodeString(strings.TrimPrefix(s, "0x"))
	if err != nil {
		return nil, fmt.Errorf("%q: not hexadecimal bytes", s)
	}
	return b, nil
}
