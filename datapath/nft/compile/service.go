// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// servicePart is one service in one family and one table.
type servicePart struct {
	*Service
	c      *compiler
	svc    datapath.Service
	family rs.Family // of the packets
	table  rs.Family // of the rules: the same, or netdev
	prefix string    // of the names of chains and sets
	active []int     // Backends of the family that take new flows.
	// plain services have no chains of backends: their slots lead directly to addresses.
	plain bool
	// persist is the active persistence: the configured one, or in mode dsr a substitute for flow
	// state.
	persist *config.Persistence
}

// service compiles one service.
func (c *compiler) service(i int, id uint32) (*Service, error) {
	svc := c.snapshot.Services[i]
	// If an interface has no address of a family, the snapshot lacks the listeners that follow it.
	// Backends of that family would then seem to need a translation between families, so the
	// configured listeners are checked.
	if err := Carries(c.configured.Services[i].Service); err != nil {
		return nil, err
	}
	s := &Service{
		Name: svc.Name, source: *svc.Service, state: slices.Clone(svc.State), weight: svc.Weights, id: id,
		Fragment: &rs.Fragment{Owner: "service " + svc.Name},
		Slots:    make(map[rs.Family][]string),
	}
	svc = c.markUnreached(svc, s)
	for _, f := range []rs.Family{rs.IP, rs.IP6} {
		if !slices.ContainsFunc(svc.Listen, func(l config.Listen) bool { return familyOf(l.Address) == f }) {
			continue
		}
		p := &servicePart{Service: s, c: c, svc: svc, family: f, table: f, prefix: "service/" + identifier(svc.Name), persist: svc.Persistence}
		for _, i := range svc.Active() {
			if familyOf(svc.Backends[i].Address) == f {
				p.active = append(p.active, i)
			}
		}
		if err := p.compile(); err != nil {
			return nil, err
		}
		s.SlotCount += len(s.Slots[f])
	}
	return s, nil
}

// compile chooses the hooks by the mode. Without a usable backend, the service of any mode replies
// in the nat chain, because only there all kinds of replies are possible.
func (p *servicePart) compile() error {
	mode := p.svc.Mode
	if len(p.active) == 0 && (mode == config.ModeDSR || mode == config.ModeStateless) {
		p.addRefusedChain()
		p.chain(p.table, p.prefix, append(p.accessRules(), p.downRules()...)...)
		p.listen(mapServices, rs.Verdict{Code: rs.Goto, Chain: p.prefix})
		return nil
	}
	switch mode {
	case config.ModeDSR:
		return p.dsr()
	case config.ModeStateless:
		return p.stateless()
	}
	return p.dnat()
}

// listen adds the service's listeners to a map, with the verdict v.
func (p *servicePart) listen(name string, v rs.Verdict) {
	for _, l := range p.svc.Listen {
		if familyOf(l.Address) == p.family {
			endpoints(p.Service, p.table, name, endpoint{l.Address, p.svc.Protocol, portsOf(l), l.Interface}, v)
		}
	}
}

// portsOf returns the ports of a listener. No ports mean all ports.
func portsOf(l config.Listen) []flow.Ports {
	if len(l.Ports) == 0 {
		return []flow.Ports{{}}
	}
	return l.Ports
}

// dnat compiles modes dnat and fullnat.
func (p *servicePart) dnat() error {
	p.addRefusedChain()
	p.plain = p.isPlain()
	p.memory()
	var rules []rs.Rule
	rules = append(rules, p.accessRules()...)
	rules = append(rules, p.limits()...)
	if l := p.svc.Log; l != nil {
		rules = append(rules, p.log(l))
	}
	if m := p.svc.Mark; m != 0 {
		p.marks = append(p.marks, m)
		rules = append(rules, rs.NewRule().SetCtMark(m).SetMark(m).Rule(""))
	}
	if p.svc.Helper != "" {
		rules = append(rules, p.c.helpers(p.Service, p.table, p.prefix, p.svc.Helper, p.svc.Protocol)...)
	}
	if len(p.active) == 0 {
		rules = append(rules, p.downRules()...)
	} else {
		rules = append(rules, p.c.assignTimeouts(p.Service, p.table, p.svc.Protocol)...)
		rules = append(rules, p.backendRules()...)
	}
	p.chain(p.table, p.prefix, rules...)
	p.listen(mapServices, rs.Verdict{Code: rs.Goto, Chain: p.prefix})
	p.guard()
	for i, b := range p.svc.Backends {
		if familyOf(b.Address) == p.family && !p.plain {
			p.backend(i, func(r *rs.Builder) *rs.Builder { return r.DNAT(p.family, b.Address, b.Port) })
		}
	}
	if p.svc.MSSClamp {
		p.listenAnywhere(mapClamp, rs.Verdict{})
	}
	if datapath.Turns(p.svc.Service) {
		p.listenAnywhere(mapTurned, rs.Verdict{})
	}
	if p.svc.Mode == config.ModeFullNAT {
		return p.source()
	}
	return nil
}

