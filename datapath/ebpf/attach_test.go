// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// TestGenericXDP is the last resort: XDP on packets that the kernel has made
// already.
func TestGenericXDP(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	d := gateway(t, l.Node("gateway"), config.AttachXDPGeneric, bulkYAML)
	for _, addr := range []string{"192.0.2.20:4", "[2001:db8::20]:6", "192.0.2.20:44", "[2001:db8::20]:64"} {
		if err := sendMuch(transfer(t, l.Node("client"), addr)); err != nil {
			t.Errorf("%s: %v\n%s", addr, err, describeReasons(d))
		}
	}
	if counted(t, d, "flow") == 0 {
		t.Error("no packet of a known flow was counted")
	}
	if w := strings.Join(d.Warnings(), "\n"); !strings.Contains(w, "virtual link (veth) with XDP") || !strings.Contains(w, "(TSO) are lost") {
		t.Errorf("XDP on veth is not warned of, or not of all that it does: %q", w)
	}
}

// constant loads a program that always gives the same verdict.
func constant(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "foreign", Type: kind, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// TestForeignXDP finds a program of somebody else: asked for XDP it refuses in
// words and leaves it alone, left to choose it stands behind it, on TC.
func TestForeignXDP(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	gw := l.Node("gateway")
	wan, err := gw.Interface("wan0")
	if err != nil {
		t.Fatal(err)
	}
	var foreign link.Link
	p := constant(t, ebpf.XDP, 2) // XDP_PASS
	if err := gw.Do(func() (err error) {
		foreign, err = link.AttachXDP(link.XDPOptions{Program: p, Interface: wan.Index, Flags: link.XDPDriverMode})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	d := openIn(t, gw, pinsOf(t))
	defer func() { d.Remove(context.Background()); d.Close() }()
	_, err = d.Apply(t.Context(), snapshotOf(t, config.AttachXDP, oneServer))
	if err == nil || !strings.Contains(err.Error(), "another XDP program (foreign, id ") || !strings.Contains(err.Error(), "ip link set dev wan0 xdp off") {
		t.Errorf("XDP beside a foreign program: %v", err)
	}
	apply(t, d, config.AttachTC, oneServer)
	if err := roundTrip(transfer(t, l.Node("client"), "192.0.2.10:80")); err != nil {
		t.Error(err)
	}
	if info, err := foreign.Info(); err != nil || info.XDP().Ifindex != uint32(wan.Index) {
		t.Errorf("the foreign program is not attached any more: %+v %v", info, err)
	}
}

// TestForeignTC stands beside programs of others at the same hook: Sluice comes
// first, and what it passes goes on to them.
func TestForeignTC(t *testing.T) {
	labtest.Require(t, labtest.Kernel("6.6", "TCX"))
	l := labFor(t, lab.Balancer(), config.AttachTC)
	mirror(t, l.Node("s1"), ":8080")
	gw := l.Node("gateway")
	wan, err := gw.Interface("wan0")
	if err != nil {
		t.Fatal(err)
	}
	drop := constant(t, ebpf.SchedCLS, 2) // TC_ACT_SHOT
	gateway(t, gw, config.AttachTC, oneServer)
	c := transfer(t, l.Node("client"), "192.0.2.10:80")
	if err := answers(patience, l.Node("client"), "10.0.1.1:9"); err != nil {
		t.Fatalf("the gateway's own address, before: %v", err)
	}
	var foreign link.Link
	if err := gw.Do(func() (err error) {
		foreign, err = link.AttachTCX(link.TCXOptions{Program: drop, Interface: wan.Index, Attach: ebpf.AttachTCXIngress})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	if err := roundTrip(c); err != nil {
		t.Errorf("a flow of Sluice's behind which a foreign program drops everything: %v", err)
	}
	if err := answers(time.Second, l.Node("client"), "10.0.1.1:9"); err == nil {
		t.Error("what Sluice passes does not reach the foreign program")
	}
}

// answers asks a TCP port that nobody listens on: a reset is an answer.
func answers(timeout time.Duration, n *lab.Node, addr string) error {
	if _, _, err := askWithin(timeout, n, "tcp", addr); err == nil || strings.Contains(err.Error(), "refused") {
		return nil
	} else {
		return err
	}
}

// TestLinksThatXDPLoses: auto takes XDP only where all that packets may leave by takes
// frames from it, and whoever asks for XDP nevertheless is told what is lost.
func TestLinksThatXDPLoses(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	lo := netdev.Interface{Index: 1, Name: "lo", Kind: "device", Up: true, Loopback: true, MAC: make(net.HardwareAddr, 6)}
	eth0 := netdev.Interface{Index: 2, Name: "eth0", Kind: "device", Up: true, MAC: mac}
	br0 := netdev.Interface{Index: 4, Name: "br0", Kind: "bridge", Up: true, MAC: mac}
	for name, c := range map[string]struct {
		others []netdev.Interface
		xdp    bool
		told   string
	}{
		"cards":           {[]netdev.Interface{{Index: 3, Name: "eth1", Kind: "device", Up: true, MAC: mac}}, true, ""},
		"card in a VRF":   {[]netdev.Interface{{Index: 4, Name: "red", Kind: "vrf", Up: true, MAC: mac}, {Index: 3, Name: "eth1", Kind: "device", Up: true, MAC: mac, Master: 4}}, true, ""},
		"bridge":          {[]netdev.Interface{br0, {Index: 3, Name: "eth1", Kind: "device", Up: true, MAC: mac, Master: 4}}, false, "interface br0 (bridge): packets that leave by it are lost"},
		"bridge, down":    {[]netdev.Interface{{Index: 4, Name: "br0", Kind: "bridge", MAC: mac}}, true, ""},
		"VLAN":            {[]netdev.Interface{{Index: 4, Name: "eth0.7", Kind: "vlan", Up: true, MAC: mac}}, false, "interface eth0.7 (vlan)"},
		"without headers": {[]netdev.Interface{{Index: 4, Name: "wwan0", Kind: "device", Up: true}}, false, "interface wwan0 (device)"},
		"container":       {[]netdev.Interface{{Index: 4, Name: "veth0", Kind: "veth", Up: true, MAC: mac}}, false, ""},
	} {
		h := &host{interfaces: append([]netdev.Interface{lo, eth0}, c.others...)}
		want := []config.Attach{config.AttachTC}
		if c.xdp {
			want = []config.Attach{config.AttachXDP, config.AttachTC}
		}
		if got := h.hooksFor(config.AttachAuto, eth0); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		if got := h.hooksFor(config.AttachXDP, eth0); !slices.Equal(got, []config.Attach{config.AttachXDP}) {
			t.Errorf("%s: asked for XDP, got %v", name, got)
		}
		d := &Datapath{t: &tables{}, snapshot: &datapath.Snapshot{Config: &config.Config{}}, seen: h,
			attached: map[int]*attachment{2: {name: "eth0", hook: config.AttachXDP}}}
		if told := strings.Join(d.Warnings(), "\n"); (told == "") != (c.told == "") || !strings.Contains(told, c.told) {
			t.Errorf("%s: warnings %q, want %q", name, told, c.told)
		}
	}
}

// attachedTo finds what is attached to an interface, nil for nothing.
func attachedTo(d *Datapath, name string) *attachment {
	for _, a := range d.attached {
		if a.name == name {
			return a
		}
	}
	return nil
}

// TestWithoutEthernet names an interface whose packets have no Ethernet headers: it gets
// no program, which would read other bytes for theirs, and no rule that names it.
func TestWithoutEthernet(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw := l.Node("gateway")
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_NO_PI, Queues: 1}
	if err := gw.Do(func() error { return errors.Join(netlink.LinkAdd(tun), netlink.LinkSetUp(tun)) }); err != nil {
		t.Fatal(err)
	}
	defer tun.Fds[0].Close()
	d := gateway(t, gw, config.AttachTC, oneServer+"interfaces: [wan0, lan0, tun0]\n")
	if w := strings.Join(d.Warnings(), "\n"); attachedTo(d, "tun0") != nil || !strings.Contains(w, "interface tun0 has no Ethernet headers") {
		t.Errorf("attached to %v, warnings %q", d.attached, w)
	}
	frame := packet.MustText("eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/ip4(src=10.9.0.2,dst=10.0.2.1)/udp(sport=4000,dport=53)").Build()
	if _, err := tun.Fds[0].Write(frame[14:]); err != nil {
		t.Fatal(err)
	}
	if n := counted(t, d, "bad-header") + counted(t, d, "truncated"); n != 0 {
		t.Errorf("%d packets of the interface are taken for broken ones", n)
	}
	for name, want := range map[string]bool{"tun0": false, "wan0": true, "later0": true} {
		if err := d.CarriesNAT(&config.NATRule{Name: "out", Type: config.NATMasquerade, Out: name}); (err == nil) != want {
			t.Errorf("masquerade out of %s: %v", name, err)
		}
	}
}

// TestInterfacesComeAndGo applies the same again, as the engine does when the
// network changes.
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
			if told := strings.Contains(strings.Join(d.Warnings(), "\n"), "interface later0: there is none"); told != named {
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
			for range 2 { // the second time it has another number
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

// TestInterfaceOfTheSameNumber replaces an interface between two looks at the host.
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
			info, err := d.attached[77].link.Info()
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

// TestInterfacesRenamed gives interfaces other names, then each the other's: what
// is attached stays, also when the process has ended.
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
