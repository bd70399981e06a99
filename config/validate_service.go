// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

func (v *validator) services() {
	names := seenNames{}
	for i := range v.c.Services {
		s, p := &v.c.Services[i], at("services").index(i)
		v.name(p.key("name"), s.Name)
		if first := names.recordName(s.Name, i); first >= 0 && s.Name != "" {
			v.errorf(p.key("name"), "give each service a name of its own", "name %s is taken by services[%d]", s.Name, first)
		}
		v.service(p, s)
	}
}

func (v *validator) service(p path, s *Service) {
	v.listeners(p, s)
	v.backends(p, s)
	v.ports(p, s)
	v.families(p, s)
	v.specialRanges(p.key("source-pool"), asSource, s.SourcePool)
	v.mode(p, s)
	v.checkClientRules(p, s)
	v.helper(p, s.Helper, s.Protocol)
	if s.Check != nil {
		v.check(p.key("check"), s)
	}
	if s.Log != nil {
		v.logLine(p.key("log").key("prefix"), s.Log.Prefix)
	}
}

// listenAddress checks that a listener has an address, or an interface to take the address from.
func (v *validator) listenAddress(p path, l *Listen) {
	v.requireKey(p, !l.Address.IsValid() && l.Interface == "", "address", "write address: 192.0.2.10, or interface: wan0, whose address is to be followed")
	v.specialAddress(p.key("address"), asListener, l.Address)
}

func (v *validator) listeners(p path, s *Service) {
	if s.Listen != nil && len(s.Listen) == 0 {
		v.errorf(p.key("listen"), "write - {address: 192.0.2.10, ports: [80]}", "no listener")
	}
	for i := range s.Listen {
		l, lp := &s.Listen[i], p.key("listen").index(i)
		v.listenAddress(lp, l)
		if l.Follows() && s.Mode != "" && s.Mode != ModeDNAT && s.Mode != ModeFullNAT {
			v.errorf(lp.key("interface"), "write an address, or mode: dnat or fullnat", "mode %s cannot listen on an address that is this host's own", s.Mode).depends = []path{p.key("mode")}
		}
		v.ifname(lp.key("interface"), l.Interface)
		if len(l.Ports) > 0 && s.Protocol == flow.Any {
			e := v.errorf(lp.key("ports"), "write protocol: tcp, udp or sctp, or remove the ports", "protocol any has no ports")
			e.depends = []path{p.key("protocol")}
		}
	}
}

func (v *validator) backends(p path, s *Service) {
	v.requireKey(p, s.Backends == nil && s.BackendsFrom == nil, "backends", "write backends: [{address: 10.1.10.2}], or backends-from: {dns: app.example}")
	if s.BackendsFrom != nil {
		v.backendsFrom(p.key("backends-from"), s.BackendsFrom)
	}
	names, places := seenNames{}, map[netip.AddrPort]int{}
	for i := range s.Backends {
		b, bp := &s.Backends[i], p.key("backends").index(i)
		v.name(bp.key("name"), b.Name)
		if first := names.recordName(b.Name, i); first >= 0 && b.Name != "" {
			v.errorf(bp.key("name"), "give each backend of a service a name of its own", "name %s is taken by backends[%d]", b.Name, first)
		}
		v.specialAddress(bp.key("address"), asServer, b.Address)
		if !b.Address.IsValid() {
			continue
		}
		place := netip.AddrPortFrom(b.Address, b.Port)
		if first, taken := places[place]; taken {
			v.errorf(bp.key("address"), "keep one of them and give it more weight",
				"%s is the same server as backend %s", b.Address, s.Backends[first].Name)
		}
		places[place] = i
		for j := range s.Listen {
			if s.Listen[j].Address == b.Address && s.Mode != ModeDSR && s.Mode != ModeTunnel {
				v.errorf(bp.key("address"), "write the server's own address", "%s is an address that the service itself listens on", b.Address)
				break
			}
		}
		if b.MAC != (MAC{}) && s.Mode != ModeDSR {
			v.errorf(bp.key("mac"), "remove it", "mac applies to mode dsr only").atKey = true
		}
	}
}

// ports checks that a backend's port is compatible with the listeners' ports.
func (v *validator) ports(p path, s *Service) {
	single, ranged := s.portSpan()
	for i := range s.Backends {
		b := &s.Backends[i]
		cause, hint := "", ""
		switch {
		case b.Port == 0:
		case s.Protocol == flow.Any:
			cause, hint = "protocol any has no ports", "remove it, or write protocol: tcp, udp or sctp"
		case s.Mode.OneWay() && (ranged || single != b.Port):
			cause = fmt.Sprintf("mode %s does not change the port, so the server must listen on the service's own", s.Mode)
			hint = "remove it, or use mode dnat or fullnat"
		case ranged:
			cause, hint = fmt.Sprintf("port %d cannot stand for a range of ports", b.Port), "remove the port so that each is kept, or list single ports"
		case s.Mode == ModeStateless && single == 0:
			cause = fmt.Sprintf("mode stateless cannot tell which of the service's ports a reply from port %d belongs to", b.Port)
			hint = "make one service for each port"
		}
		if cause != "" {
			v.errorf(p.key("backends").index(i).key("port"), hint, "%s", cause).depends = []path{p.key("listen"), p.key("protocol"), p.key("mode")}
		}
	}
}

