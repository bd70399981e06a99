// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// hopsYAML has backends with addresses of two servers: on the link, and behind routers.
const hopsYAML = `
services:
  - {name: near4, listen: [{address: 192.0.2.10, ports: [1]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.77}]}
  - {name: near6, listen: [{address: "2001:db8::10", ports: [1]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: "fd00:2::77"}]}
  - {name: far4, listen: [{address: 192.0.2.10, ports: [2]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: 203.0.113.10}]}
  - {name: far6, listen: [{address: "2001:db8::10", ports: [2]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: "fd00:99::10"}]}
tables: {flows: 4096, flows6: 4096}
`

// hopsTopology gives both servers the backends' addresses, and s2 a link of its
// own to the gateway.
func hopsTopology() lab.Topology {
	t := lab.Balancer()
	for i := range t.Nodes {
		if n := &t.Nodes[i]; n.Name == "s1" || n.Name == "s2" {
			n.Addresses = append(n.Addresses, "10.0.2.77/32", "fd00:2::77/128", "203.0.113.10/32", "fd00:99::10/128")
		}
	}
	t.Links = append(t.Links, lab.LinkSpec{
		A: lab.End{Node: "gateway", Iface: "lan1", Addresses: []string{"10.0.4.1/24", "fd00:4::1/64"}},
		B: lab.End{Node: "s2", Iface: "eth1", Addresses: []string{"10.0.4.2/24", "fd00:4::2/64"}},
	})
	return t
}

// hops changes the next hops of the gateway.
type hops struct {
	*netlink.Handle
	mac1, mac2 net.HardwareAddr // of s1 and s2
	lan0, lan1 int
}

// neighbours gives the backends on the link, of both families, one hardware address.
func (h hops) neighbours(mac net.HardwareAddr) (err error) {
	for _, a := range []string{"10.0.2.77", "fd00:2::77"} {
		err = errors.Join(err, h.NeighSet(&netlink.Neigh{LinkIndex: h.lan0, IP: net.ParseIP(a), HardwareAddr: mac, State: netlink.NUD_PERMANENT}))
	}
	return err
}

// routes sets the router for the remote backends of both families.
func (h hops) routes(via4, via6 string, ifindex, metric int) (err error) {
	for dst, via := range map[string]string{"203.0.113.0/24": via4, "fd00:99::/64": via6} {
		_, to, _ := net.ParseCIDR(dst)
		err = errors.Join(err, h.RouteReplace(&netlink.Route{LinkIndex: ifindex, Dst: to, Gw: net.ParseIP(via), Priority: metric}))
	}
	return err
}

// hopChange is an event after which packets must go to s2 and no longer to s1.
type hopChange struct {
	name   string
	port   int // of the service
	before func(hops) error
	change func(hops) error
	outage bool // datagrams sent before the kernel reports the change may be lost
	alone  bool // without a process: the programs detect the change
}

func (h hops) neighbour1() error { return h.neighbours(h.mac1) }
func (h hops) neighbour2() error { return h.neighbours(h.mac2) }

var hopChanges = []hopChange{
	{name: "a neighbour's hardware address changes", port: 1, before: hops.neighbour1, change: hops.neighbour2},
	{name: "the same without a daemon", port: 1, before: hops.neighbour1, change: hops.neighbour2, alone: true},
	{name: "a route changes to another router", port: 2,
		before: func(h hops) error { return h.routes("10.0.2.2", "fd00:2::2", h.lan0, 10) },
		change: func(h hops) error { return h.routes("10.0.2.3", "fd00:2::3", h.lan0, 10) }},
	{name: "a link goes down and another takes over", port: 2, outage: true,
		before: func(h hops) error {
			return errors.Join(h.routes("10.0.2.2", "fd00:2::2", h.lan0, 10), h.routes("10.0.4.2", "fd00:4::2", h.lan1, 20))
		},
		change: func(h hops) error {
			l, err := h.LinkByIndex(h.lan0)
			if err != nil {
				return err
			}
			return h.LinkSetDown(l)
		}},
}

// TestNextHopUnderLoad changes the next hops of both families while numbered datagrams pass. After the kernel
// reports the change, no datagram may use the old next hop. No datagram may be lost, except those that left
// before the report of a dead link.
func TestNextHopUnderLoad(t *testing.T) {
	for _, hook := range hooks {
		for _, c := range hopChanges {
			t.Run(string(hook)+" "+c.name, func(t *testing.T) {
				l := labFor(t, hopsTopology(), hook)
				gw := l.Node("gateway")
				d := openUntilEnd(t, gw)
				apply(t, d, hook, hopsYAML)
				handle, err := gw.Handle()
				if err != nil {
					t.Fatal(err)
				}
				defer handle.Close()
				iface := func(node, name string) *net.Interface {
					i, err := l.Node(node).Interface(name)
					if err != nil {
						t.Fatal(err)
					}
					return i
				}
				c.run(t, l, d, hops{handle, iface("s1", "eth0").HardwareAddr, iface("s2", "eth0").HardwareAddr,
					iface("gateway", "lan0").Index, iface("gateway", "lan1").Index})
			})
		}
	}
}

