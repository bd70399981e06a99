// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// sourceRule is an imported source translation.
type sourceRule struct {
	path   *path
	object draftObject
}

// sources imports the translations of a postrouting chain.
func (t *translator) sources(w *walker) {
	for i, p := range w.paths {
		switch p.rule.do {
		case doMasq, doSNAT:
			t.source(p, w.paths[i+1:])
		case doNetmap:
			t.netmapOut(p)
		case doAccept, doReturn:
		case doMark:
			t.noteImplied(p, "clears the mark that requested the translation")
		default:
			t.noteLoss(p, "no equivalent for "+actionName(p.rule), "keep it in "+t.program)
		}
	}
	for _, p := range w.paths { // not used as an exception of an object
		if (p.rule.do == doAccept || p.rule.do == doReturn) && !t.taken[p.rule] && !t.lost[p.rule] {
			t.noteImplied(p, "exempts packets that no later rule translates")
		}
	}
}

// source adds a masquerade or snat rule for a path. later has the later paths.
func (t *translator) source(p *path, later []*path) {
	m, r := p.match, p.rule
	if t.byMark(p) {
		t.noteImplied(p, "services in mode fullnat translate the source of packets with the mark")
		return
	}
	if t.hairpin(p) {
		return
	}
	if list := unequalSource(m); len(list) > 0 {
		t.noteLoss(p, "no equivalent for "+strings.Join(list, ", "), nextFor(list, t.program))
		return
	}
	if m.proto != flow.Any && !t.oneOfAll(p, later) {
		t.noteLoss(p, "no equivalent for a source translation of a single protocol", "write it for all protocols, or keep it in "+t.program)
		return
	}
	if m.proto != flow.Any {
		return
	}
	if m.family == 0 && len(m.src) == 0 { // in table inet a rule without a source applies to one family
		for _, family := range []int{4, 6} {
			one := *p
			one.match.family = family
			t.source(&one, later)
		}
		return
	}
	if len(m.notSrc) > 0 {
		t.noteLoss(p, "no equivalent for excluded sources", "name the inside networks in source:")
		return
	}
	n := config.NATRule{Name: objectName(p, ""), Type: config.NATMasquerade, Source: m.src, In: interfaces(m.in), Out: interfaces(m.out), FullyRandom: r.random}
	if r.do == doSNAT {
		n.Type = config.NATSNAT
		n.To.Addresses = []config.AddressRange{{First: r.first, Last: r.last}}
		if !r.first.IsValid() {
			t.noteLoss(p, "no equivalent for a source translation that changes only the port", "keep it in "+t.program)
			return
		}
	}
	if r.ports != (flow.Ports{}) {
		n.Ports = config.PortSet{r.ports}
	}
	if n.Name == "" {
		n.Name = string(n.Type)
	}
	if len(n.Source) == 0 && m.family == 6 {
		n.Source = []netip.Prefix{allAddresses(6)} // without a source the rule applies to IPv4
	}
	if !t.outExcept(p, &n) {
		return
	}
	n.Except = append(n.Except, m.notDst...)
	exempt, left := t.addExceptions(p, &n)
	left = t.exemptSources(p, n, left)
	o := draftObject{t.d.NAT(n, r.line), -1, len(t.d.Config.NAT) - 1}
	t.markTranslated(p, o)
	t.sourced = append(t.sourced, &sourceRule{p, o})
	for _, e := range exempt {
		t.taken[e] = true
		t.d.AlsoFrom(o.name, e.line)
	}
	p.except = left
	t.noteExceptions(p, o.name, map[*rule]bool{})
	t.objects = append(t.objects, &objectOf{p, o.name})
	if r.do == doSNAT {
		t.noteUnowned(o.name, r, r.last)
		if t.forOwnSources(m) && t.d.Config.Datapath != config.DatapathNftables && !t.stays {
			t.d.Changed(o.name, r.line, r.text, "on eBPF, connections of the gateway itself keep their source", "write datapath: nftables if they need the other address")
		}
	}
	t.sourceDifferences(p, o.name, n, later)
}