// backendChain returns the name of the chain of a backend.
func (p *servicePart) backendChain(i int) string { return p.prefix + backendSuffix(p.svc.Backends[i]) }

func backendSuffix(b config.Backend) string {
	name := identifier(backendName(b))
	switch name {
	case "refused", "limits", "guard", "source": // chains of the service itself
		return "/to/" + name
	}
	return "/" + name
}

// IsBackendChain reports whether the chain belongs to a backend of the service.
func IsBackendChain(chain string, s *config.Service, b config.Backend) bool {
	rest := "/" + identifier(s.Name) + backendSuffix(b)
	return chain == "service"+rest || chain == "service6"+rest
}

func backendName(b config.Backend) string {
	if b.Name == "" {
		return b.Address.String()
	}
	return b.Name
}

// backend writes the chain of a backend: limits, memory, marks, a counter of connections, and the
// delivery to the backend.
func (p *servicePart) backend(i int, deliver func(*rs.Builder) *rs.Builder) {
	b := p.svc.Backends[i]
	var rules []rs.Rule
	if limit := smallerLimit(b.MaxConnections, p.svc.Limits.ConnectionsPerBackend); limit > 0 {
		rules = append(rules, rs.NewRule().ConnectionsOver(limit).Goto(p.prefix+"/refused").Rule(""))
	}
	if p.persist != nil {
		rules = append(rules, p.storeBackend(i))
	}
	if m := b.Mark; m != 0 {
		p.marks = append(p.marks, m)
		rules = append(rules, rs.NewRule().SetCtMark(m).SetMark(m).Rule(""))
	}
	rules = append(rules, deliver(rs.NewRule().Counter()).Rule(""))
	p.chain(p.table, p.backendChain(i), rules...)
}

// smallerLimit returns the smaller of two limits, where 0 means no limit.
func smallerLimit(a, b int) int {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// isPlain reports whether backends need no rules of their own. It depends on the configuration and
// not on states, so that the shape of the service's rules is stable.
func (p *servicePart) isPlain() bool {
	if p.persist != nil || len(p.svc.Sessions) > 0 || p.svc.Limits.ConnectionsPerBackend > 0 {
		return false
	}
	ports := make(map[bool]bool)
	for _, b := range p.svc.Backends {
		if b.MaxConnections > 0 || b.Mark != 0 {
			return false
		}
		ports[b.Port != 0] = true
	}
	return len(ports) == 1
}

// source translates the source of fullnat connections after routing.
func (p *servicePart) source() error {
	chain := p.prefix + "/source"
	var pool []config.AddressRange
	for _, r := range p.svc.SourcePool {
		if r.Is4() == (p.family == rs.IP) {
			pool = append(pool, r)
		}
	}
	rule, err := p.c.snat(p.Service, p.table, chain, pool, nil, false)
	if err != nil {
		return err
	}
	p.chain(p.table, chain, rule...)
	p.listen(mapFullNAT, rs.Verdict{Code: rs.Goto, Chain: chain})
	return nil
}

// listenAnywhere is like listen for every interface, because replies arrive at another interface.
func (p *servicePart) listenAnywhere(name string, v rs.Verdict) {
	for _, l := range p.svc.Listen {
		if familyOf(l.Address) == p.family {
			endpoints(p.Service, p.table, name, endpoint{l.Address, p.svc.Protocol, portsOf(l), ""}, v)
		}
	}
}

// maxPortSlots is the number of slots among which the ranges of ports are distributed.
const maxPortSlots = 4096

// portSlots makes the map from slots to chains of port ranges, and returns its name and the
// selector of a slot: in turn or random. The number of slots of a range is proportional to its
// number of ports.
func (s *Service) portSlots(f rs.Family, chain string, ports config.PortSet, random bool) (string, rs.Selector) {
	set := rs.ID{Table: f, Name: chain + "/ports"}
	s.Fragment.Sets = append(s.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{rs.Mark}, Verdicts: true})
	unit := ports[0].Len()
	for _, r := range ports {
		for a := r.Len(); a != 0; {
			unit, a = a, unit%a
		}
	}
	unit = max(unit, ports.Len()/maxPortSlots)
	share := make([]int, len(ports))
	for i, r := range ports {
		share[i] = max(r.Len()/unit, 1)
	}
	n := uint32(0)
	for left := true; left; { // one slot of each range per round
		left = false
		for i := range ports {
			if share[i] == 0 {
				continue
			}
			share[i]--
			left = true
			s.Fragment.Elements = append(s.Fragment.Elements, rs.Element{Set: set, Key: rs.Number(n).Raw,
				Verdict: rs.Verdict{Code: rs.Goto, Chain: fmt.Sprintf("%s/ports-%d", chain, i)}})
			n++
		}
	}
	if random {
		return set.Name, rs.Random(rs.Slots{Count: int(n)})
	}
	return set.Name, rs.Next(rs.Slots{Count: int(n)})
}

