// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Carries returns nil if nftables supports all settings of the service, else an error with the
// first unsupported one.
func Carries(s *config.Service) error {
	switch s.Mode {
	case config.ModeTunnel:
		return errNot("mode tunnel")
	case config.ModeDNAT, config.ModeFullNAT, config.ModeDSR, config.ModeStateless:
	default:
		return fmt.Errorf("mode %q: not one of dnat, fullnat, dsr, stateless", s.Mode)
	}
	if s.Scheduler.CountsFlows() {
		return errNot("scheduler %s", s.Scheduler)
	}
	if s.ClientAddress != "" && s.ClientAddress != config.ClientAddressNone {
		return errNot("client-address %s", s.ClientAddress)
	}
	if s.SYNCookies {
		return errNot("syn-cookies")
	}
	if err := carriesFamilies(s); err != nil {
		return err
	}
	if s.Helper != "" && len(helperProtocols(s.Helper, s.Protocol)) == 0 {
		return fmt.Errorf("helper %s does not know protocol %s", s.Helper, s.Protocol)
	}
	if s.Mode == config.ModeDNAT || s.Mode == config.ModeFullNAT {
		return nil
	}
	return carriesPerPacket(s)
}

// carriesFamilies rejects services that need a translation between IPv4 and IPv6.
func carriesFamilies(s *config.Service) error {
	var clients [rs.IP6 + 1]bool // by family
	var servers [rs.IP6 + 1]string
	for _, l := range s.Listen {
		if l.Address.IsValid() {
			clients[familyOf(l.Address)] = true
			continue
		}
		for _, b := range s.Backends { // a listener of an interface resolves to the families of the backends
			clients[familyOf(b.Address)] = true
		}
	}
	if len(s.Backends) == 0 { // discovery has found no backend yet
		return nil
	}
	for _, b := range s.Backends {
		servers[familyOf(b.Address)] = backendName(b)
	}
	both := servers[rs.IP] != "" && servers[rs.IP6] != ""
	for _, f := range []rs.Family{rs.IP, rs.IP6} {
		if clients[f] && servers[f] == "" {
			return errNot("a listener without a backend of its own family (translation between IPv4 and IPv6)")
		}
	}
	for _, f := range []rs.Family{rs.IP, rs.IP6} {
		if servers[f] != "" && (!clients[f] || s.Mode == config.ModeFullNAT && both) {
			return errNot("backend %s of the other family (translation between IPv4 and IPv6)", servers[f])
		}
	}
	return nil
}

// carriesPerPacket rejects settings that need connection tracking. The modes dsr and stateless do
// not use it.
func carriesPerPacket(s *config.Service) error {
	needs := func(what string) error {
		return fmt.Errorf("%s needs connection tracking, which mode %s does not use on nftables", what, s.Mode)
	}
	l := s.Limits
	switch {
	case !l.NewConnections.IsZero(), !l.NewConnectionsPerClient.IsZero():
		return needs("a limit of new connections")
	case l.Connections > 0, l.ConnectionsPerClient > 0, l.ConnectionsPerBackend > 0:
		return needs("a limit of connections")
	case l.StrictTCP:
		return needs("strict-tcp")
	case !l.ResetRate.IsZero():
		return needs("reset-rate")
	case s.Mark != 0:
		return needs("mark")
	case s.Helper != "":
		return needs("helper " + string(s.Helper))
	case s.Log != nil:
		return needs("log")
	case s.MSSClamp:
		return needs("mss-clamp")
	}
	for _, b := range s.Backends {
		if b.MaxConnections > 0 {
			return needs("max-connections of backend " + backendName(b))
		}
		if b.Mark != 0 {
			return needs("mark of backend " + backendName(b))
		}
		if s.Mode == config.ModeDSR && b.Port != 0 && !onlyPort(s, b.Port) {
			return fmt.Errorf("backend %s: port %d: dsr changes no port; leave it out", backendName(b), b.Port)
		}
	}
	if s.Mode == config.ModeStateless && s.Persistence == nil && !s.Scheduler.Hashes() && s.Protocol != flow.UDP {
		return fmt.Errorf("scheduler %s in mode stateless sends the packets of one connection to different backends: use source-hash or maglev", s.Scheduler)
	}
	return nil
}

