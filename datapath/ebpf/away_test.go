// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/datapath"
)

// TestBackendsFollowWhileALinkIsAway takes away what a configuration in force needs of
// the network: that must not keep backends in use that fail meanwhile.
func TestBackendsFollowWhileALinkIsAway(t *testing.T) {
	const yaml = `
services:
  - {name: web, protocol: tcp, mode: fullnat, listen: [{address: 192.0.2.10, ports: [80]}], backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}
`
	link := func(name string, f func(netlink.Link) error) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(l)
	}
	for name, goes := range map[string]func() error{
		"wan0 loses its addresses": func() error {
			return link("wan0", func(l netlink.Link) error {
				list, err := netlink.AddrList(l, netlink.FAMILY_ALL)
				for i := range list {
					err = errors.Join(err, netlink.AddrDel(l, &list[i]))
				}
				return err
			})
		},
		"wan0 is gone":  func() error { return link("wan0", netlink.LinkDel) },
		"both are gone": func() error { return errors.Join(link("wan0", netlink.LinkDel), link("lan0", netlink.LinkDel)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := changing(t, yaml)
			if err := s.inside(goes); err != nil {
				t.Fatal(err)
			}
			for range 2 { // also with what was only remembered
				down := *s.snapshot
				down.Services = slices.Clone(down.Services)
				down.Services[0].State = []datapath.State{datapath.Down, datapath.Up}
				s.snapshot = &down
				if err := s.inside(s.apply); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.ContainsFunc(s.d.Warnings(), func(w string) bool { return strings.Contains(w, "nat office") || strings.Contains(w, "service web") }) {
				t.Errorf("the warnings %q do not tell what is away", s.d.Warnings())
			}
			other := *s.snapshot.Config
			again := *s.snapshot
			again.Config = &other
			err := s.inside(func() error { _, err := s.d.Apply(context.Background(), &again); return err })
			if err == nil {
				t.Error("a configuration that does not fit the host was taken")
			}
		})
	}
}