// maxPool is the maximum number of addresses in a pool of several ranges. Each address is an
// element of a map.
const maxPool = 4096

// snat returns the rules that translate the source to an address of the pool, or to an address of
// the interface if the pool is empty.
func (c *compiler) snat(s *Service, f rs.Family, chain string, pool []config.AddressRange, ports config.PortSet, random bool) ([]rs.Rule, error) {
	rules := []rs.Rule{}
	translate := func(ports flow.Ports, r *rs.Builder) rs.Rule {
		if len(pool) == 0 {
			return r.Counter().Masquerade(ports, random).Rule("")
		}
		return r.Counter().SNAT(f, pool[0], ports, random).Rule("")
	}
	if len(pool) > 1 {
		set := rs.ID{Table: f, Name: chain + "/pool"}
		n := 0
		for _, r := range pool {
			for a := r.First; r.Contains(a); a = a.Next() {
				if n == maxPool {
					return nil, fmt.Errorf("pool has more than %d addresses in %d ranges: give one contiguous range", maxPool, len(pool))
				}
				s.Fragment.Elements = append(s.Fragment.Elements, rs.Element{Set: set, Key: rs.Number(uint32(n)).Raw, Value: rs.Addr(a).Raw})
				n++
			}
		}
		if len(ports) > 0 {
			return nil, fmt.Errorf("ports %s with a pool of several ranges: nftables takes ports with one contiguous range only", ports)
		}
		s.Fragment.Sets = append(s.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{rs.Mark}, Data: []rs.Type{addrType(f)}})
		by := rs.Hash(rs.Slots{Count: n}, balance.Seed, rs.Source(f))
		first := config.AddressRange{First: pool[0].First, Last: pool[0].First}
		return append(rules, rs.NewRule().Counter().SNATFrom(f, set.Name, random, by).Rule(""),
			rs.NewRule().Counter().SNAT(f, first, flow.Ports{}, random).Rule(noSlot)), nil
	}
	switch protocols := []flow.Protocol{flow.TCP, flow.UDP, flow.SCTP}; {
	case len(ports) == 1:
		for _, p := range protocols {
			rules = append(rules, translate(ports[0], rs.NewRule().Is(rs.L4Proto, rs.Proto(p))))
		}
	case len(ports) > 1:
		for i, r := range ports {
			s.chain(f, fmt.Sprintf("%s/ports-%d", chain, i), translate(r, rs.NewRule()))
		}
		set, slot := s.portSlots(f, chain, ports, random)
		kinds := []rs.Value{icmpOf(f)} // other users of the address have the other ICMP identifiers
		for _, p := range protocols {
			kinds = append(kinds, rs.Proto(p))
		}
		for _, kind := range kinds {
			rules = append(rules, rs.NewRule().Is(rs.L4Proto, kind).VerdictFrom(set, slot).Rule(""))
		}
	}
	return append(rules, translate(flow.Ports{}, rs.NewRule())), nil
}
