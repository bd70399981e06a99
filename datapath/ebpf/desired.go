// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// desired is what the maps are to hold: a snapshot in the datapath's own words.
type desired struct {
	specific int                    // more specific ones than mappings between the families have, with those that found no room
	waits    int                    // names of interfaces, and addresses of masquerade rules, that are not there
	services map[uint32]wireService // slots not filled in
	slots    map[uint32][]uint16    // by service
	backends map[uint32]wireBackend
	names    names

	listeners map[wireListenerKey]wireListener
	ranges    map[wireListenerPrefix]wireListener
	doors     map[wireDoorKey]uint32
	directs   []wireDirect
	reverses  map[wireListenerKey]wireReverse
	sessions  map[wireSessionKey]uint32
	members   map[wireMemberKey]uint64
	hosts     map[wireHostKey]uint64 // single addresses of the same lists
	firewall  []wireFirewallRule
	rules     map[uint32]wireNatRule
	order     []uint32                   // of the rules in the configuration
	mappable  map[uint32]*config.NATRule // of them: whose hosts may ask for mappings
	prefixes  map[wirePrefixKey]wirePrefix
	pools     map[uint32]wirePoolAddr
	runs      map[[2]uint16][]uint32    // numbers of a pool's addresses, by where they begin and how many they are
	ports     map[uint32][]flow.Ports   // usable ones, by pool address
	block     map[uint32]int            // ports of a block, by pool address
	sets      map[uint32]config.PortSet // of several ranges, by pool address: no other port is given out
	unlisted  map[uint32]bool           // pool addresses that no packet is looked up in a pool for
	ifaces    map[uint32]wireInterfaceAddr
	// interfaceLists are the lists of interfaces of rules, by their numbers.
	interfaceLists map[uint32]config.Interfaces
	switches       switches
	tables         config.Tables // sizes asked for

	draft    *draft
	resolved *datapath.Snapshot // what it was compiled from, with the addresses of interfaces
}

// names gives the operator's words for ids.
type names struct {
	service  map[uint32]string
	backend  map[uint32]string
	backends map[uint32][]uint32 // of a service, in the order of the configuration
	source   map[uint32]string
	prefix   map[uint32]string
	portRule map[uint32]bool // services that stand for port-forward rules
	log      map[uint32]config.Log
}

// compiler collects a desired state.
type compiler struct {
	*desired
	state      *state
	host       *host
	snapshot   *datapath.Snapshot // with the addresses that interfaces have
	asked      *datapath.Snapshot // as it was given
	lists      [4]map[netip.Prefix]uint64
	pooled     map[netip.Addr]uint32
	places     []uint64                       // what is to stand in the map of runs
	held       []bool                         // of them: that something in force, or this state, relies on
	doorsOf    map[netip.Addr]map[string]bool // interfaces that the listeners of an address are bound to
	turning    []uint32                       // numbers of services whose neighbours are still to be looked at
	towardsNet map[netip.Prefix]netip.Addr    // addresses of this host, towards backends there
	crosses    map[uint32]*config.NATRule     // port-forwards from IPv4 to IPv6 hosts, by the numbers of their services
}

// compile makes the desired state of a snapshot. When there are not enough ids it does
// so again, with those that neither the snapshot nor any flow has a use for.
func compile(s *datapath.Snapshot, st *state, h *host) (*desired, error) {
	d, err := compileWith(s, st, h, st.ids.draft())
	if err != nil || !d.draft.short {
		return d, err
	}
	referred, err := st.referred()
	if err != nil {
		return nil, err
	}
	return compileWith(s, st, h, st.ids.spare(d.draft.want, referred))
}

