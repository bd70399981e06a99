// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// The programs forward packets past the kernel's IPsec policies. Packets that a policy encrypts
// would leave in clear text, and packets that a policy blocks would pass. The kernel checks a
// forwarded packet after its translation (nf_xfrm_me_harder of nf_nat_proto.c). The functions below
// therefore compare policies with translated packets in both directions. Client addresses are
// unknown. Policies that require encryption of received packets (dir fwd) are bypassed, too.

// BypassedByService returns an IPsec policy that packets of a service would bypass.
func (h *Host) BypassedByService(s *config.Service) (netdev.IPsecPolicy, bool) {
	switch s.Mode {
	case config.ModeDNAT, config.ModeFullNAT, config.ModeStateless:
	default:
		return netdev.IPsecPolicy{}, false // replies bypass the gateway, and requests use the backend's link on either datapath
	}
	return h.findPolicy(func(p netdev.IPsecPolicy) bool {
		if !matchesProtocol(p, s.Protocol) {
			return false
		}
		return slices.ContainsFunc(s.Listen, func(l config.Listen) bool { return h.matchesReplies(p, l) }) ||
			slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return p.Dest.Contains(b.Address) })
	})
}

// BypassedByNAT returns an IPsec policy that packets of a NAT rule would bypass. Policies between a
// gateway address and a single host are ignored: they protect the gateway's own tunnels and L2TP.
func (h *Host) BypassedByNAT(n *config.NATRule) (netdev.IPsecPolicy, bool) {
	return h.findPolicy(func(p netdev.IPsecPolicy) bool {
		switch {
		case n.Type.Forwards():
			return matchesProtocol(p, n.Protocol) && (h.matchesReplies(p, *n.Listen) || p.Dest.Contains(n.To.Address))
		case n.Type.RewritesSource():
			return toInside(p, n) || !(p.Source.IsSingleIP() && p.Dest.IsSingleIP()) && h.matchesSources(p, n)
		case n.Type.OneToOne():
			return p.Dest.Overlaps(n.Internal) || p.Source.Overlaps(n.External)
		}
		return false
	})
}

// toInside reports whether a policy matches replies to inside hosts of a rule that translates
// sources. An example is a VPN client with all of its traffic through the gateway. Policies between
// inside networks do not match.
func toInside(p netdev.IPsecPolicy, n *config.NATRule) bool {
	if len(n.Source) == 0 {
		return !p.Source.IsSingleIP() && !p.Source.Addr().IsPrivate()
	}
	return slices.ContainsFunc(n.Source, p.Dest.Overlaps) && !slices.ContainsFunc(n.Source, func(inside netip.Prefix) bool {
		return inside.Bits() <= p.Source.Bits() && inside.Contains(p.Source.Addr())
	})
}

func (h *Host) findPolicy(match func(netdev.IPsecPolicy) bool) (netdev.IPsecPolicy, bool) {
	i := slices.IndexFunc(h.Policies, match)
	if i < 0 {
		return netdev.IPsecPolicy{}, false
	}
	return h.Policies[i], true
}

func matchesProtocol(p netdev.IPsecPolicy, protocol flow.Protocol) bool {
	return p.Protocol == flow.Any || protocol == flow.Any || p.Protocol == protocol
}

// matchesReplies reports whether a policy matches packets sent from a listener.
func (h *Host) matchesReplies(p netdev.IPsecPolicy, l config.Listen) bool {
	port := func(r flow.Ports) bool { return r.First <= p.SourcePort && p.SourcePort <= r.Last }
	if p.SourcePort != 0 && len(l.Ports) > 0 && !slices.ContainsFunc(l.Ports, port) {
		return false
	}
	if !l.Follows() {
		return p.Source.Contains(l.Address)
	}
	a, ok := h.ListenAddress(l.Interface, p.Source.Addr().Is6())
	return ok && p.Source.Contains(a)
}

// matchesSources reports whether a policy matches packets with a source address of a rule.
func (h *Host) matchesSources(p netdev.IPsecPolicy, n *config.NATRule) bool {
	if n.Type == config.NATSNAT {
		return slices.ContainsFunc(n.To.Addresses, func(r config.AddressRange) bool {
			return p.Source.Contains(r.First) || p.Source.Contains(r.Last) || r.Contains(p.Source.Addr())
		})
	}
	for _, i := range h.Named(n.Out) {
		if slices.ContainsFunc(h.Addresses[i.Index], p.Source.Contains) {
			return true
		}
	}
	return false
}
