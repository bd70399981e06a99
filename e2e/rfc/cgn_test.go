// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/packet"
)

func udpAddr(a netip.AddrPort) *net.UDPAddr { return net.UDPAddrFromAddrPort(a) }

// RFC 6888 REQ-3: a pool of separate ranges.
func TestRFC6888REQ3DisjointPool(t *testing.T) {
	prove(t, "6888-3", strings.Replace(snat("ports: 2000-2001"), "[203.0.113.1]", "[203.0.113.1, 203.0.113.77]", 1), func(g *gateway) error {
		seen := map[netip.Addr]bool{}
		for host, address := range map[string]string{"i1": i1, "i2": i2} {
			for port := 4000; port < 4002; port++ {
				s, err := g.sources(g.udp(host, fmt.Sprintf("%s:%d", address, port)), o1+":9")
				if err != nil {
					return err
				}
				seen[s[0].Addr()] = true
			}
		}
		if len(seen) != 2 {
			return fmt.Errorf("four flows over two ports each came from %v", seen)
		}
		return nil
	})
}

// RFC 6888 REQ-4: the ports of one subscriber are limited, independent of other subscribers.
func TestRFC6888REQ4PortLimit(t *testing.T) {
	prove(t, "6888-4", snat("ports-per-client: 3"), limited(3))
}

// RFC 6888 REQ-4C: the rate of new connections of one subscriber is limited, independent of other subscribers.
func TestRFC6888REQ4cNewMappings(t *testing.T) {
	prove(t, "6888-4c", snat("new-connections-per-client: 1/minute"), limited(1))
}

// limited opens connections from a number of ports of a host. One more is refused, but a connection of another
// host is not.
func limited(ports int) func(*gateway) error {
	return func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		for i := range ports {
			if _, err := g.exchange(g.udp("i1", fmt.Sprintf("%s:%d", i1, 4000+i)), o1+":9", out, "x"); err != nil {
				return err
			}
		}
		drain(out)
		more := g.udp("i1", fmt.Sprintf("%s:%d", i1, 4000+ports))
		if _, err := more.WriteTo([]byte("too many"), udpAddr(netip.MustParseAddrPort(o1+":9"))); err != nil {
			return err
		}
		if _, text, err := receive(out, g.silence); err == nil && text == "too many" {
			return fmt.Errorf("connection %d of %d got through", ports+1, ports)
		}
		_, err := g.exchange(g.udp("i2", i2+":4000"), o1+":9", out, "another host")
		return err
	}
}

// RFC 6888 REQ-5: sessions of one subscriber are limited.
func TestRFC6888REQ5SessionLimit(t *testing.T) {
	prove(t, "6888-5", snat("connections-per-client: 2"), func(g *gateway) error {
		in := g.udp("i1", i1+":4000")
		if _, err := g.sources(in, o1+":9", o1+":10"); err != nil {
			return err
		}
		out := g.udp("o1", o1+":11")
		if _, err := in.WriteTo([]byte("too many"), udpAddr(netip.MustParseAddrPort(o1+":11"))); err != nil {
			return err
		}
		if _, _, err := receive(out, g.silence); err == nil {
			return fmt.Errorf("the third session of two got through")
		}
		return nil
	})
}

// RFC 6888 REQ-6: listed destinations see the inside address.
func TestRFC6888REQ6NoTranslation(t *testing.T) {
	prove(t, "6888-6", snat("except: [198.51.100.21/32]"), func(g *gateway) error {
		in, out := g.wire("i1"), g.wire("o2")
		take := func(p packet.Packet) bool { u, ok := packet.Find[*packet.UDP](p); return ok && u.DstPort == 9 }
		for range 5 {
			if err := in.send("ip4(src=%s,dst=%s)/udp(sport=4000,dport=9)", i1, o2); err != nil {
				return err
			}
			p, err := out.await(g.again, take)
			if err != nil {
				continue
			}
			if ip, _ := packet.Find[*packet.IPv4](p); ip.Src != netip.MustParseAddr(i1) {
				return fmt.Errorf("the listed destination saw %s", ip.Src)
			}
			seen, err := g.sources(g.udp("i1", i1+":4000"), o1+":9")
			if err == nil && seen[0].Addr() != netip.MustParseAddr(pool1) {
				err = fmt.Errorf("another destination saw %v", seen[0])
			}
			return err
		}
		return fmt.Errorf("nothing arrived at the listed destination")
	})
}

