// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// groupDifference is a difference to note.
type groupDifference struct {
	line               int
	text, reason, next string
}

// findMarks finds the marks that select packets for masquerade in a postrouting chain, as
// kube-proxy sets them.
func (t *translator) findMarks(w *walker) {
	for _, p := range w.paths {
		if p.rule.do != doMasq {
			continue
		}
		if k := p.match.mark; k != nil && k.value == k.mask {
			t.masquerading = append(t.masquerading, *k)
		}
		for _, e := range p.except {
			if k := e.match.notMark; k != nil && k.value == k.mask {
				t.masquerading = append(t.masquerading, *k)
			}
		}
	}
}

func (t *translator) isMasquerade(r *rule) bool {
	return slices.ContainsFunc(t.masquerading, func(k packetMark) bool { return r.do == doMark && r.mark&k.mask == k.value && k.mask != 0 })
}

// allMasqueraded reports whether the sources of all packets of a group are masqueraded. If only some
// are, it returns the notes about these.
func (t *translator) allMasqueraded(g *group) (all bool, list []groupDifference) {
	seen := map[*rule]bool{}
	for _, p := range g.paths {
		for _, k := range p.marks {
			if !t.isMasquerade(k.rule) || seen[k.by] {
				continue
			}
			switch {
			case k.match.includes(g.match):
				return true, nil
			case len(k.match.src) == 1 && k.match.src[0].IsSingleIP() && k.match.src[0].Addr() == p.rule.first:
				list = append(list, groupDifference{k.by.line, k.by.text, "a backend that is a client of its own service gets no reply if the service selects the same backend", "write mode: fullnat; backends then see the gateway as the client"})
			default:
				list = append(list, groupDifference{k.by.line, k.by.text, "the original replaced the address of some clients by the host's; the service replaces none", "write mode: fullnat, which replaces the address of all clients, if backends do not route their replies through this host"})
			}
			seen[k.by] = true
		}
	}
	return false, list
}

// isHairpinOf reports whether a rule makes a published port available to inside hosts.
func (t *translator) isHairpinOf(m match, p *path) bool {
	for _, f := range t.forwards {
		if f.target == p.rule.first && f.proto == m.proto && sameListen(f, m) && len(m.in) > 0 {
			f.reflected = true
			t.noteImplied(p, "inside hosts also reach the published port through "+f.object)
			return true
		}
	}
	return false
}

// isReflection is like isHairpinOf, for a rule with certain clients.
func (t *translator) isReflection(g *group, p *path) bool {
	for _, f := range t.forwards {
		if f.target == p.rule.first && f.proto == g.match.proto && sameListen(f, g.match) {
			f.reflected = true
			t.noteImplied(p, "inside hosts also reach the published port through "+f.object)
			return true
		}
	}
	return false
}

// sameListen reports whether a match has the ports of a forward and one of its addresses.
func sameListen(f *forward, m match) bool {
	return slices.ContainsFunc(f.listen, func(l config.Listen) bool {
		address := len(m.dst) == 1 && m.dst[0].IsSingleIP() && (!l.Address.IsValid() || l.Address == m.dst[0].Addr())
		return address && slices.Equal(l.Ports, m.dport)
	})
}

// ownConnections handles the translations of the host's own connections.
func (t *translator) ownConnections(w *walker) {
	for _, p := range w.paths {
		objects := t.made[p.rule]
		switch {
		case p.rule.do == doAccept || p.rule.do == doReturn:
		case len(objects) > 0 && len(p.match.unsupportedConditions()) == 0:
			for _, o := range objects {
				if o.service >= 0 {
					t.d.Config.Services[o.service].Datapath = config.DatapathNftables
				} else {
					t.d.Config.NAT[o.nat].Datapath = config.DatapathNftables
				}
				t.d.Remark("Objects with datapath: nftables also translate connections that the host itself opens, as the original did. Remove datapath: if there are none.")
			}
		case t.taken[p.rule] && !t.lost[p.rule]:
		case p.rule.do == doMark && t.isMasquerade(p.rule):
			t.noteImplied(p, "marks packets to have their source translated")
		case t.lost[p.rule]: // already noted
		default:
			t.noteLoss(p, "no equivalent for a translation of only the host's own connections", "let the host's programs connect to the target address, or keep it in "+t.program)
		}
	}
}
