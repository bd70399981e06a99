// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

// sources sends from one inside socket to each target and returns the sources that the receivers saw.
func (g *gateway) sources(from net.PacketConn, targets ...string) ([]netip.AddrPort, error) {
	var seen []netip.AddrPort
	for _, to := range targets {
		node := "o1"
		if strings.HasPrefix(to, o2) {
			node = "o2"
		}
		at := g.udp(node, to)
		s, err := g.exchange(from, to, at, "to "+to)
		at.Close()
		if err != nil {
			return nil, err
		}
		seen = append(seen, s)
	}
	return seen, nil
}

func allEqual(seen []netip.AddrPort) error {
	if len(slices.Compact(slices.Clone(seen))) != 1 {
		return fmt.Errorf("the receivers saw %v", seen)
	}
	return nil
}

// RFC 4787 REQ-1: one mapping for all destinations.
func TestRFC4787REQ1EndpointIndependentMapping(t *testing.T) {
	prove(t, "4787-1", plain, func(g *gateway) error {
		// The kernel's NAT seems endpoint-independent until another host has the same port towards one of the
		// destinations.
		other := g.udp("i2", i2+":4000")
		if _, err := g.sources(other, o1+":9"); err != nil {
			return err
		}
		seen, err := g.sources(g.udp("i1", i1+":4000"), o1b+":9", o1+":9", o2+":9")
		if err != nil {
			return err
		}
		return allEqual(seen)
	})
}

// RFC 4787 REQ-2, RFC 6888 REQ-2: paired address pooling.
func TestRFC4787REQ2PairedPooling(t *testing.T) {
	prove(t, "4787-2", strings.Replace(plain, "203.0.113.1", "203.0.113.1-203.0.113.4", 1), func(g *gateway) error {
		addresses := map[netip.Addr]bool{}
		for range 12 {
			seen, err := g.sources(g.udp("i1", i1+":0"), o1+":9", o2+":9")
			if err != nil {
				return err
			}
			addresses[seen[0].Addr()], addresses[seen[1].Addr()] = true, true
		}
		if len(addresses) != 1 {
			return fmt.Errorf("one host was seen as %v", addresses)
		}
		return nil
	})
}

// RFC 4787 REQ-3: no port overloading: two hosts never share an outside endpoint,
// not even towards different destinations.
func TestRFC4787REQ3NoOverloading(t *testing.T) {
	prove(t, "4787-3", plain, func(g *gateway) error {
		a, err := g.sources(g.udp("i1", i1+":4000"), o1+":9")
		if err != nil {
			return err
		}
		b, err := g.sources(g.udp("i2", i2+":4000"), o1b+":9")
		if err == nil && a[0] == b[0] {
			err = fmt.Errorf("two hosts were seen as %v", a[0])
		}
		return err
	})
}

// RFC 4787 REQ-3a: ports keep their range.
func TestRFC4787REQ3aPortRange(t *testing.T) {
	prove(t, "4787-3a", snat("ports: 512-65535"), func(g *gateway) error {
		for _, port := range []int{600, 1023, 1024, 5000} {
			for _, host := range []string{"i1", "i2"} {
				seen, err := g.sources(g.udp(host, fmt.Sprintf("%s:%d", map[string]string{"i1": i1, "i2": i2}[host], port)), o1+":9")
				if err != nil {
					return err
				}
				if (port < 1024) != (seen[0].Port() < 1024) {
					return fmt.Errorf("port %d became %d", port, seen[0].Port())
				}
			}
		}
		return nil
	})
}

// RFC 4787 REQ-4: ports keep their parity, also where the same port is taken.
func TestRFC4787REQ4Parity(t *testing.T) {
	prove(t, "4787-4", plain, func(g *gateway) error {
		r := rand.New(rand.NewPCG(1, 2))
		for range 40 {
			port := 20000 + r.IntN(10000) // outside of the ephemeral range
			for host, address := range map[string]string{"i1": i1, "i2": i2} {
				seen, err := g.sources(g.udp(host, fmt.Sprintf("%s:%d", address, port)), o1+":9")
				if err != nil {
					return err
				}
				if int(seen[0].Port())%2 != port%2 {
					return fmt.Errorf("port %d became %d", port, seen[0].Port())
				}
			}
		}
		return nil
	})
}

