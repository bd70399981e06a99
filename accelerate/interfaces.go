// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/netdev"
)

// Interface is an interface of the namespace and its part in the acceleration.
type Interface struct {
	Name string `json:"name"`
	// Hooks are the programs' places: "xdp", "tc", or "ports" for a bridge: its ports have the programs. Empty: the
	// interface is not accelerated.
	Hooks []string `json:"hooks"`
	// Why is the reason that excludes the interface or XDP.
	Why string `json:"why,omitempty"`

	index int
	port  programsPort
}

// String returns the interface with its hooks or the reason.
func (i Interface) String() string {
	if len(i.Hooks) == 0 {
		return i.Name + ": not accelerated: " + i.Why
	}
	s := i.Name + ": " + strings.Join(i.Hooks, ", ")
	if i.Why != "" {
		s += " (" + i.Why + ")"
	}
	return s
}

func (i Interface) equal(o Interface) bool {
	return i.Name == o.Name && i.index == o.index && i.port == o.port && i.Why == o.Why && slices.Equal(i.Hooks, o.Hooks)
}

// Hooks of an Interface.
const (
	hookXDP   = "xdp"
	hookTC    = "tc"
	hookPorts = "ports"
)

// attachment is the programs' links on an interface. The kernel removes them with the process.
type attachment struct {
	xdp, in, out link.Link
}

func anyAttached(list []Interface) bool {
	return slices.ContainsFunc(list, func(i Interface) bool { return slices.Contains(i.Hooks, hookTC) })
}

// unsuitable returns the reasons of a list without an accelerated interface.
func unsuitable(list []Interface) (out []string) {
	for _, i := range list {
		out = append(out, "interface "+i.String())
	}
	if len(out) == 0 {
		out = append(out, "there is no interface")
	}
	return out
}

