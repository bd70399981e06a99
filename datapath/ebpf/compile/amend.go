// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sort"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// Amendment is a change to the backends of some services only. Applying it avoids compiling,
// writing and reading back thousands of unchanged services. The resulting state equals the output
// of Compile. Amend returns nil for all other changes.
type Amendment struct {
	Small     *Desired // the changed services in their new state
	resolved  *datapath.Snapshot
	Gone      map[uint32]ids.Key                // Removed backends.
	Endpoints bool                              // The set of backends changes, not only weights and states.
	Hosts     map[wire.HostKey]uint64           // Added, changed and removed address entries; 0 removes one.
	Reverses  map[wire.ListenerKey]wire.Reverse // The same for backend endpoints; the zero value removes one.
	uses      Uses                              // Changes to the index.
}

// Uses counts the references of all services to shared entries.
type Uses struct {
	addresses map[netip.Addr]int       // Number of backends.
	reverses  map[wire.ListenerKey]int // Number of services.
	single    map[wire.ListenerKey]int // Number of services with one source port of replies, by the key without a port.
}

func newUses() Uses {
	return Uses{map[netip.Addr]int{}, map[wire.ListenerKey]int{}, map[wire.ListenerKey]int{}}
}

func (u Uses) add(s *config.Service, n int) {
	for _, b := range s.Backends {
		u.addresses[b.Address] += n
		if answersAlone(s) {
			k := reverseKey(s, &b)
			u.reverses[k] += n
			if k.Port != 0 {
				k.Port = 0
				u.single[k] += n
			}
		}
	}
}

// answersAlone reports whether replies of the service's backends can be translated without a flow.
func answersAlone(s *config.Service) bool {
	return s.Mode == config.ModeDNAT || s.Mode == config.ModeStateless
}

// Amend returns the change from the state in force to the state for snapshot s, or nil if s needs a
// full compilation. The state in force was compiled for the snapshot before, and u is its index.
func Amend(inForce *Desired, u *Uses, before, s *datapath.Snapshot, st *State, h *Host) *Amendment {
	if !sameButServices(before, s) {
		return nil
	}
	a := &Amendment{resolved: datapath.Resolve(s, h.ListenAddress), Gone: map[uint32]ids.Key{}, Hosts: map[wire.HostKey]uint64{}, Reverses: map[wire.ListenerKey]wire.Reverse{}, uses: newUses()}
	was, is := inForce.Resolved.Services, a.resolved.Services
	if len(was) != len(is) {
		return nil
	}
	c := newCompiler(s, a.resolved, st, h, st.IDs.Draft())
	a.Small = c.Desired
	for i := range is {
		if was[i].Name != is[i].Name {
			return nil
		}
		if was[i].Alike(&is[i]) {
			continue
		}
		if !sameButBackends(was[i].Service, is[i].Service) || c.service(&is[i]) != nil {
			return nil
		}
		if c.neighbours(); !a.addService(inForce, &was[i], &is[i]) {
			return nil
		}
	}
	if len(a.Small.Services) == 0 || a.Small.Draft.Short || !inForce.hasLookups(a.Small) || a.Endpoints && !a.addSharedEntries(inForce, u, st.Hosts) {
		return nil
	}
	return a
}

// SameAs reports whether two readings of the host are equal.
func (h *Host) SameAs(o *Host) bool {
	return reflect.DeepEqual(h.Interfaces, o.Interfaces) && reflect.DeepEqual(h.XDP, o.XDP) && reflect.DeepEqual(h.Details, o.Details) &&
		reflect.DeepEqual(h.Addresses, o.Addresses) && reflect.DeepEqual(h.Global, o.Global) && slices.Equal(h.Networks, o.Networks)
}

// sameButServices reports whether two snapshots differ only in the backends of their services.
// Applying the same snapshot again requests a full check, so identical pointers return false. Rules
// that depend on the routing table are never equal.
func sameButServices(was, is *datapath.Snapshot) bool {
	follows := func(n *config.NATRule) bool { return n.Type.CrossesFamilies() }
	if was == is || slices.ContainsFunc(is.NAT, follows) || !reflect.DeepEqual(was.NAT, is.NAT) || !reflect.DeepEqual(was.Rules, is.Rules) {
		return false
	}
	a, b := was.Config, is.Config
	if a == b {
		return true
	}
	if len(a.Services) != len(b.Services) {
		return false
	}
	for i := range a.Services { // services of the other datapath share addresses with this one
		x, y := &a.Services[i], &b.Services[i]
		if !x.Is(y) && (x.Name != y.Name || x.WhenDown != y.WhenDown || !reflect.DeepEqual(x.Listen, y.Listen)) {
			return false
		}
	}
	x, y := *a, *b
	x.Services, y.Services = nil, nil
	return reflect.DeepEqual(x, y)
}

