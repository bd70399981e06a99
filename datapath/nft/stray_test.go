// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// reasons returns the number of packets dropped for a reason, in both families.
func (b *bench) reasons(reason string) (n uint64) {
	b.Helper()
	counters, err := b.d.Counters(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	for _, r := range counters.Reasons {
		if r.Reason == reason {
			n += r.Packets
		}
	}
	return n
}

// segmentsAt listens for TCP segments to an address of a node. The returned function reports whether a source
// has sent one.
func (b *bench) segmentsAt(node, address string) func(from string) bool {
	b.Helper()
	network := "ip4:tcp"
	if addr(address).Is6() {
		network = "ip6:tcp"
	}
	var c *net.IPConn
	err := b.lab.Node(node).Do(func() (err error) {
		c, err = net.ListenIP(network, &net.IPAddr{IP: addr(address).AsSlice()})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return func(from string) bool {
		buf := make([]byte, 2000)
		for {
			_ = c.SetReadDeadline(time.Now().Add(silence))
			_, sender, err := c.ReadFrom(buf)
			if err != nil {
				return false
			}
			if sender.String() == from {
				return true
			}
		}
	}
}

// defaultRoute routes unknown destinations of the gateway to the client.
func (b *bench) defaultRoute() {
	b.Helper()
	for _, args := range []string{"route add default via 10.0.1.2", "-6 route add default via fd00:1::2"} {
		if out, err := b.gateway.Command(context.Background(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			b.Fatalf("ip %s: %s", args, out)
		}
	}
}

const synFIN = 0x03 // no TCP sends this combination, so connection tracking classifies it as invalid

// TestSegmentsOfNoConnectionStay: invalid segments are not translated. They must reach neither the other side
// with an inside address, nor the host's own stack, which would answer with a reset.
func TestSegmentsOfNoConnectionStay(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.defaultRoute()
	server, client := map[string]string{"ipv4": "10.0.2.2", "ipv6": "fd00:2::2"}, map[string]string{"ipv4": "10.0.1.2", "ipv6": "fd00:1::2"}
	gateway := map[string]string{"ipv4": "10.0.2.1", "ipv6": "fd00:2::1"}
	dnat := one(web(config.ModeDNAT, config.SchedulerRR))
	full := &config.Config{}
	for family := range virtual {
		s := web(config.ModeFullNAT, config.SchedulerRR)
		oneFamily(&s, family)
		s.Name = family
		full.Services = append(full.Services, s)
	}
	ranged := web(config.ModeDNAT, config.SchedulerRR)
	for i := range ranged.Listen {
		ranged.Listen[i].Ports = []flow.Ports{{First: 8000, Last: 8080}}
	}
	for i := range ranged.Backends {
		ranged.Backends[i].Port = 0
	}
	inside := []netip.Prefix{prefix("10.0.2.0/24"), prefix("fd00:2::/64")}
	masked := &config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: inside, Out: "wan0"}}}
	static := &config.Config{NAT: []config.NATRule{
		{Name: "dmz", Type: config.NATStatic, External: prefix("198.51.100.0/24"), Internal: prefix("10.0.2.0/24"), Out: "wan0"},
		{Name: "dmz6", Type: config.NATStatic, External: prefix("2001:db8:1::/64"), Internal: prefix("fd00:2::/64"), Out: "wan0"},
	}}
	forward := &config.Config{}
	for family, vip := range virtual {
		to := netip.MustParseAddrPort(vip)
		l := listen(to.Addr().String(), fmt.Sprint(to.Port()))
		forward.NAT = append(forward.NAT, config.NATRule{Name: family, Type: config.NATPortForward, Protocol: flow.TCP, Listen: &l,
			To: config.Target{Address: addr(server[family]), Port: 8080}})
	}
	for _, c := range []struct {
		name string
		c    *config.Config
		to   map[string]string
	}{{"dnat", dnat, client}, {"fullnat", full, gateway}, {"a range of ports", one(ranged), client},
		{"port-forward", forward, client}, {"masquerade", masked, client}, {"static", static, client}} {
		t.Run(c.name, func(t *testing.T) {
			b.apply(c.c)
			for family, from := range server {
				before, seen := b.reasons("invalid"), b.segmentsAt("client", client[family])
				if err := b.segment("s1", netip.AddrPortFrom(addr(from), 8080).String(), netip.AddrPortFrom(addr(c.to[family]), 40000).String(), synFIN); err != nil {
					t.Fatal(err)
				}
				b.eventually(family+": the segment to be counted", func() bool { return b.reasons("invalid") == before+1 })
				if c.name != "fullnat" && seen(from) {
					t.Errorf("%s: the client got a segment from %s\n%s", family, from, b.ruleset())
				}
			}
		})
	}
	t.Run("from the client", func(t *testing.T) {
		b.apply(dnat)
		for family, vip := range virtual {
			before := b.reasons("invalid")
			if err := b.segment("client", netip.AddrPortFrom(addr(client[family]), 40000).String(), vip, synFIN); err != nil {
				t.Fatal(err)
			}
			b.eventually(family+": the segment to be counted", func() bool { return b.reasons("invalid") == before+1 })
		}
	})
	t.Run("of others", func(t *testing.T) {
		b.apply(dnat)
		for family, from := range server {
			seen := b.segmentsAt("client", client[family])
			if err := b.segment("s1", netip.AddrPortFrom(addr(from), 22).String(), netip.AddrPortFrom(addr(client[family]), 40000).String(), synFIN); err != nil {
				t.Fatal(err)
			}
			if !seen(from) {
				t.Errorf("%s: a segment from a port that no service has did not arrive", family)
			}
		}
	})
}

// TestUnservedPortsAreAnswered: a router routes virtual addresses to the gateway, whose default route points
// back to this router. Packets without a listener must end at the gateway.
func TestUnservedPortsAreAnswered(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	b.defaultRoute()
	for _, mode := range []config.Mode{config.ModeDNAT, config.ModeFullNAT, config.ModeStateless, config.ModeDSR} {
		for _, answer := range []config.WhenDown{config.WhenDownReset, config.WhenDownReject, config.WhenDownDrop} {
			t.Run(fmt.Sprint(mode, " ", answer), func(t *testing.T) {
				s := web(mode, config.SchedulerSourceHash)
				s.WhenDown = answer
				if mode == config.ModeDSR {
					for i := range s.Backends {
						s.Backends[i].Port = 0
					}
				}
				for family, vip := range virtual {
					half := s
					half.Listen, half.Backends = slices.Clone(s.Listen), slices.Clone(s.Backends)
					oneFamily(&half, family)
					b.apply(one(half))
					to, before := netip.AddrPortFrom(netip.MustParseAddrPort(vip).Addr(), 81).String(), b.reasons("unserved")
					for _, network := range []string{"tcp", "udp"} {
						err := b.refusal(answer == config.WhenDownDrop, network, to)
						if answer == config.WhenDownDrop && !errors.Is(err, context.DeadlineExceeded) || answer != config.WhenDownDrop && !errors.Is(err, syscall.ECONNREFUSED) {
							t.Errorf("%s: %s: %v", family, network, err)
						}
					}
					if n := b.reasons("unserved") - before; n < 2 {
						t.Errorf("%s: %d packets counted", family, n)
					}
				}
			})
		}
	}
	t.Run("pool", func(t *testing.T) {
		s := web(config.ModeFullNAT, config.SchedulerRR)
		s.SourcePool = []config.AddressRange{pool("203.0.113.8", "203.0.113.11"), pool("2001:db8:9::8", "2001:db8:9::b")}
		for family, to := range map[string]string{"ipv4": "203.0.113.9:81", "ipv6": "[2001:db8:9::9]:81"} {
			half := s
			half.Listen, half.Backends = slices.Clone(s.Listen), slices.Clone(s.Backends)
			oneFamily(&half, family)
			b.apply(one(half))
			if err := b.refusal(true, "udp", to); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", to, err)
			}
		}
		if n := b.reasons("no-binding"); n != 2 {
			t.Errorf("%d packets counted, want 2", n)
		}
	})
	t.Run("an address of another host", func(t *testing.T) {
		s := web(config.ModeDNAT, config.SchedulerRR) // on the gateway's own network, the ports belong to s2
		s.Listen = []config.Listen{listen("10.0.2.3", "80"), listen("fd00:2::3", "80")}
		b.apply(one(s))
		for _, to := range []string{"10.0.2.3:8080", "[fd00:2::3]:8080"} {
			if a, err := b.tcp("client", "", to); err != nil || a.server != "s2" {
				t.Errorf("%s: %v, %v", to, a, err)
			}
		}
	})
	t.Run("listeners of one interface", func(t *testing.T) {
		s := web(config.ModeDNAT, config.SchedulerRR)
		for i := range s.Listen {
			s.Listen[i].Interface = "wan0"
		}
		b.apply(one(s))
		for family, vip := range virtual {
			to := netip.AddrPortFrom(netip.MustParseAddrPort(vip).Addr(), 81).String()
			if err := b.refusal(false, "tcp", to); !errors.Is(err, syscall.ECONNREFUSED) { // otherwise it would leave by wan0 again
				t.Errorf("%s: %v", family, err)
			}
		}
	})
}

