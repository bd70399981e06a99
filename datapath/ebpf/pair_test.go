// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPair sends much data over TCP through a gateway. Its link to the servers accepts no frames from XDP, so TC
// handles packets to the servers, and XDP the replies.
func TestPair(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Kernel("6.3", "features of XDP"))
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	if err := l.Node("lan").SetGRO("gateway", false); err != nil {
		t.Fatal(err)
	}
	d := gateway(t, l.Node("gateway"), config.AttachXDP, bulkYAML)
	if !d.switches.Paired {
		t.Fatalf("TC is not behind XDP: features %v", d.lastHost.XDP)
	}
	for _, addr := range []string{"192.0.2.20:4", "[2001:db8::20]:6", "192.0.2.20:44", "[2001:db8::20]:66", "[2001:db8::20]:64", "192.0.2.20:46"} {
		if err := sendMuch(transfer(t, l.Node("client"), addr)); err != nil {
			t.Errorf("%s: %v\n%s", addr, err, describeReasons(d))
		}
	}
	sends := map[string]bool{}
	for at := range d.t.Maps["hops"].MaxEntries() {
		var h wire.Hop
		if err := d.t.Maps["hops"].Lookup(at, &h); err != nil {
			t.Fatal(err)
		}
		for _, i := range d.lastHost.Interfaces {
			if i.Index == int(h.Ifindex) {
				sends[i.Name] = sends[i.Name] || h.Flags != 0
			}
		}
	}
	if on, met := sends["lan0"]; on || !met || !sends["wan0"] {
		t.Errorf("interfaces of next hops, and whether XDP sends there: %v", sends)
	}
}

// TestPairComesAndGoes creates and removes a bridge while numbered datagrams pass, so that TC is attached behind
// XDP and removed. No datagram is lost, and no flow moves.
func TestPairComesAndGoes(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw, yaml := l.Node("gateway"), upgradeYAML+"interfaces: [wan0, lan0]\n"
	d := gateway(t, gw, config.AttachXDP, yaml)
	load := startNumbered(t, l.Node("client"), "192.0.2.10:53", ":5353", l.Node("s1"), l.Node("s2"))
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	for _, change := range []func() error{
		func() error { return nil },
		func() error { return errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge)) },
		func() error { return netlink.LinkDel(bridge) },
		func() error { return errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge)) },
		func() error { return netlink.LinkSetDown(bridge) },
	} {
		if err := gw.Do(change); err != nil {
			t.Fatal(err)
		}
		apply(t, d, config.AttachXDP, yaml)
		load.await(20)
		i, there := d.lastHost.ByName("br0")
		if up := there && i.Up; d.switches.Paired != up || len(d.attached) != map[bool]int{false: 2, true: 4}[up] {
			t.Errorf("with the bridge up %v: paired %v, attached %v", up, d.switches.Paired, d.attached)
		}
	}
	if missing := load.end(patience); len(missing) > 0 {
		t.Errorf("datagrams are lost, by flow: %v", missing)
	}
	mustStay(t, load.arrivals())
}
