// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/sluice-lb/sluice/config"
)

// Waiting tells what of a snapshot waits for the network, in words, each interface once:
// PPP links, VLANs and containers come and go, and what names one that is not there is
// taken, does nothing, and takes force when it comes. there reports whether an interface is
// there, or one whose name begins as before the * at the end; addressed whether it has an
// address.
func Waiting(s *Snapshot, there, addressed func(name string) bool) (out []string) {
	told := map[string]bool{"": true, "lo": true}
	note := func(name, kind, owner string) {
		if !told[name] && !there(name) {
			out = append(out, fmt.Sprintf("%s %s: there is no interface %s: nothing meets it until one comes; \"ip link\" shows those that are there", kind, owner, name))
			told[name] = true
		}
	}
	for _, svc := range s.Services {
		for _, l := range svc.Listen {
			note(l.Interface, "service", svc.Name)
		}
	}
	for _, n := range s.NAT {
		for _, name := range append(n.In.Words(), n.Out.Words()...) {
			note(name, "nat", n.Name)
		}
		if n.Listen != nil {
			note(n.Listen.Interface, "nat", n.Name)
		}
		for _, name := range n.Out.Names() {
			if n.Type == config.NATMasquerade && !told[name] && !addressed(name) {
				out = append(out, fmt.Sprintf("nat %s: interface %s has no address: what it is to translate is dropped until there is one", n.Name, name))
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
