// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
)

// neighbourChecks look at hardware addresses: who has an address, who answers for it, and who entered it.
func neighbourChecks() []Check {
	return []Check{
		{ID: "RX15", Name: "duplicate-address", About: "addresses that several hosts of a link use, and IPv6 addresses that are not in use because duplicate address detection failed or has not ended", Weight: 97, Run: checkDuplicate,
			Symptom: "answers to this host go to another one",
			Remedy:  Remedy{Do: "give one of the two hosts another address", Risk: "connections to the old address end"}},
		{ID: "FW21", Name: "address-not-answered", About: "addresses of this host for which hosts of a link ask in vain", Weight: 70, Run: checkMute,
			Symptom: "the address is dead for its link, while everything on this host looks right: no packet for it arrives",
			Remedy:  Remedy{Do: "answer for the address on the link", Risk: "none, except on a real server of a balancer with direct return, whose balancer answers for it"}},
		{ID: "FW22", Name: "neighbour-by-hand", About: "hardware addresses of neighbours that were entered by hand", Weight: 50, Run: checkByHand,
			Symptom: "a host cannot be reached after its network card, container or virtual machine was replaced",
			Remedy:  Remedy{Do: "delete the entry, so that the kernel asks for the address", Risk: "a tunnel or overlay whose program enters addresses enters it again"}},
	}
}

func checkDuplicate(_ context.Context, c *Case) Finding {
	for _, l := range c.NS.After.Links {
		if len(l.Duplicates) > 0 {
			a := l.Duplicates[0]
			f := found(Critical, "%s on %s is a duplicate (dadfailed): another host of the link has the address, and the kernel does not use it here", a, l.Name).
				with("flags of "+a.String(), "dadfailed", fromLinks).concerning(Concerns{Interfaces: []string{l.Name}})
			f.Remedy = &Remedy{Do: "give one of the two hosts another address; then remove this one here and add it again", Commands: []string{"ip -6 addr show dev " + l.Name + " dadfailed"}, Risk: "connections to the old address end"}
			return f
		}
	}
	for _, l := range c.NS.After.Links {
		for _, a := range l.Tentative {
			if !l.Up || !l.Carrier || !slices.ContainsFunc(c.NS.Before.Links, func(b observe.Link) bool { return b.Index == l.Index && b.Carrier && slices.Contains(b.Tentative, a) }) || c.Window < observe.DefaultWindow {
				continue
			}
			f := found(Warn, "%s on %s has been tentative for %.0f s: duplicate address detection does not end, and the kernel does not use the address", a, l.Name, c.Window.Seconds()).
				with("flags of "+a.String(), "tentative", fromLinks).concerning(Concerns{Interfaces: []string{l.Name}})
			f.Remedy = &Remedy{Do: "look whether the link forwards multicast; without other hosts on the link turn detection off for it", Commands: []string{"sysctl -w net.ipv6.conf." + l.Name + ".accept_dad=0"}, Risk: "a duplicate address is not noticed"}
			return f
		}
	}
	return c.sharedAddress()
}

// sharedAddress finds addresses that several hosts of a link use, by their messages of ARP and neighbour discovery.
func (c *Case) sharedAddress() Finding {
	worst := ok("no address is a duplicate")
	if c.NS.Traffic == nil {
		return worst
	}
	for _, s := range c.NS.Traffic.Conflicts {
		var macs []string
		for _, mac := range s.MACs {
			macs = append(macs, net.HardwareAddr(mac[:]).String())
		}
		var f Finding
		if s.Own {
			f = found(Critical, "%s on %s is a duplicate: the host with the hardware address %s uses it, too", s.Address, s.Interface, strings.Join(macs, " and ")).
				concerning(Concerns{Interfaces: []string{s.Interface}})
			f.Remedy = &Remedy{Do: fmt.Sprintf("find the host %s on the link of %s, and give it or this host another address", macs[0], s.Interface), Risk: "connections to the old address end"}
		} else {
			f = found(Info, "two hosts on %s use the address %s: %s", s.Interface, s.Address, strings.Join(macs, " and ")).
				concerning(Concerns{LinkAddresses: macs, Stages: []outcome.Stage{outcome.NoAnswer, outcome.AnswerLost}})
			f.Symptom = "the host is reached now and then"
			f.Remedy = &Remedy{Do: "find out which of the two is the right one, and take the address from the other; if one host has both cards, let it answer for an address on one of them (arp_ignore=1)", Commands: []string{fmt.Sprintf("ip neigh show %s", s.Address)}, Risk: "connections to the wrong host end"}
		}
		if f.Verdict > worst.Verdict {
			worst = f.with("messages of ARP or neighbour discovery", strings.Join(macs, ", "), fromPackets)
		}
	}
	return worst
}

