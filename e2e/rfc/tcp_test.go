// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/packet"
)

// reuse allows several sockets on one local port.
func reuse(_, _ string, c syscall.RawConn) error {
	var err error
	control := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if err == nil {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		}
	})
	if control != nil {
		return control
	}
	return err
}

// listen opens a TCP listener of a host.
func (g *gateway) listen(node, address string) net.Listener {
	g.t.Helper()
	var l net.Listener
	err := g.Node(node).Do(func() (err error) {
		lc := net.ListenConfig{Control: reuse}
		l, err = lc.Listen(context.Background(), "tcp", address)
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { l.Close() })
	return l
}

// connect opens a connection from a host's endpoint and returns both ends.
func (g *gateway) connect(node, from, to string, l net.Listener) (client, server net.Conn, err error) {
	d := &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from)), Control: reuse, Timeout: g.patience}
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
		}
		close(accepted)
	}()
	if client, err = g.Node(node).Dial(g.t.Context(), d, "tcp", to); err != nil {
		return nil, nil, err
	}
	g.t.Cleanup(func() { client.Close() })
	select {
	case server = <-accepted:
	case <-time.After(g.patience):
		return nil, nil, fmt.Errorf("%s did not see the connection", to)
	}
	g.t.Cleanup(func() { server.Close() })
	return client, server, nil
}

