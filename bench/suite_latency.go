// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"math"
	"time"
)

func latencySuite() Suite {
	us := func(name string) Metric { return Metric{Name: name, Unit: "µs", LowerIsBetter: true, Digits: 1} }
	const flows = 50_000
	s := Suite{
		Name: "latency", Title: "Time of a packet through the gateway",
		About: "60-byte UDP packets of 50,000 flows at 10, 50 and 90 % of the rate that the same row reaches at most, measured " +
			"just before with the same stamped packets and by the clock on the wall, as the rate is held. The rate is held open-loop: time counts from when a packet was due, so " +
			"waiting behind others counts too. Batches of 8 packets are flushed together.",
		MaxReps: 3,
		Points:  []Point{{Name: "10 %", Value: 10}, {Name: "50 %", Value: 50}, {Name: "90 %", Value: 90}},
		Metrics: []Metric{us("p50"), us("p99"), us("p99.9")},
		NotShown: []string{
			"A network card's interrupts and moderation, which are most of the latency of real gateways.",
			"An idle machine's wake-up times: the sender never sleeps.",
		},
	}
	add := func(name, about string, set setup, dest stream) {
		s.Rows = append(s.Rows, gatewayRow(name, about, 0, set, func(t *Trial, n *network) error { return n.reportLatency(t, dest) }))
	}
	toVIP, toServer := streamTo(vip4, flows), streamTo(server4, flows)
	add(redirectRow, "an XDP program that swaps the MAC addresses and redirects", setRedirectBoth, toVIP)
	add("kernel forwarding, no NAT", "the kernel routes; no rules", nil, toServer)
	add("iptables DNAT", "one rule in nat PREROUTING", iptablesDNAT, toVIP)
	add("nft DNAT", "a map lookup in a nat prerouting chain", nftDNAT, toVIP)
	for _, r := range []struct{ name, path, attach string }{
		{"sluice nftables dnat", "nftables", ""}, {"sluice ebpf dnat (xdp)", "ebpf", "xdp"}, {"sluice ebpf dnat (tc)", "ebpf", "tc"},
	} {
		conf := service{mode: "dnat", protocol: "udp", attach: r.attach, port: 53, vip: vip4, backend: server4}
		s.Rows = append(s.Rows, sluiceRow(r.name, "one service in mode dnat", r.path,
			func(Point) string { return conf.yaml(Point{Value: flows}) },
			func(t *Trial, n *network) error { return n.reportLatency(t, toVIP) }))
	}
	return s
}

// unreachableRate in packets per second exceeds the capacity of one CPU.
const unreachableRate = 50e6

// maxRateError bounds the relative difference between sent and due packets. Beyond it, packets that wait in the sender
// dominate p99.
const maxRateError = 0.01

// missedRate reports whether the sender fell behind the rate or was still catching up.
func (r rates) missedRate(rate float64) bool { return math.Abs(r.offered/rate-1) > maxRateError }

// reportLatency finds the maximum rate of the row and measures at a share of that rate.
func (n *network) reportLatency(t *Trial, s stream) error {
	// An unreachable rate makes the sender use the same batches as at a paced rate.
	s.stamp, s.rate = true, unreachableRate
	most, err := n.measure(t, s)
	if err != nil {
		return err
	}
	s.rate = most.perSecond * float64(t.Point.Value) / 100
	r, err := n.measure(t, s)
	if err != nil {
		return err
	}
	if r.latency.Count() == 0 {
		return fmt.Errorf("no stamped packet arrived")
	}
	if r.lost > 0.001 {
		t.Note("%s: %.1f %% lost", t.Point.Name, r.lost*100)
	}
	if r.missedRate(s.rate) {
		t.missedRate = true
		t.Note("%s: the sender did not hold the rate in every repetition: its waits for the CPU are in the times", t.Point.Name)
	}
	us := func(q float64) float64 { return float64(r.latency.Quantile(q)) / float64(time.Microsecond) }
	t.Report("p50", us(0.50))
	t.Report("p99", us(0.99))
	t.Report("p99.9", us(0.999))
	return nil
}
