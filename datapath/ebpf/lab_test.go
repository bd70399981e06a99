// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// hooks are the hooks of the lab tests: XDP needs complete checksums and NAPI on the veth pairs, TC accepts any.
var hooks = []config.Attach{config.AttachTC, config.AttachXDP}

// labFor builds a topology with links for the hook.
func labFor(t *testing.T, topology lab.Topology, hook config.Attach) *lab.Lab {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	if hook == config.AttachXDP {
		for i := range topology.Links {
			for _, e := range []*lab.End{&topology.Links[i].A, &topology.Links[i].B} {
				e.GRO, e.NoTxChecksum = true, true
			}
		}
	}
	return labtest.New(t, topology)
}

// gateway opens the datapath in a node and applies a configuration.
func gateway(t *testing.T, n *lab.Node, hook config.Attach, yaml string) *Datapath {
	t.Helper()
	var d *Datapath
	err := n.Do(func() (err error) {
		d, err = Open(Options{StateDir: t.TempDir(), Dir: pinsOf(t), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Remove(context.Background()); err != nil {
			t.Error(err)
		}
		d.Close()
	})
	apply(t, d, hook, yaml)
	return d
}

func apply(t *testing.T, d *Datapath, hook config.Attach, yaml string) *datapath.Change {
	t.Helper()
	c, err := d.Apply(context.Background(), snapshotOf(t, hook, yaml))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// snapshotOf parses a configuration and assigns all objects to this datapath. Every backend is up unless it is
// drained.
func snapshotOf(t *testing.T, hook config.Attach, yaml string) *datapath.Snapshot {
	t.Helper()
	c, err := config.Decode("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	c.Attach = hook
	s := &datapath.Snapshot{Revision: 1, Config: c}
	for i := range c.Services {
		if err := compile.CarriesService(&c.Services[i]); err != nil {
			t.Fatalf("service %s: %v", c.Services[i].Name, err)
		}
		states := make([]datapath.State, len(c.Services[i].Backends))
		for n, b := range c.Services[i].Backends {
			if b.Drain {
				states[n] = datapath.Drain
			}
		}
		s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: states})
	}
	for i := range c.NAT {
		if err := compile.CarriesNAT(&c.NAT[i]); err != nil {
			t.Fatalf("nat %s: %v", c.NAT[i].Name, err)
		}
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	for i := range c.Firewall.Rules {
		if err := compile.CarriesRule(&c.Firewall.Rules[i]); err != nil {
			t.Fatalf("rule %s: %v", c.Firewall.Rules[i].Name, err)
		}
		s.Rules = append(s.Rules, &c.Firewall.Rules[i])
	}
	return s
}

// serve answers every TCP connection to a node's address with the node's name
// and the client's address.
func serve(t *testing.T, n *lab.Node, addr string) {
	t.Helper()
	listen(t, n, addr, func(c net.Conn) {
		io.Copy(io.Discard, io.LimitReader(c, 1))
		fmt.Fprintf(c, "%s %s", n.Short(), c.RemoteAddr())
		c.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, c)
	})
}

// listen answers TCP connections on a node until the test ends.
func listen(t *testing.T, n *lab.Node, addr string, answer func(net.Conn)) {
	t.Helper()
	var l net.Listener
	if err := n.Do(func() (err error) { l, err = net.Listen("tcp", addr); return err }); err != nil {
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
				answer(c)
			}()
		}
	}()
}

// echo returns every UDP packet that a node's address receives.
func echo(t *testing.T, n *lab.Node, addr string) {
	t.Helper()
	var p net.PacketConn
	if err := n.Do(func() (err error) { p, err = net.ListenPacket("udp", addr); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			_, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			p.WriteTo([]byte(n.Short()+" "+from.String()), from)
		}
	}()
}

// patience is the timeout for every expected event.
const patience = 30 * time.Second

// ask opens a connection from a node and returns the words of the answer.
func ask(n *lab.Node, network, addr string) (server, client string, err error) {
	return askWithin(patience, n, network, addr)
}

func askWithin(timeout time.Duration, n *lab.Node, network, addr string) (server, client string, err error) {
	var c net.Conn
	err = n.Do(func() (err error) {
		d := net.Dialer{Timeout: timeout}
		c, err = d.Dial(network, addr)
		return err
	})
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(timeout))
	if _, err := c.Write([]byte("?")); err != nil {
		return "", "", err
	}
	b := make([]byte, 256)
	k, err := c.Read(b)
	if err != nil {
		return "", "", err
	}
	server, client, _ = strings.Cut(string(b[:k]), " ")
	return server, client, nil
}

// counted returns the number of packets with a reason.
func counted(t *testing.T, d *Datapath, reason string) (n uint64) {
	t.Helper()
	c, err := d.Counters(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range c.Reasons {
		if r.Reason == reason {
			n += r.Packets
		}
	}
	return n
}

func describeReasons(d *Datapath) string {
	c, err := d.Counters(context.Background())
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%+v", c.Reasons)
}

const dnatYAML = `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: rr
    backends:
      - {name: a, address: 10.0.2.2, port: 8080}
      - {name: b, address: 10.0.2.3, port: 8080}
  - name: web6
    listen: [{address: "2001:db8::11", ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: "fd00:2::2", port: 8080}
      - {name: b, address: "fd00:2::3", port: 8080}
  - name: udp
    listen: [{address: 192.0.2.10, ports: [53]}]
    protocol: udp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: 10.0.2.2, port: 5353}
      - {name: b, address: 10.0.2.3, port: 5353}
tables: {flows: 4096, flows6: 4096}
`

func TestDNAT(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			for _, s := range []string{"s1", "s2"} {
				serve(t, l.Node(s), ":8080")
				echo(t, l.Node(s), ":5353")
			}
			d := gateway(t, l.Node("gateway"), hook, strings.Replace(dnatYAML, `, {address: "2001:db8::10", ports: [80]}`, "", 1))
			for _, c := range []struct{ network, addr, client string }{
				{"tcp", "192.0.2.10:80", "10.0.1.2"}, {"tcp", "[2001:db8::11]:80", "fd00:1::2"}, {"udp", "192.0.2.10:53", "10.0.1.2"},
			} {
				seen := map[string]int{}
				for i := range 40 { // by chance, all use one server: 2 in 2^40
					server, client, err := ask(l.Node("client"), c.network, c.addr)
					if err != nil {
						t.Fatalf("%s %s, connection %d: %v\n%s", c.network, c.addr, i, err, describeReasons(d))
					}
					if a := netip.MustParseAddrPort(client).Addr().String(); a != c.client {
						t.Fatalf("the server sees %s, want %s", a, c.client)
					}
					seen[server]++
				}
				if seen["s1"] == 0 || seen["s2"] == 0 {
					t.Errorf("%s %s: not spread: %v", c.network, c.addr, seen)
				}
			}
			if counted(t, d, "flow") == 0 {
				t.Errorf("no packet went the fast path: %s", describeReasons(d))
			}
			t.Log(describeReasons(d))
		})
	}
}
