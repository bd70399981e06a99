// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// clusterTopology has gateways side by side between a router and the servers.
//
//	client ---- router ==== wan0 n1 lan0 ==== lan (switch) ---- s1 s2
//	              |    ==== wan0 n2 lan0 ====    |
//	              |    ==== wan0 n3 lan0 ====    |
//	              +------------ lan0 ------------+
//
// The router spreads flows over the gateways that announce an address. The servers have 192.0.2.30 on lo for direct
// server return and send replies from it to the router; other replies return through n1.
func clusterTopology() lab.Topology {
	t := lab.Topology{Name: "cluster", Nodes: []lab.NodeSpec{
		{Name: "client", Routes: []lab.Route{{To: "default", Via: "10.0.1.1"}}},
		{Name: "router", Forward: true, Sysctls: map[string]string{"net.ipv4.fib_multipath_hash_policy": "1"}},
		{Name: "lan", Switch: true},
	}, Links: []lab.LinkSpec{
		{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24"}}, B: lab.End{Node: "router", Iface: "client", Addresses: []string{"10.0.1.1/24"}}},
		{A: lab.End{Node: "router", Iface: "lan0", Addresses: []string{"10.0.2.254/24"}}, B: lab.End{Node: "lan", Iface: "router"}},
	}}
	for i := 1; i <= 3; i++ {
		n := fmt.Sprintf("n%d", i)
		t.Nodes = append(t.Nodes, lab.NodeSpec{Name: n, Forward: true, Routes: []lab.Route{{To: "10.0.1.0/24", Via: fmt.Sprintf("10.9.%d.1", i)}}})
		t.Links = append(t.Links,
			lab.LinkSpec{A: lab.End{Node: n, Iface: "wan0", Addresses: []string{fmt.Sprintf("10.9.%d.2/24", i), fmt.Sprintf("fd00:9:%d::2/64", i)}},
				B: lab.End{Node: "router", Iface: n, Addresses: []string{fmt.Sprintf("10.9.%d.1/24", i), fmt.Sprintf("fd00:9:%d::1/64", i)}}},
			lab.LinkSpec{A: lab.End{Node: n, Iface: "lan0", Addresses: []string{fmt.Sprintf("10.0.2.%d/24", 10+i), fmt.Sprintf("fd00:2::%d/64", 10+i)}}, B: lab.End{Node: "lan", Iface: n}})
	}
	for i := 1; i <= 2; i++ {
		s := fmt.Sprintf("s%d", i)
		t.Nodes = append(t.Nodes, lab.NodeSpec{Name: s, Addresses: []string{"192.0.2.30/32"},
			Routes:  []lab.Route{{To: "default", Via: "10.0.2.11"}, {To: "default", Via: "10.0.2.254", From: "192.0.2.30"}},
			Sysctls: map[string]string{"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}})
		t.Links = append(t.Links, lab.LinkSpec{A: lab.End{Node: s, Iface: "eth0", Addresses: []string{fmt.Sprintf("10.0.2.%d/24", 1+i), fmt.Sprintf("fd00:2::%d/64", 1+i)}}, B: lab.End{Node: "lan", Iface: s}})
	}
	return t
}

// quickSession makes BIRD connect again at once after an error, instead of after a minute.
const quickSession = "bfd on; error wait time 1, 2; connect delay time 1; connect retry time 2;"

// clusterRouter is the configuration of BIRD on the router. It spreads packets over all announced next hops. BFD has
// long times, because a busy machine must not end a session.
const clusterRouter = `
router id 10.9.0.1;
protocol device { }
protocol bfd { interface "n*" { interval 500 ms; multiplier 20; }; }
protocol kernel { merge paths on; ipv4 { import none; export where source = RTS_BGP; }; }
template bgp announcer { local as 65000; ` + quickSession + ` ipv4 { import all; export none; }; }
template bgp announcer6 { local as 65000; ` + quickSession + ` ipv6 { import all; export none; }; }
protocol bgp v6n1 from announcer6 { neighbor fd00:9:1::2 as 65010; }
protocol bgp v6n2 from announcer6 { neighbor fd00:9:2::2 as 65010; }
protocol bgp v6n3 from announcer6 { neighbor fd00:9:3::2 as 65010; }
protocol bgp n1 from announcer { neighbor 10.9.1.2 as 65010; }
protocol bgp n2 from announcer { neighbor 10.9.2.2 as 65010; }
protocol bgp n3 from announcer { neighbor 10.9.3.2 as 65010; }
`

// bird is a BIRD process in a node.
type bird struct {
	t      *testing.T
	node   *lab.Node
	socket string
}

// startBird runs BIRD until the end of the test.
func startBird(t *testing.T, n *lab.Node, config string) *bird {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := n.Command(t.Context(), "bird", "-p", "-c", file).CombinedOutput(); err != nil {
		t.Fatalf("BIRD refuses the configuration of %s: %v: %s", n.Short(), err, out)
	}
	b := &bird{t, n, filepath.Join(dir, "ctl")}
	var log strings.Builder
	cmd := n.Command(t.Context(), "bird", "-f", "-c", file, "-s", b.socket, "-P", filepath.Join(dir, "pid"))
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() && log.Len() > 0 {
			t.Logf("BIRD in %s: %s", n.Short(), log.String())
		}
	})
	return b
}

// do runs a command of birdc that changes something.
func (b *bird) do(command string) {
	b.t.Helper()
	if out, err := b.run(command); err != nil {
		b.t.Fatalf("birdc %s: %v: %s", command, err, out)
	}
}

func (b *bird) run(args ...string) ([]byte, error) {
	command := append([]string{"-s", b.socket}, strings.Fields(strings.Join(args, " "))...)
	return b.node.Command(b.t.Context(), "birdc", command...).CombinedOutput()
}

// ask returns the output of a command of birdc.
func (b *bird) ask(command string) string {
	b.t.Helper()
	out, err := b.run("-r", command)
	if err != nil {
		return fmt.Sprintf("%v: %s", err, out)
	}
	return string(out)
}

// importUpdates matches the time at which a session was established, and its counters.
var importUpdates = regexp.MustCompile(`(?:Import (updates|withdraws): +(\d+)|BGP +--- +(up) +([\d:.]+) )`)

// updates returns the numbers of received updates and withdrawals of each gateway, and the beginning of its session.
func (b *bird) updates() (list string) {
	b.t.Helper()
	for _, n := range []string{"n1", "n2", "n3"} {
		for _, m := range importUpdates.FindAllStringSubmatch(b.ask("show protocols all "+n), -1) {
			list += fmt.Sprintf("%s %s; ", n, strings.Join(m[1:], " "))
		}
	}
	return list
}

// numbered are flows of datagrams; each datagram is answered once.
type numbered struct {
	t        *testing.T
	conns    []net.PacketConn
	sent     atomic.Int64
	answered atomic.Int64
	moved    atomic.Int64 // answers of a server other than the flow's first
	end      chan struct{}
}

// sendNumbered starts flows from the client to an address.
func sendNumbered(t *testing.T, client *lab.Node, to string, flows int) *numbered {
	t.Helper()
	n := &numbered{t: t, end: make(chan struct{})}
	target, err := net.ResolveUDPAddr("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	for range flows {
		c, err := client.ListenPacket("10.0.1.2:0")
		if err != nil {
			t.Fatal(err)
		}
		n.conns = append(n.conns, c)
		t.Cleanup(func() { c.Close() })
		go n.receive(c)
		go n.send(c, target)
	}
	return n
}

func (n *numbered) send(c net.PacketConn, to net.Addr) {
	for {
		select {
		case <-n.end:
			return
		case <-time.After(50 * time.Millisecond):
			n.sent.Add(1)
			if _, err := c.WriteTo([]byte("?"), to); err != nil {
				return
			}
		}
	}
}

func (n *numbered) receive(c net.PacketConn) {
	buf := make([]byte, 1500)
	first := ""
	for {
		size, _, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		server, _, _ := strings.Cut(string(buf[:size]), " ")
		if first == "" {
			first = server
		}
		if server != first {
			n.moved.Add(1)
		}
		n.answered.Add(1)
	}
}

// progress waits until each flow has been answered several times more.
func (n *numbered) progress() {
	n.t.Helper()
	target := n.answered.Load() + int64(5*len(n.conns))
	labtest.Eventually(n.t, patience, "answers", func() error {
		if got := n.answered.Load(); got < target {
			return fmt.Errorf("%d answers, want %d", got, target)
		}
		return nil
	})
}

// finish ends the flows and returns the number of datagrams without an answer.
func (n *numbered) finish() (lost int64) {
	n.t.Helper()
	close(n.end)
	for quiet := 0; quiet < 20 && n.answered.Load() < n.sent.Load(); quiet++ {
		before := n.answered.Load()
		time.Sleep(100 * time.Millisecond) // for answers in transit
		if n.answered.Load() != before {
			quiet = 0
		}
	}
	if moved := n.moved.Load(); moved > 0 {
		n.t.Errorf("%d answers are from another server", moved)
	}
	return n.sent.Load() - n.answered.Load()
}

// cluster is three gateways with BIRD, and their router.
type cluster struct {
	t        *testing.T
	lab      *lab.Lab
	router   *bird
	speakers []*bird // of n1, n2, n3
	gateways []*daemon.Daemon
}

// newCluster is newClusterOf examples/cluster.yaml.
func newCluster(t *testing.T) *cluster { return newClusterOf(t, example(t, "cluster.yaml")) }

// newClusterOf returns after the router sends packets for the addresses of examples/cluster.yaml to every gateway.
func newClusterOf(t *testing.T, config string) *cluster {
	labtest.Require(t, labtest.Root, labtest.Tool("bird"), labtest.Tool("birdc"))
	return newClusterIn(t, labtest.New(t, clusterTopology()), config)
}

// newClusterIn is newClusterOf in a lab of clusterTopology.
func newClusterIn(t *testing.T, l *lab.Lab, config string) *cluster {
	t.Helper()
	c := &cluster{t: t, lab: l}
	serveWeb(t, c.lab, "s1 s1 10.0.2.2:8080 [fd00:2::2]:8080", "s2 s2 10.0.2.3:8080 [fd00:2::3]:8080")
	serveDatagrams(t, c.lab, "s1 s1 192.0.2.30:53", "s2 s2 192.0.2.30:53", "s1 s1 10.0.2.2:123", "s2 s2 10.0.2.3:123")
	c.router = startBird(t, c.lab.Node("router"), clusterRouter)
	speaker, err := os.ReadFile("../examples/bird.conf")
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range []string{"n1", "n2", "n3"} {
		own := strings.NewReplacer("10.9.1.", fmt.Sprintf("10.9.%d.", i+1), "fd00:9:1:", fmt.Sprintf("fd00:9:%d:", i+1), "interval 100 ms; multiplier 3", "interval 500 ms; multiplier 20", "bfd on;", quickSession)
		c.speakers = append(c.speakers, startBird(t, c.lab.Node(n), own.Replace(string(speaker))))
		c.gateways = append(c.gateways, start(t, c.lab.Node(n), config))
	}
	c.hops("192.0.2.30", "n1 n2 n3")
	c.hops("192.0.2.10", "n1 n2 n3")
	c.learns("v6n1 v6n2 v6n3")
	return c
}

var learned = regexp.MustCompile(`\[(v6n\d) `)

// learns waits until the router has learned 2001:db8::30 in these sessions.
func (c *cluster) learns(want string) {
	c.t.Helper()
	labtest.Eventually(c.t, patience, "sessions with 2001:db8::30", func() error {
		text := c.router.ask("show route 2001:db8::30/128")
		var list []string
		for _, m := range learned.FindAllStringSubmatch(text, -1) {
			list = append(list, m[1])
		}
		slices.Sort(list)
		if got := strings.Join(list, " "); got != want {
			return fmt.Errorf("%q, want %q:\n%s%s", got, want, text, c.router.ask("show protocols"))
		}
		return nil
	})
}

var hop = regexp.MustCompile(`via 10\.9\.(\d)\.2`)

// hops waits until the router sends packets for an address to these gateways.
func (c *cluster) hops(address, want string) {
	c.t.Helper()
	labtest.Eventually(c.t, patience, "next hops of "+address, func() error {
		out, err := c.lab.Node("router").Command(c.t.Context(), "ip", "route", "show", address).CombinedOutput()
		var list []string
		for _, m := range hop.FindAllStringSubmatch(string(out), -1) {
			list = append(list, "n"+m[1])
		}
		if got := strings.Join(list, " "); got != want {
			return fmt.Errorf("%v: %q, want %q:\n%s%s", err, got, want, out, c.router.ask("show protocols"))
		}
		return nil
	})
}

// TestClusterSurvivesCrashes kills every daemon with SIGKILL and starts it again. No datagram is lost, no flow moves to
// another server, and the gateways send the router no update.
func TestClusterSurvivesCrashes(t *testing.T) {
	c := newCluster(t)
	if got := output(t, c.gateways[0], "show"); strings.Contains(got, "speaker") {
		t.Errorf("a speaker exports the table:\n%s", got)
	}
	updates := c.router.updates()
	if strings.Count(updates, "updates") != 3 || strings.Count(updates, " up ") != 3 {
		t.Fatalf("counters of BIRD: %q", updates)
	}
	dsr, stateless := sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 20), sendNumbered(t, c.lab.Node("client"), "192.0.2.10:123", 20)
	dsr.progress()
	stateless.progress()
	for _, d := range c.gateways {
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	dsr.progress()
	stateless.progress()
	for _, d := range c.gateways {
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	dsr.progress()
	stateless.progress()
	if lost := dsr.finish(); lost > 0 {
		t.Errorf("dsr: %d of %d datagrams are lost", lost, dsr.sent.Load())
	}
	if lost := stateless.finish(); lost > 0 {
		t.Errorf("stateless: %d of %d datagrams are lost", lost, stateless.sent.Load())
	}
	if now := c.router.updates(); now != updates {
		t.Errorf("updates at the router:\nbefore %s\n after %s", updates, now)
	}
}

// TestClusterWithdraws removes gateways one after the other, and backends: the router follows, and flows keep their
// server.
func TestClusterWithdraws(t *testing.T) {
	c := newCluster(t)
	flows := sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 20)
	flows.progress()
	output(t, c.gateways[0], "drain --deadline 1h")
	c.hops("192.0.2.30", "n2 n3")
	c.learns("v6n2 v6n3")
	flows.progress()
	output(t, c.gateways[0], "drain --cancel")
	c.hops("192.0.2.30", "n1 n2 n3")
	flows.progress()
	t.Logf("a gateway drains: %d of %d datagrams are lost", flows.finish(), flows.sent.Load())

	flows = sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 20)
	flows.progress()
	ip(t, c.lab.Node("n2"), "link set lan0 down") // the session with the router stays
	c.hops("192.0.2.30", "n1 n3")
	c.hops("192.0.2.10", "n1 n3")
	flows.progress()
	ip(t, c.lab.Node("n2"), "link set lan0 up")
	c.hops("192.0.2.30", "n1 n2 n3")
	ip(t, c.lab.Node("n3"), "link set wan0 down") // speakers at other interfaces withdraw too
	c.hops("192.0.2.30", "n1 n2")
	labtest.Eventually(t, patience, "no routes", func() error {
		if got := announcedRoutes(t, c.lab.Node("n3")); got != "" {
			return fmt.Errorf("routes %s", got)
		}
		return nil
	})
	ip(t, c.lab.Node("n3"), "link set wan0 up")
	ip(t, c.lab.Node("n3"), "route replace 10.0.1.0/24 via 10.9.3.1") // the kernel has removed it
	c.hops("192.0.2.30", "n1 n2 n3")
	flows.progress()
	t.Logf("interfaces go down: %d of %d datagrams are lost", flows.finish(), flows.sent.Load())

	output(t, c.gateways[1], "stop")
	c.hops("192.0.2.30", "n1 n3")
	for _, s := range []string{"s1", "s2"} {
		ip(t, c.lab.Node(s), "link set eth0 down")
	}
	c.hops("192.0.2.30", "")
	c.hops("192.0.2.10", "")
}

// TestClusterRepliesThroughOtherNode opens connections through three gateways. All replies return through n1, which has
// a flow for a third of them only.
func TestClusterRepliesThroughOtherNode(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, clusterTopology())
	for _, s := range []struct{ node, at string }{{"s1", "10.0.2.2:8080"}, {"s2", "10.0.2.3:8080"}} {
		lines, err := host.ServeLines(l.Node(s.node), s.node, s.at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = lines.Stop() })
	}
	route := "route add 192.0.2.10"
	for i := 1; i <= 3; i++ {
		route += fmt.Sprintf(" nexthop via 10.9.%d.2", i)
		start(t, l.Node(fmt.Sprintf("n%d", i)), `
datapath: ebpf
cluster:
  nodes:
    - {name: n1, address: 10.9.1.2}
    - {name: n2, address: 10.9.2.2}
    - {name: n3, address: 10.9.3.2}
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: s1, address: 10.0.2.2, port: 8080}
      - {name: s2, address: 10.0.2.3, port: 8080}
`)
	}
	ip(t, l.Node("router"), route)
	target := netip.MustParseAddrPort("192.0.2.10:80")
	failed := 0
	for i := range 150 {
		source := netip.AddrPortFrom(netip.MustParseAddr("10.0.1.2"), uint16(20000+i))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		line, err := host.DialLine(ctx, l.Node("client"), source, target)
		cancel()
		for range 3 {
			if err == nil {
				_, err = line.Ask(patience / 10)
			}
		}
		if line != nil {
			_ = line.Close()
		}
		if err != nil {
			failed++
			t.Logf("%s: %v", source, err)
		}
		if failed > 10 {
			t.Fatalf("%d of %d connections failed", failed, i+1)
		}
	}
	if failed > 0 {
		t.Errorf("%d of 150 connections failed", failed)
	}
}
