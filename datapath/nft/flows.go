// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// errEnough ends a dump that the caller has seen enough of.
var errEnough = errors.New("enough")

// Flows calls yield for each connection that the kernel tracks, with the service
// or NAT rule that it belongs to. Connections of the modes dsr and stateless are
// not tracked and so not among them.
func (d *Datapath) Flows(ctx context.Context, yield func(flow.Flow) bool) error {
	d.mu.Lock()
	labels := d.labels()
	d.mu.Unlock()
	c, err := d.tracking.Sibling()
	if err != nil {
		return err
	}
	defer c.Close()
	err = c.Dump(ctx, nil, func(e *conntrack.Entry) error {
		f := e.Flow()
		labels.set(&f)
		if !yield(f) {
			return errEnough
		}
		return nil
	})
	// An interrupted dump is complete but for single entries that came or went
	// meanwhile.
	if errors.Is(err, errEnough) || errors.Is(err, conntrack.ErrInterrupted) {
		return nil
	}
	return err
}

// labels finds the owner of a connection by what it was opened to.
type labels struct {
	exact  map[endpoint]*config.Service
	ranged map[netip.Addr][]rangedListener
	nat    []*config.NATRule
}

type endpoint struct {
	protocol flow.Protocol
	to       netip.AddrPort
}

type rangedListener struct {
	protocol flow.Protocol
	ports    flow.Ports
	service  *config.Service
}

// labels indexes the snapshot in force.
func (d *Datapath) labels() *labels {
	l := &labels{exact: make(map[endpoint]*config.Service), ranged: make(map[netip.Addr][]rangedListener)}
	if d.snapshot == nil {
		return l
	}
	for _, s := range d.snapshot.Services {
		l.service(s)
	}
	l.nat = d.snapshot.NAT
	return l
}

func (l *labels) service(s datapath.Service) {
	for _, at := range s.Listen {
		ports := at.Ports
		if len(ports) == 0 {
			ports = []flow.Ports{{}}
		}
		for _, p := range ports {
			if p.First == p.Last && p != (flow.Ports{}) && s.Protocol != flow.Any {
				l.exact[endpoint{s.Protocol, netip.AddrPortFrom(at.Address, p.First)}] = s.Service
				continue
			}
			l.ranged[at.Address] = append(l.ranged[at.Address], rangedListener{s.Protocol, p, s.Service})
		}
	}
}

// set labels a flow.
func (l *labels) set(f *flow.Flow) {
	f.Datapath = "nftables"
	to := f.Original.Dest
	s := l.exact[endpoint{f.Original.Protocol, to}]
	for _, r := range l.ranged[to.Addr()] {
		if s == nil && (r.protocol == flow.Any || r.protocol == f.Original.Protocol) && r.ports.Contains(to.Port()) {
			s = r.service
		}
	}
	if s != nil {
		f.Owner = s.Name
		for _, b := range s.Backends {
			if b.Address == f.Reply.Source.Addr() && (b.Port == 0 || b.Port == f.Reply.Source.Port()) {
				f.Backend = b.Name
				break
			}
		}
		return
	}
	for _, n := range l.nat {
		if owns(n, f) {
			f.Owner = n.Name
			return
		}
	}
	f.Datapath = "kernel"
}

// owns reports whether a NAT rule translates the flow.
func owns(n *config.NATRule, f *flow.Flow) bool {
	switch n.Type {
	case config.NATPortForward:
		return n.Listen.Address == f.Original.Dest.Addr() && f.DestTranslated() &&
			(n.Protocol == flow.Any || n.Protocol == f.Original.Protocol) && inPorts(n.Listen.Ports, f.Original.Dest.Port())
	case config.NATStatic:
		return n.External.Contains(f.Original.Dest.Addr()) && f.DestTranslated() ||
			n.Internal.Contains(f.Original.Source.Addr()) && f.SourceTranslated()
	case config.NATMasquerade, config.NATSNAT:
		if !f.SourceTranslated() || !inPrefixes(n.Source, f.Original.Source.Addr()) {
			return false
		}
		for _, r := range n.To.Addresses {
			if r.Contains(f.Reply.Dest.Addr()) {
				return true
			}
		}
		return len(n.To.Addresses) == 0
	}
	return false
}

