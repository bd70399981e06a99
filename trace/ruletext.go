// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// Rule is a firewall rule, or a chain's policy, that drops packets.
type Rule struct {
	Chain   string `json:"chain"` // "inet filter forward", "iptables filter FORWARD"
	Hook    string `json:"hook"`  // nftables' name, "" when it cannot be told
	Text    string `json:"text"`
	Handle  string `json:"handle,omitempty"`
	Packets uint64 `json:"packets"` // the rule's own counter
	Counted bool   `json:"counted"` // it has one

	via []string // the rules that jump here from the base chain, innermost first
}

// String shows the rule as a person would look for it.
func (r Rule) String() string {
	s := fmt.Sprintf("%s: %s", r.Chain, r.Text)
	if r.Handle != "" {
		s += " # handle " + r.Handle
	}
	return s
}

// legacy tells whether the old iptables hold the rule.
func (r Rule) legacy() bool {
	program, _, _ := strings.Cut(r.Chain, " ")
	return program == legacyPrograms[0].name || program == legacyPrograms[1].name
}

// legacyPrograms are those of the old iptables, whose names begin their chains' here, and
// the kernel's lists of the tables that they have made.
var legacyPrograms = []struct{ name, tables string }{{"iptables", "ip_tables_names"}, {"ip6tables", "ip6_tables_names"}}

func (r Rule) id() string { return r.Chain + "\x00" + r.Handle + "\x00" + r.Text }

// DropRules lists the dropping rules of a namespace with their counters, as the
// nft and iptables-legacy programs print them.
func DropRules(ctx context.Context, ns conntrack.Namespace) (rules []Rule, err error) {
	err = ns.Do(func() error {
		var text string
		if hasTables() {
			if text, err = run(ctx, "nft", "-a", "-t", "list", "ruleset"); err == nil {
				rules = parseNft(text)
			}
		}
		for _, p := range legacyPrograms {
			if text, err := os.ReadFile("/" + netDir + p.tables); err != nil || len(bytes.TrimSpace(text)) == 0 {
				continue
			}
			if text, err := run(ctx, p.name+"-legacy-save", "-c"); err == nil {
				rules = append(rules, parseLegacy(p.name, text)...)
			}
		}
		return err
	})
	return rules, err
}

// hasTables tells whether nftables holds anything here, so that the program need
// not be run in every empty namespace.
func hasTables() bool {
	conn, err := nftables.New()
	if err != nil {
		return false
	}
	tables, err := conn.ListTables()
	return err != nil || len(tables) > 0
}

