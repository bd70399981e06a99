// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// siit compiles a rule between the families: its explicit mappings and its RFC 6052
// prefix, which rules may share.
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
		w.Choices, w.Adjust = w.Choices|ChoiceClass, uint16(n.TrafficClass.Octet)
	}
	if n.UDPZeroChecksum == "drop" {
		w.Choices |= ChoiceSummed
	}
	if n.Prefix.IsValid() {
		w.Embed, w.EmbedLen = addrOf(n.Prefix.Masked().Addr()), uint8(n.Prefix.Bits())
		k := prefixKey(RoleCrossing, n.Prefix)
		v := w
		v.Kind, v.Len = PrefixSIIT, w.EmbedLen
		if old, taken := c.prefixes[k]; taken && old.Kind != v.Kind {
			return fmt.Errorf("prefix %s is translated by another rule already", n.Prefix)
		}
		c.prefixes[k] = v
		if n.Default4() {
			v.Len = 0
			everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			if err := c.putPrefix(prefixKey(RoleCrossing, everything), everything, v); err != nil {
				return err
			}
		}
	}
	w.Kind = PrefixEAM
	for _, e := range n.EAM {
		four, six := e.IPv4.Masked(), e.IPv6.Masked()
		there, back := w, w
		there.To, there.Len, there.ToLen = addrOf(six.Addr()), uint8(four.Bits()), uint8(six.Bits())
		back.To, back.Len, back.ToLen = addrOf(four.Addr()), uint8(six.Bits()), uint8(four.Bits())
		err := errors.Join(c.putPrefix(prefixKey(RoleCrossing, four), four, there),
			c.putPrefix(prefixKey(RoleCrossing, six), six, back))
		if err != nil {
			return err
		}
	}
	return nil
}

// mostRoutes is how many routes the programs know of those that are more specific than a
// mapping: a rule that maps all of IPv4 would ask for a full table.
const mostRoutes = 1 << 16

// routes enters what mappings between the families leave to the routing table: destinations
// inside them with a more specific route, and addresses of this host (RFC 7915 §4.6, §5.6).
func (c *compiler) routes() error {
	var lengths [2][129]bool // of the mappings of IPv4 and IPv6
	everything := false      // a rule has a place for every IPv4 address
	for k, p := range c.prefixes {
		if k.Role == RoleCrossing {
			lengths[k.Family-Family4][p.Len] = true
			everything = everything || p.Kind == PrefixEAM && p.EmbedLen > 0
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
			if !v6 && everything && d.Prefix.Bits() > 0 || c.inside(d, &mapped) {
				c.route(d)
			}
		}
	}
	return nil
}

// inside reports whether a mapping has the destinations of a route, and more.
func (c *compiler) inside(d netdev.Destination, mapped *[129]bool) bool {
	for bits := range d.Prefix.Bits() + 1 {
		if !mapped[bits] || bits == d.Prefix.Bits() && !d.Here {
			continue
		}
		shorter, _ := d.Prefix.Addr().Prefix(bits)
		if _, ok := c.prefixes[prefixKey(RoleCrossing, shorter)]; ok {
			return true
		}
	}
	return false
}

func (c *compiler) route(d netdev.Destination) {
	if c.specific++; c.specific > mostRoutes {
		return
	}
	value := uint64(d.Prefix.Bits())
	if d.Here {
		value |= RoutedHere
	}
	k := wireMemberKey{PrefixLen: 32 + uint32(d.Prefix.Bits()), List: ListRouted | uint32(familyOf(d.Prefix.Addr()))<<8,
		Addr: bytesOf(d.Prefix.Masked().Addr())}
	c.members[k] = max(c.members[k], value)
}

// unnumbered gives interfaces without an address of a family that of another one, for the ICMP
// errors that are sent there (RFC 1812 §4.3.2.4, RFC 4443 §2.2). A host without any of IPv4
// has the first of siit's pool, or the address that is reserved for it (RFC 7600 §4.8).
func (c *compiler) unnumbered() {
	var four, six netip.Addr
	for _, i := range c.host.interfaces {
		for _, a := range c.host.addresses[i.Index] {
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
	for _, p := range c.prefixes {
		if !four.IsValid() && p.PoolLen > 0 {
			four = netip.AddrFrom4(p.Pool)
		}
	}
	for k := range c.prefixes {
		if !four.IsValid() && k.Role == RoleCrossing {
			four = netip.AddrFrom4([4]byte{192, 0, 0, 8})
		}
	}
	for n, v := range c.ifaces {
		if four.IsValid() && v.V4 == (wireAddr{}) {
			v.V4 = addrOf(four)
		}
		if six.IsValid() && (v.V6 == (wireAddr{}) || addrFrom(v.V6, true).IsLinkLocalUnicast()) {
			v.V6 = addrOf(six)
		}
		c.ifaces[n] = v
	}
}
