// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/netdev"
)

// TestInterfaceDown sets the link to a server down and up again while a connection is open. The program must
// handle the first packet afterwards, also after a change of the process. An untranslated answer of the server
// would reset the connection.
func TestInterfaceDown(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			gw, server, pins := l.Node("gateway"), l.Node("s1"), pinsOf(t)
			said := make(chan net.Conn, 1)
			listen(t, server, ":8080", func(c net.Conn) {
				said <- c
				io.Copy(io.Discard, c)
			})
			set := func(change func(netlink.Link) error) {
				t.Helper()
				if err := gw.Do(func() error {
					lan, err := netlink.LinkByName("lan0")
					return errors.Join(err, change(lan))
				}); err != nil {
					t.Fatal(err)
				}
			}
			d := openIn(t, gw, pins)
			defer func() { d.Remove(context.Background()); d.Close() }()
			apply(t, d, hook, oneServer)
			c := transfer(t, l.Node("client"), "192.0.2.10:80")
			s := <-said
			for _, next := range []bool{false, true} {
				set(netlink.LinkSetDown)
				apply(t, d, hook, oneServer)
				if next {
					d.Close()
					d = openIn(t, gw, pins)
					apply(t, d, hook, oneServer+"timeouts: {udp: 6m}\n")
				}
				set(netlink.LinkSetUp)
				if _, err := s.Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
				c.SetDeadline(time.Now().Add(patience))
				if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
					t.Fatalf("a connection after the link was down: %v", err)
				}
			}
		})
	}
}

// TestInterfaceGoneMeanwhile attaches programs to an interface that disappeared after the host was read.
func TestInterfaceGoneMeanwhile(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			d := gateway(t, labFor(t, lab.Balancer(), hook).Node("gateway"), hook, oneServer)
			h := *d.lastHost
			h.Interfaces = append(slices.Clone(h.Interfaces), netdev.Interface{Index: 9999, Name: "gone0", MAC: make(net.HardwareAddr, 6), Up: true, Kind: "veth"})
			c := *d.snapshot.Config // a configuration for which every interface matters
			if err := d.inNamespace(func() error { return d.attach(&c, false, &h, d.programs) }); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestInterfaceWithoutXDP creates a bridge that accepts no program, as a container engine does. Changes of
// backends still apply, and a new configuration is refused with the remedy.
func TestInterfaceWithoutXDP(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw := l.Node("gateway")
	d := gateway(t, gw, config.AttachXDP, oneServer)
	s := *d.snapshot
	if err := gw.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		return errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge))
	}); err != nil {
		t.Fatal(err)
	}
	s.Services = slices.Clone(s.Services)
	s.Services[0].State = []datapath.State{datapath.Down}
	if _, err := d.Apply(t.Context(), &s); err != nil {
		t.Fatalf("a backend that goes down beside a bridge: %v", err)
	}
	for _, told := range []string{strings.Join(d.Warnings(), "\n"), fmt.Sprint(d.Attachments())} {
		if !strings.Contains(told, "br0") || !strings.Contains(told, "under 'interfaces'") {
			t.Errorf("nothing tells of the bridge: %s", told)
		}
	}
	for _, i := range []string{"wan0", "lan0"} {
		if attachedTo(d, i) == nil {
			t.Errorf("%s has no program any more", i)
		}
	}
	if _, err := d.Apply(t.Context(), snapshotOf(t, config.AttachXDP, oneServer+"timeouts: {udp: 4m}\n")); err != nil {
		t.Errorf("a new configuration, whose rules do not use the bridge: %v", err)
	}
	if err := gw.Do(func() error { return netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}) }); err != nil {
		t.Fatal(err)
	}
	apply(t, d, config.AttachXDP, oneServer)
	if told := strings.Join(d.Warnings(), "\n"); strings.Contains(told, "br0") {
		t.Errorf("the bridge is gone, and the warnings are %s", told)
	}
}

