// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/importer/draft"
)

// Options are facts that the rules lack.
type Options struct {
	// Outside lists the interfaces with the public addresses. They are used where a rule accepts
	// packets to any address of the host.
	Outside []string
	// Addresses has the host's own addresses by interface, with the prefix length of their network;
	// nil if unknown.
	Addresses map[string][]netip.Prefix
}

// translator converts paths to objects.
type translator struct {
	Options
	d   *draft.Draft
	set *ruleset
	// program is the program of the rules: "iptables".
	program string
	// taken has the imported rules, lost the rules that are not imported completely.
	taken, lost map[*rule]bool
	// made has the objects of each rule.
	made     map[*rule][]draftObject
	forwards []*forward
	// leaving has the paths of postrouting chains in order. forwardedTo has the objects with
	// connections that a path gives another source.
	leaving     []*path
	forwardedTo map[*path][]string
	ways        []*sourceTranslation
	forOwn      map[*rule]bool // rules for the host's own connections
	objects     []*objectOf
	// masquerading has the marks of packets with source translation in postrouting.
	masquerading []packetMark
	sourced      []*sourceRule
	// missed has the translations without an equivalent.
	missed []*path
	// returned has the tables with a rule of an object that validation has rejected.
	returned map[string]bool
	// stays is true if rules for forwarded packets stay in the program.
	stays bool
}

// draftObject is an object of the draft.
type draftObject struct {
	name    string
	service int // index, or -1
	nat     int
}

// IPTables imports the output of iptables-save.
func IPTables(text string, o Options) (*draft.Result, error) {
	d := draft.New("iptables", text, "#")
	set, err := readIPTables(d)
	if err != nil {
		return nil, err
	}
	t := newTranslator(d, set, "iptables", o)
	if err := t.translate(); err != nil {
		return nil, err
	}
	d.Rest = t.remainingLines
	return d.Finish()
}

func newTranslator(d *draft.Draft, set *ruleset, program string, o Options) *translator {
	return &translator{Options: o, d: d, set: set, program: program, taken: map[*rule]bool{}, lost: map[*rule]bool{}, made: map[*rule][]draftObject{}, returned: map[string]bool{}, forwardedTo: map[*path][]string{}, forOwn: map[*rule]bool{}}
}

// translate follows every base chain: chains that translate first, then chains that filter.
func (t *translator) translate() error {
	walks := map[hook][]*walker{}
	var filters []*walker
	for _, c := range t.set.order {
		if c.hook == "" {
			continue
		}
		w, err := t.set.walkChain(c)
		if err != nil {
			return err
		}
		t.dropDead(w)
		if c.nat {
			walks[c.hook] = append(walks[c.hook], w)
		} else {
			filters = append(filters, w)
		}
	}
	if len(t.set.order) == 0 && len(t.set.setLines) == 0 {
		return fmt.Errorf("no rules in it")
	}
	t.sets()
	for _, w := range walks[hookPostrouting] {
		t.findMarks(w)
		t.leaving = append(t.leaving, w.paths...)
	}
	for _, w := range walks[hookOutput] {
		for _, p := range w.paths {
			t.forOwn[p.rule] = true
		}
	}
	for _, w := range walks[hookPrerouting] {
		t.destinations(w)
	}
	for _, w := range walks[hookOutput] {
		t.ownConnections(w)
	}
	for _, w := range walks[hookPostrouting] {
		t.sources(w)
	}
	t.hairpins()
	t.noteWays()
	t.noteOrder()
	for _, w := range walks[hookInput] {
		for _, p := range w.paths {
			t.noteLoss(p, "no equivalent for a translation of packets to the host itself", "keep it in "+t.program)
		}
	}
	for _, w := range filters {
		t.filter(w)
	}
	t.noteUntranslated(walks, filters)
	t.placeRules()
	if t.stays {
		t.onNftables()
	}
	if t.publishesGateway() {
		t.d.Config.Datapath = config.DatapathNftables
		t.d.Remark("datapath: nftables is set because a rule publishes all ports of an address of the gateway. On eBPF, the gateway's own connections from that address would lose their answers.")
	}
	t.addGeneralNotes()
	return nil
}

