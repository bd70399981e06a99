// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

var modes = map[config.Mode]uint8{
	config.ModeDNAT: wire.ModeDNAT, config.ModeFullNAT: wire.ModeFullnat, config.ModeDSR: wire.ModeDSR,
	config.ModeTunnel: wire.ModeTunnel, config.ModeStateless: wire.ModeStateless,
}

var schedulers = map[config.Scheduler]uint8{
	"": wire.SchedulerSequence, config.SchedulerRR: wire.SchedulerSequence, config.SchedulerWRR: wire.SchedulerSequence,
	config.SchedulerRandom: wire.SchedulerRandom, config.SchedulerSourceHash: wire.SchedulerSource,
	config.SchedulerSymmetricHash: wire.SchedulerSymmetric, config.SchedulerMaglev: wire.SchedulerMaglev,
	config.SchedulerLC: wire.SchedulerLeast, config.SchedulerWLC: wire.SchedulerLeast,
}

var stickyBits = map[config.PersistenceKey]uint16{
	config.KeySourceAddress: 0x01, config.KeySourcePort: 0x02, config.KeyDestAddress: 0x04, config.KeyDestPort: 0x08,
	config.KeySourceMAC: 0x10, config.KeyDestMAC: 0x20,
}

// service compiles one service with its backends, slots and listeners.
func (c *compiler) service(s *datapath.Service) error {
	id, err := c.Draft.ID(ids.Service, s.Name, wire.MaxServices, nil)
	if err != nil {
		return err
	}
	w, err := c.serviceWords(s.Service)
	if err != nil {
		return err
	}
	c.Names.Service[id] = s.Name
	if s.Log != nil {
		c.Names.Log[id] = *s.Log
	}
	if err := c.serviceBackends(id, s); err != nil {
		return err
	}
	if datapath.Turns(s.Service) {
		c.hairpins = append(c.hairpins, id)
	}
	var shared error
	if answersAlone(s.Service) {
		shared = c.replies(id, s.Service, 0)
	}
	if s.Mode == config.ModeStateless && shared != nil {
		return fmt.Errorf("mode stateless: %w", shared)
	}
	if s.Mode == config.ModeDNAT && s.Protocol == flow.TCP && shared == nil && s.Scheduler.Hashes() && w.StickyTicks == 0 && !s.SYNCookies {
		w.Flags |= wire.ServiceSYNStateless
	}
	if shared == nil && datapath.SharesReplies(c.snapshot.Config, s.Service) {
		w.Flags |= wire.ServiceNodes
	}
	if c.snapshot.Arriving["service "+s.Name] {
		w.Flags |= wire.ServiceArrives
	}
	c.Services[id] = w
	return c.putListeners(id, s.Service)
}

func (c *compiler) serviceWords(s *config.Service) (wire.Service, error) {
	w := wire.Service{
		Active: 1, Mode: modes[s.Mode], Scheduler: schedulers[s.Scheduler], NatRule: wire.NoRule, Mark: s.Mark,
		MaxFlows: uint32(s.Limits.Connections), MaxClientFlows: uint32(s.Limits.ConnectionsPerClient),
		MaxBackendFlows: uint32(s.Limits.ConnectionsPerBackend),
	}
	w.RateNs, w.BurstNs = rateWords(s.Limits.NewConnections)
	w.ClientRateNs, w.ClientBurstNs = rateWords(s.Limits.NewConnectionsPerClient)
	w.ResetNs, w.ResetBurstNs = rateWords(s.Limits.ResetRate)
	if s.MSSClamp {
		w.Flags |= wire.ServiceMSSClamp
	}
	if s.SYNCookies {
		w.Flags |= wire.ServiceCookies
	}
	if l := s.Log; l != nil {
		rate := l.Rate
		if rate.IsZero() {
			rate = config.Rate{Count: 10, Per: time.Second}
		}
		w.LogNs = uint64(rate.Per) / uint64(rate.Count)
		w.LogBurstNs = w.LogNs * uint64(max(l.Burst, 1)-1)
	}
	if s.Limits.StrictTCP {
		w.Flags |= wire.ServiceStrictTCP
	}
	switch s.ClientAddress {
	case config.ClientAddressTOA:
		w.Flags |= wire.ServiceTOA
	case config.ClientAddressProxyV2:
		w.Flags |= wire.ServiceProxy | wire.ServiceStrictTCP // only the SYN gives the sequence number of the first byte
	}
	if len(s.Sessions) > 0 {
		w.Flags |= wire.ServiceSessions
	}
	if keepsFlows(s) {
		w.Flags |= wire.ServiceKeepsFlows
	}
	switch s.WhenDown {
	case config.WhenDownReset, "":
		w.Flags |= wire.ServiceAnswerReset
	case config.WhenDownReject:
		w.Flags |= wire.ServiceAnswerReject
	}
	if p := s.Persistence; p != nil {
		timeout := p.Timeout
		w.StickyTicks = c.ticks(timeout, 5*time.Minute)
		keys := p.Key
		if len(keys) == 0 {
			keys = []config.PersistenceKey{config.KeySourceAddress}
		}
		for _, k := range keys {
			w.StickyKeys |= stickyBits[k]
			if k == config.KeySourceMAC || k == config.KeyDestMAC {
				w.Flags |= wire.ServiceMACKeys
			}
		}
	}
	if t := s.Tunnel; s.Mode == config.ModeTunnel {
		w.Encap = wire.EncapIPIP
		if t != nil && t.Type == config.TunnelGUE {
			w.Encap = wire.EncapGUE
			w.EncapPort = wire.PortOf(t.Port)
		}
	}
	for _, name := range s.Allow {
		bit, err := c.set(name, nil)
		if err != nil {
			return w, err
		}
		w.Allow |= bit
	}
	for _, name := range s.Deny {
		bit, err := c.set(name, nil)
		if err != nil {
			return w, err
		}
		w.Deny |= bit
	}
	return w, nil
}

