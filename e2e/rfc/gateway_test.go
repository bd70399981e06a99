// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// binary is the program under test, built from this tree.
var binary string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	if os.Geteuid() != 0 {
		return m.Run(), nil // every test with a gateway skips with the reason
	}
	dir, err := os.MkdirTemp("", "sluice-rfc-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "sluice")
	build := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the program under test: %w\n%s", err, out)
	}
	return m.Run(), nil
}

// Addresses of the topology.
const (
	i1, i2       = "10.0.2.2", "10.0.2.3"
	o1, o1b, o2  = "198.51.100.11", "198.51.100.12", "198.51.100.21"
	pool1        = "203.0.113.1"
	i1six, i2six = "fd00:2::2", "fd00:2::3"
	o1in64       = "64:ff9b::c633:640b" // 198.51.100.11
	wanMTU       = 1400
)

func topology() lab.Topology {
	t := lab.Topology{
		Name: "rfc",
		Nodes: []lab.NodeSpec{
			{Name: "gateway", Forward: true, Sysctls: map[string]string{"net.ipv4.icmp_ratelimit": "0"}},
			{Name: "lan", Switch: true}, {Name: "wan", Switch: true},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.2.1/24", "fd00:2::1/64"}}, B: lab.End{Node: "lan", Iface: "gateway"}},
			{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24", "2001:db8:ff::1/64"}}, B: lab.End{Node: "wan", Iface: "gateway"}, MTU: wanMTU},
		},
	}
	host := func(name, network string, routes []lab.Route, mtu int, addresses ...string) {
		t.Nodes = append(t.Nodes, lab.NodeSpec{Name: name, Routes: routes})
		t.Links = append(t.Links, lab.LinkSpec{A: lab.End{Node: name, Iface: "eth0", Addresses: addresses, NoTxChecksum: true},
			B: lab.End{Node: network, Iface: name}, MTU: mtu})
	}
	inside := []lab.Route{{To: "default", Via: "10.0.2.1"}, {To: "default6", Via: "fd00:2::1"}}
	outside := []lab.Route{{To: "203.0.113.0/24", Via: "198.51.100.1"}, {To: "2001:db8:ab::/48", Via: "2001:db8:ff::1"}}
	host("i1", "lan", inside, 0, "10.0.2.2/24", "fd00:2::2/64")
	host("i2", "lan", inside, 0, "10.0.2.3/24", "fd00:2::3/64")
	host("o1", "wan", outside, wanMTU, "198.51.100.11/24", "198.51.100.12/24", "2001:db8:ff::11/64")
	host("o2", "wan", outside, wanMTU, "198.51.100.21/24", "2001:db8:ff::21/64")
	return t
}

// gateway is the lab with the daemon on one datapath.
type gateway struct {
	*lab.Lab
	t *testing.T
	d *daemon.Daemon
	// patience is the timeout for packets that must arrive, and again the interval of retransmissions. They are
	// short if the ledger says that the packet does not arrive. silence is the wait for packets that must not
	// arrive, and long if the ledger says that they do.
	patience, again, silence time.Duration
	sent                     int // number of sent texts, which are all different
}

// Configurations of the tests.
const (
	plain   = "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}\n"
	ports64 = "nat:\n  - {name: v6only, type: nat64, prefix: \"64:ff9b::/96\", source: [\"fd00:2::/64\"], pool: [203.0.113.1]}\n"
)

// snat is the plain rule with further keys.
func snat(more string) string {
	return strings.Replace(plain, "}\n", ", "+more+"}\n", 1)
}

// prove runs the check of a requirement on every datapath and compares the result with the ledger. Each run has
// a lab of its own, so that all can run in parallel.
func prove(t *testing.T, id, configuration string, check func(*gateway) error) {
	t.Helper()
	t.Parallel()
	labtest.Require(t, labtest.Root)
	row, ok := ledger(t)[id]
	if !ok {
		t.Fatalf("docs/reference/rfc.md has no row %s", id)
	}
	for _, name := range []string{"nftables", "ebpf"} {
		t.Run(name, func(t *testing.T) {
			status := row.status[name]
			t.Parallel()
			g := start(t, name, configuration, status)
			if g.patience, g.again, g.silence = 30*time.Second, time.Second, 150*time.Millisecond; strings.HasPrefix(status, "not met") {
				g.patience, g.again, g.silence = 2*time.Second, 300*time.Millisecond, 2*time.Second
			}
			err := check(g)
			if errors.Is(err, errInapplicable) {
				t.Skip(err)
			}
			switch {
			case strings.HasPrefix(status, "met") && err != nil:
				t.Errorf("the ledger says met: %v", err)
			case strings.HasPrefix(status, "not met") && err == nil:
				t.Error("the ledger says not met, but it is")
			case status == "not carried":
				t.Errorf("the ledger says not carried, but the datapath takes the rule; the check says: %v", err)
			case status == "unproven":
				t.Logf("not in the ledger yet; the check says: %v", err)
			case err != nil:
				t.Logf("as the ledger says, not met: %v", err)
			}
		})
	}
}

var errInapplicable = errors.New("does not apply")

// start builds the lab and runs the daemon on the datapath. It skips if the host or the datapath lacks support.
func start(t *testing.T, datapath, configuration, status string) *gateway {
	t.Helper()
	l := labtest.New(t, topology())
	file := "datapath: " + datapath + "\ninterfaces: [wan0, lan0]\n" + configuration
	if datapath == "ebpf" {
		file = "attach: tc\n" + file // auto selects TC on virtual links too, but would load the programs of XDP
	}
	d, err := daemon.Start(t.Context(), l.Node("gateway"), binary, "rfc.yaml", []byte(file))
	if err != nil {
		if strings.Contains(err.Error(), "not available on this host") {
			labtest.Lacks(t, "%v", err)
		}
		if status == "not carried" || status == "unproven" {
			t.Skipf("not carried by %s: %v", datapath, err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Kill() })
	s, err := d.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(s.Datapaths, datapath) {
		labtest.Lacks(t, "datapath %s is not available on this host, only %v", datapath, s.Datapaths)
	}
	return &gateway{Lab: l, t: t, d: d}
}

// udp opens a UDP socket of a host; "" as port means any.
func (g *gateway) udp(node, address string) *net.UDPConn {
	g.t.Helper()
	c, err := g.Node(node).ListenPacket(address)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// exchange sends one datagram and returns its source as seen by the receiver.
func (g *gateway) exchange(from net.PacketConn, to string, at net.PacketConn, text string) (netip.AddrPort, error) {
	dst := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))
	text = g.unlike(text)
	// The first packet in a new lab may wait for a neighbour, and UDP may be lost.
	for deadline := time.Now().Add(g.patience); time.Now().Before(deadline); {
		if _, err := from.WriteTo([]byte(text), dst); err != nil {
			return netip.AddrPort{}, err
		}
		source, got, err := receive(at, g.again)
		if err == nil && got == text {
			return source, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("a datagram to %s did not arrive within %v", to, g.patience)
}

// unlike returns a unique text. A late duplicate of an earlier datagram is then no answer to the next.
func (g *gateway) unlike(text string) string {
	g.sent++
	return fmt.Sprintf("%s (%d)", text, g.sent)
}

// receive waits for one datagram.
func receive(at net.PacketConn, wait time.Duration) (netip.AddrPort, string, error) {
	if err := at.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return netip.AddrPort{}, "", err
	}
	b := make([]byte, 65536)
	n, from, err := at.ReadFrom(b)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	a := from.(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), string(b[:n]), nil
}

// back sends a datagram from an outside host to an outside endpoint and reports
// whether it arrives inside.
func (g *gateway) back(from net.PacketConn, to netip.AddrPort, at net.PacketConn, wait time.Duration) error {
	drain(at)
	text := g.unlike("back")
	for deadline := time.Now().Add(wait); ; {
		if _, err := from.WriteTo([]byte(text), net.UDPAddrFromAddrPort(to)); err != nil {
			return err
		}
		_, got, err := receive(at, min(wait, g.again))
		if err == nil && got == text {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a datagram to %s did not reach the inside: %v", to, err)
		}
	}
}

// drain discards datagrams that have already arrived.
func drain(c net.PacketConn) {
	for {
		if _, _, err := receive(c, time.Millisecond); err != nil && !errors.Is(err, context.Canceled) {
			return
		}
	}
}

// flow returns the flow that a host's endpoint opened.
func (g *gateway) flow(source netip.AddrPort) (api.Flow, error) {
	all, err := g.d.Flows(g.t.Context(), nil)
	if err != nil {
		return api.Flow{}, err
	}
	for _, f := range all.Flows {
		if f.Client == source {
			return f, nil
		}
	}
	return api.Flow{}, fmt.Errorf("no flow of %s among %d", source, all.Total)
}

// timeout checks that the flow from source expires after the given time, less 5 s.
func (g *gateway) timeout(source netip.AddrPort, least time.Duration) error {
	f, err := g.flow(source)
	if err != nil {
		return err
	}
	if left := time.Duration(f.Timeout * float64(time.Second)); left < least-5*time.Second {
		return fmt.Errorf("the flow has %v to live when it is idle, want %v", left, least)
	}
	return nil
}
