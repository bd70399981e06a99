// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// customer is an IPv4 home behind an IPv6 uplink, and the provider's path to an IPv4 server.
func customer() lab.Topology {
	return lab.Topology{
		Name: "clat",
		Nodes: []lab.NodeSpec{
			{Name: "host", Routes: []lab.Route{{To: "default", Via: "192.168.1.1"}}},
			{Name: "clat", Forward: true, Routes: []lab.Route{{To: "default6", Via: "2001:db8:c::ffff"}}},
			{Name: "plat", Forward: true, Routes: []lab.Route{{To: "2001:db8:c:464::/64", Via: "2001:db8:c::1"}}},
			{Name: "server", Routes: []lab.Route{{To: "203.0.113.9/32", Via: "198.51.100.1"}}},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "host", Iface: "eth0", Addresses: []string{"192.168.1.10/24"}, NoTxChecksum: true},
				B: lab.End{Node: "clat", Iface: "lan0", Addresses: []string{"192.168.1.1/24"}, NoTxChecksum: true}},
			{A: lab.End{Node: "clat", Iface: "wan0", Addresses: []string{"2001:db8:c::1/64"}},
				B: lab.End{Node: "plat", Iface: "acc0", Addresses: []string{"2001:db8:c::ffff/64"}}},
			{A: lab.End{Node: "plat", Iface: "net0", Addresses: []string{"198.51.100.1/24"}},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"198.51.100.2/24"}, NoTxChecksum: true}},
		},
	}
}

const provider = "nat:\n  - {name: plat, type: nat64, source: [\"2001:db8:c::/48\"], prefix: \"64:ff9b::/96\", pool: [203.0.113.9], out: net0}\n"

// RFC 6877: TCP from an IPv4 host to an IPv4 server, through the customer's router of examples/clat.yaml and the
// provider's nat64, in both directions. The router itself is reachable by its IPv4 address, and pings get
// answers.
func TestRFC6877CustomerRouter(t *testing.T) {
	t.Parallel()
	labtest.Require(t, labtest.Root, labtest.BPF)
	example, err := os.ReadFile("../../examples/clat.yaml")
	if err != nil {
		t.Fatal(err)
	}
	l := labtest.New(t, customer())
	for node, file := range map[string]string{"clat": string(example), "plat": provider} {
		d, err := daemon.Start(t.Context(), l.Node(node), binary, node+".yaml", []byte("datapath: ebpf\n"+file))
		if err != nil {
			t.Fatalf("%s: %v", node, err)
		}
		t.Cleanup(func() { _ = d.Kill() })
	}
	g := &gateway{Lab: l, t: t, patience: 30 * time.Second, again: time.Second}
	client, server, err := g.connect("host", "192.168.1.10:4000", "198.51.100.2:80", g.listen("server", "198.51.100.2:80"))
	if err != nil {
		t.Fatal(err)
	}
	if from := remote(server); from.Addr() != netip.MustParseAddr("203.0.113.9") {
		t.Errorf("the server saw %v, want the provider's address", from)
	}
	if err := g.transfer(client, server); err != nil {
		t.Error(err)
	}
	for _, way := range [][2]interface {
		Read([]byte) (int, error)
		Write([]byte) (int, error)
	}{{client, server}, {server, client}} {
		go func() { _, _ = way[0].Write(make([]byte, 500_000)) }() // the reader reports a failure
		if err := readAll(way[1].Read, 500_000); err != nil {
			t.Error(err)
		}
	}
	host := netip.MustParseAddr("192.168.1.10")
	for _, to := range []string{"192.168.1.1", "198.51.100.2"} {
		if err := l.Node("host").Ping(t.Context(), host, netip.MustParseAddr(to)); err != nil {
			t.Errorf("ping %s: %v", to, err)
		}
	}
}

// readAll reads a number of bytes from a connection with a deadline.
func readAll(read func([]byte) (int, error), bytes int) error {
	b := make([]byte, 65536)
	for n := 0; n < bytes; {
		m, err := read(b)
		if err != nil {
			return fmt.Errorf("after %d of %d bytes: %w", n, bytes, err)
		}
		n += m
	}
	return nil
}

// RFC 7915 §5.1, RFC 8201 §4: TCP over IPv6 works through an IPv4 link with an MTU below 1280.
func TestRFC7915SmallIPv4Link(t *testing.T) {
	prove(t, "7915-5.1m", ports64, func(g *gateway) error {
		for node, iface := range map[string]string{"gateway": "wan0", "o1": "eth0"} {
			if out, err := g.Node(node).Command(g.t.Context(), "ip", "link", "set", iface, "mtu", "1000").CombinedOutput(); err != nil {
				return fmt.Errorf("ip link: %w: %s", err, out)
			}
		}
		client, server, err := g.connect("i1", "["+i1six+"]:4000", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		go func() { _, _ = client.Write(make([]byte, 100_000)) }() // the reader reports a failure
		if err := server.SetReadDeadline(time.Now().Add(g.patience)); err != nil {
			return err
		}
		return readAll(server.Read, 100_000)
	})
}
