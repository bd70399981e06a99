// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

// RFC 5508 REQ-1: queries leave, and replies return.
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
		g.sent++
		seq := g.sent // a retransmission for an earlier target may arrive late
		take := func(p packet.Packet) bool {
			m, ok := packet.Find[*packet.ICMP](p)
			return ok && m.Type == 8 && int(m.Seq()) == seq
		}
		var p packet.Packet
		var err error
		for range 5 {
			if err := in.send("ip4(src=%s,dst=%s)/icmp(type=echo,id=%d,seq=%d)/data(20)", from, to, id, seq); err != nil {
				return nil, err
			}
			if p, err = out.await(g.again, take); err == nil {
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

// RFC 5508 REQ-1a: the identifier's mapping is independent of the destination.
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

// RFC 5508 REQ-2: a query session lasts 60 s.
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

// RFC 5508 REQ-3, 3a: errors with a wrong checksum are dropped.
func TestRFC5508REQ3Checksums(t *testing.T) {
	prove(t, "5508-3", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		for _, lie := range [][2]string{{",sum=0x1234", ""}, {"", ",sum=0x1234"}} {
			if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1%s)/ip4(src=%s,dst=%s,ttl=9%s)/udp(sport=%d,dport=9)/data(5)",
				o2, pool1, lie[0], pool1, o1, lie[1], seen.Port()); err != nil {
				return err
			}
			if p, err := sniff.await(g.silence, icmp(3, 1)); err == nil {
				return fmt.Errorf("an error with a wrong checksum got through: %s", p)
			}
		}
		// 3b: options in the quoted packet are skipped; 3c: the checksum of the quoted segment is ignored.
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9,opts=0x94040000)/udp(sport=%d,dport=9,sum=0x1111)/data(5)",
			o2, pool1, pool1, o1, seen.Port()); err != nil {
			return err
		}
		_, err = sniff.await(g.patience, icmp(3, 1))
		return err
	})
}

// RFC 5508 REQ-4: an error without a mapping is dropped.
func TestRFC5508REQ4NoMapping(t *testing.T) {
	prove(t, "5508-4", plain, func(g *gateway) error {
		if _, err := g.echoes("i1", i1, 77, o1); err != nil { // resolves every neighbour
			return err
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=999,dport=9)/data(5)",
			o2, pool1, pool1, o1); err != nil {
			return err
		}
		if p, err := sniff.await(g.silence, icmp(3, 1)); err == nil {
			return fmt.Errorf("got through: %s", p)
		}
		return nil
	})
}

// RFC 5508 REQ-5: an inside host's error leaves from the outside address.
func TestRFC5508REQ5ErrorFromInside(t *testing.T) {
	prove(t, "5508-5", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		in.Close() // from here on the inside host answers with port unreachable
		sniff := g.wire("o1")
		if _, err := out.WriteTo([]byte("anybody?"), udpAddr(seen)); err != nil {
			return err
		}
		p, err := sniff.await(g.patience, icmp(3, 3))
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
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		source := netip.MustParseAddrPort(i1 + ":4000")
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
		sniff, router := g.wire("i1"), g.wire("o2")
		if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=1)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=%d,dport=9)/data(5)",
			o2, pool1, pool1, o1, seen.Port()); err != nil {
			return err
		}
		if _, err := sniff.await(g.patience, icmp(3, 1)); err != nil {
			return err
		}
		f, err := g.flow(source)
		if err == nil && f.Timeout > before {
			err = fmt.Errorf("%.1f s left before the error, %.1f s after it", before, f.Timeout)
		}
		return err
	})
}

