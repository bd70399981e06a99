// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// bridgeName is the bridge inside a switch node.
const bridgeName = "br0"

// policyTable is the routing table of a node's first route with From; further routes use the following tables.
const policyTable = 100

// makeLink creates the veth pair directly in the two namespaces under its final names, so it never appears in the
// host's namespace.
func makeLink(spec LinkSpec, a, b *Node) error {
	nsB, err := netns.GetFromPath(b.Path())
	if err != nil {
		return fmt.Errorf("link %s/%s: %w", spec.B.Node, spec.B.Iface, err)
	}
	defer nsB.Close()
	h, err := a.Handle()
	if err != nil {
		return err
	}
	defer h.Close()

	attrs := netlink.NewLinkAttrs()
	attrs.Name = spec.A.Iface
	attrs.MTU = spec.MTU
	veth := netlink.NewVeth(attrs)
	veth.PeerName = spec.B.Iface
	veth.PeerNamespace = netlink.NsFd(int(nsB))
	veth.PeerMTU = uint32(spec.MTU)
	if spec.A.MAC != "" {
		veth.HardwareAddr, _ = net.ParseMAC(spec.A.MAC) // Validate has already checked the value
	}
	if spec.B.MAC != "" {
		veth.PeerHardwareAddr, _ = net.ParseMAC(spec.B.MAC)
	}
	if err := h.LinkAdd(veth); err != nil {
		return fmt.Errorf("link %s/%s to %s/%s: %w", spec.A.Node, spec.A.Iface, spec.B.Node, spec.B.Iface, err)
	}
	return nil
}

// writeEarlySettings writes the settings that must precede the first interface.
func (n *Node) writeEarlySettings() error {
	settings := [][2]string{
		// Disable autoconfiguration and delays: the topology is complete.
		{"net.ipv6.conf.all.disable_ipv6", "0"},
		{"net.ipv6.conf.default.disable_ipv6", "0"},
		{"net.ipv6.conf.all.accept_dad", "0"},
		{"net.ipv6.conf.default.accept_dad", "0"},
		{"net.ipv6.conf.all.accept_ra", "0"},
		{"net.ipv6.conf.default.accept_ra", "0"},
		{"net.ipv4.conf.all.rp_filter", "0"},
		{"net.ipv4.conf.default.rp_filter", "0"},
		{"net.ipv4.conf.all.accept_redirects", "0"},
		{"net.ipv4.conf.default.accept_redirects", "0"},
		{"net.ipv6.conf.all.accept_redirects", "0"},
		{"net.ipv6.conf.default.accept_redirects", "0"},
		{"net.ipv6.ip_nonlocal_bind", boolean(len(n.spec.Owns) > 0)},
	}
	if n.spec.Switch {
		settings = append(settings, [2]string{"net.ipv6.conf.default.disable_ipv6", "1"})
	}
	if n.spec.Forward {
		settings = append(settings,
			[2]string{"net.ipv4.ip_forward", "1"},
			[2]string{"net.ipv6.conf.all.forwarding", "1"},
			[2]string{"net.ipv6.conf.default.forwarding", "1"})
	}
	return n.Do(func() error {
		if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
			return errors.New("this kernel runs without IPv6, which every lab has: boot it without ipv6.disable=1")
		}
		for _, s := range settings {
			if err := writeSysctl(s[0], s[1]); err != nil {
				return err
			}
		}
		if n.spec.Switch {
			return bridgeNetfilterOff()
		}
		return nil
	})
}

func boolean(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// bridgeNetfilterOff excludes the switch from the host's netfilter rules for bridges. The setting is per namespace
// and absent on kernels without bridge netfilter.
func bridgeNetfilterOff() error {
	for _, key := range []string{"iptables", "ip6tables", "arptables"} {
		err := writeSysctl("net.bridge.bridge-nf-call-"+key, "0")
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// makeBridge creates the bridge of a switch. Multicast snooping is off, so that neighbour discovery passes from the
// first packet on.
func (n *Node) makeBridge() error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = bridgeName
	snoop := false
	if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snoop}); err != nil {
		return fmt.Errorf("node %s: bridge: %w", n.spec.Name, err)
	}
	return nil
}

