// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/packet"
)

// stateless maps i1 and i2 (fd00:2::2, fd00:2::3) to 203.0.113.18 and .19. IPv4 hosts have addresses in the
// prefix.
const stateless = "nat:\n  - {name: bih, type: siit, prefix: \"64:ff9b::/96\", eam: [{ipv4: 203.0.113.16/28, ipv6: \"fd00:2::/124\"}]}\n"

const (
	i1four   = "203.0.113.18"
	i2in64   = "64:ff9b::cb00:7113" // 203.0.113.19
	i1seenBy = "64:ff9b::cb00:7112" // 203.0.113.18 for i2
)

// RFC 7757 §3: TCP between an IPv6 host with an explicit mapping and an IPv4 host, opened by either. Path MTU
// discovery works with different MTUs.
func TestRFC7757ExplicitMapping(t *testing.T) {
	prove(t, "7757-3", stateless, func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4000", "["+o1in64+"]:80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		if from := remote(server); from != netip.MustParseAddrPort(i1four+":4000") {
			return fmt.Errorf("the IPv4 server saw %v, want the explicit mapping and the same port", from)
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		client, server, err = g.connect("o1", o1+":4001", i1four+":81", g.listen("i1", "["+i1six+"]:81"))
		if err != nil {
			return fmt.Errorf("from the IPv4 side: %w", err)
		}
		if from := remote(server); from != netip.MustParseAddrPort("["+o1in64+"]:4001") {
			return fmt.Errorf("the IPv6 server saw %v, want the IPv4 host in the prefix", from)
		}
		return g.transfer(client, server)
	})
}

// RFC 7757 §4.2.2: two hosts with explicit mappings reach each other by their IPv4 addresses.
func TestRFC7757Hairpin(t *testing.T) {
	prove(t, "7757-4", stateless, func(g *gateway) error {
		client, server, err := g.connect("i1", "["+i1six+"]:4000", "["+i2in64+"]:80", g.listen("i2", "["+i2six+"]:80"))
		if err != nil {
			return err
		}
		if from := remote(server); from != netip.MustParseAddrPort("["+i1seenBy+"]:4000") {
			return fmt.Errorf("the server saw %v, want the client in the prefix", from)
		}
		return g.transfer(client, server)
	})
}

// RFC 7915 §4 and §5 without state: ping, and datagrams in fragments, both ways.
func TestRFC7915Stateless(t *testing.T) {
	prove(t, "7915-sl", stateless, func(g *gateway) error {
		if err := g.Node("i1").Ping(g.t.Context(), netip.MustParseAddr(i1six), netip.MustParseAddr(o1in64)); err != nil {
			return err
		}
		in, out := g.udp("i1", "["+i1six+"]:4000"), g.udp("o1", o1+":9")
		err := g.retry(out, 3000, func() error {
			_, err := in.WriteTo(make([]byte, 3000), udpAddr(netip.MustParseAddrPort("["+o1in64+"]:9")))
			return err
		})
		if err != nil {
			return fmt.Errorf("fragments from IPv6: %w", err)
		}
		err = g.retry(in, 3000, func() error {
			_, err := out.WriteTo(make([]byte, 3000), udpAddr(netip.MustParseAddrPort(i1four+":4000")))
			return err
		})
		if err != nil {
			return fmt.Errorf("fragments from IPv4: %w", err)
		}
		return nil
	})
}

// RFC 6791 §3: the error of an IPv6 router without an IPv4 address reaches the IPv4 host from an address of the
// gateway.
func TestRFC6791UnmappedRouter(t *testing.T) {
	prove(t, "7915-6", stateless, func(g *gateway) error {
		in, out := g.wire("i1"), g.wire("o1")
		take := func(p packet.Packet) bool {
			m, ok := packet.Find[*packet.ICMP](p)
			return ok && !m.V6 && m.Type == 11
		}
		for range 5 {
			err := in.send("ip6(src=fd00:a::9,dst=%s)/icmp6(type=time-exceeded)/ip6(src=%s,dst=%s,hl=1)/udp(sport=4000,dport=53)/data(9)",
				o1in64, o1in64, i1six)
			if err != nil {
				return err
			}
			p, err := out.await(g.again, take)
			if err != nil {
				continue
			}
			if ip, _ := packet.Find[*packet.IPv4](p); ip.Src != netip.MustParseAddr("198.51.100.1") {
				return fmt.Errorf("the error came from %s, want the gateway's own address", ip.Src)
			}
			return nil
		}
		return errSilence
	})
}
