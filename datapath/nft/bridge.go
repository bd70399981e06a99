// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/netdev"
)

// bridge is a bridge with br_netfilter: its frames pass the rules of a family before they are
// bridged. If a rule translates the destination to the input port, the frame is bridged and not
// routed. A bridge does not send a frame back to its input port unless the port has hairpin mode.
type bridge struct {
	name     string
	v6       bool
	sysctl   string // the sysctl of br_netfilter
	networks []netip.Prefix
}

// bridges lists the bridges with ports without hairpin mode, and their networks of the families
// that pass the rules. Only the first port is read, because a request for one port reads all ports.
func (h *host) bridges() (list []bridge) {
	pass4, pass6 := h.sysctl(framesPass(false)) == "1", h.sysctl(framesPass(true)) == "1"
	if !pass4 && !pass6 {
		return nil
	}
	if h.forget(); h.bridge == nil {
		h.bridge = h.readBridges()
	}
	return slices.DeleteFunc(slices.Clone(h.bridge), func(b bridge) bool { return b.v6 && !pass6 || !b.v6 && !pass4 })
}

// framesPass returns the sysctl that makes frames of a family pass the rules.
func framesPass(v6 bool) string {
	if v6 {
		return "net.bridge.bridge-nf-call-ip6tables"
	}
	return "net.bridge.bridge-nf-call-iptables"
}

// readBridges lists the bridges for both families. It returns nil if they cannot be read.
func (h *host) readBridges() []bridge {
	links, err := netdev.Whole(h.handle.LinkList)
	if err != nil {
		return nil
	}
	list := []bridge{}
	for _, l := range links {
		port := slices.IndexFunc(links, func(p netlink.Link) bool { return p.Attrs().MasterIndex == l.Attrs().Index })
		if l.Type() != "bridge" || port < 0 {
			continue
		}
		if info, err := h.handle.LinkGetProtinfo(links[port]); err == nil && info.Hairpin {
			continue
		}
		for _, v6 := range []bool{false, true} {
			family := unix.AF_INET
			if v6 {
				family = unix.AF_INET6
			}
			b := bridge{name: l.Attrs().Name, v6: v6, sysctl: framesPass(v6)}
			addresses, _ := netdev.Whole(func() ([]netlink.Addr, error) { return h.handle.AddrList(l, family) })
			for _, a := range addresses {
				if p, ok := netdev.Network(a); ok {
					b.networks = append(b.networks, p)
				}
			}
			list = append(list, b)
		}
	}
	return list
}

// hairpinWarning returns a warning about the first service or port-forward with a server on such a
// bridge, because the server cannot use the service itself. It returns "" if there is none.
func hairpinWarning(s *datapath.Snapshot, bridges []bridge) string {
	for _, svc := range s.Services {
		if datapath.Turns(svc.Service) {
			for _, to := range svc.Backends {
				if why := hairpinObstacle(bridges, to.Address); why != "" {
					return fmt.Sprintf("service %s: backend %s %s", svc.Name, to.Name, why)
				}
			}
		}
	}
	for _, n := range s.NAT {
		if n.Type.Forwards() && n.Hairpin != config.SwitchOff {
			if why := hairpinObstacle(bridges, n.To.Address); why != "" {
				return fmt.Sprintf("nat %s: the target %s", n.Name, why)
			}
		}
	}
	return ""
}

// hairpinObstacle describes why a server cannot connect to its own service, or returns "" if it
// can.
func hairpinObstacle(bridges []bridge, server netip.Addr) string {
	for _, b := range bridges {
		if slices.ContainsFunc(b.networks, func(p netip.Prefix) bool { return p.Contains(server) }) {
			return fmt.Sprintf("is on the bridge %s, whose frames pass these rules before they are bridged (%s): the server itself cannot connect this way, because a bridge "+
				"does not send a frame back to its input port; write \"bridge link set dev PORT hairpin on\" for its port, or datapath: ebpf", b.name, b.sysctl)
		}
	}
	return ""
}
