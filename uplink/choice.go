// SPDX-License-Identifier: Apache-2.0

package uplink

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// decide returns the uplinks with the state of the host, and the change of its rules and routes. t.mu must be locked.
func (t *Tracker) decide(list []config.Uplink) (views []view, d difference, err error) {
	h, err := readHost()
	if err != nil {
		return nil, d, err
	}
	for i, u := range list {
		v := view{Uplink: u, mark: u.Mark(i), table: FirstTable + i}
		if v.link, err = readLink(u.Interface); err != nil {
			return nil, d, err
		}
		for f := range families {
			v.next[f] = v.hop(f, h)
		}
		views = append(views, v)
	}
	assignPrefixes(views)
	var rules []rule
	var routes []route
	for f := range families {
		t.choose(views, f)
		if slices.ContainsFunc(views, func(v view) bool { return v.hasFamily(f) }) {
			r, w := wanted(views, f)
			rules, routes = append(rules, r...), append(routes, w...)
		}
	}
	return views, h.compare(rules, routes), nil
}

// hop returns the next hop of a family, or nil.
func (v *view) hop(f int, h *hostState) *hop {
	switch best := h.defaults[v.index][f]; {
	case v.index == 0:
		return nil
	case v.Gateway.IsValid() && datapath.FamilyIndex(v.Gateway) == f:
		connected := slices.ContainsFunc(v.addresses, func(a addressed) bool { return a.network.Contains(v.Gateway) })
		return &hop{gateway: v.Gateway, onlink: !connected}
	case best != nil:
		return &best.hop
	case v.pointToPoint:
		return &hop{}
	}
	return nil
}

func (v *view) hasFamily(f int) bool {
	return slices.ContainsFunc(v.addresses, func(a addressed) bool { return datapath.FamilyIndex(a.address) == f })
}

// assignPrefixes assigns each source address to one uplink: the networks of its interface, and its further prefixes. If
// networks of two uplinks overlap, as behind two routers with one factory setting, only the addresses of the interfaces
// are assigned.
func assignPrefixes(views []view) {
	networks := func(v *view) (list []netip.Prefix) {
		for _, a := range v.addresses {
			list = append(list, a.network)
		}
		return append(list, v.Prefixes...)
	}
	overlaps := func(list []netip.Prefix, p netip.Prefix) bool { return slices.ContainsFunc(list, p.Overlaps) }
	for i := range views {
		var others []netip.Prefix
		for j := range views {
			if j < i {
				others = append(others, views[j].prefixes...)
			} else if j > i {
				others = append(others, networks(&views[j])...)
			}
		}
		v := &views[i]
		add := func(p netip.Prefix) {
			if !slices.ContainsFunc(v.prefixes, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Overlaps(p) }) {
				v.prefixes = append(slices.DeleteFunc(v.prefixes, p.Overlaps), p)
			}
		}
		for _, p := range v.Prefixes {
			add(p)
		}
		for _, a := range v.addresses {
			p := a.network
			if overlaps(others, p) {
				p = netip.PrefixFrom(a.address, a.address.BitLen())
			}
			taken := false
			for j := range i {
				taken = taken || overlaps(views[j].prefixes, p)
			}
			if !taken {
				add(p)
			}
		}
		slices.SortFunc(v.prefixes, netip.Prefix.Compare)
	}
}

// choose sets the usable uplinks of a family, and the uplinks that get new connections. If the probes of all uplinks
// fail, the probes are not believed: the targets may be down.
func (t *Tracker) choose(views []view, f int) {
	any := false
	for i := range views {
		v := &views[i]
		switch {
		case v.down != "":
			v.why[f] = v.down
		case !v.hasFamily(f):
			v.why[f] = fmt.Sprintf("interface %s has no %s address", v.Interface, familyName(f))
		case v.next[f] == nil:
			v.why[f] = fmt.Sprintf("no next hop: interface %s has no %s default route, and the uplink no gateway", v.Interface, familyName(f))
		default:
			v.usable[f], v.failed[f] = true, t.failure(&v.Uplink, f)
			any = any || v.failed[f] == ""
		}
	}
	best := 0
	for i := range views {
		v := &views[i]
		v.usable[f] = v.usable[f] && (v.failed[f] == "" || !any)
		if v.usable[f] && (best == 0 || v.Priority < best) {
			best = v.Priority
		}
	}
	for i := range views {
		views[i].carries[f], views[i].used[f] = views[i].usable[f] && views[i].Priority == best, best != 0
	}
}

func familyName(f int) string {
	if f == 1 {
		return "IPv6"
	}
	return "IPv4"
}

// failure returns why the probes of an uplink fail, or "". Targets of the family decide, or all if it has none.
func (t *Tracker) failure(u *config.Uplink, f int) string {
	if u.Probe == nil || t.probes == nil {
		return ""
	}
	targets := slices.DeleteFunc(slices.Clone(u.Probe.Targets), func(a netip.Addr) bool { return datapath.FamilyIndex(a) != f })
	if len(targets) == 0 {
		targets = u.Probe.Targets
	}
	why := ""
	for _, a := range targets {
		s, ok := t.probes.State(u.Name, a.String())
		if !ok || !s.Known || s.Up {
			return ""
		}
		why = fmt.Sprintf("%s: %s", a, s.Reason)
	}
	return why
}

// wanted returns the rules and routes of a family.
func wanted(views []view, f int) (rules []rule, routes []route) {
	rules = append(rules, rule{family: f, priority: specificRule, table: unix.RT_TABLE_MAIN})
	first := true
	for i := range views {
		v := &views[i]
		rules = append(rules, rule{family: f, priority: markRule, mark: v.mark, table: v.table})
		for _, p := range v.prefixes {
			if datapath.FamilyIndex(p.Addr()) == f {
				rules = append(rules, rule{family: f, priority: sourceRule, from: p, table: v.table})
			}
		}
		if n := v.next[f]; n != nil && v.down == "" && v.hasFamily(f) {
			routes = append(routes, route{family: f, table: v.table, ifindex: v.index, hop: *n})
		}
		routes = append(routes, route{family: f, table: v.table})
		if v.carries[f] && first {
			rules = append(rules, rule{family: f, priority: otherRule, table: v.table})
			first = false
		}
	}
	return rules, routes
}
