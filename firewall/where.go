// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"

	"github.com/sluice-lb/sluice/flow"
)

// Where is a condition that all packets at a rule fulfil. The zero value of a field is no condition. The addresses and
// ports are those at the hook of the rule: before or after a translation.
type Where struct {
	Protocol               flow.Protocol
	Source, Dest           netip.Prefix
	SourcePorts, DestPorts PortRange
	In, Out                string // names of the routed interfaces: a bridge, not its port
	InIndex, OutIndex      uint32
}

// Narrow reports whether a condition other than the protocol exists.
func (w Where) Narrow() bool { return w != Where{Protocol: w.Protocol} }

// and returns a condition of the packets that fulfil both. If both restrict a field, that of o is used.
func (w Where) and(o Where) Where {
	pick := func(p *netip.Prefix, from netip.Prefix) {
		if from.IsValid() {
			*p = from
		}
	}
	pick(&w.Source, o.Source)
	pick(&w.Dest, o.Dest)
	if o.SourcePorts != (PortRange{}) {
		w.SourcePorts = o.SourcePorts
	}
	if o.DestPorts != (PortRange{}) {
		w.DestPorts = o.DestPorts
	}
	if o.In != "" || o.InIndex != 0 {
		w.In, w.InIndex = o.In, o.InIndex
	}
	if o.Out != "" || o.OutIndex != 0 {
		w.Out, w.OutIndex = o.Out, o.OutIndex
	}
	return w
}

// withoutInterfaces returns the condition without its interfaces.
func (w Where) withoutInterfaces() Where {
	w.In, w.Out, w.InIndex, w.OutIndex = "", "", 0, 0
	return w
}

// loadedField is the part of a packet, or the interface, that a register contains.
type loadedField struct {
	register    uint32
	base        expr.PayloadBase
	offset, len uint32
	mask        []byte // nil for all bits
	meta        expr.MetaKey
}

// whereReader collects the conditions of a rule, from left to right. It follows the last written register only.
type whereReader struct {
	Where
	ipv6  bool
	field *loadedField
}

// read adds the conditions of an expression. The rule continues behind it only for packets that fulfil them.
func (w *whereReader) read(e expr.Any, set func(*expr.Lookup) ([]nftables.SetElement, bool)) {
	at := func(register uint32) bool {
		return w.field != nil && registerOffset(w.field.register) == registerOffset(register)
	}
	switch e := e.(type) {
	case *expr.Payload:
		w.field = nil
		if e.OperationType == expr.PayloadLoad {
			w.field = &loadedField{register: e.DestRegister, base: e.Base, offset: e.Offset, len: e.Len}
		}
	case *expr.Meta:
		w.field = nil
		if !e.SourceRegister && slices.Contains([]expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.MetaKeyIIF, expr.MetaKeyOIF}, e.Key) {
			w.field = &loadedField{register: e.Register, meta: e.Key}
		}
	case *expr.Bitwise:
		// The zero bytes of an exclusive or change nothing.
		if at(e.SourceRegister) && w.field.mask == nil && w.field.meta == 0 && len(e.Mask) == int(w.field.len) && bytes.Count(e.Xor, []byte{0}) == len(e.Mask) {
			w.field = &loadedField{register: e.DestRegister, base: w.field.base, offset: w.field.offset, len: w.field.len, mask: e.Mask}
			return
		}
		w.field = nil
	case *expr.Cmp:
		switch {
		case !at(e.Register):
		case e.Op == expr.CmpOpEq:
			w.equal(e.Data)
		case e.Op == expr.CmpOpGte && w.field.mask == nil: // nft writes a range as two comparisons
			w.between(e.Data, []byte{0xff, 0xff})
		case e.Op == expr.CmpOpLte && w.field.mask == nil:
			w.between([]byte{0, 0}, e.Data)
		}
	case *expr.Range:
		if at(e.Register) && e.Op == expr.CmpOpEq && w.field.mask == nil {
			w.between(e.FromData, e.ToData)
		}
	case *expr.Lookup:
		if !at(e.SourceRegister) || e.Invert || w.field.mask != nil {
			return
		}
		if elements, known := set(e); known {
			w.among(keyRanges(elements))
		}
	case *expr.Match:
		w.match(e)
	case *expr.Counter, *expr.Limit, *expr.Log, *expr.Quota, *expr.Target:
	default:
		w.field = nil
	}
}

// equal adds the condition that the loaded field has a value.
func (w *whereReader) equal(value []byte) {
	f := w.field
	if f.meta != 0 {
		w.device(value)
		return
	}
	if f.len == 2 && f.mask == nil {
		w.between(value, value)
	}
	if f.base != expr.PayloadBaseNetworkHeader || len(value) != int(f.len) {
		return
	}
	mask := f.mask
	if mask == nil {
		mask = bytes.Repeat([]byte{0xff}, len(value))
	}
	first, size := uint32(12), uint32(4)
	if w.ipv6 {
		first, size = 8, 16
	}
	for i, into := range []*netip.Prefix{&w.Source, &w.Dest} {
		begin := first + uint32(i)*size // of the address in the header
		if f.offset > begin || f.offset+f.len <= begin {
			continue
		}
		skip := begin - f.offset
		n := min(size, f.len-skip)
		address, ones := make([]byte, size), 0
		copy(address, value[skip:skip+n])
		for _, m := range mask[skip : skip+n] {
			k := bits.LeadingZeros8(^m)
			if ones += k; k < 8 {
				break
			}
		}
		if a, ok := netip.AddrFromSlice(address); ok && ones > 0 {
			*into = netip.PrefixFrom(a, ones).Masked()
		}
	}
}

