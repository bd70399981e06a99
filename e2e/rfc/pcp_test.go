// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	be "encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"
)

// Results of RFC 6887 §7.4.
const (
	pcpSuccess               = 0
	pcpNotAuthorized         = 2
	pcpUserExQuota           = 10
	pcpCannotProvideExternal = 11
)

// ask is the content of a request for a mapping.
type ask struct {
	gateway   string // destination address of the request
	nonce     byte
	protocol  byte
	port      uint16 // inside
	lifetime  uint32
	suggested string // outside endpoint
	exact     bool   // option PREFER_FAILURE
}

// told is the content of the response.
type told struct {
	result   byte
	lifetime uint32
	epoch    uint32
	outside  netip.AddrPort
}

// pcp sends a request from a host's address until a response arrives.
func (g *gateway) pcp(node, address string, a ask) (told, error) {
	return g.pcpFor(g.patience, node, address, a)
}

func (g *gateway) pcpFor(wait time.Duration, node, address string, a ask) (told, error) {
	if a.gateway == "" {
		a.gateway = "10.0.2.1"
	}
	if a.suggested == "" {
		a.suggested = "0.0.0.0:0"
	}
	suggested, client := netip.MustParseAddrPort(a.suggested), netip.MustParseAddr(address).As16()
	b := be.BigEndian.AppendUint32([]byte{2, 1, 0, 0}, a.lifetime)
	b = append(b, client[:]...)
	b = append(b, a.nonce, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, a.protocol, 0, 0, 0)
	b = be.BigEndian.AppendUint16(b, a.port)
	b = be.BigEndian.AppendUint16(b, suggested.Port())
	outside := suggested.Addr().As16()
	b = append(b, outside[:]...)
	if a.exact {
		b = append(b, 2, 0, 0, 0)
	}
	c := g.udp(node, net.JoinHostPort(address, "0"))
	defer c.Close()
	for deadline := time.Now().Add(wait); time.Now().Before(deadline); {
		if _, err := c.WriteTo(b, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(a.gateway), 5351))); err != nil {
			return told{}, err
		}
		from, text, err := receive(c, g.again)
		if err != nil {
			continue
		}
		r := []byte(text)
		if from != netip.AddrPortFrom(netip.MustParseAddr(a.gateway), 5351) || len(r) < len(b) || r[0] != 2 || r[1] != 0x81 {
			return told{}, fmt.Errorf("%v answers % x", from, r)
		}
		return told{r[3], be.BigEndian.Uint32(r[4:]), be.BigEndian.Uint32(r[8:]),
			netip.AddrPortFrom(netip.AddrFrom16([16]byte(r[44:60])).Unmap(), be.BigEndian.Uint16(r[42:]))}, nil
	}
	return told{}, errUnanswered
}

var errUnanswered = errors.New("a request for a mapping was not answered")

// mapped requests a mapping that must be granted.
func (g *gateway) mapped(node, address string, a ask) (told, error) {
	r, err := g.pcp(node, address, a)
	if err == nil && r.result != pcpSuccess {
		err = fmt.Errorf("a mapping of port %d of %s: result %d", a.port, address, r.result)
	}
	return r, err
}

// RFC 6888 REQ-9: a host maps an outside port. Every outside host can reach it, independent of the rule's
// filtering, until the host deletes the mapping or does not renew it.
func TestRFC6888REQ9Mapping(t *testing.T) {
	prove(t, "6888-9", snat("pcp: true, filtering: address-and-port-dependent"), func(g *gateway) error {
		web, game := g.listen("i1", i1+":8080"), g.udp("i1", i1+":4500")
		first, err := g.mapped("i1", i1, ask{nonce: 1, protocol: 6, port: 8080, lifetime: 7200, suggested: pool1 + ":8443"})
		if err != nil {
			return err
		}
		if want := netip.MustParseAddrPort(pool1 + ":8443"); first.outside != want || first.lifetime != 7200 {
			return fmt.Errorf("mapped to %v for %d s, want %v for 7200 s", first.outside, first.lifetime, want)
		}
		second, err := g.mapped("i1", i1, ask{nonce: 1, protocol: 17, port: 4500, lifetime: 1})
		if err != nil {
			return err
		}
		if want := netip.MustParseAddrPort(pool1 + ":4500"); second.outside != want || second.lifetime != 120 {
			return fmt.Errorf("mapped to %v for %d s, want %v for 120 s", second.outside, second.lifetime, want)
		}
		reach := func() error { // from remote hosts without an earlier packet, and from the neighbour
			for _, from := range [][2]string{{"o1", o1}, {"o2", o2}, {"i2", i2}} {
				client, server, err := g.connect(from[0], from[1]+":0", first.outside.String(), web)
				if err != nil {
					return fmt.Errorf("from %s: %w", from[0], err)
				}
				client.Close()
				server.Close()
				if err := g.back(g.udp(from[0], from[1]+":0"), second.outside, game, g.patience); err != nil {
					return fmt.Errorf("from %s: %w", from[0], err)
				}
			}
			return nil
		}
		if err := reach(); err != nil {
			return err
		}
		if err := g.unasked(); err != nil {
			return err
		}
		// A crash loses nothing, and the server reports its unchanged epoch.
		if err := errors.Join(g.d.Kill(), g.d.Restart(t.Context())); err != nil {
			return err
		}
		if err := reach(); err != nil {
			return fmt.Errorf("after a crash: %w", err)
		}
		again, err := g.mapped("i1", i1, ask{nonce: 1, protocol: 6, port: 8080, lifetime: 7200})
		if err != nil {
			return err
		}
		if again.outside != first.outside || again.epoch < first.epoch {
			return fmt.Errorf("renewed after a crash: %v with epoch %d, before it %v with %d", again.outside, again.epoch, first.outside, first.epoch)
		}
		if err := g.mappings(2, 7000*time.Second, 120*time.Second); err != nil {
			return err
		}
		return g.closes(first.outside, second.outside, game)
	})
}

