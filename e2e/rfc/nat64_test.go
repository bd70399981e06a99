// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

// RFC 6146 §3.5.2: a TCP connection between real IPv6 and IPv4 stacks.
func TestRFC6146TCP(t *testing.T) {
	prove(t, "6146-3.5.2", ports64, func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4001", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		if from := remote(server); from.Addr() != netip.MustParseAddr(pool1) || from.Port()%2 != 1 {
			return fmt.Errorf("the server saw %v, want the pool's address and an odd port", from)
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		return g.timeout(netip.MustParseAddrPort("["+i1six+"]:4001"), 2*time.Hour+4*time.Minute)
	})
}

// RFC 6146 §3.5.2.2: an established connection that is silent for its timeout is probed. If the host still has
// it, the host answers and the connection continues.
func TestRFC6146Probe(t *testing.T) {
	prove(t, "6146-3.5.2p", ports64+"timeouts: {tcp-established: 4s, tcp-transitory: 4s, force: true}\n", func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4001", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		in := g.wire("i1")
		for range 2 { // the second probe shows that the first was answered
			if _, err := in.await(g.patience, func(p packet.Packet) bool {
				t, ok := packet.Find[*packet.TCP](p)
				return ok && t.DstPort == 4001 && t.Flags == packet.ACK && t.Seq == 0 && t.Ack == 0
			}); err != nil {
				return fmt.Errorf("the probe: %w", err)
			}
		}
		if err := g.transfer(client, server); err != nil {
			return fmt.Errorf("after two probes: %w", err)
		}
		return nil
	})
}

// RFC 6146 §3.5.1: UDP, one mapping for all destinations, and the timer.
func TestRFC6146UDP(t *testing.T) {
	prove(t, "6146-3.5.1", ports64, func(g *gateway) error {
		in := g.udp("i1", "["+i1six+"]:4000")
		a, b := g.udp("o1", o1+":9"), g.udp("o1", o1+":10")
		first, err := g.exchange(in, "["+o1in64+"]:9", a, "a")
		if err != nil {
			return err
		}
		second, err := g.exchange(in, "["+o1in64+"]:10", b, "b")
		if err != nil {
			return err
		}
		if first != second {
			return fmt.Errorf("seen as %v and %v", first, second)
		}
		if err := g.back(g.udp("o2", o2+":7777"), first, in, g.patience); err != nil {
			return err
		}
		return g.timeout(netip.MustParseAddrPort("["+i1six+"]:4000"), 5*time.Minute)
	})
}

// RFC 6146 §3.1: bindings of UDP and TCP are separate.
func TestRFC6146SeparateBindings(t *testing.T) {
	prove(t, "6146-3.1", ports64, func(g *gateway) error {
		if _, err := g.exchange(g.udp("i1", "["+i1six+"]:4000"), "["+o1in64+"]:9", g.udp("o1", o1+":9"), "x"); err != nil {
			return err
		}
		client, server, err := g.connect("i1", "["+i1six+"]:4000", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		return g.transfer(client, server)
	})
}

// RFC 6146 §3.5.3: ping.
func TestRFC6146Ping(t *testing.T) {
	prove(t, "6146-3.5.3", ports64, func(g *gateway) error {
		return g.Node("i1").Ping(g.t.Context(), netip.MustParseAddr(i1six), netip.MustParseAddr(o1in64))
	})
}

// RFC 6146 §3.4: fragments of an IPv6 datagram reach the IPv4 host.
func TestRFC6146Fragments(t *testing.T) {
	prove(t, "6146-3.4", ports64, func(g *gateway) error {
		in, out := g.udp("i1", "["+i1six+"]:4000"), g.udp("o1", o1+":9")
		dst := udpAddr(netip.MustParseAddrPort("[" + o1in64 + "]:9"))
		return g.retry(out, 3000, func() error {
			_, err := in.WriteTo(make([]byte, 3000), dst)
			return err
		})
	})
}

// RFC 6146 §3.4: fragments that arrive before the first one are held.
func TestRFC6146FragmentsOutOfOrder(t *testing.T) {
	prove(t, "6146-3.4h", ports64, func(g *gateway) error {
		return g.fragments("i1", "ip6(src="+i1six+",dst="+o1in64+")/udp(sport=4000,dport=9)/data(2000)", g.udp("o1", o1+":9"), true)
	})
}

// RFC 6146 §3.8: hairpinning through the pool address.
func TestRFC6146Hairpin(t *testing.T) {
	prove(t, "6146-3.8", ports64, func(g *gateway) error {
		a, b, out := g.udp("i1", "["+i1six+"]:4000"), g.udp("i2", "["+i2six+"]:5000"), g.udp("o1", o1+":9")
		outer, err := g.exchange(b, "["+o1in64+"]:9", out, "b")
		if err != nil {
			return err
		}
		seen, err := g.exchange(a, fmt.Sprintf("[64:ff9b::cb00:7101]:%d", outer.Port()), b, "hairpin")
		if err != nil {
			return err
		}
		if seen.Addr() != netip.MustParseAddr("64:ff9b::cb00:7101") {
			return fmt.Errorf("the receiver saw %v, want the pool's address in the prefix", seen)
		}
		return nil
	})
}

// RFC 7915 §5.2: a real IPv6 stack understands the error that an IPv4 host sent.
func TestRFC7915ErrorToRealStack(t *testing.T) {
	prove(t, "7915-5.2s", ports64, func(g *gateway) error {
		in := g.udp("i1", "["+i1six+"]:4000")
		sniff := g.wire("i1")
		take := func(p packet.Packet) bool {
			m, ok := packet.Find[*packet.ICMP](p)
			return ok && m.V6 && m.Type == 1 && m.Code == 4
		}
		for range 5 {
			if _, err := in.WriteTo([]byte("anybody?"), udpAddr(netip.MustParseAddrPort("["+o1in64+"]:1"))); err != nil {
				return nil // the host's stack has processed the error and refused the next datagram
			}
			if _, err := sniff.await(g.again, take); err == nil {
				return nil
			}
		}
		return errSilence
	})
}

// RFC 7915 §4.2: "packet too big" for the IPv4 side's MTU reaches the TCP stack, which shrinks its segments.
func TestRFC7915PathMTU(t *testing.T) {
	prove(t, "7915-4.3", ports64, func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4000", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		go func() { _, _ = client.Write(make([]byte, 100_000)) }() // the reader reports a failure
		if err := server.SetReadDeadline(time.Now().Add(g.patience)); err != nil {
			return err
		}
		b := make([]byte, 65536)
		for n := 0; n < 100_000; {
			m, err := server.Read(b)
			if err != nil {
				return fmt.Errorf("after %d bytes: %w", n, err)
			}
			n += m
		}
		return nil
	})
}

