// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Builder builds a rule statement by statement. It appends text and expressions together, so that the printed text
// equals the kernel's rule.
type Builder struct {
	text  []string
	attrs Attrs
}

// NewRule starts a rule.
func NewRule() *Builder { return &Builder{} }

// Rule returns the rule. The comment may be empty.
func (b *Builder) Rule(comment string) Rule {
	return Rule{Text: strings.Join(b.text, " "), Exprs: string(b.attrs), Comment: comment}
}

func (b *Builder) appendText(format string, args ...any) *Builder {
	if len(args) > 0 {
		format = fmt.Sprintf(format, args...)
	}
	b.text = append(b.text, format)
	return b
}

// ForFamily limits a rule of a table with several families (inet, netdev) to one family. nft omits this condition
// next to a match on that family's header.
func (b *Builder) ForFamily(table, f Family) *Builder {
	switch {
	case table == Inet:
		b.attrs.metaLoad(unix.NFT_META_NFPROTO, 0)
		b.attrs.cmp(unix.NFT_CMP_EQ, 0, string([]byte{byte(f)}))
	case table == Netdev:
		ether := uint16(metaProtocolIP)
		if f == IP6 {
			ether = metaProtocolIP6
		}
		b.attrs.metaLoad(unix.NFT_META_PROTOCOL, 0)
		b.attrs.cmp(unix.NFT_CMP_EQ, 0, string([]byte{byte(ether >> 8), byte(ether)}))
	}
	return b
}

// Is matches if the selector equals the value.
func (b *Builder) Is(s Selector, v Value) *Builder {
	s.load(&b.attrs, 0)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, v.Raw)
	return b.appendText("%s %s", s.Text, v.Text)
}

// IsNot matches if the selector differs from the value.
func (b *Builder) IsNot(s Selector, v Value) *Builder {
	s.load(&b.attrs, 0)
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, v.Raw)
	return b.appendText("%s != %s", s.Text, v.Text)
}

// Between matches if the selector is in the range.
func (b *Builder) Between(s Selector, first, last Value) *Builder {
	if first.Raw == last.Raw {
		return b.Is(s, first)
	}
	s.load(&b.attrs, 0)
	b.attrs.rangeOf(unix.NFT_RANGE_EQ, 0, first.Raw, last.Raw)
	return b.appendText("%s %s-%s", s.Text, first.Text, last.Text)
}

// Within matches if the address is in the prefix.
func (b *Builder) Within(s Selector, p netip.Prefix) *Builder {
	if p.IsSingleIP() {
		return b.Is(s, Addr(p.Addr()))
	}
	zero := strings.Repeat("\x00", s.Type.Len)
	s.load(&b.attrs, 0)
	b.attrs.bitwise(0, 0, string(Netmask(p)), zero)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, string(p.Masked().Addr().AsSlice()))
	return b.appendText("%s %s", s.Text, p.Masked())
}

// Netmask returns the mask of a prefix as bytes.
func Netmask(p netip.Prefix) []byte {
	mask := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// InSet matches if the selectors are in the set.
func (b *Builder) InSet(set string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.lookup(set, 0, lookupMember, 0)
	return b.appendText("%s @%s", concatText(s), set)
}

// NotInSet matches if the selectors are not in the set.
func (b *Builder) NotInSet(set string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.lookup(set, 0, lookupMissing, 0)
	return b.appendText("%s != @%s", concatText(s), set)
}

// VerdictFrom looks up the selectors in a verdict map and applies the verdict.
func (b *Builder) VerdictFrom(vmap string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.lookup(vmap, 0, lookupVerdict, 0)
	return b.appendText("%s vmap @%s", concatText(s), vmap)
}

// Recall loads the dynamic map's entry for the selectors into the packet's priority, for use by a verdict map. The
// rule ends if there is no entry. (The kernel supports a lookup by the result of a lookup, but nft 1.0.6 aborts when
// it prints such a rule.)
func (b *Builder) Recall(set string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, hashScratch)
	b.attrs.lookup(set, hashScratch, lookupValue, 0)
	b.attrs.metaStore(unix.NFT_META_PRIORITY, 0)
	return b.appendText("meta priority set %s map @%s", concatText(s), set)
}