// dropDead removes paths that an earlier path covers, because no packet reaches them.
func (t *translator) dropDead(w *walker) {
	var ends byDestination[*path]
	alive := w.paths[:0:0]
	for _, p := range w.paths {
		covered := slices.ContainsFunc(ends.candidates(p.match), func(q *path) bool { return q.match.includes(p.match) })
		if covered {
			t.noteImplied(p, "an earlier rule takes these packets")
			continue
		}
		alive = append(alive, p)
		switch p.rule.do {
		case doAccept, doReturn, doDrop, doReject, doDNAT, doSNAT, doMasq, doNetmap, doRedirect:
			if !slices.ContainsFunc(p.except, func(e exception) bool { return !e.ends }) {
				ends.add(p.match, p)
			}
		}
	}
	w.paths = alive
}

// onNftables sets the datapath that forwarded packets share with the rules that stay.
func (t *translator) onNftables() {
	if len(t.d.Config.NAT)+len(t.d.Config.Services) > 0 {
		t.d.Config.Datapath = config.DatapathNftables
		t.d.Remark("datapath: nftables is set because rules for forwarded packets stay in " + t.program + ". Packets that eBPF forwards bypass these rules.")
	}
}

// publishesGateway reports whether an object has all ports of an address that may be the gateway's.
func (t *translator) publishesGateway() bool {
	all := func(l config.Listen) bool {
		return len(l.Ports) == 0 && (!l.Address.IsValid() || t.owns(l.Address) != no)
	}
	return slices.ContainsFunc(t.d.Config.NAT, func(n config.NATRule) bool { return n.Listen != nil && all(*n.Listen) }) ||
		slices.ContainsFunc(t.d.Config.Services, func(s config.Service) bool { return slices.ContainsFunc(s.Listen, all) })
}

// addGeneralNotes adds the differences that every configuration of this form has.
func (t *translator) addGeneralNotes() {
	sources := slices.ContainsFunc(t.d.Config.NAT, func(n config.NATRule) bool {
		return n.Type.RewritesSource() || n.Type == config.NATStatic
	})
	if sources && t.d.Config.Datapath != config.DatapathNftables {
		t.d.Remark("eBPF translates the answers of inside hosts to connections from outside that ask for their own addresses. Where such connections are routed to inside hosts, set datapath: nftables.")
	}
	listens := len(t.d.Config.Services) > 0 || slices.ContainsFunc(t.d.Config.NAT, func(n config.NATRule) bool { return n.Type.Forwards() })
	if listens && len(t.forOwn) == 0 {
		t.d.Remark("On nftables, connections of the gateway itself to a published address are translated too.")
	}
}

// keepAccepts keeps the accept rules of a table, because a rule that returns to the table may
// depend on them.
func (t *translator) keepAccepts(table string) {
	if t.returned[table] {
		return
	}
	t.returned[table] = true
	for _, c := range t.set.order {
		for _, r := range c.rules {
			if c.id.table == table && (r.do == doAccept || r.do == doReturn) {
				t.d.Keep(r.line)
			}
		}
	}
}

// placeRules sets the place of each rule: a rule that is not imported completely stays.
func (t *translator) placeRules() {
	atLine := map[int][]*chain{}
	for _, c := range t.set.order {
		for _, r := range c.rules {
			// Rules that stay may depend on an exception before them.
			if !t.taken[r] || t.lost[r] || c.nat && (r.do == doAccept || r.do == doReturn) {
				t.d.Keep(r.line)
			}
			switch {
			case r.do == doJump || r.do == doGoto || r.do == doNothing:
			case !c.nat:
				t.d.Class("filter", r.line)
			case r.do != doAccept && r.do != doReturn && r.do != doMark && r.do != doLog:
				t.d.Class("translations", r.line)
			}
			atLine[r.line] = append(atLine[r.line], c)
		}
		if c.drops {
			t.d.Keep(c.line)
			t.d.Class("filter", c.line)
		}
	}
	t.d.Returned = func(line int) {
		for _, c := range atLine[line] {
			t.keepAccepts(c.id.table)
			if c.hook != hookInput && c.hook != hookOutput {
				t.onNftables()
			}
		}
	}
}

