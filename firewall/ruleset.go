// SPDX-License-Identifier: Apache-2.0

// Package firewall reads the rules of a host, whoever made them: nf_tables over netlink, those of
// iptables-nft among them, and iptables-legacy by the text of its own program. It says what
// they do to packets, and which of them may have dropped one.
package firewall

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// Ruleset sums up a namespace's firewall: what its rules do, and what a packet meets.
type Ruleset struct {
	Chains    []Chain
	Tables    int
	SourceNAT int // rules that translate sources, with masquerade
	DestNAT   int
	Forwards  Forwards
	Targets   Targets // of destination NAT
	Tracking  int     // rules that look at connections
	// Untracked are rules that keep packets from being tracked by where they come from alone.
	Untracked Forwards
	Helpers   int // rules that assign one
	// WideHelpers are those of them, in base chains, that ask for no port.
	WideHelpers int
	Traces      int // rules that switch tracing on
	Logs        int // rules that write to the kernel's log without limit
	// TraceIn and LogIn are the chains of the first of them.
	TraceIn, LogIn string
	MSSClamp       bool
	Flowtables     int
	Offload        bool // a flowtable in hardware
	InOrder        int  // SNAT rules that do not ask for random ports
	Compat         bool // tables that iptables-nft made
	Pools          Pools
	// KubeServices is the length of the chain KUBE-SERVICES.
	KubeServices int
	// Forwarded are ports of the host's own addresses whose packets are translated to
	// other destinations.
	Forwarded []PortRange
	// Named are single addresses, not all of the host, whose packets rules translate to others.
	Named []netip.Addr
	// Unread counts verdict maps whose chains are not in Chain.Longest.
	Unread int
	// NotUnderstood names rules with an expression that could not be decoded; what else they
	// do counts.
	NotUnderstood []string
	Legacy        int // rules of iptables-legacy
}

// Chain is a base chain with what a packet meets in it.
type Chain struct {
	Name string // "inet filter forward"
	Hook string
	NAT  bool // only the first packet of a connection meets it
	// Longest is how many rules a packet walks through at most: those of the chain, of
	// the chains that every packet is sent to, and of the longest one behind a match or
	// in a verdict map.
	Longest int
	// Established is the index of the rule that accepts known connections, or sends every
	// packet to a chain that does, -1: none, and UpTo how many rules their packets walk
	// through until then.
	Established, UpTo int
	Drops             int // dropping rules
	PolicyDrop        bool
}

// NAT tells whether anything is translated.
func (r *Ruleset) NAT() bool { return r != nil && r.SourceNAT+r.DestNAT > 0 }