func remote(c net.Conn) netip.AddrPort {
	a := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// RFC 5382 REQ-1: one mapping for all destinations.
func TestRFC5382REQ1EndpointIndependentMapping(t *testing.T) {
	prove(t, "5382-1", plain, func(g *gateway) error {
		targets := []string{o1b + ":80", o1 + ":80", o2 + ":80"}
		listeners := map[string]net.Listener{}
		for _, to := range targets {
			listeners[to] = g.listen(map[bool]string{true: "o2", false: "o1"}[to == o2+":80"], to)
		}
		if _, _, err := g.connect("i2", i2+":4000", o1+":80", listeners[o1+":80"]); err != nil {
			return err
		}
		var seen []netip.AddrPort
		for _, to := range targets {
			_, server, err := g.connect("i1", i1+":4000", to, listeners[to])
			if err != nil {
				return err
			}
			seen = append(seen, remote(server))
		}
		for _, s := range seen {
			if s != seen[0] {
				return fmt.Errorf("the receivers saw %v", seen)
			}
		}
		return nil
	})
}

// RFC 5382 REQ-2: a connection from the handshake to its end. REQ-6: the payload is unchanged, although it looks
// like FTP.
func TestRFC5382REQ2Connection(t *testing.T) {
	prove(t, "5382-2", plain, func(g *gateway) error {
		client, server, err := g.connect("i1", i1+":0", o1+":80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		if err := client.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		if n, err := server.Read(make([]byte, 1)); n != 0 || err == nil {
			return fmt.Errorf("the end of the connection did not arrive: %d, %v", n, err)
		}
		return server.Close()
	})
}

// RFC 5382 REQ-3: any outside host may connect to the mapping.
func TestRFC5382REQ3Filtering(t *testing.T) {
	prove(t, "5382-3", plain, func(g *gateway) error {
		inside := g.listen("i1", i1+":4000")
		_, server, err := g.connect("i1", i1+":4000", o1+":80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		outside := remote(server)
		client, server, err := g.connect("o2", o2+":0", outside.String(), inside)
		if err != nil {
			return err
		}
		return g.transfer(client, server)
	})
}

// RFC 5382 REQ-4: an unsolicited SYN is not answered for six seconds.
func TestRFC5382REQ4UnsolicitedSYN(t *testing.T) {
	prove(t, "5382-4", plain, func(g *gateway) error {
		w := g.wire("o1")
		if err := w.send("ip4(src=%s,dst=%s)/tcp(sport=80,dport=2345,flags=S,seq=1)", o1, pool1); err != nil {
			return err
		}
		p, err := w.await(6100*time.Millisecond, func(p packet.Packet) bool {
			t, isTCP := packet.Find[*packet.TCP](p)
			m, isICMP := packet.Find[*packet.ICMP](p)
			return isTCP && t.SrcPort == 2345 || isICMP && m.IsError()
		})
		if err == nil {
			return fmt.Errorf("answered: %s", p)
		}
		return nil
	})
}

// RFC 5382 REQ-5: established connections live for 2 h 4 min.
func TestRFC5382REQ5Established(t *testing.T) {
	prove(t, "5382-5", plain, func(g *gateway) error {
		client, server, err := g.connect("i1", i1+":4000", o1+":80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		if err := g.transfer(client, server); err != nil {
			return err
		}
		return g.timeout(netip.MustParseAddrPort(i1+":4000"), 2*time.Hour+4*time.Minute)
	})
}

// RFC 5382 REQ-5: half-open connections live for four minutes.
func TestRFC5382REQ5Transitory(t *testing.T) {
	prove(t, "5382-5t", plain, func(g *gateway) error {
		// A host that is powered off: no answer, not even a reset.
		quiet := "table inet quiet { chain out { type filter hook output priority 0; tcp flags & rst == rst drop; }; }"
		if out, err := g.Node("o1").Command(g.t.Context(), "nft", quiet).CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		in, out := g.wire("i1"), g.wire("o1")
		arrived := func(p packet.Packet) bool { t, ok := packet.Find[*packet.TCP](p); return ok && t.DstPort == 81 }
		for range 5 {
			if err := in.send("ip4(src=%s,dst=%s)/tcp(sport=4000,dport=81,flags=S,seq=1)", i1, o1); err != nil {
				return err
			}
			if _, err := out.await(g.again, arrived); err == nil {
				break
			}
		}
		return g.timeout(netip.MustParseAddrPort(i1+":4000"), 4*time.Minute)
	})
}

// RFC 5382 REQ-7: no port overloading.
func TestRFC5382REQ7NoOverloading(t *testing.T) {
	prove(t, "5382-7", plain, func(g *gateway) error {
		l := g.listen("o1", o1+":80")
		_, a, err := g.connect("i1", i1+":4000", o1+":80", l)
		if err != nil {
			return err
		}
		_, b, err := g.connect("i2", i2+":4000", o1b+":80", g.listen("o1", o1b+":80"))
		if err == nil && remote(a) == remote(b) {
			err = fmt.Errorf("two hosts were seen as %v", remote(a))
		}
		return err
	})
}

// RFC 5382 REQ-8: hairpinning: handshake and data, from the outside endpoint.
func TestRFC5382REQ8Hairpin(t *testing.T) {
	prove(t, "5382-8", plain, func(g *gateway) error {
		l := g.listen("o1", o1+":80")
		inside := g.listen("i2", i2+":5000")
		_, server, err := g.connect("i2", i2+":5000", o1+":80", l)
		if err != nil {
			return err
		}
		client, turned, err := g.connect("i1", i1+":4000", remote(server).String(), inside)
		if err != nil {
			return err
		}
		if from := remote(turned); from.Addr() != netip.MustParseAddr(pool1) {
			return fmt.Errorf("the receiver saw %v, want an outside endpoint", from)
		}
		return g.transfer(client, turned)
	})
}

// RFC 5382 REQ-9, REQ-10: ICMP errors are translated and end no connection.
func TestRFC5382REQ10ICMPEndsNoConnection(t *testing.T) {
	prove(t, "5382-10", plain, func(g *gateway) error {
		client, server, err := g.connect("i1", i1+":4000", o1+":80", g.listen("o1", o1+":80"))
		if err != nil {
			return err
		}
		seen := remote(server)
		sniff, router := g.wire("i1"), g.wire("o2")
		for _, code := range []uint8{0, 1, 3, 4} {
			if err := router.send("ip4(src=%s,dst=%s)/icmp(type=unreachable,code=%d,mtu=%d)/ip4(src=%s,dst=%s,ttl=9,len=1400,df)/tcp(sport=%d,dport=80,seq=1,cut=8)",
				o2, pool1, code, map[uint8]int{4: 1300}[code], pool1, o1, seen.Port()); err != nil {
				return err
			}
			p, err := sniff.await(g.patience, icmp(3, code))
			if err != nil {
				return fmt.Errorf("icmp 3/%d did not reach the inside host: %w", code, err)
			}
			if q, ok := packet.Find[*packet.TCP](p); !ok || q.SrcPort != 4000 {
				return fmt.Errorf("the quoted packet is not as the host sent it: %s", p)
			}
		}
		return g.transfer(client, server)
	})
}

// RFC 5382 REQ-2a: both ends open the same connection at once.
func TestRFC5382REQ2aSimultaneousOpen(t *testing.T) {
	prove(t, "5382-2a", plain, func(g *gateway) error {
		// The outside host must not reset the first SYN: its own SYN is in transit.
		quiet := "table inet quiet { chain out { type filter hook output priority 0; tcp flags & rst == rst drop; }; }"
		if out, err := g.Node("o1").Command(g.t.Context(), "nft", quiet).CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		dial := func(node, from, to string) (net.Conn, error) {
			d := &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from)), Control: reuse, Timeout: 2 * g.patience}
			return g.Node(node).Dial(g.t.Context(), d, "tcp", to)
		}
		type end struct {
			net.Conn
			error
		}
		out, inside := g.wire("o1"), make(chan end, 1)
		go func() {
			c, err := dial("i1", i1+":4000", o1+":80")
			inside <- end{c, err}
		}()
		p, err := out.await(g.patience, func(p packet.Packet) bool { t, ok := packet.Find[*packet.TCP](p); return ok && t.DstPort == 80 })
		if err != nil {
			return fmt.Errorf("the SYN from inside: %w", err)
		}
		ip, _ := packet.Find[*packet.IPv4](p)
		syn, _ := packet.Find[*packet.TCP](p)
		server, err := dial("o1", o1+":80", netip.AddrPortFrom(ip.Src, syn.SrcPort).String())
		if err != nil {
			return fmt.Errorf("from outside: %w", err)
		}
		defer server.Close()
		client := <-inside
		if client.error != nil {
			return fmt.Errorf("from inside: %w", client.error)
		}
		defer client.Close()
		return g.transfer(client.Conn, server)
	})
}