// activateLinks sets the offloads and activates every interface of the node.
func (n *Node) activateLinks(ends []End) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	names := []string{"lo"}
	var bridge netlink.Link
	if n.spec.Switch {
		if bridge, err = h.LinkByName(bridgeName); err != nil {
			return err
		}
		names = append(names, bridgeName)
	}
	for _, e := range ends {
		names = append(names, e.Iface)
	}
	for _, name := range names {
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("node %s: interface %s: %w", n.spec.Name, name, err)
		}
		if bridge != nil && name != "lo" && name != bridgeName {
			if err := h.LinkSetMaster(link, bridge); err != nil {
				return fmt.Errorf("node %s: interface %s: join %s: %w", n.spec.Name, name, bridgeName, err)
			}
		}
		if err := h.LinkSetUp(link); err != nil {
			return fmt.Errorf("node %s: interface %s: up: %w", n.spec.Name, name, err)
		}
	}
	// Set offloads after the interface is up. If GRO is enabled while a veth is down, it is reported as on, but NAPI
	// does not start. Frames redirected to the veth are then lost (kernel 6.18).
	for _, e := range ends {
		if err := n.setOffloads(e); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) setOffloads(e End) error {
	if !e.NoTxChecksum && !e.GRO {
		return nil
	}
	return n.Do(func() error {
		if e.NoTxChecksum {
			if err := setOffload(e.Iface, unix.ETHTOOL_STXCSUM, false); err != nil {
				return err
			}
		}
		if e.GRO {
			return setOffload(e.Iface, unix.ETHTOOL_SGRO, true)
		}
		return nil
	})
}

// waitUp returns when every interface of the node carries packets.
func (n *Node) waitUp(ctx context.Context, ends []End) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	names := make([]string, 0, len(ends)+1)
	for _, e := range ends {
		names = append(names, e.Iface)
	}
	if n.spec.Switch && len(ends) > 0 {
		names = append(names, bridgeName)
	}
	for _, name := range names {
		err := pollUntil(ctx, func() (bool, error) {
			link, err := h.LinkByName(name)
			if err != nil {
				return false, err
			}
			return link.Attrs().OperState == netlink.OperUp, nil
		})
		if err != nil {
			return fmt.Errorf("node %s: interface %s: wait for it to come up: %w", n.spec.Name, name, err)
		}
	}
	return nil
}

// configureAddresses configures the node's addresses, own prefixes, routes and settings.
func (n *Node) configureAddresses(ends []End) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	lo := End{Iface: "lo", Addresses: n.spec.Addresses}
	for _, e := range append([]End{lo}, ends...) {
		if err := addAddresses(h, e); err != nil {
			return fmt.Errorf("node %s: %w", n.spec.Name, err)
		}
	}
	for _, own := range n.spec.Owns {
		if err := addOwn(h, own); err != nil {
			return fmt.Errorf("node %s: own prefix %s: %w", n.spec.Name, own, err)
		}
	}
	table := policyTable
	for _, r := range n.spec.Routes {
		if err := addRoute(h, r, &table); err != nil {
			return fmt.Errorf("node %s: route to %s: %w", n.spec.Name, r.To, err)
		}
	}
	return n.Do(func() error {
		for key, value := range n.spec.Sysctls {
			if err := writeSysctl(key, value); err != nil {
				return err
			}
		}
		return nil
	})
}

func addAddresses(h *netlink.Handle, e End) error {
	if len(e.Addresses) == 0 {
		return nil
	}
	link, err := h.LinkByName(e.Iface)
	if err != nil {
		return fmt.Errorf("interface %s: %w", e.Iface, err)
	}
	for _, a := range e.Addresses {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := h.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("interface %s: address %s: %w", e.Iface, a, err)
		}
	}
	return nil
}

