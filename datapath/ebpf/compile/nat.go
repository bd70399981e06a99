// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

const MaxBlocks = len(wire.BlockMap{}.Words) * 64 // port blocks of one pool address

var filterings = map[config.Behaviour]uint8{
	"": wire.FilteringEndpointIndependent, config.EndpointIndependent: wire.FilteringEndpointIndependent,
	config.AddressDependent:        wire.FilteringAddress,
	config.AddressAndPortDependent: wire.FilteringAddressPort,
}

func (c *compiler) nat(n *config.NATRule) error {
	switch {
	case n.Type.HasBindings():
		return c.sources(n)
	case n.Type.Forwards():
		return c.portForward(n)
	case n.Type.OneToOne():
		return c.prefixPair(n)
	case n.Type.CrossesStateless():
		return c.siit(n)
	}
	return fmt.Errorf("%s is not available in the ebpf datapath", n.Type)
}

// missingInterface is the index of a missing interface. Indexes in the kernel are positive ints, and NO_ENTRY
// in the programs means a packet without an egress interface.
const missingInterface = 1 << 31

// maxLists limits the lists of interfaces. Each takes a bit of interface_addr.lists.
const maxLists = 64

// interfaces returns the encoded interfaces of a rule: an index, 0 for every interface, or the id
// of a list.
func (c *compiler) interfaces(which config.Interfaces) (uint32, error) {
	if !which.MatchesSeveral() {
		return c.iface(string(which)), nil
	}
	id, err := c.Draft.ID(ids.List, string(which), maxLists, nil)
	if err != nil {
		return 0, err
	}
	c.interfaceLists[id] = which
	c.resolve(which)
	return wire.InterfaceList | id, nil
}

// resolve lists the names of the matching interfaces. A name without an interface is returned
// unchanged and counted in Waiting.
func (c *compiler) resolve(which config.Interfaces) (names []string) {
	if !which.MatchesSeveral() {
		return []string{string(which)}
	}
	for _, w := range which.Words() {
		there := c.host.Named(config.Interfaces(w))
		for _, i := range there {
			if !slices.Contains(names, i.Name) {
				names = append(names, i.Name)
			}
		}
		if len(there) == 0 {
			names = append(names, w)
			c.Waiting++
		}
	}
	return names
}

// iface returns the index of an interface, 0 for none.
func (c *compiler) iface(name string) uint32 {
	if name == "" {
		return 0
	}
	if i, ok := c.host.ByName(name); ok {
		return uint32(i.Index)
	}
	c.Waiting++
	return missingInterface
}

// sources compiles a rule that translates sources. A masquerade rule with several interfaces
// becomes one rule per interface, with that interface's address.
func (c *compiler) sources(n *config.NATRule) error {
	switch {
	case n.Type.CrossesStateful():
		_, err := c.source(n, n.Name, n.Pool, 0)
		return err
	case n.Type == config.NATSNAT:
		_, err := c.source(n, n.Name, n.To.Addresses, 0)
		return err
	case !n.Out.MatchesSeveral():
		return c.masquerade(n, n.Name)
	}
	for _, name := range c.resolve(n.Out) {
		one := *n
		one.Out = config.Interfaces(name)
		if err := c.masquerade(&one, n.Name+"\x00"+name); err != nil {
			return err
		}
	}
	return nil
}

// masquerade compiles a masquerade rule with one interface. An inside endpoint has one outside
// endpoint for each source address that the interface's routes use. A destination network or prefix
// with its own source address gets a separate rule, in front of the default rule. For example, the
// modem at 192.168.100.1 is reached from an address that it can reply to.
func (c *compiler) masquerade(n *config.NATRule, key string) error {
	index := 0
	if i, ok := c.host.ByName(string(n.Out)); ok {
		index = i.Index
	}
	var pool []config.AddressRange
	var parts []choice
	for _, v6 := range []bool{false, true} {
		if list := c.host.choices(index, v6, c.isAssigned); len(list) > 0 {
			pool = append(pool, config.AddressRange{First: list[0].Addr, Last: list[0].Addr})
			for _, o := range list { // an address that was a separate rule may have flows
				if len(list) > 1 || c.Draft.Known(ids.Source, numberName(n, partKey(key, o.Addr))) {
					parts = append(parts, o)
				}
			}
		}
	}
	if len(pool) == 0 {
		c.Waiting++
	}
	id, err := c.source(n, key, pool, 0)
	if err != nil {
		return err
	}
	c.Order = c.Order[:len(c.Order)-1]
	// Rules without destinations are included: their flows stay valid when routes change.
	for _, o := range parts {
		if len(c.Rules) >= wire.MaxNATRules/2 { // rules of the configuration have priority
			break
		}
		one := *n
		one.Hairpin, one.PCP = config.SwitchOff, false
		sub, err := c.source(&one, partKey(key, o.Addr), []config.AddressRange{{First: o.Addr, Last: o.Addr}}, id+1)
		if err != nil {
			return err
		}
		if slices.Contains(pool, config.AddressRange{First: o.Addr, Last: o.Addr}) {
			sub = id
		}
		for _, p := range o.towards {
			c.addMasquerade(id, p, sub)
		}
	}
	c.Order = append(c.Order, id)
	return nil
}