func inPorts(list []flow.Ports, port uint16) bool {
	for _, p := range list {
		if p.Contains(port) {
			return true
		}
	}
	return len(list) == 0
}

func inPrefixes(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return len(list) == 0
}

// cut ends the tracked connections of backends that went down with a snapshot:
// their packets would go on being sent there for as long as clients keep the
// same port, as DNS resolvers and SIP telephones do. Of a backend that is drained those end that
// are closed or were never answered: a SYN of the same port would go on with them, where it opens
// another connection. The table is read once, however
// many backends there are: a rack that fails must not keep the next change waiting.
func (d *Datapath) cut(ctx context.Context, before, after *datapath.Snapshot) error {
	if before == nil {
		return nil
	}
	was := make(map[string]datapath.Service, len(before.Services))
	for _, s := range before.Services {
		was[s.Name] = s
	}
	ways := make(map[conntrack.Addr][]way) // by the backend's address
	listeners := make(map[netip.Addr]bool)
	for _, s := range after.Services {
		old, ok := was[s.Name]
		if !ok || old.Service == s.Service && equalStates(old.State, s.State) || !tracked(s.Mode) {
			continue
		}
		for i, b := range s.Backends {
			state, was := s.State[i], stateOf(old, b)
			if state == datapath.Up || state == was || was == datapath.Down {
				continue
			}
			for _, f := range waysTo(s, b) {
				at := conntrack.AddrOf(b.Address)
				ways[at] = append(ways[at], way{f, state})
				listeners[f.Dest.Addr()] = true
			}
		}
	}
	if len(ways) == 0 {
		return nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return err
	}
	defer c.Close()
	var all *conntrack.Filter
	if len(listeners) == 1 { // the kernel sifts
		for a := range listeners {
			all = &conntrack.Filter{Dest: netip.PrefixFrom(a, a.BitLen())}
		}
	}
	_, err = c.DeleteIf(ctx, all, func(e *conntrack.Entry) bool {
		return slices.ContainsFunc(ways[e.Reply.Source], func(w way) bool { return w.ends(e) })
	})
	if err != nil {
		return fmt.Errorf("connections of backends that went down or were drained: %w", err)
	}
	return nil
}

// way are the connections by one listener to a backend of that state.
type way struct {
	conntrack.Filter
	state datapath.State
}

func (w *way) ends(e *conntrack.Entry) bool {
	if w.state == datapath.Drain && (e.Protocol != flow.TCP || !slices.Contains([]string{"SYN_SENT", "LAST_ACK", "TIME_WAIT", "CLOSE"}, e.StateName())) {
		return false
	}
	return w.Matches(e)
}

func equalStates(a, b []datapath.State) bool {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return false
		}
	}
	return len(a) == len(b)
}

func tracked(m config.Mode) bool { return m == config.ModeDNAT || m == config.ModeFullNAT }

// stateOf is the state that a backend had in a service; unknown ones were down.
func stateOf(s datapath.Service, b config.Backend) datapath.State {
	for i, o := range s.Backends {
		if o.Address == b.Address && o.Port == b.Port {
			return s.State[i]
		}
	}
	return datapath.Down
}

// waysTo lists the connections to one backend by way of each listener.
func waysTo(s datapath.Service, b config.Backend) (list []conntrack.Filter) {
	for _, l := range s.Listen {
		if l.Address.Is4() != b.Address.Is4() {
			continue
		}
		for _, p := range ports(l) {
			list = append(list, conntrack.Filter{
				Protocol: s.Protocol, Dest: netip.PrefixFrom(l.Address, l.Address.BitLen()), DestPort: p,
				TranslatedDest: netip.PrefixFrom(b.Address, b.Address.BitLen()), TranslatedDestPort: flow.Ports{First: b.Port, Last: b.Port},
			})
		}
	}
	return list
}

func ports(l config.Listen) []flow.Ports {
	if len(l.Ports) == 0 {
		return []flow.Ports{{}}
	}
	return l.Ports
}
