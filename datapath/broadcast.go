// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Broadcasts returns a warning for each backend and target that is the broadcast address of a connected network, unless
// the kernel forwards to such addresses. read returns the value of a sysctl, networks are the connected ones, and
// interfaces are those where packets may arrive.
func Broadcasts(s *Snapshot, networks []netip.Prefix, interfaces []string, read func(key string) string) (out []string) {
	arrives := func(name string) bool {
		return read("net.ipv4.conf."+strings.ReplaceAll(name, ".", "/")+".bc_forwarding") == "1"
	}
	if arrives("all") && slices.ContainsFunc(interfaces, arrives) {
		return nil
	}
	note := func(what string, to netip.Addr) {
		i := slices.IndexFunc(networks, func(n netip.Prefix) bool { return to.IsValid() && to == broadcastOf(n) })
		if i >= 0 {
			out = append(out, fmt.Sprintf("%s %s is the broadcast address of %s: the kernel does not forward to it; "+
				"write 1 to net.ipv4.conf.all.bc_forwarding and to net.ipv4.conf.IN.bc_forwarding, where IN is the interface that the packets arrive on", what, to, networks[i]))
		}
	}
	for _, svc := range s.Services {
		for _, b := range svc.Backends {
			note("service "+svc.Name+": backend", b.Address)
		}
	}
	for _, n := range s.NAT {
		if n.Type.Forwards() {
			note("nat "+n.Name+": target", n.To.Address)
		}
	}
	return out
}

// broadcastOf returns the directed broadcast address of an IPv4 network; the zero Addr where there is none (RFC 3021).
func broadcastOf(n netip.Prefix) netip.Addr {
	if !n.Addr().Is4() || n.Bits() > 30 {
		return netip.Addr{}
	}
	a := n.Masked().Addr().As4()
	for bit := n.Bits(); bit < 32; bit++ {
		a[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(a)
}
