// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// A flow decides about its packets until it ends, and whoever sends without a pause from one
// port never opens another one. So an apply ends the flows that its configuration would treat
// otherwise.

// stale tells which flows a desired state treats otherwise than they are.
type stale struct {
	want      *desired
	have      *desired // nil when it is not known: an earlier process had it
	snapshot  *datapath.Snapshot
	listeners *datapath.Listeners
	services  map[string]*config.Service
	rules     map[string]*config.NATRule
}

// staleAfter returns nil where nothing differs between the snapshot in force and the next one but
// states of backends, which the sweeper looks at.
func (d *Datapath) staleAfter(want *desired, s *datapath.Snapshot) *stale {
	if d.snapshot != nil && (d.snapshot.Config == s.Config || len(datapath.Differing(d.snapshot, s)) == 0) {
		return nil
	}
	st := &stale{want: want, have: d.inForce, snapshot: s, listeners: datapath.NewListeners(want.resolved),
		services: map[string]*config.Service{}, rules: map[string]*config.NATRule{}}
	for _, x := range s.Services {
		st.services[x.Name] = x.Service
	}
	for _, n := range s.NAT {
		st.rules[n.Name] = n
	}
	return st
}

// ends reports whether a flow is ended. twin is its other direction.
func (s *stale) ends(f, twin side) bool {
	at := s.listeners.Find(f.key.Protocol, f.key.Dest)
	if f.flags&EntryNAT != 0 {
		return s.source(f, twin, at)
	}
	id := uint32(f.owner)
	w, ok := s.want.services[id]
	if !ok {
		return true // as the sweeper does
	}
	b, ok := s.want.backends[uint32(f.backend)]
	bypass := w.Mode == ModeDSR || w.Mode == ModeTunnel
	name := "service " + s.want.names.service[id]
	if s.want.names.portRule[id] {
		name = "nat " + s.want.names.service[id]
	}
	switch {
	case ok && b.Service == f.owner && b.State == BackendDown, f.twin == NoEntry && !bypass:
		return true
	case !ok || b.Service != f.owner,
		!slices.ContainsFunc(at, func(l datapath.Listener) bool { return l.Name() == name }),
		s.have != nil && s.have.services[id].Active != 0 && s.have.services[id].Mode != w.Mode:
		return s.may(f)
	}
	pool := s.services[s.want.names.service[id]]
	return pool != nil && w.Mode == ModeFullnat && len(pool.SourcePool) > 0 && !holds(pool.SourcePool, twin.key.Dest) && s.may(f)
}

// source judges a flow of a rule that translates sources, whichever end opened it.
func (s *stale) source(f, twin side, at []datapath.Listener) bool {
	if _, ok := s.want.rules[uint32(f.owner)]; !ok {
		return true
	}
	n := s.rules[s.want.names.source[uint32(f.owner)]]
	if n == nil {
		return false
	}
	pool := n.To.Addresses
	if n.Type == config.NATNAT64 {
		pool = n.Pool
	}
	inside := len(n.Source) == 0 || slices.ContainsFunc(n.Source, func(p netip.Prefix) bool {
		return p.Contains(f.key.Source.Addr()) || p.Contains(twin.key.Source.Addr())
	})
	taken := slices.ContainsFunc(at, func(l datapath.Listener) bool { return !l.Bound })
	excepted := slices.ContainsFunc(n.Except, func(p netip.Prefix) bool { return p.Contains(f.key.Dest.Addr()) })
	outside := len(pool) == 0 || holds(pool, twin.key.Dest) || holds(pool, f.key.Dest)
	return (!inside || taken || excepted || !outside) && s.may(f)
}

func holds(pool []config.AddressRange, a netip.AddrPort) bool {
	return slices.ContainsFunc(pool, func(r config.AddressRange) bool { return r.Contains(a.Addr()) })
}

// may reports whether the policy lets a flow be ended.
func (s *stale) may(f side) bool { return !s.snapshot.Keeps(f.key.Protocol) }

// countIn returns how many flows end would end.
func (s *stale) countIn(t *tables) (n int) {
	if s == nil || t == nil {
		return 0
	}
	t.primaries(func(f side) bool {
		if s.ends(f, t.twin(f)) {
			n++
		}
		return true
	})
	return n
}

// end ends the flows that the state in force treats otherwise, in the way of the sweeper, and tells
// how many.
func (d *Datapath) end(s *stale) (n int, err error) {
	if s == nil {
		return 0, nil
	}
	four := len(d.t.flows4.values)
	for i := range d.t.entries() {
		f, ok := d.t.primary(i)
		if !ok || !s.ends(f, d.t.twin(f)) {
			continue
		}
		victim := make([]byte, 8)
		at, v6 := i, uint32(0)
		if i >= four {
			at, v6 = i-four, 1
		}
		binary.NativeEndian.PutUint32(victim, uint32(at))
		binary.NativeEndian.PutUint32(victim[4:], v6)
		if _, err := d.programs.Programs["sweep_end"].Run(&ebpf.RunOptions{Context: victim}); err != nil {
			return n, fmt.Errorf("flow %s: end: %w", f.key, err)
		}
		n++
	}
	return n, nil
}