// forOwnSources reports whether a match may include the gateway's own connections.
func (t *translator) forOwnSources(m match) bool {
	if len(m.src) == 0 {
		return true
	}
	for _, list := range t.Addresses {
		for _, a := range list {
			if slices.ContainsFunc(m.src, func(p netip.Prefix) bool { return p.Contains(a.Addr()) }) {
				return true
			}
		}
	}
	return false
}

// unequalSource returns the conditions of a match that source translations do not support.
func unequalSource(m match) (list []string) {
	add := func(is bool, what string) {
		if is {
			list = append(list, what)
		}
	}
	list = append(list, m.other...)
	add(m.srcLocal, "connections of the host itself")
	add(m.dstLocal, "destinations of the host itself")
	add(len(m.dst) > 0, "a destination of a source translation")
	add(m.srcSet != "" || m.dstSet != "", "a set in a source translation")
	add(len(m.sport) > 0 || len(m.dport) > 0, "ports in a source translation")
	add(m.mark != nil || m.notMark != nil, "marks")
	add(m.rate != "" || m.share != 0, "a rate or share")
	return list
}

// byMark reports whether a path translates packets with a mark, as services in mode fullnat do.
func (t *translator) byMark(p *path) bool {
	is := func(k *packetMark) bool { return k != nil && slices.Contains(t.masquerading, *k) }
	return is(p.match.mark) || slices.ContainsFunc(p.except, func(e exception) bool { return is(e.match.notMark) })
}

// hairpin reports whether a path is a hairpin translation. It is for inside hosts that use a
// published port, for a backend that uses its own service, or for connections to services in mode
// fullnat.
func (t *translator) hairpin(p *path) (found bool) {
	m := p.match
	if names := t.forwardedTo[p]; len(names) > 0 && len(m.dst) > 0 && t.onlyTargets(m, names) {
		for _, name := range names {
			t.impliedBy(name, p, "the service already replaces the source")
			t.d.Changed(name, p.rule.line, p.rule.text, "the original also replaced the source of direct connections to the target; the service does not", "")
		}
		return true
	}
	for _, f := range t.forwards {
		if len(m.dst) != 1 || !m.dst[0].IsSingleIP() || m.dst[0].Addr() != f.target || m.proto != flow.Any && m.proto != f.proto {
			continue
		}
		if len(m.dport) > 0 && f.port != 0 && (len(m.dport) != 1 || m.dport[0] != flow.Ports{First: f.port, Last: f.port}) {
			continue
		}
		if len(unequalSource(match{other: m.other, srcSet: m.srcSet, mark: m.mark, notMark: m.notMark, rate: m.rate, share: m.share})) > 0 || !t.isHairpin(p, f.target) {
			continue
		}
		f.hairpin = true
		t.impliedBy(f.object, p, "the hairpin of the object has this effect")
		found = true
	}
	if found {
		return true
	}
	if m.srcLocal && len(m.out) > 0 && len(m.src)+len(m.dst) == 0 { // Docker without its proxy
		t.noteImplied(p, "the host's own connections already have an address of their output interface")
		return true
	}
	return false
}

// onlyTargets reports whether a match has only targets of the objects as destination.
func (t *translator) onlyTargets(m match, objects []string) bool {
	return !slices.ContainsFunc(m.dst, func(d netip.Prefix) bool {
		return !d.IsSingleIP() || !slices.ContainsFunc(t.forwards, func(f *forward) bool { return f.target == d.Addr() && slices.Contains(objects, f.object) })
	})
}