func onlyPort(s *config.Service, port uint16) bool {
	for _, l := range s.Listen {
		for _, p := range l.Ports {
			if p != (flow.Ports{First: port, Last: port}) {
				return false
			}
		}
	}
	return true
}

// CarriesNAT returns nil if nftables supports all settings of the rule, else an error with the
// first unsupported one.
func CarriesNAT(n *config.NATRule) error {
	switch {
	case n.Type.CrossesFamilies():
		return errNot("%s", n.Type)
	case !n.Type.Known():
		return fmt.Errorf("type %q: not one of masquerade, snat, port-forward, static, npt66", n.Type)
	}
	switch {
	case n.Mapping == config.EndpointIndependent:
		return errNot("mapping %s (the kernel's NAT maps by address and port)", n.Mapping)
	case n.Filtering != "" && n.Filtering != config.AddressAndPortDependent:
		return errNot("filtering %s (the kernel's NAT filters by address and port)", n.Filtering)
	case n.PortBlock > 0 || n.Deterministic:
		return errNot("allocation of port blocks")
	case n.PCP:
		return errNot("pcp (the kernel's NAT keeps no mapping without a connection)")
	case n.PortsPerClient > 0:
		return errNot("ports-per-client")
	}
	switch {
	case n.Type.Forwards():
		if n.Listen == nil {
			return errors.New("listen: missing")
		}
		if n.Listen.Address.IsValid() && n.Listen.Address.Is4() != n.To.Address.Is4() {
			return errNot("a target of the other family")
		}
		if n.Helper != "" && len(helperProtocols(config.Helper(n.Helper), n.Protocol)) == 0 {
			return fmt.Errorf("helper %s does not know protocol %s", n.Helper, n.Protocol)
		}
	case n.Type.OneToOne():
		if n.Mark != 0 && n.Type.ChecksumNeutral() {
			return errNot("mark of npt66, which keeps no connections,")
		}
		if n.External.Bits() != n.Internal.Bits() || n.External.Addr().Is4() != n.Internal.Addr().Is4() {
			return fmt.Errorf("external %s and internal %s differ in length or family", n.External, n.Internal)
		}
	}
	return nil
}

// CarriesRule returns nil if nftables supports the firewall rule, else the reason.
func CarriesRule(r *config.FirewallRule) error {
	chain := ruleChain(r)
	if chain.Table != rs.Netdev {
		if r.Action == config.ActionNotrack && chain.Name != "early" {
			return fmt.Errorf("action notrack at hook %s runs after connection tracking: use hook prerouting", r.Hook)
		}
		return nil
	}
	switch r.Action {
	case config.ActionReject:
		return errors.New("action reject at hook ingress: the packet is not routed yet, so it cannot be answered; use hook forward or input")
	case config.ActionNotrack:
		return errors.New("action notrack at hook ingress runs before connection tracking and cannot exempt a packet: use hook prerouting")
	}
	if r.Out != "" {
		return errors.New("out at hook ingress: the packet is not routed yet; use hook forward")
	}
	return nil
}

// helperProtocols returns the protocols of a helper, limited to the protocol of the service or
// rule.
func helperProtocols(h config.Helper, p flow.Protocol) []flow.Protocol {
	var out []flow.Protocol
	for _, k := range h.Protocols() {
		if p == flow.Any || p == k {
			out = append(out, k)
		}
	}
	return out
}

// helpsIPv6 reports whether the kernel has the helper for IPv6 too.
func helpsIPv6(h config.Helper) bool { return h == "ftp" || h == "tftp" || h == "sip" || h == "amanda" }

// kernelHelper returns the name under which the kernel registers a helper.
func kernelHelper(h config.Helper) string {
	if h == "snmp" {
		return "snmp_trap"
	}
	return string(h)
}
