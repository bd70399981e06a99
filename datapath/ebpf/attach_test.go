// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"os"
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
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// TestGenericXDP uses generic XDP, the last resort: the kernel has already allocated the packet.
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
	if w := strings.Join(d.Warnings(), "\n"); !strings.Contains(w, "virtual link (veth) with XDP") || !strings.Contains(w, "large segments for TSO are lost") {
		t.Errorf("XDP on veth is not warned of, or not of all that it does: %q", w)
	}
}

// constant loads a program that always returns the same verdict.
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

// TestForeignXDP finds an XDP program of another owner. With attach: xdp, the datapath refuses with a message
// and does not touch that program. With attach: auto, it attaches to TC behind it.
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

// TestRefusedAttach lets the driver refuse XDP because of the MTU. With attach: xdp, the error names the cause
// and the remedy, and no configuration is in force. With attach: auto, the datapath uses TC and reports why.
func TestRefusedAttach(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	gw := l.Node("gateway")
	for node, iface := range map[string]string{"client": "eth0", "gateway": "wan0"} {
		if err := l.Node(node).Do(func() error {
			link, err := netlink.LinkByName(iface)
			return errors.Join(err, netlink.LinkSetMTU(link, 9000))
		}); err != nil {
			t.Fatal(err)
		}
	}
	d := openIn(t, gw, pinsOf(t))
	defer func() { d.Remove(context.Background()); d.Close() }()
	_, err := d.Apply(t.Context(), snapshotOf(t, config.AttachXDP, oneServer))
	for _, want := range []string{"interface wan0: xdp: ", "MTU of 9000", "3506 bytes", "attach: tc"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("XDP with jumbo frames: %v; want %q in it", err, want)
		}
	}
	if a := attachedTo(d, "wan0"); a != nil {
		t.Errorf("wan0 has a program: %v", a)
	}
}

// TestForwardingOffIsSaid: eBPF forwards nothing that the kernel would not forward, and warns.
func TestForwardingOffIsSaid(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw := l.Node("gateway")
	d := gateway(t, gw, config.AttachTC, oneServer)
	if told := strings.Join(d.Warnings(), "\n"); strings.Contains(told, "forward") {
		t.Errorf("while it forwards: %s", told)
	}
	if err := gw.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0o644) }); err != nil {
		t.Fatal(err)
	}
	if told := strings.Join(d.Warnings(), "\n"); !strings.Contains(told, "net.ipv4.ip_forward is 0") || !strings.Contains(told, "sysctl -w net.ipv4.ip_forward=1") {
		t.Errorf("forwarding that is off is not said: %s", told)
	}
}

// TestTakenOff lets another program detach Sluice's program from an interface. No netlink event announces that.
func TestTakenOff(t *testing.T) {
	for _, how := range []string{"tc", "xdp", "filters"} {
		t.Run(how, func(t *testing.T) {
			hook := config.Attach(strings.Replace(how, "filters", "tc", 1))
			l := labFor(t, lab.Balancer(), hook)
			mirror(t, l.Node("s1"), ":8080")
			gw := l.Node("gateway")
			d := openIn(t, gw, pinsOf(t))
			if how == "filters" {
				d.Close()
				d = openFilters(t, gw, pinsOf(t))
			}
			defer func() { d.Remove(context.Background()); d.Close() }()
			s := snapshotOf(t, hook, oneServer)
			again := func() {
				t.Helper()
				if _, err := d.Apply(t.Context(), s); err != nil {
					t.Fatal(err)
				}
				if touched, err := d.Touched(); touched || err != nil {
					t.Errorf("touched %t, %v", touched, err)
				}
			}
			again()
			c := transfer(t, l.Node("client"), "192.0.2.10:80")
			a := attachedTo(d, "wan0")
			if err := gw.Do(func() error {
				if a.link == nil {
					return netlink.QdiscDel(clsact(a.ifindex))
				}
				return a.link.Detach()
			}); err != nil {
				t.Fatal(err)
			}
			if touched, err := d.Touched(); !touched || err != nil {
				t.Errorf("after it was taken off: touched %t, %v", touched, err)
			}
			again()
			if err := roundTrip(c); err != nil {
				t.Errorf("a connection after that: %v", err)
			}
			if err := gw.Do(func() error {
				lan, err := netlink.LinkByName("lan0")
				return errors.Join(err, netlink.LinkDel(lan))
			}); err != nil {
				t.Fatal(err)
			}
			if touched, err := d.Touched(); touched || err != nil {
				t.Errorf("an interface that is gone: touched %t, %v", touched, err)
			}
		})
	}
}

