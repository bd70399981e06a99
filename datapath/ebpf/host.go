// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// host is what a snapshot needs to know of the machine.
type host struct {
	interfaces []netdev.Interface
	xdp        map[int]uint64            // netdev.XDPFeatures
	addresses  map[int][]netip.Addr      // by interface
	details    map[int][]hostAddress     // the same
	global     map[int][2]netip.Addr     // netdev.Global of IPv4 and IPv6, by interface
	networks   []netip.Prefix            // that the host is connected to
	sources    map[netip.Addr]netip.Addr // what sourceTowards has answered
	programmed map[int]bool              // interfaces that have a program already
	routes     [2][]netdev.Destination   // of IPv4 and IPv6, once asked for
	routed     [2]bool                   // they were
	// localPortLast is the last port that is given out on the host's own addresses: below those that
	// its sockets get.
	localPortLast uint32
	ask           hostQueries
}

// hostQueries are what is asked of the host only when a configuration needs it.
type hostQueries struct {
	// route returns the host's own address and the interface for packets to an address.
	route func(to netip.Addr) (source netip.Addr, ifindex int, err error)
	// source returns the host's own address for packets to an address by an interface; the zero Addr
	// when there is none.
	source func(to netip.Addr, iface string) netip.Addr
	// destinations reads the routing table.
	destinations func(v6 bool) ([]netdev.Destination, error)
}

