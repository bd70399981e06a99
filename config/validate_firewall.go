// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxLogPrefix is the longest prefix of a kernel log line, in bytes: the
// kernel's NF_LOG_PREFIXLEN less the final zero.
const maxLogPrefix = 127

func (v *validator) firewall() {
	f := &v.c.Firewall
	for name := range f.Sets {
		v.name(path{{key: "firewall"}, {key: "sets"}, {key: name}}, name)
	}
	names := seenNames{}
	for i := range f.Rules {
		r, p := &f.Rules[i], path{{key: "firewall"}, {key: "rules"}, {index: i}}
		v.name(p.key("name"), r.Name)
		if first := names.recordName(r.Name, i); first >= 0 && r.Name != "" {
			v.errorf(p.key("name"), "give each rule a name of its own", "name %s is taken by firewall.rules[%d]", r.Name, first)
		}
		v.firewallRule(p, r)
	}
}

func (v *validator) firewallRule(p path, r *FirewallRule) {
	v.match(p.key("source"), r.Source)
	v.match(p.key("destination"), r.Destination)
	v.ifname(p.key("in"), r.In)
	v.ifname(p.key("out"), r.Out)
	v.logLine(p.key("prefix"), r.Prefix)
	s, d := r.Source.Prefix, r.Destination.Prefix
	if s.IsValid() && d.IsValid() && s.Addr().Is4() != d.Addr().Is4() {
		v.errorf(p.key("destination"), "write two prefixes of one family", "no packet goes from %s to %s", s, d)
	}
	if len(r.Ports) > 0 && !r.Protocol.HasPorts() {
		v.errorf(p.key("ports"), "write protocol: tcp, udp or sctp", "ports need a protocol that has them").depends = []path{p.key("protocol")}
	}
	logs := r.Action == ActionLog
	early := r.Hook == HookIngress || r.Hook == HookPrerouting
	v.rules(p, []rule{
		{r.Prefix != "" && !logs, "prefix", "remove it, or write action: log", "prefix applies to action log only"},
		{r.Level != "" && !logs, "level", "remove it, or write action: log", "level applies to action log only"},
		{!r.Rate.IsZero() && !logs && r.Action != ActionDrop, "rate", "remove it", "rate applies to the actions log and drop only"},
		{r.Burst > 0 && r.Rate.IsZero(), "burst", "write rate, for example 6/minute", "burst needs rate"},
		{r.Mark != 0 && r.Action != ActionMark, "mark", "remove it, or write action: mark", "mark applies to action mark only"},
		{r.Action == ActionMark && r.Mark == 0, "action", "write mark, a number other than 0", "action mark needs mark"},
		{r.Out != "" && (early || r.Hook == HookInput), "out", "remove it, or write hook: forward", fmt.Sprintf("at hook %s the packet's way out is not known", r.Hook)},
		{r.In != "" && r.Hook == HookOutput, "in", "remove it, or write out", "packets at hook output come from this host"},
		{r.Action == ActionNotrack && r.Hook != HookPrerouting && r.Hook != HookOutput, "hook", "write hook: prerouting, or output",
			fmt.Sprintf("at hook %s the packet is tracked already, or not yet reached by tracking", r.Hook)},
		{r.Action == ActionReject && early, "hook", "write hook: forward or input, or action: drop", fmt.Sprintf("hook %s cannot answer a packet", r.Hook)},
	})
}

// match checks that a named set exists.
func (v *validator) match(p path, m Match) {
	if m.Set != "" {
		v.set(p, m.Set)
	}
}

func (v *validator) set(p path, name string) {
	if _, ok := v.c.Firewall.Sets[name]; ok {
		return
	}
	if bare, ok := strings.CutPrefix(name, "@"); ok {
		if _, ok := v.c.Firewall.Sets[bare]; ok {
			v.errorf(p, "write "+bare, "allow and deny name sets without @")
			return
		}
		name = bare
	}
	hint := hintName(name, slices.Sorted(maps.Keys(v.c.Firewall.Sets)), "sets")
	if len(v.c.Firewall.Sets) == 0 {
		hint = "write the set under firewall: sets:"
	}
	v.errorf(p, hint, "no set is called %s", name).depends = []path{{{key: "firewall"}, {key: "sets"}}}
}

func (v *validator) logLine(p path, prefix string) {
	if len(prefix) > maxLogPrefix || strings.ContainsFunc(prefix, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		v.errorf(p, fmt.Sprintf("write up to %d bytes", maxLogPrefix), "prefix of %d bytes, or with control characters", len(prefix))
	}
}

func joinWords(words []string) string { return strings.Join(words, ", ") }
