// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// openFilters opens a datapath that attaches to TC as on kernels before 6.6.
func openFilters(t *testing.T, n *lab.Node, pins string) (d *Datapath) {
	t.Helper()
	if err := n.Do(func() (err error) {
		d, err = Open(Options{StateDir: t.TempDir(), Dir: pins, NoTCX: true, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return d
}

// hung lists the clsact qdiscs, filters and XDP programs on a node's interfaces.
func hung(t *testing.T, n *lab.Node) (list []string) {
	t.Helper()
	if err := n.Do(func() error {
		h, err := readHost()
		if err != nil {
			return err
		}
		for _, i := range h.Interfaces {
			l, err := netlink.LinkByIndex(i.Index)
			if err != nil {
				return err
			}
			qdiscs, err := netlink.QdiscList(l)
			if err != nil {
				return err
			}
			for _, q := range qdiscs {
				if q.Type() == "clsact" {
					list = append(list, i.Name+" clsact")
				}
			}
			filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
			if err != nil {
				return err
			}
			for _, f := range filters {
				if b, ok := f.(*netlink.BpfFilter); ok {
					list = append(list, i.Name+" "+b.Name)
				}
			}
			if x := l.Attrs().Xdp; x != nil && x.Attached {
				list = append(list, i.Name+" xdp")
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(list)
	return list
}

func mustHang(t *testing.T, n *lab.Node, when string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, hung(t, n)); diff != "" {
		t.Errorf("%s: -want +got\n%s", when, diff)
	}
}

// TestFiltersAreAdopted stops processes without removing anything. The next process detaches unwanted programs,
// and at the end no attachment is left.
func TestFiltersAreAdopted(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw, pins := l.Node("gateway"), pinsOf(t)
	next := func(hook config.Attach, yaml string) {
		t.Helper()
		d := openFilters(t, gw, pins)
		defer d.Close()
		apply(t, d, hook, oneServer+yaml)
	}
	next(config.AttachTC, "interfaces: [wan0, lan0]\n")
	mustHang(t, gw, "both", "lan0 clsact", "lan0 sluice", "wan0 clsact", "wan0 sluice")
	next(config.AttachTC, "interfaces: [wan0]\n")
	mustHang(t, gw, "one", "wan0 clsact", "wan0 sluice")
	next(config.AttachXDP, "interfaces: [wan0]\n")
	mustHang(t, gw, "by XDP", "wan0 xdp")
	next(config.AttachTC, "interfaces: [wan0, lan0]\n")
	d := openFilters(t, gw, pins)
	defer d.Close()
	if err := d.Remove(context.Background()); err != nil {
		t.Error(err)
	}
	mustHang(t, gw, "removed by a process that has applied nothing")
}

// TestFilterBesideALink finds the state of a process that was killed between the two steps of an attachment.
func TestFilterBesideALink(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw, pins := l.Node("gateway"), pinsOf(t)
	d := openFilters(t, gw, pins)
	apply(t, d, config.AttachXDP, oneServer+"interfaces: [wan0]\n")
	wan, err := gw.Interface("wan0")
	if err != nil {
		t.Fatal(err)
	}
	foreign := constant(t, 3, -1) // BPF_PROG_TYPE_SCHED_CLS, TC_ACT_UNSPEC
	a := &attachment{ids: d.t.Maps["ids"], attachPoint: attachPoint{wan.Index, config.AttachTC}, name: "wan0"}
	if err := errors.Join(gw.Do(func() error { return a.filter(foreign) }), d.Close()); err != nil {
		t.Fatal(err)
	}
	mustHang(t, gw, "before", "wan0 clsact", "wan0 sluice", "wan0 xdp")
	d = openFilters(t, gw, pins)
	defer d.Close()
	apply(t, d, config.AttachXDP, oneServer+"interfaces: [wan0]\n")
	mustHang(t, gw, "after", "wan0 xdp")
	if err := d.Remove(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestForeignQdisc finds a clsact qdisc that already existed, and one of its own with a filter of another
// program. Both remain.
func TestForeignQdisc(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw := l.Node("gateway")
	wan, err := gw.Interface("wan0")
	lan, err2 := gw.Interface("lan0")
	if err := errors.Join(err, err2, gw.Do(func() error { return netlink.QdiscAdd(clsact(wan.Index)) })); err != nil {
		t.Fatal(err)
	}
	d := openFilters(t, gw, pinsOf(t))
	defer d.Close()
	apply(t, d, config.AttachTC, oneServer)
	foreign := constant(t, 3, -1)
	f := (&attachment{attachPoint: attachPoint{ifindex: lan.Index}}).bpfFilter()
	f.Name, f.Priority, f.Fd = "foreign", 1, foreign.FD()
	f.Parent = netlink.HANDLE_MIN_EGRESS
	if err := gw.Do(func() error { return netlink.FilterAdd(f) }); err != nil {
		t.Fatal(err)
	}
	if err := d.Remove(context.Background()); err != nil {
		t.Error(err)
	}
	mustHang(t, gw, "removed", "lan0 clsact", "wan0 clsact")
}

// TestNeighboursAreForgotten removes backends, finally all, also by a process that has not requested the
// neighbours. An entry that another program manages stays unchanged.
func TestNeighboursAreForgotten(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw, pins := l.Node("gateway"), pinsOf(t)
	yaml := func(servers ...int) string {
		text := "services:\n  - name: web\n    listen: [{address: 192.0.2.10, ports: [80]}]\n    protocol: tcp\n    mode: dnat\n    backends:\n"
		for _, s := range servers {
			text += fmt.Sprintf("      - {name: s%d, address: 10.0.2.%[1]d, port: 8080}\n", s)
		}
		return text + "tables: {flows: 4096, flows6: 4096}\n"
	}
	lan, err := gw.Interface("lan0")
	if err != nil {
		t.Fatal(err)
	}
	kept := func(when string, want ...string) {
		t.Helper()
		labtest.Eventually(t, patience, when, func() error {
			return gw.Do(func() error {
				all, err := netdev.Kept()
				maps.DeleteFunc(all, func(n netdev.Hop, managed bool) bool { return n.Ifindex != lan.Index || n.Addr.IsMulticast() })
				var got []string
				for n, managed := range all {
					got = append(got, fmt.Sprintf("%s %t", n.Addr, managed))
				}
				slices.Sort(got)
				if !slices.Equal(got, want) {
					err = errors.Join(err, fmt.Errorf("kept are %v, want %v", strings.Join(got, ", "), strings.Join(want, ", ")))
				}
				return err
			})
		})
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 9, 9}
	if err := gw.Do(func() error {
		return errors.Join(
			netlink.NeighSet(&netlink.Neigh{LinkIndex: lan.Index, IP: net.IP{10, 0, 2, 8}, State: netlink.NUD_PERMANENT, HardwareAddr: mac}),
			netlink.NeighSet(&netlink.Neigh{LinkIndex: lan.Index, IP: net.IP{10, 0, 2, 9}, FlagsExt: netlink.NTF_EXT_MANAGED}))
	}); err != nil {
		t.Fatal(err)
	}
	const eight, nine = "10.0.2.8 false", "10.0.2.9 true"
	kept("before", eight, nine)
	d := openIn(t, gw, pins)
	apply(t, d, config.AttachTC, yaml(2, 3, 8, 9))
	kept("all", "10.0.2.2 true", "10.0.2.3 true", eight, nine)
	apply(t, d, config.AttachTC, yaml(2, 9))
	kept("two have left", "10.0.2.2 true", eight, nine)
	d.Close() // as after kill -9
	d = openIn(t, gw, pins)
	apply(t, d, config.AttachTC, yaml(3))
	kept("another process, other backends", "10.0.2.3 true", eight, nine)
	d.Close()
	d = openIn(t, gw, pins)
	defer d.Close()
	if err := d.Remove(context.Background()); err != nil {
		t.Error(err)
	}
	kept("removed", eight, nine)
}

// TestNeighboursAreAskedForAgain deletes a neighbour that the programs have requested, as a failing link does.
func TestNeighboursAreAskedForAgain(t *testing.T) {
	gw := labFor(t, lab.Balancer(), config.AttachTC).Node("gateway")
	d := gateway(t, gw, config.AttachTC, oneServer)
	lan, err := gw.Interface("lan0")
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"10.0.2.2", "10.0.2.9"} { // a backend's neighbour, and another one
		hop := netdev.Hop{Ifindex: lan.Index, Addr: netip.MustParseAddr(address)}
		for range 3 {
			if err := gw.Do(func() error {
				_ = netlink.NeighDel(&netlink.Neigh{LinkIndex: lan.Index, IP: hop.Addr.AsSlice()}) // absent at first
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			labtest.Eventually(t, 10*time.Second, address, func() error {
				return gw.Do(func() error {
					if err := d.neighbours.request(d.t.Maps["ids"], hop); err != nil {
						return err
					}
					kept, err := netdev.Kept()
					if err == nil && !kept[hop] {
						err = errors.New("is not kept")
					}
					return err
				})
			})
		}
	}
}
