// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// TestEachPacketByRules: rules of "ip rule", and routes with a type of service, select the route of each packet, also
// where a flow or a backend has a next hop of an earlier packet.
func TestEachPacketByRules(t *testing.T) {
	const (
		plain4   = "ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=4000,dport=53)/data(4)"
		plain6   = "ip6(src=2001:db8:5::1,dst=2001:db8:9::10)/udp(sport=4000,dport=53)/data(4)"
		service4 = "ip4(src=198.18.0.1,dst=192.0.2.10,tos=0x10)/udp(sport=4000,dport=53)/data(4)"
	)
	for name, c := range map[string]struct{ set, plain, other, iface string }{
		"class":        {"rule add tos 0x10 lookup 100", plain4, service4, "wan0"},
		"class of six": {"-6 rule add tos 0x10 lookup 100", plain6, "ip6(src=2001:db8:5::1,dst=2001:db8:9::10,tc=0x10)/udp(sport=4000,dport=53)/data(4)", "wan0"},
		"route":        {"route add 10.99.0.5 tos 0x10 via 10.0.2.3", plain4, service4, "wan0"},
		"source":       {"rule add not from 198.18.0.1 lookup 100", plain4, "ip4(src=198.18.0.2,dst=192.0.2.10)/udp(sport=4000,dport=53)/data(4)", "wan0"},
		"source port":  {"rule add ipproto udp sport 4001 lookup 100", plain4, "ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=4001,dport=53)/data(4)", "wan0"},
		"port of six":  {"-6 rule add ipproto udp sport 4001 lookup 100", plain6, "ip6(src=2001:db8:5::1,dst=2001:db8:9::10)/udp(sport=4001,dport=53)/data(4)", "wan0"},
		"input":        {"rule add iif lan0 lookup 100", plain4, plain4, "lan0"},
		"input of six": {"-6 rule add iif lan0 lookup 100", plain6, plain6, "lan0"},
	} {
		for _, hook := range []string{"xdp", "tc"} {
			for _, mode := range []string{"dnat", "stateless"} {
				t.Run(hook+"/"+mode+"/"+name, func(t *testing.T) {
					s := changingAt(t, hook, fmt.Sprintf(`
services:
  - {name: four, protocol: udp, mode: %[1]s, scheduler: source-hash, listen: [{address: 192.0.2.10, ports: [53]}], backends: [{address: 10.99.0.5}]}
  - {name: six, protocol: udp, mode: %[1]s, scheduler: source-hash, listen: [{address: "2001:db8:9::10", ports: [53]}], backends: [{address: "fd00:99::5"}]}
`, mode))
					if err := s.ip("route add 10.99.0.0/24 via 10.0.2.2\n-6 route add fd00:99::/64 via fd00:2::2\n" +
						"route add default via 10.0.2.3 table 100\n-6 route add default via fd00:2::3 table 100\n" + c.set); err != nil {
						t.Fatal(err)
					}
					if err := s.inside(s.apply); err != nil {
						t.Fatal(err)
					}
					to := func(iface, text string) packet.MAC {
						out := send(t, s, iface, text)
						if out.Action != model.Forward || len(out.Out) != 1 {
							t.Fatalf("%s: %v %v", text, out.Action, out.Reason)
						}
						return packet.MAC(out.Out[0].Frame[:6])
					}
					first := to("wan0", c.plain)
					for range 2 { // with and without a next hop in the cache
						if other := to(c.iface, c.other); other == first {
							t.Errorf("%s goes to %s as %s does", c.other, other, c.plain)
						}
						if again := to("wan0", c.plain); again != first {
							t.Errorf("%s goes to %s, and before to %s", c.plain, again, first)
						}
					}
				})
			}
		}
	}
}