func compileWith(s *datapath.Snapshot, st *state, h *host, ids *draft) (*desired, error) {
	c := newCompiler(s, datapath.Resolve(s, h.listenAddress), st, h, ids)
	s = c.snapshot
	for name, prefixes := range s.Config.Firewall.Sets {
		if _, err := c.set(name, prefixes); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	for i := range s.Services {
		if err := c.service(&s.Services[i]); err != nil {
			return nil, fmt.Errorf("service %s: %w", s.Services[i].Name, err)
		}
	}
	for _, n := range s.NAT {
		if err := c.nat(n); err != nil {
			return nil, fmt.Errorf("nat %s: %w", n.Name, err)
		}
	}
	if err := c.crossing(); err != nil {
		return nil, err
	}
	c.neighbours()
	for _, r := range s.Rules {
		if err := c.rule(r); err != nil {
			return nil, fmt.Errorf("firewall rule %s: %w", r.Name, err)
		}
	}
	if err := c.routes(); err != nil {
		return nil, err
	}
	c.owned()
	c.finish()
	return c.desired, nil
}

// newCompiler returns one that has compiled nothing yet.
func newCompiler(asked, s *datapath.Snapshot, st *state, h *host, ids *draft) *compiler {
	c := &compiler{state: st, host: h, snapshot: s, asked: asked, pooled: map[netip.Addr]uint32{}, crosses: map[uint32]*config.NATRule{}, towardsNet: map[netip.Prefix]netip.Addr{}, desired: &desired{
		services: map[uint32]wireService{}, slots: map[uint32][]uint16{}, backends: map[uint32]wireBackend{},
		listeners: map[wireListenerKey]wireListener{}, ranges: map[wireListenerPrefix]wireListener{}, doors: map[wireDoorKey]uint32{},
		reverses: map[wireListenerKey]wireReverse{}, sessions: map[wireSessionKey]uint32{},
		members: map[wireMemberKey]uint64{}, hosts: map[wireHostKey]uint64{}, rules: map[uint32]wireNatRule{}, mappable: map[uint32]*config.NATRule{}, prefixes: map[wirePrefixKey]wirePrefix{},
		pools: map[uint32]wirePoolAddr{}, runs: map[[2]uint16][]uint32{}, ports: map[uint32][]flow.Ports{}, block: map[uint32]int{}, sets: map[uint32]config.PortSet{}, unlisted: map[uint32]bool{}, ifaces: map[uint32]wireInterfaceAddr{}, interfaceLists: map[uint32]config.Interfaces{},
		draft: ids, tables: s.Config.Tables, resolved: s,
		names: names{map[uint32]string{}, map[uint32]string{}, map[uint32][]uint32{}, map[uint32]string{}, map[uint32]string{}, map[uint32]bool{}, map[uint32]config.Log{}},
	}}
	for i := range c.lists {
		c.lists[i] = map[netip.Prefix]uint64{}
	}
	return c
}

// owned marks the addresses that the gateway owns. Where another datapath has listeners
// on one of them, that one, which meets packets later, refuses what nobody takes.
func (c *compiler) owned() {
	near := func(a netip.Addr) bool {
		return slices.ContainsFunc(c.host.networks, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, o := range datapath.OwnedAddresses(c.snapshot, near) {
		if o.Shared {
			continue
		}
		bits := uint64(ServedOwned)
		switch o.Answer {
		case config.WhenDownReset:
			bits |= ServedReset
		case config.WhenDownReject:
			bits |= ServedReject
		}
		if o.Bound {
			bits |= ServedBound
		}
		c.lists[ListServed][netip.PrefixFrom(o.Address, o.Address.BitLen())] |= bits
		c.switches.Owned = true
	}
}

func (c *compiler) finish() {
	for list := range c.lists {
		c.inherit(uint32(list))
	}
	c.split()
	withoutTransmit := c.host.withoutTransmit(c.snapshot.Config)
	for _, i := range c.host.interfaces {
		v := wireInterfaceAddr{Mtu: uint32(i.MTU)}
		if !slices.ContainsFunc(withoutTransmit, func(x netdev.Interface) bool { return x.Index == i.Index }) {
			v.Flags = InterfaceXDP
		}
		copy(v.Mac[:], i.MAC)
		for n, list := range c.interfaceLists {
			if list.Has(i.Name) {
				v.Lists |= 1 << n
			}
		}
		for _, a := range c.host.addresses[i.Index] {
			if a.Is4() && v.V4 == (wireAddr{}) {
				v.V4 = addrOf(a)
			} else if a.Is6() && (v.V6 == (wireAddr{}) || !a.IsLinkLocalUnicast()) {
				v.V6 = addrOf(a)
			}
		}
		c.ifaces[uint32(i.Index)] = v
	}
	c.unnumbered()
	s, t := &c.switches, c.snapshot.Config.Timeouts
	s.Attach, s.LowestIPv6MTU = c.snapshot.Config.Attach, uint32(c.snapshot.Config.LowestIPv6MTU)
	s.Errors = uint32(cmp.Or(c.snapshot.Config.ICMPErrorsPerSecond, 1000))
	if c.snapshot.Config.ICMPErrors == config.SwitchOff {
		s.Errors = 0
	}
	s.Paired = c.host.paired(c.snapshot.Config)
	wanted, _ := c.host.attachTo(c.snapshot.Config)
	s.Bare = slices.ContainsFunc(wanted, netdev.Interface.Bare)
	s.Services = len(c.services) > 0
	s.Reverse = len(c.reverses) > 0
	s.Ranges, s.Doors = len(c.ranges) > 0, len(c.doors) > 0
	for k := range c.ranges {
		s.Any = s.Any || k.Key.L4Proto == 0
	}
	for k := range c.listeners {
		s.Any = s.Any || k.L4Proto == 0
	}
	s.LocalPortLast = c.host.localPortLast
	c.directs = slices.DeleteFunc(c.directs, c.sharesPool)
	s.Direct = len(c.directs) > 0
	for _, w := range c.services {
		s.MACKeys = s.MACKeys || w.Flags&ServiceMACKeys != 0
		s.Edits = s.Edits || w.Flags&(ServiceMSSClamp|ServiceTOA|ServiceProxy) != 0
		s.Cookies = s.Cookies || w.Flags&ServiceCookies != 0
		s.Resets = s.Resets || w.ResetNs != 0
		s.Forwards = s.Forwards || w.Flags&ServicePortForward != 0
	}
	s.Cookies = s.Cookies || c.state.spliced&SplicedCookie != 0
	s.Edits = s.Edits || c.state.spliced != 0
	s.Edits = s.Edits || s.Cookies
	s.NAT = len(c.rules) > 0
	s.Forwards = s.Forwards && s.NAT
	s.Mappings = len(c.mappable) > 0
	for _, r := range c.rules {
		s.ByEgress = s.ByEgress || r.PrefixLen == 0 // what is for this host is left alone
		s.CrossByEgress = s.CrossByEgress || r.PrefixLen != 0 && r.Out != 0
		s.Edits = s.Edits || r.Flags&NATMSSClamp != 0
	}
	for _, p := range c.prefixes {
		kind := p.Kind
		s.Prefixes = s.Prefixes || kind != PrefixNAT64
		s.Crossing = s.Crossing || kind == PrefixSIIT || kind == PrefixEAM
		switch kind {
		case PrefixSIIT, PrefixEAM:
			s.CrossByEgress = s.CrossByEgress || p.In != 0 || p.Out != 0
		default:
			s.ByEgress = s.ByEgress || p.Out != 0
		}
		s.Edits = s.Edits || p.Clamp != 0
	}
	s.Pools = len(c.pools) > len(c.unlisted)
	if c.state.allOn {
		s.allOn()
	}
	s.Rules = len(c.firewall) > 0
	s.RuleCount = uint32(len(c.firewall))
	s.Established = c.ticks(t.TCPEstablished, 2*time.Hour+4*time.Minute)
	s.Transitory = c.ticks(t.TCPTransitory, 4*time.Minute)
	s.UDP = c.ticks(t.UDP, 5*time.Minute)
	s.ICMP = c.ticks(t.ICMP, time.Minute)
	s.Other = c.ticks(t.Other, 10*time.Minute)
	s.Hold = min(c.ticks(config.Duration(holdTime), holdTime), s.UDP)
	s.HalfOpen = c.state.halfOpen
}

// holdTime is how long a freed port is held back (RFC 6888 REQ-8), but never
// longer than the timeout of UDP, for those who force short ones.
const holdTime = 120 * time.Second

func (c *compiler) ticks(d config.Duration, def time.Duration) uint32 {
	v := d.D()
	if v == 0 {
		v = def
	}
	return max(uint32(v.Seconds()*float64(c.state.hz)), 1)
}

// set gives a named list of prefixes its bit.
func (c *compiler) set(name string, prefixes []netip.Prefix) (uint64, error) {
	id, err := c.draft.id(idSet, name, maxSets, nil)
	if err != nil {
		return 0, err
	}
	for _, p := range prefixes {
		c.lists[ListSets][p.Masked()] |= 1 << id
	}
	return 1 << id, nil
}

// inherit writes a list with the bits of every covering prefix joined in.
func (c *compiler) inherit(list uint32) {
	var lengths [129]bool
	for p := range c.lists[list] {
		lengths[p.Bits()] = true
	}
	for p, bits := range c.lists[list] {
		for n := range p.Bits() {
			if lengths[n] {
				shorter, _ := p.Addr().Prefix(n)
				bits |= c.lists[list][shorter]
			}
		}
		k := wireMemberKey{PrefixLen: 32 + uint32(p.Bits()), List: list | uint32(familyOf(p.Addr()))<<8, Addr: bytesOf(p.Addr())}
		c.members[k] = bits
	}
}

// split puts single addresses into the map that is looked up by one hash, while it
// has room, and notes which lists have members where.
func (c *compiler) split() {
	for k, bits := range c.members {
		full := uint32(32 + 128)
		if k.List>>8&0xff == Family4 {
			full = 32 + 32
		}
		if k.PrefixLen == full && uint32(len(c.hosts)) < c.state.hosts {
			c.hosts[wireHostKey{List: k.List, Addr: k.Addr}] = bits
			delete(c.members, k)
			c.switches.HostLists |= 1 << (k.List & 0xff)
		} else {
			c.switches.TrieLists |= 1 << (k.List & 0xff)
		}
	}
}