// refusal returns the error that a client gets from an endpoint; context.DeadlineExceeded without an answer. If
// silent is set, it does not wait long.
func (b *bench) refusal(silent bool, network, to string) error {
	wait := trafficTimeout
	if silent {
		wait = silence
	}
	c, err := b.dialFor(wait, network, "client", "", to)
	if err == nil && network == "udp" {
		_ = c.SetDeadline(time.Now().Add(wait))
		if _, err = c.Write([]byte("hello")); err == nil {
			_, err = c.Read(make([]byte, 100))
		}
	}
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		return context.DeadlineExceeded
	}
	return err
}

// TestStatelessErrorsAndFragments: without connection tracking, fragmented datagrams reach one server, and ICMP
// errors with their quoted packets pass in both directions.
func TestStatelessErrorsAndFragments(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.udpServers(5514, "s1", "s2")
	service := config.Service{
		Name: "syslog", Protocol: flow.UDP, Mode: config.ModeStateless, Scheduler: config.SchedulerSourceHash,
		Listen: []config.Listen{listen("192.0.2.40", "514"), listen("2001:db8::40", "514")},
		Backends: []config.Backend{
			backend("a", "10.0.2.2", 5514), backend("b", "10.0.2.3", 5514), backend("a6", "fd00:2::2", 5514), backend("b6", "fd00:2::3", 5514),
		},
	}
	nobody := service
	nobody.Name, nobody.Listen = "nobody", []config.Listen{listen("192.0.2.42", "515"), listen("2001:db8::42", "515")}
	nobody.Backends = []config.Backend{backend("a", "10.0.2.2", 5515), backend("a6", "fd00:2::2", 5515)}
	for _, without := range []bool{false, true} {
		b.d.mu.Lock()
		b.d.defragments = b.d.defragments && !without
		b.d.mu.Unlock()
		b.apply(&config.Config{Services: []config.Service{service, nobody}})
		for _, vip := range []string{"192.0.2.40:514", "[2001:db8::40]:514"} {
			c, err := b.dial("udp", "client", "", vip)
			if err != nil {
				t.Fatal(err)
			}
			large := strings.Repeat("x", 4000)
			if _, err := c.Write([]byte(large)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 8000)
			n, err := c.Read(buf)
			if err != nil || !strings.HasSuffix(string(buf[:n]), large) {
				t.Errorf("%s: a datagram of 4000 bytes: %d bytes back, %v\n%s", vip, n, err, b.ruleset())
			}
			c.Close()
		}
	}
	for _, vip := range []string{"192.0.2.42:515", "[2001:db8::42]:515"} {
		if err := b.refusal(false, "udp", vip); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: the server's port unreachable did not arrive: %v\n%s", vip, err, b.ruleset())
		}
	}
	for _, c := range []struct{ network, client, server string }{
		{"ip4:icmp", "10.0.1.2", "10.0.2."}, {"ip6:ipv6-icmp", "fd00:1::2", "fd00:2::"},
	} {
		b.errorFromClient(c.network, c.client, c.server)
	}
}

