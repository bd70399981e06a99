// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

// RFC 5508 REQ-1: queries go out, answers come back.
func TestRFC5508REQ1Query(t *testing.T) {
	prove(t, "5508-1", plain, func(g *gateway) error {
		return g.Node("i1").Ping(g.t.Context(), netip.MustParseAddr(i1), netip.MustParseAddr(o1))
	})
}

// echoes sends pings with one identifier from a host and returns the identifiers
// that the receivers saw.
func (g *gateway) echoes(node, from string, id int, targets ...string) ([]uint16, error) {
	in := g.wire(node)
	var seen []uint16
	for _, to := range targets {
		receiver := "o1"
		if to == o2 {
			receiver = "o2"
		}
		out := g.wire(receiver)
		take := func(p packet.Packet) bool {
			m, ok := packet.Find[*packet.ICMP](p)
			return ok && m.Type == 8
		}
		var p packet.Packet
		var err error
		for range 5 {
			if err := in.send("ip4(src=%s,dst=%s)/icmp(type=echo,id=%d,seq=1)/data(20)", from, to, id); err != nil {
				return nil, err
			}
			if p, err = out.await(300*time.Millisecond, take); err == nil {
				break
			}
		}
		if err != nil {
			return nil, fmt.Errorf("no ping at %s: %w", to, err)
		}
		m, _ := packet.Find[*packet.ICMP](p)
		seen = append(seen, m.ID())
	}
	return seen, nil
}

// RFC 5508 REQ-1a: the identifier's mapping does not depend on the destination.
func TestRFC5508REQ1aIdentifier(t *testing.T) {
	prove(t, "5508-1a", plain, func(g *gateway) error {
		other, err := g.echoes("i2", i2, 77, o1)
		if err != nil {
			return err
		}
		seen, err := g.echoes("i1", i1, 77, o1b, o1, o2)
		if err != nil {
			return err
		}
		if seen[0] != seen[1] || seen[0] != seen[2] || seen[0] == other[0] {
			return fmt.Errorf("the receivers saw the identifiers %v, and %v of another host", seen, other)
		}
		return nil
	})
}

// RFC 5508 REQ-2: a query session lives for 60 s.
func TestRFC5508REQ2Timer(t *testing.T) {
	prove(t, "5508-2", plain, func(g *gateway) error {
		if _, err := g.echoes("i1", i1, 77, o1); err != nil {
			return err
		}
		all, err := g.d.Flows(g.t.Context(), nil)
		if err != nil {
			return err
		}
		for _, f := range all.Flows {
			if f.Client.Addr() == netip.MustParseAddr(i1) {
				if f.Timeout < 55 {
					return fmt.Errorf("%.0f s to live, want 60", f.Timeout)
				}
				return nil
			}
		}
		return fmt.Errorf("no flow of the ping among %d", all.Total)
	})
}

// RFC 5508 REQ-3, 3a: errors with a wrong checksum go no further.
func TestRFC5508REQ3Checksums(t *testing.T) {
	prove(t, "5508-3", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		for _, lie := range [][2]string{{",sum=0x1234", ""}, {"", ",sum=0x1234"}} {
			if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1%s)/ip4(src=%s,dst=%s,ttl=9%s)/udp(sport=%d,dport=9)/data(5)",
				o2, pool1, lie[0], pool1, o1, lie[1], seen.Port()); err != nil {
				return err
			}
			if p, err := sniff.await(silence, icmp(3, 1)); err == nil {
				return fmt.Errorf("an error with a wrong checksum got through: %s", p)
			}
		}
		// 3b: options inside are stepped over; 3c: the checksum of the quoted segment does not matter.
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9,opts=0x94040000)/udp(sport=%d,dport=9,sum=0x1111)/data(5)",
			o2, pool1, pool1, o1, seen.Port()); err != nil {
			return err
		}
		_, err = sniff.await(patience, icmp(3, 1))
		return err
	})
}

// RFC 5508 REQ-4: an error about no mapping is dropped.
func TestRFC5508REQ4NoMapping(t *testing.T) {
	prove(t, "5508-4", plain, func(g *gateway) error {
		if _, err := g.echoes("i1", i1, 77, o1); err != nil { // so that every neighbour is known
			return err
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=999,dport=9)/data(5)",
			o2, pool1, pool1, o1); err != nil {
			return err
		}
		if p, err := sniff.await(silence, icmp(3, 1)); err == nil {
			return fmt.Errorf("got through: %s", p)
		}
		return nil
	})
}

