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
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// A flow determines the handling of its packets until it ends. A client that sends continuously
// from one port never opens a new flow. An apply therefore ends flows that its configuration would
// handle differently.

// staleFlows selects the flows that a desired state handles differently.
type staleFlows struct {
	want      *compile.Desired
	have      *compile.Desired // nil if an earlier process wrote it
	snapshot  *datapath.Snapshot
	listeners *datapath.Listeners
	services  map[string]*config.Service
	rules     map[string]*config.NATRule
	pools     map[uint32]uint64 // Rules of each pool address, see PoolRules.
	lost      []netip.Addr      // Addresses that the host has lost.
	hz        uint32
}

// staleAfter returns the flows to end for a snapshot, or nil if only states of backends differ. The
// sweeper handles those. lost lists addresses that the host has lost.
func (d *Datapath) staleAfter(want *compile.Desired, s *datapath.Snapshot, lost ...netip.Addr) *staleFlows {
	st := d.staleByConfig(want, s)
	if st == nil && len(lost) > 0 {
		st = &staleFlows{}
	}
	if st != nil {
		st.lost = lost
	}
	return st
}

func (d *Datapath) staleByConfig(want *compile.Desired, s *datapath.Snapshot) *staleFlows {
	if d.snapshot != nil && (d.snapshot.Config == s.Config ||
		d.snapshot.Config.Established == s.Config.Established && len(datapath.Differing(d.snapshot, s)) == 0) {
		return nil
	}
	st := &staleFlows{want: want, have: d.inForce, snapshot: s, listeners: datapath.NewListeners(want.Resolved),
		services: map[string]*config.Service{}, rules: map[string]*config.NATRule{}, pools: want.PoolRules(), hz: d.hz}
	for _, x := range s.Services {
		st.services[x.Name] = x.Service
	}
	for _, n := range s.NAT {
		st.rules[n.Name] = n
	}
	return st
}

// ends reports whether a flow must end. twin is the other direction of the flow.
func (s *staleFlows) ends(f, twin table.Entry) bool {
	if f.Flags&wire.EntryNAT == 0 && slices.Contains(s.lost, twin.Key.Dest.Addr()) {
		return true // the sweeper ends flows of NAT rules
	}
	if s.want == nil {
		return false
	}
	at := s.listeners.Find(f.Key.Protocol, f.Key.Dest)
	if f.Flags&wire.EntryNAT != 0 {
		return s.sourceEnds(f, twin, at)
	}
	id := uint32(f.Owner)
	w, ok := s.want.Services[id]
	if !ok {
		return true // the sweeper removes such an entry, too
	}
	b, ok := s.want.Backends[uint32(f.Backend)]
	bypass := w.Mode == wire.ModeDSR || w.Mode == wire.ModeTunnel
	name := "service " + s.want.Names.Service[id]
	if s.want.Names.PortForward[id] {
		name = "nat " + s.want.Names.Service[id]
	}
	switch {
	case ok && b.Service == f.Owner && b.State == wire.BackendDown, f.Twin == wire.NoEntry && !bypass:
		return true
	case !ok || b.Service != f.Owner,
		!slices.ContainsFunc(at, func(l datapath.Listener) bool { return l.Name() == name }),
		s.have != nil && s.have.Services[id].Active != 0 && s.have.Services[id].Mode != w.Mode:
		return s.mayEnd(f, twin)
	}
	pool := s.services[s.want.Names.Service[id]]
	return pool != nil && w.Mode == wire.ModeFullnat && len(pool.SourcePool) > 0 && !poolContains(pool.SourcePool, twin.Key.Dest) && s.mayEnd(f, twin)
}

// sourceEnds reports whether a flow of a rule that translates sources must end. Either side may
// have opened the flow.
func (s *staleFlows) sourceEnds(f, twin table.Entry, at []datapath.Listener) bool {
	if _, ok := s.want.Rules[uint32(f.Owner)]; !ok {
		return true
	}
	n := s.rules[s.want.Names.Source[uint32(f.Owner)]]
	if n == nil {
		return false
	}
	inside := len(n.Source) == 0 || slices.ContainsFunc(n.Source, func(p netip.Prefix) bool {
		return p.Contains(f.Key.Source.Addr()) || p.Contains(twin.Key.Source.Addr())
	})
	taken := slices.ContainsFunc(at, func(l datapath.Listener) bool { return !l.Bound })
	excepted := slices.ContainsFunc(n.Except, func(p netip.Prefix) bool { return p.Contains(f.Key.Dest.Addr()) })
	outside := n.Type.UsesInterfaceAddress() || s.pools[uint32(f.Backend)]>>f.Owner&1 == 1
	return (!inside || taken || excepted || !outside) && s.mayEnd(f, twin)
}

func poolContains(pool []config.AddressRange, a netip.AddrPort) bool {
	return slices.ContainsFunc(pool, func(r config.AddressRange) bool { return r.Contains(a.Addr()) })
}

// mayEnd reports whether the policy allows a flow to be ended. The policy can keep open
// connections; TCP connections that are closed or were never answered may always end.
func (s *staleFlows) mayEnd(f, twin table.Entry) bool {
	if !s.snapshot.Keeps(f.Key.Protocol) || f.Key.Protocol != flow.TCP {
		return !s.snapshot.Keeps(f.Key.Protocol)
	}
	if f.Heard&wire.HeardACK == 0 && twin.Heard&wire.HeardAny == 0 {
		return true
	}
	f.Flags |= wire.EntrySettled
	return isTransitory(f, twin, s.hz)
}

// continuesElsewhere reports whether a flow that ends here continues in the other datapath.
func (s *staleFlows) continuesElsewhere(f table.Entry) bool {
	return s.have != nil && f.Flags&wire.EntryNAT == 0 && f.Twin != wire.NoEntry && s.snapshot.Moves(listenerName(s.have, uint32(f.Owner)), f.Key.Protocol)
}

// countIn returns the number of flows that end would end.
func (s *staleFlows) countIn(t *table.Tables) (n int) {
	if s == nil || t == nil {
		return 0
	}
	t.Primaries(func(f table.Entry) bool {
		if s.ends(f, t.Twin(f)) && !s.continuesElsewhere(f) {
			n++
		}
		return true
	})
	return n
}

// end ends the stale flows like the sweeper. It returns their number without flows that move to the
// other datapath.
func (d *Datapath) end(s *staleFlows) (n int, err error) {
	if s == nil {
		return 0, nil
	}
	four := len(d.t.Flows4.Values)
	for i := range d.t.Entries(0) {
		f, ok := d.t.Primary(i)
		if !ok || !s.ends(f, d.t.Twin(f)) {
			continue
		}
		victim := make([]byte, 8)
		at, v6 := i, uint32(0)
		if i >= four {
			at, v6 = i-four, 1
		}
		binary.NativeEndian.PutUint32(victim, uint32(at))
		binary.NativeEndian.PutUint32(victim[4:], v6)
		if _, err := d.runOnDemand("sweep_end", d.switches, &ebpf.RunOptions{Context: victim}); err != nil {
			return n, fmt.Errorf("flow %s: end: %w", f.Key, err)
		}
		if !s.continuesElsewhere(f) {
			n++
		}
	}
	return n, nil
}
