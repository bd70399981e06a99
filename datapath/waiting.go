// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/sluice-lb/sluice/config"
)

// Waiting returns warnings about interfaces in rules of a snapshot. It warns about a missing interface, and about an
// interface without an address that a listener or masquerade rule needs. Such a rule is accepted and takes effect
// when the interface appears, because PPP links, VLANs and containers change at run time. there reports whether an
// interface exists; a name may end in *. addressed reports whether it has an address of a family, sourced whether it has
// one or its default route names one.
func Waiting(s *Snapshot, there func(name string) bool, addressed, sourced func(name string, v6 bool) bool) (out []string) {
	told := map[string]bool{"": true, "lo": true}
	note := func(name, kind, owner string) {
		if !told[name] && !there(name) {
			out = append(out, fmt.Sprintf("%s %s: there is no interface %s: no packet matches it until one appears; \"ip link\" shows the existing ones", kind, owner, name))
			told[name] = true
		}
	}
	follows := func(l config.Listen, kind, owner string, v6 bool) {
		family := "IPv4"
		if v6 {
			family = "IPv6"
		}
		if l.Follows() && there(l.Interface) && !told[l.Interface+" "+family] && !addressed(l.Interface, v6) {
			out = append(out, fmt.Sprintf("%s %s: interface %s has no %s address: nothing listens on it until there is one", kind, owner, l.Interface, family))
			told[l.Interface+" "+family] = true
		}
	}
	for _, svc := range s.Services {
		for _, l := range svc.Listen {
			note(l.Interface, "service", svc.Name)
			for _, v6 := range []bool{false, true} {
				if hasBackends(svc.Service, v6) {
					follows(l, "service", svc.Name, v6)
				}
			}
		}
	}
	for _, n := range s.NAT {
		for _, name := range append(n.In.Words(), n.Out.Words()...) {
			note(name, "nat", n.Name)
		}
		if n.Listen != nil {
			note(n.Listen.Interface, "nat", n.Name)
			follows(*n.Listen, "nat", n.Name, n.To.Address.Is6())
		}
		for _, name := range n.Out.Names() {
			if told[name] || !n.Type.UsesInterfaceAddress() {
				continue
			}
			if lacks := missingAddresses(n, name, sourced); lacks != "" {
				out = append(out, fmt.Sprintf("nat %s: interface %s has no %s: packets for translation are dropped (no-address) until there is one; to use an address of another interface, write type: snat with it in to", n.Name, name, lacks))
				told[name] = true
			}
		}
	}
	for _, r := range s.Rules {
		note(r.In, "firewall rule", r.Name)
		note(r.Out, "firewall rule", r.Name)
	}
	return out
}

// missingAddresses returns the addresses that an interface lacks for a masquerade rule, "" if none.
func missingAddresses(n *config.NATRule, name string, addressed func(name string, v6 bool) bool) string {
	four, six := len(n.Source) == 0, false // without a source a rule applies to IPv4 only
	for _, p := range n.Source {
		four, six = four || p.Addr().Is4(), six || p.Addr().Is6()
	}
	four, six = four && !addressed(name, false), six && !addressed(name, true)
	switch {
	case four && (six || !addressed(name, true)):
		return "address"
	case four:
		return "IPv4 address"
	case six && !addressed(name, false):
		return "address"
	case six:
		return "IPv6 address"
	}
	return ""
}
