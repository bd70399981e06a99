// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

const flowsConfig = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, backends: [{name: six, address: "fd00:2::2", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.11, ports: [53]}], protocol: udp, mode: dnat, scheduler: source-hash, backends: [{name: b, address: 10.0.2.3, port: 5353}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}
tables: {flows: 4096, flows6: 4096}
`

// TestFlowFilters lists the same flows with the same filters on each datapath, page by page, as a stream, and
// with the command.
func TestFlowFilters(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		topology := lab.Balancer()
		topology.Nodes[0].Routes = append(topology.Nodes[0].Routes, lab.Route{To: "203.0.113.1/32", Via: "10.0.1.1"})
		l := labtest.New(t, topology)
		d := start(t, l.Node("gateway"), force+flowsConfig)
		openFlows(t, l)
		name := strings.TrimSpace(strings.TrimPrefix(force, "datapath: "))
		other := map[string]string{"nftables": "ebpf", "ebpf": "nftables"}[name]
		c := api.NewClient(l.Node("gateway").StateDir() + "/sluice.sock")
		for _, f := range []struct {
			query string
			want  int
		}{
			{"", 9},
			{"protocol=tcp", 7}, {"protocol=udp", 2}, {"protocol=sctp", 0},
			{"client=10.0.1.2", 5}, {"client=10.0.1.0/24", 5}, {"client=10.64.0.0/16", 2}, {"client=fd00:1::/64", 1}, {"client=10.0.2.2", 1}, {"client=198.51.100.0/24", 0},
			{"destination=192.0.2.10", 5}, {"destination=192.0.2.0/24", 7}, {"destination=2001:db8::10", 1}, {"destination=10.0.1.2", 1},
			{"port=80", 6}, {"port=53", 2}, {"port=9000", 1}, {"port=8080", 0},
			{"owner=web", 5}, {"owner=web6", 1}, {"owner=dns", 2}, {"owner=office", 1}, {"owner=nobody", 0},
			{"backend=a", 5}, {"backend=six", 1}, {"backend=b", 2}, {"backend=c", 0},
			{"state=ESTABLISHED", 7}, {"state=established", 7}, {"state=SYN_SENT", 0},
			{"datapath=" + name, 9}, {"datapath=" + other, 0},
			{"protocol=udp&client=10.0.1.2&port=53&owner=dns&backend=b", 2}, {"owner=web&backend=b", 0},
		} {
			query, err := url.ParseQuery(f.query)
			if err != nil {
				t.Fatal(err)
			}
			list, err := c.Flows(t.Context(), query)
			if err != nil {
				t.Fatalf("%s: %v", f.query, err)
			}
			streamed := 0
			if err := c.EachFlow(t.Context(), query, func(*api.Flow) error { streamed++; return nil }); err != nil {
				t.Fatalf("%s: %v", f.query, err)
			}
			if list.Total != f.want || len(list.Flows) != f.want || streamed != f.want {
				t.Errorf("%q: %d flows, %d listed, %d streamed; want %d: %+v", f.query, list.Total, len(list.Flows), streamed, f.want, list.Flows)
			}
			for _, flow := range list.Flows {
				if flow.Datapath != name || flow.Owner == "" {
					t.Errorf("%q: %+v is of another datapath or of nobody", f.query, flow)
				}
			}
		}
		for _, bad := range []string{"protocol=nonsense", "client=10.0.1.300", "destination=x", "port=70000"} {
			query, _ := url.ParseQuery(bad)
			if list, err := c.Flows(t.Context(), query); err == nil {
				t.Errorf("%q is taken: %+v", bad, list)
			}
		}
		for args, want := range map[string]string{"--limit 2": "2 of 9 flows", "--owner web --limit 1": "1 of 5 flows", "--state established --protocol udp": "0 of 0 flows"} {
			out, err := d.Command(t.Context(), append([]string{"show", "flows"}, strings.Fields(args)...)...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("show flows %s: %v, no %q in\n%s", args, err, want, out)
			}
		}
		if name != "nftables" {
			return // eBPF has no flows of its own for packets that it passes to the kernel
		}
		if err := openFlow(t, l.Node("client"), "tcp", "10.0.1.2:4009", "10.0.2.2:8080"); err != nil {
			t.Fatal(err)
		}
		if list, err := c.Flows(t.Context(), url.Values{"datapath": {"kernel"}}); err != nil || list.Total != 1 || list.Flows[0].Owner != "" {
			t.Errorf("the kernel's own flows: %+v, %v", list, err)
		}
	})
}

// openFlows opens nine answered flows until the end of the test: five to web over IPv4 from two clients, one
// over IPv6, two to dns, and one from inside.
func openFlows(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, s := range []struct{ node, at string }{{"s1", "[::]:8080"}, {"client", "[::]:9000"}} {
		echo, err := l.Node(s.node).Listen(s.at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { echo.Close() })
		go func() {
			for {
				c, err := echo.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c) }()
			}
		}()
	}
	pc, err := l.Node("s2").ListenPacket("[::]:5353")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(b[:n], from)
		}
	}()
	for _, f := range []struct{ node, network, from, to string }{
		{"client", "tcp", "10.0.1.2:4001", "192.0.2.10:80"}, {"client", "tcp", "10.0.1.2:4002", "192.0.2.10:80"}, {"client", "tcp", "10.0.1.2:4003", "192.0.2.10:80"},
		{"client", "tcp", "10.64.0.7:4001", "192.0.2.10:80"}, {"client", "tcp", "10.64.1.7:4001", "192.0.2.10:80"},
		{"client", "tcp", "[fd00:1::2]:4001", "[2001:db8::10]:80"},
		{"client", "udp", "10.0.1.2:4001", "192.0.2.11:53"}, {"client", "udp", "10.0.1.2:4002", "192.0.2.11:53"},
		{"s1", "tcp", "10.0.2.2:4001", "10.0.1.2:9000"},
	} {
		if err := openFlow(t, l.Node(f.node), f.network, f.from, f.to); err != nil {
			t.Fatalf("%s %s -> %s: %v", f.network, f.from, f.to, err)
		}
	}
}

func openFlow(t *testing.T, n *lab.Node, network, from, to string) error {
	dialer := &net.Dialer{Timeout: patience}
	if network == "tcp" {
		at, err := net.ResolveTCPAddr(network, from)
		if err != nil {
			return err
		}
		dialer.LocalAddr = at
	} else {
		at, err := net.ResolveUDPAddr(network, from)
		if err != nil {
			return err
		}
		dialer.LocalAddr = at
	}
	c, err := n.Dial(t.Context(), dialer, network, to)
	if err != nil {
		return err
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := fmt.Fprint(c, "hello"); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, len("hello")))
	return err
}
