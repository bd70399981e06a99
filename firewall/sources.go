// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// SourceRule is a rule that translates sources.
type SourceRule struct {
	Chain  string // "ip nat post", "iptables nat POSTROUTING".
	Compat bool   // in a chain of iptables-nft
	Legacy bool   // A rule of iptables-legacy.
	// Out are the output interfaces that the rule requires; empty: any, or an unknown condition.
	Out []string

	fits func(*Packet) bool
}

// Fits reports whether the rule can translate a packet. Conditions that cannot be evaluated count as true. It reads
// sets in the calling thread's namespace.
func (r *SourceRule) Fits(p *Packet) bool { return r.fits == nil || r.fits(p) }

// translates is the verdict of a source translation for may. The kernel has no such verdict.
const translates expr.VerdictKind = -1000

// translatesSource reports whether an expression translates sources.
func translatesSource(e expr.Any) bool {
	switch e := e.(type) {
	case *expr.Masq:
		return true
	case *expr.NAT:
		return e.Type == expr.NATTypeSourceNAT
	case *expr.Target:
		return e.Name == "MASQUERADE" || e.Name == "SNAT" || e.Name == "NETMAP"
	}
	return false
}

// sourceRules finds the rules of nf_tables that translate sources.
func (n *nft) sourceRules() (list []SourceRule) {
	b := n.rulesetWithCallers()
	for _, c := range n.chains {
		for _, rule := range n.rules[chainKey(c.Table, c.Name)] {
			if !slices.ContainsFunc(rule.Exprs, translatesSource) {
				continue
			}
			list = append(list, SourceRule{Chain: chainName(c.Table, c.Name), Compat: builtIn(c), Out: outputInterfaces(rule), fits: func(p *Packet) bool {
				return b.packetReaches(rule, p, func(kind expr.VerdictKind, _ string) bool { return kind == translates })
			}})
		}
	}
	return list
}

// outputInterfaces returns the names in a condition "oifname NAME" of a rule.
func outputInterfaces(rule *nftables.Rule) (names []string) {
	for i, e := range rule.Exprs[:max(len(rule.Exprs)-1, 0)] {
		m, isMeta := e.(*expr.Meta)
		c, isCmp := rule.Exprs[i+1].(*expr.Cmp)
		if isMeta && isCmp && m.Key == expr.MetaKeyOIFNAME && c.Op == expr.CmpOpEq {
			name, _, _ := bytes.Cut(c.Data, []byte{0})
			names = append(names, string(name))
		}
	}
	return names
}

// legacySourceRules finds the rules of iptables-legacy-save that translate sources.
func legacySourceRules(family nftables.TableFamily, saved string) (list []SourceRule) {
	for _, line := range parseSave(saved) {
		switch line.target() {
		case "MASQUERADE", "SNAT", "NETMAP":
		default:
			continue
		}
		r := SourceRule{Chain: legacyProgram(family) + " " + line.table + " " + line.chain, Legacy: true,
			fits: func(p *Packet) bool { return p.inFamily(family) && line.mayMatch(p) }}
		if at := slices.Index(line.words, "-o"); at > 0 && at+1 < len(line.words) && line.words[at-1] != "!" {
			r.Out = []string{line.words[at+1]}
		}
		list = append(list, r)
	}
	return list
}

// interfaceName returns a name as nf_tables keeps it in a register.
func interfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}
