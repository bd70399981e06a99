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

// Host describes the machine for the compiler.
type Host struct {
	Interfaces []netdev.Interface
	XDP        map[int]uint64            // netdev.XDPFeatures.
	Addresses  map[int][]netip.Addr      // by interface index
	Details    map[int][]HostAddress     // Attributes of the same addresses.
	Global     map[int][2]netip.Addr     // netdev.Global of IPv4 and IPv6, by interface index.
	Networks   []netip.Prefix            // Directly connected networks.
	Sources    map[netip.Addr]netip.Addr // Latest results of sourceTowards.
	Policies   []netdev.IPsecPolicy      // Policies for forwarded packets.
	Programmed map[int]bool              // Interfaces with an attached program.
	routes     [2][]netdev.Destination   // of IPv4 and IPv6, read on demand
	routed     [2]bool                   // Whether routes was read.
	// LocalPortLast is the last port that Sluice allocates on the host's own addresses. It lies
	// below the ephemeral ports of local sockets.
	LocalPortLast uint32
	Ask           HostQueries
}

// HostQueries reads facts that only some configurations need.
type HostQueries struct {
	// Route returns the source address and the egress interface for packets to an address.
	Route func(to netip.Addr) (source netip.Addr, ifindex int, err error)
	// Source returns the source address for packets to an address by an interface, or the zero
	// Addr.
	Source func(to netip.Addr, iface string) netip.Addr
	// NamedSource returns the source named by the default route of an interface, or the zero Addr.
	NamedSource func(ifindex int, v6 bool) netip.Addr
	// Local lists the prefixes that the kernel delivers locally.
	Local func() ([]netip.Prefix, error)
	// Destinations reads the routing table.
	Destinations func(v6 bool) ([]netdev.Destination, error)
}

// With merges h with an earlier reading. Interfaces and addresses that have been removed since are
// appended. A renamed interface counts as present.
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

// destinations returns the routes of a family and reads them at the first call.
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

// errorSource returns the source addresses of ICMP errors for an interface. Addresses assigned by
// Sluice are used only without an alternative. They have link scope (IPv4) and precede the
// interface's own addresses, or are deprecated (IPv6).
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
		case rank < better[a.Is6()], a.Is4() && rank == better[false]: // the first IPv4 and the last IPv6 address win
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

// Named lists the interfaces that match the names or the patterns ending in *.
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

// ListenAddress returns the address of a family by which other hosts reach an interface.
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

// sourceTowards returns the host's own source address for packets to an address. If the lookup
// fails, it returns the last known result.
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

// unreachedError reports that the host has no source address for a destination. The address may be
// added later.
type unreachedError struct{ error }

func (e unreachedError) Unwrap() error { return e.error }

// AttachTo lists the interfaces for programs: the configured ones, or by default all interfaces
// that are up. The default excludes loopbacks and the ports of a bridge or bond; the bridge or bond
// gets the program instead. Interfaces with an unknown link-layer header are always excluded. An
// interface keeps its program while it is down. Without the program, the first packets after
// link-up would pass untranslated, and their receiver would reset the connection. missing lists
// configured names without an interface.
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

// HooksFor lists the hooks to try on an interface, in order of preference.
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

// Programs reports which programs a configuration needs. Loading one program takes as long as the
// rest of the start.
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

// VlansOf lists the VLANs on an interface. Their parent needs TC, because VLAN offload removes the
// tags before XDP.
func (h *Host) VlansOf(i netdev.Interface) (list []netdev.Interface) {
	for _, v := range h.Interfaces {
		if v.Kind == "vlan" && v.Parent == i.Index && v.Up {
			list = append(list, v)
		}
	}
	return list
}

// WithoutTransmit lists the egress interfaces that cannot receive frames by XDP redirect from
// another interface. Such frames would be lost.
func (h *Host) WithoutTransmit(c *config.Config) (list []netdev.Interface) {
	wanted, _ := h.AttachTo(c)
	for _, i := range h.Interfaces {
		_, port := i.PortOf(h.Interfaces)
		if !i.Up || i.Loopback || port || i.Kind == "vrf" || i.Kind == "dummy" || i.Kind == "ifb" {
			continue
		}
		ours := h.HooksFor(c.Attach, i)[0] == config.AttachXDP && slices.ContainsFunc(wanted, func(w netdev.Interface) bool { return w.Index == i.Index })
		if !h.acceptsXDP(i, c.Attach, ours) {
			list = append(list, i)
		}
	}
	return list
}

// acceptsXDP reports whether frames redirected by XDP to an interface are sent. Network cards
// announce the feature. Many accept frames only while they have a program themselves, as ours do. A
// veth accepts frames while its peer polls (NAPI), and a bond while all its ports have programs.
// Both conditions may change at any time, so they count only if the operator configured XDP.
func (h *Host) acceptsXDP(i netdev.Interface, attach config.Attach, ours bool) bool {
	features, known := h.XDP[i.Index]
	switch {
	case !i.Ethernet():
		return false
	case !i.Virtual():
		return !known || features&netdev.XDPTransmit != 0 || ours && features&netdev.XDPBasic != 0
	case attach != config.AttachXDP:
		return false
	case known:
		return features&netdev.XDPTransmit != 0
	}
	return i.Kind == "veth" || i.Kind == "bond"
}

// Paired reports whether native XDP and TC run together. XDP then forwards to interfaces that
// accept its frames and leaves all other packets to TC.
func (h *Host) Paired(c *config.Config) bool {
	wanted, _ := h.AttachTo(c)
	return len(h.WithoutTransmit(c)) > 0 && slices.ContainsFunc(wanted, func(i netdev.Interface) bool {
		return h.HooksFor(c.Attach, i)[0] == config.AttachXDP
	})
}
