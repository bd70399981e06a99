// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestSourcesAreFollowed: the programs get changes of settings, addresses and route MTUs between applies.
func TestSourcesAreFollowed(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw := l.Node("gateway")
	d := gateway(t, gw, config.AttachTC, hopsYAML)
	wan, err := gw.Interface("wan0")
	if err != nil {
		t.Fatal(err)
	}
	flagsAre := func(want uint32) {
		t.Helper()
		labtest.Eventually(t, patience, "the setting", func() error {
			all, err := table.Content[uint32, uint32](d.t.Maps["source_checks"])
			if got := all[uint32(wan.Index)]; err == nil && got != want {
				err = fmt.Errorf("wan0 has the checks %#x, want %#x", got, want)
			}
			return err
		})
	}
	for _, s := range []struct {
		value string
		want  uint32
	}{{"1", wire.SourceStrict}, {"2", wire.SourceLoose}, {"0", 0}} {
		for _, key := range []string{"net.ipv4.conf.all.rp_filter", "net.ipv4.conf.wan0.rp_filter"} {
			if err := gw.Sysctl(key, s.value); err != nil {
				t.Fatal(err)
			}
		}
		flagsAre(s.want)
	}
	handle, err := gw.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	_, to, _ := net.ParseCIDR("203.0.113.0/24")
	if err := handle.RouteAdd(&netlink.Route{Dst: to, Gw: net.ParseIP("10.0.1.2"), MTU: 1400}); err != nil {
		t.Fatal(err)
	}
	link, err := handle.LinkByIndex(wan.Index)
	if err != nil {
		t.Fatal(err)
	}
	more, _ := netlink.ParseAddr("198.51.100.77/24")
	if err := handle.AddrAdd(link, more); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "route and address", func() error {
		mtus, err := table.Content[wire.RouteMtuKey, uint32](d.t.Maps["route_mtus"])
		if err == nil && len(mtus) != 1 {
			err = fmt.Errorf("%d routes with an mtu, want 1", len(mtus))
		}
		own, e := table.Content[uint32, uint32](d.t.Maps["own_sources"])
		if kind := own[wire.AddrOf(netip.MustParseAddr("198.51.100.77")).W[0]]; e == nil && kind != wire.OwnAddress {
			e = fmt.Errorf("%s is of kind %d", more.IP, kind)
		}
		if err == nil {
			err = e
		}
		return err
	})
}
