// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestWantedAddresses lists the addresses that each kind of object needs, and the objects that need none.
func TestWantedAddresses(t *testing.T) {
	const text = `
services:
  - {name: web, listen: [{address: 198.51.100.20, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], backends: [{address: 10.0.2.2}]}
  - {name: direct, listen: [{address: 198.51.100.21, ports: [80]}], protocol: tcp, mode: dsr, backends: [{address: 198.51.100.9}], check: {type: tcp, via: service}}
  - {name: less, listen: [{address: 198.51.100.22, ports: [80]}], protocol: tcp, mode: stateless, backends: [{address: 10.0.2.2}]}
  - {name: less6, listen: [{address: "2001:db8::22", ports: [80]}], protocol: tcp, mode: stateless, backends: [{address: "fd00::2"}]}
nat:
  - {name: pool, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1-203.0.113.9]}
  - {name: one, type: static, external: 203.0.113.16/30, internal: 10.0.2.16/30}
  - {name: in, type: port-forward, listen: {address: 203.0.113.30, ports: [22]}, protocol: tcp, to: {address: 10.0.2.2}}
  - {name: six, type: nat64, source: ["fd00:2::/64"], prefix: "64:ff9b::/96", pool: [203.0.113.40]}
  - {name: out, type: masquerade, source: [10.0.3.0/24], out: wan0}
`
	plan := placement{services: []Place{{Datapaths: []string{"ebpf"}}, {Datapaths: []string{"ebpf"}}, {Datapaths: []string{"nftables"}}, {Datapaths: []string{"nftables"}}}}
	list := func(text string) string {
		c, err := config.Decode("test.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, w := range wantedAddresses(c, plan) {
			line := w.Owner + " " + w.First.String() + "-" + w.Last.String()
			if w.Leave != "" {
				line += " left"
			}
			out = append(out, line)
		}
		return strings.Join(out, "\n")
	}
	const want = `service web 198.51.100.20-198.51.100.20
service web 10.0.2.100-10.0.2.103
service direct 198.51.100.21-198.51.100.21 left
service less 198.51.100.22-198.51.100.22 left
service less6 2001:db8::22-2001:db8::22
nat pool 203.0.113.1-203.0.113.9
nat one 203.0.113.16-203.0.113.19
nat in 203.0.113.30-203.0.113.30
nat six 203.0.113.40-203.0.113.40`
	if got := list(text); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := list(text + "hold-addresses: off\n"); strings.Count(got, " left") != 9 {
		t.Errorf("with hold-addresses off:\n%s", got)
	}
}