// ResetPriority sets the priority of the packet (meta priority) to 0, its value on arrival.
func (b *Builder) ResetPriority() *Builder {
	b.attrs.immediate(0, Number(0).Raw)
	b.attrs.metaStore(unix.NFT_META_PRIORITY, 0)
	return b.appendText("meta priority set none")
}

// State matches packets of one connection state.
func (b *Builder) State(name string) *Builder {
	bits := map[string]uint32{"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64}[name]
	b.attrs.ctLoad(unix.NFT_CT_STATE, -1, 0)
	b.attrs.bitwise(0, 0, Number(bits).Raw, Number(0).Raw)
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, Number(0).Raw)
	return b.appendText("ct state " + name)
}

// Known matches packets of established and related connections.
func (b *Builder) Known() *Builder {
	b.attrs.ctLoad(unix.NFT_CT_STATE, -1, 0)
	b.attrs.bitwise(0, 0, Number(2|4).Raw, Number(0).Raw) // established, related
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, Number(0).Raw)
	return b.appendText("ct state established,related")
}

// cutOff are the status bits of a translated connection that is marked as closed: IPS_DST_NAT and IPS_FIXED_TIMEOUT
// of enum ip_conntrack_status, as set by conntrack.CutOff.
const cutOff = 1<<5 | 1<<10

// translated are the status bits of a connection after its first packet, if its destination is translated:
// IPS_CONFIRMED and IPS_DST_NAT of enum ip_conntrack_status.
const translated = 1<<3 | 1<<5

// TranslatedOpen matches the packets of a connection with a translated destination after the first one, in both
// directions, except connections marked by conntrack.CutOff. The state of a connection without a reply remains "new",
// but its status matches too.
func (b *Builder) TranslatedOpen() *Builder {
	const mask = translated | cutOff
	b.attrs.ctLoad(unix.NFT_CT_STATUS, -1, 0)
	b.attrs.bitwise(0, 0, Number(mask).Raw, Number(0).Raw)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, Number(translated).Raw)
	return b.appendText("ct status & %#x == %#x", mask, translated)
}

// KnownOpen is Known without connections marked by conntrack.CutOff.
func (b *Builder) KnownOpen() *Builder {
	b.Known()
	return b.cutOff(unix.NFT_CMP_NEQ, "!=")
}

// CutOff matches packets of translated connections marked by conntrack.CutOff.
func (b *Builder) CutOff() *Builder { return b.cutOff(unix.NFT_CMP_EQ, "==") }

// CutOffSource is CutOff for connections with a translated source: IPS_SRC_NAT instead of IPS_DST_NAT.
func (b *Builder) CutOffSource() *Builder {
	const mask = 1<<4 | 1<<10
	b.attrs.ctLoad(unix.NFT_CT_STATUS, -1, 0)
	b.attrs.bitwise(0, 0, Number(mask).Raw, Number(0).Raw)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, Number(mask).Raw)
	return b.appendText("ct status & %#x == %#x", mask, mask)
}

func (b *Builder) cutOff(op uint32, text string) *Builder {
	b.attrs.ctLoad(unix.NFT_CT_STATUS, -1, 0)
	b.attrs.bitwise(0, 0, Number(cutOff).Raw, Number(0).Raw)
	b.attrs.cmp(op, 0, Number(cutOff).Raw)
	return b.appendText("ct status & %#x %s %#x", cutOff, text, cutOff)
}

// ToLocal matches packets to an address of the host.
func (b *Builder) ToLocal() *Builder {
	b.attrs.expr("fib", func(a *Attrs) {
		a.Uint32(fibDreg, register(0))
		a.Uint32(fibResult, fibAddressType)
		a.Uint32(fibFlags, fibDaddr)
	})
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, Number(unix.RTN_LOCAL).Raw)
	return b.appendText("fib daddr type local")
}

// TCPFlags matches if, among the flags in mask, exactly the flags in value are set.
func (b *Builder) TCPFlags(mask, value uint8, text string) *Builder {
	b.attrs.metaLoad(unix.NFT_META_L4PROTO, 0)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, "\x06")
	b.attrs.payloadLoad(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1, 0)
	b.attrs.bitwise(0, 0, string([]byte{mask}), "\x00")
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, string([]byte{value}))
	return b.appendText(text)
}

