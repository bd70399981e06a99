// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

// Warnings returns the conditions of the configuration or of the host that limit the datapath, each
// with a remedy.
func (d *Datapath) Warnings() (out []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.snapshot == nil {
		return nil
	}
	if differs := d.t.Differs(d.snapshot.Config.Tables); differs != "" {
		out = append(out, differs)
	}
	out = append(out, d.growthWarning()...)
	if d.mismatch != nil {
		out = append(out, fmt.Sprintf("%v; until this is restored, the rules for the previous state of the host stay in force", d.mismatch))
	}
	for _, u := range d.inForce.Unreached {
		out = append(out, u+"; it gets no new connections until there is one")
	}
	_ = d.inNamespace(func() error { // if the namespace cannot be entered, there is nothing to warn about
		named, others := d.forwardingInterfaces()
		v4, v6 := d.snapshot.Forwards()
		out = append(out, kernel.ForwardingWarnings(kernel.Sysctl, v4, v6, named, others)...)
		out = append(out, d.trafficControlWarnings()...)
		out = append(out, datapath.Broadcasts(d.snapshot, d.lastHost.Networks, others, kernel.Sysctl)...)
		return nil
	})
	there := func(name string) bool { return len(d.lastHost.Named(config.Interfaces(name))) > 0 }
	addressed := func(name string, v6 bool) bool {
		i, _ := d.lastHost.ByName(name)
		return slices.ContainsFunc(d.lastHost.Details[i.Index], func(a compile.HostAddress) bool { return a.Is6() == v6 && !a.Unusable })
	}
	out = append(out, datapath.Bypassed(datapath.Resolve(d.snapshot, d.lastHost.ListenAddress), d.lastHost.Networks)...)
	sourced := func(name string, v6 bool) (has bool) {
		i, _ := d.lastHost.ByName(name)
		_ = d.inNamespace(func() error {
			has = d.lastHost.Addressed(i.Index, v6)
			return nil
		})
		return has
	}
	out = append(out, datapath.Waiting(d.snapshot, there, addressed, sourced)...)
	out = append(out, d.crossingWarnings()...)
	out = append(out, d.bypassWarnings()...)
	for _, i := range d.lastHost.Interfaces {
		if err := d.unattached[i.Index]; err != nil {
			by := "the kernel"
			if d.attached[attachPoint{i.Index, config.AttachTC}] != nil {
				by = "TC"
			}
			out = append(out, fmt.Sprintf("interface %s: %v; until then %s handles its incoming packets", i.Name, err, by))
		}
	}
	_, missing := d.lastHost.AttachTo(d.snapshot.Config)
	for _, name := range missing {
		out = append(out, fmt.Sprintf("interface %s: no interface has this name; the program is attached when one appears", name))
	}
	for _, name := range d.snapshot.Config.Interfaces {
		i, ok := d.lastHost.ByName(name)
		if !ok {
			continue
		}
		if !i.Ethernet() && !i.Bare() {
			out = append(out, fmt.Sprintf("interface %s %s: the kernel handles its incoming packets", name, unknownHeaders))
		}
		if m, port := i.PortOf(d.lastHost.Interfaces); port {
			out = append(out, fmt.Sprintf("interface %s is a port of the %s %s: the program also takes frames that %s would switch; name %s instead", name, m.Kind, m.Name, m.Name, m.Name))
		}
	}
	for _, a := range d.attached {
		if i, _ := d.lastHost.ByName(a.name); a.hook != config.AttachTC && i.Virtual() {
			large := ""
			if a.hook == config.AttachXDPGeneric { // in native mode the driver refuses them
				large = ", and large segments for TSO are lost"
			}
			out = append(out, fmt.Sprintf("interface %s is a virtual link (%s) with XDP: packets that a local stack sends with partial checksums arrive with wrong ones%s; "+
				"use attach: tc, or 'ethtool -K DEV tx off' on the sending interface", a.name, i.Kind, large))
		}
	}
	if d.snapshot.Config.Attach == config.AttachXDP {
		if withoutTransmit := d.lastHost.WithoutTransmit(d.snapshot.Config); len(withoutTransmit) > 0 {
			out = append(out, fmt.Sprintf("frames from XDP would be lost towards %s: XDP forwards packets of established flows to other interfaces, and TC all other packets; "+
				"set unused links down", interfaceNames(withoutTransmit)))
		}
		for _, a := range d.attached {
			i, _ := d.lastHost.ByName(a.name)
			for _, v := range d.lastHost.VlansOf(i) {
				if a.hook == config.AttachXDP && !i.Virtual() {
					out = append(out, fmt.Sprintf("interface %s has the VLAN %s: if the network card removes the tags, XDP treats its frames as frames of %s; "+
						"use attach: auto, or 'ethtool -K %s rxvlan off'", i.Name, v.Name, i.Name, i.Name))
				}
			}
		}
	}
	slices.Sort(out)
	if d.ephemeralErr != nil {
		out = append(out, fmt.Sprintf("flows and programs end with this process: %v; mount a bpffs at /sys/fs/bpf in this mount namespace", d.ephemeralErr))
	}
	return out
}

