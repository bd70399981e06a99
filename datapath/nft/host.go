// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/netdev"
)

// host provides the compiler with the state of the network namespace.
type host struct {
	handle     *netlink.Handle
	netns      int                              // Descriptor of the network namespace.
	neighbours map[netip.Addr]compile.Interface // Last interface of each neighbour.
	changes    *netdev.Polled
	// Cached reads, nil after a change.
	last    *compile.Env
	bridge  []bridge
	leading *uplinks
}

func openHost() (*host, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("route netlink socket: %w", err)
	}
	ns, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("network namespace of this thread: %w", err)
	}
	changes, err := netdev.OpenPolled()
	if err != nil {
		h.Close()
		return nil, errors.Join(err, unix.Close(ns))
	}
	return &host{handle: h, netns: ns, neighbours: map[netip.Addr]compile.Interface{}, changes: changes}, nil
}

func (h *host) close() error {
	h.handle.Close()
	return errors.Join(h.changes.Close(), unix.Close(h.netns))
}

// forget drops the cached reads if the network has changed.
func (h *host) forget() {
	if h.changes.Changed() {
		h.last, h.bridge, h.leading = nil, nil, nil
	}
}

// env returns the current state of the host.
func (h *host) env() (compile.Env, error) {
	if h.forget(); h.last != nil {
		return *h.last, nil
	}
	env, err := h.readEnv()
	if err == nil {
		h.last = &env
	}
	return env, err
}

func (h *host) readEnv() (compile.Env, error) {
	links, err := netdev.Whole(h.handle.LinkList)
	if err != nil {
		return compile.Env{}, fmt.Errorf("interfaces: %w", err)
	}
	has, err := h.usableInterfaces()
	if err != nil {
		return compile.Env{}, fmt.Errorf("addresses: %w", err)
	}
	env := compile.Env{Route: h.neighbour, Address: h.listenAddress}
	for _, l := range links {
		if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 {
			i := describeLink(a)
			i.Bare4, i.Bare6 = !has[address{a.Index, false}], !has[address{a.Index, true}]
			env.Interfaces = append(env.Interfaces, i)
		}
	}
	addresses, err := netdev.Whole(func() ([]netlink.Addr, error) { return h.handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return compile.Env{}, fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addresses {
		if p, ok := netdev.Network(a); ok && !slices.Contains(env.Networks, p) {
			env.Networks = append(env.Networks, p)
		}
	}
	slices.SortFunc(env.Networks, netip.Prefix.Compare)
	for n := range env.Interfaces {
		i := &env.Interfaces[n]
		for v6, bare := range map[bool]*bool{false: &i.Bare4, true: &i.Bare6} {
			if a := h.namedSource(i.Index, v6, addresses); *bare && a.IsValid() {
				env.Sources = append(env.Sources, compile.RouteSource{Interface: i.Name, Address: a})
				*bare = false
			}
		}
		if s, ok := h.routeSource(*i, addresses); ok {
			env.Sources = append(env.Sources, s)
		}
	}
	slices.SortStableFunc(env.Sources, func(a, b compile.RouteSource) int { return a.Address.Compare(b.Address) })
	return env, nil
}

// namedSource returns the source address in the default route of an interface, if it is an address
// of this host. Such an interface is an unnumbered link.
func (h *host) namedSource(index int, v6 bool, addresses []netlink.Addr) netip.Addr {
	a := netdev.NamedSource(index, v6, h.handle.RouteListFiltered)
	if !slices.ContainsFunc(addresses, func(own netlink.Addr) bool { return own.IP.Equal(a.AsSlice()) }) {
		return netip.Addr{}
	}
	return a
}

// hasSource reports whether a masquerade rule has a source address for packets of an egress
// interface.
func (h *host) hasSource(name string, v6 bool) bool {
	if h.hasUsableAddress(name, v6) {
		return true
	}
	l, err := h.handle.LinkByName(name)
	return err != nil || netdev.NamedSource(l.Attrs().Index, v6, h.handle.RouteListFiltered).IsValid()
}

// farAway and farAway6 are destinations on no network: they are reserved, but routed like any other
// address.
var farAway, farAway6 = netip.AddrFrom4([4]byte{240, 0, 0, 1}), netip.AddrFrom16([16]byte{0x40})

// routeSource returns the IPv4 source address in the default route of an interface, and true if the
// kernel's masquerade would use another one. Masquerade uses the first primary address on the next
// hop's network (inet_select_addr), otherwise the first primary address.
func (h *host) routeSource(i compile.Interface, addresses []netlink.Addr) (s compile.RouteSource, named bool) {
	routes, err := h.handle.RouteGetWithOptions(farAway.AsSlice(), &netlink.RouteGetOptions{Oif: i.Name})
	if err != nil || len(routes) == 0 || routes[0].LinkIndex != i.Index {
		return s, false
	}
	src, ok := netip.AddrFromSlice(routes[0].Src.To4())
	if !ok {
		return s, false
	}
	s = compile.RouteSource{Interface: i.Name, Address: src}
	var first, near netip.Addr
	for _, a := range addresses {
		at, ok := netip.AddrFromSlice(a.IP.To4())
		if a.LinkIndex != i.Index || !ok {
			continue
		}
		if p, ok := netdev.Network(a); ok && !p.IsSingleIP() {
			s.Networks = append(s.Networks, p)
		}
		if a.Flags&unix.IFA_F_SECONDARY != 0 || a.Scope != unix.RT_SCOPE_UNIVERSE {
			continue
		}
		if !first.IsValid() {
			first = at
		}
		if !near.IsValid() && (routes[0].Gw == nil || a.IPNet.Contains(routes[0].Gw)) {
			near = at
		}
	}
	if !near.IsValid() {
		near = first
	}
	return s, near.IsValid() && near != src
}

func describeLink(a *netlink.LinkAttrs) compile.Interface {
	i := compile.Interface{Name: a.Name, Index: a.Index}
	if len(a.HardwareAddr) == len(config.MAC{}) {
		i.MAC = config.MAC(a.HardwareAddr)
	}
	return i
}

// address is a key for the addresses of one interface and family.
type address struct {
	index int
	v6    bool
}

// usableInterfaces returns the interfaces with addresses that other hosts can reply to.
func (h *host) usableInterfaces() (map[address]bool, error) {
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return h.handle.AddrList(nil, netlink.FAMILY_ALL) })
	has := map[address]bool{}
	for _, a := range list {
		v6 := a.IP.To4() == nil
		if a.Scope < unix.RT_SCOPE_LINK && !(v6 && a.IP.IsLinkLocalUnicast()) {
			has[address{a.LinkIndex, v6}] = true
		}
	}
	return has, err
}