// opened exchanges a datagram through nat64 and returns the outside endpoint, with
// the wires of both sides.
func (g *gateway) opened() (outer netip.AddrPort, in, out *wire, err error) {
	in, out = g.wire("i1"), g.wire("o1")
	outer, err = g.exchange(g.udp("i1", "["+i1six+"]:4000"), "["+o1in64+"]:9", g.udp("o1", o1+":9"), "x")
	return
}

// RFC 7915 §4.1: traffic class from the TOS, no flow label, one hop less, and no fragment header.
func TestRFC7915Header6(t *testing.T) {
	prove(t, "7915-4.1", ports64, func(g *gateway) error {
		outer, in, out, err := g.opened()
		if err != nil {
			return err
		}
		for _, df := range []string{"", ",df"} {
			p, err := out.carried(in, udpTo(4000), "ip4(src=%s,dst=%s,tos=0xb9,ttl=33,id=77%s)/udp(sport=9,dport=%d)/data(8)", o1, pool1, df, outer.Port())
			if err != nil {
				return err
			}
			ip, ok := p[1].(*packet.IPv6)
			if !ok {
				return fmt.Errorf("not IPv6: %s", p)
			}
			if _, ok := p[2].(*packet.UDP); !ok || ip.TrafficClass != 0xb9 || ip.FlowLabel != 0 || ip.HopLimit != 32 {
				return fmt.Errorf("want traffic class 0xb9, flow label 0, hop limit 32 and UDP behind the header: %s", p)
			}
		}
		return nil
	})
}

// RFC 7915 §4.1: IPv4 options are dropped; a source route with remaining hops is refused.
func TestRFC7915Options(t *testing.T) {
	prove(t, "7915-4.1o", ports64, func(g *gateway) error {
		outer, in, out, err := g.opened()
		if err != nil {
			return err
		}
		// Router alert; a source route without remaining hops.
		for _, options := range []string{"0x94040000", "0x830708c612000500"} {
			p, err := out.carried(in, udpTo(4000), "ip4(src=%s,dst=%s,opts=%s)/udp(sport=9,dport=%d)/data(8)", o1, pool1, options, outer.Port())
			if err != nil {
				return fmt.Errorf("options %s: %w", options, err)
			}
			if _, ok := p[2].(*packet.UDP); !ok {
				return fmt.Errorf("options %s: want UDP behind the IPv6 header: %s", options, p)
			}
		}
		_, err = out.carried(out, icmp(3, 5), "ip4(src=%s,dst=%s,opts=0x830704c612000500)/udp(sport=9,dport=%d)/data(8)", o1, pool1, outer.Port())
		return err
	})
}

