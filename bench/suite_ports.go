// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/sluice-lb/sluice/config"
)

// Ports of the pool that the suite fills: 16 addresses with 64,512 ports each
// (1024 to 65535).
const (
	portsPool = "10.0.2.96-10.0.2.111"
	portsAll  = 16 * 64512
)

func portsSuite() Suite {
	snat := "nat:\n  - {name: out, type: snat, source: [10.64.0.0/12], out: lan0, to: [" + portsPool + "], ports: 1024-65535}\n"
	s := Suite{
		Name: "ports", Title: "New flows a second while a pool of ports fills up",
		About: "Source NAT to 16 addresses, 1,032,192 ports. Each packet is the first of its flow, all to one server and port, so " +
			"each takes a port that is still free. A point counts the flows between two fills.",
		Yardstick: true,
		Points:    []Point{{Name: "empty to 50 %", Value: 50}, {Name: "50 to 95 %", Value: 95}, {Name: "95 to 100 %", Value: 100}},
		Metrics:   []Metric{{Name: "new flows", Unit: "1000/s", Digits: 0}, {Name: "served", Unit: "% of the ports", Digits: 2}},
		NotShown:  []string{"Flows to many servers: a NAT that maps by address and port may use a port once for each of them."},
	}
	s.Rows = []Row{
		{Name: "iptables SNAT", About: "one rule", Run: portsRow(iptablesRule("POSTROUTING", "-o", "lan0", "-p", "udp", "-j", "SNAT", "--to-source", portsPool+":1024-65535"))},
		{Name: "nft SNAT", About: "one rule", Run: portsRow(nftRules("table ip peer { chain postrouting { type nat hook postrouting priority srcnat; oifname \"lan0\" meta l4proto udp snat to " + portsPool + ":1024-65535; }\n}\n"))},
	}
	for _, r := range []struct{ name, path, attach string }{
		{"sluice nftables snat", "nftables", ""}, {"sluice ebpf snat (xdp)", "ebpf", "xdp"}, {"sluice ebpf snat (tc)", "ebpf", "tc"},
	} {
		s.Rows = append(s.Rows, absentRow(Row{Name: r.name, About: "one snat rule", Run: portsRow(func(t *Trial, n *network) error {
			c, err := config.Decode("bench", []byte(service{attach: r.attach}.head(Point{Value: portsAll})+snat))
			if err != nil {
				return err
			}
			_, _, err = applyConfig(t, n, r.path, c)
			return err
		})}, r.path))
	}
	return s
}

// portsRow fills the pool up to where the point begins and measures from there.
func portsRow(set setup) func(*Trial) error {
	return func(t *Trial) error {
		n, err := newNetwork(t)
		if err != nil {
			return err
		}
		if err := t.needConntrack(portsAll + 1<<17); err != nil {
			return err
		}
		if err := warmNeighbour(t, n); err != nil {
			return err
		}
		if err := set(t, n); err != nil {
			return err
		}
		from := map[int]int{50: 0, 95: 50, 100: 95}[t.Point.Value] * portsAll / 100
		to := t.Point.Value * portsAll / 100
		clients := clientsOf(false, portsAll)
		s := stream{dest: one(server4, 53), flows: portsAll, source: &clients}
		var before uint64
		if from > 0 {
			if _, before, err = n.openFlows(t, s, from); err != nil {
				return fmt.Errorf("fill: %w", err)
			}
		}
		s.skip = from
		perSecond, arrived, err := n.openFlows(t, s, to-from)
		if err != nil {
			return err
		}
		t.Report("new flows", perSecond/1e3)
		t.Report("served", 100*float64(before+arrived)/float64(to))
		return nil
	}
}
