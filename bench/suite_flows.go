// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/load"
)

var kflows = Metric{Name: "flows", Unit: "1000/s", Digits: 1}

// nftlbSource names the source of the figures with which the results of suite "flows" are compared.
const nftlbSource = "nftlb's published benchmark, HTTP flows/s per CPU"

func flowsSuite() Suite {
	s := Suite{
		Name: "flows", Title: "Complete HTTP connections a second through one CPU",
		About: "Each flow is a TCP handshake, a request, a response of 210 bytes and the closing of both sides: six packets " +
			"through the gateway (direct server return: three). Client and server are XDP programs without a TCP stack; " +
			"client, gateway and server run on one CPU. 100,000 source endpoints are used again and again; in rows named “tuples used once” " +
			"no endpoint is used twice. A row fails if more than 0.1 % of its connections are refused, fail or need a repetition.",
		Reproduces: "nftlb: iptables against nftables, NAT against direct server return",
		Yardstick:  true, MaxReps: 4, Seconds: 3,
		Points:  []Point{{Name: "HTTP", Value: 100_000}},
		Metrics: []Metric{kflows},
		Limit:   redirectRow,
		Rows: []Row{
			flowRow(redirectRow, "an XDP program that swaps the MAC addresses and redirects, both ways", setRedirectBoth, clientLoad{dest: addrPort(vip4, 80)}),
			flowRow("kernel forwarding, no NAT", "the kernel routes; no rules", nil, clientLoad{dest: addrPort(server4, 80)}),
			flowRow("iptables DNAT", "one rule in nat PREROUTING", iptablesRule("PREROUTING", "-d", vip4.String(), "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", server4.String()+":80"), clientLoad{dest: addrPort(vip4, 80)}),
			flowRow("iptables SNAT", "one SNAT rule in nat POSTROUTING, four addresses", iptablesRule("POSTROUTING", "-o", "lan0", "-p", "tcp", "-j", "SNAT", "--to-source", "10.0.2.100-10.0.2.103"), clientLoad{dest: addrPort(server4, 80)}),
			flowRow("nft DNAT", "a map lookup in a nat prerouting chain", nftRules(fmt.Sprintf(`table ip peer {
	map services { typeof ip daddr . meta l4proto . th dport : ip daddr . th dport; elements = { %s . tcp . 80 : %s . 80 } }
	chain prerouting { type nat hook prerouting priority dstnat; dnat to ip daddr . meta l4proto . th dport map @services; }
}`, vip4, server4)), clientLoad{dest: addrPort(vip4, 80)}),
			flowRow("nft SNAT", "snat in a nat postrouting chain, four addresses", nftRules(`table ip peer {
	chain postrouting { type nat hook postrouting priority srcnat; oifname "lan0" snat to 10.0.2.100-10.0.2.103; }
}`), clientLoad{dest: addrPort(server4, 80)}),
			flowRow("nft DSR", "MAC rewritten and forwarded on the netdev ingress hook; replies bypass the gateway", nftRules(fmt.Sprintf(`table netdev peer {
	chain ingress { type filter hook ingress device "wan0" priority 0;
		ip daddr %s tcp dport 80 ether daddr set %s ether saddr set %s fwd to "lan0"; }
}`, vip4, srvMAC, lanMAC)), clientLoad{dest: addrPort(vip4, 80), bypass: true}),
			flowRow("nft stateless", "addresses rewritten on the netdev ingress hook, both ways", nftRules(fmt.Sprintf(`table netdev peer {
	chain in { type filter hook ingress device "wan0" priority 0; ip daddr %s tcp dport 80 ip daddr set %s; }
	chain back { type filter hook ingress device "lan0" priority 0; ip saddr %s tcp sport 80 ip saddr set %s; }
}`, vip4, server4, server4, vip4)), clientLoad{dest: addrPort(vip4, 80)}),
		},
		Comparisons: []Comparison{
			{What: "nft DNAT / iptables DNAT", Row: "nft DNAT", Against: "iptables DNAT", Published: 561, PublishedAgainst: 257, Source: nftlbSource},
			{What: "nft SNAT / iptables SNAT", Row: "nft SNAT", Against: "iptables SNAT", Published: 609, PublishedAgainst: 262, Source: nftlbSource},
			{What: "nftlb dnat / iptables DNAT", Row: "nftlb, dnat", Against: "iptables DNAT", Published: 561, PublishedAgainst: 257, Source: nftlbSource},
			{What: "nftlb snat / iptables SNAT", Row: "nftlb, snat", Against: "iptables SNAT", Published: 609, PublishedAgainst: 262, Source: nftlbSource},
			{What: "nftlb dsr / nftlb dnat", Row: "nftlb, dsr", Against: "nftlb, dnat", Published: 7300, PublishedAgainst: 561, Source: nftlbSource},
			{What: "nft DSR / nft DNAT", Row: "nft DSR", Against: "nft DNAT", Published: 7300, PublishedAgainst: 561, Source: nftlbSource},
		},
		NotShown: []string{
			"Network cards and many CPUs: see the suite packets.",
			"Real TCP stacks: clients and servers answer within the same soft interrupt, so there is no round-trip time, no congestion control and no retransmission.",
			"nftlb's machine: its published figures came from 10-Gbit/s hardware; only ratios can be set beside ours.",
		},
	}
	for _, mode := range []string{"dnat", "snat", "dsr"} {
		c := clientLoad{dest: addrPort(vip4, 80), bypass: mode == "dsr"}
		if mode == "snat" {
			c.source = clientsOf(false, 50_000) // the pool hides all clients behind one address
		}
		row := flowRow("nftlb, "+mode, "nftlb's own rules for one service", nftlb(mode, "tcp", 80), c)
		row.Absent = tool("nftlb")
		s.Rows = append(s.Rows, row)
	}
	s.Rows = append(s.Rows, datapathFlowRows()...)
	s.Comparisons = append(s.Comparisons, goals("1000 connections/s through a wire", redirectRow, "", map[string]float64{"HTTP": 400})...)
	return s
}

func addrPort(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// flowRow returns a row that measures connections through the gateway that set configures.
func flowRow(name, about string, set setup, c clientLoad) Row {
	return gatewayRow(name, about, 2, set, func(t *Trial, n *network) error { return reportFlows(t, n, c) })
}

func reportFlows(t *Trial, n *network, c clientLoad) error {
	if !c.source.First.IsValid() {
		c.source = manyClients(c.dest.Addr().Is6())
	}
	r, err := n.measureFlows(t, c)
	if err != nil {
		return err
	}
	t.Report(kflows.Name, r.perSecond/1e3)
	return nil
}

// setRedirectBoth makes the gateway a wire in both directions.
func setRedirectBoth(t *Trial, n *network) error { return setReferenceBoth(t, n, load.Redirect) }

func setReferenceBoth(t *Trial, n *network, kind load.ReferenceKind) error {
	for _, way := range [][2]string{{"wan0", "lan0"}, {"lan0", "wan0"}} {
		ref, err := load.NewReference(n.gateway, kind, load.ReferenceOptions{In: way[0], Out: way[1]})
		if err != nil {
			return err
		}
		t.closeLater(ref)
	}
	return nil
}

func iptablesRule(chain string, rule ...string) setup {
	return func(t *Trial, n *network) error {
		return command(t, n.gateway, "", append([]string{"iptables-legacy", "-t", "nat", "-A", chain}, rule...)...)
	}
}
