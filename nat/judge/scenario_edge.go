// SPDX-License-Identifier: Apache-2.0

package judge

import "slices"

// edgeScenarios are those of a customer's router: several interfaces, port sets, what is published.
func edgeScenarios() []Scenario {
	clients4 := addresses("203.0.113.%d", 1, 40)
	inside4, inside6 := addresses("10.0.2.%d", 2, 9), addresses("fd00:2::%x", 2, 9)
	far4, far6 := addresses("198.18.0.%d", 1, 5), addresses("2001:db8:9::%x", 1, 5)
	near4, near6 := addresses("10.1.0.%d", 1, 5), addresses("fd00:a:4::%x", 1, 5)
	all := []Kind{TCP, UDP, Ping, TCP, UDP}
	return []Scenario{
		{Name: "several", YAML: several, Opens: []Opening{
			{"lan0", inside4, slices.Concat(far4, near4, one("198.51.100.1"), one("10.0.2.1")), []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, slices.Concat(far6, near6), []uint16{53, 80}, all},
			{"wan0", clients4, slices.Concat(one("203.0.113.202"), one("203.0.113.201")), []uint16{80, 53, 9}, all}}},
	}
}

// several has rules of more than one interface.
const several = `
nat:
  - {name: home, type: masquerade, source: [10.0.2.0/30], out: [wan*, lan0], filtering: address-dependent}
  - {name: home6, type: masquerade, source: ["fd00:2::/125"], out: [wan0, lan0, ppp*], mss-clamp: true}
  - {name: never, type: masquerade, source: [10.0.2.4/31], out: [ppp*, wan1]}
  - {name: pool, type: snat, source: [10.0.2.0/24], in: [ppp*, lan0], out: [w*, tun0], to: [203.0.113.201]}
  - {name: http, type: port-forward, in: [ppp*, wan*], listen: {address: 203.0.113.202, ports: [80]}, protocol: tcp, to: {address: 10.0.2.9, port: 8080}}
  - {name: dns, type: port-forward, in: lan*, listen: {address: 203.0.113.202, ports: [53]}, protocol: udp, to: {address: 10.0.2.8}}
`
