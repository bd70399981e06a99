// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"strconv"
	"strings"
)

// Protocol is an IANA protocol number; the zero value means any protocol.
type Protocol uint8

// Protocols that Sluice names. Numbers: IANA "Assigned Internet Protocol Numbers".
const (
	Any     Protocol = 0
	ICMP    Protocol = 1
	IPIP    Protocol = 4
	TCP     Protocol = 6
	UDP     Protocol = 17
	IPv6    Protocol = 41 // in IPv4: 6in4
	GRE     Protocol = 47
	ESP     Protocol = 50
	AH      Protocol = 51
	ICMPv6  Protocol = 58
	L2TP    Protocol = 115 // version 3 over IP
	SCTP    Protocol = 132
	UDPLite Protocol = 136
)

var protocolNames = map[Protocol]string{
	Any: "any", ICMP: "icmp", IPIP: "ipip", TCP: "tcp", UDP: "udp", IPv6: "ipv6", GRE: "gre", ESP: "esp", AH: "ah",
	ICMPv6: "icmpv6", L2TP: "l2tp", SCTP: "sctp", UDPLite: "udplite",
}

// String returns the lower-case name, or the number if there is no name.
func (p Protocol) String() string {
	if n, ok := protocolNames[p]; ok {
		return n
	}
	return strconv.Itoa(int(p))
}

// HasPorts reports whether packets of p carry 16-bit source and destination
// ports in their first four bytes.
func (p Protocol) HasPorts() bool {
	return p == TCP || p == UDP || p == SCTP || p == UDPLite
}

// ParseProtocol is the inverse of String; it also takes decimal numbers.
func ParseProtocol(s string) (Protocol, error) {
	for p, n := range protocolNames {
		if strings.EqualFold(s, n) {
			return p, nil
		}
	}
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil {
		return 0, fmt.Errorf("protocol %q: not one of tcp, udp, sctp, icmp, icmpv6, esp, gre, ah, ipip, ipv6, l2tp, udplite, any or a number up to 255", s)
	}
	return Protocol(n), nil
}

// MarshalText implements encoding.TextMarshaler.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Protocol) UnmarshalText(b []byte) error {
	v, err := ParseProtocol(string(b))
	if err == nil {
		*p = v
	}
	return err
}

// Ports is an inclusive range of ports. The zero value means every port.
type Ports struct {
	First, Last uint16
}

// Contains reports whether port is in the range.
func (r Ports) Contains(port uint16) bool {
	return r == Ports{} || r.First <= port && port <= r.Last
}

// Overlaps reports whether the two ranges share a port.
func (r Ports) Overlaps(o Ports) bool {
	return r == Ports{} || o == Ports{} || r.First <= o.Last && o.First <= r.Last
}

// Len returns the number of ports in the range.
func (r Ports) Len() int {
	if r == (Ports{}) {
		return 65536
	}
	return int(r.Last) - int(r.First) + 1
}

// String returns "80", "8000-8099", or "0-65535" for the zero value.
func (r Ports) String() string {
	switch {
	case r == Ports{}:
		return "0-65535"
	case r.First == r.Last:
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// ParsePorts reads "80" or "8000-8099". A reversed range is an error.
func ParsePorts(s string) (Ports, error) {
	lo, hi, ranged := strings.Cut(s, "-")
	first, err := parsePort(lo)
	if err != nil {
		return Ports{}, err
	}
	if !ranged {
		return Ports{first, first}, nil
	}
	last, err := parsePort(hi)
	if err != nil {
		return Ports{}, err
	}
	if last < first {
		return Ports{}, fmt.Errorf("port range %s is reversed: write %d-%d", s, last, first)
	}
	return Ports{first, last}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q: not a number from 1 to 65535", s)
	}
	return uint16(n), nil
}

// MarshalText implements encoding.TextMarshaler.
func (r Ports) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Ports) UnmarshalText(b []byte) error {
	v, err := ParsePorts(string(b))
	if err == nil {
		*r = v
	}
	return err
}
