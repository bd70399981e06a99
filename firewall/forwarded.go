// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// PortRange is a range of ports, including both ends.
type PortRange struct{ Low, High uint16 }

// String returns "8080" or "9000-9010".
func (p PortRange) String() string {
	if p.Low == p.High {
		return strconv.Itoa(int(p.Low))
	}
	return fmt.Sprintf("%d-%d", p.Low, p.High)
}

// portRule is the effect of a rule on packets to some ports. The rule translates their destination, accepts them, or
// sends them to another chain.
type portRule struct {
	ports []PortRange  // nil for all.
	away  bool         // The rule matches only destinations outside the host.
	named []netip.Addr // Single matched destinations.
	to    string       // Target chain.
	dnat  bool
	opens bool // The rule accepts packets.
}

func translatesPort(w *portRule) bool { return w.dnat }
func opensPort(w *portRule) bool      { return w.opens }

// mostRules bounds the number of visited rules. A chain is visited once for each jump to it.
const mostRules = 50_000

// mostNamed bounds the number of stored addresses of port forwards.
const mostNamed = 64

// portsOf returns the ports of the host's own addresses that have a rule of the wanted effect. It also returns the
// single destination addresses, local or not, of rules that translate. A rule for all ports adds no port.
func portsOf(roots []string, wanted func(*portRule) bool, rulesOf func(chain string) []portRule) (ports []PortRange, named []netip.Addr) {
	left := mostRules
	var walk func(chain string, from portRule, depth int)
	walk = func(chain string, from portRule, depth int) {
		for _, w := range rulesOf(chain) {
			if left--; left < 0 || depth > 16 {
				return
			}
			if w.ports == nil {
				w.ports = from.ports
			}
			if w.dnat && len(named) < mostNamed {
				named = append(named, w.named...)
			}
			switch {
			case w.away:
			case wanted(&w):
				ports = append(ports, w.ports...)
			case w.to != "":
				walk(w.to, w, depth+1)
			}
		}
	}
	for _, root := range roots {
		walk(root, portRule{}, 0)
	}
	slices.SortFunc(ports, func(a, b PortRange) int { return int(a.Low)<<16 + int(a.High) - int(b.Low)<<16 - int(b.High) })
	slices.SortFunc(named, netip.Addr.Compare)
	return slices.Compact(ports), slices.Compact(named)
}

// nftPorts applies portsOf to the nftables rules of a hook, including iptables-nft.
func nftPorts(n *nft, hook *nftables.ChainHook, local []netip.Addr, wanted func(*portRule) bool) ([]PortRange, []netip.Addr) {
	var roots []string
	for _, c := range n.chains {
		if c.Hooknum != nil && *c.Hooknum == *hook &&
			slices.Contains([]nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6, nftables.TableFamilyINet}, c.Table.Family) {
			roots = append(roots, chainKey(c.Table, c.Name))
		}
	}
	known := map[string][]portRule{}
	return portsOf(roots, wanted, func(chain string) []portRule {
		if _, there := known[chain]; !there {
			known[chain] = []portRule{}
			for _, rule := range n.rules[chain] {
				r := ruleReader{rule: rule, maps: n.sets, local: local, fields: map[uint32]field{}}
				known[chain] = append(known[chain], r.read()...)
			}
		}
		return known[chain]
	})
}

// field is the packet field in a register.
type field struct {
	port bool   // The destination port; otherwise the destination address.
	six  bool   // IPv6.
	mask []byte // of the address
}

// ruleReader collects a rule's conditions on destinations.
type ruleReader struct {
	rule   *nftables.Rule
	maps   *setReader
	local  []netip.Addr
	fields map[uint32]field // by offset in the register file in bytes
	asks   portRule
}

// registerOffset returns the offset of a register. The kernel numbers the same bytes as four registers of 16 bytes or as
// sixteen registers of 4 bytes.
func registerOffset(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return 4 * (register - unix.NFT_REG32_00)
	}
	return 16 * (register - 1)
}

// read evaluates the rule from left to right.
func (r *ruleReader) read() (list []portRule) {
	for _, e := range r.rule.Exprs {
		if register, other := loadedRegister(e); other {
			delete(r.fields, registerOffset(register))
		}
		switch e := e.(type) {
		case *expr.Payload:
			r.load(e)
		case *expr.Bitwise:
			f, there := r.fields[registerOffset(e.SourceRegister)]
			if delete(r.fields, registerOffset(e.DestRegister)); there && !f.port {
				r.fields[registerOffset(e.DestRegister)] = field{six: f.six, mask: e.Mask}
			}
		case *expr.Cmp:
			r.compare(e)
		case *expr.Range:
			if f, there := r.fields[registerOffset(e.Register)]; there && e.Op == expr.CmpOpEq {
				r.restrictField(f, e.FromData, e.ToData)
			}
		case *expr.Match:
			r.match(e)
		case *expr.Lookup:
			list = append(list, r.lookup(e)...)
		case *expr.Verdict:
			if e.Chain != "" {
				list = append(list, r.restrictRule(portRule{to: chainKey(r.rule.Table, e.Chain)}))
			} else if e.Kind == expr.VerdictAccept {
				list = append(list, r.restrictRule(portRule{opens: true}))
			}
		case *expr.NAT:
			if e.Type == expr.NATTypeDestNAT {
				list = append(list, r.restrictRule(portRule{dnat: true}))
			}
		case *expr.Redir:
			list = append(list, r.restrictRule(portRule{dnat: true}))
		case *expr.Target:
			if e.Name == "DNAT" || e.Name == "REDIRECT" {
				list = append(list, r.restrictRule(portRule{dnat: true}))
			}
		}
	}
	return list
}