// RFC 7915 §5.1: extension headers are dropped. A routing header with segments left is refused, and the error
// points at that field.
func TestRFC7915ExtensionHeaders(t *testing.T) {
	prove(t, "7915-5.1e", ports64, func(g *gateway) error {
		_, in, out, err := g.opened()
		if err != nil {
			return err
		}
		for _, headers := range []string{"hbh()", "dstopts()", "routing(left=0,data=0x00000000fd000002000000000000000000000005)", "hbh()/dstopts()/routing(left=0,data=0x00000000fd000002000000000000000000000005)/dstopts()"} {
			p, err := in.carried(out, udpTo(9), "ip6(src=%s,dst=%s)/%s/udp(sport=4000,dport=9)/data(8)", i1six, o1in64, headers)
			if err != nil {
				return fmt.Errorf("%s: %w", headers, err)
			}
			if ip, ok := p[1].(*packet.IPv4); !ok || len(ip.Options) > 0 {
				return fmt.Errorf("%s: want a plain IPv4 header: %s", headers, p)
			}
		}
		for headers, pointer := range map[string]uint32{"": 43, "dstopts()/": 51} {
			p, err := in.carried(in, icmp(4, 0), "ip6(src=%s,dst=%s)/%srouting(left=1,data=0x00000000fd000002000000000000000000000005)/udp(sport=4000,dport=9)/data(8)",
				i1six, o1in64, headers)
			if err != nil {
				return fmt.Errorf("routing header with a segment left: %w", err)
			}
			if m, _ := packet.Find[*packet.ICMP](p); m.Rest != pointer {
				return fmt.Errorf("the error points at byte %d, want %d", m.Rest, pointer)
			}
		}
		return nil
	})
}

// RFC 7915 §4, §4.1: IPv4 packets without DF arrive in fragments of the IPv6 minimum MTU: datagrams, fragments
// and pings.
func TestRFC7915LowestMTU(t *testing.T) {
	prove(t, "7915-4.1f", "lowest-ipv6-mtu: 1280\n"+ports64, func(g *gateway) error {
		if err := g.toIPv6InPieces(1280); err != nil {
			return err
		}
		w := g.wire("i1")
		echo := func(p packet.Packet) bool {
			_, cut := packet.Find[*packet.Fragment](p)
			m, ok := packet.Find[*packet.ICMP](p)
			return cut && ok && m.Type == 129
		}
		_, err := w.carried(w, echo, "ip6(src=%s,dst=%s)/icmp6(type=echo,id=77,seq=1)/data(1300)", i1six, o1in64)
		if err != nil {
			err = fmt.Errorf("the answer to a ping: %w", err)
		}
		return err
	})
}

// The same if the next link has the minimum MTU.
func TestRFC7915SmallLink(t *testing.T) {
	prove(t, "7915-4.1f", ports64, func(g *gateway) error {
		for node, iface := range map[string]string{"gateway": "lan0", "i1": "eth0"} {
			if out, err := g.Node(node).Command(g.t.Context(), "ip", "link", "set", iface, "mtu", "1300").CombinedOutput(); err != nil {
				return fmt.Errorf("ip link: %w: %s", err, out)
			}
		}
		return g.toIPv6InPieces(1300)
	})
}

func (g *gateway) toIPv6InPieces(most int) error {
	in, out := g.udp("i1", "["+i1six+"]:4000"), g.udp("o1", o1+":9")
	outer, err := g.exchange(in, "["+o1in64+"]:9", out, "x")
	if err != nil {
		return err
	}
	sniff, raw := g.wire("i1"), g.wire("o1")
	for _, size := range []int{most - 48 + 1, wanMTU - 28} { // the first is one byte too large
		err = g.retry(in, size, func() error { // the first waits until the daemon has loaded its program
			return raw.send("ip4(src=%s,dst=%s,id=78)/udp(sport=9,dport=%d)/data(%d)", o1, pool1, outer.Port(), size)
		})
		if err != nil {
			return fmt.Errorf("a datagram of %d bytes: %w", size, err)
		}
	}
	err = g.retry(in, 3000, func() error { // the host fragments it
		_, err := out.WriteTo(make([]byte, 3000), udpAddr(outer))
		return err
	})
	if err != nil {
		return fmt.Errorf("a datagram in fragments: %w", err)
	}
	pieces := 0
	long := func(p packet.Packet) bool {
		if f, ok := packet.Find[*packet.Fragment](p); ok && f.ID == 78 {
			pieces++
		}
		return len(p.Build())-14 > most
	}
	if p, err := sniff.await(g.silence, long); err == nil {
		return fmt.Errorf("a packet of %d bytes, want at most %d: %s", len(p.Build())-14, most, p)
	}
	if pieces < 4 {
		return fmt.Errorf("%d fragments with the datagrams' identification, want two of each", pieces)
	}
	return nil
}
