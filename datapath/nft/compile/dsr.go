// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// dsrMemory is the time for which a dsr service without a hash scheduler remembers the backend of a
// client's port. It is the established timeout of RFC 5382 REQ-5, since packets of an idle
// connection must still reach their backend.
const dsrMemory = 2*time.Hour + 4*time.Minute

// dsrMemorySize is the maximum number of entries in such a memory.
const dsrMemorySize = 1 << 18

// dsr compiles mode dsr. On the ingress hook of the devices, before routing, packets are forwarded
// to a backend. Only the hardware addresses and the TTL change.
func (p *servicePart) dsr() error {
	p.table = rs.Netdev
	if p.family == rs.IP6 {
		p.prefix = "service6/" + identifier(p.svc.Name)
	}
	if p.persist == nil && !p.svc.Scheduler.Hashes() {
		keys := []config.PersistenceKey{config.KeySourceAddress, config.KeySourcePort, config.KeyDestAddress, config.KeyDestPort}
		p.persist = &config.Persistence{Key: keys, Timeout: config.Duration(dsrMemory), Size: dsrMemorySize}
	}
	p.addRefusedChain()
	p.memory()
	p.chain(p.table, p.prefix, append(p.accessRules(), p.backendRules()...)...)
	p.listen(p.ingressMap(mapServices), rs.Verdict{Code: rs.Goto, Chain: p.prefix})
	p.clientErrors(p.ingressMap(mapClientErrors))
	p.routed = true
	ttl := rs.TTL(p.family)
	for i, b := range p.svc.Backends {
		if familyOf(b.Address) != p.family {
			continue
		}
		if p.c.env.Route == nil {
			return fmt.Errorf("backend %s: no routes are known", backendName(b))
		}
		via, err := p.c.env.Route(b.Address)
		if errors.Is(err, ErrNoRoute) { // markUnreached reports the backend
			continue
		} else if err != nil {
			return fmt.Errorf("backend %s: %w: dsr reaches only neighbours, on a network of one of this host's interfaces", backendName(b), err)
		}
		deliver := func(r *rs.Builder) *rs.Builder {
			if b.MAC == (config.MAC{}) {
				return r.ForFamily(p.table, p.family).Forward(p.family, b.Address, via.Name, via.Index)
			}
			return r.SetFrom(ttl, p.ttlMap(), ttl).SetField(rs.DestMAC, rs.HardwareAddr(b.MAC), 0, false).
				SetField(rs.SourceMAC, rs.HardwareAddr(via.MAC), 0, false).ForwardFrame(via.Name, via.Index)
		}
		p.backend(i, deliver)
		own := p.Fragment.Chains[len(p.Fragment.Chains)-1]
		own.Rules = append(p.errorsApart(i), own.Rules...)
		p.chain(p.table, p.backendChain(i)+"/error", deliver(rs.NewRule()).Rule(""))
		if b.MAC != (config.MAC{}) {
			expired := rs.NewRule().Drop().Rule("TTL exceeded")
			own.Rules = append(own.Rules, expired)
			of := p.Fragment.Chains[len(p.Fragment.Chains)-1]
			of.Rules = append(of.Rules, expired)
		}
	}
	return nil
}

// ErrNoRoute is the error of Env.Route for an address without a route.
var ErrNoRoute = errors.New("no route")

// markUnreached returns the service with its backends of mode dsr without a route as down, for
// example at boot before the interfaces exist. The result lists them in Unreached.
func (c *compiler) markUnreached(svc datapath.Service, s *Service) datapath.Service {
	if svc.Mode != config.ModeDSR || c.env.Route == nil {
		return svc
	}
	svc.State = slices.Clone(svc.State)
	s.routed = true
	for i, b := range svc.Backends {
		if _, err := c.env.Route(b.Address); errors.Is(err, ErrNoRoute) {
			svc.State[i] = datapath.Down
			s.unreached = append(s.unreached, fmt.Sprintf("service %s: backend %s: %v", svc.Name, backendName(b), err))
		}
	}
	return svc
}

