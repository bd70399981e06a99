// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

// RFC 6146 §3.5: a destination outside of the prefix is not translated. A source inside of the prefix, and an
// IPv4 packet without a binding, are dropped.
func TestRFC6146OnlyThePrefix(t *testing.T) {
	prove(t, "6146-3.5", ports64, func(g *gateway) error {
		outer, in, out, err := g.opened()
		if err != nil {
			return err
		}
		p, err := in.carried(out, udpTo(10), "ip6(src=%s,dst=%s)/udp(sport=4000,dport=10)/data(8)", i1six, o1six)
		if err != nil {
			return fmt.Errorf("outside of the prefix: %w", err)
		}
		if ip, ok := p[1].(*packet.IPv6); !ok || ip.Src != netip.MustParseAddr(i1six) {
			return fmt.Errorf("outside of the prefix, but translated: %s", p)
		}
		if err := in.send("ip6(src=64:ff9b::c633:6415,dst=%s)/udp(sport=4000,dport=11)/data(8)", o1in64); err != nil {
			return err
		}
		if p, err := out.await(g.silence, udpTo(11)); err == nil {
			return fmt.Errorf("from inside of the prefix: %s", p)
		}
		if err := out.send("ip4(src=%s,dst=%s)/udp(sport=9,dport=%d)/data(8)", o1, pool1, outer.Port()^2); err != nil {
			return err
		}
		take := func(p packet.Packet) bool { u, ok := packet.Find[*packet.UDP](p); return ok && u.SrcPort == 9 }
		if p, err := in.await(g.silence, take); err == nil {
			return fmt.Errorf("without a binding: %s", p)
		}
		return nil
	})
}

// RFC 6146 §3.5.1.1: a host keeps one address of the pool. Ports keep their parity and range.
func TestRFC6146Allocation(t *testing.T) {
	pool := strings.Replace(ports64, "pool: [203.0.113.1]", "ports: 512-65535, pool: [203.0.113.1-203.0.113.4]", 1)
	prove(t, "6146-3.5.1.1", pool, func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		var addresses []netip.Addr
		for _, port := range []uint16{4000, 4001, 600, 601, 5002, 5003, 60000, 60001} {
			seen, err := g.exchange(g.udp("i1", fmt.Sprintf("[%s]:%d", i1six, port)), "["+o1in64+"]:9", out, "x")
			if err != nil {
				return err
			}
			if seen.Port()%2 != port%2 || (seen.Port() < 1024) != (port < 1024) {
				return fmt.Errorf("port %d became %d", port, seen.Port())
			}
			addresses = append(addresses, seen.Addr())
		}
		if len(slices.Compact(addresses)) != 1 {
			return fmt.Errorf("one host was seen as %v", addresses)
		}
		return nil
	})
}

// RFC 6146 §3.5.2.2: a reset that the host ignores ends nothing. With the next data, the connection is
// established again.
func TestRFC6146ResetNotBelieved(t *testing.T) {
	prove(t, "6146-3.5.2r", ports64, func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4001", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		in, out, seen := g.wire("i1"), g.wire("o1"), remote(server)
		reset := func(p packet.Packet) bool { t, ok := packet.Find[*packet.TCP](p); return ok && t.Flags&packet.RST != 0 }
		// Far outside of the window: the host answers with its sequence numbers (RFC 5961 §3.2).
		if _, err := out.carried(in, reset, "ip4(src=%s,dst=%s)/tcp(sport=80,dport=%d,flags=R,seq=7)", o1, seen.Addr(), seen.Port()); err != nil {
			return fmt.Errorf("the reset: %w", err)
		}
		for range 2 {
			if err := g.transfer(client, server); err != nil {
				return err
			}
		}
		return g.timeout(netip.MustParseAddrPort("["+i1six+"]:4001"), 2*time.Hour+4*time.Minute)
	})
}

