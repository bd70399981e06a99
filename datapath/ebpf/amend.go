// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sort"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// amendment is a change of the backends of some services, and of nothing else: what belongs to
// thousands of others is not compiled, written and read back again. It makes of the state in force
// what compile would make; changes that reach further have no amendment.
type amendment struct {
	small     *desired // the services that change, as they are to be
	resolved  *datapath.Snapshot
	gone      map[uint32]idKey                // backends that leave
	endpoints bool                            // there are other backends, not only other weights and states
	hosts     map[wireHostKey]uint64          // entries of addresses that come or go; 0: none
	reverses  map[wireListenerKey]wireReverse // of endpoints that come or go; the zero value: none
	uses      uses                            // changes of the index
}

// uses counts, over all services, who needs what belongs to several.
type uses struct {
	addresses map[netip.Addr]int      // backends
	reverses  map[wireListenerKey]int // services
}

func newUses() uses { return uses{map[netip.Addr]int{}, map[wireListenerKey]int{}} }

func (u uses) add(s *config.Service, n int) {
	for _, b := range s.Backends {
		u.addresses[b.Address] += n
		if answersAlone(s) {
			u.reverses[reverseKey(s, &b)] += n
		}
	}
}

// answersAlone reports whether the backends of a service answer to the gateway's addresses without flows.
func answersAlone(s *config.Service) bool {
	return s.Mode == config.ModeDNAT || s.Mode == config.ModeStateless
}

func reverseKey(s *config.Service, b *config.Backend) wireListenerKey {
	return wireListenerKey{L4Proto: uint8(s.Protocol), Family: familyOf(b.Address), Addr: bytesOf(b.Address), Port: portOf(b.Port)}
}

// amend returns the amendment that makes of the state in force, compiled for the snapshot before, the
// one for another snapshot; nil where that has to be compiled as a whole. u is the index of inForce.
func amend(inForce *desired, u *uses, before, s *datapath.Snapshot, st *state, h *host) *amendment {
	if !sameButServices(before, s) {
		return nil
	}
	a := &amendment{resolved: datapath.Resolve(s, h.listenAddress), gone: map[uint32]idKey{}, hosts: map[wireHostKey]uint64{}, reverses: map[wireListenerKey]wireReverse{}, uses: newUses()}
	was, is := inForce.resolved.Services, a.resolved.Services
	if len(was) != len(is) {
		return nil
	}
	c := newCompiler(s, a.resolved, st, h, st.ids.draft())
	a.small = c.desired
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
		if c.neighbours(); !a.amends(inForce, &was[i], &is[i]) {
			return nil
		}
	}
	if len(a.small.services) == 0 || a.small.draft.short || !inForce.finds(a.small) || a.endpoints && !a.shared(inForce, u, st.hosts) {
		return nil
	}
	return a
}

// sameAs reports whether a host is as it was.
func (h *host) sameAs(o *host) bool {
	return reflect.DeepEqual(h.interfaces, o.interfaces) && reflect.DeepEqual(h.xdp, o.xdp) && reflect.DeepEqual(h.details, o.details) &&
		reflect.DeepEqual(h.addresses, o.addresses) && reflect.DeepEqual(h.global, o.global) && slices.Equal(h.networks, o.networks)
}

