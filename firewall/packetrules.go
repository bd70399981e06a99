// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// PacketRule is a rule that may treat two packets of one established connection differently, or that must see each
// packet: limits, quotas, logs, conditions on lengths, marks of the IP header, and changes of packets.
type PacketRule struct {
	Rule string `json:"rule"` // its chain and its handle or text
	What string `json:"what"` // the part of the rule that depends on single packets
	// Where is fulfilled by the packets that the part sees.
	Where Where `json:"-"`
}

// String returns the rule and the part that depends on single packets.
func (r PacketRule) String() string { return r.Rule + ": " + r.What }

// PacketRules returns the rules of the calling thread's namespace that treat packets of one forwarded, established
// connection of TCP or UDP differently, for IPv4 or IPv6. Segments with SYN or FIN are not considered. A rule with an unknown
// expression counts.
func PacketRules(ctx context.Context, ipv6 bool) ([]PacketRule, error) {
	family := nftables.TableFamilyIPv4
	if ipv6 {
		family = nftables.TableFamilyIPv6
	}
	n, err := readTables()
	if err != nil {
		return nil, err
	}
	volatile, err := volatileSets()
	if err != nil {
		return nil, err
	}
	var rules []PacketRule
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		s := packetScan{calledRuleset: n.rulesetWithCallers(), family: family, protocol: protocol, volatile: volatile, ends: map[string]bool{}}
		for _, c := range n.chains {
			if s.begin(c) {
				s.walk(chainKey(c.Table, c.Name), Where{Protocol: flow.Protocol(protocol)})
			}
		}
		rules = append(rules, s.found...)
	}
	saved, err := legacySave(ctx, family)
	if err != nil {
		return nil, err
	}
	rules = append(rules, legacyPacketRules(legacyProgram(family), saved)...)
	var unique []PacketRule
	for _, r := range rules {
		if !slices.Contains(unique, r) {
			unique = append(unique, r)
		}
	}
	return unique, nil
}

