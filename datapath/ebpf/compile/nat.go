// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

const MaxBlocks = len(wire.BlockMap{}.Words) * 64 // of a pool address

var filterings = map[config.Behaviour]uint8{
	"": wire.FilteringEndpointIndependent, config.EndpointIndependent: wire.FilteringEndpointIndependent,
	config.AddressDependent:        wire.FilteringAddress,
	config.AddressAndPortDependent: wire.FilteringAddressPort,
}

func (c *compiler) nat(n *config.NATRule) error {
	switch n.Type {
	case config.NATSNAT, config.NATMasquerade, config.NATNAT64:
		return c.sources(n)
	case config.NATPortForward:
		return c.portForward(n)
	case config.NATStatic, config.NATNPT66:
		return c.prefixPair(n)
	case config.NATSIIT:
		return c.siit(n)
	}
	return fmt.Errorf("%s is not available in the ebpf datapath", n.Type)
}

// absent is the index of an interface that is not there: the kernel's are positive ints, and
// the programs have NO_ENTRY for packets that leave by none.
const absent = 1 << 31

// maxLists is how many lists of interfaces there may be: bits of interface_addr.lists.
const maxLists = 64

// interfaces returns what stands for the interfaces of a rule: the index of a single one, 0 for every
// one, or the number of a list.
func (c *compiler) interfaces(which config.Interfaces) (uint32, error) {
	if !which.Several() {
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

// resolve lists the names of the interfaces that are meant: those that are there, and those that
// are to come as they are written. What waits is counted.
func (c *compiler) resolve(which config.Interfaces) (names []string) {
	if !which.Several() {
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
	return absent
}

// sources compiles a rule that translates sources. Of masquerade one with several interfaces is a
// rule for each: what leaves by it has its address.
func (c *compiler) sources(n *config.NATRule) error {
	switch {
	case n.Type == config.NATNAT64:
		_, err := c.source(n, n.Name, n.Pool, 0)
		return err
	case n.Type == config.NATSNAT:
		_, err := c.source(n, n.Name, n.To.Addresses, 0)
		return err
	case !n.Out.Several():
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
// endpoint for each address that the interface's routes lead to: where the packets for a second
// network, or of a second prefix, leave with another address, that is a rule of its own before the
// one for all others. So the modem at 192.168.100.1 is asked from an address that it can answer.
func (c *compiler) masquerade(n *config.NATRule, key string) error {
	index := 0
	if i, ok := c.host.ByName(string(n.Out)); ok {
		index = i.Index
	}
	var pool []config.AddressRange
	var parts []choice
	for _, v6 := range []bool{false, true} {
		if list := c.host.choices(index, v6, c.given); len(list) > 0 {
			pool = append(pool, config.AddressRange{First: list[0].Addr, Last: list[0].Addr})
			for _, o := range list { // one that was a part may have flows
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
	// Also those that nothing goes to now: their flows go on when the routes choose another.
	for _, o := range parts {
		if len(c.Rules) >= wire.MaxNATRules/2 { // rules of the configuration go first
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
			c.towards(id, p, sub)
		}
	}
	c.Order = append(c.Order, id)
	return nil
}

// towards notes which rule of a masquerade rule's translates what goes to a prefix.
func (c *compiler) towards(group uint32, p netip.Prefix, id uint32) {
	c.Members[wire.MemberKey{PrefixLen: 32 + uint32(p.Bits()), List: wire.ListTowards | uint32(wire.FamilyOf(p.Addr()))<<8 | group<<16,
		Addr: wire.BytesOf(p.Masked().Addr())}] = uint64(id) + 1
}

// given reports whether the configuration gives an address to a listener or a pool. One that a
// listener follows is the interface's, which has it for its own packets too.
func (c *compiler) given(a netip.Addr) bool {
	within := func(r config.AddressRange) bool { return r.Contains(a) }
	for _, s := range c.asked.Services {
		if slices.ContainsFunc(s.Listen, func(l config.Listen) bool { return l.Address == a }) || slices.ContainsFunc(s.SourcePool, within) {
			return true
		}
	}
	for _, n := range c.asked.NAT {
		if n.Listen != nil && n.Listen.Address == a || n.External.IsValid() && n.External.Contains(a) ||
			slices.ContainsFunc(n.To.Addresses, within) || slices.ContainsFunc(n.Pool, within) {
			return true
		}
	}
	return false
}

// partKey is what the part of a masquerade rule for an address is known by.
func partKey(key string, a netip.Addr) string { return key + "\x00" + a.String() }

// numberName is what the number of a rule is known by.
func numberName(n *config.NATRule, key string) string { return key + geometry(portsOf(n), n.PortBlock) }

// portsOf are those that a rule gives out.
func portsOf(n *config.NATRule) config.PortSet {
	if len(n.Ports) > 0 {
		return n.Ports
	}
	return config.PortSet{config.DefaultPorts(n.PortBlock)}
}

// source compiles such a rule with the interfaces that it leaves by as one, or with one address.
// key is what it is known by to its flows; group is the id + 1 of the masquerade rule of which it
// is the part for some destinations.
func (c *compiler) source(n *config.NATRule, key string, pool []config.AddressRange, group uint32) (id uint32, err error) {
	ports := portsOf(n)
	id, err = c.Draft.ID(ids.Source, numberName(n, key), wire.MaxNATRules, nil)
	if err != nil {
		return 0, fmt.Errorf("%w; those of before count while they are in force or their flows end: take these out first", err)
	}
	w := wire.NatRule{Active: 1, MaxPorts: uint32(n.PortsPerClient), MaxFlows: uint32(n.ConnectionsPerClient),
		Block: uint16(n.PortBlock), Filtering: filterings[n.Filtering], PortFirst: ports.Span().First, PortLast: ports.Span().Last}
	w.RateNs, w.BurstNs = rateWords(n.NewConnectionsPerClient)
	if n.Mapping == config.AddressAndPortDependent {
		w.Flags |= wire.NATMapRemote
		if w.Filtering == wire.FilteringEndpointIndependent {
			w.Filtering = wire.FilteringAddressPort // a mapping for one remote endpoint lets in that one
		}
	}
	if n.Hairpin != config.SwitchOff && len(n.Source)+len(n.In) > 0 { // else every address would be inside
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
	if n.Type == config.NATNAT64 {
		w.Prefix, w.PrefixLen = wire.AddrOf(n.Prefix.Masked().Addr()), uint8(n.Prefix.Bits())
		// Not the rule's own: several may share a prefix, and the source decides.
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

// sourcesOf lists the sources of a rule, with so many pool addresses of either family. What a
// masquerade rule names leaves with an address of the interface or not at all (no-address), and
// without names that is IPv4. part: others go by another rule.
func sourcesOf(n *config.NATRule, count [2]uint16, part bool) (list []netip.Prefix) {
	drops := n.Type == config.NATMasquerade && !part
	if len(n.Source) == 0 {
		if (count[0] > 0 || drops) && n.Type != config.NATNAT64 {
			list = append(list, netip.PrefixFrom(netip.IPv4Unspecified(), 0))
		}
		if count[1] > 0 || n.Type == config.NATNAT64 {
			list = append(list, netip.PrefixFrom(netip.IPv6Unspecified(), 0))
		}
	}
	for _, p := range n.Source {
		if n.Type == config.NATNAT64 || drops || count[familyIndex(p.Addr())] > 0 {
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

// blocks checks that the blocks of a rule have room in the tables, and enters the
// places of inside addresses from which deterministic ones are computed.
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

// forwardService is the service with one backend that a port-forward is.
func forwardService(n *config.NATRule) *datapath.Service {
	s := &datapath.Service{State: []datapath.State{datapath.Up}, Service: &config.Service{
		Name: n.Name, Listen: []config.Listen{*n.Listen}, Protocol: n.Protocol, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
		MSSClamp: n.MSSClamp, Hairpin: n.Hairpin,
		Backends: []config.Backend{{Name: n.To.Address.String(), Address: n.To.Address, Port: n.To.Port, Weight: 1, Priority: 1}},
	}}
	if _, ranged := n.Range(); ranged && n.To.Port != 0 { // see Shift; another port is another server
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
		c.turning = append(c.turning, id)
	}
	c.replies(id, s.Service)
	if w.Shift = n.Shift(); w.Shift != 0 {
		k := wire.ListenerKey{L4Proto: uint8(n.Protocol), Family: wire.FamilyOf(n.To.Address), Addr: wire.BytesOf(n.To.Address)}
		v := c.Reverses[k]
		v.Port = wire.PortOf(-w.Shift)
		c.Reverses[k] = v
	}
	if n.Crosses() {
		c.crosses[id] = n
	}
	c.Services[id] = w
	return c.listens(id, s.Service)
}

// crossing enters the nat64 rules of port-forwards to IPv6 hosts that listen at IPv4 addresses.
func (c *compiler) crossing() error {
	for id, n := range c.crosses {
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

// prefixRule numbers a rule without state, enters its exceptions and returns what
// its prefixes have in common.
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

// putPrefix enters one mapping. Two rules cannot translate the same prefix.
func (c *compiler) putPrefix(k wire.PrefixKey, p netip.Prefix, w wire.Prefix) error {
	if old, taken := c.Prefixes[k]; taken && (old.Rule != w.Rule || old.Kind != w.Kind) {
		return fmt.Errorf("prefix %s is translated by another rule already", p)
	}
	c.Prefixes[k] = w
	return nil
}

// prefixPair compiles a static (1:1) or npt66 rule: both directions.
func (c *compiler) prefixPair(n *config.NATRule) error {
	w, err := c.prefixRule(n)
	if err != nil {
		return err
	}
	w.Kind = wire.PrefixStatic
	if n.Type == config.NATNPT66 {
		w.Kind = wire.PrefixNPT66
	}
	put := func(role uint8, from, to netip.Prefix) error {
		v := w
		v.To, v.Len, v.ToLen, v.Adjust = wire.AddrOf(to.Addr()), uint8(from.Bits()), uint8(to.Bits()), adjustment(from, to)
		return c.putPrefix(prefixKey(role, from), from, v)
	}
	in, out := n.Internal.Masked(), n.External.Masked()
	if err := put(wire.RoleSource, in, out); err != nil {
		return err
	}
	return put(wire.RoleDest, out, in)
}

// adjustment is what RFC 6296 adds to one word so that an address keeps its sum:
// sum(from) - sum(to), in the machine's reading of wire words.
func adjustment(from, to netip.Prefix) uint16 {
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
