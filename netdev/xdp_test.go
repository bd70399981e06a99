// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"maps"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestXDPFeatures: a veth accepts frames from XDP while its other end polls. The first requested interface is
// reported like the others.
func TestXDPFeatures(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Kernel("6.3", "features of XDP"))
	gw := labtest.New(t, lab.Topology{Name: "features", Nodes: []lab.NodeSpec{{Name: "gateway"}}}).Node("gateway")
	do(t, gw, func() error {
		a := netlink.NewLinkAttrs()
		a.Name = "a"
		veth := &netlink.Veth{LinkAttrs: a, PeerName: "b"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		b, err := netlink.LinkByName("b")
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetUp(veth), netlink.LinkSetUp(b), lab.SetGRO("b", true)); err != nil {
			return err
		}
		x, y := veth.Index, b.Attrs().Index
		got := XDPFeatures([]int{x, y, 1 << 20})
		if len(got) != 2 || got[x]&XDPBasic == 0 || got[x]&XDPTransmit == 0 || got[y]&XDPBasic == 0 || got[y]&XDPTransmit != 0 {
			t.Errorf("features of a, whose other end polls, and b: %v", got)
		}
		for range 100 {
			if again := XDPFeatures([]int{y, x}); !maps.Equal(again, got) {
				t.Fatalf("%v, then %v", got, again)
			}
		}
		return nil
	})
}
