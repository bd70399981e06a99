// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// Desired is the content of the maps for a snapshot.
type Desired struct {
	SpecificRoutes int                     // Routes more specific than a mapping between the families, including those that did not fit.
	Waiting        int                     // Interface names and masquerade addresses that do not exist yet.
	Unreached      []string                // Fullnat backends without a source address, each with the reason; they get no new connections.
	Services       map[uint32]wire.Service // Without the position of their slots.
	Slots          map[uint32][]uint16     // by service
	Backends       map[uint32]wire.Backend
	Names          names

	Listeners      map[wire.ListenerKey]wire.Listener
	Ranges         map[wire.ListenerPrefix]wire.Listener
	IfaceListeners map[wire.IfaceListenerKey]uint32
	Directs        []wire.Direct
	Reverses       map[wire.ListenerKey]wire.Reverse
	Sessions       map[wire.SessionKey]uint32
	Members        map[wire.MemberKey]uint64
	Hosts          map[wire.HostKey]uint64                  // Single addresses of the same lists.
	Denied         map[wire.DeniedGroup][]wire.DeniedPrefix // Sources of the early rules, sorted.
	Firewall       []wire.FirewallRule                      // All other rules.
	Rules          map[uint32]wire.NatRule
	Order          []uint32                   // Ids of rules in configuration order.
	Mappable       map[uint32]*config.NATRule // Rules with mapping requests (PCP) allowed.
	Prefixes       map[wire.PrefixKey]wire.Prefix
	Pools          map[uint32]wire.PoolAddr
	Runs           map[[2]uint16][]uint32    // Pool address ids, by first place and length of the run.
	Ports          map[uint32][]flow.Ports   // Usable ports, by pool address.
	Block          map[uint32]int            // Block size in ports, by pool address.
	Sets           map[uint32]config.PortSet // Non-contiguous port ranges, by pool address: no other port is allocated.
	unlisted       map[uint32]bool           // Pool addresses that are left out of the lookup of received packets.
	Ifaces         map[uint32]wire.InterfaceAddr
	// interfaceLists stores the interface lists of rules by list id.
	interfaceLists map[uint32]config.Interfaces
	Switches       wire.Switches
	Tables         config.Tables // requested table sizes

	Draft    *ids.Draft
	Resolved *datapath.Snapshot // the compiled snapshot, including addresses of interfaces
}

// names maps ids to configuration names.
type names struct {
	Service     map[uint32]string
	Backend     map[uint32]string
	Backends    map[uint32][]uint32 // by service, in configuration order
	Source      map[uint32]string
	Prefix      map[uint32]string
	PortForward map[uint32]bool // services that implement port-forward rules
	Log         map[uint32]config.Log
}

// compiler builds a desired state.
type compiler struct {
	*Desired
	state       *State
	host        *Host
	snapshot    *datapath.Snapshot // with the interfaces' addresses filled in
	unresolved  *datapath.Snapshot // Before the addresses were filled in.
	lists       [4]map[netip.Prefix]uint64
	rules       []*config.FirewallRule // the rules that are not early drop rules
	poolIDs     map[netip.Addr]uint32
	runs        []uint64                       // New content of the map of runs.
	usedRuns    []bool                         // Places used by the state in force or by this one.
	ifacesOf    map[netip.Addr]map[string]bool // Interfaces of bound listeners, by address.
	hairpins    []uint32                       // Services that still need hairpin sources.
	ownSources  map[netip.Prefix]netip.Addr    // This host's source address, by backend network.
	crossFamily map[uint32]*config.NATRule     // Port-forwards from IPv4 to IPv6 hosts, by service id.
	replyPorts  map[wire.ListenerKey]*sources  // Source ports of replies, by the key without a port.
	shared      error                          // A stateless service shares replies with a later service or rule.
}

// Compile returns the desired state of a snapshot. If ids run out, it compiles again and reuses the
// ids of removed objects that no flow refers to.
func Compile(s *datapath.Snapshot, st *State, h *Host) (*Desired, error) {
	d, err := compileWith(s, st, h, st.IDs.Draft())
	if err != nil || !d.Draft.Short {
		return d, err
	}
	referred, err := st.Referred()
	if err != nil {
		return nil, err
	}
	return compileWith(s, st, h, st.IDs.Spare(d.Draft.Want, referred))
}