// RFC 6146 §3.5: an ICMP error does not refresh the session.
func TestRFC6146ErrorRefreshesNothing(t *testing.T) {
	prove(t, "6146-3.5i", ports64, func(g *gateway) error {
		outer, sniff, _, err := g.opened()
		if err != nil {
			return err
		}
		source := netip.MustParseAddrPort("[" + i1six + "]:4000")
		before := 0.0
		for deadline := time.Now().Add(g.patience); ; time.Sleep(20 * time.Millisecond) {
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
		if _, err := g.wire("o2").carried(sniff, icmp(1, 0), "ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=%d,dport=9)/data(5)",
			o2, pool1, pool1, o1, outer.Port()); err != nil {
			return err
		}
		f, err := g.flow(source)
		if err == nil && f.Timeout > before {
			err = fmt.Errorf("%.1f s left before the error, %.1f s after it", before, f.Timeout)
		}
		return err
	})
}

// embed puts an IPv4 address into a prefix (RFC 6052 §2.2).
func embed(p netip.Prefix, a netip.Addr) netip.Addr {
	b, at := p.Addr().As16(), p.Bits()/8
	for _, octet := range a.As4() {
		if at == 8 { // bits 64 to 71 are zero
			at++
		}
		b[at] = octet
		at++
	}
	return netip.AddrFrom16(b)
}

// RFC 6146 §3.6, RFC 6052 §2.2: prefixes of every length in one configuration.
func TestRFC6052Prefixes(t *testing.T) {
	prefixes := []string{"2001:dba::/32", "2001:dbb:100::/40", "2001:dbc:1::/48", "2001:dbd:1:100::/56", "2001:dbe:1:1::/64", "2001:dbf::/96"}
	rules := "nat:\n"
	for i, p := range prefixes {
		rules += fmt.Sprintf("  - {name: rule%d, type: nat64, prefix: \"%s\", source: [\"fd00:2::/64\"], pool: [203.0.113.%d]}\n", i, p, i+1)
	}
	prove(t, "6146-3.6", rules, func(g *gateway) error {
		in, out := g.udp("i1", "["+i1six+"]:4000"), g.udp("o1", o1+":9")
		for i, p := range prefixes {
			to := netip.AddrPortFrom(embed(netip.MustParsePrefix(p), netip.MustParseAddr(o1)), 9)
			seen, err := g.exchange(in, to.String(), out, p)
			if err != nil {
				return err
			}
			if seen.Addr() != netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}) {
				return fmt.Errorf("%s: seen as %v", p, seen)
			}
			if _, err := out.WriteTo([]byte("back"), udpAddr(seen)); err != nil {
				return err
			}
			if from, text, err := receive(in, g.patience); err != nil || from != to || text != "back" {
				return fmt.Errorf("%s: %q from %v, want the answer from %v: %v", p, text, from, to, err)
			}
		}
		return nil
	})
}

// RFC 6146 §5.3: one host cannot use all the state.
func TestRFC6146Bounded(t *testing.T) {
	prove(t, "6146-5.3", strings.Replace(ports64, "}\n", ", connections-per-client: 2, ports-per-client: 2}\n", 1), func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		first := g.udp("i1", "["+i1six+"]:4000")
		seen, err := g.exchange(first, "["+o1in64+"]:9", out, "1")
		if err != nil {
			return err
		}
		if _, err := g.exchange(g.udp("i1", "["+i1six+"]:4001"), "["+o1in64+"]:9", out, "2"); err != nil {
			return err
		}
		drain(out)
		if _, err := g.udp("i1", "["+i1six+"]:4002").WriteTo([]byte("3"), udpAddr(netip.MustParseAddrPort("["+o1in64+"]:9"))); err != nil {
			return err
		}
		if _, text, err := receive(out, g.silence); err == nil && text == "3" {
			return fmt.Errorf("the third flow of two got through")
		}
		if _, err := g.exchange(g.udp("i2", "["+i2six+"]:4000"), "["+o1in64+"]:9", out, "another host"); err != nil {
			return err
		}
		return g.back(out, seen, first, g.patience)
	})
}

// RFC 7915 §4.5: a datagram without a checksum gets one, because IPv6 requires it.
func TestRFC7915ZeroChecksum(t *testing.T) {
	prove(t, "7915-4.5", ports64, func(g *gateway) error {
		in := g.udp("i1", "["+i1six+"]:4000")
		outer, err := g.exchange(in, "["+o1in64+"]:9", g.udp("o1", o1+":9"), "x")
		if err != nil {
			return err
		}
		raw := g.wire("o1")
		return g.retry(in, 9, func() error {
			return raw.send("ip4(src=%s,dst=%s)/udp(sport=9,dport=%d,sum=0)/data(9)", o1, pool1, outer.Port())
		})
	})
}

