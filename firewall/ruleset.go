// SPDX-License-Identifier: Apache-2.0

// Package firewall reads all firewall rules of a host. It reads nf_tables over netlink, including rules of
// iptables-nft, and iptables-legacy from the output of its own program. It derives the rules' effect on packets, and
// the rules that may have dropped a packet.
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

// Ruleset summarizes a namespace's firewall: the effects of its rules and the path of packets.
type Ruleset struct {
	Chains    []Chain
	Tables    int
	SourceNAT int // source NAT rules, including masquerade
	DestNAT   int
	// Sources are the rules that translate sources.
	Sources  []SourceRule
	Forwards Forwards
	Targets  Targets // of destination NAT
	Tracking int     // Rules that use connection tracking.
	// Untracked counts rules that exclude packets from connection tracking by their source only.
	Untracked Forwards
	Helpers   int // rules that assign a helper
	// WideHelpers counts helper rules in base chains without a port condition.
	WideHelpers int
	Traces      int // Rules that enable tracing.
	Logs        int // Rules that write to the kernel's log without a rate limit.
	// TraceIn and LogIn are the chains of the first tracing and logging rules.
	TraceIn, LogIn string
	MSSClamp       bool
	Flowtables     int
	Offload        bool // A flowtable is offloaded to hardware.
	InOrder        int  // SNAT rules without random ports.
	Compat         bool // Iptables-nft has created tables.
	Pools          Pools
	// KubeServices is the length of the chain KUBE-SERVICES.
	KubeServices int
	// Forwarded lists ports of the host's own addresses with translation to other destinations.
	Forwarded []PortRange
	// Opened lists ports that rules of the input hook accept by their number.
	Opened []PortRange
	// ForwardedLegacy is the part of Forwarded that rules of iptables-legacy translate.
	ForwardedLegacy []PortRange
	// Named lists single destination addresses, local or not, with translation to others.
	Named []netip.Addr
	// Unread counts verdict maps that Chain.Longest does not include.
	Unread int
	// NotUnderstood names rules with an expression that could not be decoded. Their other expressions count.
	NotUnderstood []string
	Legacy        int // rules of iptables-legacy
}

// Chain is a base chain with the number of rules on a packet's path.
type Chain struct {
	Name string // "inet filter forward"
	Hook string
	NAT  bool // only the first packet of a connection traverses it
	// Longest is the maximum number of rules on a packet's path. It includes the chain, unconditional jumps, and the
	// longest branch behind a match or in a verdict map.
	Longest int
	// Established is the index of the rule that accepts established connections, or jumps with every packet to a
	// chain that does; -1 for none. UpTo is the maximum number of rules up to that point.
	Established, UpTo int
	Drops             int // rules with verdict drop
	PolicyDrop        bool
}

// NAT reports whether any rule translates addresses.
func (r *Ruleset) NAT() bool { return r != nil && r.SourceNAT+r.DestNAT > 0 }

// Addresses returns the single outside addresses in NAT rules: translated sources and original destinations. A
// station must answer for them.
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

// Walked returns the maximum number of rules of the chain for packets of established connections.
func (c *Chain) Walked() int {
	if c.Established >= 0 {
		return c.UpTo
	}
	return c.Longest
}

// Strict reports whether a forward chain accepts established connections and has a drop policy.
func (r *Ruleset) Strict() bool {
	return slices.ContainsFunc(r.Chains, func(c Chain) bool {
		return c.Hook == "forward" && c.PolicyDrop && c.Established >= 0
	})
}

// Read reads the firewall of the calling thread's namespace: nf_tables, and iptables-legacy if present. The ruleset
// is never nil. An error describes the missing parts.
func Read(ctx context.Context) (*Ruleset, error) {
	local := localAddresses()
	n, err := readTables()
	r := &Ruleset{}
	if err == nil {
		r.addNft(n, local)
	}
	if _, ipvs := os.Stat("/proc/thread-self/net/ip_vs"); ipvs == nil {
		r.Targets.Unclear++ // no rule contains the translations of IPVS, the kernel's load balancer
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		saved, saveErr := legacySave(ctx, family)
		if saveErr != nil {
			err = errors.Join(err, saveErr)
			continue
		}
		r.addLegacy(family, saved, local)
		r.Sources = append(r.Sources, legacySourceRules(family, saved)...)
	}
	return r, err
}

