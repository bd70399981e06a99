// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// Limits of ids.
const (
	MaxBackends = wire.MaxBackends - 1 // The last number means none.
	MaxSets     = 64                   // Bits of a word.
)

func CarriesService(s *config.Service) error {
	if err := carriesProtocol(s); err != nil {
		return err
	}
	for _, l := range s.Listen {
		if err := carriesListener(l); err != nil {
			return err
		}
	}
	switch {
	case s.Helper != "":
		return fmt.Errorf("helper %s needs the kernel's connection tracking", s.Helper)
	case s.Log != nil && (s.Mode == config.ModeStateless || s.Mode.OneWay() && s.Scheduler.Hashes()):
		return fmt.Errorf("log: mode %s with scheduler %s keeps no flows in the ebpf datapath, so there are no new flows to log", s.Mode, s.Scheduler)
	case s.SYNCookies && s.ClientAddress != config.ClientAddressNone && s.ClientAddress != "":
		return fmt.Errorf("client-address %s with syn-cookies: both change the handshake that the backend sees; remove one of them", s.ClientAddress)
	case s.Mark != 0:
		return errors.New("mark is put on connections of the kernel, which the ebpf datapath does not make")
	}
	return carriesMode(s)
}

// carriesListener returns an error for link-local addresses. The programs leave their packets to
// the kernel (never_routed of bpf/datapath/before_flow.h).
func carriesListener(l config.Listen) error {
	if l.Address.Is6() && l.Address.IsLinkLocalUnicast() {
		return fmt.Errorf("listener %s is link-local: the ebpf datapath leaves packets to such addresses to the kernel", l.Address)
	}
	return nil
}

// carriesProtocol returns an error if the service needs a port change that the programs cannot
// make.
func carriesProtocol(s *config.Service) error {
	switch s.Protocol {
	case flow.TCP, flow.UDP:
		return nil
	case flow.SCTP, flow.Any:
	default:
		return fmt.Errorf("protocol %s is not carried by the ebpf datapath", s.Protocol)
	}
	if s.Mode == config.ModeFullNAT {
		return fmt.Errorf("protocol %s in mode fullnat needs other source ports, and the checksum of SCTP over the whole packet then: not available in the ebpf datapath", s.Protocol)
	}
	for _, l := range s.Listen {
		if s.Protocol == flow.Any && len(l.Ports) > 0 {
			return errors.New("protocol any with ports is not carried by the ebpf datapath")
		}
		for _, b := range s.Backends {
			if b.Port != 0 && (len(l.Ports) != 1 || l.Ports[0] != flow.Ports{First: b.Port, Last: b.Port}) {
				return fmt.Errorf("backend %s: protocol %s with another port than the listener's needs the checksum over the whole packet: not available in the ebpf datapath", b.Name, s.Protocol)
			}
		}
	}
	return nil
}

func carriesMode(s *config.Service) error {
	for _, b := range s.Backends {
		if b.Mark != 0 {
			return fmt.Errorf("backend %s: mark is put on connections of the kernel, which the ebpf datapath does not make", b.Name)
		}
	}
	if s.Mode == config.ModeStateless && !oneEndpoint(s) {
		return errors.New("mode stateless with several virtual endpoints for one backend port: without flows, an answer cannot be assigned to one of them")
	}
	families := map[bool]bool{}
	for _, l := range s.Listen {
		if l.Address.IsValid() { // without an address, the listener gets a family of the backends
			families[l.Address.Is4()] = true
		}
	}
	for _, b := range s.Backends {
		families[b.Address.Is4()] = true
	}
	if len(families) > 1 && s.Mode != config.ModeFullNAT && s.Mode != config.ModeTunnel {
		return fmt.Errorf("mode %s cannot change between IPv4 and IPv6", s.Mode)
	}
	return nil
}

func CarriesNAT(n *config.NATRule) error {
	if !n.Type.Known() {
		return fmt.Errorf("%s is not available in the ebpf datapath", n.Type)
	}
	if n.Listen != nil {
		if err := carriesListener(*n.Listen); err != nil {
			return err
		}
	}
	switch {
	case n.Type.UsesInterfaceAddress() && n.Out == "":
		return errors.New("masquerade without out would map one inside endpoint to the addresses of several egress interfaces: not available in the ebpf datapath; name the interface in out")
	case n.Helper != "":
		return fmt.Errorf("helper %s needs the kernel's connection tracking", n.Helper)
	case n.Mark != 0:
		return errors.New("mark is put on connections of the kernel, which the ebpf datapath does not make")
	case n.Type.Forwards() && n.Protocol != flow.TCP && n.Protocol != flow.UDP && !(n.Protocol == flow.ICMP && n.Crosses()):
		return fmt.Errorf("protocol %s is not carried by the ebpf datapath", n.Protocol)
	}
	return nil
}

func CarriesRule(r *config.FirewallRule) error {
	switch {
	case r.Action != config.ActionDrop && r.Action != config.ActionAccept:
		return fmt.Errorf("action %s needs the kernel's hooks", r.Action)
	case r.Hook != config.HookIngress && r.Hook != "":
		return fmt.Errorf("hook %s belongs to the kernel: the ebpf datapath works at ingress", r.Hook)
	case r.Out != "":
		return errors.New("the egress interface of a packet is not known at ingress")
	case !r.Rate.IsZero() && len(r.Ports) > 1:
		return errors.New("a rate over more than one port range is not available in the ebpf datapath")
	}
	return nil
}

// oneEndpoint reports whether a backend's reply identifies its virtual endpoint.
func oneEndpoint(s *config.Service) bool {
	count := map[bool]int{}
	for _, l := range s.Listen {
		count[l.Address.Is4()]++
		one := len(l.Ports) == 1 && l.Ports[0].First == l.Ports[0].Last
		for _, b := range s.Backends {
			if b.Port != 0 && !one {
				return false
			}
		}
	}
	return count[true] <= 1 && count[false] <= 1
}
