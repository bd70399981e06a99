// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// CarriesService returns nil when this datapath can carry all of the service.
func (d *Datapath) CarriesService(s *config.Service) error {
	names := make([]string, len(s.Listen))
	for i, l := range s.Listen {
		names[i] = l.Interface
	}
	return cmp.Or(compile.CarriesService(s), d.takes(names...), d.elsewhere(s))
}

// CarriesNAT returns nil when this datapath can carry all of the rule.
func (d *Datapath) CarriesNAT(n *config.NATRule) error {
	if err := cmp.Or(compile.CarriesNAT(n), d.takes(append(n.In.Words(), n.Out.Words()...)...)); err != nil || n.Type != config.NATPortForward {
		return err
	}
	return d.notOwn("target", n.To.Address)
}

// CarriesRule returns nil when this datapath can carry all of the firewall rule.
func (d *Datapath) CarriesRule(r *config.FirewallRule) error {
	return cmp.Or(compile.CarriesRule(r), d.takes(r.In))
}

// elsewhere returns nil when no backend is this host itself, whose answers have to come by to be translated.
func (d *Datapath) elsewhere(s *config.Service) error {
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
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changes.Changed() || d.placing == nil {
		err := d.inside(func() (err error) { d.placing, err = readHost(); return err })
		if err != nil {
			d.placing = nil
			return nil // an apply reads them again, and says so
		}
	}
	if a.IsLoopback() || d.placing.Owns(a) {
		return fmt.Errorf("%s %s is this host itself, and programs at the ingress of its interfaces do not see its answers", what, a)
	}
	return nil
}

const unknownHeaders = "shows programs neither Ethernet headers nor plain IP packets"

// takes returns nil when programs can stand on the interfaces that are named, or whose names begin
// as before a *; "" is none.
func (d *Datapath) takes(names ...string) error {
	names = slices.DeleteFunc(names, func(name string) bool { return name == "" })
	if len(names) == 0 {
		return nil
	}
	return d.inside(func() error {
		for _, name := range names {
			for _, i := range there(config.Interfaces(name)) { // one that is to come may be another
				if !i.Ethernet() && !i.Bare() {
					return fmt.Errorf("interface %s %s", i.Name, unknownHeaders)
				}
			}
		}
		return nil
	})
}

// there lists the interfaces of a word that are there.
func there(word config.Interfaces) (list []netdev.Interface) {
	if !word.Several() {
		if i, ok := netdev.ByName(string(word)); ok {
			list = append(list, i)
		}
		return list
	}
	all, err := netdev.Interfaces()
	if err != nil {
		return nil // compile reads them again, and says so
	}
	return slices.DeleteFunc(all, func(i netdev.Interface) bool { return !word.Has(i.Name) })
}