// unasked checks that no host gets the mappings of another one.
func (g *gateway) unasked() error {
	for _, x := range []struct {
		what, node, address string
		ask
		result byte
	}{
		{"a renewal with another nonce", "i1", i1, ask{nonce: 2, protocol: 6, port: 8080, lifetime: 7200}, pcpNotAuthorized},
		{"a deletion with another nonce", "i1", i1, ask{nonce: 2, protocol: 6, port: 8080}, pcpNotAuthorized},
		{"a taken port or none", "i2", i2, ask{nonce: 3, protocol: 6, port: 8080, lifetime: 60, suggested: pool1 + ":8443", exact: true}, pcpCannotProvideExternal},
		{"a foreign address or none", "i2", i2, ask{nonce: 3, protocol: 6, port: 8080, lifetime: 60, suggested: "203.0.113.9:8443", exact: true}, pcpCannotProvideExternal},
	} {
		r, err := g.pcp(x.node, x.address, x.ask)
		if err != nil {
			return fmt.Errorf("%s: %w", x.what, err)
		}
		if r.result != x.result {
			return fmt.Errorf("%s: result %d, want %d", x.what, r.result, x.result)
		}
	}
	for _, address := range []string{"198.51.100.1", pool1} { // no server listens outside
		if _, err := g.pcpFor(g.again, "o1", o1, ask{gateway: address, nonce: 4, protocol: 6, port: 22, lifetime: 60}); err == nil {
			return fmt.Errorf("a host outside was answered by %s", address)
		}
	}
	return nil
}

// mappings checks the number of listed mappings. They must expire between the two times.
func (g *gateway) mappings(n int, long, short time.Duration) error {
	list, err := g.d.Mappings(g.t.Context())
	if err != nil {
		return err
	}
	if len(list) != n {
		return fmt.Errorf("%d mappings are listed, want %d: %+v", len(list), n, list)
	}
	for _, m := range list {
		left := time.Duration(m.Expires * float64(time.Second))
		if m.Protocol == "tcp" && left < long || m.Protocol == "udp" && left > short || m.Rule != "office" {
			return fmt.Errorf("listed as %+v", m)
		}
	}
	return nil
}

// closes deletes one mapping alone, and the other together with all mappings of its protocol. New remote hosts
// must not get in afterwards.
func (g *gateway) closes(tcp, udp netip.AddrPort, game net.PacketConn) error {
	for _, a := range []ask{{nonce: 1, protocol: 6, port: 8080}, {nonce: 1, protocol: 17}} {
		if r, err := g.mapped("i1", i1, a); err != nil || r.lifetime != 0 {
			return fmt.Errorf("deletion: %+v, %w", r, err)
		}
	}
	if err := g.mappings(0, 0, 0); err != nil {
		return err
	}
	late := g.udp("o2", o2+":0")
	if err := g.back(late, udp, game, g.silence); err == nil {
		return errors.New("a datagram came in by a mapping that was taken back")
	}
	c, err := g.Node("o2").Dial(g.t.Context(), &net.Dialer{Timeout: time.Second}, "tcp", tcp.String())
	if err == nil {
		c.Close()
		return errors.New("a connection came in by a mapping that was taken back")
	}
	return nil
}

// RFC 6888 REQ-9 with REQ-4: requested mappings count against the host's quota of ports.
func TestRFC6888REQ9Quota(t *testing.T) {
	prove(t, "6888-9", snat("pcp: true, ports-per-client: 2"), func(g *gateway) error {
		for i, want := range []byte{pcpSuccess, pcpSuccess, pcpUserExQuota} {
			r, err := g.pcp("i1", i1, ask{nonce: 1, protocol: 17, port: uint16(5000 + i), lifetime: 600})
			if err != nil {
				return err
			}
			if r.result != want {
				return fmt.Errorf("mapping %d of two: result %d, want %d", i+1, r.result, want)
			}
		}
		_, err := g.mapped("i2", i2, ask{nonce: 1, protocol: 17, port: 5000, lifetime: 600})
		return err
	})
}

// RFC 6888 REQ-9 with RFC 6146: an IPv6 host maps an outside IPv4 port.
func TestRFC6888REQ9NAT64(t *testing.T) {
	rule := "nat:\n  - {name: v6only, type: nat64, prefix: \"64:ff9b::/96\", source: [\"fd00:2::/64\"], in: lan0, pool: [203.0.113.1], pcp: true, filtering: address-dependent}\n"
	prove(t, "6888-9", rule, func(g *gateway) error {
		at := g.udp("i1", "["+i1six+"]:4500")
		r, err := g.mapped("i1", i1six, ask{gateway: "fd00:2::1", nonce: 1, protocol: 17, port: 4500, lifetime: 600})
		if err != nil {
			return err
		}
		if want := netip.MustParseAddrPort(pool1 + ":4500"); r.outside != want {
			return fmt.Errorf("mapped to %v, want %v", r.outside, want)
		}
		if err := g.back(g.udp("o1", o1+":0"), r.outside, at, g.patience); err != nil {
			return err
		}
		hairpin := netip.MustParseAddrPort(fmt.Sprintf("[64:ff9b::cb00:7101]:%d", r.outside.Port()))
		return g.back(g.udp("i2", "["+i2six+"]:0"), hairpin, at, g.patience)
	})
}