// TCPFlagsNot is the inverse of TCPFlags.
func (b *Builder) TCPFlagsNot(mask, value uint8, text string) *Builder {
	b.attrs.metaLoad(unix.NFT_META_L4PROTO, 0)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, "\x06")
	b.attrs.payloadLoad(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1, 0)
	b.attrs.bitwise(0, 0, string([]byte{mask}), "\x00")
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, string([]byte{value}))
	return b.appendText(text)
}

// Verdict ends the rule.
func (b *Builder) Verdict(v Verdict) *Builder {
	b.attrs.verdict(v)
	return b.appendText(v.String())
}

// String returns the verdict in nft's syntax.
func (v Verdict) String() string {
	switch v.Code {
	case Drop:
		return "drop"
	case Accept:
		return "accept"
	case Jump:
		return "jump " + v.Chain
	case Goto:
		return "goto " + v.Chain
	}
	return "return"
}

// Goto appends the verdict that passes the packet to a chain without return.
func (b *Builder) Goto(chain string) *Builder { return b.Verdict(Verdict{Goto, chain}) }

// Jump appends the verdict that passes the packet through a chain.
func (b *Builder) Jump(chain string) *Builder { return b.Verdict(Verdict{Jump, chain}) }

// Accept appends the verdict that accepts the packet at this hook.
func (b *Builder) Accept() *Builder { return b.Verdict(Verdict{Code: Accept}) }

// Drop appends the verdict that drops the packet.
func (b *Builder) Drop() *Builder { return b.Verdict(Verdict{Code: Drop}) }

// Return appends the verdict that returns to the calling chain.
func (b *Builder) Return() *Builder { return b.Verdict(Verdict{Code: Return}) }

// Counter counts packets and bytes in the rule itself.
func (b *Builder) Counter() *Builder {
	b.attrs.expr("counter", nil)
	return b.appendText("counter")
}

// CountIn counts packets and bytes in a named counter.
func (b *Builder) CountIn(name string) *Builder {
	b.attrs.objref(ObjectCounter, name)
	return b.appendText("counter name %q", name)
}

func (a *Attrs) objref(kind ObjectKind, name string) {
	a.expr("objref", func(a *Attrs) {
		a.Uint32(unix.NFTA_OBJREF_IMM_TYPE, uint32(kind))
		a.String(unix.NFTA_OBJREF_IMM_NAME, name)
	})
}

// Helper assigns a helper to the connection.
func (b *Builder) Helper(object string) *Builder {
	b.attrs.objref(ObjectHelper, object)
	return b.appendText("ct helper set %q", object)
}

// Timeout assigns timeouts to the connection.
func (b *Builder) Timeout(object string) *Builder {
	b.attrs.objref(ObjectTimeout, object)
	return b.appendText("ct timeout set %q", object)
}

// Offload adds the connection to a flowtable once it is established.
func (b *Builder) Offload(flowtable string) *Builder {
	b.State("established")
	b.attrs.expr("flow_offload", func(a *Attrs) { a.String(flowTableName, flowtable) })
	return b.appendText("flow add @" + flowtable)
}

// Notrack excludes the packet from connection tracking.
func (b *Builder) Notrack() *Builder {
	b.attrs.expr("notrack", nil)
	return b.appendText("notrack")
}

// Limit matches packets within the rate or, with over, packets above the rate.
func (b *Builder) Limit(count int, per time.Duration, burst int, over bool) *Builder {
	limit(&b.attrs, count, per, burst, over)
	return b.appendText(limitText(count, per, burst, over))
}

// defaultBurst is nft's default burst.
const defaultBurst = 5

func limit(a *Attrs, count int, per time.Duration, burst int, over bool) {
	if burst <= 0 {
		burst = defaultBurst
	}
	a.expr("limit", func(a *Attrs) {
		a.Uint64(unix.NFTA_LIMIT_RATE, uint64(count))
		a.Uint64(unix.NFTA_LIMIT_UNIT, uint64(per/time.Second))
		a.Uint32(unix.NFTA_LIMIT_BURST, uint32(burst))
		a.Uint32(unix.NFTA_LIMIT_TYPE, unix.NFT_LIMIT_PKTS)
		if over {
			a.Uint32(unix.NFTA_LIMIT_FLAGS, unix.NFT_LIMIT_F_INV)
		}
	})
}

