// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"

	"github.com/sluice-lb/sluice/capacity"
)

// Pools holds the number of ports that source NAT may use on each address.
type Pools struct {
	// Smallest is the smallest port range of a rule; 0 if no rule has one.
	Smallest uint32
	// ByAddress is the widest port range of the rules for a single address.
	ByAddress map[netip.Addr]uint32
	// Unclear counts source NAT rules without single addresses: ranges, networks, maps.
	Unclear int
	// Other is the widest port range of rules without a single address, which may apply to any address; 0 if there is
	// no such rule.
	Other uint32
}

// Of returns the number of ports of an address.
func (p *Pools) Of(addr netip.Addr) uint32 {
	if n := max(p.ByAddress[addr], p.Other); n > 0 {
		return n
	}
	return capacity.MasqueradePorts
}

// add records a rule. The zero Addr means any address, 0 means any port.
func (p *Pools) add(addr netip.Addr, low, high uint16) {
	n := uint32(capacity.MasqueradePorts)
	if low > 0 {
		n = uint32(max(low, high)-low) + 1
		if p.Smallest == 0 || n < p.Smallest {
			p.Smallest = n
		}
	}
	if !addr.IsValid() || addr.IsUnspecified() {
		p.Other = max(p.Other, n)
		return
	}
	if p.ByAddress == nil {
		p.ByAddress = map[netip.Addr]uint32{}
	}
	p.ByAddress[addr.Unmap()] = max(p.ByAddress[addr.Unmap()], n)
}

// nat adds a rule of nftables. Immediates load the rule's operands into registers.
func (p *Pools) nat(rule *nftables.Rule, e *expr.NAT) {
	var addr netip.Addr
	if b := immediateValue(rule, e.RegAddrMin); e.RegAddrMin != 0 && (e.RegAddrMax == 0 || e.RegAddrMax == e.RegAddrMin) && !e.Prefix {
		addr, _ = netip.AddrFromSlice(b)
	}
	p.addNamedAddress(addr)
	p.registers(rule, addr, e.RegProtoMin, e.RegProtoMax)
}

// addNamedAddress records whether a source NAT rule names one address.
func (p *Pools) addNamedAddress(addr netip.Addr) {
	if !addr.IsValid() || addr.IsUnspecified() {
		p.Unclear++
	}
}

// masquerade adds a rule without an address.
func (p *Pools) masquerade(rule *nftables.Rule, e *expr.Masq) {
	p.registers(rule, netip.Addr{}, e.RegProtoMin, e.RegProtoMax)
}

func (p *Pools) registers(rule *nftables.Rule, addr netip.Addr, lowest, highest uint32) {
	port := func(register uint32) uint16 {
		if b := immediateValue(rule, register); register != 0 && len(b) >= 2 {
			return binary.BigEndian.Uint16(b)
		}
		return 0
	}
	p.add(addr, port(lowest), port(highest))
}

// immediateValue returns the value that an immediate of the rule loads into a register.
func immediateValue(rule *nftables.Rule, register uint32) []byte {
	for _, e := range rule.Exprs {
		if i, ok := e.(*expr.Immediate); ok && i.Register == register {
			return i.Data
		}
	}
	return nil
}

// target adds a rule of iptables-nft.
func (p *Pools) target(e *expr.Target) {
	if e.Name == "NETMAP" {
		p.Unclear++
	}
	if e.Name != "SNAT" && e.Name != "MASQUERADE" {
		return
	}
	var from, to netip.Addr
	var low, high uint16
	switch info := e.Info.(type) {
	case *xt.NatIPv4MultiRangeCompat:
		if len(*info) == 1 {
			r := (*info)[0]
			from, _ = netip.AddrFromSlice(r.MinIP)
			to, _ = netip.AddrFromSlice(r.MaxIP)
			low, high = specifiedPorts(r.Flags, r.MinPort, r.MaxPort)
		}
	case *xt.Unknown: // IPv6: struct nf_nat_range
		if b := []byte(*info); len(b) >= 40 {
			from, _ = netip.AddrFromSlice(b[4:20])
			to, _ = netip.AddrFromSlice(b[20:36])
			low, high = specifiedPorts(uint(binary.NativeEndian.Uint32(b)), binary.BigEndian.Uint16(b[36:]), binary.BigEndian.Uint16(b[38:]))
		}
	}
	if from != to {
		from = netip.Addr{}
	}
	if e.Name == "SNAT" {
		p.addNamedAddress(from)
	}
	p.add(from, low, high)
}

func specifiedPorts(flags uint, low, high uint16) (uint16, uint16) {
	if flags&uint(xt.NatRangeProtoSpecified) == 0 {
		return 0, 0
	}
	return low, high
}

// addLegacyLine adds a line of iptables-legacy-save.
func (p *Pools) addLegacyLine(words []string) {
	after := func(option string) string {
		if at := slices.Index(words, option); at >= 0 && at+1 < len(words) {
			return words[at+1]
		}
		return ""
	}
	switch after("-j") {
	case "NETMAP":
		p.Unclear++
	case "MASQUERADE":
		low, high := ParsePorts(after("--to-ports"))
		p.add(netip.Addr{}, low, high)
	case "SNAT":
		value := after("--to-source")
		addr, err := netip.ParseAddr(value) // fails if ports follow the address
		ports := ""
		if at := strings.LastIndexByte(value, ':'); err != nil && at > 0 {
			ports = value[at+1:]
			addr, _ = netip.ParseAddr(strings.Trim(value[:at], "[]"))
		}
		low, high := ParsePorts(ports)
		p.addNamedAddress(addr)
		p.add(addr, low, high)
	}
}

// ParsePorts parses "1024-2047" or "5060".
func ParsePorts(s string) (low, high uint16) {
	from, to, found := strings.Cut(s, "-")
	if !found {
		to = from
	}
	first, err1 := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	if err1 != nil || err2 != nil {
		return 0, 0
	}
	return uint16(first), uint16(last)
}