// with returns what h and an earlier reading tell together: what is not there any more is
// as it was, behind what is.
func (h *host) with(before *host) *host {
	all := &host{interfaces: slices.Clone(h.interfaces), xdp: h.xdp, addresses: maps.Clone(h.addresses), details: maps.Clone(h.details),
		global: maps.Clone(h.global), networks: h.networks, sources: maps.Clone(before.sources), routes: h.routes, routed: h.routed, localPortLast: h.localPortLast, ask: h.ask}
	for _, i := range before.interfaces {
		now, there := h.byName(i.Name)
		if !there {
			all.interfaces, now = append(all.interfaces, i), i
		}
		list := slices.Clone(all.addresses[now.Index])
		for _, a := range before.addresses[i.Index] {
			if !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
		all.addresses[now.Index] = list
		kept := slices.Clone(all.details[now.Index])
		for _, a := range before.details[i.Index] {
			if !slices.ContainsFunc(kept, func(k hostAddress) bool { return k.Addr == a.Addr }) {
				kept = append(kept, a)
			}
		}
		all.details[now.Index] = kept
		both, was := all.global[now.Index], before.global[i.Index]
		for n := range both {
			if !both[n].IsValid() {
				both[n] = was[n]
			}
		}
		all.global[now.Index] = both
	}
	return all
}

// destinations lists where the routing table leads, when it is asked for.
func (h *host) destinations(v6 bool) (list []netdev.Destination, err error) {
	n := familySlot(v6)
	if !h.routed[n] {
		if h.routes[n], err = h.ask.destinations(v6); err != nil {
			return nil, err
		}
		h.routed[n] = true
	}
	return h.routes[n], nil
}

func (h *host) byName(name string) (netdev.Interface, bool) {
	for _, i := range h.interfaces {
		if i.Name == name {
			return i, true
		}
	}
	return netdev.Interface{}, false
}

// named lists the interfaces that are named, or whose names begin as before a *.
func (h *host) named(which config.Interfaces) (list []netdev.Interface) {
	for _, i := range h.interfaces {
		if which.Has(i.Name) {
			list = append(list, i)
		}
	}
	return list
}

func (h *host) owns(a netip.Addr) bool {
	for _, list := range h.addresses {
		for _, b := range list {
			if a == b {
				return true
			}
		}
	}
	return false
}

// listenAddress returns the address of a family by which others know an interface.
func (h *host) listenAddress(iface string, v6 bool) (netip.Addr, bool) {
	i, ok := h.byName(iface)
	if !ok {
		return netip.Addr{}, false
	}
	a := h.global[i.Index][familySlot(v6)]
	return a, a.IsValid()
}

func familySlot(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// sourceTowards returns the host's own address on the interface that leads to an
// address.
func (h *host) sourceTowards(to netip.Addr) (netip.Addr, error) {
	own, err := h.sourceNow(to)
	if err == nil {
		h.sources[to] = own
	} else if was, known := h.sources[to]; known {
		return was, nil
	}
	return own, err
}

func (h *host) sourceNow(to netip.Addr) (netip.Addr, error) {
	own, ifindex, err := h.ask.route(to)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no route to %s: add one, or give the service a source-pool: %w", to, err)
	}
	if own.IsValid() && own.Is4() == to.Is4() && !own.IsLinkLocalUnicast() {
		return own, nil
	}
	notHeld := func(netip.Addr) bool { return false }
	if list := h.choices(ifindex, to.Is6(), notHeld); len(list) > 0 {
		return list[0].Addr, nil
	}
	return netip.Addr{}, fmt.Errorf("the interface towards %s has no address of its family: give the service a source-pool", to)
}

// attachTo lists the interfaces of a configuration: those it names, else all that
// are up and neither a loopback nor a port of a bridge or bond, which is taken in
// its place; and of both only those whose headers are known. One that was up keeps its program
// while it is down: without, the first packets afterwards would pass untranslated, and whoever
// got one of a connection would reset it. missing are those named that are not there.
func (h *host) attachTo(c *config.Config) (list []netdev.Interface, missing []string) {
	if len(c.Interfaces) == 0 {
		for _, i := range h.interfaces {
			if _, port := i.PortOf(h.interfaces); (i.Up || h.programmed[i.Index]) && !i.Loopback && !port && (i.Ethernet() || i.Bare()) {
				list = append(list, i)
			}
		}
		return list, nil
	}
	for _, name := range c.Interfaces {
		if i, ok := h.byName(name); !ok {
			missing = append(missing, name)
		} else if i.Ethernet() || i.Bare() {
			list = append(list, i)
		}
	}
	return list, missing
}

// hooksFor lists the hooks to try on an interface, best first.
func (h *host) hooksFor(want config.Attach, i netdev.Interface) []config.Attach {
	switch {
	case i.Bare():
		return []config.Attach{config.AttachTC}
	case want != config.AttachAuto && want != "":
		return []config.Attach{want}
	case i.Virtual() || len(h.vlansOf(i)) > 0:
		return []config.Attach{config.AttachTC}
	}
	return []config.Attach{config.AttachXDP, config.AttachTC}
}

// vlansOf lists the VLANs of an interface: cards hide from XDP the tags that they take off.
func (h *host) vlansOf(i netdev.Interface) (list []netdev.Interface) {
	for _, v := range h.interfaces {
		if v.Kind == "vlan" && v.Parent == i.Index && v.Up {
			list = append(list, v)
		}
	}
	return list
}

// withoutTransmit lists the interfaces that packets may leave by and to which XDP, on another one,
// cannot hand them: such frames are lost.
func (h *host) withoutTransmit(c *config.Config) (list []netdev.Interface) {
	wanted, _ := h.attachTo(c)
	for _, i := range h.interfaces {
		_, port := i.PortOf(h.interfaces)
		if !i.Up || i.Loopback || port || i.Kind == "vrf" || i.Kind == "dummy" || i.Kind == "ifb" {
			continue
		}
		ours := h.hooksFor(c.Attach, i)[0] == config.AttachXDP && slices.ContainsFunc(wanted, func(w netdev.Interface) bool { return w.Index == i.Index })
		if !h.takes(i, c.Attach, ours) {
			list = append(list, i)
		}
	}
	return list
}

// takes reports whether frames that XDP hands to an interface arrive. Cards say so; many take
// them only while they have a program themselves, which ours get. A veth does while its
// other end polls (NAPI), a bond while all of its ports have programs: that may change at any
// time, so it is relied on only where XDP was asked for.
func (h *host) takes(i netdev.Interface, attach config.Attach, ours bool) bool {
	features, told := h.xdp[i.Index]
	switch {
	case !i.Ethernet():
		return false
	case !i.Virtual():
		return !told || features&netdev.XDPTransmit != 0 || ours && features&netdev.XDPBasic != 0
	case attach != config.AttachXDP:
		return false
	case told:
		return features&netdev.XDPTransmit != 0
	}
	return i.Kind == "veth" || i.Kind == "bond"
}

// paired reports whether TC stands behind native XDP, which then carries what goes straight
// to interfaces that take its frames, and leaves the rest to TC.
func (h *host) paired(c *config.Config) bool {
	wanted, _ := h.attachTo(c)
	return len(h.withoutTransmit(c)) > 0 && slices.ContainsFunc(wanted, func(i netdev.Interface) bool {
		return h.hooksFor(c.Attach, i)[0] == config.AttachXDP
	})
}