// TestForeignTC attaches programs of other owners at the same hook. Sluice runs first, and packets that it
// passes reach the others.
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

// answers connects to a TCP port without a listener: a reset is an answer.
func answers(timeout time.Duration, n *lab.Node, addr string) error {
	if _, _, err := askWithin(timeout, n, "tcp", addr); err == nil || strings.Contains(err.Error(), "refused") {
		return nil
	} else {
		return err
	}
}

// TestProgramsThatAreNeeded: loading programs dominates the time of a start, so programs without an interface
// are not loaded.
func TestProgramsThatAreNeeded(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	veth := netdev.Interface{Index: 2, Name: "veth0", Kind: "veth", Up: true, MAC: mac}
	eth0 := netdev.Interface{Index: 3, Name: "eth0", Kind: "device", Up: true, MAC: mac}
	off := netdev.Interface{Index: 4, Name: "eth1", Kind: "device", MAC: mac}
	ppp := netdev.Interface{Index: 5, Name: "ppp0", Kind: "ppp", Up: true}
	for _, c := range []struct {
		attach config.Attach
		links  []netdev.Interface
		want   string
	}{
		{config.AttachAuto, []netdev.Interface{veth, off}, "TC"},
		{"", []netdev.Interface{veth, eth0}, "XDP TC"},
		{config.AttachAuto, []netdev.Interface{ppp}, "TC bare"},
		{config.AttachTC, []netdev.Interface{eth0}, "TC"},
		{config.AttachXDP, []netdev.Interface{eth0}, "XDP"},
		{config.AttachXDP, []netdev.Interface{eth0, veth}, "XDP"},
		{config.AttachXDP, []netdev.Interface{eth0, ppp}, "XDP TC bare"},
		{config.AttachXDPGeneric, nil, "XDP"},
	} {
		var got []string
		xdp, tc, bare := (&compile.Host{Interfaces: c.links}).Programs(&config.Config{Attach: c.attach})
		for i, needed := range []bool{xdp, tc, bare} {
			if needed {
				got = append(got, []string{"XDP", "TC", "bare"}[i])
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("attach %q with %v: %v, want %s", c.attach, c.links, got, c.want)
		}
	}
}

// TestAttachWithoutTheProgram: a return to the previous configuration can find a new interface that needs an
// unloaded program.
func TestAttachWithoutTheProgram(t *testing.T) {
	d := &Datapath{attached: map[attachPoint]*attachment{}}
	for _, hook := range []config.Attach{config.AttachXDP, config.AttachTC} {
		if err := d.attachOne(hook, netdev.Interface{Index: 2, Name: "eth0"}, &ebpf.Collection{}); err == nil || len(d.attached) != 0 {
			t.Errorf("%s: attached what is not there: %v", hook, err)
		}
	}
}

// TestLinksThatXDPLoses: if packets may leave by a link that accepts no frames from XDP, TC runs behind it. With
// attach: xdp, a warning names the link.
func TestLinksThatXDPLoses(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	lo := netdev.Interface{Index: 1, Name: "lo", Kind: "device", Up: true, Loopback: true, MAC: make(net.HardwareAddr, 6)}
	eth0 := netdev.Interface{Index: 2, Name: "eth0", Kind: "device", Up: true, MAC: mac}
	eth1 := netdev.Interface{Index: 3, Name: "eth1", Kind: "device", Up: true, MAC: mac}
	br0 := netdev.Interface{Index: 4, Name: "br0", Kind: "bridge", Up: true, MAC: mac}
	veth := netdev.Interface{Index: 4, Name: "veth0", Kind: "veth", Up: true, MAC: mac}
	portOf4 := func(i netdev.Interface) netdev.Interface { i.Master = 4; return i }
	const runs, takes = netdev.XDPBasic, netdev.XDPBasic | netdev.XDPTransmit
	for name, c := range map[string]struct {
		others []netdev.Interface
		xdp    map[int]uint64
		named  []string
		auto   bool // TC behind with attach: auto
		asked  bool // with attach: xdp
		hidden bool // eth0 has VLANs
		told   string
	}{
		"cards":                        {others: []netdev.Interface{eth1}},
		"cards that say so":            {others: []netdev.Interface{eth1}, xdp: map[int]uint64{2: runs, 3: runs}},
		"card without XDP":             {others: []netdev.Interface{eth1}, xdp: map[int]uint64{2: takes, 3: 0}, auto: true, asked: true, told: "lost towards eth1 (device)"},
		"card without a program":       {others: []netdev.Interface{eth1}, named: []string{"eth0"}, xdp: map[int]uint64{2: takes, 3: runs}, auto: true, asked: true, told: "lost towards eth1 (device)"},
		"card that takes without one":  {others: []netdev.Interface{eth1}, named: []string{"eth0"}, xdp: map[int]uint64{2: takes, 3: takes}},
		"card in a VRF":                {others: []netdev.Interface{{Index: 4, Name: "red", Kind: "vrf", Up: true, MAC: mac}, portOf4(eth1)}},
		"bridge":                       {others: []netdev.Interface{br0, portOf4(eth1)}, auto: true, asked: true, told: "lost towards br0 (bridge)"},
		"bridge, down":                 {others: []netdev.Interface{{Index: 4, Name: "br0", Kind: "bridge", MAC: mac}}},
		"VLAN":                         {others: []netdev.Interface{{Index: 4, Name: "eth0.7", Kind: "vlan", Parent: 2, Up: true, MAC: mac}}, asked: true, hidden: true, told: "interface eth0 has the VLAN eth0.7"},
		"VLAN of another card":         {others: []netdev.Interface{eth1, {Index: 4, Name: "eth1.7", Kind: "vlan", Parent: 3, Up: true, MAC: mac}}, auto: true, asked: true, told: "eth1.7 (vlan)"},
		"without headers":              {others: []netdev.Interface{{Index: 4, Name: "wwan0", Kind: "device", Up: true}}, auto: true, asked: true, told: "lost towards wwan0 (device)"},
		"container":                    {others: []netdev.Interface{veth}, auto: true},
		"container that does not poll": {others: []netdev.Interface{veth}, xdp: map[int]uint64{2: takes, 4: runs}, auto: true, asked: true, told: "veth0 (veth)"},
		"container that polls":         {others: []netdev.Interface{veth}, xdp: map[int]uint64{2: takes, 4: takes}, auto: true},
	} {
		h := &compile.Host{Interfaces: append([]netdev.Interface{lo, eth0}, c.others...), XDP: c.xdp}
		auto := &config.Config{Attach: config.AttachAuto, Interfaces: c.named}
		want := []config.Attach{config.AttachXDP, config.AttachTC}
		if c.hidden {
			want = want[1:]
		}
		if got := h.HooksFor(config.AttachAuto, eth0); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		if got := h.Paired(auto); got != c.auto {
			t.Errorf("%s: paired is %v with attach: auto", name, got)
		}
		asked := &config.Config{Attach: config.AttachXDP, Interfaces: c.named}
		if got := h.Paired(asked); got != c.asked {
			t.Errorf("%s: paired is %v with attach: xdp", name, got)
		}
		for _, hook := range []config.Attach{config.AttachTC, config.AttachXDPGeneric} { // these rules send to every interface
			if h.Paired(&config.Config{Attach: hook}) {
				t.Errorf("%s: paired with attach: %s", name, hook)
			}
		}
		d := &Datapath{t: &table.Tables{}, snapshot: &datapath.Snapshot{Config: asked}, inForce: &compile.Desired{}, lastHost: h,
			attached: map[attachPoint]*attachment{{2, config.AttachXDP}: {attachPoint: attachPoint{2, config.AttachXDP}, name: "eth0"}}}
		if told := strings.Join(d.Warnings(), "\n"); (told == "") != (c.told == "") || !strings.Contains(told, c.told) {
			t.Errorf("%s: warnings %q, want %q", name, told, c.told)
		}
	}
}

// TestAttachments lists the hooks of each interface, with the reasons.
func TestAttachments(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	link := func(index int, name, kind string) netdev.Interface {
		return netdev.Interface{Index: index, Name: name, Kind: kind, Up: true, MAC: mac}
	}
	br0, port, vlan, tun, gre := link(4, "br0", "bridge"), link(5, "port", "device"), link(6, "eth1.7", "vlan"), link(7, "tun0", "tuntap"), link(10, "gre1", "gre")
	port.Master, vlan.Parent, tun.MAC, gre.MAC = 4, 3, nil, nil
	h := &compile.Host{Interfaces: []netdev.Interface{{Index: 1, Name: "lo", Up: true, Loopback: true}, link(2, "eth0", "device"), link(3, "eth1", "device"),
		br0, port, vlan, tun, gre, link(8, "eth2", "device"), {Index: 9, Name: "down", Kind: "device", MAC: mac}}}
	at := func(list ...attachPoint) map[attachPoint]*attachment {
		all := map[attachPoint]*attachment{}
		for _, p := range list {
			all[p] = &attachment{attachPoint: p}
		}
		return all
	}
	d := &Datapath{t: &table.Tables{}, snapshot: &datapath.Snapshot{Config: &config.Config{Attach: config.AttachAuto}}, lastHost: h,
		attached: at(attachPoint{2, "xdp"}, attachPoint{2, "tc"}, attachPoint{3, "tc"}, attachPoint{4, "tc"}, attachPoint{6, "tc"}, attachPoint{7, "tc"}, attachPoint{8, "tc"})}
	d.attached[attachPoint{8, "tc"}].fallbackErr = errors.New("xdp: not supported")
	const behind = "behind a virtual link"
	want := []struct{ name, hooks, why string }{{"eth0", "xdp tc", "leaves by br0 (bridge), eth1.7 (vlan), tun0 (tuntap), 1 more, where"}, {"eth1", "tc", "eth1.7"}, {"br0", "tc", behind},
		{"port", "", "the bridge br0"}, {"eth1.7", "tc", behind}, {"tun0", "tc", "no Ethernet headers"}, {"gre1", "", "neither Ethernet headers nor plain IP"}, {"eth2", "tc", "xdp: not supported"}}
	got := d.Attachments()
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i, a := range got {
		if w := want[i]; a.Interface != w.name || strings.Join(a.Hooks, " ") != w.hooks || !strings.Contains(a.Why, w.why) {
			t.Errorf("%+v, want %+v", a, w)
		}
	}
	d.attached = at(attachPoint{2, "xdp"})
	if got := d.Attachments(); got[0].Why != "" || got[1].Why != "not among the interfaces of the configuration" {
		t.Errorf("%+v", got[:2])
	}
}

// TestCardWithoutProgram: a card that accepts frames only while it has an XDP program gets none with attach:
// auto if it has VLANs.
func TestCardWithoutProgram(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	eth1 := netdev.Interface{Index: 3, Name: "eth1", Kind: "device", Up: true, MAC: mac}
	h := &compile.Host{XDP: map[int]uint64{3: netdev.XDPBasic}, Interfaces: []netdev.Interface{eth1,
		{Index: 4, Name: "eth1.7", Kind: "vlan", Parent: 3, Up: true, MAC: mac}}}
	for hook, want := range map[config.Attach]string{config.AttachAuto: "eth1 (device), eth1.7 (vlan)", config.AttachXDP: "eth1.7 (vlan)"} {
		if got := interfaceNames(h.WithoutTransmit(&config.Config{Attach: hook})); got != want {
			t.Errorf("attach: %s: frames are lost towards %s, want %s", hook, got, want)
		}
	}
}

// attachedTo returns the attachment of an interface, or nil.
func attachedTo(d *Datapath, name string) *attachment {
	for _, a := range d.attached {
		if a.name == name {
			return a
		}
	}
	return nil
}

// TestBare names an interface without Ethernet headers. Its program adds one, with any setting of attach, and
// rules may name the interface.
func TestBare(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	gw := l.Node("gateway")
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_NO_PI, Queues: 1}
	if err := gw.Do(func() error { return errors.Join(netlink.LinkAdd(tun), netlink.LinkSetUp(tun)) }); err != nil {
		t.Fatal(err)
	}
	defer tun.Fds[0].Close()
	d := gateway(t, gw, config.AttachTC, oneServer+"interfaces: [wan0, lan0, tun0]\n")
	if a := attachedTo(d, "tun0"); a == nil || a.program() != "sluice_bare" || len(d.Warnings()) > 0 {
		t.Fatalf("attached to %v, warnings %q", d.attached, d.Warnings())
	}
	before := counted(t, d, "not-ours")
	frame := packet.MustText("eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/ip4(src=10.9.0.2,dst=10.0.2.1)/udp(sport=4000,dport=53)").Build()
	if _, err := tun.Fds[0].Write(frame[14:]); err != nil {
		t.Fatal(err)
	}
	if n := counted(t, d, "bad-header") + counted(t, d, "truncated"); n != 0 || counted(t, d, "not-ours") == before {
		t.Errorf("%d packets of the interface are taken for broken ones, and %d read", n, counted(t, d, "not-ours")-before)
	}
	for _, name := range []string{"tun0", "wan0", "later0"} {
		if err := d.CarriesNAT(&config.NATRule{Name: "out", Type: config.NATMasquerade, Out: config.Interfaces(name)}); err != nil {
			t.Errorf("masquerade out of %s: %v", name, err)
		}
	}
}