// RFC 4787 REQ-5, 5c: a mapping lasts five minutes by default, and then an answer still arrives.
func TestRFC4787REQ5Timer(t *testing.T) {
	prove(t, "4787-5", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		if err := g.timeout(netip.MustParseAddrPort(i1+":4000"), 5*time.Minute); err != nil {
			return err
		}
		return g.back(out, seen, in, g.patience)
	})
}

// RFC 4787 REQ-5b: the timer can be configured.
func TestRFC4787REQ5bTimerConfigurable(t *testing.T) {
	prove(t, "4787-5b", plain+"timeouts: {udp: 20m}\n", func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		if _, err := g.exchange(in, o1+":9", out, "there"); err != nil {
			return err
		}
		return g.timeout(netip.MustParseAddrPort(i1+":4000"), 20*time.Minute)
	})
}

// RFC 4787 REQ-6: an outbound packet refreshes the mapping.
func TestRFC4787REQ6OutboundRefresh(t *testing.T) {
	prove(t, "4787-6", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		// Wait until the flow has aged, then send: its timeout must be full again.
		source := netip.MustParseAddrPort(i1 + ":4000")
		aged := func() (float64, error) { f, err := g.flow(source); return f.Timeout, err }
		young, err := aged()
		if err != nil {
			return err
		}
		for deadline := time.Now().Add(g.patience); ; time.Sleep(20 * time.Millisecond) {
			left, err := aged()
			if err != nil {
				return err
			}
			if left < young-1.5 {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("an idle flow does not age: %.1f s left", left)
			}
		}
		begin := time.Now()
		if again, err := g.exchange(in, o1+":9", out, "again"); err != nil || again != seen {
			return fmt.Errorf("the mapping changed from %v to %v, %v", seen, again, err)
		}
		if left, err := aged(); err != nil || left < young-1-time.Since(begin).Seconds() {
			return fmt.Errorf("%.1f s left after an outbound packet, want %.1f, %v", left, young, err)
		}
		return nil
	})
}

// RFC 4787 REQ-8: endpoint-independent filtering.
func TestRFC4787REQ8Filtering(t *testing.T) {
	prove(t, "4787-8", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		return g.back(g.udp("o2", o2+":7777"), seen, in, g.patience)
	})
}

// The other kinds of filtering of a rule.
func TestRFC4787REQ8AddressDependentFiltering(t *testing.T) {
	prove(t, "4787-8a", snat("filtering: address-dependent"), func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		if g.back(g.udp("o2", o2+":7777"), seen, in, g.silence) == nil {
			return fmt.Errorf("an address that was never sent to got through")
		}
		return g.back(g.udp("o1", o1+":7777"), seen, in, g.patience)
	})
}

// RFC 4787 REQ-9, 9a: hairpinning: the receiver sees the outside endpoint.
func TestRFC4787REQ9Hairpin(t *testing.T) {
	prove(t, "4787-9", plain, func(g *gateway) error {
		a, b, out := g.udp("i1", i1+":4000"), g.udp("i2", i2+":5000"), g.udp("o1", o1+":9")
		outerB, err := g.exchange(b, o1+":9", out, "b")
		if err != nil {
			return err
		}
		outerA, err := g.exchange(a, o1+":9", out, "a")
		if err != nil {
			return err
		}
		seen, err := g.exchange(a, outerB.String(), b, "hairpin")
		if err != nil {
			return err
		}
		if seen != outerA {
			return fmt.Errorf("the receiver saw %v, want the outside endpoint %v", seen, outerA)
		}
		return g.back(b, seen, a, g.patience)
	})
}

// RFC 4787 REQ-10: no application layer gateway changes the payload.
func TestRFC4787REQ10NoALG(t *testing.T) {
	prove(t, "4787-10", plain, func(g *gateway) error {
		in := g.udp("i1", i1+":5060")
		for _, to := range []string{o1 + ":5060", o1 + ":53", o1 + ":69"} {
			out := g.udp("o1", to)
			text := "INVITE sip:bob@198.51.100.11 SIP/2.0\r\nVia: SIP/2.0/UDP 10.0.2.2:5060\r\nContact: <sip:alice@10.0.2.2:5060>\r\n\r\nc=IN IP4 10.0.2.2"
			if _, err := g.exchange(in, to, out, text); err != nil { // compares the text
				return err
			}
		}
		return nil
	})
}