func run(ctx context.Context, name string, args ...string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		path = "/usr/sbin/" + name
		if _, missing := os.Stat(path); missing != nil {
			return "", fmt.Errorf("rules: %w; install the program to see the rule's text", err)
		}
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("rules: %s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

var (
	nftTable   = regexp.MustCompile(`^table (\S+ \S+) \{`)
	nftChain   = regexp.MustCompile(`^\tchain (\S+) \{`)
	nftHook    = regexp.MustCompile(`type \S+ hook (\S+)`)
	nftCounter = regexp.MustCompile(` ?counter packets (\d+) bytes \d+`)
	nftHandle  = regexp.MustCompile(` # handle (\d+)$`)
	nftJump    = regexp.MustCompile(`\b(?:jump|goto) (\S+?)(?:[,\s}]|$)`)
	nftDrops   = regexp.MustCompile(`\b(drop|reject|queue)\b`)
)

// parseNft finds the dropping rules in the text of "nft -a list ruleset".
func parseNft(text string) []Rule {
	var rules []Rule
	var table, chain string
	hooks := map[string]string{} // chain → hook
	callers := map[string]jump{}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if m := nftTable.FindStringSubmatch(line); m != nil {
			table, chain = m[1], ""
			continue
		}
		if m := nftChain.FindStringSubmatch(line); m != nil {
			chain = table + " " + m[1]
			continue
		}
		if strings.HasPrefix(line, "\t}") || !strings.HasPrefix(line, "\t\t") {
			chain = ""
		}
		if chain == "" {
			continue
		}
		body := strings.TrimSpace(line)
		if m := nftHook.FindStringSubmatch(body); m != nil {
			hooks[chain] = m[1]
			if strings.Contains(body, "policy drop") {
				rules = append(rules, Rule{Chain: chain, Text: "policy drop"})
			}
			continue
		}
		for _, m := range nftJump.FindAllStringSubmatch(body, -1) {
			callers[table+" "+m[1]] = jump{chain, body}
		}
		if nftDrops.MatchString(body) {
			rules = append(rules, nftRule(chain, body))
		}
	}
	for i := range rules {
		rules[i].Hook, rules[i].via = hookOf(rules[i].Chain, hooks, callers)
	}
	return rules
}

func nftRule(chain, body string) Rule {
	r := Rule{Chain: chain}
	if m := nftHandle.FindStringSubmatch(body); m != nil {
		r.Handle = m[1]
		body = strings.TrimSuffix(body, m[0])
	}
	if m := nftCounter.FindStringSubmatch(body); m != nil {
		r.Counted = true
		r.Packets, _ = strconv.ParseUint(m[1], 10, 64)
		body = strings.Replace(body, m[0], "", 1)
	}
	r.Text = strings.TrimSpace(body)
	return r
}

// jump is where a chain is called from.
type jump struct{ chain, rule string }

// hookOf follows the jumps back to a base chain, and collects the rules that jump.
func hookOf(chain string, hooks map[string]string, callers map[string]jump) (hook string, via []string) {
	for range 16 { // nftables allows no deeper nesting
		if hook, ok := hooks[chain]; ok {
			return hook, via
		}
		next, ok := callers[chain]
		if !ok {
			return "", via
		}
		chain, via = next.chain, append(via, next.rule)
	}
	return "", via
}

// parseLegacy finds the dropping rules in the text of "iptables-legacy-save -c", or of
// the program for IPv6.
func parseLegacy(program, text string) []Rule {
	var rules []Rule
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":"): // :INPUT DROP [12:720]
			f := strings.Fields(line[1:])
			if len(f) == 3 && f[1] == "DROP" {
				rules = append(rules, Rule{Chain: program + " " + table + " " + f[0], Hook: strings.ToLower(f[0]),
					Text: "policy DROP", Counted: true, Packets: legacyCount(f[2])})
			}
		case strings.HasPrefix(line, "["):
			count, rest, _ := strings.Cut(line, " ")
			if !strings.Contains(rest, "-j DROP") && !strings.Contains(rest, "-j REJECT") {
				continue
			}
			f := strings.Fields(rest)
			hook := strings.ToLower(f[1])
			if !slices.Contains(hookNames[:], hook) {
				hook = "" // a chain of the user's
			}
			rules = append(rules, Rule{Chain: program + " " + table + " " + f[1], Hook: hook, Text: rest,
				Counted: true, Packets: legacyCount(count)})
		}
	}
	return rules
}

func legacyCount(s string) uint64 {
	packets, _, _ := strings.Cut(strings.Trim(s, "[]"), ":")
	n, _ := strconv.ParseUint(packets, 10, 64)
	return n
}

// blame finds the rules that may have dropped the samples between two listings:
// those whose counters moved, or else those whose visible conditions fit; without an
// earlier listing no counter is known to have moved. One result is certain as far as
// can be seen, several are candidates.
func blame(before, after []Rule, hooks map[Hook]bool, samples []*DropSample) []Rule {
	old := map[string]uint64{}
	for _, r := range before {
		old[r.id()] = r.Packets
	}
	var moved, candidates []Rule
	for _, r := range after {
		if r.Counted {
			if r.Packets -= min(old[r.id()], r.Packets); r.Packets == 0 {
				continue
			}
			if before != nil {
				moved = append(moved, r)
				continue
			}
		}
		if !hookFits(r.Hook, hooks) || !anyFits(r, samples) {
			continue
		}
		candidates = append(candidates, r)
	}
	if exact := slices.DeleteFunc(slices.Clone(candidates), func(r Rule) bool { return r.Text == "policy drop" }); len(exact) > 0 {
		candidates = exact
	}
	return append(moved, candidates...)
}

func hookFits(hook string, seen map[Hook]bool) bool {
	if hook == "" || hook == "ingress" || hook == "egress" || seen[HookHairpin] || len(seen) == 0 {
		return true
	}
	for h := range seen {
		if h.String() == hook {
			return true
		}
	}
	return false
}