// addMasquerade records which rule of a masquerade group translates packets to a prefix.
func (c *compiler) addMasquerade(group uint32, p netip.Prefix, id uint32) {
	c.Members[wire.MemberKey{PrefixLen: 32 + uint32(p.Bits()), List: wire.ListTowards | uint32(wire.FamilyOf(p.Addr()))<<8 | group<<16,
		Addr: wire.BytesOf(p.Masked().Addr())}] = uint64(id) + 1
}

// isAssigned reports whether the configuration assigns an address to a listener or a pool. An address
// that a listener takes from its interface does not count, because the interface uses it, too.
func (c *compiler) isAssigned(a netip.Addr) bool {
	within := func(r config.AddressRange) bool { return r.Contains(a) }
	for _, s := range c.unresolved.Services {
		if slices.ContainsFunc(s.Listen, func(l config.Listen) bool { return l.Address == a }) || slices.ContainsFunc(s.SourcePool, within) {
			return true
		}
	}
	for _, n := range c.unresolved.NAT {
		if n.Listen != nil && n.Listen.Address == a || n.External.IsValid() && n.External.Contains(a) ||
			slices.ContainsFunc(n.To.Addresses, within) || slices.ContainsFunc(n.Pool, within) {
			return true
		}
	}
	return false
}

// partKey returns the key of the part of a masquerade rule that uses address a.
func partKey(key string, a netip.Addr) string { return key + "\x00" + a.String() }

// numberName returns the name under which a rule's id is allocated.
func numberName(n *config.NATRule, key string) string { return key + geometry(portsOf(n), n.PortBlock) }

// portsOf returns the ports that a rule allocates from.
func portsOf(n *config.NATRule) config.PortSet {
	if len(n.Ports) > 0 {
		return n.Ports
	}
	return config.PortSet{config.DefaultPorts(n.PortBlock)}
}

// source compiles a rule that translates sources, with one interface or list, and one pool. key
// identifies the rule across changes, so that flows keep their id. group is the id + 1 of the
// masquerade rule if this rule serves only some of its destinations, else 0.
func (c *compiler) source(n *config.NATRule, key string, pool []config.AddressRange, group uint32) (id uint32, err error) {
	ports := portsOf(n)
	id, err = c.Draft.ID(ids.Source, numberName(n, key), wire.MaxNATRules, nil)
	if err != nil {
		return 0, fmt.Errorf("%w; previous ones count while they are in force or their flows end: remove these first", err)
	}
	w := wire.NatRule{Active: 1, MaxPorts: uint32(n.PortsPerClient), MaxFlows: uint32(n.ConnectionsPerClient),
		Block: uint16(n.PortBlock), Filtering: filterings[n.Filtering], PortFirst: ports.Span().First, PortLast: ports.Span().Last}
	w.RateNs, w.BurstNs = rateWords(n.NewConnectionsPerClient)
	if n.Mapping == config.AddressAndPortDependent {
		w.Flags |= wire.NATMapRemote
		if w.Filtering == wire.FilteringEndpointIndependent {
			w.Filtering = wire.FilteringAddressPort // a mapping for one remote endpoint accepts packets from that endpoint only
		}
	}
	if n.Hairpin != config.SwitchOff && len(n.Source)+len(n.In) > 0 { // without a source or interface every address would be inside
		w.Flags |= wire.NATHairpin
	}
	if n.MSSClamp {
		w.Flags |= wire.NATMSSClamp
	}
	if n.Unreachable == "prohibited" {
		w.Flags |= wire.NATProhibited
	}
	if w.Out, err = c.interfaces(n.Out); err != nil {
		return 0, err
	}
	if w.In, err = c.interfaces(n.In); err != nil {
		return 0, err
	}
	w.Group = uint8(group)
	if n.Type.CrossesStateful() {
		w.Prefix, w.PrefixLen = wire.AddrOf(n.Prefix.Masked().Addr()), uint8(n.Prefix.Bits())
		// The entry has no rule id: several rules may share a prefix, and the source selects one.
		c.Prefixes[prefixKey(wire.RoleCrossing, n.Prefix)] = wire.Prefix{Kind: wire.PrefixNAT64,
			Embed: w.Prefix, EmbedLen: w.PrefixLen, Len: w.PrefixLen}
	}
	first, count, err := c.poolRun(pool, ports, n.PortBlock)
	if err != nil {
		return 0, err
	}
	if err := c.blocks(id, n, ports, &w); err != nil {
		return 0, err
	}
	w.Pool, w.Pool6, w.PoolLen, w.Pool6Len = first[0], first[1], count[0], count[1]
	for _, p := range sourcesOf(n, count, group > 0) {
		c.lists[wire.ListSources][p.Masked()] |= 1 << id
	}
	for _, p := range n.Except {
		c.lists[wire.ListExcept][p.Masked()] |= 1 << id
	}
	c.Names.Source[id] = n.Name
	c.Rules[id] = w
	c.Order = append(c.Order, id)
	if n.PCP {
		c.Mappable[id] = n
	}
	return id, nil
}