func checkMute(_ context.Context, c *Case) Finding {
	if c.NS.Traffic == nil {
		return ok("packets were not observed")
	}
	for _, m := range c.NS.Traffic.Mute {
		if m.Address.Is6() && c.dropsDiscovery() {
			continue // RL15 names the rule.
		}
		f := found(Info, "%s asks for %s on %s, and this host, which has the address, does not answer %s", m.By, m.Address, m.Interface, asks(m.Address)).
			with("questions without an answer", fmt.Sprint(m.Questions), fromPackets).concerning(Concerns{Destinations: hosts(m.Address)})
		on := cmp.Or(c.linkOf(m.Address), "lo")
		if slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool {
			return l.Name == m.Interface && slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Contains(m.By) })
		}) {
			f.Verdict = Warn
		}
		setting := func(name string) (value int) {
			for _, where := range []string{"all", m.Interface} {
				v, _ := c.sysctl("net.ipv4.conf." + where + "." + name)
				value = max(value, v)
			}
			return value
		}
		switch ignore, filter := setting("arp_ignore"), setting("arp_filter"); {
		case m.Address.Is4() && ignore > 0 && (on != m.Interface || ignore > 1):
			f.Summary += fmt.Sprintf(": arp_ignore is %d there, and the address belongs to %s", ignore, on)
			f.Remedy = &Remedy{Do: "answer for each address of the host, or give the address to " + m.Interface, Commands: []string{fmt.Sprintf("sysctl -w net.ipv4.conf.all.arp_ignore=0 net.ipv4.conf.%s.arp_ignore=0", m.Interface)},
				Risk: "on a real server of a balancer with direct return, both then answer for the address"}
		case m.Address.Is4() && filter > 0:
			f.Summary += fmt.Sprintf(": arp_filter is 1 there, and the route back to %s may lead elsewhere", m.By)
			f.Remedy = &Remedy{Do: "switch arp_filter off, or correct the route back", Commands: []string{fmt.Sprintf("sysctl -w net.ipv4.conf.all.arp_filter=0 net.ipv4.conf.%s.arp_filter=0", m.Interface)}, Risk: "two interfaces on one link answer for one address"}
		default:
			f.Summary += ": a rule (arptables, nftables of the families arp, bridge or netdev) may drop the questions, or the route back to the asker leads elsewhere"
			f.Remedy = &Remedy{Do: "look for the rule and the route", Commands: []string{"nft -a list ruleset", fmt.Sprintf("ip route show table all match %s", m.By)}, Risk: "none: it only looks"}
		}
		return f
	}
	return ok("no host asks for an address of this host in vain")
}

// dropsDiscovery reports whether neighbour discovery is among the drops.
func (c *Case) dropsDiscovery() bool {
	for _, g := range c.NS.Drops {
		for _, s := range g.Sampled {
			if c.control(s) == discovery {
				return true
			}
		}
	}
	return false
}

func checkByHand(_ context.Context, c *Case) Finding {
	if c.NS.Traffic != nil {
		for i := range c.NS.Traffic.Classes {
			class := &c.NS.Traffic.Classes[i]
			for _, n := range c.NS.After.ByHand {
				if mac := n.MAC.String(); slices.Contains(class.LinkAddresses(), mac) {
					f := found(Info, "the hardware address %s of %s on %s was entered by hand (permanent), so that the kernel never asks for it", mac, n.Address, n.Interface).
						with("neighbour entry", fmt.Sprintf("%s dev %s lladdr %s PERMANENT", n.Address, n.Interface, mac), fromLinks).
						concerning(Concerns{LinkAddresses: []string{mac}, Stages: []outcome.Stage{outcome.NoAnswer, outcome.AnswerLost}})
					f.Remedy = &Remedy{Do: "delete the entry, so that the kernel asks for the address", Commands: []string{fmt.Sprintf("ip neigh del %s dev %s", n.Address, n.Interface)}, Risk: "a tunnel or overlay whose program enters addresses enters it again"}
					return f
				}
			}
		}
	}
	return ok("no failing connection uses a hardware address that was entered by hand")
}
