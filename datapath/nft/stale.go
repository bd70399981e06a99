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

// Connection tracking evaluates the NAT rules once, for the first packet of a connection. A host that
// sends from one port without a pause (syslog, SNMP traps, VPN keepalives, resolvers, SIP) never opens a
// new connection, and would keep a replaced backend or an untranslated source for ever. So an apply ends
// the tracked connections that its snapshot treats differently.

// stale finds the tracked connections that a snapshot treats differently.
type stale struct {
	before, after   func() *datapath.Listeners
	rulesWas, rules []*config.NATRule
	differ          map[string]bool // services and rules, as of datapath.Listener; nobody else's connections are looked at
	snapshot        *datapath.Snapshot
	addresses       map[netip.Addr]bool     // of listeners of these; nil: they follow an interface
	leaves          func(netip.Addr) string // the interface that an address is routed by
	failedOver      bool                    // what is routed far away leaves by another interface since the last apply
	has             func(netip.Addr) string // the interface that has an address
}

// staleAfter compares with what was in force. uplinks are those that the host has now.
func (d *Datapath) staleAfter(before, after *datapath.Snapshot, now uplinks) *stale {
	s := &stale{differ: datapath.Differing(before, after), snapshot: after, rules: after.NAT}
	s.failedOver = before != nil && now != d.uplinks && !now.byRules && slices.ContainsFunc(after.NAT, translatesSources)
	if len(s.differ) == 0 && !s.failedOver {
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
	s.leaves, s.has = asked(d.host.leaves), asked(d.host.holder)
	return s
}

// asked asks for each address once.
func asked(of func(netip.Addr) string) func(netip.Addr) string {
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

// resolved returns a snapshot with the addresses that interfaces have now.
func (d *Datapath) resolved(s *datapath.Snapshot) *datapath.Snapshot {
	if s == nil {
		return nil
	}
	return datapath.Resolve(s, d.host.listenAddress)
}

// ends reports whether an entry is ended. Those that helpers have made live with the one that
// they were made for.
func (s *stale) ends(e *conntrack.Entry) bool {
	if e.Status&conntrack.Expected != 0 {
		return false
	}
	f := e.Flow()
	if e.CutOff() && s.toDown(&f) {
		return false // both sides are told already
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

// cutOff reports whether a connection is open, and its backend is down. Both sides are told when they
// send next, which a flowtable would not see.
func (s *stale) cutOff(e *conntrack.Entry) bool {
	if e.Protocol != flow.TCP || e.Status&(conntrack.Assured|conntrack.Offloaded) != conntrack.Assured {
		return false
	}
	f := e.Flow()
	return !closed(&f) && s.toDown(&f)
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

// backendOf returns which backend of a service a connection goes to, -1 for none.
func backendOf(f *flow.Flow, to *datapath.Service) int {
	return slices.IndexFunc(to.Backends, func(b config.Backend) bool { return reaches(f, netip.AddrPortFrom(b.Address, b.Port)) })
}

// moves reports whether a connection goes on elsewhere, where another datapath has it already.
func (s *stale) moves(e *conntrack.Entry) bool {
	if len(s.snapshot.Gone) == 0 || !e.DestTranslated() {
		return false
	}
	f := e.Flow()
	return slices.ContainsFunc(s.before().Find(f.Original.Protocol, f.Original.Dest), func(l datapath.Listener) bool { return s.snapshot.Moves(l.Name(), f.Original.Protocol) })
}

// mismatched reports whether the listener would treat a connection differently, so that it is to be ended.
func (s *stale) mismatched(f *flow.Flow, l datapath.Listener) bool {
	if l.Service != nil {
		return s.service(f, l.Service)
	}
	return !reaches(f, l.Forward.Target(f.Original.Dest.Port())) && s.may(f)
}

// service judges a connection to a service.
func (s *stale) service(f *flow.Flow, to *datapath.Service) bool {
	if !tracked(to.Mode) {
		return false // its packets meet rules before connection tracking
	}
	i := backendOf(f, to)
	switch {
	case i < 0:
		return s.may(f)
	case to.State[i] == datapath.Down:
		return true // in any state: no server answers there
	case to.State[i] != datapath.Up && closed(f):
		return true // a SYN of the same port would go on with it, where it opens another one
	case to.Mode != config.ModeFullNAT:
		return false
	}
	return (!f.SourceTranslated() || len(to.SourcePool) > 0 && !holds(to.SourcePool, f.Reply.Dest.Addr())) && s.may(f)
}

// reaches reports whether a connection goes to that endpoint; port 0 keeps the client's.
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

// closed reports whether a TCP connection has ended, or was never answered.
func closed(f *flow.Flow) bool {
	return f.Original.Protocol == flow.TCP && slices.Contains([]string{"SYN_SENT", "LAST_ACK", "TIME_WAIT", "CLOSE"}, f.State)
}

// may reports whether the policy lets a connection be ended.
func (s *stale) may(f *flow.Flow) bool { return !s.snapshot.Keeps(f.Original.Protocol) || closed(f) }

// source judges a connection to no listener by the rules that translate sources, and one to one.
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

// rerouted judges a connection to no listener after the route has changed, as after a failover to another uplink.
// Nobody answers to the address of the old one there, nor to one that is not translated: the next packet opens
// another connection. The kernel does this for what its masquerade has translated alone.
func (s *stale) rerouted(f *flow.Flow) bool {
	via := s.leaves(f.Original.Dest.Addr())
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
			return n.Type == config.NATMasquerade && at != via && n.Out.Has(at)
		}
	}
	return owned
}

func (s *stale) differs(n *config.NATRule) bool { return s.differ["nat "+n.Name] }

// translates reports whether a rule is for the first packet of a connection. What the host itself
// sends has its address already.
func (s *stale) translates(n *config.NATRule, f *flow.Flow) bool {
	from, to := f.Original.Source.Addr(), f.Original.Dest.Addr()
	switch n.Type {
	case config.NATStatic:
		return n.External.Contains(to) || n.Internal.Contains(from) && s.by(n.Out, to)
	case config.NATMasquerade, config.NATSNAT:
	default:
		return false
	}
	if len(n.To.Addresses) > 0 && !slices.ContainsFunc(n.To.Addresses, func(r config.AddressRange) bool { return r.Is4() == from.Is4() }) {
		return false
	}
	if !inPrefixes(n.Source, from) || len(n.Except) > 0 && inPrefixes(n.Except, to) {
		return false
	}
	return s.by(n.Out, to) && s.by(n.In, from) && s.leaves(from) != "lo" && s.leaves(to) != "lo"
}

// by reports whether an address is routed by one of these interfaces; "" is any.
func (s *stale) by(names config.Interfaces, a netip.Addr) bool { return names.Has(s.leaves(a)) }

// addressesOf lists the addresses that services and port-forwards of some names listen on; nil where
// one follows an interface.
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

// sift is what the kernel can leave out of a dump: one address is looked for, or all.
func (s *stale) sift() *conntrack.Filter {
	if s.failedOver || len(s.addresses) != 1 || slices.ContainsFunc(s.rules, s.differs) || slices.ContainsFunc(s.rulesWas, s.differs) {
		return nil
	}
	for only := range s.addresses {
		return &conntrack.Filter{Dest: netip.PrefixFrom(only, only.BitLen())}
	}
	return nil
}

// end ends the connections that the snapshot in force would treat otherwise, and tells how many
// there were, without those that go on elsewhere. The table is read once, and not at all where nothing differs.
func (d *Datapath) end(ctx context.Context, s *stale) (int, error) {
	if len(s.differ) == 0 && !s.failedOver {
		return 0, nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	moved, answers := 0, map[endpoints]bool{}
	var cut []conntrack.Entry
	n, err := c.DeleteIf(ctx, s.sift(), func(e *conntrack.Entry) bool {
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
		answers[answersOf(e)] = true
		return true
	})
	n = max(0, n-moved) // one may have ended by itself
	if err == nil {
		var told int
		told, err = c.CutOff(ctx, cut)
		n += told
	}
	if err == nil {
		err = d.endLate(answers)
	}
	if err != nil {
		return n, fmt.Errorf("connections that are treated otherwise now: %w", err)
	}
	return n, nil
}

// count tells how many connections end would end.
func (d *Datapath) count(ctx context.Context, s *stale) (n int, err error) {
	if len(s.differ) == 0 && !s.failedOver {
		return 0, nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	err = c.Dump(ctx, s.sift(), func(e *conntrack.Entry) error {
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
