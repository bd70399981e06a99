// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"iter"
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Listener is the receiver of packets to an endpoint: a service, or a port-forward rule.
type Listener struct {
	Service *Service
	Forward *config.NATRule
	// Bound reports that it listens on one interface only.
	Bound bool
}

// Name identifies a listener.
func (l Listener) Name() string {
	if l.Service != nil {
		return "service " + l.Service.Name
	}
	return "nat " + l.Forward.Name
}

// nameIn reports whether names contains the listener's name. Unlike Name it rarely allocates a string.
func (l Listener) nameIn(names map[string]bool) bool {
	if l.Service != nil {
		return names["service "+l.Service.Name]
	}
	return names["nat "+l.Forward.Name]
}

// Listeners finds the listener of an endpoint in a snapshot.
type Listeners struct {
	exact  map[listenerKey]Listener
	ranged map[netip.Addr][]rangedListener
}

type listenerKey struct {
	protocol flow.Protocol
	to       netip.AddrPort
}

type rangedListener struct {
	protocol flow.Protocol
	ports    flow.Ports
	Listener
}

// NewListeners indexes a snapshot; nil has no listeners.
func NewListeners(s *Snapshot) *Listeners {
	l := &Listeners{exact: map[listenerKey]Listener{}, ranged: map[netip.Addr][]rangedListener{}}
	if s == nil {
		return l
	}
	for i := range s.Services {
		for _, at := range s.Services[i].Listen {
			l.add(s.Services[i].Protocol, at, Listener{Service: &s.Services[i], Bound: at.Interface != ""})
		}
	}
	for _, n := range s.NAT {
		if n.Listens() {
			l.add(n.Protocol, *n.Listen, Listener{Forward: n, Bound: n.In != "" || n.Listen.Interface != ""})
		}
	}
	return l
}

func (l *Listeners) add(protocol flow.Protocol, at config.Listen, what Listener) {
	ports := at.Ports
	if len(ports) == 0 {
		ports = []flow.Ports{{}}
	}
	for _, p := range ports {
		key := listenerKey{protocol, netip.AddrPortFrom(at.Address, p.First)}
		if _, taken := l.exact[key]; !taken && p.First == p.Last && p != (flow.Ports{}) && protocol != flow.Any {
			l.exact[key] = what
			continue
		}
		l.ranged[at.Address] = append(l.ranged[at.Address], rangedListener{protocol, p, what})
	}
}

// Find returns the candidates for a packet of the protocol to the endpoint: all listeners bound to an interface, and
// the first unbound listener. A listener on the exact port precedes listeners on port ranges.
func (l *Listeners) Find(protocol flow.Protocol, to netip.AddrPort) (found []Listener) {
	everywhere := false
	note := func(at Listener) {
		if at.Bound || !everywhere {
			found = append(found, at)
			everywhere = everywhere || !at.Bound
		}
	}
	if at, ok := l.exact[listenerKey{protocol, to}]; ok {
		note(at)
	}
	for _, r := range l.ranged[to.Addr()] {
		if (r.protocol == flow.Any || r.protocol == protocol) && r.ports.Contains(to.Port()) {
			note(r.Listener)
		}
	}
	return found
}

// Addresses calls yield for the addresses of the named listeners.
func (l *Listeners) Addresses(named map[string]bool) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for at, what := range l.exact {
			if what.nameIn(named) && !yield(at.to.Addr()) {
				return
			}
		}
		for a, list := range l.ranged {
			for _, r := range list {
				if r.nameIn(named) && !yield(a) {
					return
				}
			}
		}
	}
}

// Differing returns the names, like Listener.Name, of services and NAT rules that exist in only one of two snapshots
// or treat open connections differently. It compares the states of backends, but not their weights. before may be
// nil.
func Differing(before, after *Snapshot) map[string]bool {
	differ := map[string]bool{}
	if before == nil {
		before = &Snapshot{}
	}
	if before == after {
		return differ
	}
	addDiffering(differ, before.Services, after.Services,
		func(s *Service) string { return "service " + s.Name }, func(a, b *Service) bool { return a.Name == b.Name }, (*Service).treatsAlike)
	addDiffering(differ, before.NAT, after.NAT,
		func(n **config.NATRule) string { return "nat " + (*n).Name }, func(a, b **config.NATRule) bool { return (*a).Name == (*b).Name },
		func(a, b **config.NATRule) bool { return *a == *b || reflect.DeepEqual(*a, *b) })
	return differ
}

// Alike reports whether two services and the states and weights of their backends are equal.
func (s *Service) Alike(o *Service) bool {
	return slices.Equal(s.Weights, o.Weights) && s.sameStates(o)
}

// treatsAlike reports whether two services treat open connections alike.
func (s *Service) treatsAlike(o *Service) bool {
	if s.sameStates(o) {
		return true
	}
	same := func(a, b config.Backend) bool {
		a.Weight, a.Priority = b.Weight, b.Priority
		return a == b
	}
	if !slices.Equal(s.State, o.State) || !slices.EqualFunc(s.Backends, o.Backends, same) {
		return false
	}
	x, y := *s.Service, *o.Service
	x.Backends, y.Backends = nil, nil
	return reflect.DeepEqual(x, y)
}

// addDiffering records the names of objects that exist in only one list, or are not alike in both. Most lists have the
// same objects at the same positions.
func addDiffering[T any](differ map[string]bool, before, after []T, name func(*T) string, same, alike func(a, b *T) bool) {
	for len(before) > 0 && len(after) > 0 && same(&before[0], &after[0]) {
		if !alike(&before[0], &after[0]) {
			differ[name(&before[0])] = true
		}
		before, after = before[1:], after[1:]
	}
	was := make(map[string]*T, len(before))
	for i := range before {
		was[name(&before[i])] = &before[i]
		differ[name(&before[i])] = true
	}
	for i := range after {
		if old := was[name(&after[i])]; old == nil || !alike(old, &after[i]) {
			differ[name(&after[i])] = true
		} else {
			delete(differ, name(&after[i]))
		}
	}
}

// Keeps reports whether an open connection of the protocol survives a change that would treat it differently.
func (s *Snapshot) Keeps(protocol flow.Protocol) bool {
	return (protocol == flow.TCP || protocol == flow.SCTP) && s.Config.Established != config.EstablishedEnd
}
