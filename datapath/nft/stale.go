// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// Connection tracking evaluates the NAT rules once, for the first packet of a connection. A host
// that sends from one port without a pause (syslog, SNMP traps, VPN keepalives, resolvers, SIP)
// never opens a new connection, and would keep a replaced backend or an untranslated source
// forever. So an apply ends the tracked connections that its snapshot treats differently.

// staleFinder finds the tracked connections that a snapshot treats differently.
type staleFinder struct {
	before, after   func() *datapath.Listeners
	rulesWas, rules []*config.NATRule
	differ          map[string]bool // names of changed services and rules, as in datapath.Listener; other connections are not checked
	snapshot        *datapath.Snapshot
	addresses       map[netip.Addr]bool     // of the changed listeners; nil if one follows an interface
	egress          func(netip.Addr) string // Egress interface of the route to an address.
	failedOver      bool                    // The default route has another egress interface since the last apply.
	has             func(netip.Addr) string // Interface that has an address.
	lost            []netip.Prefix          // Source addresses without a usable uplink.
}

// staleAfter compares a snapshot with the previous one. now are the current uplinks.
func (d *Datapath) staleAfter(before, after *datapath.Snapshot, now uplinks) *staleFinder {
	s := &staleFinder{differ: datapath.Differing(before, after), snapshot: after, rules: after.NAT}
	s.failedOver = before != nil && now != d.uplinks && !now.byRules && slices.ContainsFunc(after.NAT, translatesSources)
	s.lost = datapath.LostPrefixes(before, after)
	if s.nothingToCheck() {
		return s
	}
	listeners := func(of *datapath.Snapshot) func() *datapath.Listeners {
		return sync.OnceValue(func() *datapath.Listeners { return datapath.NewListeners(d.resolveAddresses(of)) })
	}
	s.before, s.after = listeners(before), listeners(after)
	s.addresses = addressesOf(s.differ, before, after)
	if before != nil {
		s.rulesWas = before.NAT
	}
	s.egress, s.has = cacheByAddress(d.host.egress), cacheByAddress(d.host.holder)
	return s
}

// nothingToCheck reports whether no connection has to be checked.
func (s *staleFinder) nothingToCheck() bool {
	return len(s.differ) == 0 && !s.failedOver && len(s.lost) == 0
}

// lostUplink reports whether the source address of a connection has no usable uplink.
func (s *staleFinder) lostUplink(e *conntrack.Entry) bool {
	if len(s.lost) == 0 || !e.SourceTranslated() {
		return false
	}
	f := e.Flow()
	return inPrefixes(s.lost, f.Reply.Dest.Addr())
}

// cacheByAddress returns a function that looks up each address once.
func cacheByAddress(of func(netip.Addr) string) func(netip.Addr) string {
	names := map[netip.Addr]string{}
	return func(a netip.Addr) string {
		name, known := names[a]
		if !known {
			name = of(a)
			names[a] = name
		}
		return name
	}
}

// resolveAddresses returns a snapshot with the current addresses of interfaces.
func (d *Datapath) resolveAddresses(s *datapath.Snapshot) *datapath.Snapshot {
	if s == nil {
		return nil
	}
	return datapath.Resolve(s, d.host.listenAddress)
}

// ends reports whether a conntrack entry must be ended. An entry expected by a helper ends with its
// parent.
func (s *staleFinder) ends(e *conntrack.Entry) bool {
	if e.Status&conntrack.Expected != 0 {
		return false
	}
	if s.lostUplink(e) {
		return e.Protocol != flow.TCP || e.Status&conntrack.FixedTimeout == 0 // else both sides already get a reset
	}
	f := e.Flow()
	if e.CutOff() && s.toDown(&f) {
		return false // both sides already get a reset
	}
	now, was := s.after().Find(f.Original.Protocol, f.Original.Dest), s.before().Find(f.Original.Protocol, f.Original.Dest)
	differs := func(l datapath.Listener) bool { return s.differ[l.Name()] }
	switch {
	case len(now)+len(was) == 0:
		return s.source(&f) || s.failedOver && s.routeChanged(&f)
	case !slices.ContainsFunc(now, differs) && !slices.ContainsFunc(was, differs):
		return false
	case len(now) == 0:
		return f.DestTranslated() && s.mayEnd(&f)
	}
	return !slices.ContainsFunc(now, func(l datapath.Listener) bool { return !s.differsFromListener(&f, l) })
}

// cutOff reports whether a connection is open and its backend, or the uplink of its source, is down. Both sides then get a reset
// for their next packet. Offloaded connections are excluded, because their packets bypass the
// rules.
func (s *staleFinder) cutOff(e *conntrack.Entry) bool {
	if e.Protocol != flow.TCP || e.Status&(conntrack.Assured|conntrack.Offloaded) != conntrack.Assured {
		return false
	}
	f := e.Flow()
	return !isClosed(&f) && (s.lostUplink(e) || s.toDown(&f))
}