var unitNames = map[time.Duration]string{
	time.Second: "second", time.Minute: "minute", time.Hour: "hour", 24 * time.Hour: "day",
}

func limitText(count int, per time.Duration, burst int, over bool) string {
	if burst <= 0 {
		burst = defaultBurst
	}
	word := ""
	if over {
		word = "over "
	}
	return fmt.Sprintf("limit rate %s%d/%s burst %d packets", word, count, unitNames[per], burst)
}

// ConnectionsOver matches if more than n connections that passed this rule are alive.
func (b *Builder) ConnectionsOver(n int) *Builder {
	b.attrs.connlimit(n)
	return b.appendText("ct count over %d", n)
}

func (a *Attrs) connlimit(n int) {
	a.expr("connlimit", func(a *Attrs) {
		a.Uint32(connlimitCount, uint32(n))
		a.Uint32(connlimitFlags, 1) // NFT_CONNLIMIT_F_INV
	})
}

// Log logs the packet to the kernel's log.
func (b *Builder) Log(prefix string, level uint32, levelName string) *Builder {
	b.attrs.expr("log", func(a *Attrs) {
		if prefix != "" {
			a.String(unix.NFTA_LOG_PREFIX, prefix)
		}
		a.Uint32(unix.NFTA_LOG_LEVEL, level)
	})
	text := "log"
	if prefix != "" {
		text += " prefix " + strconv.Quote(prefix)
	}
	return b.appendText(text + " level " + levelName)
}

// RejectReset answers with a TCP reset.
func (b *Builder) RejectReset() *Builder {
	b.attrs.expr("reject", func(a *Attrs) { a.Uint32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_TCP_RST) })
	return b.appendText("reject with tcp reset")
}

// RejectPort answers with ICMP port unreachable.
func (b *Builder) RejectPort(table Family) *Builder {
	kind, code, text := uint32(unix.NFT_REJECT_ICMP_UNREACH), uint8(3), "reject"
	switch table {
	case IP6:
		code, text = 4, "reject"
	case Inet:
		kind, code = unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH
	}
	b.attrs.expr("reject", func(a *Attrs) { a.Uint32(unix.NFTA_REJECT_TYPE, kind); a.Uint8(unix.NFTA_REJECT_ICMP_CODE, code) })
	return b.appendText(text)
}

// SetMark writes the packet's mark.
func (b *Builder) SetMark(v uint32) *Builder {
	b.attrs.immediate(0, Number(v).Raw)
	b.attrs.metaStore(unix.NFT_META_MARK, 0)
	return b.appendText("meta mark set %s", Number(v).Text)
}

// SetMarkBits replaces the bits of a mask in the packet's mark.
func (b *Builder) SetMarkBits(mask, v uint32) *Builder {
	b.attrs.metaLoad(unix.NFT_META_MARK, 0)
	b.attrs.bitwise(0, 0, Number(^mask).Raw, Number(v).Raw)
	b.attrs.metaStore(unix.NFT_META_MARK, 0)
	return b.appendText("meta mark set meta mark & %#x ^ %#x", ^mask, v)
}

// Reply matches packets from the responder of a connection to its initiator.
func (b *Builder) Reply() *Builder { return b.direction("\x01", "reply") }

// Initial matches packets from the initiator of a connection to its responder.
func (b *Builder) Initial() *Builder { return b.direction("\x00", "original") }

func (b *Builder) direction(value, text string) *Builder {
	b.attrs.ctLoad(unix.NFT_CT_DIRECTION, -1, 0)
	b.attrs.cmp(unix.NFT_CMP_EQ, 0, value)
	return b.appendText("ct direction " + text)
}

// Trace makes the kernel report every further rule on the packet's path.
func (b *Builder) Trace() *Builder {
	b.attrs.immediate(0, "\x01")
	b.attrs.metaStore(unix.NFT_META_NFTRACE, 0)
	return b.appendText("meta nftrace set 1")
}

// SetCtMark writes the connection's mark.
func (b *Builder) SetCtMark(v uint32) *Builder {
	b.attrs.immediate(0, Number(v).Raw)
	b.attrs.ctStore(unix.NFT_CT_MARK, 0)
	return b.appendText("ct mark set %s", Number(v).Text)
}

