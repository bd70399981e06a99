// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/netdev"
)

// CarriesService returns nil if this datapath supports every option of the service.
func (d *Datapath) CarriesService(s *config.Service) error {
	names := make([]string, len(s.Listen))
	for i, l := range s.Listen {
		names[i] = l.Interface
	}
	return cmp.Or(compile.CarriesService(s), d.checkInterfaces(names...), d.checkBackends(s))
}

// CarriesNAT returns nil if this datapath supports every option of the rule.
func (d *Datapath) CarriesNAT(n *config.NATRule) error {
	if err := cmp.Or(compile.CarriesNAT(n), d.checkInterfaces(append(n.In.Words(), n.Out.Words()...)...)); err != nil || !n.Type.Forwards() {
		return err
	}
	return d.notOwn("target", n.To.Address)
}

// CarriesRule returns nil if this datapath supports every option of the firewall rule.
func (d *Datapath) CarriesRule(r *config.FirewallRule) error {
	return cmp.Or(compile.CarriesRule(r), d.checkInterfaces(r.In))
}

// checkBackends returns an error if a backend is this host. The programs do not see its replies, so
// they cannot translate them.
func (d *Datapath) checkBackends(s *config.Service) error {
	if s.Mode != config.ModeDNAT && s.Mode != config.ModeFullNAT && s.Mode != config.ModeStateless {
		return nil
	}
	for i := range s.Backends {
		if err := d.notOwn("backend", s.Backends[i].Address); err != nil {
			return err
		}
	}
	return nil
}

func (d *Datapath) notOwn(what string, a netip.Addr) error {
	if h := d.hostNow(); h != nil && (a.IsLoopback() || h.Owns(a)) {
		return fmt.Errorf("%s %s is this host itself, and programs at the ingress of its interfaces do not see its answers", what, a)
	}
	return nil
}

// hostNow returns the current state of the host, or nil if it cannot be read. The next Apply
// reports the error.
func (d *Datapath) hostNow() *compile.Host {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changes.Changed() || d.placementHost == nil {
		if err := d.inNamespace(func() (err error) { d.placementHost, err = readHost(); return err }); err != nil {
			d.placementHost = nil
		}
	}
	return d.placementHost
}

var _ datapath.Bypasser = (*Datapath)(nil)

// BypassesService returns an error if packets of a service would bypass an IPsec policy of the
// host.
func (d *Datapath) BypassesService(s *config.Service) error {
	if h := d.hostNow(); h != nil {
		return bypassError(h.BypassedByService(s))
	}
	return nil
}

// BypassesNAT returns an error if packets of a NAT rule would bypass an IPsec policy of the host.
func (d *Datapath) BypassesNAT(n *config.NATRule) error {
	if h := d.hostNow(); h != nil {
		return bypassError(h.BypassedByNAT(n))
	}
	return nil
}

func bypassError(p netdev.IPsecPolicy, found bool) error {
	if !found {
		return nil
	}
	return fmt.Errorf("its packets would bypass an IPsec policy of this host (ip xfrm policy, %s)", p)
}

const unknownHeaders = "shows programs neither Ethernet headers nor plain IP packets"

// checkInterfaces returns an error if an existing interface matches a name or pattern and cannot
// run programs. It ignores empty names.
func (d *Datapath) checkInterfaces(names ...string) error {
	names = slices.DeleteFunc(names, func(name string) bool { return name == "" })
	if len(names) == 0 {
		return nil
	}
	return d.inNamespace(func() error {
		for _, name := range names {
			for _, i := range matchingInterfaces(config.Interfaces(name)) { // a missing interface may be added with another type
				if !i.Ethernet() && !i.Bare() {
					return fmt.Errorf("interface %s %s", i.Name, unknownHeaders)
				}
			}
		}
		return nil
	})
}

// matchingInterfaces lists the existing interfaces that match a name or pattern.
func matchingInterfaces(word config.Interfaces) (list []netdev.Interface) {
	if !word.MatchesSeveral() {
		if i, ok := netdev.ByName(string(word)); ok {
			list = append(list, i)
		}
		return list
	}
	all, err := netdev.Interfaces()
	if err != nil {
		return nil // compile reads them again and reports the error
	}
	return slices.DeleteFunc(all, func(i netdev.Interface) bool { return !word.Has(i.Name) })
}