// errorFromClient lets a client answer a late datagram of a server with port unreachable, and checks the error
// at the server.
func (b *bench) errorFromClient(network, client, server string) {
	b.Helper()
	heard := make(chan []byte, 16)
	for _, node := range []string{"s1", "s2"} {
		var c net.PacketConn
		if err := b.lab.Node(node).Do(func() (err error) { c, err = net.ListenPacket(network, ""); return err }); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		go func() {
			for {
				buf := make([]byte, 2000)
				n, _, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				if kind := buf[0]; kind == 3 || kind == 1 {
					heard <- buf[:n]
				}
			}
		}()
	}
	from := map[string]string{"10.0.2.": "10.0.2.2", "fd00:2::": "fd00:2::2"}[server]
	if err := b.datagram("s1", netip.AddrPortFrom(addr(from), 5514).String(), netip.AddrPortFrom(addr(client), 9).String()); err != nil {
		b.Fatal(err)
	}
	select {
	case m := <-heard:
		header, source, at := 20, 12, 4
		if addr(client).Is6() {
			header, source, at = 40, 8, 16
		}
		quoted := m[8:]
		a, _ := netip.AddrFromSlice(quoted[source : source+at])
		port, to := binary.BigEndian.Uint16(quoted[header:]), binary.BigEndian.Uint16(quoted[header+2:])
		if !strings.HasPrefix(a.String(), server) || port != 5514 || to != 9 {
			b.Errorf("%s: the error quotes a datagram from %s port %d to port %d", network, a, port, to)
		}
		if sum := onesSum(m); addr(client).Is4() && sum != 0xffff {
			b.Errorf("%s: the error's checksum is wrong: %#x", network, sum)
		}
		if sum := onesSum(quoted[:header]); addr(client).Is4() && sum != 0xffff {
			b.Errorf("%s: the quoted header's checksum is wrong: %#x", network, sum)
		}
		pseudo := append(append([]byte{}, quoted[source:source+2*at]...), 0, 17, quoted[header+4], quoted[header+5])
		if sum := onesSum(append(pseudo, quoted[header:]...)); sum != 0xffff {
			b.Errorf("%s: the quoted datagram's checksum is wrong: %#x", network, sum)
		}
	case <-time.After(trafficTimeout):
		b.Errorf("%s: no server heard of the client's port unreachable\n%s", network, b.ruleset())
	}
}

// onesSum is the ones' complement sum of the 16-bit words of b.
func onesSum(b []byte) uint16 {
	if len(b)%2 == 1 {
		b = append(b[:len(b):len(b)], 0)
	}
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}
