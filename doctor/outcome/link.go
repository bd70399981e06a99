// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/trace"
)

// Mute is an own address for which a host of a link asks in vain.
type Mute struct {
	Address   netip.Addr
	Interface string     // of the questions
	By        netip.Addr // who asked last
	Questions int

	first, last time.Duration // of By
	answered    bool
}

// Conflict is an address that several hosts of a link use.
type Conflict struct {
	Address   netip.Addr
	Interface string
	MACs      [][6]byte // of the others, if the address is one of this host
	Own       bool
}

// link follows who of a link has which address, and whether this host answers for its own. Both is seen in messages of
// ARP and neighbour discovery that arrive.
func (c *Collector) link(p *trace.Packet) {
	n := p.Neighbour
	if p.Point == trace.Transmitted && n.Answer && c.mute[n.Target] != nil {
		c.mute[n.Target].answered = true
	}
	if p.Point != trace.Received || c.host.Ports[p.Interface] != "" || !n.Sender.IsValid() || n.Sender.IsUnspecified() {
		return
	}
	holder := n.Sender
	if n.Answer {
		holder = n.Target
	}
	if p.HasMACs && !c.host.MACs[p.SourceMAC] {
		c.holds(holder, p)
	}
	if !c.host.Addresses[n.Target] || n.Answer || n.Sender == n.Target || len(c.mute) == mostNeighbours && c.mute[n.Target] == nil {
		return
	}
	m := c.mute[n.Target]
	if m == nil {
		m = &Mute{Address: n.Target}
		c.mute[n.Target] = m
	}
	if m.Questions++; m.By != n.Sender || m.Interface != p.Interface {
		m.By, m.Interface, m.first = n.Sender, p.Interface, p.Time
	}
	m.last = p.Time
}

func (c *Collector) holds(a netip.Addr, p *trace.Packet) {
	h := c.holders[a]
	if h == nil {
		if len(c.holders) == mostNeighbours {
			return
		}
		h = &Conflict{Address: a, Interface: p.Interface, Own: c.host.Addresses[a]}
		c.holders[a] = h
	}
	for _, mac := range h.MACs {
		if mac == p.SourceMAC || len(h.MACs) == 2 {
			return
		}
	}
	h.MACs = append(h.MACs, p.SourceMAC)
}

// askedAgain is from how long on repeated questions of one host show that nobody answered: hosts ask once a second
// (RFC 4861 §10).
const askedAgain = 900 * time.Millisecond

// links adds what was seen of the links to a report. Without a packet of the observer, nothing is known of answers.
func (c *Collector) links(r *Report) {
	for _, m := range c.mute {
		if !m.answered && !r.Lost.Any() && m.last-m.first >= askedAgain {
			r.Mute = append(r.Mute, *m)
		}
	}
	for _, h := range c.holders {
		if h.Own || len(h.MACs) > 1 {
			r.Conflicts = append(r.Conflicts, *h)
		}
	}
	slices.SortFunc(r.Mute, func(a, b Mute) int { return cmp.Or(b.Questions-a.Questions, a.Address.Compare(b.Address)) })
	slices.SortFunc(r.Conflicts, func(a, b Conflict) int { return a.Address.Compare(b.Address) })
}