// isHairpin reports whether a path is a hairpin: hosts on the target's network, or only the target, get
// an address of the gateway as source.
func (t *translator) isHairpin(p *path, target netip.Addr) bool {
	m := p.match
	if len(m.src) == 0 || len(m.notSrc) > 0 {
		return false
	}
	for _, s := range m.src {
		if !s.Contains(target) || !s.IsSingleIP() && !t.isNetwork(s) {
			return false
		}
	}
	if p.rule.do == doMasq {
		return true
	}
	if a := p.rule.first; t.Addresses != nil {
		i := t.interfaceOf(target)
		return a == p.rule.last && i != "" && slices.ContainsFunc(t.Addresses[i], func(x netip.Prefix) bool { return x.Addr() == a })
	}
	return p.rule.first == p.rule.last && slices.ContainsFunc(m.src, func(s netip.Prefix) bool { return s.Contains(p.rule.first) })
}

// hairpins sets the hairpin of port-forwards. It is off if no rule has its effect, and on if rules
// also publish the port for inside hosts of other interfaces.
func (t *translator) hairpins() {
	for _, f := range t.forwards {
		switch of := t.hairpinOf(f); {
		case of == nil:
		case !f.hairpin && *of == "":
			*of = config.SwitchOff
			t.d.Remark("hairpin: off is set on objects without a rule for inside hosts that use the published address. Remove it to permit such connections.")
		case f.hairpin && f.reflected && f.made.nat >= 0 && t.d.Config.NAT[f.made.nat].In != "":
			*of = config.SwitchOn
		case f.hairpin:
			*of = config.SwitchAuto
		}
	}
	for i := range t.d.Config.Services {
		if s := &t.d.Config.Services[i]; s.Hairpin == config.SwitchAuto {
			s.Hairpin = "" // auto is the default
		}
	}
	for i := range t.d.Config.NAT {
		if n := &t.d.Config.NAT[i]; n.Hairpin == config.SwitchAuto {
			n.Hairpin = ""
		}
	}
}

// hairpinOf returns the hairpin setting of a forward's object, or nil.
func (t *translator) hairpinOf(f *forward) *config.Switch {
	if f.made.nat >= 0 {
		return &t.d.Config.NAT[f.made.nat].Hairpin
	}
	if s := &t.d.Config.Services[f.made.service]; s.Mode == config.ModeDNAT {
		return &s.Hairpin
	}
	return nil
}

// oneOfAll reports whether a path has one protocol of a later rule for all protocols. libvirt
// writes such rules with ports for TCP and UDP.
func (t *translator) oneOfAll(p *path, later []*path) bool {
	want := p.match
	want.proto = flow.Any
	for _, l := range later {
		if l.rule.do == p.rule.do && l.rule.first == p.rule.first && l.rule.last == p.rule.last && fmt.Sprintf("%+v", l.match) == fmt.Sprintf("%+v", want) {
			if l.rule.ports == (flow.Ports{}) {
				l.rule.ports = p.rule.ports
			}
			t.noteImplied(p, "a rule for all protocols follows, and its object has these ports")
			return true
		}
	}
	return false
}

// outExcept replaces "all output interfaces except" by an exception of that interface's network, if
// that network is the source.
func (t *translator) outExcept(p *path, n *config.NATRule) bool {
	var not []string
	for _, name := range p.match.notOut {
		if name != "lo" {
			not = append(not, name)
		}
	}
	switch {
	case len(not) == 0 || n.Out != "":
	case len(n.Source) > 0 && len(not) == 1 && t.networkOf(not[0], n.Source):
		n.Except = append(n.Except, n.Source...)
	default:
		t.noteLoss(p, "no equivalent for an excluded interface: "+strings.Join(not, ", "), "name the interfaces towards the outside in out:")
		return false
	}
	return true
}

// bridges matches the names of bridges that programs create for a network.
var bridges = regexp.MustCompile(`^(docker\d+|br-[0-9a-f]{12}|br-[\w-]+|virbr\d+|lxcbr\d+|lxdbr\d+|incusbr\d+|cni\w*|podman\d+|cbr\d+)$`)