func anyFits(r Rule, samples []*DropSample) bool {
	if len(samples) == 0 {
		return true
	}
	for _, s := range samples {
		if fits(r.Text, s) && !slices.ContainsFunc(r.via, func(rule string) bool { return !fits(rule, s) }) {
			return true
		}
	}
	return false
}

var nftMatch = regexp.MustCompile(`\b(ip saddr|ip daddr|ip6 saddr|ip6 daddr|tcp dport|tcp sport|udp dport|udp sport|th dport|th sport|iifname|oifname|ip protocol|meta l4proto|ct state) (!= )?(\{[^}]*\}|"[^"]*"|\S+)`)

// fits tells whether the conditions of an nft rule that can be judged from a
// packet's header hold; those that cannot are taken to hold.
func fits(text string, s *DropSample) bool {
	for _, m := range nftMatch.FindAllStringSubmatch(text, -1) {
		holds, known := condition(m[1], m[3], s)
		if known && holds == (m[2] != "") {
			return false
		}
	}
	return true
}

func condition(field, value string, s *DropSample) (holds, known bool) {
	p := s.Packet
	if strings.HasPrefix(value, "@") || strings.HasPrefix(value, "$") {
		return false, false
	}
	switch field {
	case "ip saddr", "ip6 saddr":
		return oneOf(value, func(v string) bool { return addrIn(v, p.Source.Addr()) }), addresses(value)
	case "ip daddr", "ip6 daddr":
		return oneOf(value, func(v string) bool { return addrIn(v, p.Dest.Addr()) }), addresses(value)
	case "tcp dport", "udp dport", "th dport":
		return protoFits(field, s) && oneOf(value, func(v string) bool { return portIn(v, p.Dest.Port()) }), numeric(value)
	case "tcp sport", "udp sport", "th sport":
		return protoFits(field, s) && oneOf(value, func(v string) bool { return portIn(v, p.Source.Port()) }), numeric(value)
	case "ip protocol", "meta l4proto":
		return oneOf(value, func(v string) bool { return protocolOf(v) == p.Protocol }),
			!oneOf(value, func(v string) bool { return protocolOf(v) == flow.Any })
	case "iifname":
		return oneOf(value, func(v string) bool { return matches(v, s.Interface) }), s.Hook == HookPrerouting || s.Hook == HookInput || s.Hook == HookForward
	}
	return false, false
}

func protoFits(field string, s *DropSample) bool {
	proto := field[:strings.IndexByte(field, ' ')]
	return proto == "th" || proto == s.Packet.Protocol.String()
}

// protocolOf reads a protocol as nft prints it; flow.Any when it is none that is known here.
func protocolOf(name string) flow.Protocol {
	if name == "ipv6-icmp" {
		return flow.ICMPv6
	}
	p, _ := flow.ParseProtocol(name)
	return p
}

// addresses tells whether a value is addresses, and not the rest of a concatenation, a
// mask or a map.
func addresses(value string) bool {
	return !oneOf(value, func(v string) bool { return v == "" || strings.Trim(v, "0123456789abcdef.:/-") != "" }) && value != "."
}

// numeric tells whether a value is ports in digits; nft may print names.
func numeric(value string) bool {
	return strings.Trim(value, "0123456789-, {}") == ""
}

func oneOf(value string, is func(string) bool) bool {
	for v := range strings.SplitSeq(strings.Trim(value, "{} "), ",") {
		if is(strings.Trim(strings.TrimSpace(v), `"`)) {
			return true
		}
	}
	return false
}

func addrIn(value string, a netip.Addr) bool {
	if from, to, ok := strings.Cut(value, "-"); ok {
		lo, err1 := netip.ParseAddr(from)
		hi, err2 := netip.ParseAddr(to)
		return err1 == nil && err2 == nil && !a.Less(lo) && !hi.Less(a)
	}
	if p, err := netip.ParsePrefix(value); err == nil {
		return p.Contains(a)
	}
	one, err := netip.ParseAddr(value)
	return err == nil && one == a
}

func portIn(value string, port uint16) bool {
	from, to, ok := strings.Cut(value, "-")
	if !ok {
		to = from
	}
	lo, err1 := strconv.Atoi(from)
	hi, err2 := strconv.Atoi(to)
	return err1 == nil && err2 == nil && lo <= int(port) && int(port) <= hi
}