// sameButServices reports whether snapshots differ in the backends of services alone, and are not one
// and the same, which asks for everything to be looked at again. Rules that follow the routing table
// are never the same.
func sameButServices(was, is *datapath.Snapshot) bool {
	follows := func(n *config.NATRule) bool { return n.Type == config.NATSIIT || n.Type == config.NATNAT64 }
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
	for i := range a.Services { // those of the other datapath share addresses
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

// amends notes what one service changes; false where that is not for an amendment.
func (a *amendment) amends(inForce *desired, was, is *datapath.Service) bool {
	id, ok := a.small.draft.from.known[idKeyOf(idService, is.Name)]
	if !ok {
		return false
	}
	now, before := a.small.names.backends[id], inForce.names.backends[id]
	w, old := a.small.services[id], inForce.services[id]
	same := slices.Equal(now, before)
	for _, n := range now {
		x, there := inForce.backends[n]
		y := a.small.backends[n]
		x.State, x.Weight = y.State, y.Weight
		same = same && there && x == y
	}
	if same { // who else has its endpoints is as it was
		w.Flags = w.Flags&^ServiceSYNStateless | old.Flags&ServiceSYNStateless
		a.small.services[id] = w
		return true
	}
	if len(is.Sessions) > 0 || is.Mode == config.ModeFullNAT {
		return false
	}
	a.endpoints = true
	for i, n := range before {
		if !slices.Contains(now, n) {
			a.gone[n] = idKeyOf(idBackend, backendName(was, i))
		}
	}
	a.uses.add(was.Service, -1)
	a.uses.add(is.Service, 1)
	if answersAlone(is.Service) {
		for i := range was.Backends {
			if k := reverseKey(was.Service, &was.Backends[i]); a.reverses[k] == (wireReverse{}) {
				a.reverses[k] = wireReverse{}
			}
		}
		for i := range is.Backends {
			k := reverseKey(is.Service, &is.Backends[i])
			a.reverses[k] = a.small.reverses[k]
		}
	}
	return true
}

// finds reports whether a state has all by which packets find the services of another one.
func (d *desired) finds(small *desired) bool {
	return contains(d.pools, small.pools) && contains(d.listeners, small.listeners) && contains(d.ranges, small.ranges) && contains(d.doors, small.doors) &&
		!slices.ContainsFunc(small.directs, func(x wireDirect) bool { return !slices.Contains(d.directs, x) })
}

func contains[K, V comparable](all, part map[K]V) bool {
	for k, v := range part {
		if w, ok := all[k]; !ok || w != v {
			return false
		}
	}
	return true
}

// shared works out the entries of addresses and endpoints that come or go; false where another service
// has to do with them, or there is no room.
func (a *amendment) shared(inForce *desired, u *uses, room uint32) bool {
	if u.addresses == nil {
		*u = newUses()
		for i := range inForce.resolved.Services {
			u.add(inForce.resolved.Services[i].Service, 1)
		}
		for _, n := range inForce.resolved.NAT {
			if n.Type == config.NATPortForward {
				u.add(forwardService(n).Service, 1)
			}
		}
	}
	for k, v := range a.reverses {
		// Before and after at most one service that changes has it, and no other.
		before, after := u.reverses[k], u.reverses[k]+a.uses.reverses[k]
		_, there := inForce.reverses[k]
		if before > 1 || after > 1 || there != (before == 1) || (v != wireReverse{}) != (after == 1) {
			return false
		}
	}
	if left := len(inForce.reverses); left > 0 != (left+growth(a.reverses, inForce.reverses) > 0) {
		return false // the programs change
	}
	for at, n := range a.uses.addresses {
		before, after := u.addresses[at] > 0, u.addresses[at]+n > 0
		if before == after {
			continue
		}
		k := wireHostKey{List: ListServed | uint32(familyOf(at))<<8, Addr: bytesOf(at)}
		bits := inForce.hosts[k]&^ServedBackend | map[bool]uint64{true: ServedBackend}[after]
		if before && inForce.hosts[k]&ServedBackend == 0 {
			return false // it found no room among the hosts
		}
		a.hosts[k] = bits
	}
	return uint32(len(inForce.hosts)+growth(a.hosts, inForce.hosts)) < room
}

// growth is by how much a map grows with changes of which the zero value takes an entry away.
func growth[K, V comparable](changes, have map[K]V) (n int) {
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

// keepIn notes an amendment in the state in force and its index.
func (a *amendment) keepIn(f *desired, u *uses) {
	for n, k := range a.gone {
		delete(f.draft.want, k)
		delete(f.backends, n)
		delete(f.names.backend, n)
	}
	maps.Copy(f.services, a.small.services)
	maps.Copy(f.slots, a.small.slots)
	maps.Copy(f.backends, a.small.backends)
	maps.Copy(f.names.backend, a.small.names.backend)
	maps.Copy(f.names.backends, a.small.names.backends)
	maps.Copy(f.draft.want, a.small.draft.want)
	for id := range a.small.services {
		if _, ok := a.small.slots[id]; !ok {
			delete(f.slots, id)
		}
	}
	keepChanges(f.hosts, a.hosts)
	keepChanges(f.reverses, a.reverses)
	f.resolved = a.resolved
	if u.addresses != nil {
		for k, n := range a.uses.addresses {
			u.addresses[k] += n
		}
		for k, n := range a.uses.reverses {
			u.reverses[k] += n
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

// describe tells what an amendment changes of a state, as changes does.
func (a *amendment) describe(have *desired) *datapath.Change {
	c, want := &datapath.Change{}, a.small
	name := func(n uint32, of *desired, w wireBackend) string {
		return have.names.service[uint32(w.Service)] + "/" + of.names.backend[n]
	}
	for _, list := range have.slots {
		c.SlotsTotal += len(list)
	}
	for id, w := range want.services {
		c.SlotsTotal -= len(have.slots[id])
		slotChange(c, want, have, id)
		if have.services[id] != w {
			c.Rules.Changed++
			c.Lines = append(c.Lines, "change service "+want.names.service[id])
		}
	}
	for n, w := range want.backends {
		switch old, ok := have.backends[n]; {
		case !ok:
			c.Elements.Added++
			c.Lines = append(c.Lines, fmt.Sprintf("add backend %s state %s", name(n, want, w), stateName(w.State)))
		case old != w:
			c.Elements.Changed++
			c.Lines = append(c.Lines, fmt.Sprintf("change backend %s state %s", name(n, want, w), stateName(w.State)))
		}
	}
	for n := range a.gone {
		c.Elements.Removed++
		c.Lines = append(c.Lines, "remove backend "+name(n, have, have.backends[n]))
	}
	for k, v := range a.hosts {
		switch _, there := have.hosts[k]; {
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