// networkOf reports whether the prefixes are the networks of an interface. Its addresses show this,
// or its name of a bridge that a program created for one network.
func (t *translator) networkOf(name string, prefixes []netip.Prefix) bool {
	if t.Addresses == nil {
		return bridges.MatchString(name)
	}
	return !slices.ContainsFunc(prefixes, func(p netip.Prefix) bool {
		return !slices.ContainsFunc(t.Addresses[name], func(a netip.Prefix) bool { return a.Masked() == p.Masked() })
	})
}

// addExceptions adds earlier exceptions as except. It returns the rules that became except, and the
// exceptions without such a form.
func (t *translator) addExceptions(p *path, n *config.NATRule) (done []*rule, left []exception) {
	for _, e := range p.except {
		if e.match.notMark != nil && slices.Contains(t.masquerading, *e.match.notMark) {
			continue
		}
		wide := e.match
		wide.dst, wide.dstLocal = nil, false
		if len(e.match.dst) > 0 && wide.includes(p.match) && !e.match.dstLocal {
			for _, d := range e.match.dst {
				if !slices.Contains(n.Except, d) {
					n.Except = append(n.Except, d)
				}
			}
			done = append(done, e.rule)
		} else {
			left = append(left, e)
		}
	}
	return done, left
}

// exemptSources adds a separate rule before the wide rule for an exception of some sources, the
// narrowest first. It returns the exceptions without such a form.
func (t *translator) exemptSources(p *path, n config.NATRule, list []exception) (left []exception) {
	type narrow struct {
		sources []netip.Prefix
		rules   []*rule
	}
	var parts []*narrow
	exempt := map[*rule][2][]netip.Prefix{} // exempt sources and destinations of each rule
	for _, e := range list {
		both, _ := e.match.intersect(p.match)
		if slices.ContainsFunc(t.sourced, func(s *sourceRule) bool { return s.path.base == p.base && s.path.match.includes(both) }) {
			continue // an earlier rule matches these packets
		}
		wide := e.match
		wide.dst, wide.src = nil, nil
		if len(e.match.dst) == 0 || len(e.match.src) == 0 || len(e.match.notDst) > 0 || e.match.dstLocal || !wide.includes(p.match) {
			left = append(left, e)
			continue
		}
		exempt[e.rule] = [2][]netip.Prefix{both.src, e.match.dst}
		at := slices.IndexFunc(parts, func(x *narrow) bool { return slices.Equal(x.sources, both.src) })
		if at < 0 {
			at = len(parts)
			parts = append(parts, &narrow{sources: both.src})
		}
		parts[at].rules = append(parts[at].rules, e.rule)
	}
	slices.SortStableFunc(parts, func(a, b *narrow) int { return longestPrefix(b.sources) - longestPrefix(a.sources) })
	for _, part := range parts {
		one := n
		one.Source, one.Except = part.sources, slices.Clone(n.Except)
		lines := []int{p.rule.line}
		for _, e := range list { // exceptions of wider sources apply too
			x, written := exempt[e.rule]
			if !written || !overlaps(x[0], part.sources) {
				continue
			}
			one.Except = union(one.Except, x[1])
			lines = append(lines, e.rule.line)
		}
		o := draftObject{t.d.NAT(one, lines...), -1, len(t.d.Config.NAT) - 1}
		t.markTranslated(p, o)
		t.sourced = append(t.sourced, &sourceRule{&path{base: p.base, rule: p.rule, match: p.match.withSources(part.sources)}, o})
		for _, r := range part.rules {
			t.taken[r] = true
		}
	}
	return left
}

// withSources returns the match limited to these sources.
func (m match) withSources(sources []netip.Prefix) match {
	m.src = sources
	return m
}

func longestPrefix(list []netip.Prefix) (bits int) {
	for _, p := range list {
		bits = max(bits, p.Bits())
	}
	return bits
}

func overlaps(a, b []netip.Prefix) bool {
	return slices.ContainsFunc(a, func(x netip.Prefix) bool {
		return slices.ContainsFunc(b, func(y netip.Prefix) bool { return x.Overlaps(y) })
	})
}