// RFC 4787 REQ-11: the behaviour does not change when ports collide.
func TestRFC4787REQ11Deterministic(t *testing.T) {
	prove(t, "4787-11", plain, func(g *gateway) error {
		outs := map[string]net.PacketConn{}
		for _, to := range []string{o1 + ":9", o1b + ":9", o2 + ":9"} {
			outs[to] = g.udp(map[bool]string{true: "o2", false: "o1"}[to == o2+":9"], to)
		}
		talk := func(host, from string, targets ...string) error {
			c := g.udp(host, from)
			defer c.Close()
			var seen []netip.AddrPort
			for _, to := range targets {
				s, err := g.exchange(c, to, outs[to], "x")
				if err != nil {
					return err
				}
				seen = append(seen, s)
			}
			return allEqual(seen)
		}
		for port := 20000; port < 20300; port++ { // every port collides, in another order
			at := fmt.Sprintf(":%d", port)
			if err := talk("i2", i2+at, o1+":9"); err != nil {
				return err
			}
			if err := talk("i1", i1+at, o1b+":9", o1+":9", o2+":9"); err != nil {
				return fmt.Errorf("port %d: %w", port, err)
			}
			if err := talk("i2", i2+at, o2+":9", o1+":9", o1b+":9"); err != nil {
				return fmt.Errorf("port %d: %w", port, err)
			}
		}
		return nil
	})
}

// RFC 4787 REQ-12: ICMP errors of any router reach the host, and end no mapping.
func TestRFC4787REQ12ICMPEndsNoMapping(t *testing.T) {
	prove(t, "4787-12", plain, func(g *gateway) error {
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "there")
		if err != nil {
			return err
		}
		sniff, attacker := g.wire("i1"), g.wire("o2") // o2 acts as a router on the path
		for _, e := range []struct{ kind, code uint8 }{{3, 1}, {3, 3}, {11, 0}} {
			if err := attacker.send("ip4(src=%s,dst=%s)/icmp(type=%d,code=%d)/ip4(src=%s,dst=%s,ttl=9)/udp(sport=%d,dport=9)/data(5)",
				o2, seen.Addr(), e.kind, e.code, seen.Addr(), o1, seen.Port()); err != nil {
				return err
			}
			p, err := sniff.await(g.patience, icmp(e.kind, e.code))
			if err != nil {
				return fmt.Errorf("icmp %d/%d did not reach the inside host: %w", e.kind, e.code, err)
			}
			u, _ := packet.Find[*packet.UDP](p)
			if u == nil || u.SrcPort != 4000 {
				return fmt.Errorf("the quoted packet is not as the host sent it: %s", p)
			}
		}
		if err := g.back(out, seen, in, g.patience); err != nil {
			return err
		}
		again, err := g.exchange(in, o1+":9", out, "still")
		if err == nil && again != seen {
			err = fmt.Errorf("the mapping changed from %v to %v", seen, again)
		}
		return err
	})
}

