// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// Host is what a snapshot needs to know of the machine.
type Host struct {
	Interfaces []netdev.Interface
	XDP        map[int]uint64            // netdev.XDPFeatures
	Addresses  map[int][]netip.Addr      // by interface
	Details    map[int][]HostAddress     // the same
	Global     map[int][2]netip.Addr     // netdev.Global of IPv4 and IPv6, by interface
	Networks   []netip.Prefix            // that the host is connected to
	Sources    map[netip.Addr]netip.Addr // what sourceTowards has answered
	Policies   []netdev.IPsecPolicy      // that packets should meet which it forwards
	Programmed map[int]bool              // interfaces that have a program already
	routes     [2][]netdev.Destination   // of IPv4 and IPv6, once asked for
	routed     [2]bool                   // they were
	// LocalPortLast is the last port that is given out on the host's own addresses: below those that
	// its sockets get.
	LocalPortLast uint32
	Ask           HostQueries
}

// HostQueries are what is asked of the host only when a configuration needs it.
type HostQueries struct {
	// Route returns the host's own address and the interface for packets to an address.
	Route func(to netip.Addr) (source netip.Addr, ifindex int, err error)
	// Source returns the host's own address for packets to an address by an interface; the zero Addr
	// when there is none.
	Source func(to netip.Addr, iface string) netip.Addr
	// NamedSource returns the source that the default route by an interface names; the zero Addr when it names none.
	NamedSource func(ifindex int, v6 bool) netip.Addr
	// Local lists the prefixes that packets are delivered to this host for.
	Local func() ([]netip.Prefix, error)
	// Destinations reads the routing table.
	Destinations func(v6 bool) ([]netdev.Destination, error)
}

