// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// filter imports rules that filter, log, mark or disable tracking. A firewall rule of Sluice has no
// connection state, source ports or negations. A rule is imported only if it matches the same
// packets as in its chain: no earlier rule that stays may have accepted some of the packets.
func (t *translator) filter(w *walker) {
	var accepted, ended []match // by rules that are not imported
	var rules []config.FirewallRule
	var of []*path
	exact := true
	for i, p := range w.paths {
		r := p.rule
		at, why := w.base.firewallHook()
		list, next := []config.FirewallRule(nil), "keep the chain in "+t.program+", which Sluice does not change"
		if why == "" {
			list, why, next = t.firewallRules(p, at)
		}
		blocked := accepted
		if r.do == doLog || r.do == doMark || r.do == doNotrack {
			blocked = ended
		}
		if why == "" && (r.do != doAccept && r.do != doReturn) && slices.ContainsFunc(blocked, p.match.mayOverlap) {
			why, next = "earlier rules without an equivalent accept some of its packets", "keep the chain in "+t.program+", which Sluice does not change"
		}
		if why == "" && len(p.except) > 0 && slices.ContainsFunc(p.except, func(e exception) bool { return !e.ends }) {
			why, next = "an earlier rule of its chain exempts packets", "keep the chain in "+t.program+", which Sluice does not change"
		}
		if why != "" {
			if r.do == doClamp && t.clamp(p) || r.do == doHelper && t.help(p) {
				continue
			}
			if (r.do == doAccept || r.do == doReturn) && !w.base.drops && !slices.ContainsFunc(w.paths[i+1:], p.isFollowedBy) {
				t.noteImplied(p, "accepts packets that no later rule drops")
				continue
			}
			exact = exact && r.do != doAccept && r.do != doReturn
			if r.do == doAccept || r.do == doReturn {
				accepted = append(accepted, p.match)
			}
			if r.do == doAccept || r.do == doReturn || r.do == doDrop || r.do == doReject {
				ended = append(ended, p.match)
			}
			t.loseFilter(p, w, why, next)
			continue
		}
		for range list {
			of = append(of, p)
		}
		rules = append(rules, list...)
	}
	t.policy(w, exact, &rules, &of)
	t.addNeededRules(rules, of, w)
}

// firewallHook returns the hook of the chain in the configuration, or why there is none.
func (c *chain) firewallHook() (config.Hook, string) {
	switch c.hook {
	case hookIngress:
		return config.HookIngress, ""
	case hookPrerouting:
		return config.HookPrerouting, ""
	case hookInput:
		return config.HookInput, ""
	case hookForward:
		return config.HookForward, ""
	case hookOutput:
		return config.HookOutput, ""
	}
	return "", "no equivalent for rules that filter or change packets at hook " + string(c.hook)
}

// loseFilter adds a note about a rule that stays active in its program.
func (t *translator) loseFilter(p *path, w *walker, why, next string) {
	if w.base.hook == hookForward || w.base.hook == hookPrerouting || w.base.hook == hookPostrouting {
		t.stays = true
	}
	t.noteLoss(p, why, next)
}

// policy imports the policy drop of a chain if all its rules were imported.
func (t *translator) policy(w *walker, exact bool, rules *[]config.FirewallRule, of *[]*path) {
	c := w.base
	if !c.drops {
		return
	}
	at, why := c.firewallHook()
	if why == "" && !exact {
		why = "policy drop of " + c.id.name + " after rules without an equivalent"
	}
	if why != "" {
		t.stays = t.stays || c.hook == hookForward
		t.d.Lost(c.line, "", why, "keep the chain in "+t.program+", which Sluice does not change")
		return
	}
	end := &path{base: c, rule: &rule{line: c.line, text: t.d.Line(c.line), do: doDrop}, match: match{family: c.family}}
	list, why, next := t.firewallRules(end, at)
	if why != "" {
		t.d.Lost(c.line, "", why, next)
		return
	}
	*rules = append(*rules, list...)
	for range list {
		*of = append(*of, end)
	}
	c.drops, c.open = false, true
}