// sets imports the sets of addresses that rules use.
func (t *translator) sets() {
	used := map[string]bool{}
	for _, c := range t.set.order {
		for _, r := range c.rules {
			used[r.match.srcSet], used[r.match.dstSet] = true, true
		}
	}
	for name, lines := range t.set.setLines {
		for _, n := range lines {
			switch {
			case !used[name]:
				t.d.Implied(n, "", "no rule uses the set")
			case t.set.sets[name] == nil:
				t.d.Lost(n, "", "no equivalent for a set of this type", "write its addresses under firewall: sets:")
			default:
				t.d.Keep(n)
			}
		}
	}
}

// useSet adds a set to the configuration for an object, and returns its name.
func (t *translator) useSet(name string, r *rule) string {
	list, known := t.set.sets[name]
	if !known && len(t.set.setLines[name]) == 0 {
		t.d.Lost(r.line, "set "+name, "the elements of the set are not in the file", "append the output of 'ipset save', or write them under firewall: sets:")
	}
	return t.d.Set(name, list)
}

// noteLoss adds a note that a path has no equivalent.
func (t *translator) noteLoss(p *path, reason, next string) {
	t.lost[p.rule] = true
	if p.base.nat && p.rule.do != doLog && p.rule.do != doMark {
		t.missed = append(t.missed, p)
	}
	switch p.base.hook {
	case hookPrerouting, hookForward, hookPostrouting:
		t.stays = true
	}
	t.d.Lost(p.rule.line, p.rule.text, reason, next)
}

// markTranslated records that an object has the effect of a path.
func (t *translator) markTranslated(p *path, o draftObject) {
	t.taken[p.rule] = true
	t.made[p.rule] = append(t.made[p.rule], o)
	t.d.AlsoFrom(o.name, p.rule.line)
	for _, l := range p.rule.lost {
		t.d.LostOf(o.name, p.rule.line, l.text, "no equivalent: "+l.effect, l.next)
	}
}

// noteImplied adds a note that a path needs no object.
func (t *translator) noteImplied(p *path, reason string) {
	t.taken[p.rule] = true
	t.d.Implied(p.rule.line, p.rule.text, reason)
}

// impliedBy adds a note that an object has the effect of a path.
func (t *translator) impliedBy(object string, p *path, reason string) {
	t.taken[p.rule] = true
	t.d.ImpliedBy(object, p.rule.line, p.rule.text, reason)
}

// noteUntranslated adds a note for each rule that is in no object and has no note.
func (t *translator) noteUntranslated(walks map[hook][]*walker, filters []*walker) {
	all := filters
	for _, list := range walks {
		all = append(all, list...)
	}
	met := map[*rule]bool{}
	for _, w := range all {
		for _, p := range w.paths {
			met[p.rule] = true
			for _, r := range p.via {
				met[r] = true
			}
		}
	}
	for _, w := range all {
		for _, r := range w.barren {
			if !met[r] {
				t.d.Implied(r.line, r.text, "jumps to a chain without rules")
			}
		}
		for _, r := range w.never {
			switch {
			case met[r] || t.taken[r] || t.lost[r]:
			case r.do == doNothing && len(r.match.other) > 0:
				t.d.Lost(r.line, r.text, "no equivalent for "+strings.Join(r.match.other, ", "), nextFor(r.match.other, t.program))
			case r.do == doNothing:
				t.d.Implied(r.line, r.text, "counts only; metrics count every object")
			default:
				t.d.Implied(r.line, r.text, "no packet in its chain matches it")
			}
		}
	}
	for _, c := range t.set.order {
		for _, r := range c.rules {
			switch {
			case !c.called:
				t.d.Implied(r.line, r.text, "no rule jumps to chain "+c.id.name)
			case r.do == doReturn && !t.taken[r] && !t.lost[r]:
				t.d.Implied(r.line, r.text, "leaves the chain for packets of no object")
			}
		}
	}
}

// nextFor returns the next step for conditions without an equivalent.
func nextFor(conditions []string, program string) string {
	for _, c := range conditions {
		switch {
		case strings.Contains(c, "recent") || strings.Contains(c, "hashlimit"):
			return "use limits.new-connections-per-client of a service, or keep it in " + program
		case strings.Contains(c, "connlimit"):
			return "use limits.connections-per-client of a service, or keep it in " + program
		case strings.Contains(c, "state"):
			return "keep the chain in " + program + ", which Sluice does not change"
		}
	}
	return "keep it in " + program + ", which Sluice does not change"
}

