// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// clusterLines are TCP services of cluster.yaml with a hash scheduler.
const clusterLines = `  - name: lines
    listen: [{address: 192.0.2.10, ports: [7000]}]
    protocol: tcp
    mode: stateless
    scheduler: maglev
    backends: [{name: s1, address: 10.0.2.2}, {name: s2, address: 10.0.2.3}]
  - name: more-lines
    listen: [{address: 192.0.2.10, ports: [7001]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends: [{name: s1, address: 10.0.2.2}, {name: s2, address: 10.0.2.3}]
`

// clusterNodes are the nodes of clusterTopology.
const clusterNodes = "  nodes: [{name: n1, address: 10.9.1.2}, {name: n2, address: 10.9.2.2}, {name: n3, address: 10.9.3.2}]\n"

// newHashCluster is a cluster of eBPF gateways with the services of examples/cluster.yaml and clusterLines.
func newHashCluster(t *testing.T) *cluster {
	t.Helper()
	config := strings.Replace(example(t, "cluster.yaml"), "cluster:\n", "cluster:\n"+clusterNodes, 1)
	c := newClusterOf(t, "datapath: ebpf\n"+config+clusterLines)
	for _, s := range []struct{ node, address string }{{"s1", "10.0.2.2"}, {"s2", "10.0.2.3"}} {
		for _, port := range []string{":7000", ":7001"} {
			lines, err := host.ServeLines(c.lab.Node(s.node), s.node, s.address+port)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = lines.Stop() })
		}
	}
	return c
}

// openLine is a TCP connection and the server that answered it first.
type openLine struct {
	*host.Line
	to     netip.AddrPort
	server string
}

// openLines opens connections from the client to both TCP services of clusterLines.
func openLines(t *testing.T, c *cluster, each int) (list []openLine) {
	t.Helper()
	for i := range 2 * each {
		to := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.10"), uint16(7000+i%2))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		line, err := host.DialLine(ctx, c.lab.Node("client"), netip.AddrPortFrom(netip.MustParseAddr("10.0.1.2"), uint16(20000+i)), to)
		cancel()
		if err != nil {
			t.Fatalf("connection %d to %s: %v", i, to, err)
		}
		t.Cleanup(func() { _ = line.Close() })
		a, err := line.Ask(patience)
		if err != nil {
			t.Fatalf("connection %d to %s: %v", i, to, err)
		}
		list = append(list, openLine{line, to, a.Name})
	}
	return list
}

// askAll fails for each connection that is broken, or that another server answers.
func askAll(t *testing.T, when string, list []openLine) {
	t.Helper()
	for i, l := range list {
		if a, err := l.Ask(patience); err != nil || a.Name != l.server {
			t.Errorf("%s: connection %d to %s: %v, server %q, before %q", when, i, l.to, err, a.Name, l.server)
		}
	}
}

// TestClusterNodeDrains takes two of three nodes out of service, one of them over a crash of its daemon. No datagram is
// lost, no connection breaks, and no flow moves to another server.
func TestClusterNodeDrains(t *testing.T) {
	labtest.Require(t, labtest.BPF) // replies of dnat connections return through n1
	c := newHashCluster(t)
	lines := openLines(t, c, 40)
	dsr, stateless := sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 20), sendNumbered(t, c.lab.Node("client"), "192.0.2.10:123", 20)
	flow := func(when string) {
		t.Helper()
		dsr.progress()
		stateless.progress()
		askAll(t, when, lines)
	}
	flow("before")
	n3 := c.gateways[2]
	if got := output(t, n3, "node drain"); got != "node n3 drains: 3 of 3 addresses and prefixes are withdrawn\n" {
		t.Error(got)
	}
	c.hops("192.0.2.30", "n1 n2")
	c.hops("192.0.2.10", "n1 n2")
	c.learns("v6n1 v6n2")
	flow("n3 drains")
	if got := output(t, n3, "show nodes"); !strings.Contains(got, "n3 (this)  drain") || !strings.Contains(got, "n1         -") {
		t.Error(got)
	}
	if err := n3.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := n3.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	flow("n3 drains after a crash")
	c.hops("192.0.2.30", "n1 n2")
	output(t, n3, "node auto")
	c.hops("192.0.2.30", "n1 n2 n3")
	c.hops("192.0.2.10", "n1 n2 n3")
	flow("n3 is back")
	output(t, c.gateways[1], "node drain")
	c.hops("192.0.2.30", "n1 n3")
	c.hops("192.0.2.10", "n1 n3")
	flow("n2 drains")
	if lost := dsr.finish(); lost > 0 {
		t.Errorf("dsr: %d of %d datagrams are lost", lost, dsr.sent.Load())
	}
	if lost := stateless.finish(); lost > 0 {
		t.Errorf("stateless: %d of %d datagrams are lost", lost, stateless.sent.Load())
	}
}