// addNeededRules adds the rules that have an effect. An accept rule is needed only before a rule that does
// not accept.
func (t *translator) addNeededRules(rules []config.FirewallRule, of []*path, w *walker) {
	last := -1
	for i, p := range of {
		if p.rule.do != doAccept && p.rule.do != doReturn {
			last = i
		}
	}
	stays := w.base.drops || slices.ContainsFunc(w.paths, func(o *path) bool {
		return t.lost[o.rule] && o.rule.do != doAccept && o.rule.do != doReturn
	})
	for i := range rules {
		p := of[i]
		if i > last {
			if stays {
				t.loseFilter(p, w, "accepts packets that a later rule or the policy of its chain drops, and that one stays", "keep the chain in "+t.program+", which Sluice does not change")
			} else {
				t.noteImplied(p, "accepts packets that no later rule drops")
			}
			continue
		}
		name := rules[i].Name
		if name == "" {
			rules[i].Name = fmt.Sprintf("%s-%d", w.base.hook, p.rule.line)
		}
		object := t.d.Rule(rules[i], p.rule.line)
		t.markTranslated(p, draftObject{object, -1, -1})
		if p.rule.do == doAccept || p.rule.do == doReturn {
			t.lost[p.rule] = stays // the rule is also needed in the original program
		}
		t.noteReject(p, object)
	}
}

// noteReject adds a note if the reply differs.
func (t *translator) noteReject(p *path, object string) {
	r := p.rule
	if r.do != doReject {
		return
	}
	tcp, other := r.reset, r.unreachable
	if p.match.proto == flow.TCP && !tcp || p.match.proto != flow.TCP && p.match.proto != flow.Any && !other || p.match.proto == flow.Any && (tcp || !other) {
		t.d.Changed(object, r.line, r.text, "reject answers TCP by a reset and the rest by ICMP port unreachable", "")
	} else if p.match.proto == flow.Any {
		t.d.Changed(object, r.line, r.text, "reject answers TCP by a reset, not by ICMP", "")
	}
}

// firewallRules returns the firewall rules of a path: one for each pair of prefixes.
func (t *translator) firewallRules(p *path, at config.Hook) (list []config.FirewallRule, why, next string) {
	m, r := p.match, p.rule
	base := config.FirewallRule{Hook: at, Protocol: m.proto, Ports: m.dport}
	if n := objectName(p, ""); n != "" {
		base.Name = n
	}
	switch r.do {
	case doAccept, doReturn:
		base.Action = config.ActionAccept
	case doDrop:
		base.Action = config.ActionDrop
	case doReject:
		base.Action = config.ActionReject
	case doLog:
		base.Action, base.Prefix, base.Level = config.ActionLog, r.log.prefix, config.LogLevel(r.log.level)
	case doMark:
		base.Action, base.Mark = config.ActionMark, r.mark
	case doNotrack:
		if base.Action = config.ActionNotrack; at != config.HookPrerouting {
			return nil, "no equivalent for notrack of the host's own packets", "keep it in " + t.program
		}
	case doHelper:
		return nil, "a helper is a setting of the object that translates the connections", "write helper: " + r.helper + " at the service, port-forward, masquerade or snat"
	default:
		return nil, "no equivalent for " + actionName(r), "keep it in " + t.program
	}
	if list := unequalFilter(m, r); len(list) > 0 {
		return nil, "no equivalent for " + strings.Join(list, ", "), nextFor(list, t.program)
	}
	if m.rate != "" {
		if err := base.Rate.UnmarshalText([]byte(m.rate)); err != nil {
			return nil, "no equivalent for the rate " + m.rate, "write rate: by hand"
		}
		base.Burst = m.burst
	}
	if len(m.in) > 0 {
		base.In = m.in[0]
	}
	if len(m.out) > 0 {
		base.Out = m.out[0]
	}
	src := m.src
	if len(m.src)+len(m.dst) == 0 && m.srcSet+m.dstSet == "" && m.family != 0 {
		src = []netip.Prefix{allAddresses(m.family)} // rules without addresses are for both families
	}
	for _, s := range t.matches(src, m.srcSet, r) {
		for _, d := range t.matches(m.dst, m.dstSet, r) {
			one := base
			one.Source, one.Destination = s, d
			list = append(list, one)
		}
	}
	return list, "", ""
}