// crossingWarnings returns warnings about traffic that siit rules do not translate.
func (d *Datapath) crossingWarnings() (out []string) {
	for _, n := range d.snapshot.NAT {
		if !n.Type.CrossesStateless() {
			continue
		}
		if len(n.EAM) == 0 && n.In == "" && n.Out == "" {
			out = append(out, fmt.Sprintf("nat %s: only IPv6 packets are translated, because the prefix maps every IPv4 address; "+
				"set in or out to the interfaces between which all packets are translated, or eam to the hosts", n.Name))
		}
		for _, e := range n.EAM {
			if e.IPv4.IsSingleIP() && d.lastHost.Owns(e.IPv4.Addr()) {
				out = append(out, fmt.Sprintf("nat %s: %s is an address of this host: packets to it stay on this host and do not reach %s", n.Name, e.IPv4.Addr(), e.IPv6))
			}
		}
	}
	if d.inForce == nil {
		return out // no Apply has succeeded
	}
	if n := d.inForce.SpecificRoutes; n > compile.MostRoutes {
		out = append(out, fmt.Sprintf("%d routes have destinations that siit and nat64 map, but only %d of them are considered: packets to the others are translated; "+
			"write eam with the prefixes of the hosts", n, compile.MostRoutes))
	}
	return out
}

// forwardingInterfaces returns the existing interfaces named by the configuration, and all
// interfaces with a program.
func (d *Datapath) forwardingInterfaces() (named, all []string) {
	for _, r := range d.snapshot.NAT {
		for _, which := range []config.Interfaces{r.In, r.Out} {
			for _, i := range d.lastHost.Named(which) {
				if which != "" { // matches any interface
					named = append(named, i.Name)
				}
			}
		}
	}
	for _, name := range d.snapshot.Config.Interfaces {
		if _, there := d.lastHost.ByName(name); there {
			named = append(named, name)
		}
	}
	for _, a := range d.attached {
		all = append(all, a.name)
	}
	slices.Sort(named)
	slices.Sort(all)
	return slices.Compact(named), slices.Compact(all)
}

// interfaceNames lists at most three interfaces with their kinds.
func interfaceNames(list []netdev.Interface) string {
	var names []string
	for _, i := range list[:min(len(list), 3)] {
		names = append(names, fmt.Sprintf("%s (%s)", i.Name, i.Kind))
	}
	if more := len(list) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return strings.Join(names, ", ")
}

// bypassWarnings returns warnings about services and rules that bypass IPsec policies, because the
// operator placed them here or no other datapath supports them.
func (d *Datapath) bypassWarnings() (out []string) {
	warn := func(who string, err error) {
		if err != nil {
			out = append(out, fmt.Sprintf("%s: %v: packets that the policy encrypts leave in clear text, and packets that it blocks pass; datapath nftables applies these policies", who, err))
		}
	}
	for i := range d.snapshot.Services {
		s := d.snapshot.Services[i].Service
		warn("service "+s.Name, bypassError(d.lastHost.BypassedByService(s)))
	}
	for _, n := range d.snapshot.NAT {
		warn("nat rule "+n.Name, bypassError(d.lastHost.BypassedByNAT(n)))
	}
	return out
}
