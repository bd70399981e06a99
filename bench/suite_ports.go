// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/load"
)

// The pool that the suite fills: 4 addresses with 64,512 ports each (1024 to 65535). Clients have 64 flows each, so a
// gateway with address pooling (RFC 4787 REQ-2) can use all ports.
const (
	portsPool     = "10.0.2.96-10.0.2.99"
	portsAll      = 4 * 64512
	flowsPerGuest = 64
)

// portsFills are the measured fills in percent. fillWindow is the share of the pool, in percent, that each
// measurement uses up just below a fill.
var portsFills = []int{10, 50, 90, 95, 99}

const fillWindow = 3

func portsSuite() Suite {
	snat := "nat:\n  - {name: out, type: snat, source: [10.64.0.0/12], out: lan0, to: [" + portsPool + "], ports: 1024-65535}\n"
	s := Suite{
		Name: "ports", Title: "New flows a second while a pool of ports fills up",
		About: "Source NAT to 4 addresses, 258,048 ports. Each packet is the first of its flow, all to one server and port, so " +
			"each takes a port that is still free; clients have 64 flows each. A column counts those that arrive while the last three " +
			"percent up to that fill ask; “served” is how much of the pool was given out when as many flows as ports had asked once.",
		Yardstick: true,
		MaxReps:   3,
		Points:    []Point{{Name: "4 addresses", Value: portsAll}},
		NotShown:  []string{"Flows to many servers: a NAT that maps by address and port may use a port once for each of them."},
	}
	for _, fill := range portsFills {
		s.Metrics = append(s.Metrics, Metric{Name: fillMetric(fill), Unit: "1000/s"})
	}
	s.Metrics = append(s.Metrics, Metric{Name: "served", Unit: "% of the ports", Digits: 2, Absolute: true})
	s.Rows = []Row{
		{Name: "iptables SNAT", About: "one rule", Run: portsRow(iptablesRule("POSTROUTING", "-o", "lan0", "-p", "udp", "-j", "SNAT", "--to-source", portsPool+":1024-65535"))},
		{Name: "nft SNAT", About: "one rule", Run: portsRow(nftRules("table ip peer { chain postrouting { type nat hook postrouting priority srcnat; oifname \"lan0\" meta l4proto udp snat to " + portsPool + ":1024-65535; }\n}\n"))},
	}
	for _, r := range []struct{ name, path, attach string }{
		{"sluice nftables snat", "nftables", ""}, {"sluice ebpf snat (xdp)", "ebpf", "xdp"}, {"sluice ebpf snat (tc)", "ebpf", "tc"},
	} {
		s.Rows = append(s.Rows, absentRow(Row{Name: r.name, About: "one snat rule", Run: portsRow(func(t *Trial, n *network) error {
			c, err := config.Decode("bench", []byte(service{attach: r.attach}.configHead(Point{Value: portsAll})+snat))
			if err != nil {
				return err
			}
			_, _, err = applyConfig(t, n, r.path, c)
			return err
		})}, r.path))
	}
	for _, c := range []struct {
		fill  int
		reach float64
	}{{10, 1000}, {50, 1000}, {95, 500}} {
		s.Comparisons = append(s.Comparisons, Comparison{
			What: fmt.Sprintf("snat by XDP, 1000 new flows/s at %d %%", c.fill), Row: "sluice ebpf snat (xdp)",
			Metric: fillMetric(c.fill), Published: c.reach, Source: goal,
		})
	}
	s.Comparisons = append(s.Comparisons, Comparison{
		What: "snat by XDP, served, % of the ports", Row: "sluice ebpf snat (xdp)", Metric: "served", Published: 99, Source: goal,
	})
	return s
}

func fillMetric(percent int) string { return fmt.Sprintf("at %d %%", percent) }

// portsRow returns a run that fills the pool once and measures on the way.
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
		clients := load.Range{First: clients4, Count: portsAll / flowsPerGuest, Ports: flow.Ports{First: 1024, Last: 1024 + flowsPerGuest - 1}}
		s := stream{dest: singleEndpoint(server4, 53), flows: portsAll, source: &clients}
		var served uint64
		open := func(to int) (float64, error) {
			perSecond, arrived, err := n.openFlows(t, s, to-s.skip)
			if err != nil {
				return 0, fmt.Errorf("flows %d to %d: %w", s.skip, to, err)
			}
			s.skip = to
			served += arrived
			return perSecond, nil
		}
		for _, fill := range portsFills {
			if _, err := open((fill - fillWindow) * portsAll / 100); err != nil {
				return err
			}
			rate, err := open(fill * portsAll / 100)
			if err != nil {
				return err
			}
			if rate > 0 {
				t.Report(fillMetric(fill), rate/1e3)
			}
		}
		if _, err := open(portsAll); err != nil {
			return err
		}
		t.Report("served", 100*float64(served)/portsAll)
		return nil
	}
}
