// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// siit compiles a rule that translates between IPv4 and IPv6: its explicit mappings and its RFC 6052
// prefix. Several rules may have the same prefix.
func (c *compiler) siit(n *config.NATRule) error {
	w, err := c.prefixRule(n)
	if err != nil {
		return err
	}
	if len(n.Pool) > 0 {
		first, last := n.Pool[0].First.As4(), n.Pool[0].Last.As4()
		w.Pool, w.PoolLen = first, uint8(last[3]-first[3]+1)
	}
	if n.TrafficClass.Fixed {
		w.Choices, w.Adjust = w.Choices|wire.ChoiceClass, uint16(n.TrafficClass.Octet)
	}
	if n.UDPZeroChecksum == "drop" {
		w.Choices |= wire.ChoiceSummed
	}
	if n.Prefix.IsValid() {
		w.Embed, w.EmbedLen = wire.AddrOf(n.Prefix.Masked().Addr()), uint8(n.Prefix.Bits())
		k := prefixKey(wire.RoleCrossing, n.Prefix)
		v := w
		v.Kind, v.Len = wire.PrefixSIIT, w.EmbedLen
		if old, taken := c.Prefixes[k]; taken && old.Kind != v.Kind {
			return fmt.Errorf("prefix %s is already translated by another rule", n.Prefix)
		}
		c.Prefixes[k] = v
		if n.Default4() {
			v.Len = 0
			everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			if err := c.putPrefix(prefixKey(wire.RoleCrossing, everything), everything, v); err != nil {
				return err
			}
		}
	}
	w.Kind = wire.PrefixEAM
	for _, e := range n.EAM {
		four, six := e.IPv4.Masked(), e.IPv6.Masked()
		there, back := w, w
		there.To, there.Len, there.ToLen = wire.AddrOf(six.Addr()), uint8(four.Bits()), uint8(six.Bits())
		back.To, back.Len, back.ToLen = wire.AddrOf(four.Addr()), uint8(six.Bits()), uint8(four.Bits())
		err := errors.Join(c.putPrefix(prefixKey(wire.RoleCrossing, four), four, there),
			c.putPrefix(prefixKey(wire.RoleCrossing, six), six, back))
		if err != nil {
			return err
		}
	}
	return nil
}

// MostRoutes limits the routes that are written for mappings. With a mapping of all IPv4 addresses,
// a full routing table would qualify.
const MostRoutes = 1 << 16

// routes writes the destinations that mappings between the families leave to the routing table:
// more specific routes inside a mapping, and addresses of this host (RFC 7915 §4.6, §5.6).
func (c *compiler) routes() error {
	var lengths [2][129]bool // Prefix lengths of IPv4 and IPv6 mappings.
	everything := false      // A rule has a prefix, which can embed every IPv4 address.
	for k, p := range c.Prefixes {
		if k.Role == wire.RoleCrossing {
			lengths[k.Family-wire.Family4][p.Len] = true
			everything = everything || p.Kind == wire.PrefixEAM && p.EmbedLen > 0
		}
	}
	for family, mapped := range lengths {
		v6 := family == 1
		if mapped == [129]bool{} {
			continue
		}
		list, err := c.host.destinations(v6)
		if err != nil {
			return err
		}
		for _, d := range list {
			if !v6 && everything && d.Prefix.Bits() > 0 || c.isInsideMapping(d, &mapped) {
				c.route(d)
			}
		}
	}
	return nil
}

// isInsideMapping reports whether a mapping strictly contains the destinations of a route. For local
// destinations an equal prefix suffices.
func (c *compiler) isInsideMapping(d netdev.Destination, mapped *[129]bool) bool {
	for bits := range d.Prefix.Bits() + 1 {
		if !mapped[bits] || bits == d.Prefix.Bits() && !d.Here {
			continue
		}
		shorter, _ := d.Prefix.Addr().Prefix(bits)
		if _, ok := c.Prefixes[prefixKey(wire.RoleCrossing, shorter)]; ok {
			return true
		}
	}
	return false
}

func (c *compiler) route(d netdev.Destination) {
	if c.SpecificRoutes++; c.SpecificRoutes > MostRoutes {
		return
	}
	value := uint64(d.Prefix.Bits())
	if d.Here {
		value |= wire.RoutedHere
	}
	k := wire.MemberKey{PrefixLen: 32 + uint32(d.Prefix.Bits()), List: wire.ListRouted | uint32(wire.FamilyOf(d.Prefix.Addr()))<<8,
		Addr: wire.BytesOf(d.Prefix.Masked().Addr())}
	c.Members[k] = max(c.Members[k], value)
}

// setErrorSources sets the source address of ICMP errors on interfaces without an address of the family
// (RFC 1812 §4.3.2.4, RFC 4443 §2.2). It uses an address of another interface. A host without IPv4
// uses the first siit pool address or the dummy address of RFC 7600 §4.8.
func (c *compiler) setErrorSources() {
	var four, six netip.Addr
	for _, i := range c.host.Interfaces {
		for _, a := range c.host.Addresses[i.Index] {
			if !a.IsGlobalUnicast() {
				continue
			}
			if a.Is4() && !four.IsValid() {
				four = a
			} else if a.Is6() && !six.IsValid() {
				six = a
			}
		}
	}
	for _, p := range c.Prefixes {
		if !four.IsValid() && p.PoolLen > 0 {
			four = netip.AddrFrom4(p.Pool)
		}
	}
	for k := range c.Prefixes {
		if !four.IsValid() && k.Role == wire.RoleCrossing {
			four = netip.AddrFrom4([4]byte{192, 0, 0, 8})
		}
	}
	for n, v := range c.Ifaces {
		if four.IsValid() && v.V4 == (wire.Addr{}) {
			v.V4 = wire.AddrOf(four)
		}
		if six.IsValid() && (v.V6 == (wire.Addr{}) || wire.AddrFrom(v.V6, true).IsLinkLocalUnicast()) {
			v.V6 = wire.AddrOf(six)
		}
		c.Ifaces[n] = v
	}
}