// addNft adds the state of nf_tables.
func (r *Ruleset) addNft(n *nft, local []netip.Addr) {
	r.Tables, r.NotUnderstood = len(n.tables), n.strange
	r.Flowtables, r.Offload = n.flow, n.hardware
	for _, c := range n.chains {
		list := n.rules[chainKey(c.Table, c.Name)]
		r.Compat = r.Compat || len(list) > 0 && builtIn(c)
		r.scan(c, list)
	}
	r.Sources = n.sourceRules()
	graph := newChainGraph()
	graph.readNft(n.rules, n.sets)
	r.Unread = graph.unread
	r.Targets.readNft(n.sets, n.rules)
	outside := fromOutside(n.chains, n.rules, graph)
	r.Forwards.readNft(outside, local)
	r.Untracked.readUntracked(outside)
	r.Forwarded, r.Named = nftPorts(n, nftables.ChainHookPrerouting, local, translatesPort)
	r.Opened, _ = nftPorts(n, nftables.ChainHookInput, local, opensPort)
	for _, c := range n.chains {
		if c.Hooknum == nil || c.Type == "" {
			continue
		}
		key := chainKey(c.Table, c.Name)
		known := graph.findAcceptPoint(key)
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

// hookNames are nftables' hook names, by number.
var hookNames = map[nftables.TableFamily][]string{
	nftables.TableFamilyIPv4:   {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyIPv6:   {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyINet:   {"prerouting", "input", "forward", "output", "postrouting", "ingress"},
	nftables.TableFamilyBridge: {"prerouting", "input", "forward", "output", "postrouting"},
	nftables.TableFamilyARP:    {"input", "output", "forward"},
	nftables.TableFamilyNetdev: {"ingress", "egress"},
}

// hookName returns the hook of a base chain; "" if it is unknown.
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

// builtIn reports whether iptables has a built-in chain and table with these names. Rules of iptables-nft without
// extensions are identical to rules of nft.
func builtIn(c *nftables.Chain) bool {
	return c.Hooknum != nil && (c.Table.Family == nftables.TableFamilyIPv4 || c.Table.Family == nftables.TableFamilyIPv6) &&
		slices.Contains(legacyHooks, c.Name) && slices.Contains([]string{"filter", "nat", "mangle", "raw", "security"}, c.Table.Name)
}

// scan counts the rules of a chain by effect.
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
					r.countOrderedSNAT(e.FullyRandom)
					r.Pools.nat(rule, e)
				} else {
					r.DestNAT++
				}
			case *expr.Masq:
				r.SourceNAT++
				r.countOrderedSNAT(e.FullyRandom)
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
			case *expr.Log: // to the kernel's log: not to a program (NFLOG), nor to auditd
				logs = logs || !limited && e.Key&(1<<unix.NFTA_LOG_GROUP) == 0 && e.Level != expr.LogLevelAudit
			case *expr.Meta:
				if e.SourceRegister && e.Key == expr.MetaKeyNFTRACE {
					r.Traces++
				}
			case *expr.Exthdr:
				if e.SourceRegister != 0 && e.Type == 2 { // writes the TCP option MSS
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
				r.target(e.Name, false) // its parameters are opaque bytes
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

// notes records the chain of the first tracing or logging rules.
func (r *Ruleset) notes(chain string, traces, logs int) {
	if traces == 0 && r.Traces > 0 {
		r.TraceIn = chain
	}
	if logs == 0 && r.Logs > 0 {
		r.LogIn = chain
	}
}

// trackingMatches are the iptables matches that use connection tracking.
var trackingMatches = []string{"conntrack", "state", "connmark", "connlimit", "connbytes", "connlabel", "helper", "cluster"}

// limitMatches are the iptables matches that limit the rate.
var limitMatches = []string{"limit", "hashlimit"}

// helper counts a rule that assigns a helper.
func (r *Ruleset) helper(wide bool) {
	r.Helpers++
	r.Tracking++
	if wide {
		r.WideHelpers++
	}
}

// asksPort reports whether a rule has a condition on ports.
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

// ctHelper reports whether the iptables target CT has a helper name, at byte 12 of struct xt_ct_target_info.
func ctHelper(e *expr.Target) bool {
	info, ok := e.Info.(*xt.Unknown)
	return ok && len(*info) > 12 && (*info)[12] != 0
}

// countOrderedSNAT counts a SNAT rule without random ports.
func (r *Ruleset) countOrderedSNAT(random bool) {
	if !random {
		r.InOrder++
	}
}

// target counts an iptables target in a rule of iptables-nft.
func (r *Ruleset) target(name string, random bool) {
	r.Compat = true
	switch name {
	case "SNAT", "MASQUERADE", "NETMAP":
		r.SourceNAT++
		r.countOrderedSNAT(random)
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

// isUnconditional reports whether every packet matches a rule.
func isUnconditional(rule *nftables.Rule) bool {
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

// acceptsKnown reports whether a rule accepts all packets of established connections. The connection state must be
// its only condition.
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

func hasReturn(rule *nftables.Rule) bool {
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