// volatileSets returns the sets that change without a transaction, by chainKey: elements expire, or rules add them.
func volatileSets() (map[string]bool, error) {
	const changing = 0x10 | 0x20 // NFT_SET_TIMEOUT, NFT_SET_EVAL
	var sets map[string]bool
	err := errInterrupted
	for again := 0; again < readAgain && errors.Is(err, errInterrupted); again++ {
		sets = map[string]bool{}
		err = dump(unix.NFT_MSG_GETSET, 0, nil, func(family nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
			t, name, flags := &nftables.Table{Family: family}, "", uint32(0)
			for a.Next() {
				switch a.Type() {
				case unix.NFTA_SET_TABLE:
					t.Name = a.String()
				case unix.NFTA_SET_NAME:
					name = a.String()
				case unix.NFTA_SET_FLAGS:
					flags = a.Uint32()
				}
			}
			if flags&changing != 0 {
				sets[chainKey(t, name)] = true
			}
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("nftables sets: %w", err)
	}
	return sets, nil
}

// packetScan follows the path of established packets of one address family and protocol.
type packetScan struct {
	*calledRuleset
	family   nftables.TableFamily
	protocol byte
	volatile map[string]bool
	ends     map[string]bool // result of walk, by chainKey
	found    []PacketRule
	// atPorts: a chain sees packets at the ports of bridges, so the conditions on interfaces are not those of the route.
	atPorts bool
}

// begin reports whether forwarded packets of established connections enter the ruleset at a chain. Chains of type nat
// see the first packet only.
func (s *packetScan) begin(c *nftables.Chain) bool {
	if c.Hooknum == nil || c.Type == nftables.ChainTypeNAT {
		return false
	}
	switch c.Table.Family {
	case s.family, nftables.TableFamilyINet:
		s.atPorts = s.atPorts || *c.Hooknum > *nftables.ChainHookPostrouting // ingress of the family inet
		return *c.Hooknum != *nftables.ChainHookInput && *c.Hooknum != *nftables.ChainHookOutput
	case nftables.TableFamilyBridge, nftables.TableFamilyNetdev:
		return true
	}
	return false
}

// walk examines a chain and the chains behind it. It reports whether every packet gets a verdict there. The packets
// fulfil a condition, if the chain has only one caller.
func (s *packetScan) walk(key string, where Where) bool {
	if ends, known := s.ends[key]; known {
		return ends
	}
	s.ends[key] = false // for cyclic jumps, which the kernel rejects
	for _, rule := range s.rules[key] {
		e := s.effect(rule)
		if !e.reached {
			continue
		}
		if e.what != "" {
			s.found = append(s.found, PacketRule{Rule: fmt.Sprintf("%s handle %d", chainName(rule.Table, rule.Chain.Name), rule.Handle), What: e.what,
				Where: s.restrict(rule, where, e)})
		}
		ends := e.ends
		for _, to := range e.to {
			key, inner := chainKey(rule.Table, to), Where{Protocol: where.Protocol}
			if len(s.callers[key]) == 1 {
				inner = where.and(e.passed)
			}
			if s.walk(key, inner) && e.always {
				ends = true
			}
		}
		if ends && e.always {
			s.ends[key] = true
			return true
		}
		if e.returns && e.always {
			return false
		}
	}
	return false
}

// effect describes the verdicts of a rule for packets of established connections.
type effect struct {
	reached bool   // a packet may satisfy all conditions
	always  bool   // every packet does
	what    string // the part that depends on single packets
	// ofConnection: the part depends on the packets of both directions, which may arrive at other interfaces.
	ofConnection bool
	ends         bool // the rule has a final verdict
	returns      bool
	to           []string // chains that the rule jumps to
	// noted is fulfilled by the packets that reach the part in what, passed by those that satisfy all conditions.
	noted, passed Where
}

// restrict returns the condition of the packets that reach the part of a rule that depends on single packets.
func (s *packetScan) restrict(rule *nftables.Rule, chain Where, e effect) Where {
	switch w := chain.and(e.noted); {
	case rule.Table.Family != s.family && rule.Table.Family != nftables.TableFamilyINet:
		return Where{Protocol: w.Protocol}
	case s.atPorts || e.ofConnection:
		return w.withoutInterfaces()
	default:
		return w
	}
}

// tcpFlags are the flags that packets do not have: SYN and FIN.
const tcpFlags = 0x01 | 0x02

func (s *packetScan) effect(rule *nftables.Rule) (out effect) {
	var r registers
	conditions := whereReader{ipv6: s.family == nftables.TableFamilyIPv6}
	flags := map[uint32]byte{} // registers with TCP flags, and their mask
	out.always = true
	note := func(what string) {
		out.ofConnection = out.ofConnection || slices.Contains(connectionParts, what)
		if out.what == "" {
			out.what, out.noted = what, conditions.Where
		}
	}
	tracked := rule.Table.Family == s.family || rule.Table.Family == nftables.TableFamilyINet
	for _, e := range rule.Exprs {
		if register, other := loadedRegister(e); other {
			r.forget(register)
			delete(flags, register)
		}
		holds, known := true, true
		switch e := e.(type) {
		case *undecodedExpr:
			r = registers{}
			if !slices.Contains([]string{"byteorder", "last", "rt"}, e.name) || e.err != nil {
				note(e.name)
			}
		case *expr.Payload:
			s.load(e, &r, flags, note)
		case *expr.Meta:
			s.meta(e, &r, note)
		case *expr.Ct:
			switch e.Key {
			case expr.CtKeyPKTS, expr.CtKeyBYTES, expr.CtKeyAVGPKT, expr.CtKeyEXPIRATION:
				note(connectionCounters)
			case expr.CtKeySTATE:
				if tracked && !e.SourceRegister {
					r.set(e.Register, binary.NativeEndian.AppendUint32(nil, StateEstablished))
				}
			}
		case *expr.Immediate:
			r.set(e.Register, e.Data)
		case *expr.Bitwise:
			if _, is := flags[e.SourceRegister]; is && len(e.Mask) == 1 && bytes.Equal(e.Xor, []byte{0}) {
				flags[e.DestRegister] = e.Mask[0]
				r.forget(e.DestRegister)
				break
			}
			r.bitwise(e)
		case *expr.Cmp:
			if mask, is := flags[e.Register]; is && len(e.Data) == 1 {
				if known = false; withoutSYN(e, mask) {
					holds, known = false, true
				} else {
					note("TCP flags")
				}
				break
			}
			var value []byte
			if value, known = r.get(e.Register, len(e.Data)); known {
				holds = comparisonHolds(e.Op, bytes.Compare(value, e.Data))
			}
		case *expr.Range:
			var value []byte
			if value, known = r.get(e.Register, len(e.FromData)); known {
				holds = (bytes.Compare(e.FromData, value) <= 0 && bytes.Compare(value, e.ToData) <= 0) == (e.Op == expr.CmpOpEq)
			}
		case *expr.Match:
			holds, known = s.match(e, tracked, note)
		case *expr.Lookup:
			if s.volatile[chainKey(rule.Table, e.SetName)] {
				note("set " + e.SetName + ", whose elements expire or are added by packets")
			}
			if _, is := flags[e.SourceRegister]; is {
				note("TCP flags")
			}
			element, found, sure := s.lookUp(rule, e, &r)
			sure = sure && !s.volatile[chainKey(rule.Table, e.SetName)]
			if e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT {
				return s.verdictMap(rule, e, element, found, sure, out)
			}
			if known = sure; sure {
				holds = found != e.Invert
			}
		case *expr.Verdict:
			out.reached = true
			switch {
			case e.Chain != "":
				out.to = append(out.to, e.Chain)
			case e.Kind == expr.VerdictReturn:
				out.returns = true
			case e.Kind == expr.VerdictAccept, e.Kind == expr.VerdictDrop:
				out.ends = true
			case e.Kind == expr.VerdictContinue:
			default:
				note("queue")
			}
			return out
		case *expr.Reject:
			out.reached, out.ends = true, true
			return out
		case *expr.Target:
			s.target(e.Name, note)
			out.ends = out.ends || e.Name == "REJECT"
		case *expr.Objref:
			const counter, helper, timeout = 1, 3, 7 // NFT_OBJECT_*
			if e.Type != counter && e.Type != helper && e.Type != timeout {
				note("a stateful object")
			}
		case *expr.Hash:
			if e.Type != expr.HashTypeJenkins {
				note("hash of the packet")
			}
		case *expr.Counter, *expr.Notrack, *expr.FlowOffload, *expr.NAT, *expr.Masq, *expr.Redir, *expr.Fib:

		default:
			note(expressionName(e))
		}
		if known && !holds {
			return effect{}
		}
		out.always = out.always && known
		conditions.read(e, func(e *expr.Lookup) ([]nftables.SetElement, bool) {
			elements, read := s.sets.elements(rule.Table, e.SetName)
			return elements, read && !s.volatile[chainKey(rule.Table, e.SetName)]
		})
		out.passed = conditions.Where
	}
	out.reached = true
	return out
}

// withoutSYN reports whether a comparison of masked TCP flags fails for all packets without SYN and FIN.
func withoutSYN(e *expr.Cmp, mask byte) bool {
	switch e.Op {
	case expr.CmpOpEq:
		return e.Data[0]&tcpFlags != 0
	case expr.CmpOpNeq:
		return e.Data[0] == 0 && mask&^tcpFlags == 0
	}
	return false
}

// load evaluates a read of the packet. Addresses, ports and the protocol are the same in all packets of a connection.
func (s *packetScan) load(e *expr.Payload, r *registers, flags map[uint32]byte, note func(string)) {
	if e.OperationType != expr.PayloadLoad {
		note("a change of the packet")
		return
	}
	r.forget(e.DestRegister)
	delete(flags, e.DestRegister)
	first, last := e.Offset, e.Offset+e.Len
	protocolAt, addresses, end := uint32(9), uint32(12), uint32(20)
	if s.family == nftables.TableFamilyIPv6 {
		protocolAt, addresses, end = 6, 8, 40
	}
	switch e.Base {
	case expr.PayloadBaseNetworkHeader:
		switch {
		case first == protocolAt && e.Len == 1:
			r.set(e.DestRegister, []byte{s.protocol})
		case first >= addresses && last <= end:
		default:
			note("fields of the IP header")
		}
	case expr.PayloadBaseTransportHeader:
		switch {
		case last <= 4:
		case s.protocol == unix.IPPROTO_TCP && first == 13 && e.Len == 1:
			flags[e.DestRegister] = 0xff
		default:
			note("fields of the transport header")
		}
	default:
		note("bytes of the frame")
	}
}

// constantMeta are the properties that all packets of a connection have in common.
var constantMeta = []expr.MetaKey{
	expr.MetaKeyPROTOCOL, expr.MetaKeyIIF, expr.MetaKeyOIF, expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.MetaKeyIIFTYPE, expr.MetaKeyOIFTYPE,
	expr.MetaKeyNFPROTO, expr.MetaKeyL4PROTO, expr.MetaKeyMARK, expr.MetaKeyBRIIIFNAME, expr.MetaKeyBRIOIFNAME, expr.MetaKeyPKTTYPE,
	expr.MetaKeyIIFGROUP, expr.MetaKeyOIFGROUP, expr.MetaKeyRTCLASSID, expr.MetaKeySKUID, expr.MetaKeySKGID,
}

func (s *packetScan) meta(e *expr.Meta, r *registers, note func(string)) {
	switch {
	case e.SourceRegister && e.Key != expr.MetaKeyMARK && e.Key != expr.MetaKeyPRIORITY:
		note("a change of the packet's properties")
	case e.SourceRegister:
	case !slices.Contains(constantMeta, e.Key):
		note("length, time or other properties of the packet")
	case e.Key == expr.MetaKeyNFPROTO:
		r.set(e.Register, []byte{byte(s.family)})
	case e.Key == expr.MetaKeyPROTOCOL:
		kind := uint16(unix.ETH_P_IP)
		if s.family == nftables.TableFamilyIPv6 {
			kind = unix.ETH_P_IPV6
		}
		r.set(e.Register, binary.BigEndian.AppendUint16(nil, kind))
	case e.Key == expr.MetaKeyL4PROTO:
		r.set(e.Register, []byte{s.protocol})
	}
}

// verdictMap completes the effect of a rule that ends in a verdict map.
func (s *packetScan) verdictMap(rule *nftables.Rule, e *expr.Lookup, element nftables.SetElement, found, known bool, out effect) effect {
	out.reached = true
	if known {
		if !found {
			return effect{}
		}
		kind, chain := verdictOf(element)
		if chain != "" {
			out.to = append(out.to, chain)
		}
		out.ends = kind == expr.VerdictAccept || kind == expr.VerdictDrop
		out.returns = kind == expr.VerdictReturn
		return out
	}
	out.always = false
	elements, read := s.sets.elements(rule.Table, e.SetName)
	if !read && out.what == "" {
		out.what = "verdict map " + e.SetName + ", which could not be read"
	}
	for _, one := range elements {
		if _, chain := verdictOf(one); chain != "" && !slices.Contains(out.to, chain) {
			out.to = append(out.to, chain)
		}
	}
	return out
}

// Parts of rules that depend on all packets of a connection.
const (
	connectionCounters = "counters or lifetime of the connection"
	connectionLifetime = "lifetime of the connection"
)

var connectionParts = []string{connectionCounters, connectionLifetime, "match connbytes", "--ctexpire"}

// Modules of iptables that treat all packets of a connection alike.
var (
	constantMatches = []string{"comment", "tcp", "udp", "conntrack", "state", "addrtype", "mark", "connmark", "multiport", "iprange", "rpfilter", "helper", "connlabel"}
	constantTargets = []string{"REJECT", "SNAT", "DNAT", "MASQUERADE", "REDIRECT", "NETMAP", "MARK", "CONNMARK", "CT", "NOTRACK"}
	// otherProtocols are matches that packets of TCP and UDP fail.
	otherProtocols = []string{"icmp", "icmp6", "esp", "ah", "sctp", "dccp", "udplite"}
)

// match evaluates a match module of iptables.
func (s *packetScan) match(e *expr.Match, tracked bool, note func(string)) (holds, known bool) {
	if slices.Contains(otherProtocols, e.Name) {
		return false, true
	}
	if !slices.Contains(constantMatches, e.Name) {
		note("match " + e.Name)
		return true, false
	}
	switch info := e.Info.(type) {
	case *xt.Comment:
		return true, true
	case *xt.Tcp:
		if s.protocol != unix.IPPROTO_TCP {
			return false, true
		}
		if info.FlagsMask != 0 {
			if info.InvFlags&xt.TcpInvFlags == 0 && info.FlagsCmp&tcpFlags != 0 {
				return false, true
			}
			note("TCP flags")
		}
		if info.Option != 0 {
			note("TCP options")
		}
	case *xt.Udp:
		if s.protocol != unix.IPPROTO_UDP {
			return false, true
		}
	case *xt.ConntrackMtinfo3:
		const asksState, asksExpiry = 1 << 0, 1 << 10 // XT_CONNTRACK_STATE, XT_CONNTRACK_EXPIRES
		if info.MatchFlags&asksExpiry != 0 {
			note(connectionLifetime)
		}
		if tracked && info.MatchFlags&asksState != 0 {
			fits := (StateEstablished&uint32(info.StateMask) != 0) == (info.InvertFlags&asksState == 0)
			return fits, !fits || info.MatchFlags == asksState
		}
	}
	return true, e.Name == "comment"
}

func (s *packetScan) target(name string, note func(string)) {
	if !slices.Contains(constantTargets, name) {
		note("target " + name)
	}
}

// expressionName returns the name of an expression for a reader.
func expressionName(e expr.Any) string {
	switch e := e.(type) {
	case *expr.Limit:
		return "limit"
	case *expr.Log:
		return "log"
	case *expr.Quota:
		return "quota"
	case *expr.Connlimit:
		return "number of connections"
	case *expr.Numgen:
		return "random or counted number"
	case *expr.Queue:
		return "queue"
	case *expr.Dynset:
		return "set " + e.SetName + ", to which the rule adds packets"
	case *expr.Exthdr:
		return "options of the header"
	}
	return fmt.Sprintf("%T", e)
}
