// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// TestEqualRoutes: with several equal routes to a backend, connections with a flow are spread over the routes as
// the kernel spreads forwarded packets. Modes without flows use one route.
func TestEqualRoutes(t *testing.T) {
	for _, hook := range []string{"xdp", "tc"} {
		for mode, spread := range map[string]bool{"dnat": true, "fullnat": true, "stateless": false} {
			t.Run(hook+"/"+mode, func(t *testing.T) {
				s := changingAt(t, hook, fmt.Sprintf(`
services:
  - {name: four, protocol: udp, mode: %[1]s, scheduler: source-hash, listen: [{address: 192.0.2.10, ports: [53]}], backends: [{address: 10.99.0.5}]}
  - {name: six, protocol: udp, mode: %[1]s, scheduler: source-hash, listen: [{address: "2001:db8:9::10", ports: [53]}], backends: [{address: "fd00:99::5"}]}
`, mode))
				if err := s.ip("route add 10.99.0.0/24 nexthop via 10.0.2.2 nexthop via 10.0.2.3\n" +
					"-6 route add fd00:99::/64 nexthop via fd00:2::2 nexthop via fd00:2::3"); err != nil {
					t.Fatal(err)
				}
				if err := s.inside(s.apply); err != nil {
					t.Fatal(err)
				}
				for _, form := range []string{"ip4(src=198.18.0.%d,dst=192.0.2.10)/udp(sport=4000,dport=53)/data(4)",
					"ip6(src=2001:db8:5::%d,dst=2001:db8:9::10)/udp(sport=4000,dport=53)/data(4)"} {
					ways := map[packet.MAC]int{}
					for i := range 40 {
						out := send(t, s, "wan0", fmt.Sprintf(form, i+1))
						if out.Action != model.Forward || len(out.Out) != 1 {
							t.Fatalf("%v %v", out.Action, out.Reason)
						}
						ways[packet.MAC(out.Out[0].Frame[:6])]++
					}
					if spread != (len(ways) == 2) {
						t.Errorf("%s: ways %v", form, ways)
					}
				}
			})
		}
	}
}
