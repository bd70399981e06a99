// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// legacyChain is a chain of iptables-legacy during parsing.
type legacyChain struct {
	rules      []portRule
	drops      int
	policyDrop bool
}

// legacyHooks are the chains attached to hooks.
var legacyHooks = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// addLegacy parses the output of iptables-legacy-save or ip6tables-legacy-save.
func (r *Ruleset) addLegacy(family nftables.TableFamily, saved string, local []netip.Addr) {
	chains, order := map[string]*legacyChain{}, []string{}
	graph := newChainGraph()
	for _, line := range parseSave(saved) {
		key := line.table + " " + line.chain
		c := chains[key]
		if c == nil {
			c = &legacyChain{}
			chains[key] = c
			order = append(order, key)
		}
		if line.policy != "" {
			c.policyDrop = line.policy == "DROP"
			continue
		}
		graph.steps[key] = append(graph.steps[key], c.add(&line, local))
		traces, logs := r.Traces, r.Logs
		r.addLegacyRule(family, &line, local)
		r.notes(legacyProgram(family)+" "+key, traces, logs)
		if line.chain == "KUBE-SERVICES" {
			r.KubeServices = max(r.KubeServices, len(c.rules))
		}
	}
	for _, key := range order {
		c := chains[key]
		table, name, _ := strings.Cut(key, " ")
		if len(c.rules) == 0 || !slices.Contains(legacyHooks, name) {
			continue
		}
		known := graph.findAcceptPoint(key)
		r.Chains = append(r.Chains, Chain{
			Name: legacyProgram(family) + " " + key, Hook: strings.ToLower(name), NAT: table == "nat",
			Longest: graph.longest(key), Established: known.at, UpTo: known.walked,
			Drops: c.drops, PolicyDrop: c.policyDrop,
		})
	}
	rulesOf := func(key string) []portRule {
		if c := chains[key]; c != nil {
			return c.rules
		}
		return nil
	}
	ports, named := portsOf([]string{"nat PREROUTING"}, translatesPort, rulesOf)
	opened, _ := portsOf([]string{"filter INPUT"}, opensPort, rulesOf)
	r.Opened = append(r.Opened, opened...)
	r.Forwarded, r.Named = append(r.Forwarded, ports...), append(r.Named, named...)
	r.ForwardedLegacy = append(r.ForwardedLegacy, ports...)
}

// add records a rule and returns it as a step of a packet's path.
func (c *legacyChain) add(line *savedRule, local []netip.Addr) pathRule {
	w := legacyPortRule(line.table, line.words, local)
	target := line.target()
	some := slices.ContainsFunc([]string{"!", "-i", "-o", "-s", "-d", "-p"}, func(option string) bool { return slices.Contains(line.words, option) })
	known := target == "ACCEPT" && slices.Contains(strings.Split(line.option("--ctstate", "--state"), ","), "ESTABLISHED") && !some
	if target == "DROP" || target == "REJECT" {
		c.drops++
	}
	c.rules = append(c.rules, w)
	return pathRule{every: line.isUnconditional(), known: known, returns: target == "RETURN", to: []string{w.to}}
}

// isUnconditional reports whether every packet matches a rule. Comments are the only permitted match.
func (r *savedRule) isUnconditional() bool {
	for i := 2; i < len(r.words); i++ {
		switch r.words[i] {
		case "-j", "-g":
			return true
		case "-m":
			if i++; i >= len(r.words) || r.words[i] != "comment" {
				return false
			}
		case "--comment":
			i++
		default:
			return false
		}
	}
	return false // a rule without target only counts
}

// addLegacyRule counts a rule by its effect.
func (r *Ruleset) addLegacyRule(family nftables.TableFamily, line *savedRule, local []netip.Addr) {
	f := line.words
	r.Legacy++
	r.Targets.addLegacyLine(f)
	r.Forwards.addLegacyLine(family, f, local)
	r.Untracked.legacyUntracked(family, f)
	r.Pools.addLegacyLine(f)
	limited := false
	for i, word := range f {
		if word == "-m" && i+1 < len(f) {
			if slices.Contains(trackingMatches, f[i+1]) {
				r.Tracking++
			}
			limited = limited || slices.Contains(limitMatches, f[i+1])
		}
		if word == "-j" && i+1 < len(f) {
			compat := r.Compat
			if f[i+1] == "CT" && slices.Contains(f, "--helper") {
				r.helper(f[1] == "PREROUTING" && line.option("--dport", "--dports", "--sport", "--sports", "--ports") == "")
				continue
			}
			r.target(f[i+1], slices.Contains(f, "--random-fully"))
			r.Compat = compat // these are the legacy tables themselves
			if f[i+1] == "LOG" && !limited {
				r.Logs++
			}
		}
	}
}