func compileWith(s *datapath.Snapshot, st *State, h *Host, numbers *ids.Draft) (*Desired, error) {
	c := newCompiler(s, datapath.Resolve(s, h.ListenAddress), st, h, numbers)
	s = c.snapshot
	if err := c.deny(); err != nil {
		return nil, err
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
	if c.shared != nil {
		return nil, c.shared
	}
	if err := c.setNAT64Forwards(); err != nil {
		return nil, err
	}
	c.neighbours()
	for _, r := range c.rules {
		if err := c.rule(r); err != nil {
			return nil, fmt.Errorf("firewall rule %s: %w", r.Name, err)
		}
	}
	if err := c.routes(); err != nil {
		return nil, err
	}
	if err := c.markOwned(); err != nil {
		return nil, err
	}
	c.finish()
	return c.Desired, nil
}

// newCompiler returns an empty compiler.
func newCompiler(unresolved, s *datapath.Snapshot, st *State, h *Host, numbers *ids.Draft) *compiler {
	c := &compiler{state: st, host: h, snapshot: s, unresolved: unresolved, poolIDs: map[netip.Addr]uint32{}, crossFamily: map[uint32]*config.NATRule{}, ownSources: map[netip.Prefix]netip.Addr{}, replyPorts: map[wire.ListenerKey]*sources{}, Desired: &Desired{
		Services: map[uint32]wire.Service{}, Slots: map[uint32][]uint16{}, Backends: map[uint32]wire.Backend{},
		Listeners: map[wire.ListenerKey]wire.Listener{}, Ranges: map[wire.ListenerPrefix]wire.Listener{}, IfaceListeners: map[wire.IfaceListenerKey]uint32{},
		Reverses: map[wire.ListenerKey]wire.Reverse{}, Sessions: map[wire.SessionKey]uint32{},
		Members: map[wire.MemberKey]uint64{}, Hosts: map[wire.HostKey]uint64{}, Denied: map[wire.DeniedGroup][]wire.DeniedPrefix{}, Rules: map[uint32]wire.NatRule{}, Mappable: map[uint32]*config.NATRule{}, Prefixes: map[wire.PrefixKey]wire.Prefix{},
		Pools: map[uint32]wire.PoolAddr{}, Runs: map[[2]uint16][]uint32{}, Ports: map[uint32][]flow.Ports{}, Block: map[uint32]int{}, Sets: map[uint32]config.PortSet{}, unlisted: map[uint32]bool{}, Ifaces: map[uint32]wire.InterfaceAddr{}, interfaceLists: map[uint32]config.Interfaces{},
		Draft: numbers, Tables: s.Config.Tables, Resolved: s,
		Names: names{map[uint32]string{}, map[uint32]string{}, map[uint32][]uint32{}, map[uint32]string{}, map[uint32]string{}, map[uint32]bool{}, map[uint32]config.Log{}},
	}}
	for i := range c.lists {
		c.lists[i] = map[netip.Prefix]uint64{}
	}
	return c
}

// markOwned marks the addresses owned by the gateway. Packets to an owned address without a listener
// are refused. If another datapath has listeners on the address, that datapath refuses them.
// Addresses of the host and of local routes are excluded, because the programs cannot distinguish
// them from addresses without a route.
func (c *compiler) markOwned() error {
	near := func(a netip.Addr) bool { return containsAddress(c.host.Networks, a) }
	list := datapath.OwnedAddresses(c.snapshot, near)
	var local []netip.Prefix
	if len(list) > 0 {
		var err error
		if local, err = c.host.Ask.Local(); err != nil {
			return err
		}
	}
	for _, o := range list {
		if o.Shared || containsAddress(local, o.Address) {
			continue
		}
		bits := uint64(wire.ServedOwned)
		switch o.Answer {
		case config.WhenDownReset:
			bits |= wire.ServedReset
		case config.WhenDownReject:
			bits |= wire.ServedReject
		}
		if o.Bound {
			bits |= wire.ServedBound
		}
		c.lists[wire.ListServed][netip.PrefixFrom(o.Address, o.Address.BitLen())] |= bits
		c.Switches.Owned = true
	}
	for _, r := range datapath.BackupPools(c.snapshot) {
		for a := r.First; r.Contains(a); a = a.Next() {
			if !near(a) && !c.host.Owns(a) {
				c.lists[wire.ListServed][netip.PrefixFrom(a, a.BitLen())] |= uint64(wire.ServedOwned)
				c.Switches.Owned = true
			}
		}
	}
	return nil
}

func containsAddress(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (c *compiler) finish() {
	for list := range c.lists {
		c.writePrefixList(uint32(list))
	}
	c.split()
	withoutTransmit := c.host.WithoutTransmit(c.snapshot.Config)
	for _, i := range c.host.Interfaces {
		v := wire.InterfaceAddr{Mtu: uint32(i.MTU)}
		if !slices.ContainsFunc(withoutTransmit, func(x netdev.Interface) bool { return x.Index == i.Index }) {
			v.Flags = wire.InterfaceXDP
		}
		copy(v.Mac[:], i.MAC)
		for n, list := range c.interfaceLists {
			if list.Has(i.Name) {
				v.Lists |= 1 << n
			}
		}
		v.V4, v.V6 = c.host.errorSource(i.Index)
		c.Ifaces[uint32(i.Index)] = v
	}
	c.setErrorSources()
	s, t := &c.Switches, c.snapshot.Config.Timeouts
	s.LowestIPv6MTU = uint32(c.snapshot.Config.LowestIPv6MTU)
	s.Errors = uint32(cmp.Or(c.snapshot.Config.ICMPErrorsPerSecond, 1000))
	if c.snapshot.Config.ICMPErrors == config.SwitchOff {
		s.Errors = 0
	}
	s.Paired = c.host.Paired(c.snapshot.Config)
	s.XDP, s.TC, s.Bare = c.host.Programs(c.snapshot.Config)
	s.Services = len(c.Services) > 0
	s.Reverse = len(c.Reverses) > 0
	s.Ranges, s.IfaceListeners = len(c.Ranges) > 0, len(c.IfaceListeners) > 0
	for k := range c.Ranges {
		s.Any = s.Any || k.Key.L4Proto == 0
	}
	for k := range c.Listeners {
		s.Any = s.Any || k.L4Proto == 0
	}
	s.LocalPortLast = c.host.LocalPortLast
	c.Directs = slices.DeleteFunc(c.Directs, c.sharesPool)
	s.Direct = len(c.Directs) > 0
	for _, w := range c.Services {
		s.MACKeys = s.MACKeys || w.Flags&wire.ServiceMACKeys != 0
		s.Edits = s.Edits || w.Flags&(wire.ServiceMSSClamp|wire.ServiceTOA|wire.ServiceProxy) != 0
		s.Cookies = s.Cookies || w.Flags&wire.ServiceCookies != 0
		s.Resets = s.Resets || w.ResetNs != 0
		s.Forwards = s.Forwards || w.Flags&wire.ServicePortForward != 0
		s.Persistence = s.Persistence || w.StickyKeys != 0
		s.Rates = s.Rates || w.ClientRateNs|w.LogNs != 0
	}
	s.Cookies = s.Cookies || c.state.Spliced&wire.SplicedCookie != 0
	s.Edits = s.Edits || c.state.Spliced&(wire.SplicedCookie|wire.SplicedProxy) != 0
	s.Edits = s.Edits || s.Cookies
	s.FamilyChange = c.state.Spliced&wire.SplicedFamilies != 0 || slices.ContainsFunc(c.snapshot.Services, changesFamily)
	s.NAT = len(c.Rules) > 0
	s.Forwards = s.Forwards && s.NAT
	s.Mappings = len(c.Mappable) > 0
	for _, r := range c.Rules {
		s.ByEgress = s.ByEgress || r.PrefixLen == 0 // packets to this host are left alone
		s.CrossByEgress = s.CrossByEgress || r.PrefixLen != 0 && r.Out != 0
		s.Edits = s.Edits || r.Flags&wire.NATMSSClamp != 0
		s.Rates = s.Rates || r.RateNs != 0
	}
	for _, p := range c.Prefixes {
		kind := p.Kind
		s.Prefixes = s.Prefixes || kind != wire.PrefixNAT64
		s.Crossing = s.Crossing || kind == wire.PrefixSIIT || kind == wire.PrefixEAM
		s.FamilyChange = s.FamilyChange || kind == wire.PrefixSIIT || kind == wire.PrefixEAM || kind == wire.PrefixNAT64
		switch kind {
		case wire.PrefixSIIT, wire.PrefixEAM:
			s.CrossByEgress = s.CrossByEgress || p.In != 0 || p.Out != 0
		default:
			s.ByEgress = s.ByEgress || p.Out != 0
		}
		s.Edits = s.Edits || p.Clamp != 0
	}
	s.Pools = len(c.Pools) > len(c.unlisted)
	s.Denied = len(c.Denied) > 0
	if c.state.AllOn {
		s.AllOn()
	}
	s.Rules = len(c.Firewall) > 0
	s.RuleCount = uint32(len(c.Firewall))
	s.Established = c.ticks(t.TCPEstablished, 2*time.Hour+4*time.Minute)
	s.Transitory = c.ticks(t.TCPTransitory, 4*time.Minute)
	s.UDP = c.ticks(t.UDP, 5*time.Minute)
	s.ICMP = c.ticks(t.ICMP, time.Minute)
	s.Other = c.ticks(t.Other, 10*time.Minute)
	s.Hold = min(c.ticks(config.Duration(holdTime), holdTime), s.UDP)
	s.HalfOpen = c.state.HalfOpen
}

// changesFamily reports whether a service has clients of one family and backends of the other.
func changesFamily(s datapath.Service) bool {
	return s.Mode == config.ModeFullNAT && slices.ContainsFunc(s.Listen, func(l config.Listen) bool {
		return slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.Address.Is4() != l.Address.Is4() })
	})
}

