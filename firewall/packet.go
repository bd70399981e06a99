// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"

	"github.com/sluice-lb/sluice/flow"
)

// Packet holds the known properties of a packet at a rule.
type Packet struct {
	Header  []byte     // First bytes, from the IP header on.
	Tuple   flow.Tuple // Addresses and ports in Header.
	In      string     // Input interface; "" if unknown.
	InIndex uint32     // Index of In; 0 if unknown.
	Out     string     // Output interface; "" if unknown.
	Mark    uint32
	// States are the possible states of the connection as bits of "ct state"; empty if unknown.
	States []uint32
}

// Connection states by bit (NF_CT_STATE_BIT, linux/netfilter/nf_conntrack_common.h).
const (
	StateInvalid     = 1 << 0
	StateEstablished = 1 << 1
	StateRelated     = 1 << 2
	StateNew         = 1 << 3
	StateUntracked   = 1 << 6
)

// stateNames are the state names of iptables.
var stateNames = map[string]uint32{"INVALID": StateInvalid, "ESTABLISHED": StateEstablished, "RELATED": StateRelated, "NEW": StateNew, "UNTRACKED": StateUntracked}

// version returns the IP version, or 0 without a header.
func (p *Packet) version() byte {
	switch {
	case len(p.Header) >= 20 && p.Header[0]>>4 == 4:
		return 4
	case len(p.Header) >= 40 && p.Header[0]>>4 == 6:
		return 6
	}
	return 0
}

// inFamily reports whether tables of a family process the packet.
func (p *Packet) inFamily(family nftables.TableFamily) bool {
	switch v := p.version(); family {
	case nftables.TableFamilyIPv4:
		return v != 6
	case nftables.TableFamilyIPv6:
		return v != 4
	}
	return true
}

// transport returns the protocol of the transport header and its offset. known is false for later fragments and
// behind extension headers.
func (p *Packet) transport() (protocol byte, at int, known bool) {
	switch p.version() {
	case 4:
		n := int(p.Header[0]&0xf) * 4
		return p.Header[9], n, n >= 20 && binary.BigEndian.Uint16(p.Header[6:])&0x1fff == 0
	case 6:
		switch p.Header[6] {
		case 0, 43, 44, 50, 51, 60: // further IPv6 headers
			return 0, 0, false
		}
		return p.Header[6], 40, true
	}
	return 0, 0, false
}

// ipProtocol returns the protocol in the IP header, also for later fragments.
func (p *Packet) ipProtocol() (protocol byte, known bool) {
	if p.version() == 4 {
		return p.Header[9], true
	}
	protocol, _, known = p.transport()
	return protocol, known
}

// mayMatch reports whether a rule of iptables-legacy can match. Conditions that cannot be evaluated count as true.
func (r *savedRule) mayMatch(p *Packet) bool {
	for i := 2; i+1 < len(r.words); i++ {
		holds, known := r.condition(r.words[i], r.words[i+1], p)
		if inverted := r.words[i-1] == "!"; known && holds == inverted {
			return false
		}
	}
	return true
}

func (r *savedRule) condition(option, value string, p *Packet) (holds, known bool) {
	t := p.Tuple
	switch option {
	case "-s", "-d":
		prefix, err := netip.ParsePrefix(value)
		addr := t.Source.Addr()
		if option == "-d" {
			addr = t.Dest.Addr()
		}
		return prefix.Contains(addr), err == nil && addr.IsValid()
	case "-p":
		protocol, err := parseProtocol(value)
		return protocol == t.Protocol, err == nil && t.IsValid()
	case "-i":
		prefix, all := strings.CutSuffix(value, "+")
		return p.In == value || all && strings.HasPrefix(p.In, prefix), p.In != ""
	case "-o":
		prefix, all := strings.CutSuffix(value, "+")
		return p.Out == value || all && strings.HasPrefix(p.Out, prefix), p.Out != ""
	case "--dport", "--dports":
		return portIn(value, t.Dest.Port()), t.Protocol.HasPorts() && t.Dest.Port() > 0
	case "--sport", "--sports":
		return portIn(value, t.Source.Port()), t.Protocol.HasPorts() && t.Source.Port() > 0
	case "--ctstate", "--state":
		mask := uint32(0)
		for name := range strings.SplitSeq(value, ",") {
			mask |= stateNames[name]
		}
		return slices.ContainsFunc(p.States, func(s uint32) bool { return s&mask != 0 }),
			len(p.States) == 1 || len(p.States) > 1 && !slices.ContainsFunc(p.States, func(s uint32) bool { return s&mask != 0 })
	}
	return false, false
}

// parseProtocol parses a protocol as printed by iptables-save.
func parseProtocol(name string) (flow.Protocol, error) {
	switch name {
	case "ipv6-icmp":
		return flow.ICMPv6, nil
	case "all":
		return 0, strconv.ErrSyntax
	}
	return flow.ParseProtocol(name)
}

// portIn parses "80", "80:90" and "80,90:99".
func portIn(value string, port uint16) bool {
	for part := range strings.SplitSeq(value, ",") {
		low, high := ParsePorts(strings.ReplaceAll(part, ":", "-"))
		if low <= port && port <= high {
			return true
		}
	}
	return false
}