// Addresses are the single ones that rules for NAT name on the outside, which somebody has to
// answer for: sources that packets get, and destinations that they have.
func (r *Ruleset) Addresses() []netip.Addr {
	list := slices.Clone(r.Named)
	for a := range r.Pools.ByAddress {
		if len(list) < 2*mostNamed {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// Walked is how many rules of the chain packets of known connections walk through at most.
func (c *Chain) Walked() int {
	if c.Established >= 0 {
		return c.UpTo
	}
	return c.Longest
}

// Strict tells whether a forward chain drops what no rule accepts, behind one that
// accepts known connections.
func (r *Ruleset) Strict() bool {
	return slices.ContainsFunc(r.Chains, func(c Chain) bool {
		return c.Hook == "forward" && c.PolicyDrop && c.Established >= 0
	})
}

// Read reads the firewall of the calling thread's namespace: nf_tables, and the rules of
// iptables-legacy where there are any. The ruleset is never nil; an error says what is
// missing in it.
func Read(ctx context.Context) (*Ruleset, error) {
	local := localAddresses()
	n, err := readTables()
	r := &Ruleset{}
	if err == nil {
		r.addNft(n, local)
	}
	if _, ipvs := os.Stat("/proc/thread-self/net/ip_vs"); ipvs == nil {
		r.Targets.Unclear++ // IPVS, the kernel's load balancer, whose translations stand in no rule
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		saved, saveErr := legacySave(ctx, family)
		if saveErr != nil {
			err = errors.Join(err, saveErr)
			continue
		}
		r.addLegacy(family, saved, local)
	}
	return r, err
}

// addNft adds what nf_tables holds.
func (r *Ruleset) addNft(n *nft, local []netip.Addr) {
	r.Tables, r.NotUnderstood = len(n.tables), n.strange
	r.Flowtables, r.Offload = n.flow, n.hardware
	for _, c := range n.chains {
		list := n.rules[chainKey(c.Table, c.Name)]
		r.Compat = r.Compat || len(list) > 0 && builtIn(c)
		r.scan(c, list)
	}
	graph := newChainGraph()
	graph.readNft(n.rules, n.sets)
	r.Unread = graph.unread
	r.Targets.readNft(n.sets, n.rules)
	outside := fromOutside(n.chains, n.rules, graph)
	r.Forwards.readNft(outside, local)
	r.Untracked.readUntracked(outside)
	r.Forwarded, r.Named = nftForwarded(n.chains, n.rules, n.sets, local)
	for _, c := range n.chains {
		if c.Hooknum == nil || c.Type == "" {
			continue
		}
		key := chainKey(c.Table, c.Name)
		known := graph.accepts(key)
		r.Chains = append(r.Chains, Chain{
			Name: chainName(c.Table, c.Name), Hook: hookName(c),
			NAT: c.Type == nftables.ChainTypeNAT, Longest: graph.longest(key),
			Established: known.at, UpTo: known.walked, Drops: drops(n.rules[key], c),
			PolicyDrop: policyDrops(c),
		})
	}
}

func chainKey(t *nftables.Table, name string) string {
	return fmt.Sprint(t.Family, " ", t.Name, " ", name)
}

func chainName(t *nftables.Table, name string) string {
	return familyName(t.Family) + " " + t.Name + " " + name
}

func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyINet:
		return "inet"
	case nftables.TableFamilyBridge:
		return "bridge"
	case nftables.TableFamilyNetdev:
		return "netdev"
	case nftables.TableFamilyARP:
		return "arp"
	}
	return fmt.Sprint("family ", byte(f))
}

// hookNames are those of nftables, by number.
var hookNames = map[nftables.TableFamily][]string{
	nftables.TableFamilyIPv4:   {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyIPv6:   {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyINet:   {"prerouting", "input", "forward", "output", "postrouting", "ingress"},
	nftables.TableFamilyBridge: {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyARP:    {"input", "output", "forward"},
	nftables.TableFamilyNetdev: {"ingress", "egress"},
}

// hookName is where packets meet a base chain; "" where it cannot be told.
func hookName(c *nftables.Chain) string {
	names := hookNames[c.Table.Family]
	if c.Hooknum == nil || int(*c.Hooknum) >= len(names) {
		return ""
	}
	return names[*c.Hooknum]
}

func policyDrops(c *nftables.Chain) bool {
	return c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop
}

// builtIn tells whether iptables has a chain and table of these names. Rules that need no
// extension look as those of nft do.
func builtIn(c *nftables.Chain) bool {
	return c.Hooknum != nil && (c.Table.Family == nftables.TableFamilyIPv4 || c.Table.Family == nftables.TableFamilyIPv6) &&
		slices.Contains(legacyHooks, c.Name) && slices.Contains([]string{"filter", "nat", "mangle", "raw", "security"}, c.Table.Name)
}

// scan counts what the rules of a chain do.
func (r *Ruleset) scan(c *nftables.Chain, rules []*nftables.Rule) {
	defer r.notes(chainName(c.Table, c.Name), r.Traces, r.Logs)
	if c.Name == "KUBE-SERVICES" || c.Name == "services" && strings.HasPrefix(c.Table.Name, "kube-proxy") {
		r.KubeServices = max(r.KubeServices, len(rules))
	}
	for _, rule := range rules {
		limited, logs := false, false
		for _, e := range rule.Exprs {
			switch e := e.(type) {
			case *expr.NAT:
				if e.Type == expr.NATTypeSourceNAT {
					r.SourceNAT++
					r.ordered(e.FullyRandom)
					r.Pools.nat(rule, e)
				} else {
					r.DestNAT++
				}
			case *expr.Masq:
				r.SourceNAT++
				r.ordered(e.FullyRandom)
				r.Pools.masquerade(rule, e)
			case *expr.Redir:
				r.DestNAT++
			case *expr.Ct, *expr.Connlimit, *expr.FlowOffload, *expr.SynProxy:
				r.Tracking++
			case *expr.Dynset:
				for _, metered := range e.Exprs {
					switch metered.(type) {
					case *expr.Connlimit:
						r.Tracking++ // a meter with ct count
					case *expr.Limit:
						limited = true
					}
				}
			case *expr.Limit:
				limited = true
			case *expr.Log: // by the kernel's log: not to a program (NFLOG), nor to auditd
				logs = logs || !limited && e.Key&(1<<unix.NFTA_LOG_GROUP) == 0 && e.Level != expr.LogLevelAudit
			case *expr.Meta:
				if e.SourceRegister && e.Key == expr.MetaKeyNFTRACE {
					r.Traces++
				}
			case *expr.Exthdr:
				if e.SourceRegister != 0 && e.Type == 2 { // TCP option MSS is written
					r.MSSClamp = true
				}
			case *expr.Objref:
				switch nftables.ObjType(e.Type) {
				case nftables.ObjTypeCtHelper:
					r.helper(c.Hooknum != nil && !asksPort(rule.Exprs))
				case nftables.ObjTypeLimit:
					limited = true
				case nftables.ObjTypeConnLimit, nftables.ObjTypeCtTimeout, nftables.ObjTypeCtExpect, nftables.ObjTypeSynProxy:
					r.Tracking++
				}
			case *expr.Target:
				r.Pools.target(e)
				if e.Name == "CT" && ctHelper(e) {
					r.Compat = true
					r.helper(c.Hooknum != nil && !asksPort(rule.Exprs))
					continue
				}
				logs = logs || !limited && e.Name == "LOG"
				r.target(e.Name, false) // what it asks for stands in bytes of its own
			case *expr.Match:
				r.Compat = true
				if slices.Contains(trackingMatches, e.Name) {
					r.Tracking++
				}
				limited = limited || slices.Contains(limitMatches, e.Name)
			}
		}
		if logs {
			r.Logs++
		}
	}
}

// notes notes the chain in which the first rules that trace or log were found.
func (r *Ruleset) notes(chain string, traces, logs int) {
	if traces == 0 && r.Traces > 0 {
		r.TraceIn = chain
	}
	if logs == 0 && r.Logs > 0 {
		r.LogIn = chain
	}
}

// trackingMatches are those of iptables that ask connection tracking.
var trackingMatches = []string{"conntrack", "state", "connmark", "connlimit", "connbytes", "connlabel", "helper", "cluster"}

// limitMatches are those of iptables that let a rate pass.
var limitMatches = []string{"limit", "hashlimit"}

// helper counts a rule that assigns a helper.
func (r *Ruleset) helper(wide bool) {
	r.Helpers++
	r.Tracking++
	if wide {
		r.WideHelpers++
	}
}

// asksPort tells whether a rule looks at ports.
func asksPort(exprs []expr.Any) bool {
	return slices.ContainsFunc(exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Payload:
			return e.Base == expr.PayloadBaseTransportHeader && e.Offset < 4
		case *expr.Match:
			return slices.Contains([]string{"tcp", "udp", "multiport"}, e.Name)
		}
		return false
	})
}

// ctHelper tells whether the target CT of iptables names a helper, at byte 12 of struct
// xt_ct_target_info.
func ctHelper(e *expr.Target) bool {
	info, ok := e.Info.(*xt.Unknown)
	return ok && len(*info) > 12 && (*info)[12] != 0
}

// ordered notes whether a SNAT rule asks for random ports.
func (r *Ruleset) ordered(random bool) {
	if !random {
		r.InOrder++
	}
}

// target counts an iptables target that iptables-nft carries in a rule.
func (r *Ruleset) target(name string, random bool) {
	r.Compat = true
	switch name {
	case "SNAT", "MASQUERADE", "NETMAP":
		r.SourceNAT++
		r.ordered(random)
	case "DNAT", "REDIRECT":
		r.DestNAT++
	case "TCPMSS":
		r.MSSClamp = true
	case "TRACE":
		r.Traces++
	case "CONNMARK", "CONNSECMARK", "SYNPROXY":
		r.Tracking++
	}
}

// unconditional tells whether every packet matches a rule.
func unconditional(rule *nftables.Rule) bool {
	return !slices.ContainsFunc(rule.Exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Verdict, *expr.Counter:
			return false
		case *expr.Match:
			return e.Name != "comment"
		}
		return true
	})
}