// loadedRegister returns the register that an expression fills with a value other than a header field.
func loadedRegister(e expr.Any) (register uint32, other bool) {
	switch e := e.(type) {
	case *expr.Meta:
		return e.Register, !e.SourceRegister
	case *expr.Ct:
		return e.Register, !e.SourceRegister
	case *expr.Fib:
		return e.Register, true
	case *expr.Numgen:
		return e.Register, true
	case *expr.Hash:
		return e.DestRegister, true
	case *expr.Rt:
		return e.Register, true
	case *expr.Socket:
		return e.Register, true
	case *expr.Exthdr:
		return e.DestRegister, e.DestRegister != 0
	case *expr.Immediate:
		return e.Register, true
	}
	return 0, false
}

// restrictRule returns the rule's effect w restricted by the conditions so far.
func (r *ruleReader) restrictRule(w portRule) portRule {
	if w.ports == nil {
		w.ports = r.asks.ports
	}
	w.away = w.away || r.asks.away
	w.named = append(w.named, r.asks.named...)
	return w
}

func (r *ruleReader) load(e *expr.Payload) {
	if e.OperationType != expr.PayloadLoad {
		return
	}
	at := registerOffset(e.DestRegister)
	delete(r.fields, at)
	switch {
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 2 && e.Len == 2:
		r.fields[at] = field{port: true}
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == 16 && e.Len <= 4:
		r.fields[at] = field{}
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == 24:
		r.fields[at] = field{six: true}
	}
}

func (r *ruleReader) compare(e *expr.Cmp) {
	f, there := r.fields[registerOffset(e.Register)]
	if !there {
		return
	}
	top, bottom := bytes.Repeat([]byte{0xff}, len(e.Data)), make([]byte, len(e.Data))
	switch e.Op {
	case expr.CmpOpEq:
		r.restrictField(f, e.Data, e.Data)
	case expr.CmpOpGte, expr.CmpOpGt:
		r.restrictField(f, e.Data, top)
	case expr.CmpOpLte, expr.CmpOpLt:
		r.restrictField(f, bottom, e.Data)
	}
}

// restrictField restricts the rule's conditions to a range.
func (r *ruleReader) restrictField(f field, low, high []byte) {
	if !f.port {
		r.asks.away = r.asks.away || !r.hostHasAddress(f, low, high)
		size := 4
		if f.six {
			size = 16
		}
		if len(f.mask) == 0 && len(low) == size && bytes.Equal(low, high) && len(r.asks.named) < mostNamed {
			addr, _ := netip.AddrFromSlice(low)
			r.asks.named = append(r.asks.named, addr)
		}
		return
	}
	if len(low) < 2 || len(high) < 2 {
		return
	}
	p := PortRange{binary.BigEndian.Uint16(low), binary.BigEndian.Uint16(high)}
	if n := len(r.asks.ports); n == 1 { // the other bound of a range
		p = PortRange{max(p.Low, r.asks.ports[0].Low), min(p.High, r.asks.ports[0].High)}
	}
	r.asks.ports = []PortRange{p}
}

// hostHasAddress reports whether the host has an address in a range. A value shorter than an address is a prefix.
func (r *ruleReader) hostHasAddress(f field, low, high []byte) bool {
	return slices.ContainsFunc(r.local, func(local netip.Addr) bool {
		b := local.AsSlice()
		if f.six != local.Is6() || len(low) > len(b) || len(f.mask) > len(b) {
			return false
		}
		for i := range f.mask {
			b[i] &= f.mask[i]
		}
		b = b[:len(low)]
		return bytes.Compare(low, b) <= 0 && bytes.Compare(b, high) <= 0
	})
}

// match evaluates a match module of iptables-nft.
func (r *ruleReader) match(e *expr.Match) {
	switch info := e.Info.(type) {
	case *xt.Tcp:
		if info.InvFlags&xt.TcpInvDestPorts == 0 && info.DstPorts != [2]uint16{0, 65535} {
			r.asks.ports = []PortRange{{info.DstPorts[0], info.DstPorts[1]}}
		}
	case *xt.Udp:
		if info.InvFlags&xt.UdpInvDestPorts == 0 && info.DstPorts != [2]uint16{0, 65535} {
			r.asks.ports = []PortRange{{info.DstPorts[0], info.DstPorts[1]}}
		}
	case *xt.Unknown:
		if e.Name == "multiport" {
			r.multiport([]byte(*info))
		}
	}
}