// With returns what h and an earlier reading tell together: what is not there any more is
// as it was, behind what is. An interface that got another name is there.
func (h *Host) With(before *Host) *Host {
	all := &Host{Interfaces: slices.Clone(h.Interfaces), XDP: h.XDP, Addresses: maps.Clone(h.Addresses), Details: maps.Clone(h.Details),
		Global: maps.Clone(h.Global), Networks: h.Networks, Policies: h.Policies, Sources: maps.Clone(before.Sources), routes: h.routes, routed: h.routed, LocalPortLast: h.LocalPortLast, Ask: h.Ask}
	for _, i := range before.Interfaces {
		now, there := h.ByName(i.Name)
		if !there {
			if slices.ContainsFunc(h.Interfaces, func(n netdev.Interface) bool { return n.Index == i.Index }) {
				continue
			}
			all.Interfaces, now = append(all.Interfaces, i), i
		}
		list := slices.Clone(all.Addresses[now.Index])
		for _, a := range before.Addresses[i.Index] {
			if !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
		all.Addresses[now.Index] = list
		kept := slices.Clone(all.Details[now.Index])
		for _, a := range before.Details[i.Index] {
			if !slices.ContainsFunc(kept, func(k HostAddress) bool { return k.Addr == a.Addr }) {
				kept = append(kept, a)
			}
		}
		all.Details[now.Index] = kept
		both, was := all.Global[now.Index], before.Global[i.Index]
		for n := range both {
			if !both[n].IsValid() {
				both[n] = was[n]
			}
		}
		all.Global[now.Index] = both
	}
	return all
}

// destinations lists where the routing table leads, when it is asked for.
func (h *Host) destinations(v6 bool) (list []netdev.Destination, err error) {
	n := familySlot(v6)
	if !h.routed[n] {
		if h.routes[n], err = h.Ask.Destinations(v6); err != nil {
			return nil, err
		}
		h.routed[n] = true
	}
	return h.routes[n], nil
}

// errorSource returns the addresses of an interface that ICMP errors have: none that Sluice holds where it has
// others. Of link scope (IPv4) the kernel lists those before the interface's own; of IPv6 they are deprecated.
func (h *Host) errorSource(index int) (four, six wire.Addr) {
	better := map[bool]int{}
	for n, a := range h.Addresses[index] {
		rank := 3
		if list := h.Details[index]; n < len(list) && list[n].Addr == a && (a.Is4() && list[n].Unusable || list[n].Deprecated) {
			rank = 2
		}
		if a.Is6() && a.IsLinkLocalUnicast() {
			rank = 1
		}
		switch {
		case rank < better[a.Is6()], a.Is4() && rank == better[false]: // of IPv4 the first one, of IPv6 the last one
			continue
		case a.Is4():
			four = wire.AddrOf(a)
		default:
			six = wire.AddrOf(a)
		}
		better[a.Is6()] = rank
	}
	return four, six
}

func (h *Host) ByName(name string) (netdev.Interface, bool) {
	for _, i := range h.Interfaces {
		if i.Name == name {
			return i, true
		}
	}
	return netdev.Interface{}, false
}

// Named lists the interfaces that are named, or whose names begin as before a *.
func (h *Host) Named(which config.Interfaces) (list []netdev.Interface) {
	for _, i := range h.Interfaces {
		if which.Has(i.Name) {
			list = append(list, i)
		}
	}
	return list
}

func (h *Host) Owns(a netip.Addr) bool {
	for _, list := range h.Addresses {
		for _, b := range list {
			if a == b {
				return true
			}
		}
	}
	return false
}

// ListenAddress returns the address of a family by which others know an interface.
func (h *Host) ListenAddress(iface string, v6 bool) (netip.Addr, bool) {
	i, ok := h.ByName(iface)
	if !ok {
		return netip.Addr{}, false
	}
	a := h.Global[i.Index][familySlot(v6)]
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
func (h *Host) sourceTowards(to netip.Addr) (netip.Addr, error) {
	own, err := h.sourceNow(to)
	if err == nil {
		h.Sources[to] = own
	} else if was, known := h.Sources[to]; known {
		return was, nil
	}
	return own, err
}

func (h *Host) sourceNow(to netip.Addr) (netip.Addr, error) {
	own, ifindex, err := h.Ask.Route(to)
	if err != nil {
		return netip.Addr{}, unreachedError{fmt.Errorf("no route to %s: add one, or give the service a source-pool: %w", to, err)}
	}
	if own.IsValid() && own.Is4() == to.Is4() && !own.IsLinkLocalUnicast() {
		return own, nil
	}
	notHeld := func(netip.Addr) bool { return false }
	if list := h.choices(ifindex, to.Is6(), notHeld); len(list) > 0 {
		return list[0].Addr, nil
	}
	return netip.Addr{}, unreachedError{fmt.Errorf("the interface towards %s has no address of its family: give the service a source-pool", to)}
}

// unreachedError says why there is no address of the host towards another one, which may come.
type unreachedError struct{ error }

func (e unreachedError) Unwrap() error { return e.error }

// AttachTo lists the interfaces of a configuration: those it names, else all that
// are up and neither a loopback nor a port of a bridge or bond, which is taken in
// its place; and of both only those whose headers are known. One that was up keeps its program
// while it is down: without, the first packets afterwards would pass untranslated, and whoever
// got one of a connection would reset it. missing are those named that are not there.
func (h *Host) AttachTo(c *config.Config) (list []netdev.Interface, missing []string) {
	if len(c.Interfaces) == 0 {
		for _, i := range h.Interfaces {
			if _, port := i.PortOf(h.Interfaces); (i.Up || h.Programmed[i.Index]) && !i.Loopback && !port && (i.Ethernet() || i.Bare()) {
				list = append(list, i)
			}
		}
		return list, nil
	}
	for _, name := range c.Interfaces {
		if i, ok := h.ByName(name); !ok {
			missing = append(missing, name)
		} else if i.Ethernet() || i.Bare() {
			list = append(list, i)
		}
	}
	return list, missing
}

// HooksFor lists the hooks to try on an interface, best first.
func (h *Host) HooksFor(want config.Attach, i netdev.Interface) []config.Attach {
	switch {
	case i.Bare():
		return []config.Attach{config.AttachTC}
	case want != config.AttachAuto && want != "":
		return []config.Attach{want}
	case i.Virtual() || len(h.VlansOf(i)) > 0:
		return []config.Attach{config.AttachTC}
	}
	return []config.Attach{config.AttachXDP, config.AttachTC}
}

// Programs tells which programs a configuration needs: it takes as long to load one of them as all else of a start.
func (h *Host) Programs(c *config.Config) (xdp, tc, bare bool) {
	wanted, _ := h.AttachTo(c)
	auto := c.Attach == config.AttachAuto || c.Attach == ""
	xdp = c.Attach == config.AttachXDP || c.Attach == config.AttachXDPGeneric
	for _, i := range wanted {
		xdp = xdp || h.HooksFor(c.Attach, i)[0] == config.AttachXDP
		bare = bare || i.Bare()
	}
	return xdp, auto || c.Attach == config.AttachTC || h.Paired(c), bare
}

// VlansOf lists the VLANs of an interface: cards hide from XDP the tags that they take off.
func (h *Host) VlansOf(i netdev.Interface) (list []netdev.Interface) {
	for _, v := range h.Interfaces {
		if v.Kind == "vlan" && v.Parent == i.Index && v.Up {
			list = append(list, v)
		}
	}
	return list
}

// WithoutTransmit lists the interfaces that packets may leave by and to which XDP, on another one,
// cannot hand them: such frames are lost.
func (h *Host) WithoutTransmit(c *config.Config) (list []netdev.Interface) {
	wanted, _ := h.AttachTo(c)
	for _, i := range h.Interfaces {
		_, port := i.PortOf(h.Interfaces)
		if !i.Up || i.Loopback || port || i.Kind == "vrf" || i.Kind == "dummy" || i.Kind == "ifb" {
			continue
		}
		ours := h.HooksFor(c.Attach, i)[0] == config.AttachXDP && slices.ContainsFunc(wanted, func(w netdev.Interface) bool { return w.Index == i.Index })
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
func (h *Host) takes(i netdev.Interface, attach config.Attach, ours bool) bool {
	features, told := h.XDP[i.Index]
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

// Paired reports whether TC stands behind native XDP, which then carries what goes straight
// to interfaces that take its frames, and leaves the rest to TC.
func (h *Host) Paired(c *config.Config) bool {
	wanted, _ := h.AttachTo(c)
	return len(h.WithoutTransmit(c)) > 0 && slices.ContainsFunc(wanted, func(i netdev.Interface) bool {
		return h.HooksFor(c.Attach, i)[0] == config.AttachXDP
	})
}