// acceptsKnown tells whether a rule accepts all packets of known connections: by their
// state, and by nothing else.
func acceptsKnown(rule *nftables.Rule) bool {
	looks, accepts := false, false
	for _, e := range rule.Exprs {
		switch e := e.(type) {
		case *expr.Ct:
			looks = e.Key == expr.CtKeySTATE
			if !looks {
				return false
			}
		case *expr.Bitwise:
			if len(e.Mask) == 0 || e.Mask[0]&StateEstablished == 0 {
				return false
			}
		case *expr.Match:
			looks = looks || e.Name == "conntrack" || e.Name == "state"
			if !looks && e.Name != "comment" {
				return false
			}
		case *expr.Verdict:
			accepts = accepts || e.Kind == expr.VerdictAccept
		case *expr.Lookup:
			accepts = accepts || looks && e.IsDestRegSet // a verdict map on the state
		case *expr.Cmp, *expr.Counter, *expr.Log:
		default:
			return false
		}
	}
	return looks && accepts
}

func returns(rule *nftables.Rule) bool {
	return slices.ContainsFunc(rule.Exprs, func(e expr.Any) bool {
		v, ok := e.(*expr.Verdict)
		return ok && v.Kind == expr.VerdictReturn
	})
}

func drops(rules []*nftables.Rule, c *nftables.Chain) int {
	n := 0
	if policyDrops(c) {
		n++
	}
	for _, rule := range rules {
		for _, e := range rule.Exprs {
			if v, ok := e.(*expr.Verdict); ok && v.Kind == expr.VerdictDrop {
				n++
			}
			if _, ok := e.(*expr.Reject); ok {
				n++
			}
		}
	}
	return n
}