// multiport parses struct xt_multiport_v1: flags, count, 15 ports, 15 marks for the first port of a range, inversion.
func (r *ruleReader) multiport(b []byte) {
	const sourceOnly, ports, marks, invert, size = 0, 2, 32, 47, 48
	if len(b) < size || b[0] == sourceOnly || b[invert] != 0 {
		return
	}
	r.asks.ports = nil
	for i := 0; i < min(int(b[1]), 15); i++ {
		p := binary.NativeEndian.Uint16(b[ports+2*i:])
		if i > 0 && b[marks+i-1] != 0 {
			r.asks.ports[len(r.asks.ports)-1].High = p
			continue
		}
		r.asks.ports = append(r.asks.ports, PortRange{p, p})
	}
}

// lookup restricts the conditions to the keys of a set or map. Each element of a verdict map becomes a separate rule.
func (r *ruleReader) lookup(e *expr.Lookup) (list []portRule) {
	verdicts := e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT
	asked := false // the key contains a destination; sets of sources may be large and are irrelevant here
	for at := range r.fields {
		asked = asked || at >= registerOffset(e.SourceRegister)
	}
	if !verdicts && !asked {
		if e.IsDestRegSet {
			delete(r.fields, registerOffset(e.DestRegister))
		}
		return nil
	}
	elements, read := r.maps.elements(r.rule.Table, e.SetName)
	if !read || e.Invert {
		return nil
	}
	var all []portRule
	for _, element := range keyRanges(elements) {
		one := ruleReader{local: r.local}
		for at, f := range r.fields {
			if first := registerOffset(e.SourceRegister); at >= first && int(at-first) < len(element.Key) {
				one.restrictField(f, element.Key[at-first:][:fieldBytes(f, element.Key[at-first:])], element.KeyEnd[at-first:][:fieldBytes(f, element.KeyEnd[at-first:])])
			}
		}
		w := r.restrictRule(one.asks)
		if verdicts {
			if _, chain := verdictOf(element); chain != "" {
				w.to = chainKey(r.rule.Table, chain)
				list = append(list, w)
			}
			continue
		}
		all = append(all, one.asks)
	}
	if e.IsDestRegSet && !verdicts {
		delete(r.fields, registerOffset(e.DestRegister))
	}
	if len(all) == 0 {
		return list
	}
	r.asks.away = r.asks.away || !slices.ContainsFunc(all, func(w portRule) bool { return !w.away })
	var ports []PortRange
	for _, w := range all {
		if len(r.asks.named) < mostNamed {
			r.asks.named = append(r.asks.named, w.named...)
		}
		if !w.away {
			ports = append(ports, w.ports...)
		}
	}
	if len(ports) > 0 {
		r.asks.ports = ports
	}
	return list
}

// fieldBytes returns the length of a field in a key. In a concatenation each field begins at a multiple of four
// bytes.
func fieldBytes(f field, key []byte) int {
	switch {
	case f.port:
		return min(2, len(key))
	case f.six:
		return min(16, len(key))
	}
	return min(4, len(key))
}

// keyRanges returns each element with the end of its range. Concatenations contain the end, intervals end before the
// next key, other elements are single keys.
func keyRanges(elements []nftables.SetElement) (list []nftables.SetElement) {
	elements = slices.Clone(elements)
	intervals := slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return e.IntervalEnd })
	slices.SortStableFunc(elements, func(a, b nftables.SetElement) int { return bytes.Compare(a.Key, b.Key) })
	for i, e := range elements {
		switch {
		case e.IntervalEnd:
			continue
		case e.KeyEnd != nil:
		case intervals && i+1 < len(elements):
			e.KeyEnd = precedingKey(elements[i+1].Key)
		case intervals:
			e.KeyEnd = bytes.Repeat([]byte{0xff}, len(e.Key))
		default:
			e.KeyEnd = e.Key
		}
		list = append(list, e)
	}
	return list
}

// precedingKey returns the preceding key.
func precedingKey(key []byte) []byte {
	key = bytes.Clone(key)
	for i := range slices.Backward(key) {
		if key[i]--; key[i] != 0xff {
			break
		}
	}
	return key
}

// legacyPortRule parses a line of iptables-legacy-save.
func legacyPortRule(table string, words []string, local []netip.Addr) portRule {
	var w portRule
	for i := 2; i+1 < len(words); i++ {
		value, inverted := words[i+1], words[i-1] == "!"
		switch words[i] {
		case "-d":
			prefix, err := netip.ParsePrefix(value)
			w.away = w.away || err == nil && !inverted && !slices.ContainsFunc(local, prefix.Contains)
			if err == nil && !inverted && prefix.IsSingleIP() {
				w.named = append(w.named, prefix.Addr())
			}
		case "--dport", "--dports", "--ports":
			for part := range strings.SplitSeq(value, ",") {
				low, high := ParsePorts(strings.ReplaceAll(part, ":", "-"))
				if high > 0 && !inverted {
					w.ports = append(w.ports, PortRange{low, high})
				}
			}
		case "-j", "-g":
			w.dnat, w.opens = value == "DNAT" || value == "REDIRECT", value == "ACCEPT"
			w.to = table + " " + value
		}
	}
	return w
}
