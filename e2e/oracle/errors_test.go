// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/packet"
)

// ownErrors: eBPF sends its ICMP errors from the gateway's address, on the link where the packet arrived. The kernel
// routes them and resolves the next hop. If an error is about a packet to a service or port-forward, connection tracking
// treats it as an error of the server, and translates its source.
func ownErrors(s *situation) (missing, extra []string) {
	if e, ok := packet.Find[*packet.ICMP](s.world.sent); ok && e.IsError() { // an error about an error does not exist
		return nil, nil
	}
	missing, extra = s.pairs(func(f parsed) string {
		src, _ := f.ends(0)
		_, asked := f.ends(1)
		if f.error == nil || src != asked && !ownAddress(src) {
			return ""
		}
		return s.ownError(f)
	}, func(f parsed) string {
		src, _ := f.ends(0)
		if f.error == nil || !ownAddress(src) || f.link != s.world.last[s.talk()].link {
			return ""
		}
		return s.ownError(f)
	})
	alone := filter(subtract(s.extra, extra), func(_ string, f parsed) bool {
		src, dst := f.ends(0)
		return f.error != nil && ownAddress(src) && f.link == s.world.last[s.talk()].link && !s.run.worlds[0].reaches(dst, f)
	})
	answered := slices.ContainsFunc(s.world.wire.arrived, func(f frame) bool {
		e, ok := packet.Find[*packet.ICMP](packet.Parse(f.bytes))
		return ok && e.IsError() && f.link == s.world.last[s.talk()].link
	})
	if extra = append(extra, alone...); answered || len(extra) > 0 {
		missing = append(missing, filter(s.missing, func(_ string, f parsed) bool { _, ok := f.asksFor(); return ok })...)
	}
	return missing, extra
}

var nextHop = regexp.MustCompile(`^\S+ (?:from \S+ )?(?:via (?:inet6 )?(\S+) )?dev (\S+)`)

// reaches reports whether the kernel would send an ICMP error to an address now: it has a route for the protocol and
// the type of service of the error, and the next hop answers.
func (w *world) reaches(a netip.Addr, f parsed) bool {
	fields := " ipproto ipv6-icmp"
	if ip, ok := packet.Find[*packet.IPv4](f.p); ok {
		fields = fmt.Sprintf(" ipproto icmp tos %#x", ip.TOS&0x1e)
	}
	out, err := w.ip.run("route get " + a.String() + fields)
	m := nextHop.FindStringSubmatch(out)
	if err != nil || m == nil {
		return false
	}
	hop := m[1]
	if hop == "" {
		hop = a.String()
	}
	out, err = w.ip.run("neigh show " + hop + " dev " + m[2] + " nud all")
	return err == nil && strings.Contains(out, " lladdr ")
}

// ownError writes an ICMP error of the gateway without what depends on its way, and on when nftables has translated the
// packet that it quotes.
func (s *situation) ownError(f parsed) string {
	if s.has(config.ModeStateless, config.NATNPT66) {
		f, _ = parse(f.without(1, true, true))
	}
	return f.anyWay()
}

// talk is the conversation of the step.
func (s *situation) talk() string {
	f := strings.Fields(s.line)
	if len(f) < 2 {
		return ""
	}
	return f[1]
}

// ownAddress reports whether an address is one that the gateway has, or may have.
func ownAddress(a netip.Addr) bool {
	for _, list := range addresses {
		for _, p := range list {
			if netip.MustParsePrefix(p).Addr() == a {
				return true
			}
		}
	}
	return slices.Contains(moreAddresses, a)
}

// errorsToNowhere: eBPF sends no ICMP error to an address that no host has (RFC 1812 §4.3.2.7), nor about a packet to
// 240.0.0.0/4.
func errorsToNowhere(s *situation) (missing, extra []string) {
	return filter(s.missing, func(_ string, f parsed) bool {
		_, dst := f.ends(0)
		_, asked := f.ends(1)
		if f.error == nil || !dst.Is4() {
			return false
		}
		first := dst.As4()[0]
		return first == 0 || first == 127 || first >= 224 || asked.Is4() && asked.As4()[0] >= 240
	}), nil
}

// noRouteErrors: with IPv6 rules that refuse, eBPF passes a translated packet without a route to the kernel. The kernel's
// error quotes the translated packet, and its destination is the translated source.
func noRouteErrors(s *situation) (missing, extra []string) {
	if !slices.ContainsFunc(s.run.script, func(line string) bool { return refusing6.MatchString(line) }) {
		return nil, nil
	}
	const noRoute = 0
	unreachable := func(f parsed) bool {
		return f.error != nil && f.error.V6 && f.error.Type == 1 && f.error.Code == noRoute
	}
	missing = filter(s.missing, func(_ string, f parsed) bool { return unreachable(f) && ofSent(s, f) })
	extra = filter(s.extra, func(_ string, f parsed) bool { return unreachable(f) && !ofSent(s, f) })
	if len(missing) > 0 {
		extra = append(extra, filter(s.extra, func(_ string, f parsed) bool { a, ok := f.asksFor(); return ok && pooled[a] })...)
	}
	return missing, extra
}

var refusing6 = regexp.MustCompile("^ip -6 rule add .* (blackhole|unreachable|prohibit)$")
