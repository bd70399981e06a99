// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Sets of endpoints and addresses with translation. Their packets must not pass untranslated; the
// function untranslated adds the lookups.
const (
	setListeners  = "listeners"   // Destinations of clients of tracked services and port-forwards.
	setServers    = "servers"     // Sources of the replies.
	mapOwned      = "owned"       // Virtual address -> answer to packets without a listener.
	mapOwnedBound = "owned-bound" // The same, if all listeners are bound to interfaces.
	setOwnedPools = "owned-pools" // Outside addresses of source translation.
)

// peers has the fragments of the sets of listeners, servers and owned addresses. They depend on the
// configuration and on the host's networks, and not on the states of backends.
type peers struct {
	fragment *rs.Fragment // Listeners and owned addresses.
	servers  *rs.Fragment // Servers and their networks.
	used     map[rs.ID]bool
	// Input of the compilation. Services of another datapath may have the same addresses.
	snapshot *datapath.Snapshot
	networks []netip.Prefix
}

// peer is an address with its protocol. The ports of a peer are merged, since the kernel rejects
// overlapping ranges in a set.
type peer struct {
	addr     netip.Addr
	protocol flow.Protocol
	iface    string
}

// listenersAndServers compiles the sets of listeners and servers, or reuses the previous fragments
// if their input is unchanged.
func (c *compiler) listenersAndServers(previous *Result, b *base) *peers {
	p := &peers{snapshot: c.snapshot, networks: c.env.Networks}
	var old *peers
	if previous != nil && p.sameHost(previous.peers) {
		old = previous.peers
	}
	if old != nil && p.sameServices(old, sameListeners) {
		p.fragment = old.fragment
	} else {
		p.fragment = sharedFragment(func(s *Service) {
			all, _ := c.trackedEndpoints()
			s.peers(setListeners, all)
			c.writeOwned(s)
		})
	}
	if old != nil && p.sameServices(old, samePeers) {
		p.servers = old.servers
	} else {
		p.servers = c.servers(b)
	}
	p.indexSets()
	return p
}

// servers compiles the fragment of the servers. It adds their networks if the base has a rule that
// looks them up.
func (c *compiler) servers(b *base) *rs.Fragment {
	return sharedFragment(func(s *Service) {
		_, all := c.trackedEndpoints()
		s.peers(setServers, all)
		for _, table := range []rs.Family{rs.IP, rs.IP6} {
			if b.used[rs.ID{Table: table, Name: mapTurned}] || b.used[rs.ID{Table: table, Name: mapTurned + ranges}] {
				c.sameNetworks(s, table)
			}
		}
	})
}

// indexSets records the names of the sets in both fragments.
func (p *peers) indexSets() {
	p.used = map[rs.ID]bool{}
	for _, set := range append(slices.Clone(p.fragment.Sets), p.servers.Sets...) {
		p.used[set.ID] = true
	}
}

// sharedFragment returns a fragment of the elements that function write adds to shared sets.
func sharedFragment(write func(*Service)) *rs.Fragment {
	s := &Service{Fragment: &rs.Fragment{}}
	write(s)
	s.Fragment.Elements = append(s.Fragment.Elements, s.members...)
	used := map[rs.ID]bool{}
	for _, id := range s.uses {
		used[id] = true
	}
	for _, id := range sortedIDs(used) {
		if set := sharedSet(id); set != nil {
			s.Fragment.Sets = append(s.Fragment.Sets, set)
		}
	}
	return s.Fragment
}

// sameHost reports whether both have the same networks and NAT rules as input.
func (p *peers) sameHost(o *peers) bool {
	return slices.Equal(p.networks, o.networks) && sameRules(p.snapshot.NAT, o.snapshot.NAT) &&
		(p.snapshot.Config == o.snapshot.Config || reflect.DeepEqual(p.snapshot.Config.NAT, o.snapshot.Config.NAT))
}

// sameRules reports whether two lists hold the same rules.
func sameRules[T any](a, b []*T) bool {
	return slices.EqualFunc(a, b, func(x, y *T) bool { return x == y || reflect.DeepEqual(x, y) })
}

// sameServices reports whether the services of both are pairwise equal by the function same.
func (p *peers) sameServices(o *peers, same func(a, b *config.Service) bool) bool {
	return slices.EqualFunc(p.snapshot.Services, o.snapshot.Services, func(x, y datapath.Service) bool { return same(x.Service, y.Service) }) &&
		sameOfAll(p.snapshot.Config, o.snapshot.Config, same)
}

// sameOfAll reports whether the services of two configurations, on any datapath, are pairwise equal
// by the function same.
func sameOfAll(a, b *config.Config, same func(a, b *config.Service) bool) bool {
	if a == b {
		return true
	}
	if len(a.Services) != len(b.Services) {
		return false
	}
	for i := range a.Services {
		if !same(&a.Services[i], &b.Services[i]) {
			return false
		}
	}
	return true
}

// sameListeners reports whether two services have equal listeners, and equal settings for packets
// without a listener.
func sameListeners(a, b *config.Service) bool {
	return a.Is(b) || a.Mode == b.Mode && a.Protocol == b.Protocol && a.WhenDown == b.WhenDown && slices.Equal(a.SourcePool, b.SourcePool) &&
		reflect.DeepEqual(a.Listen, b.Listen)
}

