// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// registers are the 64 bytes of registers of a rule, with a mark for each known byte.
type registers struct {
	data  [64]byte
	known [64]bool
}

// set writes a value to a register. The kernel fills the last word with zeros.
func (r *registers) set(register uint32, b []byte) {
	at := int(registerOffset(register))
	for i := range (len(b) + 3) &^ 3 {
		if at+i >= len(r.data) {
			return
		}
		r.data[at+i], r.known[at+i] = 0, true
		if i < len(b) {
			r.data[at+i] = b[i]
		}
	}
}

// forget marks a register as unknown after a write of an unknown value.
func (r *registers) forget(register uint32) {
	for i := int(registerOffset(register)); i < len(r.known); i++ {
		r.known[i] = false
	}
}

// get reads n bytes; false if any byte is unknown.
func (r *registers) get(register uint32, n int) ([]byte, bool) {
	at := int(registerOffset(register))
	if n == 0 || at+n > len(r.data) || slices.Contains(r.known[at:at+n], false) {
		return nil, false
	}
	return r.data[at : at+n], true
}

// mayReachVerdict reports whether a rule can reach a wanted verdict for a packet. Conditions that cannot be evaluated count as
// true.
func (b *calledRuleset) mayReachVerdict(rule *nftables.Rule, p *Packet, wanted func(kind expr.VerdictKind, chain string) bool) bool {
	if !p.inFamily(rule.Table.Family) {
		return false
	}
	states := p.States
	if len(states) == 0 {
		return b.mayInState(rule, p, nil, wanted)
	}
	return slices.ContainsFunc(states, func(state uint32) bool { return b.mayInState(rule, p, &state, wanted) })
}

// mayInState is may for one state of the connection; a nil state is unknown.
func (b *calledRuleset) mayInState(rule *nftables.Rule, p *Packet, state *uint32, wanted func(kind expr.VerdictKind, chain string) bool) bool {
	var r registers
	for _, e := range rule.Exprs {
		if register, other := loadedRegister(e); other {
			r.forget(register)
		}
		holds := true
		switch e := e.(type) {
		case *undecodedExpr:
			r = registers{}
		case *expr.Payload:
			r.payload(e, p)
		case *expr.Meta:
			r.meta(e, p)
		case *expr.Ct:
			if e.Key == expr.CtKeySTATE && !e.SourceRegister && state != nil {
				r.set(e.Register, binary.NativeEndian.AppendUint32(nil, *state))
			}
		case *expr.Immediate:
			r.set(e.Register, e.Data)
		case *expr.Bitwise:
			r.bitwise(e)
		case *expr.Cmp:
			if value, known := r.get(e.Register, len(e.Data)); known {
				holds = comparisonHolds(e.Op, bytes.Compare(value, e.Data))
			}
		case *expr.Range:
			if value, known := r.get(e.Register, len(e.FromData)); known {
				within := bytes.Compare(e.FromData, value) <= 0 && bytes.Compare(value, e.ToData) <= 0
				holds = within == (e.Op == expr.CmpOpEq)
			}
		case *expr.Match:
			holds = matchHolds(e, p, state)
		case *expr.Lookup:
			element, found, known := b.lookUp(rule, e, &r)
			switch {
			case e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT:
				return b.mapMay(rule, e, element, found, known, wanted)
			case known:
				holds = found != e.Invert
			}
			if e.IsDestRegSet {
				r.forget(e.DestRegister)
			}
		case *expr.Verdict:
			return wanted(e.Kind, e.Chain)
		case *expr.Reject:
			return wanted(expr.VerdictDrop, "")
		case *expr.Queue:
			return wanted(expr.VerdictQueue, "")
		case *expr.Masq:
			return wanted(translates, "")
		case *expr.NAT:
			return e.Type == expr.NATTypeSourceNAT && wanted(translates, "")
		case *expr.Target:
			switch {
			case e.Name == "REJECT" || e.Name == "NFQUEUE":
				return wanted(expr.VerdictDrop, "")
			case translatesSource(e):
				return wanted(translates, "")
			}
		}
		if !holds {
			return false
		}
	}
	return false
}

// mapMay evaluates a verdict map. If the key is unknown, every verdict of the map is possible.
func (b *calledRuleset) mapMay(rule *nftables.Rule, e *expr.Lookup, element nftables.SetElement, found, known bool, wanted func(kind expr.VerdictKind, chain string) bool) bool {
	if known {
		return found && wanted(verdictOf(element))
	}
	elements, read := b.sets.elements(rule.Table, e.SetName)
	return !read || slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return len(e.Val) > 0 && wanted(verdictOf(e)) })
}

// lookUp looks up a register's value in a set. known is false if the value or the set is unknown.
func (b *calledRuleset) lookUp(rule *nftables.Rule, e *expr.Lookup, r *registers) (element nftables.SetElement, found, known bool) {
	elements, read := b.sets.elements(rule.Table, e.SetName)
	if !read {
		return element, false, false
	}
	for _, one := range keyRanges(elements) {
		key, there := r.get(e.SourceRegister, len(one.Key))
		switch {
		case len(one.Key) == 0: // "*" matches keys without another element
			element, found = one, true
		case !there:
			return element, false, false
		case keyInRange(key, one.Key, one.KeyEnd):
			return one, true, true
		}
	}
	return element, found, true
}

