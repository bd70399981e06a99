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
	Chain   string `json:"chain"` // "inet filter forward", "iptables filter FORWARD"
	Hook    string `json:"hook"`  // nftables' name, "" when it cannot be told, or there are several
	Text    string `json:"text"`
	Handle  string `json:"handle,omitempty"`
	Packets uint64 `json:"packets"` // the rule's own counter
	Counted bool   `json:"counted"` // it has one

	Legacy bool `json:"-"` // iptables-legacy holds it

	fits func(*Packet) bool // nil: nothing is known of its conditions
}

// policyDrop is the text of a chain's policy.
const policyDrop = "policy drop"

// Policy tells whether it is no rule but the policy of a chain.
func (r *Rule) Policy() bool { return strings.EqualFold(r.Text, policyDrop) }

// String shows the rule as a person would look for it.
func (r Rule) String() string {
	s := fmt.Sprintf("%s: %s", r.Chain, r.Text)
	if r.Handle != "" {
		s += " # handle " + r.Handle
	}
	return s
}

// ID is the same in two readings of one ruleset.
func (r *Rule) ID() string {
	if r.Handle != "" {
		return r.Chain + "\x00" + r.Handle
	}
	return r.Chain + "\x00" + r.Text
}

// Fits tells whether the rule may drop a packet: none of its conditions, or of the rules that
// lead to its chain, is known not to hold. It reads sets in the calling thread's namespace.
func (r *Rule) Fits(p *Packet) bool { return r.fits == nil || r.fits(p) }

// DropRules lists the dropping rules of the calling thread's namespace with their counters.
// Rules of nftables have no text yet, see Describe.
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

// Counters are the same rules without what tells whether they fit a packet: to be kept, and
// compared with a later list.
func Counters(rules []Rule) []Rule {
	rules = slices.Clone(rules)
	for i := range rules {
		rules[i].fits = nil
	}
	return rules
}

// verdictMask is NF_VERDICT_MASK: the rest of a verdict is the number of a queue.
const verdictMask = 0xff

// dropsBy tells whether a verdict of this kind drops a packet.
func dropsBy(kind expr.VerdictKind) bool {
	return kind == expr.VerdictDrop || kind > 0 && kind&verdictMask == expr.VerdictQueue
}

// jump is a rule that sends packets to another chain.
type jump struct {
	rule *nftables.Rule
	to   string // chainKey
}

// dropRules finds the dropping rules of nf_tables.
func (n *nft) dropRules() (rules []Rule) {
	b := &book{nft: n, hooks: map[string]string{}, callers: map[string][]jump{}}
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
	for _, c := range n.chains {
		key := chainKey(c.Table, c.Name)
		if c.Hooknum != nil && policyDrops(c) {
			rules = append(rules, Rule{Chain: chainName(c.Table, c.Name), Hook: hookName(c), Text: policyDrop,
				fits: func(p *Packet) bool { return p.of(c.Table.Family) }})
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

// mayDrop tells whether a rule drops any packet at all.
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

// leadsTo are the chains that a rule sends packets to.
func (n *nft) leadsTo(rule *nftables.Rule) []string { return newChainGraph().from(rule, n.sets) }

// book is what a ruleset looks like from below: where chains are called from.
type book struct {
	*nft
	hooks   map[string]string // of base chains, by chainKey
	callers map[string][]jump
}

// deepest is how deep nf_tables lets chains call each other.
const deepest = 16

// hook is the one where packets come to a chain; "": none, or several.
func (b *book) hook(chain string) string {
	found := map[string]bool{}
	b.climb(chain, 0, func(base string, _ []jump) bool { found[b.hooks[base]] = true; return false }, nil)
	if len(found) != 1 {
		return ""
	}
	for hook := range found {
		return hook
	}
	return ""
}

// mostSteps bounds how many callers are followed: chains with thousands may call each other.
const mostSteps = 10_000

// climb follows the callers of a chain up to base chains, and calls visit with each and the jumps
// that lead down from there. It ends when visit returns true.
func (b *book) climb(chain string, steps int, visit func(base string, via []jump) bool, via []jump) (done bool, after int) {
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
		if done, steps = b.climb(key, steps, visit, append(slices.Clone(via), caller)); done {
			return true, steps
		}
	}
	return false, steps
}

// drops tells whether a rule may drop a packet: it fits, and so do the rules by which the packet
// comes to its chain.
func (b *book) drops(rule *nftables.Rule, p *Packet) bool {
	if !b.may(rule, p, func(kind expr.VerdictKind, _ string) bool { return dropsBy(kind) }) {
		return false
	}
	met := false // chains that nothing calls drop nothing, but then the reading may be behind
	reached, _ := b.climb(chainKey(rule.Table, rule.Chain.Name), 0, func(_ string, via []jump) bool {
		met = true
		return !slices.ContainsFunc(via, func(j jump) bool {
			return !b.may(j.rule, p, func(_ expr.VerdictKind, chain string) bool {
				return chain != "" && chainKey(j.rule.Table, chain) == j.to
			})
		})
	}, nil)
	return reached || !met
}

// legacyDropRules finds the dropping rules in the text of "iptables-legacy-save -c", or of the
// program for IPv6.
func legacyDropRules(family nftables.TableFamily, saved string) (rules []Rule) {
	for _, line := range parseSave(saved) {
		chain := legacyProgram(family) + " " + line.table + " " + line.chain
		switch target := line.target(); {
		case line.policy == "DROP":
			rules = append(rules, Rule{Chain: chain, Hook: strings.ToLower(line.chain), Text: "policy DROP", Counted: true, Packets: line.packets, Legacy: true,
				fits: func(p *Packet) bool { return p.of(family) }})
		case target == "DROP" || target == "REJECT" || target == "NFQUEUE":
			hook := ""
			if slices.Contains(legacyHooks, line.chain) {
				hook = strings.ToLower(line.chain) // others are the user's
			}
			rules = append(rules, Rule{Chain: chain, Hook: hook, Text: line.text, Counted: true, Packets: line.packets, Legacy: true,
				fits: func(p *Packet) bool { return p.of(family) && line.fits(p) }})
		}
	}
	return rules
}

// Describe adds the text of nftables rules as the nft program prints them. Without the program
// they say where they are, and what is missing.
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

// ruleTexts reads the text of "nft -a list ruleset": rules by chain and handle, without their
// counters.
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

// withoutCounter takes "counter packets 7 bytes 420" out of a rule: its numbers change.
func withoutCounter(text string) string {
	words := strings.Fields(text)
	for i := 0; i+4 < len(words); i++ {
		if words[i] == "counter" && words[i+1] == "packets" && words[i+3] == "bytes" {
			return strings.Join(slices.Delete(words, i, i+5), " ")
		}
	}
	return text
}