// RestoreMark copies the connection's mark to the packet.
func (b *Builder) RestoreMark() *Builder {
	b.attrs.ctLoad(unix.NFT_CT_MARK, -1, 0)
	b.attrs.metaStore(unix.NFT_META_MARK, 0)
	return b.appendText("meta mark set ct mark")
}

// Remember adds or refreshes the entry for the selectors in a dynamic map.
func (b *Builder) Remember(set string, timeout time.Duration, v Value, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.immediate(12, v.Raw)
	b.attrs.dynset(unix.NFT_DYNSET_OP_UPDATE, set, timeout, func(a *Attrs) {
		a.Uint32(unix.NFTA_DYNSET_SREG_DATA, register(12))
	})
	return b.appendText("update @%s { %s timeout %s : %s }", set, concatText(s), seconds(timeout), v.Text)
}

// dynsetDelete is NFT_DYNSET_OP_DELETE, which golang.org/x/sys/unix lacks.
const dynsetDelete = 2

// Forget deletes the entry for the selectors from a dynamic map, because an update renews the timeout and keeps the
// value.
func (b *Builder) Forget(set string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.immediate(12, Number(0).Raw) // the kernel requires a value register for every map
	b.attrs.dynset(dynsetDelete, set, 0, func(a *Attrs) {
		a.Uint32(unix.NFTA_DYNSET_SREG_DATA, register(12))
	})
	return b.appendText("delete @%s { %s : %s }", set, concatText(s), Number(0).Text)
}

// RateOver matches if the selectors' entry in a dynamic set has more events than the rate allows.
func (b *Builder) RateOver(set string, timeout time.Duration, count int, per time.Duration, burst int, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.dynset(unix.NFT_DYNSET_OP_UPDATE, set, timeout, func(a *Attrs) {
		a.nestedExpr(func(a *Attrs) { limit(a, count, per, burst, true) })
	})
	return b.appendText("update @%s { %s timeout %s %s }", set, concatText(s), seconds(timeout), limitText(count, per, burst, true))
}

// KeyConnectionsOver matches if the selectors' entry in a dynamic set has more than n live connections.
func (b *Builder) KeyConnectionsOver(set string, n int, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.dynset(unix.NFT_DYNSET_OP_ADD, set, 0, func(a *Attrs) {
		a.nestedExpr(func(a *Attrs) { a.connlimit(n) })
	})
	return b.appendText("add @%s { %s ct count over %d }", set, concatText(s), n)
}

// Tally counts packets and bytes per selectors in a dynamic set.
func (b *Builder) Tally(set string, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, 0)
	b.attrs.dynset(unix.NFT_DYNSET_OP_ADD, set, 0, func(a *Attrs) {
		a.nestedExpr(func(a *Attrs) { a.expr("counter", nil) })
	})
	return b.appendText("add @%s { %s counter }", set, concatText(s))
}

func (a *Attrs) dynset(op uint32, set string, timeout time.Duration, more func(*Attrs)) {
	a.expr("dynset", func(a *Attrs) {
		a.String(unix.NFTA_DYNSET_SET_NAME, set)
		a.Uint32(unix.NFTA_DYNSET_OP, op)
		a.Uint32(unix.NFTA_DYNSET_SREG_KEY, register(0))
		if timeout > 0 {
			a.Uint64(unix.NFTA_DYNSET_TIMEOUT, uint64(timeout/time.Millisecond))
		}
		more(a)
	})
}

// nestedExpr appends the expression of a dynamic set's elements: the same attributes as in a rule, but in
// NFTA_DYNSET_EXPR instead of a list element.
func (a *Attrs) nestedExpr(fill func(*Attrs)) {
	var inner Attrs
	fill(&inner)
	_, _, body, _, _ := NextAttr([]byte(inner))
	n := a.Nest(dynsetExpr)
	*a = append(*a, body...)
	a.Close(n)
}

func seconds(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// NotWithin matches if the address is outside the prefix.
func (b *Builder) NotWithin(s Selector, p netip.Prefix) *Builder {
	s.load(&b.attrs, 0)
	b.attrs.bitwise(0, 0, string(Netmask(p)), strings.Repeat("\x00", s.Type.Len))
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, string(p.Masked().Addr().AsSlice()))
	return b.appendText("%s != %s", s.Text, p.Masked())
}
