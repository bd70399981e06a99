// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/packet"
)

// statelessErrors: in mode stateless, nftables translates a packet before the kernel finds that it cannot be forwarded.
// The error quotes the translated packet. An error about a server's packet is sent to the virtual address.
func statelessErrors(s *situation) (missing, extra []string) {
	if !s.has(config.ModeStateless, "") {
		return nil, nil
	}
	missing, extra = s.pairs(quotingAnything, quotingAnything)
	rest := &situation{run: s.run, line: s.line, world: s.world, missing: subtract(s.missing, missing), extra: subtract(s.extra, extra)}
	toService := filter(rest.missing, func(_ string, f parsed) bool {
		_, dst := f.ends(0)
		return f.error != nil && (netip.MustParsePrefix("192.0.2.0/24").Contains(dst) || netip.MustParsePrefix("2001:db8:a::/64").Contains(dst))
	})
	if len(toService) == 0 || len(rest.extra) == 0 && !s.run.late() {
		return missing, extra
	}
	toServer := filter(rest.extra, func(_ string, f parsed) bool { src, _ := f.ends(0); return f.error != nil && ownAddress(src) })
	return append(missing, toService...), append(extra, toServer...)
}

// quotingAnything writes an ICMP error without the addresses and ports that it quotes.
func quotingAnything(f parsed) string {
	if f.error == nil {
		return ""
	}
	return f.without(1, true, true)
}

// prefixErrors: nftables does not translate the quoted packet in an ICMPv6 error about a packet of npt66. The error of
// another router has the router's address as its source, on eBPF the address of the host (RFC 5508 REQ-5).
func prefixErrors(s *situation) (missing, extra []string) {
	if !s.has("", config.NATNPT66) {
		return nil, nil
	}
	quoting := func(f parsed) string {
		if f.error == nil || !f.error.V6 {
			return ""
		}
		return f.without(1, true, true)
	}
	fromOutside := func(of ...string) func(parsed) string {
		return func(f parsed) string {
			src, _ := f.ends(0)
			within := slices.ContainsFunc(of, func(p string) bool { return netip.MustParsePrefix(p).Contains(src) })
			if f, ok := parse(quoting(f)); ok && within {
				return f.without(0, true, false)
			}
			return ""
		}
	}
	missing, extra = s.pairs(quoting, quoting)
	rest := &situation{run: s.run, line: s.line, world: s.world, missing: subtract(s.missing, missing), extra: subtract(s.extra, extra)}
	m, x := rest.pairs(fromOutside("2001:db8:9::/64", "fd00:20::/64", "2001:db8:77:0:ced2::8/128"), fromOutside("2001:db8:77::/64"))
	missing, extra = append(missing, m...), append(extra, x...)
	rest.missing, rest.extra = subtract(rest.missing, m), subtract(rest.extra, x)
	m, x = rest.pairs(internal, func(f parsed) string {
		if src, _ := f.ends(0); f.error == nil || !ownAddress(src) {
			return ""
		}
		return f.anyWay()
	})
	return append(missing, m...), append(extra, x...)
}

// internal writes an ICMP error with the inside addresses of npt66. nftables translates an error of the gateway like any
// packet from the inside prefix, and an unresolved next hop causes an error about the translated packet.
func internal(f parsed) string {
	if f.error == nil {
		return ""
	}
	outside := netip.MustParsePrefix("2001:db8:77:0:ced2::/80")
	for _, at := range f.at {
		if ip, ok := f.p[at].(*packet.IPv6); ok {
			for _, a := range []*netip.Addr{&ip.Src, &ip.Dst} {
				if outside.Contains(*a) {
					b := netip.MustParseAddr("fd00:2::").As16()
					of := a.As16()
					copy(b[10:], of[10:])
					*a = netip.AddrFrom16(b)
				}
			}
		}
	}
	return f.anyWay()
}

// dsrAtIngress: nftables forwards packets of mode dsr at the ingress hook, where neither their length nor their TTL
// is answered for.
func dsrAtIngress(s *situation) (missing, extra []string) {
	to := func(a netip.Addr) bool {
		return a == netip.MustParseAddr("192.0.2.13") || a == netip.MustParseAddr("2001:db8:a::13")
	}
	sent := parsed{p: s.world.sent, at: []int{1}}
	direct := func(_ string, f parsed) bool {
		if _, ok := f.asksFor(); ok && len(sent.p) > 1 {
			_, dst := sent.ends(0)
			return to(dst)
		}
		for n := range f.at {
			_, dst := f.ends(n)
			if to(dst) {
				return true
			}
		}
		return false
	}
	return filter(s.missing, direct), filter(s.extra, direct)
}

// statelessSources: nftables translates answers to a stateless service before the kernel checks their source, which
// rp_filter then refuses.
func statelessSources(s *situation) (missing, extra []string) {
	checked := false
	for key, value := range s.run.settings {
		checked = checked || strings.HasSuffix(key, "rp_filter") && value != "0"
	}
	if !checked || !s.has(config.ModeStateless, "") || len(s.missing) > 0 {
		return nil, nil
	}
	return nil, filter(s.extra, func(_ string, f parsed) bool {
		src, _ := f.ends(0)
		return netip.MustParsePrefix("192.0.2.0/24").Contains(src)
	})
}
