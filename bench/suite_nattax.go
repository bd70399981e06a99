// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"net/netip"
	"time"
)

// starvedConntrack is the case study's nf_conntrack_max.
const starvedConntrack = 1000

func natTaxSuite() Suite {
	ms := func(name string) Metric { return Metric{Name: name, Unit: "ms", LowerIsBetter: true, Digits: 2} }
	s := Suite{
		Name: "nat-tax", Title: "The NAT tax: a real web server behind a NAT",
		About: "A real HTTP client with 50 connections at once, a new connection for every request, asks nginx through the " +
			"gateway; in the starved row for ten seconds. Client, gateway and server share all CPUs of the machine. In the starved row nf_conntrack_max is 1,000, " +
			"as on a host whose table is full.",
		AllCPUs: true, Seconds: 2, MaxReps: 3,
		Reproduces: "the case study of a NAT whose connection table is full: 6,576 requests/s without NAT, 76 with it, 6,316 after tuning",
		Points:     []Point{{Name: "50 connections", Value: 50}},
		Metrics: []Metric{
			{Name: "requests", Unit: "1/s", Digits: 0}, ms("time per request"), ms("connect mean"), ms("connect p99"), {Name: "failed", Unit: "requests", LowerIsBetter: true, Absolute: true},
		},
		Comparisons: []Comparison{
			{What: "starved NAT / no NAT", Row: "iptables DNAT, starved", Against: "no NAT", Published: 76, PublishedAgainst: 6576, Source: "the case study, requests/s"},
			{What: "tuned NAT / no NAT", Row: "iptables DNAT, tuned", Against: "no NAT", Published: 6316, PublishedAgainst: 6576, Source: "the case study, requests/s"},
		},
		NotShown: []string{
			"What NAT alone costs: the client and the server take most of the CPU here; the suites packets and flows show the gateway.",
			"The case study's machines: its client, gateway and server were three hosts.",
		},
	}
	row := func(name, about string, dest netip.Addr, sets ...setup) Row {
		return Row{Name: name, About: about, Absent: tool("nginx"), Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			for _, set := range sets {
				if err := set(t, n); err != nil {
					return err
				}
			}
			return n.reportTax(t, dest)
		}}
	}
	dnat := iptablesRule("PREROUTING", "-d", vip4.String(), "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", server4.String()+":80")
	starved := func(t *Trial, _ *network) error { return t.setConntrackMax(starvedConntrack) }
	tuned := func(t *Trial, _ *network) error { return t.needConntrack(1 << 20) }
	s.Rows = []Row{
		row("no NAT", "the gateway routes", server4),
		row("iptables DNAT, starved", "nf_conntrack_max 1,000", vip4, longRun, starved, dnat),
		row("iptables DNAT, tuned", "nf_conntrack_max 1,048,576 or more", vip4, tuned, dnat),
		row("nft DNAT", "one rule; nf_conntrack_max 1,048,576 or more", vip4, tuned, nftRules(
			"table ip peer { chain prerouting { type nat hook prerouting priority dstnat; ip daddr "+vip4.String()+" tcp dport 80 dnat to "+server4.String()+":80; }\n}\n")),
	}
	conf := service{mode: "dnat", protocol: "tcp", port: 80, vip: vip4, backend: server4}
	drive := func(t *Trial, n *network) error { return n.reportTax(t, vip4) }
	tc := conf
	tc.attach = "tc"
	s.Rows = append(s.Rows,
		sluiceRow("sluice nftables dnat", "one service in mode dnat", "nftables", func(Point) string { return conf.yaml(Point{Value: 1 << 17}) }, drive),
		sluiceRow("sluice ebpf dnat (tc)", "one service in mode dnat; tc, because client and server have TCP stacks", "ebpf", func(Point) string { return tc.yaml(Point{Value: 1 << 17}) }, drive))
	return s
}

// longRun makes the trial ten seconds long. A full table accepts its first thousand connections at once, and they
// would dominate a short run.
func longRun(t *Trial, _ *network) error {
	t.Seconds = max(t.Seconds, 10)
	return nil
}

// reportTax runs ab for the trial's duration and reports its figures.
func (n *network) reportTax(t *Trial, dest netip.Addr) error {
	if _, err := startWeb(t, n); err != nil {
		return err
	}
	r, err := askWeb(t, n, "http://"+dest.String()+"/", t.Point.Value)
	if err != nil {
		return err
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	t.Report("requests", r.RequestsPerSecond)
	t.Report("connect mean", ms(r.Connect.Mean))
	t.Report("connect p99", ms(r.Connect.P99))
	t.Report("failed", float64(r.Failed))
	if r.RequestsPerSecond > 0 {
		t.Report("time per request", 1e3*float64(t.Point.Value)/r.RequestsPerSecond)
	}
	return nil
}
