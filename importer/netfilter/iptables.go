// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/importer/draft"
)

// iptables parses the concatenated output of iptables-save, ip6tables-save and ipset save.
type iptables struct {
	d      *draft.Draft
	set    *ruleset
	table  string
	family int
}

// readIPTables parses the text of the draft.
func readIPTables(d *draft.Draft) (*ruleset, error) {
	p := &iptables{d: d, family: 4, set: &ruleset{chains: map[chainID]*chain{}, sets: map[string][]netip.Prefix{}, setLines: map[string][]int{}}}
	seen := false
	for i, line := range d.Lines() {
		n, line := i+1, strings.TrimSpace(line)
		switch {
		case line == "":
		case line[0] == '#':
			if strings.Contains(line, "ip6tables-save") {
				p.family = 6
			} else if strings.Contains(line, "iptables-save") {
				p.family = 4
			}
			if strings.Contains(line, "iptables-legacy tables present") {
				d.Lost(n, "", "the tables of iptables-legacy have rules too, which are not in this file", "save these as well: iptables-legacy-save")
			}
		case line[0] == '*':
			p.table, seen = line[1:], true
			d.Structure(n)
		case line == "COMMIT":
			p.table = ""
			d.Structure(n)
		case line[0] == ':':
			p.declare(n, line[1:])
		case strings.HasPrefix(line, "create ") || strings.HasPrefix(line, "add "):
			seen = true
			p.ipset(n, strings.Fields(line))
		default:
			p.rule(n, line)
		}
	}
	if !seen {
		return nil, errors.New("no table in it: pass the output of iptables-save, lines such as *nat and -A PREROUTING ...; the output of iptables -L is incomplete")
	}
	return p.set, nil
}

func (p *iptables) id(name string) chainID {
	return chainID{fmt.Sprintf("ip%d %s", p.family, p.table), name}
}

// baseHooks are the chains that the kernel enters.
var baseHooks = map[string]hook{
	"PREROUTING": hookPrerouting, "INPUT": hookInput, "FORWARD": hookForward, "OUTPUT": hookOutput, "POSTROUTING": hookPostrouting,
}

func (p *iptables) chain(line int, name string) *chain {
	id := p.id(name)
	c := p.set.chains[id]
	if c == nil {
		c = &chain{id: id, line: line, family: p.family, hook: baseHooks[name], nat: p.table == "nat", early: p.table == "raw"}
		p.set.chains[id] = c
		p.set.order = append(p.set.order, c)
	}
	return c
}

func (p *iptables) declare(n int, rest string) {
	f := strings.Fields(rest)
	if len(f) < 2 || p.table == "" {
		return
	}
	c := p.chain(n, f[0])
	c.line = n
	c.drops = f[1] == "DROP"
	p.d.Structure(n)
}

// ipset reads lines of ipset save.
func (p *iptables) ipset(n int, w []string) {
	if len(w) < 3 {
		return
	}
	name := w[1]
	p.set.setLines[name] = append(p.set.setLines[name], n)
	if w[0] == "create" {
		switch w[2] {
		case "hash:net", "hash:ip", "bitmap:ip":
			if p.set.sets[name] == nil {
				p.set.sets[name] = []netip.Prefix{}
			}
		}
		return
	}
	if p.set.sets[name] == nil {
		return // of a type without an equivalent
	}
	list, err := prefixesOf(w[2])
	if err != nil || len(w) > 3 && w[3] == "nomatch" {
		p.d.Lost(n, "", "the element has no equivalent", "write the addresses of the set under firewall: sets:")
		return
	}
	p.set.sets[name] = append(p.set.sets[name], list...)
}

// rule reads a line "-A CHAIN ...".
func (p *iptables) rule(n int, line string) {
	words, err := split(line)
	if err != nil || p.table == "" {
		return // gets a note at the end
	}
	if len(words) > 0 && strings.HasPrefix(words[0], "[") {
		words = words[1:] // counters, of iptables-save -c
	}
	if len(words) < 2 {
		return
	}
	at := -1 // after the last element
	switch words[0] {
	case "-A", "--append":
	case "-I", "--insert":
		at = 0
		if len(words) > 2 {
			if n, err := strconv.Atoi(words[2]); err == nil && n > 0 {
				at = n - 1
				words = slices.Delete(words, 2, 3)
			}
		}
	case "-P", "--policy":
		if len(words) == 3 {
			c := p.chain(n, words[1])
			c.line, c.drops = n, words[2] == "DROP"
			p.d.Structure(n)
		}
		return
	case "-N", "--new-chain":
		p.chain(n, words[1])
		p.d.Structure(n)
		return
	default:
		return
	}
	o := &options{words: words[2:], r: &rule{line: n, text: p.d.Line(n), match: match{family: p.family}}}
	o.parse()
	if p.table == "nat" {
		o.r.match.ofNew()
	}
	c := p.chain(n, words[1])
	if at < 0 || at > len(c.rules) {
		at = len(c.rules)
	}
	c.rules = slices.Insert(c.rules, at, o.r)
}

// split splits a line into words like a shell. iptables-save quotes words with spaces.
func split(line string) (words []string, err error) {
	var word strings.Builder
	in, quoted, escaped := false, false, false
	for _, r := range line {
		switch {
		case escaped:
			word.WriteRune(r)
			escaped = false
		case r == '\\' && quoted:
			escaped = true
		case r == '"':
			quoted, in = !quoted, true
		case (r == ' ' || r == '\t') && !quoted:
			if in {
				words = append(words, word.String())
				word.Reset()
			}
			in = false
		default:
			word.WriteRune(r)
			in = true
		}
	}
	if quoted || escaped {
		return nil, errors.New("a quote is open at the end of the line")
	}
	if in {
		words = append(words, word.String())
	}
	return words, nil
}
