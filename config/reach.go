// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"slices"
)

// special are the addresses that a host on a network cannot have, or that are not routed. The kernel does route IPv4
// link-local addresses, and virtual networks use this.
var special = []struct {
	prefix netip.Prefix
	kind   addressKind
	noun   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), noHost, "not a host address"},
	{netip.MustParsePrefix("::/128"), noHost, "not a host address"},
	{netip.MustParsePrefix("224.0.0.0/4"), noHost, "a multicast address, not a host address"},
	{netip.MustParsePrefix("ff00::/8"), noHost, "a multicast address, not a host address"},
	{netip.MustParsePrefix("255.255.255.255/32"), noHost, "the broadcast address, not a host address"},
	{netip.MustParsePrefix("127.0.0.0/8"), loopback4, "a loopback address, which only packets inside a host have"},
	{netip.MustParsePrefix("::1/128"), loopback6, "a loopback address, which only packets inside a host have"},
	{netip.MustParsePrefix("fe80::/10"), linkLocal6, "link-local: packets to and from it are not routed"},
}

// addressKind is a kind of special addresses.
type addressKind int

const (
	noHost addressKind = iota
	loopback4
	loopback6
	linkLocal6
)

// addressUse is the use of an address by a field of the configuration, with the special kinds that it may have.
type addressUse struct {
	hint     string
	accepted []addressKind
}

var (
	// asListener: nftables supports link-local listeners.
	asListener = addressUse{"write an address of this gateway, or one that is routed to it", []addressKind{linkLocal6}}
	// asServer: the kernel accepts packets to 127.0.0.0/8 with route_localnet. A warning explains this.
	asServer = addressUse{"write the server's own address, which is routed", []addressKind{loopback4}}
	// asSource is an address that packets leave with.
	asSource = addressUse{"write addresses that are routed to this gateway", nil}
	// asHosts are the addresses of hosts behind the gateway.
	asHosts = addressUse{"write the addresses of hosts that send through this gateway", nil}
	// asTranslated are addresses that stand for others.
	asTranslated = addressUse{"write global or private addresses that are routed to this gateway", nil}
	asNode       = addressUse{"write the address of an interface of this node", nil}
	asRouter     = addressUse{"write the address of the provider's router, or leave the key out", []addressKind{linkLocal6}}
	asTarget     = addressUse{"write an address on the Internet, such as 9.9.9.9", nil}
)

// HostAddress reports whether a host on a network can have an address, and routers forward packets to it.
func HostAddress(a netip.Addr) bool {
	for _, s := range special {
		if s.prefix.Contains(a) {
			return false
		}
	}
	return true
}

// special refuses a range that has addresses without a use.
func (v *validator) special(p path, use addressUse, r AddressRange) {
	if !r.First.IsValid() || !r.Last.IsValid() {
		return
	}
	for _, s := range special {
		of := rangeOf(s.prefix)
		switch {
		case !of.overlaps(r) || slices.Contains(use.accepted, s.kind):
			continue
		case of.Contains(r.First) && of.Contains(r.Last):
			what := r.String()
			if r.First == r.Last {
				what = "address " + what
			}
			v.errorf(p, use.hint, "%s is %s", what, s.noun)
		default:
			v.errorf(p, use.hint, "%s includes %s, which is %s", r, s.prefix, s.noun)
		}
		return
	}
}

// specialAddress is special for one address.
func (v *validator) specialAddress(p path, use addressUse, a netip.Addr) {
	v.special(p, use, AddressRange{a, a})
}

// specialRanges is special for each range of a pool.
func (v *validator) specialRanges(p path, use addressUse, list []AddressRange) {
	for i, r := range list {
		v.special(p.index(i), use, r)
	}
}

// hosts refuses prefixes that match no forwarded packet. A prefix that has other addresses too is accepted.
func (v *validator) hosts(p path, list []netip.Prefix) {
	for i, q := range list {
		v.within(p.index(i), asHosts, q)
	}
}

// within refuses a prefix whose addresses all have no use.
func (v *validator) within(p path, use addressUse, q netip.Prefix) {
	for _, s := range special {
		if q.IsValid() && s.prefix.Bits() <= q.Bits() && s.prefix.Contains(q.Addr()) {
			v.special(p, use, rangeOf(q))
			return
		}
	}
}
