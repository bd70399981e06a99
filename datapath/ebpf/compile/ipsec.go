// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// The programs forward packets past the kernel's IPsec policies: what these want encrypted would leave in
// clear text, and what they forbid would pass. The kernel looks a forwarded packet up after its translation
// (nf_xfrm_me_harder of nf_nat_proto.c). What is judged here is therefore whether a policy
// could be for a translated packet, in either direction; nobody knows clients beforehand. What policies want
// to have come encrypted (dir fwd) is taken in clear text.

// BypassedByService returns an IPsec policy that packets of a service would not meet.
func (h *Host) BypassedByService(s *config.Service) (netdev.IPsecPolicy, bool) {
	switch s.Mode {
	case config.ModeDNAT, config.ModeFullNAT, config.ModeStateless:
	default:
		return netdev.IPsecPolicy{}, false // answers do not come by, and requests leave by the link of the backend on either datapath
	}
	return h.bypassed(func(p netdev.IPsecPolicy) bool {
		if !concerns(p, s.Protocol) {
			return false
		}
		return slices.ContainsFunc(s.Listen, func(l config.Listen) bool { return h.answers(p, l) }) ||
			slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return p.Dest.Contains(b.Address) })
	})
}

// BypassedByNAT returns an IPsec policy that packets of a NAT rule would not meet. What a rule sends from an
// address of the gateway to a single host is not judged: policies for that are those of the gateway's own
// tunnels and of L2TP.
func (h *Host) BypassedByNAT(n *config.NATRule) (netdev.IPsecPolicy, bool) {
	return h.bypassed(func(p netdev.IPsecPolicy) bool {
		switch n.Type {
		case config.NATPortForward:
			return concerns(p, n.Protocol) && (h.answers(p, *n.Listen) || p.Dest.Contains(n.To.Address))
		case config.NATMasquerade, config.NATSNAT:
			return toInside(p, n) || !(p.Source.IsSingleIP() && p.Dest.IsSingleIP()) && h.sends(p, n)
		case config.NATStatic, config.NATNPT66:
			return p.Dest.Overlaps(n.Internal) || p.Source.Overlaps(n.External)
		}
		return false
	})
}

// toInside reports whether a policy could be for answers to hosts behind a rule that translates sources, as to
// those who use the gateway for all of their traffic, by a VPN. Policies between inside networks are not.
func toInside(p netdev.IPsecPolicy, n *config.NATRule) bool {
	if len(n.Source) == 0 {
		return !p.Source.IsSingleIP() && !p.Source.Addr().IsPrivate()
	}
	return slices.ContainsFunc(n.Source, p.Dest.Overlaps) && !slices.ContainsFunc(n.Source, func(inside netip.Prefix) bool {
		return inside.Bits() <= p.Source.Bits() && inside.Contains(p.Source.Addr())
	})
}

func (h *Host) bypassed(meets func(netdev.IPsecPolicy) bool) (netdev.IPsecPolicy, bool) {
	i := slices.IndexFunc(h.Policies, meets)
	if i < 0 {
		return netdev.IPsecPolicy{}, false
	}
	return h.Policies[i], true
}

func concerns(p netdev.IPsecPolicy, protocol flow.Protocol) bool {
	return p.Protocol == flow.Any || protocol == flow.Any || p.Protocol == protocol
}

// answers reports whether a policy could be for what is sent from a listener.
func (h *Host) answers(p netdev.IPsecPolicy, l config.Listen) bool {
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

// sends reports whether a policy could be for what a rule sends from its own addresses.
func (h *Host) sends(p netdev.IPsecPolicy, n *config.NATRule) bool {
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
