// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Rule is a firewall rule, or a chain's policy, that drops packets.
type Rule struct {
	Chain   string `json:"chain"` // "inet filter forward", "iptables filter FORWARD".
	Hook    string `json:"hook"`  // nftables' name; "" if it is unknown or not unique.
	Text    string `json:"text"`
	Handle  string `json:"handle,omitempty"`
	Packets uint64 `json:"packets"` // The rule's own counter.
	Counted bool   `json:"counted"` // The rule has a counter.

	Legacy bool `json:"-"` // a rule of iptables-legacy

	fits func(*Packet) bool // evaluates the conditions; nil if they are unknown
}

// policyDrop is the text of a chain's policy.
const policyDrop = "policy drop"

// Policy reports whether r is a chain's policy instead of a rule.
func (r *Rule) Policy() bool { return strings.EqualFold(r.Text, policyDrop) }

// String returns the rule with its location.
func (r Rule) String() string {
	s := fmt.Sprintf("%s: %s", r.Chain, r.Text)
	if r.Handle != "" {
		s += " # handle " + r.Handle
	}
	return s
}

// ID identifies the rule across readings of the same ruleset.
func (r *Rule) ID() string {
	if r.Handle != "" {
		return r.Chain + "\x00" + r.Handle
	}
	return r.Chain + "\x00" + r.Text
}

// Fits reports whether the rule can drop a packet. Conditions of the rule, or of rules that lead to its chain, count
// as true if they cannot be evaluated. It reads sets in the calling thread's namespace.
func (r *Rule) Fits(p *Packet) bool { return r.fits == nil || r.fits(p) }

// DropRules lists the dropping rules of the calling thread's namespace with their counters. Rules of nftables have no
// text yet, see Describe.
func DropRules(ctx context.Context) ([]Rule, error) {
	var rules []Rule
	n, err := readTables()
	if err == nil {
		rules = n.dropRules()
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		saved, saveErr := legacySave(ctx, family)
		if err = errors.Join(err, saveErr); saveErr == nil {
			rules = append(rules, legacyDropRules(family, saved)...)
		}
	}
	return rules, err
}

// Counters returns copies of the rules without their conditions, for storage and comparison with a later list.
func Counters(rules []Rule) []Rule {
	rules = slices.Clone(rules)
	for i := range rules {
		rules[i].fits = nil
	}
	return rules
}

// verdictMask is NF_VERDICT_MASK. The other bits of a verdict are the queue number.
const verdictMask = 0xff

// dropsBy reports whether a verdict of this kind drops a packet.
func dropsBy(kind expr.VerdictKind) bool {
	return kind == expr.VerdictDrop || kind > 0 && kind&verdictMask == expr.VerdictQueue
}

// jump is a rule that sends packets to another chain.
type jump struct {
	rule *nftables.Rule
	to   string // chainKey
}

// rulesetWithCallers returns the ruleset with the callers of each chain.
func (n *nft) rulesetWithCallers() *calledRuleset {
	b := &calledRuleset{nft: n, hooks: map[string]string{}, callers: map[string][]jump{}}
	for _, c := range n.chains {
		key := chainKey(c.Table, c.Name)
		if c.Hooknum != nil {
			b.hooks[key] = hookName(c)
		}
		for _, rule := range n.rules[key] {
			for _, to := range n.leadsTo(rule) {
				b.callers[to] = append(b.callers[to], jump{rule, to})
			}
		}
	}
	return b
}

// dropRules finds the dropping rules of nf_tables.
func (n *nft) dropRules() (rules []Rule) {
	b := n.rulesetWithCallers()
	for _, c := range n.chains {
		key := chainKey(c.Table, c.Name)
		if c.Hooknum != nil && policyDrops(c) {
			rules = append(rules, Rule{Chain: chainName(c.Table, c.Name), Hook: hookName(c), Text: policyDrop,
				fits: func(p *Packet) bool { return p.inFamily(c.Table.Family) }})
		}
		for _, rule := range n.rules[key] {
			if !n.mayDrop(rule) {
				continue
			}
			r := Rule{Chain: chainName(c.Table, c.Name), Hook: b.hook(key), Handle: strconv.FormatUint(rule.Handle, 10),
				fits: func(p *Packet) bool { return b.drops(rule, p) }}
			for _, e := range rule.Exprs {
				if counter, is := e.(*expr.Counter); is {
					r.Counted, r.Packets = true, counter.Packets
				}
			}
			rules = append(rules, r)
		}
	}
	return rules
}

// mayDrop reports whether a rule can drop any packet.
func (n *nft) mayDrop(rule *nftables.Rule) bool {
	return slices.ContainsFunc(rule.Exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Verdict:
			return dropsBy(e.Kind)
		case *expr.Reject, *expr.Queue:
			return true
		case *expr.Target:
			return e.Name == "REJECT" || e.Name == "NFQUEUE"
		case *expr.Lookup:
			if !e.IsDestRegSet || e.DestRegister != unix.NFT_REG_VERDICT {
				return false
			}
			elements, _ := n.sets.elements(rule.Table, e.SetName)
			return slices.ContainsFunc(elements, func(e nftables.SetElement) bool {
				kind, _ := verdictOf(e)
				return len(e.Val) > 0 && dropsBy(kind)
			})
		}
		return false
	})
}

// leadsTo returns the chains that a rule jumps to.
func (n *nft) leadsTo(rule *nftables.Rule) []string { return newChainGraph().jumpTargets(rule, n.sets) }

// calledRuleset is a ruleset with the callers of each chain.
type calledRuleset struct {
	*nft
	hooks   map[string]string // hooks of base chains, by chainKey
	callers map[string][]jump
}

