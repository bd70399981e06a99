// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// legacyChain is a chain of iptables-legacy while its rules are read.
type legacyChain struct {
	rules      []way
	drops      int
	policyDrop bool
}

// legacyHooks are the chains that packets meet by themselves.
var legacyHooks = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// addLegacy reads the text of iptables-legacy-save, or ip6tables'.
func (r *Ruleset) addLegacy(family nftables.TableFamily, saved string, local []netip.Addr) {
	chains, order, table := map[string]*legacyChain{}, []string{}, ""
	ways := newWays()
	chain := func(name string) *legacyChain {
		key := table + " " + name
		if chains[key] == nil {
			chains[key] = &legacyChain{}
			order = append(order, key)
		}
		return chains[key]
	}
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		f := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":") && len(f) > 1:
			chain(f[0][1:]).policyDrop = f[1] == "DROP"
		case len(f) > 1 && f[0] == "-A":
			c := chain(f[1])
			key := table + " " + f[1]
			ways.steps[key] = append(ways.steps[key], c.add(table, f, line, local))
			traces, logs := r.Traces, r.Logs
			r.addLegacyRule(family, f, line, local)
			r.notes(legacyProgram(family)+" "+key, traces, logs)
			if f[1] == "KUBE-SERVICES" {
				r.KubeServices = max(r.KubeServices, len(c.rules))
			}
		}
	}
	for _, key := range order {
		c := chains[key]
		table, name, _ := strings.Cut(key, " ")
		if len(c.rules) == 0 || !slices.Contains(legacyHooks, name) {
			continue
		}
		known := ways.accepts(key)
		r.Chains = append(r.Chains, Chain{
			Name: legacyProgram(family) + " " + key, Hook: strings.ToLower(name), NAT: table == "nat",
			Longest: ways.longest(key), Established: known.at, UpTo: known.walked,
			Drops: c.drops, PolicyDrop: c.policyDrop,
		})
	}
	r.Forwarded = append(r.Forwarded, forwardedPorts([]string{"nat PREROUTING"}, func(key string) []way {
		if c := chains[key]; c != nil {
			return c.rules
		}
		return nil
	})...)
}

func legacyProgram(family nftables.TableFamily) string {
	if family == nftables.TableFamilyIPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// add notes a rule, and returns it as a step of a packet's way.
func (c *legacyChain) add(table string, words []string, line string, local []netip.Addr) step {
	w := legacyWay(table, words, local)
	at := max(slices.Index(words, "-j"), slices.Index(words, "-g"))
	target := ""
	if at > 0 && at+1 < len(words) {
		target = words[at+1]
	}
	some := slices.ContainsFunc([]string{"!", "-i", "-o", "-s", "-d", "-p"}, func(option string) bool { return slices.Contains(words, option) })
	known := target == "ACCEPT" && strings.Contains(line, "ESTABLISHED") && !some
	if target == "DROP" || target == "REJECT" {
		c.drops++
	}
	c.rules = append(c.rules, w)
	return step{every: everyPacket.MatchString(line), known: known, returns: target == "RETURN", to: []string{w.to}}
}

// everyPacket is a rule without a match but a comment.
var everyPacket = regexp.MustCompile(`^-A \S+ (-m comment --comment ("([^"\\]|\\.)*"|\S+) )*-[jg] `)

// addLegacyRule counts what a rule does.
func (r *Ruleset) addLegacyRule(family nftables.TableFamily, f []string, line string, local []netip.Addr) {
	r.Legacy++
	r.Targets.legacy(f)
	r.Forwards.legacy(family, f, local)
	r.Untracked.legacyUntracked(family, f)
	r.Pools.legacy(f)
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
				r.helper(f[1] == "PREROUTING" && !strings.Contains(line, "port"))
				continue
			}
			r.target(f[i+1], strings.Contains(line, "--random-fully"))
			r.Compat = compat // these are the legacy tables themselves
			if f[i+1] == "LOG" && !limited {
				r.Logs++
			}
		}
	}
}