// toDown reports whether the backend of a connection is down.
func (s *staleFinder) toDown(f *flow.Flow) bool {
	return slices.ContainsFunc(s.after().Find(f.Original.Protocol, f.Original.Dest), func(l datapath.Listener) bool {
		if l.Service == nil || !isTracked(l.Service.Mode) {
			return false
		}
		i := backendOf(f, l.Service)
		return i >= 0 && l.Service.State[i] == datapath.Down
	})
}

// backendOf returns the index of a connection's backend in a service, or -1.
func backendOf(f *flow.Flow, to *datapath.Service) int {
	return slices.IndexFunc(to.Backends, func(b config.Backend) bool { return hasServer(f, netip.AddrPortFrom(b.Address, b.Port)) })
}

// continuesElsewhere reports whether a connection continues on another datapath, which already has it.
func (s *staleFinder) continuesElsewhere(e *conntrack.Entry) bool {
	if len(s.snapshot.Gone) == 0 || !e.DestTranslated() {
		return false
	}
	f := e.Flow()
	return slices.ContainsFunc(s.before().Find(f.Original.Protocol, f.Original.Dest), func(l datapath.Listener) bool { return s.snapshot.Moves(l.Name(), f.Original.Protocol) })
}

// differsFromListener reports whether the listener would treat a connection differently, so that it must be
// ended.
func (s *staleFinder) differsFromListener(f *flow.Flow, l datapath.Listener) bool {
	if l.Service != nil {
		return s.service(f, l.Service)
	}
	return !hasServer(f, l.Forward.Target(f.Original.Dest.Port())) && s.mayEnd(f)
}

// service is like differsFromListener, for a service.
func (s *staleFinder) service(f *flow.Flow, to *datapath.Service) bool {
	if !isTracked(to.Mode) {
		return false // rules process its packets before connection tracking
	}
	i := backendOf(f, to)
	switch {
	case i < 0:
		return s.mayEnd(f)
	case to.State[i] == datapath.Down:
		return true // in any connection state, because no server answers
	case to.State[i] != datapath.Up && isClosed(f):
		return true // a SYN from the same port must open a new connection, and not continue this one
	case to.Mode != config.ModeFullNAT:
		return false
	}
	return (!f.SourceTranslated() || len(to.SourcePool) > 0 && !poolContains(to.SourcePool, f.Reply.Dest.Addr())) && s.mayEnd(f)
}

// hasServer reports whether a connection has the endpoint as server. Port 0 means the client's
// destination port.
func hasServer(f *flow.Flow, to netip.AddrPort) bool {
	port := to.Port()
	if port == 0 {
		port = f.Original.Dest.Port()
	}
	return f.Reply.Source == netip.AddrPortFrom(to.Addr(), port)
}

func poolContains(pool []config.AddressRange, a netip.Addr) bool {
	return slices.ContainsFunc(pool, func(r config.AddressRange) bool { return r.Contains(a) })
}

// isClosed reports whether a TCP connection has ended, or has never been answered.
func isClosed(f *flow.Flow) bool {
	return f.Original.Protocol == flow.TCP && slices.Contains([]string{"SYN_SENT", "LAST_ACK", "TIME_WAIT", "CLOSE"}, f.State)
}

// mayEnd reports whether the policy permits ending a connection.
func (s *staleFinder) mayEnd(f *flow.Flow) bool {
	return !s.snapshot.Keeps(f.Original.Protocol) || isClosed(f)
}

// source reports whether a connection without a listener must be ended, because rules for sources
// or static rules have changed.
func (s *staleFinder) source(f *flow.Flow) bool {
	if !slices.ContainsFunc(s.rules, s.ruleDiffers) && !slices.ContainsFunc(s.rulesWas, s.ruleDiffers) {
		return false
	}
	if i := slices.IndexFunc(s.rules, func(n *config.NATRule) bool { return s.ruleApplies(n, f) }); i >= 0 {
		return s.ruleDiffers(s.rules[i]) && !owns(s.rules[i], f) && s.mayEnd(f)
	}
	i := slices.IndexFunc(s.rulesWas, func(n *config.NATRule) bool { return owns(n, f) })
	return i >= 0 && s.ruleDiffers(s.rulesWas[i]) && s.mayEnd(f)
}

func translatesSources(n *config.NATRule) bool {
	return n.Type.RewritesSource()
}