// RFC 7915 §5.1: TOS from the traffic class, one hop less, DF only above 1260 bytes.
func TestRFC7915Header4(t *testing.T) {
	prove(t, "7915-5.1", ports64, func(g *gateway) error {
		_, in, out, err := g.opened()
		if err != nil {
			return err
		}
		for size, df := range map[int]bool{1260 - 28: false, 1261 - 28: true} {
			p, err := in.carried(out, udpTo(10), "ip6(src=%s,dst=%s,tc=0xb9,hl=33,flow=0x12345)/udp(sport=4000,dport=10)/data(%d)", i1six, o1in64, size)
			if err != nil {
				return err
			}
			if ip, ok := p[1].(*packet.IPv4); !ok || ip.TOS != 0xb9 || ip.TTL != 32 || ip.DF != df {
				return fmt.Errorf("want TOS 0xb9, TTL 32, DF %v: %s", df, p)
			}
		}
		return nil
	})
}

// RFC 7915 §5.1.1: identification, offset and flag of the fragment header.
func TestRFC7915FragmentHeader(t *testing.T) {
	prove(t, "7915-5.1.1", ports64, func(g *gateway) error {
		_, in, out, err := g.opened()
		if err != nil {
			return err
		}
		pieces, err := packet.Fragments(in.frame(packet.MustText(fmt.Sprintf("ip6(src=%s,dst=%s)/udp(sport=4000,dport=9)/data(1000)", i1six, o1in64))), 400, 0xabcd1234)
		if err != nil {
			return err
		}
		for i, b := range pieces {
			if err := in.sendFrame(b); err != nil {
				return err
			}
			p, err := out.await(g.patience, func(p packet.Packet) bool { ip, ok := packet.Find[*packet.IPv4](p); return ok && ip.ID == 0x1234 })
			if err != nil {
				return fmt.Errorf("fragment %d: %w", i, err)
			}
			if ip, _ := packet.Find[*packet.IPv4](p); int(ip.Offset) != i*400 || ip.MF != (i < len(pieces)-1) || ip.DF {
				return fmt.Errorf("fragment %d of %d: %s", i, len(pieces), p)
			}
		}
		return nil
	})
}

// RFC 7915 §4.2: ICMP errors are translated to ICMPv6. Errors without a counterpart are dropped.
func TestRFC7915Errors6(t *testing.T) {
	prove(t, "7915-4.2", ports64, func(g *gateway) error {
		outer, in, _, err := g.opened()
		if err != nil {
			return err
		}
		router := g.wire("o2")
		about := fmt.Sprintf("ip4(src=%s,dst=%s,ttl=9)/udp(sport=%d,dport=9)/data(8)", pool1, o1, outer.Port())
		for message, want := range map[string][3]uint32{
			"type=unreachable,code=0": {1, 0}, "type=unreachable,code=1": {1, 0}, "type=unreachable,code=2": {4, 1, 6}, "type=unreachable,code=3": {1, 4},
			"type=unreachable,code=4,mtu=1300": {2, 0, 1320}, "type=unreachable,code=9": {1, 1}, "type=unreachable,code=13": {1, 1},
			"type=time-exceeded": {3, 0}, "type=time-exceeded,code=1": {3, 1}, "type=param,ptr=9": {4, 0, 6}, "type=param,ptr=16": {4, 0, 24},
		} {
			p, err := router.carried(in, icmp(uint8(want[0]), uint8(want[1])), "ip4(src=%s,dst=%s)/icmp(%s)/%s", o2, pool1, message, about)
			if err != nil {
				return fmt.Errorf("%s: %w", message, err)
			}
			if m, _ := packet.Find[*packet.ICMP](p); m.Rest != want[2] {
				return fmt.Errorf("%s: want %v: %s", message, want, p)
			}
			if from, _, ok := quotedEnds(p); !ok || from != netip.MustParseAddr(i1six) {
				return fmt.Errorf("%s: the quoted packet is not as the host sent it: %s", message, p)
			}
		}
		for _, message := range []string{"type=unreachable,code=14", "type=quench", "type=redirect", "type=param,ptr=20"} {
			if err := router.send("ip4(src=%s,dst=%s)/icmp(%s)/%s", o2, pool1, message, about); err != nil {
				return err
			}
			if p, err := in.await(g.silence, func(p packet.Packet) bool { m, ok := packet.Find[*packet.ICMP](p); return ok && m.IsError() }); err == nil {
				return fmt.Errorf("%s became %s", message, p)
			}
		}
		return nil
	})
}