// sourcesOf lists the source prefixes of a rule; count is its number of pool addresses per family.
// A masquerade rule without an address drops packets of its sources (no-address). Without
// configured sources this applies to IPv4 only. part: other rules of the group have the remaining
// sources.
func sourcesOf(n *config.NATRule, count [2]uint16, part bool) (list []netip.Prefix) {
	drops := n.Type.UsesInterfaceAddress() && !part
	if len(n.Source) == 0 {
		if (count[0] > 0 || drops) && !n.Type.CrossesStateful() {
			list = append(list, netip.PrefixFrom(netip.IPv4Unspecified(), 0))
		}
		if count[1] > 0 || n.Type.CrossesStateful() {
			list = append(list, netip.PrefixFrom(netip.IPv6Unspecified(), 0))
		}
	}
	for _, p := range n.Source {
		if n.Type.CrossesStateful() || drops || count[familyIndex(p.Addr())] > 0 {
			list = append(list, p)
		}
	}
	return list
}

func familyIndex(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// blocks checks that the tables have room for the port blocks of a rule. For deterministic blocks
// it writes the position of each source prefix, from which the programs compute a block.
func (c *compiler) blocks(id uint32, n *config.NATRule, ports config.PortSet, w *wire.NatRule) error {
	if n.PortBlock == 0 {
		return nil
	}
	c.Switches.Blocks = true
	if per := ports.Len() / n.PortBlock; per > MaxBlocks {
		return fmt.Errorf("port-block %d: %d blocks of an address are more than %d; make them larger", n.PortBlock, per, MaxBlocks)
	}
	if !n.Deterministic {
		return nil
	}
	w.Flags |= wire.NATDeterministic
	place := uint64(0)
	for _, p := range n.Source {
		host := min(p.Addr().BitLen()-p.Bits(), 32)
		c.Members[wire.MemberKey{PrefixLen: 32 + uint32(p.Bits()), List: wire.ListBlocks | uint32(wire.FamilyOf(p.Addr()))<<8 | id<<16,
			Addr: wire.BytesOf(p.Masked().Addr())}] = 1<<63 | place<<8 | uint64(host)
		place += 1 << host
	}
	return nil
}

// forwardService returns a port-forward as a service with one backend.
func forwardService(n *config.NATRule) *datapath.Service {
	s := &datapath.Service{State: []datapath.State{datapath.Up}, Service: &config.Service{
		Name: n.Name, Listen: []config.Listen{*n.Listen}, Protocol: n.Protocol, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
		MSSClamp: n.MSSClamp, Hairpin: n.Hairpin,
		Backends: []config.Backend{{Name: n.To.Address.String(), Address: n.To.Address, Port: n.To.Port, Weight: 1, Priority: 1}},
	}}
	if _, ranged := n.Range(); ranged && n.To.Port != 0 { // see Shift; another port is another backend
		s.Backends[0].Name, s.Backends[0].Port = netip.AddrPortFrom(n.To.Address, n.To.Port).String(), 0
	}
	return s
}

// portForward compiles a port-forward as a service with one backend.
func (c *compiler) portForward(n *config.NATRule) error {
	s := forwardService(n)
	if n.In != "" {
		l := s.Listen[0]
		s.Listen = nil
		for _, l.Interface = range c.resolve(n.In) {
			s.Listen = append(s.Listen, l)
		}
	}
	id, err := c.Draft.ID(ids.Service, "\x01"+n.Name, wire.MaxServices, nil)
	if err != nil {
		return err
	}
	w, err := c.serviceWords(s.Service)
	if err != nil {
		return err
	}
	if n.Hairpin != config.SwitchOff {
		w.Flags |= wire.ServicePortForward
	}
	if c.snapshot.Arriving["nat "+n.Name] {
		w.Flags |= wire.ServiceArrives
	}
	c.Names.Service[id] = n.Name
	c.Names.PortForward[id] = true
	if err := c.serviceBackends(id, s); err != nil {
		return err
	}
	if datapath.Turns(s.Service) && !n.Crosses() {
		c.hairpins = append(c.hairpins, id)
	}
	w.Shift = n.Shift()
	c.replies(id, s.Service, w.Shift)
	if w.Shift != 0 {
		k := wire.ListenerKey{L4Proto: uint8(n.Protocol), Family: wire.FamilyOf(n.To.Address), Addr: wire.BytesOf(n.To.Address)}
		v := c.Reverses[k]
		v.Port = wire.PortOf(-w.Shift)
		c.Reverses[k] = v
	}
	if n.Crosses() {
		c.crossFamily[id] = n
	}
	c.Services[id] = w
	return c.putListeners(id, s.Service)
}

// setNAT64Forwards sets the nat64 rules of port-forwards from IPv4 listeners to IPv6 hosts.
func (c *compiler) setNAT64Forwards() error {
	for id, n := range c.crossFamily {
		by := n.Translator(c.snapshot.NAT)
		if by == nil {
			return fmt.Errorf("nat %s: %s is IPv6, and no nat64 rule of the ebpf datapath translates for it", n.Name, n.To.Address)
		}
		for rule, name := range c.Names.Source {
			if w := c.Services[id]; name == by.Name {
				w.NatRule = uint16(rule)
				c.Services[id] = w
			}
		}
	}
	return nil
}

func prefixKey(role uint8, p netip.Prefix) wire.PrefixKey {
	return wire.PrefixKey{PrefixLen: 32 + uint32(p.Bits()), Role: role, Family: wire.FamilyOf(p.Addr()), Addr: wire.BytesOf(p.Masked().Addr())}
}

// prefixRule allocates the id of a stateless rule, writes its exceptions, and returns the fields
// common to its prefixes.
func (c *compiler) prefixRule(n *config.NATRule) (w wire.Prefix, err error) {
	id, err := c.Draft.ID(ids.Prefix, n.Name, 1<<16-1, nil)
	if err != nil {
		return w, err
	}
	c.Names.Prefix[id] = n.Name
	w.Rule = uint16(id)
	if w.In, err = c.interfaces(n.In); err != nil {
		return w, err
	}
	if w.Out, err = c.interfaces(n.Out); err != nil {
		return w, err
	}
	if n.MSSClamp {
		w.Clamp = 1
	}
	for _, p := range n.Except {
		w.Except = 1
		c.Members[wire.MemberKey{PrefixLen: 32 + uint32(p.Bits()), List: wire.ListPrefix | uint32(wire.FamilyOf(p.Addr()))<<8 | id<<16,
			Addr: wire.BytesOf(p.Masked().Addr())}] = 1
	}
	return w, nil
}

// putPrefix adds one mapping. Two rules cannot translate the same prefix.
func (c *compiler) putPrefix(k wire.PrefixKey, p netip.Prefix, w wire.Prefix) error {
	if old, taken := c.Prefixes[k]; taken && (old.Rule != w.Rule || old.Kind != w.Kind) {
		return fmt.Errorf("prefix %s is already translated by another rule", p)
	}
	c.Prefixes[k] = w
	return nil
}

// prefixPair compiles both directions of a static (1:1) or npt66 rule.
func (c *compiler) prefixPair(n *config.NATRule) error {
	w, err := c.prefixRule(n)
	if err != nil {
		return err
	}
	w.Kind = wire.PrefixStatic
	if n.Type.ChecksumNeutral() {
		w.Kind = wire.PrefixNPT66
	}
	put := func(role uint8, from, to netip.Prefix) error {
		v := w
		v.To, v.Len, v.ToLen, v.Adjust = wire.AddrOf(to.Addr()), uint8(from.Bits()), uint8(to.Bits()), checksumAdjustment(from, to)
		return c.putPrefix(prefixKey(role, from), from, v)
	}
	in, out := n.Internal.Masked(), n.External.Masked()
	if err := put(wire.RoleSource, in, out); err != nil {
		return err
	}
	return put(wire.RoleDest, out, in)
}

// checksumAdjustment returns the value added to one address word so that the checksum stays unchanged (RFC
// 6296): sum(from) - sum(to), with wire words read in host byte order.
func checksumAdjustment(from, to netip.Prefix) uint16 {
	sum := func(a netip.Addr) (s uint32) {
		b := wire.BytesOf(a)
		for i := 0; i < 16; i += 2 {
			s += uint32(binary.NativeEndian.Uint16(b[i:]))
		}
		return s&0xffff + s>>16
	}
	s := sum(from.Addr()) + (0xffff - (sum(to.Addr())&0xffff + sum(to.Addr())>>16))
	s = s&0xffff + s>>16
	return uint16(s&0xffff + s>>16)
}