// samePeers reports whether two services also have equal servers.
func samePeers(a, b *config.Service) bool {
	return sameListeners(a, b) && (a.Is(b) || datapath.Turns(a) == datapath.Turns(b) && slices.EqualFunc(a.Backends, b.Backends, func(x, y config.Backend) bool {
		return x.Address == y.Address && x.Port == y.Port
	}))
}

// trackedEndpoints returns the listeners and servers of services and port-forwards with tracked connections.
func (c *compiler) trackedEndpoints() (listeners, servers map[peer][]flow.Ports) {
	listeners, servers = map[peer][]flow.Ports{}, map[peer][]flow.Ports{}
	add := func(to map[peer][]flow.Ports, p peer, ports ...flow.Ports) { to[p] = append(to[p], ports...) }
	server := func(a netip.Addr, port uint16, l config.Listen, protocol flow.Protocol) {
		ports := portsOf(l)
		if port != 0 && protocol != flow.Any {
			ports = []flow.Ports{{First: port, Last: port}}
		}
		if a.Is4() == l.Address.Is4() {
			add(servers, peer{a, protocol, ""}, ports...)
		}
	}
	for _, s := range c.snapshot.Services {
		if s.Mode != config.ModeDNAT && s.Mode != config.ModeFullNAT {
			continue
		}
		for _, l := range s.Listen {
			add(listeners, peer{l.Address, s.Protocol, l.Interface}, portsOf(l)...)
			for _, b := range s.Backends {
				server(b.Address, b.Port, l, s.Protocol)
			}
		}
	}
	for _, n := range c.snapshot.NAT {
		if n.Type.Forwards() {
			at := []string{n.Listen.Interface}
			if n.Listen.Interface == "" {
				at = namesOrAny(n.In)
			}
			for _, iface := range at {
				add(listeners, peer{n.Listen.Address, n.Protocol, iface}, portsOf(*n.Listen)...)
			}
			server(n.To.Address, n.To.Port, *n.Listen, n.Protocol)
		}
	}
	return listeners, servers
}

// checkReplies rejects a server endpoint that is used by a stateless service and also by a tracked
// service or port-forward. Stateless replies are rewritten before the conntrack lookup, for all
// clients. Clients of the tracked service would get replies from the wrong address.
func (c *compiler) checkReplies(b *base) error {
	if len(b.reply) == 0 {
		return nil
	}
	var clashes []string
	_, servers := c.trackedEndpoints()
	for p, all := range servers {
		for _, k := range b.reply[p.addr] {
			same := k.protocol == p.protocol || k.protocol == flow.Any || p.protocol == flow.Any
			if same && slices.ContainsFunc(all, k.ports.Overlaps) {
				clashes = append(clashes, fmt.Sprintf("%s: answers of %s port %s also belong to another service or port-forward, and nftables cannot tell them apart: "+
					"give the stateless service another port of the backend, or write mode: dnat, or datapath: ebpf for both", k.owner, k.addr, k.ports))
			}
		}
	}
	if len(clashes) > 0 {
		return errors.New(slices.Min(clashes))
	}
	return nil
}

// peers writes endpoints into a set: single ports into the exact set, merged ranges into the
// interval set.
func (s *Service) peers(name string, all map[peer][]flow.Ports) {
	order := slices.SortedFunc(maps.Keys(all), func(a, b peer) int {
		return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.iface, b.iface), cmp.Compare(a.protocol, b.protocol))
	})
	for _, p := range order {
		if _, every := all[peer{p.addr, flow.Any, p.iface}]; every && p.protocol != flow.Any {
			continue
		}
		e := endpoint{p.addr, p.protocol, mergePorts(all[p]), p.iface}
		endpoints(s, familyOf(p.addr), name, e, rs.Verdict{})
	}
}

// mergePorts returns port ranges in order. Adjacent and overlapping ranges are joined.
func mergePorts(ports []flow.Ports) []flow.Ports {
	all := make([]flow.Ports, len(ports))
	for i, p := range ports {
		if all[i] = p; p == (flow.Ports{}) {
			all[i].Last = 65535
		}
	}
	slices.SortFunc(all, func(a, b flow.Ports) int { return cmp.Compare(a.First, b.First) })
	out := all[:0]
	for _, p := range all {
		if n := len(out); n > 0 && int(p.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, p.Last)
			continue
		}
		out = append(out, p)
	}
	return out
}

// writeOwned writes the addresses that the gateway owns.
func (c *compiler) writeOwned(s *Service) {
	near := func(a netip.Addr) bool {
		return slices.ContainsFunc(c.env.Networks, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	pools := datapath.OwnedPools(c.snapshot)
	for _, o := range datapath.OwnedAddresses(c.snapshot, near) {
		name := mapOwned
		if o.Bound {
			name = mapOwnedBound
		}
		if slices.ContainsFunc(pools, func(r config.AddressRange) bool { return r.Contains(o.Address) }) {
			continue // packets to a pool address without a mapping are dropped
		}
		s.element(rs.Element{Set: rs.ID{Table: familyOf(o.Address), Name: name}, Key: rs.Addr(o.Address).Raw,
			Verdict: rs.Verdict{Code: rs.Goto, Chain: ownedPrefix + string(o.Answer)}})
	}
	for _, f := range []rs.Family{rs.IP, rs.IP6} {
		for _, r := range spans(f, pools) {
			s.element(rs.Element{Set: rs.ID{Table: f, Name: setOwnedPools}, Key: rs.Addr(r.First).Raw, End: rs.Addr(r.Last).Raw})
		}
	}
}
