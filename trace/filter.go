// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// Filter selects packets inside the kernel, before they are counted. A packet
// passes when the header it carries fits, or when the original direction of the
// flow it belongs to fits, so that a client is found before and after NAT. The
// zero value passes everything.
type Filter struct {
	Protocol flow.Protocol // 0: any.
	Port     uint16        // Either side; 0: any.
	Prefix   netip.Prefix  // Either side; invalid: any.
}

// ParseFilter reads expressions such as "tcp and host 192.0.2.1 and port 443" or
// "net 2001:db8::/32". The word "and" may be left out.
func ParseFilter(words []string) (Filter, error) {
	var f Filter
	words = strings.Fields(strings.Join(words, " "))
	said := map[string]bool{}
	for len(words) > 0 {
		word, kind := words[0], "address"
		words = words[1:]
		switch word {
		case "and":
			continue
		case "host", "net", "port":
			if len(words) == 0 {
				return f, fmt.Errorf("filter: %s: value missing", word)
			}
			if err := f.set(word, words[0]); err != nil {
				return f, fmt.Errorf("filter: %s %s: %w", word, words[0], err)
			}
			if word == "port" {
				kind = word
			}
			words = words[1:]
		default:
			p, err := flow.ParseProtocol(word)
			if err != nil {
				return f, fmt.Errorf("filter: %q: not understood; use [tcp|udp|icmp|...] [host ADDRESS] [net PREFIX] [port N]", word)
			}
			f.Protocol, kind = p, "protocol"
		}
		if said[kind] {
			return f, fmt.Errorf("filter: %s: a filter has one %s", word, kind)
		}
		said[kind] = true
	}
	return f, nil
}

func (f *Filter) set(word, value string) (err error) {
	switch word {
	case "host":
		var a netip.Addr
		if a, err = netip.ParseAddr(value); err == nil {
			f.Prefix = netip.PrefixFrom(a, a.BitLen())
		}
	case "net":
		if f.Prefix, err = netip.ParsePrefix(value); err == nil {
			f.Prefix = f.Prefix.Masked()
		}
	case "port":
		n, err := strconv.ParseUint(value, 10, 16)
		if err != nil || n == 0 {
			return errors.New("not a number from 1 to 65535")
		}
		f.Port = uint16(n)
	}
	return err
}

// Empty reports whether the filter passes everything.
func (f Filter) Empty() bool { return f == Filter{} }