// routeChanged reports whether a connection without a listener must be ended after a change of the
// route, such as a failover to another uplink. No reply returns over the new uplink to the old
// address or to an inside address. The next packet then opens a new connection. The kernel does
// this for its own masquerade only.
func (s *staleFinder) routeChanged(f *flow.Flow) bool {
	via := s.egress(f.Original.Dest.Addr())
	if via == "" || via == "lo" || f.DestTranslated() {
		return false
	}
	if !f.SourceTranslated() {
		return s.mayEnd(f) && slices.ContainsFunc(s.rules, func(n *config.NATRule) bool { return translatesSources(n) && s.ruleApplies(n, f) })
	}
	owned := false
	for _, n := range s.rules {
		if !translatesSources(n) || n.Out == "" || !owns(n, f) {
			continue
		}
		owned = true
		if n.Out.Has(via) {
			at := s.has(f.Reply.Dest.Addr())
			return n.Type.UsesInterfaceAddress() && at != via && n.Out.Has(at)
		}
	}
	return owned
}

func (s *staleFinder) ruleDiffers(n *config.NATRule) bool { return s.differ["nat "+n.Name] }

// ruleApplies reports whether a rule applies to the first packet of a connection. The host's own
// packets already have its address.
func (s *staleFinder) ruleApplies(n *config.NATRule, f *flow.Flow) bool {
	from, to := f.Original.Source.Addr(), f.Original.Dest.Addr()
	switch {
	case n.Type == config.NATStatic:
		return n.External.Contains(to) || n.Internal.Contains(from) && s.leavesBy(n.Out, to)
	case n.Type.RewritesSource():
	default:
		return false
	}
	if len(n.To.Addresses) > 0 && !slices.ContainsFunc(n.To.Addresses, func(r config.AddressRange) bool { return r.Is4() == from.Is4() }) {
		return false
	}
	if !inPrefixes(n.Source, from) || len(n.Except) > 0 && inPrefixes(n.Except, to) {
		return false
	}
	return s.leavesBy(n.Out, to) && s.leavesBy(n.In, from) && s.egress(from) != "lo" && s.egress(to) != "lo"
}

// leavesBy reports whether one of the interfaces is the egress interface of the route to an address; ""
// is any.
func (s *staleFinder) leavesBy(names config.Interfaces, a netip.Addr) bool {
	return names.Has(s.egress(a))
}

// addressesOf returns the listen addresses of the named services and port-forwards, or nil if a
// listener follows an interface.
func addressesOf(names map[string]bool, snapshots ...*datapath.Snapshot) map[netip.Addr]bool {
	all, follows := map[netip.Addr]bool{}, false
	note := func(l config.Listen) {
		all[l.Address] = true
		follows = follows || l.Follows()
	}
	for _, s := range snapshots {
		if s == nil {
			continue
		}
		for i := range s.Services {
			if names["service "+s.Services[i].Name] {
				for _, l := range s.Services[i].Listen {
					note(l)
				}
			}
		}
		for _, n := range s.NAT {
			if n.Listen != nil && names["nat "+n.Name] {
				note(*n.Listen)
			}
		}
	}
	if follows {
		return nil
	}
	return all
}

// dumpFilter returns the filter for a dump of the kernel: one listen address, or nil for all
// entries.
func (s *staleFinder) dumpFilter() *conntrack.Filter {
	if s.failedOver || len(s.lost) > 0 || len(s.addresses) != 1 || slices.ContainsFunc(s.rules, s.ruleDiffers) || slices.ContainsFunc(s.rulesWas, s.ruleDiffers) {
		return nil
	}
	for only := range s.addresses {
		return &conntrack.Filter{Dest: netip.PrefixFrom(only, only.BitLen())}
	}
	return nil
}

// end ends the connections that the active snapshot treats differently. It returns their number
// without the connections that move to another datapath. It reads the table once, or not at all if
// nothing differs.
func (d *Datapath) end(ctx context.Context, s *staleFinder) (int, error) {
	if s.nothingToCheck() {
		return 0, nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	moved, answers := 0, map[endpoints]bool{}
	var cut []conntrack.Entry
	n, err := c.DeleteIf(ctx, s.dumpFilter(), func(e *conntrack.Entry) bool {
		if s.continuesElsewhere(e) {
			moved++
			return true
		}
		if !s.ends(e) {
			return false
		}
		if s.cutOff(e) {
			cut = append(cut, *e)
			return false
		}
		answers[replyEndpoints(e)] = true
		return true
	})
	n = max(0, n-moved) // a connection may have ended before
	if err == nil {
		var reset int
		reset, err = c.CutOff(ctx, cut)
		n += reset
	}
	if err == nil {
		err = d.endLate(answers)
	}
	if err != nil {
		return n, fmt.Errorf("ending connections that the new rules treat differently: %w", err)
	}
	return n, nil
}

// count returns the number of connections that end would end.
func (d *Datapath) count(ctx context.Context, s *staleFinder) (n int, err error) {
	if s.nothingToCheck() {
		return 0, nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	err = c.Dump(ctx, s.dumpFilter(), func(e *conntrack.Entry) error {
		if !s.continuesElsewhere(e) && s.ends(e) {
			n++
		}
		return nil
	})
	if errors.Is(err, conntrack.ErrInterrupted) {
		err = nil
	}
	return n, err
}