// keepsFlows reports whether the service uses features that need flows.
func keepsFlows(s *config.Service) bool {
	l := &s.Limits
	return s.Persistence != nil || l.Connections+l.ConnectionsPerClient+l.ConnectionsPerBackend > 0 ||
		slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.MaxConnections > 0 })
}

// sourcePool allocates the source addresses of a fullnat backend. They are the source-pool
// addresses of the backend's family, or the address of the egress interface if the service has no
// pool.
func (c *compiler) sourcePool(s *config.Service, to netip.Addr) (first, count uint16, err error) {
	ranges := s.SourcePool
	if len(ranges) == 0 {
		own, err := c.host.sourceTowards(to)
		if err != nil {
			return 0, 0, err
		}
		ranges = []config.AddressRange{{First: own, Last: own}}
	}
	firsts, counts, err := c.poolRun(ranges, config.PortSet{{First: 1024, Last: 65535}}, 0)
	if to.Is4() {
		return firsts[0], counts[0], err
	}
	return firsts[1], counts[1], err
}

// rateWords converts a rate into the interval between two events and a burst of one second.
func rateWords(r config.Rate) (interval, burst uint64) {
	if r.IsZero() {
		return 0, 0
	}
	interval = uint64(r.Per) / uint64(r.Count)
	credit := uint64(time.Second)
	if credit < interval {
		return interval, 0
	}
	return interval, credit - interval
}

// backendName returns the name under which a backend's id is allocated.
func backendName(s *datapath.Service, i int) string {
	return s.Name + "\x00" + s.Backends[i].Name + "\x00" + s.Backends[i].Key()
}

func (c *compiler) serviceBackends(id uint32, s *datapath.Service) (err error) {
	numbers := make([]uint32, len(s.Backends))
	for i, b := range s.Backends {
		n, err := c.Draft.ID(ids.Backend, backendName(s, i), MaxBackends, c.backendBusy)
		if err != nil {
			return err
		}
		numbers[i] = n
		weight := uint16(s.Weight(i))
		if s.Scheduler == config.SchedulerLC {
			weight = 1
		}
		w := wire.Backend{Addr: wire.AddrOf(b.Address), Port: wire.PortOf(b.Port), Family: wire.FamilyOf(b.Address), Service: uint16(id),
			Weight: weight, MaxFlows: uint32(b.MaxConnections)}
		if each := s.Limits.ConnectionsPerBackend; b.MaxConnections > 0 && each > 0 {
			w.MaxFlows = uint32(min(b.MaxConnections, each))
		}
		if s.Mode == config.ModeDSR {
			w.Mac = b.MAC
		}
		if s.Mode == config.ModeFullNAT {
			w.Pool, w.PoolLen, err = c.sourcePool(s.Service, b.Address)
			if errors.As(err, &unreachedError{}) {
				s = c.withoutBackend(s, i, err)
			} else if err != nil {
				return fmt.Errorf("backend %s: %w", b.Name, err)
			}
		}
		switch s.State[i] {
		case datapath.Up:
			w.State = wire.BackendUp
		case datapath.Drain, datapath.Unprobed:
			w.State = wire.BackendDrain
		default:
			w.State = wire.BackendDown
		}
		c.Backends[n] = w
		c.Names.Backend[n] = b.Name
		c.lists[wire.ListServed][netip.PrefixFrom(b.Address, b.Address.BitLen())] |= wire.ServedBackend
	}
	c.Names.Backends[id] = numbers
	for _, pin := range s.Sessions {
		for i, b := range s.Backends {
			if b.Name == pin.Backend {
				c.pin(id, pin.Client, numbers[i])
			}
		}
	}
	for _, owner := range s.Slots(s.Active()) {
		c.Slots[id] = append(c.Slots[id], uint16(numbers[owner]))
	}
	return nil
}

// withoutBackend returns a copy of the service in which one backend gets no new connections. The host
// has no source address for this backend, for example at boot before the interfaces exist.
func (c *compiler) withoutBackend(s *datapath.Service, backend int, why error) *datapath.Service {
	c.Waiting++
	c.Unreached = append(c.Unreached, fmt.Sprintf("service %s: backend %s: %v", s.Name, s.Backends[backend].Name, why))
	without := *s
	without.State = slices.Clone(s.State)
	if without.State[backend] == datapath.Up {
		without.State[backend] = datapath.Drain
	}
	return &without
}