// RFC 5508 REQ-7: errors about hairpinned packets return.
func TestRFC5508REQ7HairpinError(t *testing.T) {
	prove(t, "5508-7", plain, func(g *gateway) error {
		a, b, out := g.udp("i1", i1+":4000"), g.udp("i2", i2+":5000"), g.udp("o1", o1+":9")
		outer, err := g.exchange(b, o1+":9", out, "b")
		if err != nil {
			return err
		}
		if _, err := g.exchange(a, outer.String(), b, "hairpin"); err != nil {
			return err
		}
		b.Close()
		sniff := g.wire("i1")
		if _, err := a.WriteTo([]byte("anybody?"), udpAddr(outer)); err != nil {
			return err
		}
		p, err := sniff.await(g.patience, icmp(3, 3))
		if err != nil {
			return err
		}
		if u, _ := packet.Find[*packet.UDP](p); u == nil || u.SrcPort != 4000 || u.DstPort != outer.Port() {
			return fmt.Errorf("the quoted packet is not as the host sent it: %s", p)
		}
		return nil
	})
}

// RFC 5508 REQ-8, RFC 6888 REQ-11: the host gets an ICMP error if no mapping is available.
func TestRFC5508REQ8Prohibited(t *testing.T) {
	prove(t, "5508-8", snat("ports: 2000-2001, unreachable: prohibited"), func(g *gateway) error {
		return g.exhaust(13)
	})
}

func TestRFC6888REQ11Unreachable(t *testing.T) {
	prove(t, "6888-11b", snat("ports: 2000-2001"), func(g *gateway) error { return g.exhaust(1) })
}

// RFC 6888 REQ-11A, 11D: a packet without a mapping is dropped, and no mapping is evicted for it.
func TestRFC6888REQ11Drop(t *testing.T) {
	prove(t, "6888-11a", snat("ports: 2000-2001"), func(g *gateway) error { return g.exhaust(0) })
}

// exhaust uses the two ports of the pool and one more. It checks that the third flow is dropped with that code
// of ICMP 3 (0: possibly none), and that the first two continue.
func (g *gateway) exhaust(code uint8) error {
	out := g.udp("o1", o1+":9")
	first, second := g.udp("i1", i1+":4000"), g.udp("i1", i1+":4001")
	a, err := g.exchange(first, o1+":9", out, "1")
	if err != nil {
		return err
	}
	if _, err := g.exchange(second, o1+":9", out, "2"); err != nil {
		return err
	}
	sniff := g.wire("i2")
	drain(out) // retransmissions of the first and the second
	if _, err := g.udp("i2", i2+":4002").WriteTo([]byte("3"), udpAddr(netip.MustParseAddrPort(o1+":9"))); err != nil {
		return err
	}
	if _, text, err := receive(out, g.silence); err == nil && text == "3" {
		return fmt.Errorf("the third of two got through: %q", text)
	}
	if code > 0 {
		if _, err := sniff.await(g.patience, icmp(3, code)); err != nil {
			return fmt.Errorf("icmp 3/%d: %w", code, err)
		}
	}
	again, err := g.exchange(first, o1+":9", out, "1 again")
	if err == nil && a != again {
		err = fmt.Errorf("a living mapping changed from %v to %v", a, again)
	}
	return err
}

// RFC 5508 REQ-3d: the extension of an error (RFC 4884) is not part of the quoted packet, and arrives unchanged.
func TestRFC5508REQ3dExtension(t *testing.T) {
	prove(t, "5508-3d", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		sniff, router := g.wire("i1"), g.wire("o2")
		object := []byte{0, 8, 1, 1, 0, 0, 0x31, 1}
		for _, size := range []int{8, 400} { // shorter and longer than the quoted part
			p, err := router.carried(sniff, icmp(11, 0), "ip4(src=%s,dst=%s)/icmp(type=time-exceeded)/ip4(src=%s,dst=%s,ttl=1,len=%d)/udp(sport=%d,dport=9,len=%d)/data(8)/ext(%#x)",
				o2, pool1, pool1, o1, 28+size, seen.Port(), 8+size, object)
			if err != nil {
				return fmt.Errorf("a datagram of %d bytes: %w", size, err)
			}
			b := p.Build()
			quoted := b[14+20+8:]
			if netip.AddrFrom4([4]byte(quoted[12:])).String() != i1 || !bytes.HasPrefix(quoted[20:], []byte{4000 >> 8, 4000 & 0xff}) || !bytes.HasSuffix(b, object) {
				return fmt.Errorf("want the host's own packet and the extension %#x: %s", object, p)
			}
			if packet.Checksum(b[14+20:]) != 0 {
				return fmt.Errorf("wrong checksum: %s", p)
			}
		}
		return nil
	})
}

