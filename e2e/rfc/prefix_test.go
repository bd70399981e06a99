// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/packet"
)

// dmz gives i1 and i2 (10.0.2.2, 10.0.2.3) the outside addresses 203.0.113.18 and
// .19.
const dmz = "nat:\n  - {name: dmz, type: static, external: 203.0.113.16/28, internal: 10.0.2.0/28}\n"

// bothWays opens a TCP connection from i1 to o1, and one from o1 to the outside address of i1, which it returns.
func (g *gateway) bothWays(inside, outside string) (netip.Addr, error) {
	at := func(a string, port uint16) string { return netip.AddrPortFrom(netip.MustParseAddr(a), port).String() }
	client, server, err := g.connect("i1", at(inside, 4000), at(outside, 80), g.listen("o1", at(outside, 80)))
	if err != nil {
		return netip.Addr{}, err
	}
	seen := remote(server)
	if seen.Port() != 4000 {
		return seen.Addr(), fmt.Errorf("the server saw %v, want the same port", seen)
	}
	if err := g.transfer(client, server); err != nil {
		return seen.Addr(), err
	}
	client, server, err = g.connect("o1", at(outside, 4001), at(seen.Addr().String(), 81), g.listen("i1", at(inside, 81)))
	if err != nil {
		return seen.Addr(), fmt.Errorf("from outside: %w", err)
	}
	return seen.Addr(), g.transfer(client, server)
}

// 1:1 translation without state: TCP opened from either side, fragments in any order, and another protocol.
func TestStaticOneToOne(t *testing.T) {
	prove(t, "static-1", dmz, func(g *gateway) error {
		seen, err := g.bothWays(i1, o1)
		if err != nil {
			return err
		}
		if seen != netip.MustParseAddr(i1four) {
			return fmt.Errorf("the server saw %v, want %s", seen, i1four)
		}
		if err := g.fragments("o1", "ip4(src="+o1+",dst="+i1four+")/udp(sport=4000,dport=9)/data(2000)", g.udp("i1", i1+":9"), true); err != nil {
			return fmt.Errorf("fragments: %w", err)
		}
		in, out := g.wire("i1"), g.wire("o1")
		gre := func(p packet.Packet) bool {
			ip, ok := packet.Find[*packet.IPv4](p)
			return ok && ip.Src == seen && ip.Protocol.Value == 47
		}
		if _, err = in.carried(out, gre, "ip4(src=%s,dst=%s,proto=47)/data(0x00000800aabbccdd)", i1, o1); err != nil {
			return fmt.Errorf("GRE: %w", err)
		}
		return nil
	})
}

