// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/load"
)

const (
	dropLimit = "limit: XDP drops at once"
	denyByXDP = "sluice ebpf (xdp)"
)

func dropSuite() Suite {
	return Suite{
		Name: "drop", Title: "Packets a second dropped by one CPU",
		About: "60-byte UDP packets from denied addresses; what counts is what the gateway took in and dropped. " +
			"Sender and gateway run on one CPU. With 1,000,000 denied addresses every packet comes from another one, shuffled.",
		Reproduces: "nftlb: dropping in prerouting and at the ingress hook",
		Yardstick:  true,
		Points:     []Point{{Name: "1 address", Value: 1}, {Name: "1,000,000 addresses", Value: 1_000_000, Shuffled: true, MaxReps: 3}},
		Metrics:    []Metric{mpps},
		Limit:      dropLimit,
		Rows: []Row{
			dropRow(dropLimit, "an XDP program that drops every IP packet", nil, func(t *Trial, n *network) error {
				ref, err := load.NewReference(n.gateway, load.Drop, load.ReferenceOptions{In: "wan0"})
				if err == nil {
					t.closeLater(ref)
				}
				return err
			}),
			dropRow("iptables raw", "one rule an address in raw PREROUTING", func(p Point) string {
				if p.Value > 1 {
					return "iptables has no sets of its own; a million rules would be walked for every packet"
				}
				return ""
			}, func(t *Trial, n *network) error {
				return command(t, n.gateway, "", "iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-s", clients4.String(), "-j", "DROP")
			}),
			dropRow("nft prerouting", "a set of addresses in a prerouting chain, priority raw", nil, nftDeny("ip", "type filter hook prerouting priority raw;")),
			dropRow("nft ingress", "a set of addresses on the netdev ingress hook", nil, nftDeny("netdev", `type filter hook ingress device "wan0" priority 0;`)),
			dropRow("sluice nftables", "a drop rule with a set", nil, sluiceDeny("nftables", "")),
			absentRow(dropRow(denyByXDP, "a drop rule with a set, by xdp", nil, sluiceDeny("ebpf", "xdp")), "ebpf"),
			absentRow(dropRow("sluice ebpf (tc)", "a drop rule with a set, by tc", nil, sluiceDeny("ebpf", "tc")), "ebpf"),
		},
		Comparisons: []Comparison{
			{
				What: "nft ingress / nft prerouting", Row: "nft ingress", Against: "nft prerouting",
				Published: 45.7, PublishedAgainst: 38.9, Source: "nftlb's published benchmark, million packets/s over all CPUs",
			},
			{What: "by XDP / XDP drops at once, 1 address", Row: denyByXDP, Against: dropLimit, Point: "1 address", Published: 0.75, Source: goal},
			{What: "by XDP / nft prerouting, 1,000,000 addresses", Row: denyByXDP, Against: "nft prerouting", Point: "1,000,000 addresses", Published: 2, Source: goal},
		},
		NotShown: []string{
			"Whole machines: the published figures are those of many CPUs and a network card, so only their ratio can be set beside ours.",
			"A million scattered addresses in Sluice's nftables datapath: these follow one another, and it keeps them as a few ranges, where all other rows keep each address.",
		},
	}
}

// absentRow makes a row depend on a datapath.
func absentRow(r Row, path string) Row {
	r.Absent = func(Point) string {
		if openers[path] == nil {
			return "this program has no " + path + " datapath"
		}
		return ""
	}
	return r
}

func dropRow(name, about string, absent func(Point) string, set setup) Row {
	return Row{Name: name, About: about, Absent: absent, Run: func(t *Trial) error {
		n, err := newNetwork(t)
		if err != nil {
			return err
		}
		if err := set(t, n); err != nil {
			return err
		}
		return n.measureDrops(t)
	}}
}

// nftDeny loads the denied addresses into a set.
func nftDeny(family, hook string) setup {
	return func(t *Trial, n *network) error {
		err := command(t, n.gateway, fmt.Sprintf("table %s peer {\n set denied { type ipv4_addr; }\n chain deny { %s ip saddr @denied drop; }\n}\n", family, hook), "nft", "-f", "-")
		const chunk = 100_000
		for from := 0; err == nil && from < t.Point.Value; from += chunk {
			var b strings.Builder
			fmt.Fprintf(&b, "add element %s peer denied {", family)
			for i := from; i < min(from+chunk, t.Point.Value); i++ {
				b.WriteString(clientAddress(i).String() + ",")
			}
			b.WriteString("}\n")
			err = command(t, n.gateway, b.String(), "nft", "-f", "-")
		}
		return err
	}
}

func clientAddress(i int) netip.Addr {
	return load.Range{First: clients4, Count: i + 1}.At(i).Addr()
}

// sluiceDeny applies a drop rule with the set to a datapath.
func sluiceDeny(path, attach string) setup {
	return func(t *Trial, n *network) error {
		c, err := config.Decode("bench", []byte(service{attach: attach}.configHead(Point{})+"firewall:\n  sets: {denied: [198.51.100.1/32]}\n  rules: [{action: drop, source: \"@denied\"}]\n"))
		if err != nil {
			return err
		}
		var denied []netip.Prefix
		for i := range t.Point.Value {
			denied = append(denied, netip.PrefixFrom(clientAddress(i), 32))
		}
		c.Firewall.Sets["denied"] = denied
		_, _, err = applyConfig(t, n, path, c)
		return err
	}
}

// measureDrops sends for the trial's duration and counts the packets that the gateway received.
func (n *network) measureDrops(t *Trial) error {
	sink, err := load.NewSink(load.SinkOptions{})
	if err != nil {
		return err
	}
	defer sink.Close()
	if err := sink.Attach(n.server, "eth0"); err != nil {
		return err
	}
	source := load.Range{First: clients4, Count: t.Point.Value, Ports: singleEndpoint(clients4, 1024).Ports}
	sender, err := load.NewSender(n.client, load.PacketSpec{
		Source: source, Dest: singleEndpoint(server4, 53), Interface: "eth0", DestMAC: wanMAC, Shuffled: t.Point.Shuffled,
	}, []int{t.CPU})
	if err != nil {
		return err
	}
	defer sender.Close()
	ctx, stop := context.WithCancel(t)
	defer stop()
	var rate float64
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- sender.Run(ctx, started) }()
	<-started
	err = func() error {
		if err := warmUp(ctx, sender, uint64(t.Point.Value), done); err != nil {
			return err
		}
		return t.withYardstick(ctx, func() error {
			before, err := arrivedAt(n.gateway, "wan0")
			if err != nil {
				return err
			}
			begin := sender.CPUTime()
			if err := t.window(ctx, sender.CPUTime); err != nil {
				return err
			}
			after, err := arrivedAt(n.gateway, "wan0")
			if err != nil {
				return err
			}
			rate = float64(after-before) / (sender.CPUTime() - begin).Seconds() / 1e6
			return nil
		})
	}()
	stop()
	err = errors.Join(err, <-done)
	if err != nil {
		return err
	}
	t.Report(mpps.Name, rate)
	r, err := sink.Read()
	if err == nil && r.Packets > 0 {
		err = fmt.Errorf("%d packets from denied addresses went through", r.Packets)
	}
	return err
}

// arrivedAt returns the number of packets that an interface has received.
func arrivedAt(node *lab.Node, iface string) (uint64, error) {
	h, err := node.Handle()
	if err != nil {
		return 0, err
	}
	defer h.Close()
	l, err := h.LinkByName(iface)
	if err != nil {
		return 0, err
	}
	return l.Attrs().Statistics.RxPackets, nil
}