// noteExceptions adds notes to an object about the packets that an earlier rule exempted in the
// original.
func (t *translator) noteExceptions(p *path, object string, noted map[*rule]bool) {
	for _, e := range p.except {
		if !noted[e.rule] {
			noted[e.rule] = true
			t.d.Changed(object, e.rule.line, e.rule.text, "an earlier rule exempts packets, and the object has no such exception", "write a narrower object, or keep both in "+t.program)
			t.lost[e.rule] = true
		}
	}
}

// objectOf is an object and the path that it is made from.
type objectOf struct {
	path *path
	name string
}

// noteOrder adds notes to objects if an earlier translation without an equivalent matched some of
// their packets. Sluice's rules run before the rules that stay.
func (t *translator) noteOrder() {
	var missed byDestination[*path]
	for _, q := range t.missed {
		missed.add(q.match, q)
	}
	for _, o := range t.objects {
		for _, q := range missed.candidates(o.path.match) {
			if q.base == o.path.base && q.place < o.path.place && q.match.mayOverlap(o.path.match) {
				t.d.Changed(o.name, q.rule.line, q.rule.text, "an earlier rule without an equivalent matched some of the object's packets", "make the two rules match different packets")
			}
		}
	}
}

// interfaces returns names in the form of the configuration.
func interfaces(names []string) config.Interfaces { return config.Interfaces(strings.Join(names, ",")) }

// objectName returns the name of an object from the rule's comment, otherwise the default.
func objectName(p *path, otherwise string) string {
	if n := strings.TrimPrefix(p.name(), "!fw4: "); n != "" && !strings.ContainsAny(n, " \t") {
		return strings.ReplaceAll(n, "/", "-")
	}
	return otherwise
}

// hasEffect reports whether a rule that stays has an effect of its own.
func (r *rule) hasEffect(c *chain) bool {
	return r.do != doJump && r.do != doGoto && r.do != doReturn && r.do != doNothing && (r.do != doAccept || c.drops || c.hook == "" && !c.nat)
}

// someAct reports whether a rule or policy that stays has an effect.
func (t *translator) someAct(stays func(line int) bool) bool {
	return slices.ContainsFunc(t.set.order, func(c *chain) bool {
		return c.drops || slices.ContainsFunc(c.rules, func(r *rule) bool { return stays(r.line) && r.hasEffect(c) })
	})
}

// removedLines returns the lines of rules that do not stay.
func (t *translator) removedLines(stays func(line int) bool) map[int]bool {
	gone := map[int]bool{}
	for _, c := range t.set.order {
		for _, r := range c.rules {
			gone[r.line] = !stays(r.line)
		}
	}
	return gone
}

// remainingLines returns the iptables lines that stay, or "" if none has an effect.
func (t *translator) remainingLines(stays func(line int) bool) string {
	if !t.someAct(stays) {
		return ""
	}
	gone := t.removedLines(stays)
	open := map[int]string{}
	for _, c := range t.set.order {
		if c.open {
			open[c.line] = ":" + c.id.name + " ACCEPT [0:0]"
		}
	}
	var b strings.Builder
	for i, l := range t.d.Lines() {
		if policy := open[i+1]; policy != "" {
			if !strings.HasPrefix(l, "-") { // a policy (-P): the chain is declared above
				b.WriteString(policy + "\n")
			}
			continue
		}
		// Lines of ipset, and lines that are not rules, would make iptables-restore fail.
		if ours := strings.ContainsAny(l[:min(len(l), 1)], "*:-[#") || l == "COMMIT"; ours && !gone[i+1] {
			b.WriteString(l + "\n")
		}
	}
	return b.String()
}

// linesOf returns the lines of the paths' last rules.
func linesOf(paths []*path) (lines []int) {
	for _, p := range paths {
		if !slices.Contains(lines, p.rule.line) {
			lines = append(lines, p.rule.line)
		}
	}
	return lines
}