// holdTime is the hold-down of a released port (RFC 6888 REQ-8). The UDP timeout limits it, so that
// a short timeout also shortens the hold-down.
const holdTime = 120 * time.Second

func (c *compiler) ticks(d config.Duration, def time.Duration) uint32 {
	v := d.D()
	if v == 0 {
		v = def
	}
	return max(uint32(v.Seconds()*float64(c.state.HZ)), 1)
}

// set returns the bit of a named prefix list and allocates one if needed.
func (c *compiler) set(name string, prefixes []netip.Prefix) (uint64, error) {
	id, err := c.Draft.ID(ids.Set, name, MaxSets, nil)
	if err != nil {
		return 0, err
	}
	for _, p := range prefixes {
		c.lists[wire.ListSets][p.Masked()] |= 1 << id
	}
	return 1 << id, nil
}

// writePrefixList writes a prefix list. Each prefix also gets the bits of all covering prefixes.
func (c *compiler) writePrefixList(list uint32) {
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
		k := wire.MemberKey{PrefixLen: 32 + uint32(p.Bits()), List: list | uint32(wire.FamilyOf(p.Addr()))<<8, Addr: wire.BytesOf(p.Addr())}
		c.Members[k] = bits
	}
}

// split moves single addresses to the hash map while it has room. It records which lists use the
// hash map and which the trie.
func (c *compiler) split() {
	for k, bits := range c.Members {
		full := uint32(32 + 128)
		if k.List>>8&0xff == wire.Family4 {
			full = 32 + 32
		}
		if k.PrefixLen == full && uint32(len(c.Hosts)) < c.state.Hosts {
			c.Hosts[wire.HostKey{List: k.List, Addr: k.Addr}] = bits
			delete(c.Members, k)
			c.Switches.HostLists |= 1 << (k.List & 0xff)
		} else {
			c.Switches.TrieLists |= 1 << (k.List & 0xff)
		}
	}
}