// keyInRange reports whether a key is in a range. In a concatenation each field must be in its range.
func keyInRange(key, low, high []byte) bool {
	if len(low) != len(high) {
		return bytes.Equal(key, low)
	}
	if len(key) <= 4 || bytes.Equal(low, high) {
		return bytes.Compare(low, key) <= 0 && bytes.Compare(key, high) <= 0
	}
	for i := 0; i < len(key); i += 4 {
		end := min(i+4, len(key))
		if bytes.Compare(low[i:end], key[i:end]) > 0 || bytes.Compare(key[i:end], high[i:end]) > 0 {
			// The range may be one of an IPv6 address.
			return bytes.Compare(low, key) <= 0 && bytes.Compare(key, high) <= 0 && len(key) == 16
		}
	}
	return true
}

func comparisonHolds(op expr.CmpOp, order int) bool {
	switch op {
	case expr.CmpOpEq:
		return order == 0
	case expr.CmpOpNeq:
		return order != 0
	case expr.CmpOpLt:
		return order < 0
	case expr.CmpOpLte:
		return order <= 0
	case expr.CmpOpGt:
		return order > 0
	case expr.CmpOpGte:
		return order >= 0
	}
	return true
}

func (r *registers) payload(e *expr.Payload, p *Packet) {
	if e.OperationType != expr.PayloadLoad {
		return
	}
	r.forget(e.DestRegister)
	at, known := int(e.Offset), p.version() > 0
	switch e.Base {
	case expr.PayloadBaseNetworkHeader:
	case expr.PayloadBaseTransportHeader:
		_, from, there := p.transport()
		at, known = at+from, known && there
	default:
		return
	}
	if end := at + int(e.Len); known && end <= len(p.Header) {
		r.set(e.DestRegister, p.Header[at:end])
	}
}

func (r *registers) meta(e *expr.Meta, p *Packet) {
	if e.SourceRegister {
		return
	}
	switch e.Key {
	case expr.MetaKeyNFPROTO:
		switch p.version() {
		case 4:
			r.set(e.Register, []byte{unix.NFPROTO_IPV4})
		case 6:
			r.set(e.Register, []byte{unix.NFPROTO_IPV6})
		}
	case expr.MetaKeyPROTOCOL:
		switch p.version() {
		case 4:
			r.set(e.Register, binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP))
		case 6:
			r.set(e.Register, binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6))
		}
	case expr.MetaKeyL4PROTO:
		if protocol, known := p.ipProtocol(); known {
			r.set(e.Register, []byte{protocol})
		}
	case expr.MetaKeyIIFNAME:
		if p.In != "" {
			r.set(e.Register, interfaceName(p.In))
		}
	case expr.MetaKeyOIFNAME:
		if p.Out != "" {
			r.set(e.Register, interfaceName(p.Out))
		}
	case expr.MetaKeyIIF:
		if p.InIndex > 0 {
			r.set(e.Register, binary.NativeEndian.AppendUint32(nil, p.InIndex))
		}
	case expr.MetaKeyMARK:
		r.set(e.Register, binary.NativeEndian.AppendUint32(nil, p.Mark))
	}
}

func (r *registers) bitwise(e *expr.Bitwise) {
	value, known := r.get(e.SourceRegister, len(e.Mask))
	if !known || len(e.Xor) != len(e.Mask) { // a shift expression has no mask
		r.forget(e.DestRegister)
		return
	}
	value = slices.Clone(value)
	for i := range value {
		value[i] = value[i]&e.Mask[i] ^ e.Xor[i]
	}
	r.forget(e.DestRegister)
	r.set(e.DestRegister, value)
}

// matchHolds evaluates a match module of iptables. An unsupported module counts as true.
func matchHolds(e *expr.Match, p *Packet, state *uint32) bool {
	ports := func(protocol flow.Protocol, source, dest [2]uint16, notSource, notDest bool) bool {
		t := p.Tuple
		if !t.IsValid() {
			return true
		}
		if t.Protocol != protocol {
			return false
		}
		if t.Dest.Port() == 0 { // unknown ports, as in a later fragment
			return true
		}
		in := func(r [2]uint16, port uint16) bool { return r[0] <= port && port <= r[1] }
		return in(source, t.Source.Port()) != notSource && in(dest, t.Dest.Port()) != notDest
	}
	switch info := e.Info.(type) {
	case *xt.Tcp:
		return ports(flow.TCP, info.SrcPorts, info.DstPorts, info.InvFlags&xt.TcpInvSrcPorts != 0, info.InvFlags&xt.TcpInvDestPorts != 0)
	case *xt.Udp:
		return ports(flow.UDP, info.SrcPorts, info.DstPorts, info.InvFlags&xt.UdpInvSrcPorts != 0, info.InvFlags&xt.UdpInvDestPorts != 0)
	case *xt.ConntrackMtinfo3:
		const asksState = 1 << 0 // XT_CONNTRACK_STATE
		if state != nil && info.MatchFlags == asksState {
			return (*state&uint32(info.StateMask) != 0) == (info.InvertFlags&asksState == 0)
		}
	}
	return true
}
