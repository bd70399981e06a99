// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

const agingYAML = `
services:
  - {name: near4, listen: [{address: 192.0.2.10, ports: [1]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}
  - {name: near6, listen: [{address: "2001:db8::10", ports: [1]}], protocol: udp, mode: dnat, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: far4, listen: [{address: 192.0.2.10, ports: [2]}], protocol: udp, mode: dnat, backends: [{name: a, address: 203.0.113.10}]}
  - {name: far6, listen: [{address: "2001:db8::10", ports: [2]}], protocol: udp, mode: dnat, backends: [{name: a, address: "fd00:99::10"}]}
nat: [{name: out, type: snat, source: [10.0.1.0/24], to: [192.0.2.200], out: lan0}]
tables: {flows: 4096, flows6: 4096}
`

const agingStatelessYAML = `
services:
  - {name: direct4, listen: [{address: 192.0.2.11, ports: [1]}], protocol: udp, mode: stateless, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}
tables: {flows: 4096, flows6: 4096}
`

// silentChange is a stream of datagrams to a host that changes its hardware address.
type silentChange struct {
	name     string
	to       string // destination of the client
	server   string // where s1 receives the datagrams
	link     string // link of the gateway to the changing host
	host     string // address of the changing host
	managed  bool   // the kernel keeps the neighbour fresh
	download bool   // the datagrams flow from the server to the client
	alone    bool   // without a daemon
	yaml     string // "" for agingYAML
}

var silentChanges = []silentChange{
	{name: "backend", to: "192.0.2.10:1", server: "10.0.2.2:1", link: "lan0", host: "10.0.2.2"},
	{name: "backend ipv6", to: "[2001:db8::10]:1", server: "[fd00:2::2]:1", link: "lan0", host: "fd00:2::2"},
	{name: "managed backend", to: "192.0.2.10:1", server: "10.0.2.2:1", link: "lan0", host: "10.0.2.2", managed: true},
	{name: "stateless backend", to: "192.0.2.11:1", server: "10.0.2.2:1", link: "lan0", host: "10.0.2.2", yaml: agingStatelessYAML},
	{name: "router", to: "192.0.2.10:2", server: "203.0.113.10:2", link: "lan0", host: "10.0.2.2"},
	{name: "router ipv6", to: "[2001:db8::10]:2", server: "[fd00:99::10]:2", link: "lan0", host: "fd00:2::2"},
	{name: "router of snat", to: "203.0.113.10:3", server: "203.0.113.10:3", link: "lan0", host: "10.0.2.2"},
	{name: "client", to: "192.0.2.10:1", server: "10.0.2.2:1", link: "wan0", host: "10.0.1.2", download: true},
	{name: "client ipv6", to: "[2001:db8::10]:1", server: "[fd00:2::2]:1", link: "wan0", host: "fd00:1::2", download: true},
	{name: "client without a daemon", to: "192.0.2.10:1", server: "10.0.2.2:1", link: "wan0", host: "10.0.1.2", download: true, alone: true},
}

// TestSilentMACChange changes the hardware address of a neighbour without an announcement, while packets flow to
// it. The neighbour entry is STALE and has the old address. The packets must find the new one.
func TestSilentMACChange(t *testing.T) {
	for _, hook := range hooks {
		for _, c := range silentChanges {
			t.Run(string(hook)+" "+c.name, func(t *testing.T) { c.run(t, hook) })
		}
	}
}

func (c silentChange) run(t *testing.T, hook config.Attach) {
	l := labFor(t, hopsTopology(), hook)
	gw := l.Node("gateway")
	for _, family := range []string{"ipv4", "ipv6"} { // the kernel probes an unconfirmed neighbour after 1 s instead of 5 s
		for key, value := range map[string]string{"delay_first_probe_time": "1", "retrans_time_ms": "200"} {
			if err := gw.Sysctl("net."+family+".neigh."+c.link+"."+key, value); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := openUntilEnd(t, gw)
	apply(t, d, hook, cmp.Or(c.yaml, agingYAML))
	handle, err := gw.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lan, err := gw.Interface("lan0")
	if err != nil {
		t.Fatal(err)
	}
	if err := (hops{Handle: handle}).routes("10.0.2.2", "fd00:2::2", lan.Index, 10); err != nil {
		t.Fatal(err)
	}
	// The kernel accepts packets from virtual addresses only with a route back.
	_, virtual, _ := net.ParseCIDR("192.0.2.0/24")
	if err := handle.RouteAdd(&netlink.Route{Dst: virtual, Gw: net.ParseIP("10.0.1.2")}); err != nil {
		t.Fatal(err)
	}
	received := c.stream(t, l)
	labtest.Eventually(t, patience, "datagrams", func() error { return more(received, 0, 20) })
	if c.alone {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	} else {
		defer d.Close()
	}
	link, err := gw.Interface(c.link)
	if err != nil {
		t.Fatal(err)
	}
	old := &netlink.Neigh{LinkIndex: link.Index, IP: net.ParseIP(c.host), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}, State: netlink.NUD_STALE}
	if err := handle.NeighSet(old); err != nil {
		t.Fatal(err)
	}
	if c.managed {
		if err := gw.Do(func() error {
			return netdev.Resolve(netdev.Hop{Ifindex: link.Index, Addr: netip.MustParseAddr(c.host)})
		}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(200 * time.Millisecond) // packets in transit have arrived
	was := received.Load()
	labtest.Eventually(t, 2*patience, "datagrams to the new address", func() error { return more(received, was, 20) })
	if !c.managed {
		return
	}
	if err := gw.Do(func() error {
		kept, err := netdev.Kept()
		if managed := kept[netdev.Hop{Ifindex: link.Index, Addr: netip.MustParseAddr(c.host)}]; err == nil && !managed {
			err = errors.New("the kernel does not keep the neighbour fresh any more")
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func more(received *atomic.Int64, was, want int64) error {
	if n := received.Load() - was; n < want {
		return fmt.Errorf("%d datagrams of %d", n, want)
	}
	return nil
}

// stream sends a datagram every 20 ms in one direction until the test ends, and counts the arrivals.
func (c silentChange) stream(t *testing.T, l *lab.Lab) *atomic.Int64 {
	server, err := l.Node("s1").ListenPacket(c.server)
	if err != nil {
		t.Fatal(err)
	}
	client, err := l.Node("client").Dial(t.Context(), &net.Dialer{}, "udp", c.to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close(); client.Close() })
	received := new(atomic.Int64)
	repeat := func(send func() error) {
		for t.Context().Err() == nil {
			if errors.Is(send(), net.ErrClosed) {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	if !c.download {
		go repeat(func() error { _, err := client.Write([]byte("up")); return err })
	}
	go func() {
		b, first := make([]byte, 64), true
		for {
			_, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			if !c.download {
				received.Add(1)
			} else if first {
				first = false
				go repeat(func() error { _, err := server.WriteTo([]byte("down"), from); return err })
			}
		}
	}()
	if c.download {
		go func() {
			b := make([]byte, 64)
			for {
				if _, err := client.Read(b); errors.Is(err, net.ErrClosed) {
					return
				} else if err == nil {
					received.Add(1)
				}
			}
		}()
		labtest.Eventually(t, patience, "a first datagram", func() error {
			if _, err := client.Write([]byte("start")); err != nil {
				return err
			}
			return more(received, 0, 1)
		})
	}
	return received
}