// allAddresses is the prefix of all addresses of a family.
func allAddresses(family int) netip.Prefix {
	if family == 6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// matches returns alternatives of addresses: single prefixes, a set, or all addresses of the
// family.
func (t *translator) matches(prefixes []netip.Prefix, set string, r *rule) (list []config.Match) {
	if set != "" {
		return []config.Match{{Set: t.useSet(set, r)}}
	}
	for _, p := range prefixes {
		list = append(list, config.Match{Prefix: p})
	}
	if len(list) == 0 {
		list = append(list, config.Match{})
	}
	return list
}

// unequalFilter returns the conditions of a match that firewall rules do not support.
func unequalFilter(m match, r *rule) (list []string) {
	add := func(is bool, what string) {
		if is {
			list = append(list, what)
		}
	}
	wild := func(names []string) bool {
		return len(names) > 1 || len(names) == 1 && strings.HasSuffix(names[0], "*")
	}
	list = append(list, m.other...)
	add(m.srcLocal || m.dstLocal, "addresses of the host")
	add(len(m.notIn)+len(m.notOut) > 0, "an excluded interface")
	add(wild(m.in) || wild(m.out), "several interfaces in one rule")
	add(len(m.notSrc)+len(m.notDst) > 0, "an excluded address")
	add(len(m.src)*len(m.dst) > 64 || len(m.src) > 64 || len(m.dst) > 64, "more than 64 pairs of addresses in one rule")
	add(len(m.sport) > 0, "source ports")
	add(len(m.dport) > 0 && !m.proto.HasPorts(), "ports without a protocol")
	add(m.mark != nil || m.notMark != nil, "marks")
	add(m.share != 0, "a share of the packets")
	add(m.remember != 0, "clients seen before")
	add(m.rate != "" && r.do != doLog, "a rate limit as a condition")
	add(r.do == doMark && (r.mask != 0xffffffff && r.mask != 0 || r.mark == 0), "a part of the mark")
	return list
}

// clamp imports MSS clamping if a source translation has the same output interface.
func (t *translator) clamp(p *path) bool {
	done := false
	for _, s := range t.sourced {
		n := &t.d.Config.NAT[s.object.nat]
		if len(p.match.out) == 0 || slices.Equal(p.match.out, s.path.match.out) {
			n.MSSClamp, done = true, true
			t.d.Changed(s.object.name, p.rule.line, p.rule.text, "mss-clamp lowers the option in both directions, and adds none to SYNs without it", "")
			if len(p.match.out) == 0 {
				t.d.Changed(s.object.name, p.rule.line, p.rule.text, "the rule clamps every forwarded connection, mss-clamp only connections through the interfaces of the object", "write mss-clamp at further rules, or keep it in "+t.program)
			}
			t.markTranslated(p, s.object)
		}
	}
	return done
}

// isFollowedBy reports whether the later path has another action than accept for packets that this
// path accepts.
func (p *path) isFollowedBy(later *path) bool {
	return later.rule.do != doAccept && later.rule.do != doReturn && later.match.mayOverlap(p.match)
}

// helperPorts has the port of each protocol with a helper for inside hosts.
var helperPorts = map[string]uint16{"ftp": 21, "tftp": 69, "sip": 5060, "pptp": 1723, "snmp": 162, "amanda": 10080, "irc": 6667}

// help adds a helper to the source translations, and to port-forwards of its port.
func (t *translator) help(p *path) (done bool) {
	m, helper := p.match, p.rule.helper
	port := helperPorts[helper]
	if port == 0 || len(m.dport) != 1 || m.dport[0] != (flow.Ports{First: port, Last: port}) || len(m.src)+len(m.dst)+len(m.other)+len(m.in) > 0 {
		return false
	}
	for _, s := range t.sourced {
		n := &t.d.Config.NAT[s.object.nat]
		if !slices.Contains(n.Helper.Each(), config.Helper(helper)) {
			n.Helper = config.Helpers(strings.TrimPrefix(string(n.Helper)+","+helper, ","))
		}
		t.markTranslated(p, s.object)
		done = true
	}
	for _, f := range t.forwards {
		if f.made.nat >= 0 && f.proto == m.proto && len(f.listen[0].Ports) == 1 && f.listen[0].Ports[0] == m.dport[0] {
			t.d.Config.NAT[f.made.nat].Helper = config.Helpers(helper)
			t.markTranslated(p, f.made)
			done = true
		}
	}
	return done
}
