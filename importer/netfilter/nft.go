// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// Nftables imports the output of "nft -j list ruleset".
func Nftables(text string, o Options) (*draft.Result, error) {
	if !strings.HasPrefix(strings.TrimSpace(text), "{") {
		return nil, errors.New("it is not JSON: pass the output of 'nft -j list ruleset'. Rules in a file become that by: unshare -rn sh -c 'nft -f FILE && nft -j list ruleset'")
	}
	var document struct {
		List []json.RawMessage `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil {
		return nil, fmt.Errorf("not the output of 'nft -j list ruleset': %w", err)
	}
	var values []*draft.Value
	var entries []string
	for _, raw := range document.List {
		v, err := draft.JSON(string(raw))
		if err != nil || len(v) != 1 || len(v[0].Fields) == 0 {
			return nil, errors.New("not the output of 'nft -j list ruleset': an entry is not an object")
		}
		values = append(values, v[0])
		entries = append(entries, renderEntry(v[0]))
	}
	if len(values) > maxPaths {
		return nil, fmt.Errorf("more than %d entries: import the tables one by one", maxPaths)
	}
	if len(values) == 0 {
		return nil, errors.New("no rules in it: pass the output of 'nft -j list ruleset'")
	}
	n := &nftables{d: draft.Entries("nftables", entries), set: &ruleset{chains: map[chainID]*chain{}, sets: map[string][]netip.Prefix{}, setLines: map[string][]int{}}}
	for i, v := range values {
		n.entry(i+1, v)
	}
	t := newTranslator(n.d, n.set, "nftables", o)
	if err := t.translate(); err != nil {
		return nil, err
	}
	n.d.Rest = func(stays func(line int) bool) string { return t.restOf(document.List, stays) }
	return n.d.Finish()
}

// nftables reads entries of the list.
type nftables struct {
	d   *draft.Draft
	set *ruleset
}

// entry reads one: a table, chain, set or rule.
func (n *nftables) entry(line int, v *draft.Value) {
	kind, o := v.Fields[0].Key, v.Fields[0].Value
	family := o.Get("family").Str()
	table := family + " " + o.Get("table").Str()
	switch kind {
	case "metainfo", "table", "counter":
		n.d.Structure(line)
	case "chain":
		n.chain(line, table, family, o)
	case "rule":
		if family == "bridge" || family == "arp" {
			n.d.Lost(line, "", "no equivalent for rules of family "+family, "keep them in nftables")
			return
		}
		c := n.set.chains[chainID{table, o.Get("chain").Str()}]
		if c == nil {
			n.d.Lost(line, "", "its chain is not in the list", "pass the whole output of 'nft -j list ruleset'")
			return
		}
		c.rules = append(c.rules, n.rules(line, c, o)...)
	case "set":
		n.readSet(line, o)
	case "flowtable":
		n.d.Implied(line, "", "flowtable: auto, the default, offloads flows")
	case "ct helper", "ct timeout", "ct expectation", "map", "limit", "quota", "secmark", "synproxy", "element":
		n.d.Lost(line, "", "no equivalent for an object of kind "+kind, "keep it in nftables")
	default:
		n.d.Lost(line, "", "not understood", "write the equivalent by hand")
	}
}

func (n *nftables) chain(line int, table, family string, o *draft.Value) {
	c := &chain{id: chainID{table, o.Get("name").Str()}, line: line, hook: hook(o.Get("hook").Str()), nat: o.Get("type").Str() == "nat",
		drops: o.Get("policy").Str() == "drop", device: o.Get("dev").Str(), family: map[string]int{"ip": 4, "ip6": 6}[family]}
	prio, _ := strconv.Atoi(o.Get("prio").Str())
	c.early = prio <= -300
	n.set.chains[c.id] = c
	n.set.order = append(n.set.order, c)
	n.d.Structure(line)
}

func (n *nftables) readSet(line int, o *draft.Value) {
	name := o.Get("name").Str()
	n.set.setLines[name] = append(n.set.setLines[name], line)
	if kind := o.Get("type").Str(); kind != "ipv4_addr" && kind != "ipv6_addr" {
		return // rules that use the set have no equivalent
	}
	list := []netip.Prefix{}
	for _, e := range o.Get("elem").List() {
		if inner := e.Get("elem", "val"); inner != nil {
			e = inner
		}
		prefixes, err := addressesOf(e)
		if err != nil {
			n.d.Lost(line, render(e), "the element has no equivalent", "write it under firewall: sets:")
			continue
		}
		list = append(list, prefixes...)
	}
	n.set.sets[name] = list
}

// rules parses a rule. A rule with a map of verdicts, of targets or with several protocols is split
// into several.
func (n *nftables) rules(line int, c *chain, o *draft.Value) []*rule {
	r := &rule{line: line, text: n.d.Line(line), name: o.Get("comment").Str(), match: match{family: c.family}}
	if c.device != "" {
		r.match.in = []string{c.device}
	}
	list := []*rule{r}
	for _, e := range o.Get("expr").List() {
		if len(e.Fields) == 0 {
			continue
		}
		key, v := e.Fields[0].Key, e.Fields[0].Value
		switch key {
		case "vmap":
			list = n.verdictMap(list, v)
			continue
		case "dnat":
			if m := v.Get("addr", "map"); m != nil {
				list = n.targetMap(list, v, m)
				continue
			}
		case "match":
			if protocols := protocolsOf(v); len(protocols) > 1 {
				list = eachOf(list, len(protocols), func(i int, r *rule) { r.match.proto = protocols[i] })
				continue
			}
		}
		for _, r := range list {
			n.statement(r, key, v)
		}
	}
	if c.nat {
		for _, r := range list {
			r.match.ofNew()
		}
	}
	return list
}

// eachOf makes copies of each rule and changes the nth by f.
func eachOf(list []*rule, copies int, f func(int, *rule)) (all []*rule) {
	if len(list)*copies > 4096 {
		copies = 1
	}
	for _, r := range list {
		for i := range copies {
			one := *r
			one.match.other = slices.Clone(r.match.other)
			f(i, &one)
			all = append(all, &one)
		}
	}
	return all
}

// verdictMap reads "iifname vmap { lan0 : jump input_lan, ... }".
func (n *nftables) verdictMap(list []*rule, v *draft.Value) []*rule {
	pairs := v.Get("data", "set").List()
	if len(pairs) == 0 || len(pairs) > 256 {
		for _, r := range list {
			r.match.other = append(r.match.other, "a map of verdicts")
			r.do, r.to = doOther, "vmap"
		}
		return list
	}
	return eachOf(list, len(pairs), func(i int, r *rule) {
		if len(pairs[i].Items) != 2 {
			return
		}
		n.compare(r, v.Get("key"), pairs[i].Items[0], false)
		for _, f := range pairs[i].Items[1].Fields {
			n.statement(r, f.Key, f.Value)
		}
	})
}

// targetMap reads "dnat to numgen inc mod 2 map { 0 : 10.0.0.2, 1 : 10.0.0.3 }".
func (n *nftables) targetMap(list []*rule, dnat, m *draft.Value) []*rule {
	generator, pairs := m.Get("key", "numgen"), m.Get("data", "set").List()
	if generator == nil || len(pairs) == 0 || len(pairs) > 4096 {
		for _, r := range list {
			r.do, r.to = doOther, "dnat by "+render(m.Get("key"))
		}
		return list
	}
	var shares []float64
	left := 0.0
	for _, p := range pairs {
		slots := 1.0
		if len(p.Items) == 2 {
			if ends := p.Items[0].Get("range").List(); len(ends) == 2 {
				low, _ := strconv.ParseFloat(ends[0].Str(), 64)
				high, _ := strconv.ParseFloat(ends[1].Str(), 64)
				slots = max(1, high-low+1)
			}
		}
		shares = append(shares, slots)
		left += slots
	}
	return eachOf(list, len(pairs), func(i int, r *rule) {
		if len(pairs[i].Items) != 2 {
			return
		}
		rest := 0.0
		for _, s := range shares[i:] {
			rest += s
		}
		if i < len(pairs)-1 {
			r.match.share, r.match.inOrder = shares[i]/rest, generator.Get("mode").Str() == "inc"
		}
		n.translation(r, doDNAT, pairs[i].Items[1], dnat.Get("port"))
	})
}

// statement reads one statement of a rule.
func (n *nftables) statement(r *rule, key string, v *draft.Value) {
	switch key {
	case "match":
		op := v.Get("op").Str()
		if op != "==" && op != "in" && op != "!=" {
			r.match.other = append(r.match.other, render(v))
			return
		}
		n.compare(r, v.Get("left"), v.Get("right"), op == "!=")
	case "counter", "comment":
	case "accept":
		r.do = doAccept
	case "drop":
		r.do = doDrop
	case "return":
		r.do = doReturn
	case "jump":
		r.do, r.to = doJump, v.Get("target").Str()
	case "goto":
		r.do, r.to = doGoto, v.Get("target").Str()
	case "reject":
		r.do = doReject
		r.reset = v.Get("type").Str() == "tcp reset"
		r.unreachable = !r.reset && (v.Get("expr").Str() == "" || v.Get("expr").Str() == "port-unreachable")
	case "masquerade", "snat", "dnat", "redirect":
		n.translation(r, map[string]verdict{"masquerade": doMasq, "snat": doSNAT, "dnat": doDNAT, "redirect": doRedirect}[key], v.Get("addr"), v.Get("port"))
		for _, f := range v.Get("flags").List() {
			r.random = r.random || f.Str() == "fully-random" || f.Str() == "random"
		}
	case "log":
		if r.do == doNothing {
			r.do = doLog
		} else {
			r.lost = append(r.lost, missingPart{"log", "write a rule with action: log", "the packets are not logged"})
		}
		r.log.prefix, r.log.level = v.Get("prefix").Str(), levelName(v.Get("level").Str())
		if r.log.level == "warning" || r.log.level == "warn" { // the default of nft
			r.log.level = "warning"
		}
	case "limit":
		n.limit(r, v)
	case "notrack":
		r.do = doNotrack
	case "mangle":
		n.parseMangle(r, v)
	case "ct helper":
		r.do, r.helper = doHelper, v.Str()
	case "xt":
		r.do, r.to = doOther, "a rule of iptables-nft"
		n.d.Remark("Some rules were written by iptables. To import them, run: iptables-save | sluice import iptables -")
		r.match.other = append(r.match.other, "a match of iptables-nft")
	default:
		r.do, r.to = doOther, key
	}
}

func (n *nftables) limit(r *rule, v *draft.Value) {
	if v.Get("inv").Str() == "true" || v.Get("rate_unit").Str() != "" && v.Get("rate_unit").Str() != "packets" {
		r.match.other = append(r.match.other, "limit rate over")
		return
	}
	r.match.rate = v.Get("rate").Str() + "/" + v.Get("per").Str()
	r.match.burst, _ = strconv.Atoi(v.Get("burst").Str())
	if r.match.burst == 0 {
		r.match.burst = 5
	}
}

func (n *nftables) parseMangle(r *rule, v *draft.Value) {
	switch {
	case v.Get("key", "meta", "key").Str() == "mark" && v.Get("value").Str() != "":
		mark, err := strconv.ParseUint(v.Get("value").Str(), 0, 32)
		if err == nil {
			r.do, r.mark = doMark, uint32(mark)
			return
		}
	case v.Get("key", "tcp option", "name").Str() == "maxseg" && v.Get("value", "rt", "key").Str() == "mtu":
		r.do = doClamp
		r.match.other = slices.DeleteFunc(r.match.other, func(s string) bool { return strings.HasPrefix(s, "tcp flags") })
		return
	}
	r.do, r.to = doOther, render(v.Get("key"))+" set"
}

// translation reads the target of snat, dnat and the like.
func (n *nftables) translation(r *rule, do verdict, address, port *draft.Value) {
	r.do = do
	odd := func() { r.do, r.to = doOther, string(do)+" to "+render(address)+" "+render(port) }
	if ends := address.Get("concat").List(); len(ends) == 2 { // a map to address and port
		address, port = ends[0], ends[1]
	}
	if address != nil {
		if p := address.Get("prefix"); p != nil {
			if prefix, err := prefixOf(p.Get("addr").Str() + "/" + p.Get("len").Str()); err == nil {
				r.do, r.addresses = doNetmap, []netip.Prefix{prefix}
				r.first = prefix.Addr()
			} else {
				odd()
			}
		} else if ends := address.Get("range").List(); len(ends) == 2 {
			r.first, _ = netip.ParseAddr(ends[0].Str())
			r.last, _ = netip.ParseAddr(ends[1].Str())
		} else {
			r.first, _ = netip.ParseAddr(address.Str())
			r.last = r.first
		}
		if !r.first.IsValid() {
			odd()
			return
		}
		r.match.family = 6
		if r.first.Is4() {
			r.match.family = 4
		}
	}
	switch ends := port.Get("range").List(); {
	case port == nil:
	case len(ends) == 2:
		first, err1 := portOf(ends[0].Str(), 0)
		last, err2 := portOf(ends[1].Str(), 0)
		r.ports = flow.Ports{First: first, Last: last}
		if err1 != nil || err2 != nil || last < first {
			odd()
		}
	default:
		p, err := portOf(port.Str(), 0)
		r.ports = flow.Ports{First: p, Last: p}
		if err != nil || p == 0 {
			odd()
		}
	}
}

// restOf returns the entries that stay as a document of nft, or "" if none has an effect.
func (t *translator) restOf(entries []json.RawMessage, stays func(line int) bool) string {
	if !t.someAct(stays) {
		return ""
	}
	gone := t.removedLines(stays)
	open := map[int]bool{}
	for _, c := range t.set.order {
		open[c.line] = c.open
	}
	var kept []json.RawMessage
	for i, e := range entries {
		if open[i+1] {
			e = bytes.Replace(e, []byte(`"policy": "drop"`), []byte(`"policy": "accept"`), 1)
			e = bytes.Replace(e, []byte(`"policy":"drop"`), []byte(`"policy":"accept"`), 1)
		}
		if !gone[i+1] {
			kept = append(kept, e)
		}
	}
	b, err := json.Marshal(map[string]any{"nftables": kept})
	if err != nil {
		return ""
	}
	return string(b) + "\n"
}