func sameButBackends(was, is *config.Service) bool {
	x, y := *was, *is
	x.Backends, y.Backends = nil, nil
	return keepsFlows(was) == keepsFlows(is) && reflect.DeepEqual(x, y)
}

// addService adds the change of one service to the amendment. It returns false if the service needs
// a full compilation.
func (a *Amendment) addService(inForce *Desired, was, is *datapath.Service) bool {
	id, ok := a.Small.Draft.From.Known[ids.KeyOf(ids.Service, is.Name)]
	if !ok {
		return false
	}
	now, before := a.Small.Names.Backends[id], inForce.Names.Backends[id]
	w, old := a.Small.Services[id], inForce.Services[id]
	same := slices.Equal(now, before)
	for _, n := range now {
		x, there := inForce.Backends[n]
		y := a.Small.Backends[n]
		x.State, x.Weight = y.State, y.Weight
		same = same && there && x == y
	}
	if same { // sharing with other services is unchanged
		w.Flags = w.Flags&^unshared | old.Flags&unshared
		a.Small.Services[id] = w
		return true
	}
	if len(is.Sessions) > 0 || is.Mode == config.ModeFullNAT {
		return false
	}
	a.Endpoints = true
	for i, n := range before {
		if !slices.Contains(now, n) {
			a.Gone[n] = ids.KeyOf(ids.Backend, backendName(was, i))
		}
	}
	a.uses.add(was.Service, -1)
	a.uses.add(is.Service, 1)
	if answersAlone(is.Service) {
		for i := range was.Backends {
			if k := reverseKey(was.Service, &was.Backends[i]); a.Reverses[k] == (wire.Reverse{}) {
				a.Reverses[k] = wire.Reverse{}
			}
		}
		for i := range is.Backends {
			k := reverseKey(is.Service, &is.Backends[i])
			a.Reverses[k] = a.Small.Reverses[k]
		}
	}
	return true
}

// hasLookups reports whether d contains every lookup entry of the services in small: listeners,
// ranges and pools.
func (d *Desired) hasLookups(small *Desired) bool {
	return contains(d.Pools, small.Pools) && contains(d.Listeners, small.Listeners) && contains(d.Ranges, small.Ranges) && contains(d.IfaceListeners, small.IfaceListeners) &&
		!slices.ContainsFunc(small.Directs, func(x wire.Direct) bool { return !slices.Contains(d.Directs, x) })
}

func contains[K, V comparable](all, part map[K]V) bool {
	for k, v := range part {
		if w, ok := all[k]; !ok || w != v {
			return false
		}
	}
	return true
}

// addSharedEntries computes the address and endpoint entries to add or remove. It returns false if a second
// service uses one of the entries, or if the map is full.
func (a *Amendment) addSharedEntries(inForce *Desired, u *Uses, room uint32) bool {
	if u.addresses == nil {
		*u = newUses()
		for i := range inForce.Resolved.Services {
			u.add(inForce.Resolved.Services[i].Service, 1)
		}
		for _, n := range inForce.Resolved.NAT {
			if n.Type.Forwards() {
				u.add(forwardService(n).Service, 1)
			}
		}
	}
	for k, v := range a.Reverses {
		// Before and after the change, only one service may use the endpoint.
		before, after := u.reverses[k], u.reverses[k]+a.uses.reverses[k]
		_, there := inForce.Reverses[k]
		if before > 1 || after > 1 || there != (before == 1) || (v != wire.Reverse{}) != (after == 1) {
			return false
		}
		// A key with a port and the key without one may share source ports.
		zero := k
		zero.Port = 0
		if max(u.reverses[zero], u.reverses[zero]+a.uses.reverses[zero]) > 0 && max(u.single[zero], u.single[zero]+a.uses.single[zero]) > 0 {
			return false
		}
	}
	if left := len(inForce.Reverses); left > 0 != (left+entryGrowth(a.Reverses, inForce.Reverses) > 0) {
		return false // the change needs other programs
	}
	for at, n := range a.uses.addresses {
		before, after := u.addresses[at] > 0, u.addresses[at]+n > 0
		if before == after {
			continue
		}
		k := wire.HostKey{List: wire.ListServed | uint32(wire.FamilyOf(at))<<8, Addr: wire.BytesOf(at)}
		bits := inForce.Hosts[k]&^wire.ServedBackend | map[bool]uint64{true: wire.ServedBackend}[after]
		if before && inForce.Hosts[k]&wire.ServedBackend == 0 {
			return false // the address did not fit into the map of hosts
		}
		a.Hosts[k] = bits
	}
	return uint32(len(inForce.Hosts)+entryGrowth(a.Hosts, inForce.Hosts)) < room
}