// RFC 6888 REQ-8: a freed port has a hold-down.
func TestRFC6888REQ8PortHold(t *testing.T) {
	prove(t, "6888-8", snat("ports: 2000-2000")+"timeouts: {udp: 4s, force: true}\n", func(g *gateway) error {
		if _, err := g.sources(g.udp("i1", i1+":4000"), o1+":9"); err != nil {
			return err
		}
		for deadline := time.Now().Add(2 * g.patience); ; time.Sleep(20 * time.Millisecond) {
			if _, err := g.flow(netip.MustParseAddrPort(i1 + ":4000")); err != nil {
				break // it has ended
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("the flow does not end")
			}
		}
		out := g.udp("o1", o1+":10")
		if _, err := g.udp("i2", i2+":4000").WriteTo([]byte("x"), udpAddr(netip.MustParseAddrPort(o1+":10"))); err != nil {
			return err
		}
		if from, _, err := receive(out, g.silence); err == nil {
			return fmt.Errorf("another host got the freed port at once: %v", from)
		}
		return nil
	})
}

// RFC 6888 REQ-10: pool, sessions and drops can be read.
func TestRFC6888REQ10Manageable(t *testing.T) {
	prove(t, "6888-10", plain, func(g *gateway) error {
		if _, err := g.sources(g.udp("i1", i1+":4000"), o1+":9"); err != nil {
			return err
		}
		rules, err := g.d.NAT(g.t.Context())
		if err != nil {
			return err
		}
		if len(rules) != 1 || rules[0].Packets == 0 {
			return fmt.Errorf("the rule's counters say %+v", rules)
		}
		flows, err := g.d.Flows(g.t.Context(), nil)
		if err == nil && flows.Total == 0 {
			err = fmt.Errorf("no flow is listed")
		}
		return err
	})
}

// RFC 6888 REQ-12: the log holds no destinations.
func TestRFC6888REQ12NoDestinationsLogged(t *testing.T) {
	prove(t, "6888-12", plain, func(g *gateway) error {
		in := g.udp("i1", i1+":4000")
		for range 3 {
			if _, err := g.sources(in, o1+":9", o2+":9"); err != nil {
				return err
			}
		}
		if log := g.d.Log(); strings.Contains(log, o1) || strings.Contains(log, o2) {
			return fmt.Errorf("a destination stands in the log:\n%s", log)
		}
		return nil
	})
}

// RFC 6888 REQ-13: every port of the pool is used before a flow is refused.
func TestRFC6888REQ13PortUse(t *testing.T) {
	prove(t, "6888-13", snat("ports: 2000-2099"), func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		used := map[netip.AddrPort]bool{}
		for port := 4000; port < 4100; port++ {
			host, address := "i1", i1
			if port%2 == 1 {
				host, address = "i2", i2
			}
			from, err := g.exchange(g.udp(host, fmt.Sprintf("%s:%d", address, port)), o1+":9", out, "x")
			if err != nil {
				return fmt.Errorf("after %d of 100 ports: %w", len(used), err)
			}
			used[from] = true
		}
		if len(used) != 100 {
			return fmt.Errorf("100 hosts' ports were seen as %d", len(used))
		}
		return nil
	})
}

// RFC 6888 REQ-15: ports are hard to guess: they are not consecutive.
func TestRFC6888REQ15HardToGuess(t *testing.T) {
	prove(t, "6888-15", plain, func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		if _, err := g.exchange(g.udp("i2", i2+":4000"), o1+":9", out, "x"); err != nil { // so that i1 cannot keep its port
			return err
		}
		near, last := 0, 0
		for port := 30000; port < 30040; port++ {
			a, err := g.exchange(g.udp("i1", fmt.Sprintf("%s:%d", i1, port)), o1+":9", out, "x")
			if err != nil {
				return err
			}
			if step := int(a.Port()) - last; step >= -2 && step <= 2 {
				near++
			}
			last = int(a.Port())
		}
		if near > 4 {
			return fmt.Errorf("%d of 40 ports stand next to the one before", near)
		}
		return nil
	})
}
