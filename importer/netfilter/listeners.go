// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// listeners returns the endpoints of a match. With one, all ports have the same target port, so
// that ranges are expanded.
func (t *translator) listeners(g *group, target netip.Addr, one bool) (list []config.Listen, in config.Interfaces, problem, next string) {
	m := g.match
	in = interfaces(m.in)
	ports := slices.Clone(m.dport)
	if len(ports) == 1 && ports[0].Last == 65535 && ports[0].First <= 1 {
		ports = nil
	}
	if one {
		if ports = singlePorts(ports); ports == nil {
			return nil, "", "no equivalent for one target port of a range with more than 256 ports", "write a port-forward for each range"
		}
	}
	for _, p := range m.dst {
		if !p.IsSingleIP() {
			return nil, "", "no equivalent for a whole network as the destination: " + p.String(), "write a port-forward for each address, or type: static for all ports of all"
		}
		if p.Addr().Is4() != target.Is4() {
			continue
		}
		if t.owns(p.Addr()) == yes || len(m.in) == 0 || wildcard(m.in) {
			list = append(list, config.Listen{Address: p.Addr(), Ports: ports})
			continue
		}
		// Listeners are bound to interfaces. Otherwise the gateway would refuse other ports of an
		// address of another host.
		for _, name := range m.in {
			list = append(list, config.Listen{Address: p.Addr(), Interface: name, Ports: ports})
		}
	}
	if len(list) > 0 {
		if list[0].Interface != "" {
			in = ""
		}
		return list, in, "", ""
	}
	if m.dstLocal && len(m.notDst) == 0 {
		if list = t.ownListeners(target, ports); len(list) > 0 {
			return list, in, "", ""
		}
	}
	if len(m.in) > 0 && !wildcard(m.in) {
		for _, name := range m.in {
			list = append(list, config.Listen{Interface: name, Ports: ports})
		}
		return list, in, "", ""
	}
	for _, name := range t.Outside {
		list = append(list, config.Listen{Interface: name, Ports: ports})
	}
	if len(list) == 0 {
		return nil, "", "the rule matches every address of the host, and a listener needs one", "import again with --outside INTERFACE, the interface with the public address"
	}
	return list, in, "", ""
}

// otherInterfaces replaces "all interfaces except" by the other interfaces, if they are known.
func (t *translator) otherInterfaces(g *group) {
	if t.Addresses == nil || len(g.exempt) == 0 || len(g.match.in) > 0 {
		return
	}
	if slices.ContainsFunc(g.paths, func(p *path) bool { return t.forOwn[p.rule] }) {
		return // the host's own connections have no input interface
	}
	var others []string
	for _, name := range slices.Sorted(maps.Keys(t.Addresses)) {
		if name != "lo" && !slices.ContainsFunc(g.exempt, func(x string) bool { return nameWithin(name, x) }) {
			others = append(others, name)
		}
	}
	if len(others) > 0 {
		g.match.in, g.exempt = others, nil
	}
}

// wildcard reports whether a name is a pattern.
func wildcard(names []string) bool {
	return slices.ContainsFunc(names, func(s string) bool { return strings.HasSuffix(s, "*") })
}

// ownListeners returns listeners on all known addresses of the host in the family of the target.
func (t *translator) ownListeners(target netip.Addr, ports []flow.Ports) (list []config.Listen) {
	for _, name := range slices.Sorted(maps.Keys(t.Addresses)) {
		for _, p := range t.Addresses[name] {
			if a := p.Addr(); !a.IsLoopback() && !a.IsLinkLocalUnicast() && a.Is4() == target.Is4() {
				list = append(list, config.Listen{Address: a, Ports: ports})
			}
		}
	}
	return list
}

// differences adds notes if the listeners match other packets than the rule.
func (t *translator) differences(g *group, object string, listen []config.Listen) {
	p, m := g.paths[0], g.match
	changed := func(reason, next string) { t.d.Changed(object, p.rule.line, p.rule.text, reason, next) }
	switch byInterface := listen[0].Interface != "" && !listen[0].Address.IsValid(); {
	case !byInterface:
		t.otherPorts(g, object, listen)
	case m.dstLocal:
		changed("the rule matches every address of the host, the object only the address of interface "+listen[0].Interface, "import again with --outside IFACE1,IFACE2 for more interfaces")
	default:
		changed("the rule matches packets to any address, the object only packets to the address of interface "+listen[0].Interface, "write address: for another one")
	}
	var other []string
	for _, n := range g.exempt {
		if n != "lo" {
			other = append(other, n)
		}
	}
	if len(other) > 0 {
		changed("packets that arrive by "+strings.Join(other, ", ")+" are translated too", "write in: with the other interfaces if hosts there must not reach the published port")
	}
	if len(m.src) > 0 || m.srcSet != "" || len(m.notSrc) > 0 {
		changed("the original did not translate other clients; the object refuses them", "")
	}
	for _, d := range m.notDst {
		if len(m.dst) == 0 && listen[0].Interface != "" && !d.Addr().IsLoopback() {
			changed("the original did not translate packets to "+d.String(), "")
		}
	}
}

// otherPorts adds a note that the gateway refuses ports without a listener on an address of another
// host.
func (t *translator) otherPorts(g *group, object string, listen []config.Listen) {
	if g.match.proto == flow.Any {
		return
	}
	for _, l := range listen {
		if l.Interface == "" && t.noteUnowned(object, g.paths[0].rule, l.Address) {
			return
		}
	}
}

// noteUnowned adds a note that Sluice owns an address, unless the address is known as the host's own.
func (t *translator) noteUnowned(object string, r *rule, a netip.Addr) bool {
	if t.owns(a) == yes {
		return false
	}
	t.d.Changed(object, r.line, r.text, "Sluice refuses packets to other ports of the object's address unless it is the host's own address; the original routed them",
		"import again with --addresses FILE, the output of 'ip -j addr'")
	return true
}