// portSpan returns the only port of the service, or 0 if there are several, and whether a listener
// has a range or all ports.
func (s *Service) portSpan() (single uint16, ranged bool) {
	for i, l := range s.Listen {
		if len(l.Ports) == 0 {
			return 0, true
		}
		for j, r := range l.Ports {
			if r.Len() > 1 {
				return 0, true
			}
			if i+j == 0 {
				single = r.First
			} else if single != r.First {
				single = 0
			}
		}
	}
	return single, false
}

func familyOf(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// families checks that the mode supports the families of listeners and backends.
func (v *validator) families(p path, s *Service) {
	listens := map[bool]netip.Addr{} // Is4 → one address
	for _, l := range s.Listen {
		if l.Address.IsValid() {
			listens[l.Address.Is4()] = l.Address
		}
	}
	keeps := s.Mode == ModeDNAT || s.Mode == ModeDSR || s.Mode == ModeStateless
	ipip := s.Mode == ModeTunnel && s.Tunnel != nil && s.Tunnel.Type == TunnelIPIP
	for i := range s.Backends {
		b := &s.Backends[i]
		other, mixed := listens[!b.Address.Is4()]
		if !b.Address.IsValid() || !mixed {
			continue
		}
		bp := p.key("backends").index(i).key("address")
		switch {
		case keeps:
			hint := "write mode: fullnat, which translates between the families"
			if len(listens) == 2 {
				hint += ", or make a service for each family"
			}
			v.errorf(bp, hint, "%s is %s, but the service listens on %s and mode %s keeps the family",
				b.Address, familyOf(b.Address), other, s.Mode).depends = []path{p.key("listen")}
		case ipip && b.Address.Is4():
			v.errorf(bp, "write tunnel: {type: gue}", "%s is IPv4, but the service listens on %s and ipip carries no IPv6 packets over IPv4", b.Address, other).depends = []path{p.key("listen")}
		}
	}
	if len(s.SourcePool) == 0 {
		return
	}
	for i := range s.Backends {
		a := s.Backends[i].Address
		if a.IsValid() && !slices.ContainsFunc(s.SourcePool, func(r AddressRange) bool { return r.Is4() == a.Is4() }) {
			v.errorf(p.key("source-pool"), "add an address of that family, or remove the pool",
				"no %s address, but backend %s is %s", familyOf(a), s.Backends[i].Name, a).depends = []path{p.key("source-pool"), p.key("backends").index(i)}
			break
		}
	}
}

// rule is one combination of keys that is refused.
type rule struct {
	wrong bool
	key   string
	hint  string
	cause string
}

func (v *validator) rules(p path, rules []rule) {
	for _, r := range rules {
		if r.wrong {
			v.errorf(p.key(r.key), r.hint, "%s", r.cause).atKey = true
		}
	}
}

// mode checks that mode and protocol support the service's keys.
func (v *validator) mode(p path, s *Service) {
	m, l := s.Mode, &s.Limits
	stateless := m == ModeStateless
	tcp := s.Protocol == flow.TCP
	v.rules(p, []rule{
		{len(s.SourcePool) > 0 && m != ModeFullNAT, "source-pool", "remove it, or write mode: fullnat", "source-pool applies to mode fullnat only"},
		{s.Hairpin != "" && s.Hairpin != SwitchAuto && m != ModeDNAT, "hairpin", "remove it", "hairpin applies to mode dnat only: " + string(m) + " keeps the client's address or replaces it for all"},
		{s.Tunnel != nil && m != ModeTunnel, "tunnel", "remove it, or write mode: tunnel", "tunnel applies to mode tunnel only"},
		{s.ClientAddress != ClientAddressNone && s.ClientAddress != "" && (m != ModeFullNAT || !tcp), "client-address", "remove it",
			"client-address applies to mode fullnat and protocol tcp only"},
		{s.SYNCookies && (!tcp || m == ModeDSR || m == ModeTunnel || stateless), "syn-cookies", "remove it",
			"syn-cookies apply to protocol tcp in the modes dnat and fullnat only"},
		{s.MSSClamp && !tcp && s.Protocol != flow.Any, "mss-clamp", "remove it", "mss-clamp applies to protocol tcp only"},
		{s.Helper != "" && m != ModeDNAT && m != ModeFullNAT, "helper", "remove it", "a helper needs the flow state of mode dnat or fullnat"},
		{stateless && s.Persistence != nil, "persistence", "write scheduler: source-hash, which keeps a client on its backend",
			"mode stateless remembers no clients"},
		{stateless && s.Scheduler != "" && !s.Scheduler.Hashes(), "scheduler",
			"write source-hash, symmetric-hash or maglev", fmt.Sprintf("mode stateless remembers no flows, and %s would send the packets of one flow to several backends", s.Scheduler)},
		{s.SlowStart < 0 || s.SlowStart > 0 && (s.SlowStart.D() < time.Second || s.SlowStart.D() > time.Hour), "slow-start",
			"write 1s to 1h", fmt.Sprintf("slow-start %s is out of range", s.SlowStart)},
		{s.SlowStart > 0 && s.Scheduler != "" && !s.Scheduler.UsesWeights(), "slow-start",
			"write scheduler: wrr, wlc, random, source-hash, symmetric-hash or maglev", fmt.Sprintf("slow-start works by weights, which scheduler %s does not look at", s.Scheduler)},
		{stateless && s.severalAddresses(), "listen", "make one service for each address",
			"mode stateless cannot tell which of several addresses a reply belongs to"},
		{stateless && s.Protocol == flow.Any && len(s.Listen) > 1, "listen", "write one listener", "mode stateless with protocol any takes one listener"},
	})
	v.rules(p.key("limits"), []rule{
		{stateless && l.Connections > 0, "connections", "remove it", "mode stateless counts no connections"},
		{stateless && l.ConnectionsPerClient > 0, "connections-per-client", "remove it", "mode stateless counts no connections"},
		{stateless && l.ConnectionsPerBackend > 0, "connections-per-backend", "remove it", "mode stateless counts no connections"},
		{!l.ResetRate.IsZero() && !tcp && s.Protocol != flow.Any, "reset-rate", "remove it", "reset-rate applies to protocol tcp only"},
		{l.StrictTCP && !tcp && s.Protocol != flow.Any, "strict-tcp", "remove it", "strict-tcp applies to protocol tcp only"},
	})
	if t := s.Tunnel; t != nil && t.Port != 0 && t.Type == TunnelIPIP {
		v.errorf(p.key("tunnel").key("port"), "remove it, or write type: gue", "ipip has no port").atKey = true
	}
}

func (s *Service) severalAddresses() bool {
	for _, l := range s.Listen {
		if l.Address != s.Listen[0].Address {
			return true
		}
	}
	return false
}

// checkClientRules checks persistence, sessions and the sets of clients.
func (v *validator) checkClientRules(p path, s *Service) {
	if s.Persistence != nil {
		kp := p.key("persistence").key("key")
		for i, k := range s.Persistence.Key {
			if known := []string{"source-address", "source-port", "source-mac", "destination-address", "destination-port", "destination-mac"}; !slices.Contains(known, string(k)) {
				v.errorf(kp.index(i), hintOneOf(string(k), known), "unknown key %q", k)
			}
			if slices.Contains(s.Persistence.Key[:i], k) {
				v.errorf(kp.index(i), "keep one of them", "key %s is listed twice", k)
			}
		}
	}
	if len(s.Sessions) > 0 {
		known := map[string]bool{}
		var names []string
		for i := range s.Backends {
			known[s.Backends[i].Name] = true
			names = append(names, s.Backends[i].Name)
		}
		clients := seenNames{}
		for i, session := range s.Sessions {
			sp := p.key("sessions").index(i)
			v.within(sp.key("client"), asHosts, session.Client)
			if session.Backend != "" && !known[session.Backend] {
				v.errorf(sp.key("backend"), hintName(session.Backend, names, "backends"), "the service has no backend %s", session.Backend).depends = []path{p.key("backends")}
			}
			if first := clients.recordName(session.Client.String(), i); first >= 0 && session.Client.IsValid() {
				v.errorf(sp.key("client"), "keep one of them", "client %s is pinned by sessions[%d] already", session.Client, first)
			}
		}
	}
	for i, name := range s.Allow {
		v.set(p.key("allow").index(i), name)
	}
	for i, name := range s.Deny {
		v.set(p.key("deny").index(i), name)
	}
}

// hintName suggests one of the existing names.
func hintName(name string, names []string, what string) string {
	if near := Nearest(name, names); near != "" {
		return "write " + near
	}
	switch {
	case len(names) == 0:
		return "there are no " + what
	case len(names) <= 8:
		return what + " are " + joinWords(names)
	}
	return fmt.Sprintf("write the name of one of the %d %s", len(names), what)
}

// helpers checks that each helper is known and listed once.
func (v *validator) helpers(p path, all Helpers) (known bool) {
	list := all.Each()
	known = true
	for i, h := range list {
		hp := p.key("helper")
		if len(list) > 1 {
			hp = hp.index(i)
		}
		if _, ok := helperList[h]; !ok {
			names := slices.Sorted(maps.Keys(helperList))
			words := make([]string, len(names))
			for n, name := range names {
				words[n] = string(name)
			}
			v.errorf(hp, hintOneOf(string(h), words), "unknown helper %q", h)
			known = false
		} else if slices.Index(list, h) < i {
			v.errorf(hp, "remove it", "helper %s is named twice", h)
		}
	}
	return known
}

func (v *validator) helper(p path, h Helper, proto flow.Protocol) {
	carriers := h.Protocols()
	if len(carriers) > 0 && !slices.Contains(carriers, proto) {
		v.errorf(p.key("helper"), "write protocol: "+carriers[0].String()+", or remove the helper",
			"helper %s reads %s, not %s", h, carriers[0], proto).depends = []path{p.key("protocol")}
	}
}