// between adds the condition that the loaded field is in a range, besides an earlier one.
func (w *whereReader) between(from, to []byte) {
	f := w.field
	if f.base != expr.PayloadBaseTransportHeader || f.meta != 0 || f.len != 2 || len(from) != 2 || len(to) != 2 {
		return
	}
	into := &w.DestPorts
	switch f.offset {
	case 0:
		into = &w.SourcePorts
	case 2:
	default:
		return
	}
	ports := PortRange{binary.BigEndian.Uint16(from), binary.BigEndian.Uint16(to)}
	if *into != (PortRange{}) {
		ports = PortRange{max(ports.Low, into.Low), min(ports.High, into.High)}
	}
	if ports.Low <= ports.High { // else no packet fulfils both
		*into = ports
	}
}

// among adds the condition that the loaded field is in a set: in the range of its elements.
func (w *whereReader) among(elements []nftables.SetElement) {
	if len(elements) == 0 || w.field.len != 2 {
		return
	}
	from, to := []byte{0xff, 0xff}, []byte{0, 0}
	for _, e := range elements {
		if len(e.Key) != 2 || len(e.KeyEnd) != 2 {
			return
		}
		if bytes.Compare(e.Key, from) < 0 {
			from = e.Key
		}
		if bytes.Compare(e.KeyEnd, to) > 0 {
			to = e.KeyEnd
		}
	}
	w.between(from, to)
}

// device adds the condition that an interface has a name or an index. A name without its zero is the begin of names.
func (w *whereReader) device(value []byte) {
	name, index := "", uint32(0)
	switch w.field.meta {
	case expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME:
		before, _, found := bytes.Cut(value, []byte{0})
		if !found {
			return
		}
		name = string(before)
	default:
		if len(value) != 4 {
			return
		}
		index = binary.NativeEndian.Uint32(value)
	}
	if w.field.meta == expr.MetaKeyIIFNAME || w.field.meta == expr.MetaKeyIIF {
		w.In, w.InIndex = name, index
	} else {
		w.Out, w.OutIndex = name, index
	}
}

// match adds the ports of a match module of iptables.
func (w *whereReader) match(e *expr.Match) {
	ports := func(into *PortRange, r [2]uint16, inverted bool) {
		if !inverted && (r != [2]uint16{0, 65535}) {
			*into = PortRange{r[0], r[1]}
		}
	}
	switch info := e.Info.(type) {
	case *xt.Tcp:
		ports(&w.SourcePorts, info.SrcPorts, info.InvFlags&xt.TcpInvSrcPorts != 0)
		ports(&w.DestPorts, info.DstPorts, info.InvFlags&xt.TcpInvDestPorts != 0)
	case *xt.Udp:
		ports(&w.SourcePorts, info.SrcPorts, info.InvFlags&xt.UdpInvSrcPorts != 0)
		ports(&w.DestPorts, info.DstPorts, info.InvFlags&xt.UdpInvDestPorts != 0)
	}
}

// where returns the conditions of a rule of iptables-legacy before one of its words. The kernel compares the options of
// the IP header before all modules.
func (r *savedRule) where(end int) (w Where) {
	for i := 2; i+1 < len(r.words); i++ {
		value := r.words[i+1]
		if r.words[i-1] == "!" || strings.HasPrefix(r.words[i-1], "-") { // inverted, or the text of a comment
			continue
		}
		switch option := r.words[i]; option {
		case "-s", "-d":
			prefix, err := netip.ParsePrefix(value)
			if err != nil || prefix.Bits() == 0 {
				continue
			}
			if option == "-s" {
				w.Source = prefix.Masked()
			} else {
				w.Dest = prefix.Masked()
			}
		case "-p":
			if value == "tcp" || value == "udp" {
				w.Protocol, _ = parseProtocol(value)
			}
		case "-i", "-o":
			if strings.HasSuffix(value, "+") {
				continue
			}
			if option == "-i" {
				w.In = value
			} else {
				w.Out = value
			}
		case "--sport", "--sports", "--dport", "--dports":
			if i >= end {
				continue
			}
			hull := PortRange{65535, 0}
			for part := range strings.SplitSeq(value, ",") {
				low, high := ParsePorts(strings.ReplaceAll(part, ":", "-"))
				hull.Low, hull.High = min(hull.Low, low), max(hull.High, high)
			}
			if option[2] == 's' {
				w.SourcePorts = hull
			} else {
				w.DestPorts = hull
			}
		}
	}
	return w
}