// hasUsableAddress reports whether an interface has an address of a family that other hosts can reply to.
// It returns true if the interface cannot be read.
func (h *host) hasUsableAddress(name string, v6 bool) bool {
	l, err := h.handle.LinkByName(name)
	if err != nil {
		return true
	}
	has, err := h.usableInterfaces()
	return err != nil || has[address{l.Attrs().Index, v6}]
}

// listenAddress returns the address of a family under which other hosts reach an interface.
func (h *host) listenAddress(iface string, v6 bool) (netip.Addr, bool) {
	l, err := h.handle.LinkByName(iface)
	if err != nil {
		return netip.Addr{}, false
	}
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return h.handle.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return netip.Addr{}, false
	}
	return netdev.Global(list, v6)
}

// neighbour returns the interface with a network that includes the address.
func (h *host) neighbour(a netip.Addr) (compile.Interface, error) {
	routes, err := h.handle.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return compile.Interface{}, fmt.Errorf("%w to %s (%v)", compile.ErrNoRoute, a, err)
	}
	if gw := routes[0].Gw; gw != nil && !gw.IsUnspecified() {
		return compile.Interface{}, fmt.Errorf("%s is reached by way of router %s", a, gw)
	}
	l, err := h.handle.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return compile.Interface{}, fmt.Errorf("interface %d of the route to %s: %w", routes[0].LinkIndex, a, err)
	}
	h.neighbours[a] = describeLink(l.Attrs())
	return h.neighbours[a], nil
}

// egress returns the egress interface of the route to an address: "lo" for the host's own
// addresses, "" without a route.
func (h *host) egress(a netip.Addr) string {
	routes, err := h.handle.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return ""
	}
	l, err := h.handle.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return ""
	}
	return l.Attrs().Name
}

// uplinks are the egress interfaces of the default routes.
type uplinks struct {
	v4, v6  string
	byRules bool // "ip rule" selects routes, so that the destination alone does not determine the egress interface
}

func (h *host) uplinks() uplinks {
	if h.forget(); h.leading != nil {
		return *h.leading
	}
	up := uplinks{v4: h.egress(farAway), v6: h.egress(farAway6)}
	rules, err := h.handle.RuleList(netlink.FAMILY_ALL)
	up.byRules = err != nil || slices.ContainsFunc(rules, func(r netlink.Rule) bool {
		return r.Table != unix.RT_TABLE_LOCAL && r.Table != unix.RT_TABLE_MAIN && r.Table != unix.RT_TABLE_DEFAULT
	})
	h.leading = &up
	return up
}

// holder returns the interface that has an address, or "".
func (h *host) holder(a netip.Addr) string {
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return h.handle.AddrList(nil, netlink.FAMILY_ALL) })
	i := slices.IndexFunc(list, func(held netlink.Addr) bool { return held.IP.Equal(a.AsSlice()) })
	if err != nil || i < 0 {
		return ""
	}
	l, err := h.handle.LinkByIndex(list[i].LinkIndex)
	if err != nil {
		return ""
	}
	return l.Attrs().Name
}

// lastNeighbour is like neighbour, but returns the last known interface of an address without a
// route. An address that was never a neighbour has no route.
func (h *host) lastNeighbour(a netip.Addr) (compile.Interface, error) {
	via, err := h.neighbour(a)
	if last, known := h.neighbours[a]; err != nil && known {
		return last, nil
	}
	if err != nil && !errors.Is(err, compile.ErrNoRoute) {
		err = fmt.Errorf("%w to it as a neighbour (%v)", compile.ErrNoRoute, err)
	}
	return via, err
}
