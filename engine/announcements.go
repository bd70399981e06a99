// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// Announcer announces the addresses of services and pools to routers: an announce.Announcer, except
// in tests.
type Announcer interface {
	// Plan returns the changes that Set would make. It changes nothing.
	Plan(*announce.Request) (*datapath.Change, error)
	// Set replaces the wanted announcements and returns the change; nil announces nothing.
	Set(*announce.Request) (*datapath.Change, error)
	Statuses() []announce.Status
	// Release withdraws everything, unless keep is set, and ends the announcer.
	Release(keep bool) error
}

// missingAfter is the number of consecutive repairs that must fail before the addresses of a
// datapath are withdrawn. Another program may change rules at the same time as the first one.
const missingAfter = 2

// announcements returns the announcements of a configuration with the states of its snapshots, or
// nil if it announces nothing.
func (e *Engine) announcements(c *config.Config, plan placement, snapshots map[string]*datapath.Snapshot) *announce.Request {
	a := c.Announcements()
	if a == nil {
		return nil
	}
	r := &announce.Request{Table: uint32(a.Table), Protocol: uint8(a.Protocol), Metric: uint32(a.Metric), Interfaces: a.Interfaces}
	if len(r.Interfaces) == 0 {
		r.Interfaces = c.Interfaces
	}
	states := e.servingStates(c, plan, snapshots)
	at := map[netip.Prefix]int{}
	add := func(owner string, first, last netip.Addr, metric uint32) {
		if first.IsLoopback() || first.IsLinkLocalUnicast() || first.IsUnspecified() {
			return
		}
		s := states[owner]
		for _, p := range announce.Prefixes(first, last) {
			i, known := at[p]
			if !known {
				at[p] = len(r.Addresses)
				r.Addresses = append(r.Addresses, announce.Address{Prefix: p, Owners: []string{owner}, Metric: metric, Why: s.why, Unknown: s.unknown, Settle: s.settle})
				continue
			}
			r.Addresses[i] = addOwner(r.Addresses[i], owner, s)
		}
	}
	for _, w := range wantedAddresses(c, plan) {
		add(w.Owner, w.First, w.Last, 0)
	}
	backups := func(owner string, list []config.AddressRange) {
		for _, b := range list {
			add(owner, b.First, b.Last, r.Metric+config.BackupMetric)
		}
	}
	for i := range c.Services {
		backups("service "+c.Services[i].Name, c.Services[i].Backup())
	}
	for i := range c.NAT {
		backups("nat "+c.NAT[i].Name, c.NAT[i].Backup())
	}
	slices.SortFunc(r.Addresses, func(x, y announce.Address) int {
		return cmp.Or(x.Prefix.Addr().Compare(y.Prefix.Addr()), cmp.Compare(x.Prefix.Bits(), y.Prefix.Bits()))
	})
	return r
}

// servingState is whether this gateway serves the addresses of a service or rule.
type servingState struct {
	why     string // Why it does not; "" if it does.
	unknown bool   // Why may be wrong.
	// settle is the time in which the backends that are down could pass their check.
	settle time.Duration
}

// maxSettle bounds the time between the recovery of a service and its announcement.
const maxSettle = time.Minute

// settleTime returns the time in which the backends of a service that are down could pass their check. After an outage
// they recover within one interval of each other.
func settleTime(s datapath.Service) time.Duration {
	if s.Service == nil || s.Check == nil || !slices.ContainsFunc(s.State, func(b datapath.State) bool { return b > datapath.Drain }) {
		return 0
	}
	return min(maxSettle, s.Check.Interval.D()+s.Check.Timeout.D())
}

// addOwner adds an owner to an address. The address is announced while this gateway serves one owner.
func addOwner(a announce.Address, owner string, s servingState) announce.Address {
	if slices.Contains(a.Owners, owner) {
		return a
	}
	a.Owners, a.Settle = append(a.Owners, owner), max(a.Settle, s.settle)
	switch {
	case a.Why == "" || s.why == "":
		a.Why, a.Unknown = "", false
	case a.Why == s.why:
	default:
		a.Why, a.Unknown = a.Why+"; "+s.why, a.Unknown || s.unknown
	}
	return a
}

