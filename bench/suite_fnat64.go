// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/load"
)

const crossRow = "limit: header of the other family and redirect"

// connectionsPoint measures connections; the other points measure packets.
const connectionsPoint = "connections"

func fnat64Suite() Suite {
	s := Suite{
		Name: "fnat64", Title: "Full NAT within and between IPv4 and IPv6",
		About: "84-byte UDP packets to one service in mode fullnat. “There” counts packets at the server. “There and back” has " +
			"the server return each datagram, and counts at the client: twice the gateway's work a datagram. The flows of the first " +
			"two points stay in the cache, and what is compared is the translation; 50,000 do not. “Connections” are " +
			"complete HTTP connections as in the suite flows: the mix for which DPVS is quoted with 900,000 a second on a whole " +
			"machine, here scaled to one CPU.",
		Reproduces: "DPVS, pull request 1063: FNAT64 against FNAT44",
		Yardstick:  true, MaxReps: 4,
		Points: []Point{
			{Name: "there, 1,000 flows", Value: 1000}, {Name: "and back, 1,000 flows", Value: 1000},
			{Name: "there, 50,000 flows", Value: 50_000}, {Name: "and back, 50,000 flows", Value: 50_000},
			{Name: connectionsPoint, Value: 100_000},
		},
		Metrics: []Metric{mpps, kflows},
		Limit:   redirectRow,
		Rows: []Row{
			redirectionRow(redirectRow, "XDP programs that swap the MAC addresses and redirect, both ways", load.Redirect, vip4, ""),
			redirectionRow(crossRow, "XDP programs that swap the MAC addresses, put a header of the other family with constant addresses before the payload, "+
				"and redirect: what a frame that changes its length costs by itself", load.Cross, vip6, "nobody answers to constant addresses"),
		},
		NotShown: []string{
			"DPVS itself: it needs DPDK and a network card of its own; its figures are 76 % for FNAT64 against FNAT44 before, and 84 % after, the change.",
			"Real clients and servers: nobody has a TCP stack here.",
		},
	}
	add := func(name, about, path, attach string, vip, backend netip.Addr) {
		conf := func(p Point) string {
			c := service{mode: "fullnat", protocol: "udp", attach: attach, port: 53, vip: vip, backend: backend}
			if p.Name == connectionsPoint {
				c.protocol = "tcp"
			}
			return c.yaml(p)
		}
		s.Rows = append(s.Rows, sluiceRow(name, about, path, conf, fullnatDrive(vip)))
	}
	mixes := []struct {
		name         string
		vip, backend netip.Addr
	}{{"44", vip4, server4}, {"66", vip6, server6}, {"64", vip6, server4}, {"46", vip4, server6}}
	for _, attach := range []string{"xdp", "tc"} {
		for _, m := range mixes {
			add("sluice ebpf FNAT"+m.name+" ("+attach+")", "client and server families as named", "ebpf", attach, m.vip, m.backend)
		}
	}
	for _, m := range mixes {
		add("sluice ebpf FNAT"+m.name+" (xdp), no fast transmit", "the routing table is asked for every packet's next hop", slowTransmit, "xdp", m.vip, m.backend)
	}
	const source = "DPVS pull request 1063"
	for _, p := range s.Points {
		point, metric := p.Name, mpps.Name
		if point == connectionsPoint {
			metric = kflows.Name
		}
		s.Comparisons = append(s.Comparisons, Comparison{
			What: "FNAT64 / FNAT44, " + point, Row: "sluice ebpf FNAT64 (xdp)", Against: "sluice ebpf FNAT44 (xdp)", Point: point, Metric: metric,
			Published: 84, PublishedAgainst: 100, Source: source + ", after the change",
		}, Comparison{
			What: "FNAT64 without fast transmit / FNAT44, " + point, Row: "sluice ebpf FNAT64 (xdp), no fast transmit",
			Against: "sluice ebpf FNAT44 (xdp)", Point: point, Metric: metric,
			Published: 76, PublishedAgainst: 100, Source: source + ", before the change: FNAT64 alone went without",
		}, Comparison{
			What: "FNAT64 / FNAT44 by XDP, " + point, Row: "sluice ebpf FNAT64 (xdp)", Against: "sluice ebpf FNAT44 (xdp)", Point: point, Metric: metric,
			Published: 0.95, Source: goal,
		})
		if point != connectionsPoint {
			s.Comparisons = append(s.Comparisons, Comparison{
				What: "FNAT64 by XDP / its limit, " + point, Row: "sluice ebpf FNAT64 (xdp)", Against: crossRow, Point: point, Metric: metric,
				Published: 0.98, Source: goal,
			})
		}
	}
	return s
}

// redirectionRow returns a row in which a reference program forwards both directions instead of a service. unconnected is the reason
// why it carries no connections, or "".
func redirectionRow(name, about string, kind load.ReferenceKind, vip netip.Addr, unconnected string) Row {
	return Row{
		Name: name, About: about,
		Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			if err := setReferenceBoth(t, n, kind); err != nil {
				return err
			}
			return fullnatDrive(vip)(t, n)
		},
		Absent: func(p Point) string {
			if p.Name == connectionsPoint {
				return unconnected
			}
			return ""
		},
	}
}

// fullnatDrive sends to the service. At some points the server answers.
func fullnatDrive(vip netip.Addr) func(*Trial, *network) error {
	return func(t *Trial, n *network) error {
		if t.Point.Name == connectionsPoint {
			return reportFlows(t, n, clientLoad{dest: addrPort(vip, 53)})
		}
		s := streamTo(vip, t.Point.Value)
		s.size, s.v6 = 84, vip.Is6()
		if strings.HasPrefix(t.Point.Name, "and back") {
			r, err := load.NewReflector(n.server, "eth0")
			if err != nil {
				return err
			}
			t.closeLater(r)
			s.returned = true
		}
		return reportPackets(t, n, s)
	}
}
