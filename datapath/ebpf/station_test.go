// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestStations sends a client's frames to the hardware address of another station. The gateway receives them on
// a promiscuous interface and does not forward them. When the address becomes the interface's own, or belongs to
// a VRRP link on it, the gateway answers at once.
func TestStations(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	for _, attach := range []config.Attach{config.AttachXDP, config.AttachTC} {
		t.Run(string(attach), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), attach)
			echo(t, l.Node("s1"), ":5353")
			d := gateway(t, l.Node("gateway"), attach, "services:\n  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, "+
				"backends: [{name: a, address: 10.0.2.2, port: 5353}]}\ntables: {flows: 4096, flows6: 4096}\n")
			asked := func() error {
				_, _, err := askWithin(time.Second, l.Node("client"), "udp", "192.0.2.10:53")
				return err
			}
			if err := asked(); err != nil {
				t.Fatalf("by its own address: %v\n%s", err, describeReasons(d))
			}
			wan0, err := l.Node("gateway").Interface("wan0")
			if err != nil {
				t.Fatal(err)
			}
			// to sets the destination hardware address of the client.
			to := func(mac string) {
				t.Helper()
				hw, _ := net.ParseMAC(mac)
				if err := l.Node("client").Do(func() error { return sendTo(hw) }); err != nil {
					t.Fatal(err)
				}
			}
			const otherStation, vrrp = "02:00:00:00:09:09", "00:00:5e:00:01:05"
			if err := l.Node("gateway").Do(func() error {
				return netlink.SetPromiscOn(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: wan0.Index}})
			}); err != nil {
				t.Fatal(err)
			}
			to(otherStation)
			before := counted(t, d, "other-station")
			if asked() == nil {
				t.Errorf("a frame for another station was forwarded: %s", describeReasons(d))
			}
			if counted(t, d, "other-station") == before {
				t.Errorf("a frame for another station is not counted: %s", describeReasons(d))
			}
			hw, _ := net.ParseMAC(otherStation)
			if err := l.Node("gateway").Do(func() error {
				return netlink.LinkSetHardwareAddr(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: wan0.Index}}, hw)
			}); err != nil {
				t.Fatal(err)
			}
			labtest.Eventually(t, patience, "the interface's new address", asked)
			to(vrrp)
			if asked() == nil {
				t.Error("a frame for VRRP's address was forwarded before the host had it")
			}
			hw, _ = net.ParseMAC(vrrp)
			if err := l.Node("gateway").Do(func() error {
				v := &netlink.Macvlan{Mode: netlink.MACVLAN_MODE_PRIVATE, LinkAttrs: netlink.LinkAttrs{Name: "vrrp.5", ParentIndex: wan0.Index, HardwareAddr: hw}}
				return errors.Join(netlink.LinkAdd(v), netlink.LinkSetUp(v))
			}); err != nil {
				t.Fatal(err)
			}
			labtest.Eventually(t, patience, "the address of VRRP", asked)
		})
	}
}

// sendTo sets the hardware address of every IPv4 neighbour on eth0.
func sendTo(mac net.HardwareAddr) error {
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	routes, err := netlink.RouteList(l, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Gw != nil {
			err = errors.Join(err, netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: r.Gw, HardwareAddr: mac, State: netlink.NUD_PERMANENT}))
		}
	}
	return err
}
