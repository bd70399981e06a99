// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
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
	return cmp.Or(compile.CarriesService(s), d.takes(names...))
}

// CarriesNAT returns nil when this datapath can carry all of the rule.
func (d *Datapath) CarriesNAT(n *config.NATRule) error {
	return cmp.Or(compile.CarriesNAT(n), d.takes(append(n.In.Words(), n.Out.Words()...)...))
}

// CarriesRule returns nil when this datapath can carry all of the firewall rule.
func (d *Datapath) CarriesRule(r *config.FirewallRule) error {
	return cmp.Or(compile.CarriesRule(r), d.takes(r.In))
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