// RFC 5508 REQ-5: an inside host's error goes out from the outside address.
func TestRFC5508REQ5ErrorFromInside(t *testing.T) {
	prove(t, "5508-5", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		in.Close() // from now on the inside host answers with port unreachable
		sniff := g.wire("o1")
		if _, err := out.WriteTo([]byte("anybody?"), udpAddr(seen)); err != nil {
			return err
		}
		p, err := sniff.await(patience, icmp(3, 3))
		if err != nil {
			return err
		}
		ip, _ := packet.Find[*packet.IPv4](p)
		u, _ := packet.Find[*packet.UDP](p)
		if ip.Src != netip.MustParseAddr(pool1) || u == nil || u.DstPort != seen.Port() {
			return fmt.Errorf("want it from %s about port %d: %s", pool1, seen.Port(), p)
		}
		return nil
	})
}

// RFC 5508 REQ-6: an error does not refresh the session.
func TestRFC5508REQ6NoRefresh(t *testing.T) {
	prove(t, "5508-6", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		source := netip.MustParseAddrPort(i1 + ":4000")
		before := 0.0
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			f, err := g.flow(source)
			if err != nil {
				return err
			}
			if before = f.Timeout; before < 298 {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("the flow does not age: %.1f s left", before)
			}
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=%d,dport=9)/data(5)",
			o2, pool1, pool1, o1, seen.Port()); err != nil {
			return err
		}
		if _, err := sniff.await(patience, icmp(3, 1)); err != nil {
			return err
		}
		f, err := g.flow(source)
		if err == nil && f.Timeout > before {
			err = fmt.Errorf("%.1f s left before the error, %.1f s after it", before, f.Timeout)
		}
		return err
	})
}

// RFC 5508 REQ-7: errors about hairpinned packets come back.
func TestRFC5508REQ7HairpinError(t *testing.T) {
	prove(t, "5508-7", plain, func(g *gateway) error {
		a, b, out := g.udp("i1", i1+":4000"), g.udp("i2", i2+":5000"), g.udp("o1", o1+":9")
		outer, err := exchange(b, o1+":9", out, "b")
		if err != nil {
			return err
		}
		if _, err := exchange(a, outer.String(), b, "hairpin"); err != nil {
			return err
		}
		b.Close()
		sniff := g.wire("i1")
		if _, err := a.WriteTo([]byte("anybody?"), udpAddr(outer)); err != nil {
			return err
		}
		p, err := sniff.await(patience, icmp(3, 3))
		if err != nil {
			return err
		}
		if u, _ := packet.Find[*packet.UDP](p); u == nil || u.SrcPort != 4000 || u.DstPort != outer.Port() {
			return fmt.Errorf("the quoted packet is not as the host sent it: %s", p)
		}
		return nil
	})
}

// RFC 5508 REQ-8, RFC 6888 REQ-11: when nothing can be mapped the host is told.
func TestRFC5508REQ8Prohibited(t *testing.T) {
	prove(t, "5508-8", snat("ports: 2000-2001, unreachable: prohibited"), func(g *gateway) error {
		return g.exhaust(13)
	})
}

func TestRFC6888REQ11Unreachable(t *testing.T) {
	prove(t, "6888-11b", snat("ports: 2000-2001"), func(g *gateway) error { return g.exhaust(1) })
}

// exhaust takes the two ports of the pool and one more, and asks that the third is
// told why and the first two live on.
func (g *gateway) exhaust(code uint8) error {
	out := g.udp("o1", o1+":9")
	first, second := g.udp("i1", i1+":4000"), g.udp("i1", i1+":4001")
	a, err := exchange(first, o1+":9", out, "1")
	if err != nil {
		return err
	}
	if _, err := exchange(second, o1+":9", out, "2"); err != nil {
		return err
	}
	sniff := g.wire("i2")
	if _, err := g.udp("i2", i2+":4002").WriteTo([]byte("3"), udpAddr(netip.MustParseAddrPort(o1+":9"))); err != nil {
		return err
	}
	if _, err := sniff.await(patience, icmp(3, code)); err != nil {
		return fmt.Errorf("icmp 3/%d: %w", code, err)
	}
	again, err := exchange(first, o1+":9", out, "1 again")
	if err == nil && a != again {
		err = fmt.Errorf("a living mapping changed from %v to %v", a, again)
	}
	return err
}