// servingStates returns the state of every service and NAT rule, by the owner of its addresses.
func (e *Engine) servingStates(c *config.Config, plan placement, snapshots map[string]*datapath.Snapshot) map[string]servingState {
	list := make(map[string]servingState, len(c.Services)+len(c.NAT))
	services := servicesOf(snapshots)
	for i := range c.Services {
		service := services[c.Services[i].Name]
		s := e.servesService(service)
		if why := e.rulesMissing(plan.services[i]); why != "" {
			s = servingState{why: why}
		}
		s.settle = settleTime(service)
		list["service "+c.Services[i].Name] = s
	}
	for i := range c.NAT {
		why := e.rulesMissing(plan.nat[i])
		if why == "" && e.nodeDrains && !c.NAT[i].Type.HasBindings() {
			why = nodeDrains
		}
		list["nat "+c.NAT[i].Name] = servingState{why: why}
	}
	return list
}

// nodeDrains is why a draining node does not announce an address. Rules with bindings are exempt: the replies of their
// flows must return to this node.
const nodeDrains = "the node drains"

// servesService reports whether a service answers clients. Backends that drain have connections, so
// the address of the service stays. A gateway that drains gives its clients to the other gateways.
func (e *Engine) servesService(s datapath.Service) servingState {
	if s.Service == nil {
		return servingState{why: "the service is on no datapath"}
	}
	if whole, ok := e.override[backendKey{}]; ok && whole.State >= datapath.Drain {
		return servingState{why: "the gateway drains"}
	}
	if e.nodeDrains {
		return servingState{why: nodeDrains}
	}
	if slices.ContainsFunc(s.State, func(b datapath.State) bool { return b <= datapath.Drain }) {
		return servingState{}
	}
	return servingState{why: fmt.Sprintf("no backend of service %s is usable", s.Name), unknown: slices.Contains(s.State, datapath.Unprobed)}
}

// rulesMissing returns why a datapath does not carry an object, or "".
func (e *Engine) rulesMissing(p Place) string {
	for _, name := range p.Datapaths {
		if e.missing[name] >= missingAfter {
			return "the rules of datapath " + name + " are missing and cannot be put back"
		}
	}
	return ""
}

// announce passes the announcements to the announcer and returns the change.
func (e *Engine) announce(c *config.Config, plan placement, snapshots map[string]*datapath.Snapshot) *datapath.Change {
	if e.opt.Announcer == nil {
		return nil
	}
	change, err := e.opt.Announcer.Set(e.announcements(c, plan, snapshots))
	if err != nil {
		e.opt.Log.Warn("announcements are incomplete", "error", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return change
}

// withdrawBeforeDrain withdraws the addresses of services when the gateway or the node begins to drain, and waits until
// the routers use other gateways. A draining gateway refuses new flows only then.
func (e *Engine) withdrawBeforeDrain(before map[backendKey]Override, nodeBefore bool) {
	gateway := e.override[backendKey{}].State >= datapath.Drain && before[backendKey{}].State < datapath.Drain
	if e.config == nil || e.config.Announcements() == nil || !gateway && (!e.nodeDrains || nodeBefore) {
		return
	}
	if change := e.announce(e.config, e.plan, e.inForce); change != nil && change.Objects.Removed > 0 {
		time.Sleep(announce.WithdrawTime)
	}
}

// noteMissing records whether a repair left a datapath without its rules.
func (e *Engine) noteMissing(name string, missing bool) {
	before := e.missing[name]
	switch {
	case missing && before < missingAfter:
		if e.missing == nil {
			e.missing = map[string]int{}
		}
		e.missing[name]++
	case !missing:
		delete(e.missing, name)
	}
	if (before >= missingAfter) != (e.missing[name] >= missingAfter) {
		e.announce(e.config, e.plan, e.inForce)
	}
}
