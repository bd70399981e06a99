// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// Defaults, and the minimum values of RFC 5382, RFC 4787 and RFC 5508.
const (
	defaultTCPEstablished = 2*time.Hour + 4*time.Minute // RFC 5382 REQ-5.
	defaultTCPTransitory  = 4 * time.Minute             // RFC 5382 REQ-5.
	defaultUDP            = 5 * time.Minute             // RFC 4787 REQ-5c.
	floorUDP              = 2 * time.Minute             // RFC 4787 REQ-5.
	defaultICMP           = 60 * time.Second            // RFC 5508 REQ-2.
	defaultOther          = 10 * time.Minute

	defaultPersistenceTimeout = 5 * time.Minute
	defaultPersistenceSize    = 65536

	defaultGUEPort = 6080 // IANA

	defaultInterval = 2 * time.Second
	defaultTimeout  = time.Second
	defaultJitter   = 0.1
)

// SetDefaults sets the fields that are zero. A second call changes nothing.
func (c *Config) SetDefaults() {
	orElse(&c.Datapath, DatapathAuto)
	orElse(&c.Attach, AttachAuto)
	orElse(&c.HoldAddresses, SwitchOn)
	orElse(&c.Flowtable, SwitchAuto)
	orElse(&c.ICMPErrors, SwitchAuto)
	orElse(&c.Established, EstablishedKeep)
	c.Timeouts.setDefaults()
	if c.Cluster != nil {
		c.Cluster.setDefaults()
	}
	for i := range c.Uplinks {
		c.Uplinks[i].setDefaults()
	}
	for i := range c.Services {
		c.Services[i].setDefaults()
	}
	for i := range c.NAT {
		c.NAT[i].setDefaults()
	}
	for i := range c.Firewall.Rules {
		r := &c.Firewall.Rules[i]
		orElse(&r.Name, fmt.Sprintf("rule-%d", i+1))
		orElse(&r.Hook, r.defaultHook())
		if r.Action == ActionLog {
			orElse(&r.Level, "info")
		}
		if !r.Rate.IsZero() {
			orElse(&r.Burst, 5)
		}
	}
}

// orElse sets *p to value when it is zero.
func orElse[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

func (t *Timeouts) setDefaults() {
	orElse(&t.TCPEstablished, Duration(defaultTCPEstablished))
	orElse(&t.TCPTransitory, Duration(defaultTCPTransitory))
	orElse(&t.UDP, Duration(defaultUDP))
	orElse(&t.ICMP, Duration(defaultICMP))
	orElse(&t.Other, Duration(defaultOther))
}

func (s *Service) setDefaults() {
	orElse(&s.Scheduler, s.Mode.defaultScheduler())
	orElse(&s.WhenDown, WhenDownReset)
	orElse(&s.ClientAddress, ClientAddressNone)
	if p := s.Persistence; p != nil {
		if len(p.Key) == 0 {
			p.Key = []PersistenceKey{KeySourceAddress}
		}
		orElse(&p.Timeout, Duration(defaultPersistenceTimeout))
		orElse(&p.Size, defaultPersistenceSize)
	}
	if l := s.Log; l != nil {
		orElse(&l.Rate, Rate{Count: 10, Per: time.Second})
		orElse(&l.Burst, 5)
		orElse(&l.Level, "info")
	}
	if s.Mode == ModeTunnel && s.Tunnel == nil {
		s.Tunnel = &Tunnel{}
	}
	if t := s.Tunnel; t != nil {
		orElse(&t.Type, TunnelIPIP)
		if t.Type == TunnelGUE {
			orElse(&t.Port, defaultGUEPort)
		}
	}
	if s.BackendsFrom != nil {
		s.BackendsFrom.setDefaults()
		if s.Backends == nil {
			s.Backends = []Backend{} // as in the file
		}
	}
	s.nameBackends()
	for i := range s.Backends {
		orElse(&s.Backends[i].Weight, 1)
		orElse(&s.Backends[i].Priority, 1)
	}
	if s.Check != nil {
		s.Check.setDefaults()
	}
}

// defaultScheduler returns rr, and source-hash for modes without flow state, in which rr would
// select another backend for each packet.
func (m Mode) defaultScheduler() Scheduler {
	if m == ModeStateless {
		return SchedulerSourceHash
	}
	return SchedulerRR
}

// nameBackends names a backend without a name by its address, or by address and port if that name
// is in use.
func (s *Service) nameBackends() {
	taken := make(map[string]bool, len(s.Backends))
	for i := range s.Backends {
		taken[s.Backends[i].Name] = true
	}
	for i := range s.Backends {
		b := &s.Backends[i]
		if b.Name != "" || !b.Address.IsValid() {
			continue
		}
		b.Name = b.Address.String()
		if taken[b.Name] && b.Port != 0 {
			b.Name = fmt.Sprintf("%s-%d", b.Address, b.Port)
		}
		taken[b.Name] = true
	}
}

func (k *Check) setDefaults() {
	orElse(&k.Interval, Duration(defaultInterval))
	orElse(&k.Timeout, min(Duration(defaultTimeout), k.Interval/2))
	orElse(&k.Rise, 2)
	orElse(&k.Fall, 3)
	orElse(&k.Initial, "down")
	orElse(&k.Via, "direct")
	if k.Jitter == nil {
		j := defaultJitter
		k.Jitter = &j
	}
	switch k.Type {
	case CheckHTTP, CheckHTTPS:
		orElse(&k.Path, "/")
		orElse(&k.Method, "GET")
		if len(k.Status) == 0 {
			k.Status = []string{"200-399"}
		}
	case CheckDNS:
		orElse(&k.Query, ".")
		orElse(&k.QueryType, "NS")
	}
}

// DefaultPorts returns the outside ports of a rule without ports. They include ports below 1024 for
// inside ports below 1024 (RFC 4787 REQ-3a), because NFS, rsh and some NTP servers reject others.
// With port blocks they do not, because a block would then consist of low ports only.
func DefaultPorts(block int) flow.Ports {
	if block > 0 {
		return flow.Ports{First: 1024, Last: 65535}
	}
	return flow.Ports{First: 512, Last: 65535}
}

func (r *NATRule) setDefaults() {
	if r.Type.HasBindings() {
		if len(r.Ports) == 0 {
			r.Ports = PortSet{DefaultPorts(r.PortBlock)}
		}
		orElse(&r.Unreachable, "host")
	}
	if slices.Contains(natKeys[r.Type], "hairpin") {
		orElse(&r.Hairpin, SwitchAuto)
	}
}

// defaultHook returns the earliest hook that supports the rule.
func (r *FirewallRule) defaultHook() Hook {
	switch {
	case r.Action == ActionNotrack:
		return HookPrerouting
	case (r.Action == ActionDrop || r.Action == ActionAccept) && (r.Source.Set != "" || r.Destination.Set != "") && r.Out == "":
		return HookIngress
	}
	return HookForward
}