// RFC 5508 REQ-11: a packet that is not translated does not leave with an inside address.
func TestRFC5508REQ11NoLeak(t *testing.T) {
	prove(t, "5508-11", plain, func(g *gateway) error {
		if _, err := g.echoes("i1", i1, 77, o1); err != nil { // resolves every neighbour
			return err
		}
		in, out := g.wire("i1"), g.wire("o1")
		leaked := func(p packet.Packet) bool {
			ip, ok := packet.Find[*packet.IPv4](p)
			return ok && ip.Src == netip.MustParseAddr(i1)
		}
		for _, what := range []string{"icmp(type=timestamp,id=4)/data(12)", "icmp(type=mask,id=4)/data(4)", "icmp(type=200)/data(4)", "icmp(type=reply,id=9)/data(4)",
			"tcp(sport=4000,dport=80,flags=R)", "tcp(sport=4000,dport=80,flags=FA)"} {
			if err := in.send("ip4(src=%s,dst=%s)/%s", i1, o1, what); err != nil {
				return err
			}
			if p, err := out.await(g.silence, leaked); err == nil {
				return fmt.Errorf("left with the inside address: %s", p)
			}
		}
		return nil
	})
}

// RFC 5508 REQ-10f, RFC 1812 §4.3.2.8: the rate of errors is limited, and errors resume later.
func TestRFC5508REQ10fErrorRate(t *testing.T) {
	prove(t, "5508-10f", plain, func(g *gateway) error {
		if err := g.Node("gateway").Sysctl("net.ipv4.icmp_ratelimit", "1000"); err != nil { // the kernel's default
			return err
		}
		w := g.wire("i1")
		const expired = "ip4(src=" + i1 + ",dst=" + o1 + ",ttl=1)/udp(sport=4000,dport=9)"
		if _, err := w.carried(w, icmp(11, 0), expired); err != nil {
			return err
		}
		before, err := g.timeExceeded("i1")
		if err != nil {
			return err
		}
		const sent = 5000
		begin, frame := time.Now(), w.frame(packet.MustText(expired))
		for range sent {
			if err := w.sendFrame(frame); err != nil {
				return err
			}
		}
		after, err := g.timeExceeded("i1")
		if err != nil {
			return err
		}
		seconds := int(time.Since(begin)/time.Second) + 2 // started seconds, until the errors were counted
		if got := after - before; got > min(seconds*1000, sent-1) {
			return fmt.Errorf("%d errors about %d packets in at most %d s", got, sent, seconds)
		}
		for range 10 {
			if _, err = w.carried(w, icmp(11, 0), expired); err == nil {
				break
			}
		}
		return err
	})
}

// timeExceeded returns the number of these errors that a host has received.
func (g *gateway) timeExceeded(node string) (n int, err error) {
	out, err := g.Node(node).Command(g.t.Context(), "cat", "/proc/net/snmp").Output()
	if err != nil {
		return 0, err
	}
	var names []string
	for line := range strings.SplitSeq(string(out), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "Icmp:" {
			continue
		}
		if at := slices.Index(names, "InTimeExcds"); at > 0 && at < len(f) {
			return strconv.Atoi(f[at])
		}
		names = f
	}
	return 0, fmt.Errorf("/proc/net/snmp of %s has no Icmp InTimeExcds", node)
}