// openUntilEnd opens the datapath in a node. The end of the test removes its state in the kernel, whether or not
// the test has closed it.
func openUntilEnd(t *testing.T, n *lab.Node) *Datapath {
	t.Helper()
	pins := pinsOf(t)
	d := openIn(t, n, pins)
	t.Cleanup(func() {
		again := openIn(t, n, pins)
		if err := again.Remove(context.Background()); err != nil {
			t.Error(err)
		}
		again.Close()
	})
	return d
}

func (c hopChange) run(t *testing.T, l *lab.Lab, d *Datapath, h hops) {
	if err := c.before(h); err != nil {
		t.Fatal(err)
	}
	var streams []*numbered
	for target, backend := range map[int]map[string]string{
		1: {"192.0.2.10:1": "10.0.2.77:1", "[2001:db8::10]:1": "[fd00:2::77]:1"},
		2: {"192.0.2.10:2": "203.0.113.10:2", "[2001:db8::10]:2": "[fd00:99::10]:2"},
	}[c.port] {
		streams = append(streams, startNumbered(t, l.Node("client"), target, backend, l.Node("s1"), l.Node("s2")))
	}
	counts := func() (all [][]uint32) {
		for _, n := range streams {
			n.await(20)
		}
		for _, n := range streams {
			all = append(all, n.stream.Sent())
		}
		return all
	}
	before := counts()
	control, err := table.MapMemory[wire.Control](d.t.Maps["control"])
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	generation := func() uint32 { return atomic.LoadUint32(&control.Values[0].Generation) }
	if c.alone {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	} else {
		defer d.Close()
	}
	was := generation()
	if err := c.change(h); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, 2*patience, "the change to be told", func() error {
		// One change can cause several messages. The change is complete when no message arrives for a while; the
		// wait allows for a busy machine.
		now := generation()
		if time.Sleep(time.Second); now == was || now != generation() {
			return fmt.Errorf("next hops were of generation %d, are of %d", was, now)
		}
		return nil
	})
	told := make([][]uint32, len(streams))
	for i, n := range streams {
		told[i] = n.stream.Sent()
	}
	counts()
	for i, n := range streams {
		quiet := patience
		if c.outage { // some may be lost
			quiet = 2 * time.Second
		}
		missing := n.end(quiet)
		for flow, numbers := range missing {
			for _, number := range numbers {
				if !c.outage || number < before[i][flow] || number > told[i][flow] {
					t.Errorf("%s flow %d: datagram %d is lost; the change was told after %d", n.stream.Target, flow, number, told[i][flow])
				}
			}
		}
		old, found := 0, map[string]int{}
		for _, a := range n.arrivals() {
			found[a.Server]++
			if a.Server == "s1" && a.Number > told[i][a.Flow] {
				old++
			}
		}
		if old > 0 || found["s1"] == 0 || found["s2"] == 0 {
			t.Errorf("%s: %d datagrams reached the old place after the change was told; in all %v", n.stream.Target, old, found)
		}
	}
}

// TestLaterNextHops looks up next hops in an old generation, after others have stored newer ones. Flows refer to
// the newer entries, so the lookup replaces none.
func TestLaterNextHops(t *testing.T) {
	s := office(t, "")
	theirs := wire.Hop{Ifindex: uint32(s.ifaces["wan0"]), Gen: s.d.t.Control.Values[0].Generation + 1, Mtu: 1500, Dmac: [6]uint8{2, 0, 0, 0, 9, 9}}
	places := s.d.t.Maps["hops"].MaxEntries()
	for i := uint32(1); i < places; i++ {
		if err := s.d.t.Maps["hops"].Put(i, theirs); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		out := send(t, s, "lan0", question(2, 1))
		if len(out.Out) != 1 {
			t.Fatalf("%s %s: nothing was sent", out.Action, out.Reason)
		}
		if to := net.HardwareAddr(out.Out[0].Frame[:6]).String(); to != "02:00:00:00:01:02" {
			t.Errorf("sent to %s", to)
		}
	}
	for i := uint32(1); i < places; i++ {
		var h wire.Hop
		if err := s.d.t.Maps["hops"].Lookup(i, &h); err != nil || h != theirs {
			t.Fatalf("place %d has %+v, %v", i, h, err)
		}
	}
}
