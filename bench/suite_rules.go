// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"net/netip"
	"strings"
)

// backendsOf returns the services and the backends per service at a point.
func backendsOf(p Point) (services, backends int) {
	if strings.Contains(p.Name, "backend") {
		return 1, p.Value
	}
	return p.Value, 2
}

func rulesSuite() Suite {
	toLast := func(p Point) clientLoad {
		services, _ := backendsOf(p)
		return clientLoad{dest: addrPort(vip4, servicePort(services-1))}
	}
	drive := func(t *Trial, n *network) error { return reportFlows(t, n, toLast(t.Point)) }
	peer := func(name, about string, set setup) Row { return gatewayRow(name, about, 0, set, drive) }
	s := Suite{
		Name: "rules", Title: "HTTP connections a second with many services and backends",
		About: "As the suite flows, through the last of 1 to 10,000 services with 2 backends each, and one service with 100 " +
			"and 1,000 backends. A rule list is walked for every new connection; a map is not.",
		Reproduces: "nftlb's point: maps instead of rule lists",
		Yardstick:  true, MaxReps: 3,
		Points: []Point{
			{Name: "1 service", Value: 1}, {Name: "100 services", Value: 100}, {Name: "1,000 services", Value: 1000},
			{Name: "10,000 services", Value: 10_000}, {Name: "100 backends", Value: 100}, {Name: "1,000 backends", Value: 1000},
		},
		Metrics: []Metric{kflows},
		Rows: []Row{
			peer("iptables DNAT", "a rule for each backend of each service, picked by the statistic match", iptablesMany),
			peer("nft DNAT", "one map from service to chain, numgen in each", nftMany),
			sluiceRow("sluice nftables dnat", "services in mode dnat", "nftables", func(p Point) string { return manyServices(p, "") }, drive),
			sluiceRow("sluice ebpf dnat (xdp)", "services in mode dnat, by xdp", "ebpf", func(p Point) string { return manyServices(p, "xdp") }, drive),
			sluiceRow("sluice ebpf dnat (tc)", "services in mode dnat, by tc", "ebpf", func(p Point) string { return manyServices(p, "tc") }, drive),
		},
		NotShown: []string{"The time that it takes to load the rules: see the suite scale."},
	}
	for _, row := range []string{"sluice nftables dnat", "sluice ebpf dnat (xdp)", "sluice ebpf dnat (tc)"} {
		s.Comparisons = append(s.Comparisons, Comparison{
			What: row + ", 10,000 services / 1", Row: row, Against: row, Point: "10,000 services", AgainstPoint: "1 service",
			Published: 0.95, Source: goal,
		})
	}
	return s
}

// servicePort is the port of service number i.
func servicePort(i int) uint16 { return uint16(1000 + i) }

// backendAddress is the address of backend number i.
func backendAddress(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).Next()
}

func iptablesMany(t *Trial, n *network) error {
	services, backends := backendsOf(t.Point)
	var b strings.Builder
	b.WriteString("*nat\n")
	for s := range services {
		for i := range backends {
			pick := ""
			if left := backends - i; left > 1 {
				pick = fmt.Sprintf("-m statistic --mode nth --every %d --packet 0 ", left)
			}
			fmt.Fprintf(&b, "-A PREROUTING -d %s -p tcp --dport %d %s-j DNAT --to-destination %s:80\n", vip4, servicePort(s), pick, backendAddress(i))
		}
	}
	b.WriteString("COMMIT\n")
	return command(t, n.gateway, b.String(), "iptables-legacy-restore")
}

func nftMany(t *Trial, n *network) error {
	services, backends := backendsOf(t.Point)
	var b strings.Builder
	b.WriteString("table ip peer {\n")
	fmt.Fprintf(&b, "chain pick { meta l4proto tcp dnat to numgen inc mod %d map {", backends)
	for i := range backends {
		fmt.Fprintf(&b, "%d : %s,", i, backendAddress(i))
	}
	b.WriteString("} : 80; }\nmap services { type ipv4_addr . inet_proto . inet_service : verdict; elements = {")
	for s := range services {
		fmt.Fprintf(&b, "%s . tcp . %d : goto pick,", vip4, servicePort(s))
	}
	b.WriteString("} }\nchain prerouting { type nat hook prerouting priority dstnat; ip daddr . ip protocol . tcp dport vmap @services; }\n}\n")
	return command(t, n.gateway, b.String(), "nft", "-f", "-")
}

func manyServices(p Point, attach string) string {
	services, backends := backendsOf(p)
	var b strings.Builder
	b.WriteString(service{attach: attach}.configHead(Point{Value: 100_000}))
	b.WriteString("services:\n")
	for s := range services {
		fmt.Fprintf(&b, "  - {name: s%d, listen: [{address: %s, ports: [%d]}], protocol: tcp, mode: dnat, scheduler: rr, backends: [", s, vip4, servicePort(s))
		for i := range backends {
			fmt.Fprintf(&b, "{name: b%d, address: %s, port: 80},", i, backendAddress(i))
		}
		b.WriteString("]}\n")
	}
	return b.String()
}
