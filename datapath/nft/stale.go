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

// stale finds the tracked connections that a snapshot treats differently.
type stale struct {
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
func (d *Datapath) staleAfter(before, after *datapath.Snapshot, now uplinks) *stale {
	s := &stale{differ: datapath.Differing(before, after), snapshot: after, rules: after.NAT}
	s.failedOver = before != nil && now != d.uplinks && !now.byRules && slices.ContainsFunc(after.NAT, translatesSources)
	s.lost = datapath.LostPrefixes(before, after)
	if s.idle() {
		return s
	}
	listeners := func(of *datapath.Snapshot) func() *datapath.Listeners {
		return sync.OnceValue(func() *datapath.Listeners { return datapath.NewListeners(d.resolved(of)) })
	}
	s.before, s.after = listeners(before), listeners(after)
	s.addresses = addressesOf(s.differ, before, after)
	if before != nil {
		s.rulesWas = before.NAT
	}
	s.egress, s.has = cached(d.host.egress), cached(d.host.holder)
	return s
}

// idle reports whether no connection has to be checked.
func (s *stale) idle() bool { return len(s.differ) == 0 && !s.failedOver && len(s.lost) == 0 }

// lostUplink reports whether the source address of a connection has no usable uplink.
func (s *stale) lostUplink(e *conntrack.Entry) bool {
	if len(s.lost) == 0 || !e.SourceTranslated() {
		return false
	}
	f := e.Flow()
	return inPrefixes(s.lost, f.Reply.Dest.Addr())
}

// cached returns a function that looks up each address once.
func cached(of func(netip.Addr) string) func(netip.Addr) string {
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

// resolved returns a snapshot with the current addresses of interfaces.
func (d *Datapath) resolved(s *datapath.Snapshot) *datapath.Snapshot {
	if s == nil {
		return nil
	}
	return datapath.Resolve(s, d.host.listenAddress)
}

// ends reports whether a conntrack entry must be ended. An entry expected by a helper ends with its
// parent.
func (s *stale) ends(e *conntrack.Entry) bool {
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
		return s.source(&f) || s.failedOver && s.rerouted(&f)
	case !slices.ContainsFunc(now, differs) && !slices.ContainsFunc(was, differs):
		return false
	case len(now) == 0:
		return f.DestTranslated() && s.may(&f)
	}
	return !slices.ContainsFunc(now, func(l datapath.Listener) bool { return !s.mismatched(&f, l) })
}

// cutOff reports whether a connection is open and its backend, or the uplink of its source, is down. Both sides then get a reset
// for their next packet. Offloaded connections are excluded, because their packets bypass the
// rules.
func (s *stale) cutOff(e *conntrack.Entry) bool {
	if e.Protocol != flow.TCP || e.Status&(conntrack.Assured|conntrack.Offloaded) != conntrack.Assured {
		return false
	}
	f := e.Flow()
	return !closed(&f) && (s.lostUplink(e) || s.toDown(&f))
}

// toDown reports whether the backend of a connection is down.
func (s *stale) toDown(f *flow.Flow) bool {
	return slices.ContainsFunc(s.after().Find(f.Original.Protocol, f.Original.Dest), func(l datapath.Listener) bool {
		if l.Service == nil || !tracked(l.Service.Mode) {
			return false
		}
		i := backendOf(f, l.Service)
		return i >= 0 && l.Service.State[i] == datapath.Down
	})
}

// backendOf returns the index of a connection's backend in a service, or -1.
func backendOf(f *flow.Flow, to *datapath.Service) int {
	return slices.IndexFunc(to.Backends, func(b config.Backend) bool { return reaches(f, netip.AddrPortFrom(b.Address, b.Port)) })
}

// moves reports whether a connection continues on another datapath, which already has it.
func (s *stale) moves(e *conntrack.Entry) bool {
	if len(s.snapshot.Gone) == 0 || !e.DestTranslated() {
		return false
	}
	f := e.Flow()
	return slices.ContainsFunc(s.before().Find(f.Original.Protocol, f.Original.Dest), func(l datapath.Listener) bool { return s.snapshot.Moves(l.Name(), f.Original.Protocol) })
}

// mismatched reports whether the listener would treat a connection differently, so that it must be
// ended.
func (s *stale) mismatched(f *flow.Flow, l datapath.Listener) bool {
	if l.Service != nil {
		return s.service(f, l.Service)
	}
	return !reaches(f, l.Forward.Target(f.Original.Dest.Port())) && s.may(f)
}

// service is like mismatched, for a service.
func (s *stale) service(f *flow.Flow, to *datapath.Service) bool {
	if !tracked(to.Mode) {
		return false // rules process its packets before connection tracking
	}
	i := backendOf(f, to)
	switch {
	case i < 0:
		return s.may(f)
	case to.State[i] == datapath.Down:
		return true // in any connection state, because no server answers
	case to.State[i] != datapath.Up && closed(f):
		return true // a SYN from the same port must open a new connection, and not continue this one
	case to.Mode != config.ModeFullNAT:
		return false
	}
	return (!f.SourceTranslated() || len(to.SourcePool) > 0 && !holds(to.SourcePool, f.Reply.Dest.Addr())) && s.may(f)
}

// reaches reports whether a connection has the endpoint as server. Port 0 means the client's
// destination port.
func reaches(f *flow.Flow, to netip.AddrPort) bool {
	port := to.Port()
	if port == 0 {
		port = f.Original.Dest.Port()
	}
	return f.Reply.Source == netip.AddrPortFrom(to.Addr(), port)
}

func holds(pool []config.AddressRange, a netip.Addr) bool {
	return slices.ContainsFunc(pool, func(r config.AddressRange) bool { return r.Contains(a) })
}

// closed reports whether a TCP connection has ended, or has never been answered.
func closed(f *flow.Flow) bool {
	return f.Original.Protocol == flow.TCP && slices.Contains([]string{"SYN_SENT", "LAST_ACK", "TIME_WAIT", "CLOSE"}, f.State)
}

// may reports whether the policy permits ending a connection.
func (s *stale) may(f *flow.Flow) bool { return !s.snapshot.Keeps(f.Original.Protocol) || closed(f) }

// source reports whether a connection without a listener must be ended, because rules for sources
// or static rules have changed.
func (s *stale) source(f *flow.Flow) bool {
	if !slices.ContainsFunc(s.rules, s.differs) && !slices.ContainsFunc(s.rulesWas, s.differs) {
		return false
	}
	if i := slices.IndexFunc(s.rules, func(n *config.NATRule) bool { return s.translates(n, f) }); i >= 0 {
		return s.differs(s.rules[i]) && !owns(s.rules[i], f) && s.may(f)
	}
	i := slices.IndexFunc(s.rulesWas, func(n *config.NATRule) bool { return owns(n, f) })
	return i >= 0 && s.differs(s.rulesWas[i]) && s.may(f)
}

func translatesSources(n *config.NATRule) bool {
	return n.Type.RewritesSource()
}

// rerouted reports whether a connection without a listener must be ended after a change of the
// route, such as a failover to another uplink. No reply returns over the new uplink to the old
// address or to an inside address. The next packet then opens a new connection. The kernel does
// this for its own masquerade only.
func (s *stale) rerouted(f *flow.Flow) bool {
	via := s.egress(f.Original.Dest.Addr())
	if via == "" || via == "lo" || f.DestTranslated() {
		return false
	}
	if !f.SourceTranslated() {
		return s.may(f) && slices.ContainsFunc(s.rules, func(n *config.NATRule) bool { return translatesSources(n) && s.translates(n, f) })
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

func (s *stale) differs(n *config.NATRule) bool { return s.differ["nat "+n.Name] }

// translates reports whether a rule applies to the first packet of a connection. The host's own
// packets already have its address.
func (s *stale) translates(n *config.NATRule, f *flow.Flow) bool {
	from, to := f.Original.Source.Addr(), f.Original.Dest.Addr()
	switch {
	case n.Type == config.NATStatic:
		return n.External.Contains(to) || n.Internal.Contains(from) && s.by(n.Out, to)
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
	return s.by(n.Out, to) && s.by(n.In, from) && s.egress(from) != "lo" && s.egress(to) != "lo"
}

// by reports whether one of the interfaces is the egress interface of the route to an address; ""
// is any.
func (s *stale) by(names config.Interfaces, a netip.Addr) bool { return names.Has(s.egress(a)) }

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
func (s *stale) dumpFilter() *conntrack.Filter {
	if s.failedOver || len(s.lost) > 0 || len(s.addresses) != 1 || slices.ContainsFunc(s.rules, s.differs) || slices.ContainsFunc(s.rulesWas, s.differs) {
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
func (d *Datapath) end(ctx context.Context, s *stale) (int, error) {
	if s.idle() {
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
		if s.moves(e) {
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
func (d *Datapath) count(ctx context.Context, s *stale) (n int, err error) {
	if s.idle() {
		return 0, nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	err = c.Dump(ctx, s.dumpFilter(), func(e *conntrack.Entry) error {
		if !s.moves(e) && s.ends(e) {
			n++
		}
		return nil
	})
	if errors.Is(err, conntrack.ErrInterrupted) {
		err = nil
	}
	return n, err
}