// entryGrowth returns the change in a map's number of entries. The zero value in changes removes an
// entry.
func entryGrowth[K, V comparable](changes, have map[K]V) (n int) {
	var none V
	for k, v := range changes {
		switch _, there := have[k]; {
		case there && v == none:
			n--
		case !there && v != none:
			n++
		}
	}
	return n
}

// KeepIn stores the amendment in the state in force and in its index.
func (a *Amendment) KeepIn(f *Desired, u *Uses) {
	for n, k := range a.Gone {
		delete(f.Draft.Want, k)
		delete(f.Backends, n)
		delete(f.Names.Backend, n)
	}
	maps.Copy(f.Services, a.Small.Services)
	maps.Copy(f.Slots, a.Small.Slots)
	maps.Copy(f.Backends, a.Small.Backends)
	maps.Copy(f.Names.Backend, a.Small.Names.Backend)
	maps.Copy(f.Names.Backends, a.Small.Names.Backends)
	maps.Copy(f.Draft.Want, a.Small.Draft.Want)
	for id := range a.Small.Services {
		if _, ok := a.Small.Slots[id]; !ok {
			delete(f.Slots, id)
		}
	}
	keepChanges(f.Hosts, a.Hosts)
	keepChanges(f.Reverses, a.Reverses)
	f.Resolved = a.resolved
	if u.addresses != nil {
		for k, n := range a.uses.addresses {
			u.addresses[k] += n
		}
		for k, n := range a.uses.reverses {
			u.reverses[k] += n
		}
		for k, n := range a.uses.single {
			u.single[k] += n
		}
	}
}

func keepChanges[K, V comparable](have, changes map[K]V) {
	var none V
	for k, v := range changes {
		if v == none {
			delete(have, k)
		} else {
			have[k] = v
		}
	}
}

// Describe describes the amendment's changes to a state, in the form used by Changes.
func (a *Amendment) Describe(have *Desired) *datapath.Change {
	c, want := &datapath.Change{}, a.Small
	name := func(n uint32, of *Desired, w wire.Backend) string {
		return have.Names.Service[uint32(w.Service)] + "/" + of.Names.Backend[n]
	}
	for _, list := range have.Slots {
		c.SlotsTotal += len(list)
	}
	for id, w := range want.Services {
		c.SlotsTotal -= len(have.Slots[id])
		slotChange(c, want, have, id)
		if have.Services[id] != w {
			c.Rules.Changed++
			c.Lines = append(c.Lines, "change service "+want.Names.Service[id])
		}
	}
	for n, w := range want.Backends {
		switch old, ok := have.Backends[n]; {
		case !ok:
			c.Elements.Added++
			c.Lines = append(c.Lines, fmt.Sprintf("add backend %s state %s", name(n, want, w), stateName(w.State)))
		case old != w:
			c.Elements.Changed++
			c.Lines = append(c.Lines, fmt.Sprintf("change backend %s state %s", name(n, want, w), stateName(w.State)))
		}
	}
	for n := range a.Gone {
		c.Elements.Removed++
		c.Lines = append(c.Lines, "remove backend "+name(n, have, have.Backends[n]))
	}
	for k, v := range a.Hosts {
		switch _, there := have.Hosts[k]; {
		case v == 0:
			c.Elements.Removed++
		case there:
			c.Elements.Changed++
		default:
			c.Elements.Added++
		}
	}
	sort.Strings(c.Lines)
	if len(c.Lines) > maxLines {
		c.Truncated, c.Lines = len(c.Lines)-maxLines, c.Lines[:maxLines]
	}
	return c
}