// RFC 4787 REQ-13: a packet with DF that does not fit causes an error with the MTU.
func TestRFC4787REQ13TooBig(t *testing.T) {
	prove(t, "4787-13", plain, func(g *gateway) error {
		w := g.wire("i1")
		var p packet.Packet
		var err error
		for range 5 { // the first may wait for a neighbour
			if err := w.send("ip4(src=%s,dst=%s,df)/udp(sport=4000,dport=9)/data(1430)", i1, o1); err != nil {
				return err
			}
			if p, err = w.await(g.again, icmp(3, 4)); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
		if m, _ := packet.Find[*packet.ICMP](p); m.MTU() != wanMTU {
			return fmt.Errorf("the MTU told is %d, want %d", m.MTU(), wanMTU)
		}
		return nil
	})
}

// RFC 4787 REQ-13a: without DF it is fragmented.
func TestRFC4787REQ13aFragments(t *testing.T) {
	prove(t, "4787-13a", plain, func(g *gateway) error {
		w, out := g.wire("i1"), g.udp("o1", o1+":9")
		return g.retry(out, 1430, func() error {
			return w.send("ip4(src=%s,dst=%s,id=77)/udp(sport=4000,dport=9)/data(1430)", i1, o1)
		})
	})
}

// retry sends until a datagram of the given size arrives.
func (g *gateway) retry(at net.PacketConn, size int, send func() error) error {
	came := "nothing" // or the size of an earlier datagram that was sent twice
	for deadline := time.Now().Add(g.patience); time.Now().Before(deadline); {
		if err := send(); err != nil {
			return err
		}
		for _, text, err := receive(at, g.again); err == nil; _, text, err = receive(at, g.again) {
			if len(text) == size {
				return nil
			}
			came = fmt.Sprintf("%d bytes", len(text))
		}
	}
	return fmt.Errorf("want %d bytes, %s came", size, came)
}

// RFC 4787 REQ-14: fragments in order.
func TestRFC4787REQ14FragmentsInOrder(t *testing.T) {
	prove(t, "4787-14", plain, func(g *gateway) error { return g.fragments("i1", fromI1, g.udp("o1", o1+":9"), false) })
}

// RFC 4787 REQ-14: fragments out of order.
func TestRFC4787REQ14FragmentsOutOfOrder(t *testing.T) {
	prove(t, "4787-14b", plain, func(g *gateway) error { return g.fragments("i1", fromI1, g.udp("o1", o1+":9"), true) })
}

// The same for a service, from the outside.
func TestRFC4787REQ14FragmentsToService(t *testing.T) {
	const service = "services:\n  - {name: echo, listen: [{address: 203.0.113.9, ports: [9]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}\n"
	prove(t, "4787-14s", service, func(g *gateway) error {
		return g.fragments("o1", "ip4(src="+o1+",dst=203.0.113.9)/udp(sport=4000,dport=9)/data(2000)", g.udp("i1", i1+":9"), true)
	})
}

const fromI1 = "ip4(src=" + i1 + ",dst=" + o1 + ")/udp(sport=4000,dport=9)/data(2000)"

// fragments sends a datagram of 2000 bytes in pieces of 800, forwards or backwards.
func (g *gateway) fragments(from, datagram string, at net.PacketConn, reversed bool) error {
	w, id := g.wire(from), uint32(100)
	return g.retry(at, 2000, func() error {
		id++
		pieces, err := packet.Fragments(w.frame(packet.MustText(datagram)), 800, id)
		if err != nil {
			return err
		}
		if reversed {
			slices.Reverse(pieces)
		}
		for _, p := range pieces {
			if err := w.sendFrame(p); err != nil {
				return err
			}
		}
		return nil
	})
}

// RFC 4787 REQ-14a: a flood of fragments without a first one does not affect other fragments.
func TestRFC4787REQ14aFragmentFlood(t *testing.T) {
	prove(t, "4787-14a", plain, func(g *gateway) error {
		w := g.wire("i2")
		in, out := g.udp("i1", i1+":4000"), g.udp("o1", o1+":9")
		seen, err := g.exchange(in, o1+":9", out, "before")
		if err != nil {
			return err
		}
		for id := range uint32(3000) {
			if err := w.send("ip4(src=%s,dst=%s,off=800,mf,id=%d,proto=17)/data(64)", i2, o1, id); err != nil {
				return err
			}
		}
		if again, err := g.exchange(in, o1+":9", out, "after"); err != nil || again != seen {
			return fmt.Errorf("the mapping changed from %v to %v, %v", seen, again, err)
		}
		return nil
	})
}

// RFC 4787 REQ-7: an outside host has the address of an inside host. A third host talks to it through the
// gateway, which distinguishes the two networks by the interface. The inside host can still reach the outside.
func TestRFC4787REQ7Overlap(t *testing.T) {
	prove(t, "4787-7", snat("in: lan0"), func(g *gateway) error {
		for _, c := range [][2]string{
			{"o2", "ip address add " + i2 + "/32 dev eth0"},
			{"i1", "ip route add " + i2 + "/32 via 10.0.2.1"},
			{"gateway", "ip route add " + i2 + "/32 dev wan0 table 100"},
			{"gateway", "ip rule add iif lan0 lookup 100"},
		} {
			f := strings.Fields(c[1])
			if out, err := g.Node(c[0]).Command(g.t.Context(), f[0], f[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s on %s: %w: %s", c[1], c[0], err, out)
			}
		}
		in, twin := g.udp("i1", i1+":4000"), g.udp("o2", i2+":9")
		seen, err := g.exchange(in, i2+":9", twin, "to the outer one")
		if err != nil {
			return err
		}
		if seen.Addr() != netip.MustParseAddr(pool1) {
			return fmt.Errorf("the outer host saw %v, want the pool's address", seen)
		}
		if err := g.back(twin, seen, in, g.patience); err != nil {
			return err
		}
		inner, out := g.udp("i2", i2+":9"), g.udp("o1", o1+":9")
		if seen, err = g.exchange(inner, o1+":9", out, "from the inner one"); err != nil {
			return err
		}
		return g.back(out, seen, inner, g.patience)
	})
}