// ttlMap makes the map that decrements a TTL, because nf_tables has no expression for it. Without
// the decrement, two hosts that use each other as backend would forward a packet forever. The map
// has no entry for a TTL that has expired.
func (p *servicePart) ttlMap() string {
	id := rs.ID{Table: p.table, Name: p.prefix + "/ttl"}
	if slices.ContainsFunc(p.Fragment.Sets, func(s *rs.Set) bool { return s.ID == id }) {
		return id.Name
	}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: id, Key: []rs.Type{rs.Integer8}, Data: []rs.Type{rs.Integer8}, Size: 256})
	for n := 2; n < 256; n++ {
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{Set: id, Key: rs.Uint8(byte(n)).Raw, Value: rs.Uint8(byte(n - 1)).Raw})
	}
	return id.Name
}

// ingressMap returns the name of a map in the table netdev, which has both families.
func (p *servicePart) ingressMap(name string) string { return ingressMap(p.family, name) }

func ingressMap(f rs.Family, name string) string {
	if f == rs.IP6 {
		return "ip6-" + name
	}
	return name
}

// ingress writes the chain shared by all devices, and the base chain of each device.
func (c *compiler) ingress(b *base, f *rs.Fragment, head map[rs.ID][]rs.Rule) {
	chain := rs.ID{Table: rs.Netdev, Name: "ingress"}
	if len(b.chains[rs.ID{Table: rs.Netdev, Name: "filter"}]) > 0 {
		head[chain] = append(head[chain], rs.NewRule().Jump("filter").Rule(""))
	}
	filtered := len(head[chain])
	// The kernel checks the packet type after this hook. It does not forward a packet to another
	// station or to a group.
	head[chain] = append(head[chain], rs.NewRule().IsNot(rs.PacketType, rs.ToHost).Return().Rule(""))
	for _, fam := range []rs.Family{rs.IP, rs.IP6} {
		c.ingressErrors(b, chain, fam, head)
		name := ingressMap(fam, mapServices)
		if b.used[rs.ID{Table: rs.Netdev, Name: name + interfaces}] {
			key := append([]rs.Selector{rs.InName}, byDest(fam)...)
			head[chain] = append(head[chain], rs.NewRule().ForFamily(rs.Netdev, fam).VerdictFrom(name+interfaces, key...).Rule(""))
		}
		for _, name := range []string{name, name + ranges} {
			if b.used[rs.ID{Table: rs.Netdev, Name: name}] {
				head[chain] = append(head[chain], rs.NewRule().ForFamily(rs.Netdev, fam).VerdictFrom(name, byDest(fam)...).Rule(""))
			}
		}
	}
	if len(head[chain]) == filtered+1 {
		head[chain] = head[chain][:filtered]
	}
	if filtered == 0 && len(head[chain]) == 0 {
		delete(head, chain)
		return
	}
	for _, dev := range c.devices() {
		f.Chains = append(f.Chains, &rs.Chain{
			ID:    rs.ID{Table: rs.Netdev, Name: "ingress-" + identifier(dev)},
			Hook:  &rs.Hook{Type: "filter", Point: "ingress", Device: dev},
			Rules: []rs.Rule{rs.NewRule().Jump("ingress").Rule("")},
		})
	}
}

// ingressErrors adds the lookups of the packets that ICMP errors quote in the maps of services of a
// family, in a chain of their own.
func (c *compiler) ingressErrors(b *base, from rs.ID, fam rs.Family, head map[rs.ID][]rs.Rule) {
	to := rs.ID{Table: rs.Netdev, Name: ingressMap(fam, chainErrors)}
	name := ingressMap(fam, mapClientErrors)
	for _, name := range []string{name, name + ranges} {
		if !b.used[rs.ID{Table: rs.Netdev, Name: name}] {
			continue
		}
		for _, r := range icmpErrors(fam) {
			head[to] = append(head[to], r.VerdictFrom(name, byQuotedSource(fam)...).Rule(""))
		}
	}
	if len(head[to]) > 0 {
		head[from] = append(head[from], rs.NewRule().ForFamily(rs.Netdev, fam).Is(rs.L4Proto, icmpOf(fam)).Jump(to.Name).Rule(""))
	}
}

// devices returns the names of the configured interfaces that exist, or of all interfaces.
func (c *compiler) devices() []string {
	var names []string
	for _, i := range c.env.Interfaces {
		if len(c.snapshot.Config.Interfaces) == 0 || contains(c.snapshot.Config.Interfaces, i.Name) {
			names = append(names, i.Name)
		}
	}
	return names
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}