// 1:1 translation: two hosts reach each other by their outside addresses, and ICMP errors pass in both
// directions.
func TestStaticHairpinAndErrors(t *testing.T) {
	prove(t, "static-2", dmz, func(g *gateway) error {
		client, server, err := g.connect("i1", i1+":4000", "203.0.113.19:80", g.listen("i2", i2+":80"))
		if err != nil {
			return err
		}
		if from := remote(server); from != netip.MustParseAddrPort(i1four+":4000") {
			return fmt.Errorf("the server saw %v, want the outside address", from)
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		return g.errorsBothWays("ip4", i1, o1, o2, i1four, icmp(11, 0), icmp(3, 3))
	})
}

// errorsBothWays checks two errors. An error of an outside router about a packet of i1 shows i1 its original
// packet. An error of i1 shows the outside host the outside address.
func (g *gateway) errorsBothWays(ip, inside, outside, router, outer string, exceeded, unreachable func(packet.Packet) bool) error {
	in, out, far := g.wire("i1"), g.wire("o1"), g.wire("o2")
	kind := map[string]string{"ip4": "icmp(type=time-exceeded)", "ip6": "icmp6(type=time-exceeded)"}[ip]
	ttl := map[string]string{"ip4": "ttl", "ip6": "hl"}[ip]
	if _, err := in.carried(out, udpTo(9), "%s(src=%s,dst=%s)/udp(sport=4000,dport=9)/data(8)", ip, inside, outside); err != nil {
		return err
	}
	p, err := far.carried(in, exceeded, "%s(src=%s,dst=%s)/%s/%s(src=%s,dst=%s,%s=1)/udp(sport=4000,dport=9)/data(8)", ip, router, outer, kind, ip, outer, outside, ttl)
	if err != nil {
		return fmt.Errorf("an error from outside: %w", err)
	}
	if from, _, ok := quotedEnds(p); !ok || from != netip.MustParseAddr(inside) {
		return fmt.Errorf("the quoted packet is not as the host sent it: %s", p)
	}
	// Without a listener, the inside host answers with port unreachable.
	p, err = out.carried(out, unreachable, "%s(src=%s,dst=%s)/udp(sport=4000,dport=999)/data(8)", ip, outside, outer)
	if err != nil {
		return fmt.Errorf("an error from inside: %w", err)
	}
	if _, to, ok := quotedEnds(p); !ok || to != netip.MustParseAddr(outer) {
		return fmt.Errorf("the quoted packet shows another address than %s: %s", outer, p)
	}
	return packet.Verify(p.Build())
}

// quotedEnds returns the addresses of the packet in an ICMP error.
func quotedEnds(p packet.Packet) (src, dst netip.Addr, ok bool) {
	for i, l := range p {
		if _, isICMP := l.(*packet.ICMP); !isICMP || i+1 >= len(p) {
			continue
		}
		switch q := p[i+1].(type) {
		case *packet.IPv4:
			return q.Src, q.Dst, true
		case *packet.IPv6:
			return q.Src, q.Dst, true
		}
	}
	return src, dst, false
}

const o1six, o2six = "2001:db8:ff::11", "2001:db8:ff::21"

// renumber maps the inside prefix to an outside prefix.
func renumber(internal, external string) string {
	return fmt.Sprintf("nat:\n  - {name: renumber, type: npt66, external: \"%s\", internal: \"%s\"}\n", external, internal)
}

// neutral checks that an address is in the prefix and has the checksum of another one.
func neutral(seen, inside netip.Addr, prefix string) error {
	sum := func(a netip.Addr) (n uint32) {
		b := a.As16()
		for i := 0; i < 16; i += 2 {
			n += uint32(b[i])<<8 | uint32(b[i+1])
		}
		return n % 0xffff
	}
	if !netip.MustParsePrefix(prefix).Contains(seen) || sum(seen) != sum(inside) {
		return fmt.Errorf("the server saw %v, want an address in %s with the sum of %v", seen, prefix, inside)
	}
	return nil
}

// RFC 6296 §3: prefixes of 48 bits, checksum-neutral, opened from either side.
func TestRFC6296Prefix48(t *testing.T) {
	prove(t, "6296-3", renumber("fd00:2::/48", "2001:db8:ab::/48"), func(g *gateway) error {
		seen, err := g.bothWays(i1six, o1six)
		if err != nil {
			return err
		}
		return neutral(seen, netip.MustParseAddr(i1six), "2001:db8:ab::/48")
	})
}

// RFC 6296 §3.5: longer prefixes.
func TestRFC6296Prefix56(t *testing.T) {
	prove(t, "6296-3.5", renumber("fd00:2::/56", "2001:db8:ab:aa00::/56"), func(g *gateway) error {
		seen, err := g.bothWays(i1six, o1six)
		if err != nil {
			return err
		}
		return neutral(seen, netip.MustParseAddr(i1six), "2001:db8:ab:aa00::/56")
	})
}

// RFC 6296: ICMPv6 errors, the quoted packet included.
func TestRFC6296Errors(t *testing.T) {
	prove(t, "6296-icmp", renumber("fd00:2::/48", "2001:db8:ab::/48"), func(g *gateway) error {
		seen, err := g.bothWays(i1six, o1six)
		if err != nil {
			return err
		}
		return g.errorsBothWays("ip6", i1six, o1six, o2six, seen.String(), icmp(3, 0), icmp(1, 4))
	})
}