func (c *compiler) backendBusy(n uint32) bool { return c.state.BackendFlows(n) > 0 }

func (c *compiler) pin(service uint32, client netip.Prefix, backend uint32) {
	k := wire.SessionKey{PrefixLen: 32 + uint32(client.Bits()), Service: service, Addr: wire.BytesOf(client.Addr())}
	if client.Addr().Is4() {
		k.PrefixLen += 96
		k.Addr = netip.AddrFrom16(client.Masked().Addr().As16()).As16()
	}
	c.Sessions[k] = backend
}

// putListeners writes the listeners of a service. If listeners of one endpoint differ by interface,
// the first is also written without an interface. Programs loaded before the second listener was
// added look up only that entry.
func (c *compiler) putListeners(id uint32, s *config.Service) error {
	w := c.Services[id]
	direct := c.skipsFlowLookup(id, s, &w)
	for _, l := range s.Listen {
		v := wire.Listener{Service: id, Ifindex: c.iface(l.Interface)}
		c.lists[wire.ListServed][netip.PrefixFrom(l.Address, l.Address.BitLen())] |= wire.ServedListener
		k := wire.ListenerKey{L4Proto: uint8(s.Protocol), Family: wire.FamilyOf(l.Address), Addr: wire.BytesOf(l.Address)}
		byIface := l.Interface != "" && c.hasIfaceListeners(l.Address)
		for _, p := range l.Ports {
			for _, q := range portPrefixes(p) {
				k.Port = wire.PortOf(q.port)
				if byIface {
					c.listenByIface(k, q.bits, v)
				}
				if p.First != p.Last {
					put(c.Ranges, wire.ListenerPrefix{PrefixLen: (2+16)*8 + q.bits, Key: k}, v)
				} else if !put(c.Listeners, k, v) && !byIface {
					return fmt.Errorf("listen %s port %d: another service of the ebpf datapath listens there", l.Address, p.First)
				}
			}
			if direct && l.Address.Is4() && p.First == p.Last {
				c.Directs = append(c.Directs, wire.Direct{Key: directKey(k), Service: id, Ifindex: v.Ifindex, Mode: w.Mode,
					Scheduler: w.Scheduler, Encap: w.Encap})
			}
		}
		if len(l.Ports) == 0 {
			if byIface {
				c.listenByIface(k, 0, v)
			}
			put(c.Ranges, wire.ListenerPrefix{PrefixLen: (2 + 16) * 8, Key: k}, v)
		}
	}
	return nil
}

// put stores a value if the key has none. It returns false if the key has another value.
func put[K, V comparable](m map[K]V, k K, v V) bool {
	if old, taken := m[k]; taken {
		return old == v
	}
	m[k] = v
	return true
}

// hasIfaceListeners reports whether the listeners of an address are bound to different interfaces.
func (c *compiler) hasIfaceListeners(a netip.Addr) bool {
	if c.ifacesOf == nil {
		c.ifacesOf = map[netip.Addr]map[string]bool{}
		note := func(l *config.Listen, in string) {
			if c.ifacesOf[l.Address] == nil {
				c.ifacesOf[l.Address] = map[string]bool{}
			}
			if in = cmp.Or(in, l.Interface); in != "" {
				c.ifacesOf[l.Address][in] = true
			}
		}
		for _, s := range c.snapshot.Services {
			for i := range s.Listen {
				note(&s.Listen[i], "")
			}
		}
		for _, n := range c.snapshot.NAT {
			if n.Listen != nil {
				for _, name := range c.namesOf(n.In) {
					note(n.Listen, name)
				}
			}
		}
	}
	return len(c.ifacesOf[a]) > 1
}

// namesOf returns the names from resolve without a change of Waiting.
func (c *compiler) namesOf(which config.Interfaces) []string {
	waits := c.Waiting
	defer func() { c.Waiting = waits }()
	return c.resolve(which)
}

// listenByIface writes a listener bound to an interface, keyed by interface and by service.
func (c *compiler) listenByIface(k wire.ListenerKey, bits uint32, v wire.Listener) {
	at := wire.IfaceListenerKey{PrefixLen: 32 + (2+16)*8 + bits, Ifindex: wire.AnyIfaceOfService | v.Service, Key: k}
	c.IfaceListeners[at] = v.Service
	if v.Ifindex == missingInterface {
		return
	}
	at.Ifindex = v.Ifindex
	c.IfaceListeners[at] = v.Service
}

type portPrefix struct {
	port uint16
	bits uint32
}

// portPrefixes splits a port range into aligned powers of two.
func portPrefixes(r flow.Ports) (out []portPrefix) {
	for first := uint32(r.First); first <= uint32(r.Last); {
		size := uint32(1)
		for first%(size*2) == 0 && first+size*2-1 <= uint32(r.Last) && size < 1<<16 {
			size *= 2
		}
		bits := uint32(16)
		for n := size; n > 1; n /= 2 {
			bits--
		}
		out = append(out, portPrefix{uint16(first), bits})
		first += size
	}
	return out
}