func addOwn(h *netlink.Handle, own string) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	p, err := netip.ParsePrefix(own)
	if err != nil {
		return err
	}
	return h.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index,
		Dst:       ipNet(p.Masked()),
		Scope:     netlink.SCOPE_HOST,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
	})
}

// addRoute adds a route. A route with From uses the next free table and a rule that selects this table.
func addRoute(h *netlink.Handle, r Route, table *int) error {
	dst, err := r.destination()
	if err != nil {
		return err
	}
	route := &netlink.Route{Dst: ipNet(dst)}
	if r.Via != "" {
		route.Gw = net.ParseIP(r.Via)
	}
	if r.Dev != "" {
		link, err := h.LinkByName(r.Dev)
		if err != nil {
			return fmt.Errorf("interface %s: %w", r.Dev, err)
		}
		route.LinkIndex = link.Attrs().Index
	}
	if r.From != "" {
		from, err := parsePrefixOrAddr(r.From)
		if err != nil {
			return err
		}
		rule := netlink.NewRule()
		rule.Src = ipNet(from)
		rule.Table = *table
		rule.Family = netlink.FAMILY_V4
		if from.Addr().Is6() {
			rule.Family = netlink.FAMILY_V6
		}
		if err := h.RuleAdd(rule); err != nil {
			return fmt.Errorf("rule from %s: %w", r.From, err)
		}
		route.Table = *table
		*table++
	}
	return h.RouteAdd(route)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// waitAddresses returns when every address of the node is usable.
func (n *Node) waitAddresses(ctx context.Context) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	if err := AwaitAddresses(ctx, h); err != nil {
		return fmt.Errorf("node %s: wait for its addresses: %w", n.spec.Name, err)
	}
	return nil
}

// AwaitAddresses returns when every IPv6 address of the handle's namespace has its local route. A kernel worker adds
// the route some time after the address, even without duplicate address detection. Until then, the kernel does not
// accept packets to the address.
func AwaitAddresses(ctx context.Context, h *netlink.Handle) error {
	return pollUntil(ctx, func() (bool, error) {
		addrs, err := h.AddrList(nil, netlink.FAMILY_V6)
		if err != nil {
			return false, notInterrupted(err)
		}
		routes, err := h.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL},
			netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		if err != nil {
			return false, notInterrupted(err)
		}
		for _, a := range addrs {
			if a.Flags&unix.IFA_F_DADFAILED != 0 {
				return false, fmt.Errorf("address %s is in use twice", a.IPNet)
			}
			if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.LinkIndex == a.LinkIndex && r.Dst.IP.Equal(a.IP) }) {
				return false, nil
			}
		}
		return true, nil
	})
}

// notInterrupted ignores the error for a kernel list that changed during the read.
func notInterrupted(err error) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil
	}
	return err
}

// settleTime bounds every wait for the kernel. A loaded machine needs far less.
const settleTime = time.Minute

// pollUntil polls the condition until it is true or fails, or until the time or ctx ends.
func pollUntil(ctx context.Context, condition func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := condition()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// removeLinks deletes the node's interfaces immediately. A socket may keep the namespace, and thereby its interfaces,
// alive for long.
func (n *Node) removeLinks() error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	var links []netlink.Link
	err = pollUntil(context.Background(), func() (done bool, err error) {
		links, err = h.LinkList()
		return err == nil, notInterrupted(err)
	})
	if err != nil {
		return fmt.Errorf("node %s: %w", n.spec.Name, err)
	}
	for _, l := range links {
		// Remove only devices that a lab creates. Other virtual devices (tunnels, fallback devices) end with the
		// namespace.
		if t := l.Type(); t != "veth" && t != "bridge" {
			continue
		}
		// ENODEV, EINVAL: already removed with its peer.
		if err := h.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("node %s: interface %s: delete: %w", n.spec.Name, l.Attrs().Name, err)
		}
	}
	return nil
}