// deepest is the maximum depth of calls between chains in nf_tables.
const deepest = 16

// hook returns the hook with a path to a chain; "" for none or several.
func (b *calledRuleset) hook(chain string) string {
	found := map[string]bool{}
	b.visitBaseChains(chain, 0, func(base string, _ []jump) bool { found[b.hooks[base]] = true; return false }, nil)
	if len(found) != 1 {
		return ""
	}
	for hook := range found {
		return hook
	}
	return ""
}

// mostSteps bounds the number of followed callers, because thousands of chains may call each other.
const mostSteps = 10_000

// visitBaseChains follows the callers of a chain up to base chains. It calls visit with each base chain and the jumps down to
// the chain. It ends when visit returns true.
func (b *calledRuleset) visitBaseChains(chain string, steps int, visit func(base string, via []jump) bool, via []jump) (done bool, after int) {
	if _, base := b.hooks[chain]; base {
		return visit(chain, via), steps
	}
	if len(via) > deepest {
		return false, steps
	}
	for _, caller := range b.callers[chain] {
		if steps++; steps > mostSteps {
			return false, steps
		}
		key := chainKey(caller.rule.Table, caller.rule.Chain.Name)
		if done, steps = b.visitBaseChains(key, steps, visit, append(slices.Clone(via), caller)); done {
			return true, steps
		}
	}
	return false, steps
}

// drops reports whether a rule can drop a packet.
func (b *calledRuleset) drops(rule *nftables.Rule, p *Packet) bool {
	return b.packetReaches(rule, p, func(kind expr.VerdictKind, _ string) bool { return dropsBy(kind) })
}

// packetReaches reports whether a packet can reach a rule and get a wanted verdict there. The rule and the jumps to its chain
// must fit.
func (b *calledRuleset) packetReaches(rule *nftables.Rule, p *Packet, wanted func(kind expr.VerdictKind, chain string) bool) bool {
	if !b.mayReachVerdict(rule, p, wanted) {
		return false
	}
	met := false // a chain without callers has no packets, unless the ruleset changed during the read
	reached, _ := b.visitBaseChains(chainKey(rule.Table, rule.Chain.Name), 0, func(_ string, via []jump) bool {
		met = true
		return !slices.ContainsFunc(via, func(j jump) bool {
			return !b.mayReachVerdict(j.rule, p, func(_ expr.VerdictKind, chain string) bool {
				return chain != "" && chainKey(j.rule.Table, chain) == j.to
			})
		})
	}, nil)
	return reached || !met
}

// legacyDropRules finds the dropping rules in the output of "iptables-legacy-save -c", or of the program for IPv6.
func legacyDropRules(family nftables.TableFamily, saved string) (rules []Rule) {
	for _, line := range parseSave(saved) {
		chain := legacyProgram(family) + " " + line.table + " " + line.chain
		switch target := line.target(); {
		case line.policy == "DROP":
			rules = append(rules, Rule{Chain: chain, Hook: strings.ToLower(line.chain), Text: "policy DROP", Counted: true, Packets: line.packets, Legacy: true,
				fits: func(p *Packet) bool { return p.inFamily(family) }})
		case target == "DROP" || target == "REJECT" || target == "NFQUEUE":
			hook := ""
			if slices.Contains(legacyHooks, line.chain) {
				hook = strings.ToLower(line.chain) // other chains are user-defined
			}
			rules = append(rules, Rule{Chain: chain, Hook: hook, Text: line.text, Counted: true, Packets: line.packets, Legacy: true,
				fits: func(p *Packet) bool { return p.inFamily(family) && line.mayMatch(p) }})
		}
	}
	return rules
}

// Describe adds the text of nftables rules in the format of the nft program. Without the program the text consists of
// the rule's location and the missing program.
func Describe(ctx context.Context, rules []Rule) error {
	bare := func(r Rule) bool { return r.Text == "" }
	if !slices.ContainsFunc(rules, bare) {
		return nil
	}
	listing, err := run(ctx, "nft", "-a", "-t", "list", "ruleset")
	texts := ruleTexts(listing)
	for i := range rules {
		if r := &rules[i]; r.Text == "" {
			if r.Text = texts[r.Chain+"\x00"+r.Handle]; r.Text == "" {
				r.Text = "a rule that drops"
			}
		}
	}
	if err != nil {
		return fmt.Errorf("texts of rules: %w; install nftables to have them shown", err)
	}
	return nil
}

// ruleTexts parses "nft -a list ruleset": rules by chain and handle, without their counters.
func ruleTexts(listing string) map[string]string {
	texts := map[string]string{}
	table, chain := "", ""
	for line := range strings.Lines(listing) {
		line = strings.TrimRight(line, "\n")
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "table ") && len(words) > 2:
			table, chain = words[1]+" "+words[2], ""
		case strings.HasPrefix(line, "\tchain ") && len(words) > 1:
			chain = table + " " + words[1]
		case strings.HasPrefix(line, "\t\t") && chain != "":
			text, handle, found := cutLast(strings.TrimSpace(line), " # handle ")
			if found {
				texts[chain+"\x00"+handle] = withoutCounter(text)
			}
		default:
			chain = ""
		}
	}
	return texts
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// withoutCounter removes "counter packets 7 bytes 420" from a rule, because its numbers change.
func withoutCounter(text string) string {
	words := strings.Fields(text)
	for i := 0; i+4 < len(words); i++ {
		if words[i] == "counter" && words[i+1] == "packets" && words[i+3] == "bytes" {
			return strings.Join(slices.Delete(words, i, i+5), " ")
		}
	}
	return text
}