// RFC 7915 §5.2: ICMPv6 errors are translated to ICMP.
func TestRFC7915Errors4(t *testing.T) {
	prove(t, "7915-5.2", ports64, func(g *gateway) error {
		outer, in, out, err := g.opened()
		if err != nil {
			return err
		}
		about := fmt.Sprintf("ip6(src=%s,dst=%s,hl=9)/udp(sport=9,dport=4000)/data(8)", o1in64, i1six)
		for message, want := range map[string][3]uint32{
			"type=unreachable,code=0": {3, 1}, "type=unreachable,code=1": {3, 10}, "type=unreachable,code=3": {3, 1}, "type=unreachable,code=4": {3, 3},
			"type=too-big,mtu=1300": {3, 4, 1280}, "type=time-exceeded": {11, 0}, "type=param,code=1,ptr=40": {3, 2}, "type=param,ptr=7": {12, 0, 8 << 24},
		} {
			p, err := in.carried(out, icmp(uint8(want[0]), uint8(want[1])), "ip6(src=%s,dst=%s)/icmp6(%s)/%s", i1six, o1in64, message, about)
			if err != nil {
				return fmt.Errorf("%s: %w", message, err)
			}
			if m, _ := packet.Find[*packet.ICMP](p); m.Rest != want[2] {
				return fmt.Errorf("%s: want %v: %s", message, want, p)
			}
			if u, _ := packet.Find[*packet.UDP](p); u == nil || u.DstPort != outer.Port() {
				return fmt.Errorf("%s: the quoted packet is not as the host saw it: %s", message, p)
			}
			if err := packet.Verify(p.Build()); err != nil {
				return err
			}
		}
		return nil
	})
}

// RFC 7915 §4.2, RFC 4884: the extension of an error is kept, and the length field before it has the unit of the
// other family.
func TestRFC7915Extension(t *testing.T) {
	prove(t, "7915-4884", ports64, func(g *gateway) error {
		outer, in, out, err := g.opened()
		if err != nil {
			return err
		}
		object := []byte{0, 8, 1, 1, 0, 0, 0x31, 1}
		p, err := g.wire("o2").carried(in, icmp(3, 0), "ip4(src=%s,dst=%s)/icmp(type=time-exceeded)/ip4(src=%s,dst=%s,ttl=1)/udp(sport=%d,dport=9)/data(8)/ext(%#x)",
			o2, pool1, pool1, o1, outer.Port(), object)
		if err != nil {
			return fmt.Errorf("from IPv4: %w", err)
		}
		if b := p.Build()[14:]; b[44] != 144/8 || len(b) != 40+8+144+4+len(object) || !bytes.HasSuffix(b, object) {
			return fmt.Errorf("from IPv4: want 144 bytes before the extension %#x: %s", object, p)
		}
		p, err = in.carried(out, icmp(3, 3), "ip6(src=%s,dst=%s)/icmp6(type=unreachable,code=4)/ip6(src=%s,dst=%s,hl=9)/udp(sport=9,dport=4000)/data(80)/ext(%#x)",
			i1six, o1in64, o1in64, i1six, object)
		if err != nil {
			return fmt.Errorf("from IPv6: %w", err)
		}
		if b := p.Build()[14:]; b[25] != 128/4 || len(b) != 20+8+128+4+len(object) || !bytes.HasSuffix(b, object) {
			return fmt.Errorf("from IPv6: want 128 bytes before the extension %#x: %s", object, p)
		}
		return nil
	})
}