// choose returns the interfaces of the namespace with their planned hooks. own reports whether a program is one of
// the accelerator's.
func choose(names []string, own func(ebpf.ProgramID) bool) ([]Interface, error) {
	all, err := netdev.Interfaces()
	if err != nil {
		return nil, err
	}
	queues, err := netdev.TrafficControls(func(netlink.Filter) bool { return false })
	if err != nil {
		return nil, err
	}
	indexes := make([]int, len(all))
	for n, i := range all {
		indexes[n] = i.Index
	}
	features := netdev.XDPFeatures(indexes)
	bridges, err := bridging()
	if err != nil {
		return nil, err
	}
	var list []Interface
	takers := 0
	for _, i := range all {
		if i.Loopback || (len(names) > 0 && !selected(i, all, names)) {
			continue
		}
		c := Interface{Name: i.Name, index: i.Index, Hooks: []string{}}
		l3 := i
		if c.Why = excluded(i, all, queues[i.Index], bridges, own); c.Why == "" {
			c.Hooks = []string{hookTC}
			bridge, onBridge := i.PortOf(all)
			switch {
			case i.Kind == "bridge":
				c.Hooks = []string{hookPorts}
				c.port.Flags = uint32(programsPortFlagPORT_BRIDGE)
			case onBridge:
				l3 = bridge
				c.Why = "no XDP: a port of bridge " + bridge.Name
			case slices.ContainsFunc(all, func(v netdev.Interface) bool { return v.Kind == "vlan" && v.Parent == i.Index }):
				c.Why = "no XDP: it has a VLAN, and cards hide the tags from XDP"
			case features[i.Index]&netdev.XDPBasic == 0:
				c.Why = "no XDP: the driver does not support it"
			default:
				c.Hooks = []string{hookXDP, hookTC}
				if features[i.Index]&netdev.XDPTransmit != 0 {
					c.port.Flags |= uint32(programsPortFlagPORT_TAKES_XDP)
					takers++
				}
			}
		}
		c.port.L3, c.port.Mac, c.port.Mtu = uint32(l3.Index), macOf(l3.MAC), uint16(min(i.MTU, 65535))
		list = append(list, c)
	}
	for n := range list { // XDP is useful only with another interface that accepts its frames
		own := int(list[n].port.Flags & uint32(programsPortFlagPORT_TAKES_XDP) / uint32(programsPortFlagPORT_TAKES_XDP))
		if len(list[n].Hooks) == 2 && takers-own == 0 {
			list[n].Hooks = []string{hookTC}
			list[n].Why = "no XDP: no other interface accepts its frames"
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(list, func(i Interface) bool { return i.Name == name }) {
			list = append(list, Interface{Name: name, Hooks: []string{}, Why: absent(name, all)})
		}
	}
	slices.SortFunc(list, func(a, b Interface) int { return cmp.Compare(a.Name, b.Name) })
	return list, nil
}

// absent returns why an interface that the operator named is not in the list.
func absent(name string, all []netdev.Interface) string {
	if slices.ContainsFunc(all, func(i netdev.Interface) bool { return i.Name == name }) {
		return "it is the loopback"
	}
	return "it does not exist"
}

// selected reports whether the operator named the interface, or a port of this bridge.
func selected(i netdev.Interface, all []netdev.Interface, names []string) bool {
	return slices.Contains(names, i.Name) || slices.ContainsFunc(all, func(p netdev.Interface) bool {
		return p.Master == i.Index && slices.Contains(names, p.Name)
	})
}

// bridge describes the ports of bridges, and whether rules of other programs see their packets.
type bridge struct {
	ports map[int]netdev.BridgePort
	rules bool // of ebtables, or of nftables in the families bridge and netdev
}

// bridging reads the ports of all bridges and their rules.
func bridging() (b bridge, err error) {
	if b.ports, err = netdev.BridgePorts(); err == nil && len(b.ports) > 0 {
		b.rules, err = firewall.PortRules()
	}
	return b, err
}

// excluded returns the reason that excludes an interface, "" if there is none.
func excluded(i netdev.Interface, all []netdev.Interface, t netdev.TrafficControl, b bridge, own func(ebpf.ProgramID) bool) string {
	switch {
	case !i.Ethernet():
		return "its frames have no Ethernet header"
	case i.Kind != "device" && i.Kind != "veth" && i.Kind != "bridge":
		return "links of kind " + i.Kind + " are not supported"
	case !i.Up:
		return "it is down"
	case len(t.Queues) > 0:
		return "it has the queueing discipline " + t.Queues[0]
	case len(t.Ingress)+len(t.Egress) > 0:
		return "it has tc filters"
	}
	above := i.Index
	if i.Master != 0 {
		master, ok := i.PortOf(all)
		if !ok || master.Kind != "bridge" {
			return "it is a member of a bond, a team or a VRF"
		}
		above = master.Index
		switch p := b.ports[i.Index]; {
		case !p.Forwards:
			return "a port that does not forward"
		case p.Locked:
			return "a locked port"
		}
	}
	if i.Kind == "bridge" || i.Master != 0 {
		l, err := netlink.LinkByIndex(above)
		if err != nil {
			return "its bridge cannot be read"
		}
		if l, ok := l.(*netlink.Bridge); ok && l.VlanFiltering != nil && *l.VlanFiltering {
			return "its bridge filters VLANs"
		}
		if b.rules {
			return "rules of ebtables, or of nftables in the families bridge or netdev, see the ports of its bridge"
		}
	}
	for _, at := range []ebpf.AttachType{ebpf.AttachXDP, ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		if programs(i.Index, at, own) {
			return fmt.Sprintf("another program has it (%v)", at)
		}
	}
	return ""
}

// programs reports whether another program is attached to an interface.
func programs(index int, at ebpf.AttachType, own func(ebpf.ProgramID) bool) bool {
	if at == ebpf.AttachXDP {
		l, err := netlink.LinkByIndex(index)
		return err == nil && l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached && !own(ebpf.ProgramID(l.Attrs().Xdp.ProgId))
	}
	r, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
	return err == nil && slices.ContainsFunc(r.Programs, func(p link.AttachedProgram) bool { return !own(p.ID) })
}

// survey chooses the interfaces, attaches and detaches the programs and writes the ports.
func (a *Accelerator) survey() error {
	a.surveyed = true
	ids := map[ebpf.ProgramID]bool{}
	for _, p := range []*ebpf.Program{a.objects.AccelXdp, a.objects.AccelTc, a.objects.AccelLearn} {
		info, err := p.Info()
		if err != nil {
			return err
		}
		id, _ := info.ID()
		ids[id] = true
	}
	list, err := choose(a.o.Interfaces, func(id ebpf.ProgramID) bool { return ids[id] })
	if err != nil {
		return err
	}
	wanted := map[uint32]bool{}
	for n := range list {
		if i := &list[n]; slices.Contains(i.Hooks, hookTC) {
			if err := a.attach(i); err != nil {
				i.Hooks, i.Why = []string{}, err.Error()
			}
		}
		if len(list[n].Hooks) > 0 {
			wanted[uint32(list[n].index)] = true
			if err := a.objects.Ports.Put(uint32(list[n].index), list[n].port); err != nil {
				return fmt.Errorf("interface %s: %w", list[n].Name, err)
			}
		}
	}
	var index uint32
	var port programsPort
	var gone []uint32
	for all := a.objects.Ports.Iterate(); all.Next(&index, &port); {
		if !wanted[index] {
			gone = append(gone, index)
		}
	}
	for _, index := range gone {
		_ = a.objects.Ports.Delete(index)
	}
	for index := range a.attached {
		if !wanted[uint32(index)] {
			_ = a.detach(index) // the interface may be gone
		}
	}
	a.interfaces = list
	return nil
}

// attach completes the programs of an interface. Without XDP the interface has TC only.
func (a *Accelerator) attach(i *Interface) (err error) {
	at := a.attached[i.index]
	if at == nil {
		at = &attachment{}
		a.attached[i.index] = at
	}
	if at.out == nil {
		if at.out, err = link.AttachTCX(link.TCXOptions{Program: a.objects.AccelLearn, Interface: i.index, Attach: ebpf.AttachTCXEgress}); err != nil {
			at.out = nil
			return errors.Join(fmt.Errorf("attach to TC egress: %w", err), a.detach(i.index))
		}
	}
	if at.in == nil {
		if at.in, err = link.AttachTCX(link.TCXOptions{Program: a.objects.AccelTc, Interface: i.index, Attach: ebpf.AttachTCXIngress}); err != nil {
			at.in = nil
			return errors.Join(fmt.Errorf("attach to TC ingress: %w", err), a.detach(i.index))
		}
	}
	switch wants := i.Hooks[0] == hookXDP; {
	case wants && at.xdp == nil:
		if at.xdp, err = link.AttachXDP(link.XDPOptions{Program: a.objects.AccelXdp, Interface: i.index, Flags: link.XDPDriverMode}); err != nil {
			at.xdp = nil
			i.Hooks, i.Why = []string{hookTC}, fmt.Sprintf("no XDP: %v", err)
		}
	case !wants && at.xdp != nil:
		err := at.xdp.Close()
		at.xdp = nil
		return err
	}
	return nil
}

func (a *Accelerator) detach(index int) (err error) {
	at := a.attached[index]
	delete(a.attached, index)
	for _, l := range []link.Link{at.xdp, at.in, at.out} {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
	}
	return err
}