// sourceDifferences adds notes about packets that an object translates differently from the path.
func (t *translator) sourceDifferences(p *path, object string, n config.NATRule, later []*path) {
	m := p.match
	for _, name := range m.notOut {
		if name != "lo" && n.Out == "" {
			t.d.Implied(p.rule.line, "! -o "+name, "except: has the network of interface "+name)
		}
	}
	if n.Out == "" && len(n.Source) == 0 {
		return // refused by validation, with the next step
	}
	for _, d := range m.notDst {
		other := m
		other.notDst, other.dst = nil, []netip.Prefix{d}
		for _, l := range later {
			if (l.rule.do == doMasq || l.rule.do == doSNAT) && l.match.mayOverlap(other) && l.match.proto == flow.Any && len(l.match.dst) == 0 {
				t.d.Changed(object, p.rule.line, p.rule.text, "packets to "+d.String()+" continued to a later rule; except: exempts them from all rules", "order the rules by hand")
				break
			}
		}
	}
}

// netmapIn stores the inbound rule of a one-to-one mapping for its outbound rule.
func (t *translator) netmapIn(p *path) {
	if len(p.match.dst) != 1 || len(p.rule.addresses) != 1 || p.match.dst[0].Bits() != p.rule.addresses[0].Bits() || len(p.match.unsupportedConditions()) > 0 ||
		p.match.proto != flow.Any || len(p.match.dport) > 0 || len(p.match.src) > 0 {
		t.noteLoss(p, "no equivalent for a mapping of prefixes with other conditions", "write type: static with external and internal")
		return
	}
	n := config.NATRule{Name: objectName(p, "static"), Type: config.NATStatic, External: p.match.dst[0], Internal: p.rule.addresses[0]}
	o := draftObject{t.d.NAT(n, p.rule.line), -1, len(t.d.Config.NAT) - 1}
	t.markTranslated(p, o)
	if len(p.match.in) > 0 {
		t.d.Implied(p.rule.line, "-i "+strings.Join(p.match.in, ","), "external addresses are routed to the host through that interface")
	}
	t.noteExceptions(p, o.name, map[*rule]bool{})
	t.noteMapping(p, o.name)
}

// noteMapping adds a note about connections inside a one-to-one mapping.
func (t *translator) noteMapping(p *path, object string) {
	t.d.Changed(object, p.rule.line, p.rule.text, "for inside hosts that use an outside address of the mapping, both addresses are translated, or neither in replies", "let inside hosts use the inside addresses")
}

// netmapOut sets the output interfaces of a mapping with an imported inbound rule, or adds a
// mapping.
func (t *translator) netmapOut(p *path) {
	m := p.match
	if len(m.src) != 1 || len(p.rule.addresses) != 1 || m.src[0].Bits() != p.rule.addresses[0].Bits() || len(unequalSource(m)) > 0 || m.proto != flow.Any {
		t.noteLoss(p, "no equivalent for a mapping of prefixes with other conditions", "write type: static with external and internal")
		return
	}
	for i := range t.d.Config.NAT {
		n := &t.d.Config.NAT[i]
		if n.Type == config.NATStatic && n.External == p.rule.addresses[0] && n.Internal == m.src[0] {
			n.Out = interfaces(m.out)
			t.markTranslated(p, draftObject{"nat " + n.Name, -1, i})
			return
		}
	}
	n := config.NATRule{Name: objectName(p, "static"), Type: config.NATStatic, External: p.rule.addresses[0], Internal: m.src[0], Out: interfaces(m.out)}
	o := draftObject{t.d.NAT(n, p.rule.line), -1, len(t.d.Config.NAT) - 1}
	t.markTranslated(p, o)
	t.noteMapping(p, o.name)
	t.d.Changed(o.name, p.rule.line, p.rule.text, "connections from outside are translated too; the original had no rule for them", "add a firewall rule that drops them")
}
