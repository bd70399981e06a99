// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// patience bounds each wait on this machine.
const patience = 2 * time.Minute

// serveIn makes the test program run an accelerator with the state directory of this variable.
const serveIn = "SLUICE_TEST_ACCELERATE"

func TestMain(m *testing.M) {
	if directory := os.Getenv(serveIn); directory != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err := Serve(ctx, directory, Options{Log: func(f string, v ...any) { fmt.Fprintf(os.Stderr, f+"\n", v...) }}, func(*Accelerator) {})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// running is an accelerator in a node of a lab.
type running struct {
	t   *testing.T
	n   *lab.Node
	cmd *exec.Cmd
	out *strings.Builder
}

// begin starts an accelerator and waits until it answers.
func begin(t *testing.T, n *lab.Node) *running {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &running{t: t, n: n, out: &strings.Builder{}}
	r.cmd = n.Command(context.WithoutCancel(t.Context()), self)
	r.cmd.Env = append(os.Environ(), serveIn+"="+n.StateDir())
	r.cmd.Stdout, r.cmd.Stderr = r.out, r.out
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		if t.Failed() {
			t.Logf("accelerator:\n%s", r.out)
		}
	})
	labtest.Eventually(t, patience, "an answer of the accelerator", func() error {
		_, err := StatusOf(t.Context(), n.StateDir(), 0)
		return err
	})
	return r
}

func (r *running) status() *Status {
	r.t.Helper()
	s, err := StatusOf(r.t.Context(), r.n.StateDir(), 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// router is a client and a server behind a router.
//
//	client eth0 ---- lan0 router wan0 ---- eth0 server
func router() lab.Topology {
	return lab.Topology{
		Name: "accel", About: "a router between a client and a server",
		Nodes: []lab.NodeSpec{
			{Name: "client", Routes: []lab.Route{{To: "default", Via: "10.0.1.1"}, {To: "::/0", Via: "fd00:1::1"}}},
			{Name: "router", Forward: true},
			{Name: "server"},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", GRO: true, Addresses: []string{"10.0.1.2/24", "fd00:1::2/64"}},
				B: lab.End{Node: "router", Iface: "lan0", GRO: true, Addresses: []string{"10.0.1.1/24", "fd00:1::1/64"}}},
			{A: lab.End{Node: "router", Iface: "wan0", GRO: true, Addresses: []string{"10.0.2.1/24", "fd00:2::1/64"}},
				B: lab.End{Node: "server", Iface: "eth0", GRO: true, Addresses: []string{"10.0.2.2/24", "fd00:2::2/64"}}},
		},
	}
}

func command(t *testing.T, n *lab.Node, stdin string, args ...string) string {
	t.Helper()
	cmd := n.Command(t.Context(), args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// rules are the same masquerading in the languages of three programs.
var rules = map[string]func(t *testing.T, n *lab.Node){
	"nft": func(t *testing.T, n *lab.Node) {
		command(t, n, "table ip nat {\n chain post {\n type nat hook postrouting priority srcnat\n oifname wan0 masquerade\n}\n}\n"+
			"table ip filter {\n chain forward {\n type filter hook forward priority filter; policy drop\n ct state established,related accept\n iifname lan0 accept\n}\n}\n", "nft", "-f", "-")
		command(t, n, "table ip6 nat {\n chain post {\n type nat hook postrouting priority srcnat\n oifname wan0 masquerade\n}\n}\n", "nft", "-f", "-")
	},
	"iptables-nft": func(t *testing.T, n *lab.Node) {
		command(t, n, iptables, "iptables-nft-restore")
		command(t, n, iptables, "ip6tables-nft-restore")
	},
	"iptables-legacy": func(t *testing.T, n *lab.Node) {
		command(t, n, iptables, "iptables-legacy-restore")
		command(t, n, iptables, "ip6tables-legacy-restore")
	},
}

const iptables = "*nat\n-A POSTROUTING -o wan0 -j MASQUERADE\nCOMMIT\n" +
	"*filter\n:FORWARD DROP [0:0]\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -i lan0 -j ACCEPT\nCOMMIT\n"

// talk exchanges numbered datagrams or segments between two sockets until it ends.
type talk struct {
	t    *testing.T
	conn net.Conn
	n    int
}

// echo serves TCP and UDP on a port of a node.
func echo(t *testing.T, n *lab.Node, port int) {
	t.Helper()
	l, err := n.Listen(fmt.Sprintf("[::]:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.(*net.TCPConn).SetKeepAlive(false) // its segments would hide the lifetime of idle connections
				b := make([]byte, 65536)
				for {
					k, err := c.Read(b)
					if err != nil {
						return
					}
					if _, err := c.Write(b[:k]); err != nil {
						return
					}
				}
			}()
		}
	}()
	p, err := n.ListenPacket(fmt.Sprintf("[::]:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	go func() {
		b := make([]byte, 65536)
		for {
			k, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = p.WriteTo(b[:k], from)
		}
	}()
}

func dial(t *testing.T, n *lab.Node, network, address string) *talk {
	t.Helper()
	c, err := n.Dial(t.Context(), &net.Dialer{Timeout: patience, KeepAlive: -1}, network, address) // as in echo
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &talk{t: t, conn: c}
}

// exchange sends one message and waits for its echo.
func (k *talk) exchange() error {
	k.n++
	message := fmt.Sprintf("message %d", k.n)
	_ = k.conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := k.conn.Write([]byte(message)); err != nil {
		return err
	}
	b := make([]byte, 2048)
	for {
		n, err := k.conn.Read(b)
		if err != nil {
			return err
		}
		if string(b[:n]) == message {
			return nil
		}
		if _, udp := k.conn.(*net.UDPConn); !udp {
			return fmt.Errorf("the answer is %q, not %q", b[:n], message)
		}
	}
}

// fast exchanges messages until both directions of the connection take the fast path.
func (k *talk) fast(r *running) {
	k.t.Helper()
	client := k.conn.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
	before := r.packets(client)
	labtest.Eventually(k.t, patience, "a fast flow in both directions", func() error {
		for range 20 {
			if err := k.exchange(); err != nil {
				k.t.Fatalf("exchange %d: %v; %+v", k.n, err, r.status())
			}
		}
		assure(k.t, r.n)
		n := r.packets(client)
		for i := range n {
			before[i] = min(before[i], n[i]) // a flow that was learned again begins at zero
		}
		if n[0] < before[0]+10 || n[1] < before[1]+10 {
			return fmt.Errorf("%v packets took the fast path, %v before: %+v", n, before, r.status())
		}
		return nil
	})
}

// packets returns the packets of a client's connection that took the fast path, forth and back.
func (r *running) packets(client netip.AddrPort) (n [2]uint64) {
	for _, f := range r.status().Flows {
		if f.Source == client {
			n[0] = f.Packets
		}
		if f.NewDest == client {
			n[1] = f.Packets
		}
	}
	return n
}

func TestMasqueradeRouter(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"))
	for name, load := range rules {
		t.Run(name, func(t *testing.T) {
			l := labtest.New(t, router())
			load(t, l.Node("router"))
			echo(t, l.Node("server"), 7)
			r := begin(t, l.Node("router"))
			for _, network := range []string{"udp", "tcp"} {
				for _, server := range []string{"10.0.2.2:7", "[fd00:2::2]:7"} {
					k := dial(t, l.Node("client"), network, server)
					k.fast(r)
					if network == "tcp" {
						k.bulk(16 << 20)
					}
				}
			}
		})
	}
}