// TestInterfacesComeAndGo applies the same configuration again, as the engine does after changes of the network.
func TestInterfacesComeAndGo(t *testing.T) {
	for _, named := range []bool{false, true} {
		t.Run(map[bool]string{false: "all", true: "named"}[named], func(t *testing.T) {
			l := labFor(t, lab.Balancer(), config.AttachTC)
			gw := l.Node("gateway")
			yaml := oneServer
			if named {
				yaml += "interfaces: [wan0, lan0, later0]\n"
			}
			d := gateway(t, gw, config.AttachTC, yaml)
			if told := strings.Contains(strings.Join(d.Warnings(), "\n"), "interface later0: no interface has this name"); told != named {
				t.Errorf("warnings: %v", d.Warnings())
			}
			check := func(want bool, when string) {
				t.Helper()
				apply(t, d, config.AttachTC, yaml)
				a := attachedTo(d, "later0")
				if (a != nil) != want {
					t.Fatalf("%s: attached is %t", when, a != nil)
				}
				if a == nil || a.link == nil {
					return
				}
				if info, err := a.link.Info(); err != nil || info.TCX() == nil || int(info.TCX().Ifindex) != a.ifindex {
					t.Errorf("%s: the link is not on the interface: %+v %v", when, info, err)
				}
			}
			check(false, "before")
			for range 2 { // the second interface has another index
				do := func(f func() error) {
					t.Helper()
					if err := gw.Do(f); err != nil {
						t.Fatal(err)
					}
				}
				veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "later0"}, PeerName: "later1"}
				do(func() error { return errors.Join(netlink.LinkAdd(veth), netlink.LinkSetUp(veth)) })
				check(true, "when it is there")
				if len(d.Warnings()) > 0 {
					t.Errorf("warnings: %v", d.Warnings())
				}
				bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
				do(func() error {
					return errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge), netlink.LinkSetMaster(veth, bridge))
				})
				check(named, "as a port of a bridge")
				if named && !strings.Contains(strings.Join(d.Warnings(), "\n"), "later0 is a port of the bridge br0") {
					t.Errorf("warnings: %v", d.Warnings())
				}
				if !named && attachedTo(d, "br0") == nil {
					t.Error("the bridge is not taken in its port's place")
				}
				do(func() error { return errors.Join(netlink.LinkDel(bridge), netlink.LinkDel(veth)) })
				check(false, "when it has gone")
			}
		})
	}
}

// TestInterfaceOfTheSameNumber replaces an interface between two reads of the host.
func TestInterfaceOfTheSameNumber(t *testing.T) {
	for _, hook := range []config.Attach{config.AttachTC, config.AttachXDP} {
		t.Run(string(hook), func(t *testing.T) {
			gw := labFor(t, lab.Balancer(), hook).Node("gateway")
			replace := func() {
				t.Helper()
				if err := gw.Do(func() error {
					veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "later0", Index: 77}, PeerName: "later1"}
					netlink.LinkDel(veth)
					return errors.Join(netlink.LinkAdd(veth), netlink.LinkSetUp(veth))
				}); err != nil {
					t.Fatal(err)
				}
			}
			replace()
			d := gateway(t, gw, hook, oneServer)
			replace()
			apply(t, d, hook, oneServer)
			info, err := d.attached[attachPoint{77, hook}].link.Info()
			if err != nil {
				t.Fatal(err)
			}
			if x := info.XDP(); x != nil && x.Ifindex == 77 {
				return
			}
			if x := info.TCX(); x == nil || x.Ifindex != 77 {
				t.Errorf("the link is not on the interface: %+v", info)
			}
		})
	}
}

// TestInterfacesRenamed renames interfaces, then swaps their names. Attachments remain, also after a change of
// the process.
func TestInterfacesRenamed(t *testing.T) {
	for _, filters := range []bool{false, true} {
		t.Run(map[bool]string{false: "links", true: "filters"}[filters], func(t *testing.T) {
			l := labFor(t, lab.Balancer(), config.AttachTC)
			mirror(t, l.Node("s1"), ":8080")
			gw, pins := l.Node("gateway"), pinsOf(t)
			open := func() *Datapath {
				if filters {
					return openFilters(t, gw, pins)
				}
				return openIn(t, gw, pins)
			}
			d := open()
			defer func() { d.Remove(context.Background()); d.Close() }()
			apply(t, d, config.AttachTC, oneServer)
			c := transfer(t, l.Node("client"), "192.0.2.10:80")
			for _, names := range [][2]string{{"lan0", "lan1"}, {"wan0", "free"}, {"lan1", "wan0"}, {"free", "lan1"}} {
				if err := gw.Do(func() error {
					i, err := netlink.LinkByName(names[0])
					if err != nil {
						return err
					}
					return netlink.LinkSetName(i, names[1])
				}); err != nil {
					t.Fatal(err)
				}
				if names[1] != "lan1" {
					continue
				}
				apply(t, d, config.AttachTC, oneServer)
				if a := attachedTo(d, "lan1"); a == nil || attachedTo(d, "lan0") != nil {
					t.Errorf("after %s became %s: %+v", names[0], names[1], d.attached)
				}
			}
			d.Close()
			if err := roundTrip(c); err != nil {
				t.Errorf("a connection after the process has ended: %v", err)
			}
			d = open()
			apply(t, d, config.AttachTC, oneServer)
			if err := roundTrip(c); err != nil {
				t.Errorf("a connection after the next process has come: %v", err)
			}
		})
	}
}
