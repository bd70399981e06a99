// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// Target identifies exchanges in another observation, by their client and their destination before translation.
type Target struct {
	Protocol flow.Protocol
	Client   netip.Addr
	Dest     netip.AddrPort
}

// target returns the target of an exchange. Ports of ICMP are identifiers, which change.
func (e *Exchange) target() Target {
	t := Target{e.Request.Protocol, e.Request.Source.Addr(), e.Request.Dest}
	if !t.Protocol.HasPorts() {
		t.Dest = netip.AddrPortFrom(t.Dest.Addr(), 0)
	}
	return t
}

// Targets returns the targets of the members of a class.
func (c *Class) Targets() map[Target]bool {
	targets := map[Target]bool{}
	for _, e := range c.Members {
		targets[e.target()] = true
	}
	return targets
}

// Tally counts exchanges that were answered, and those that failed or were refused by a rule of this host.
type Tally struct {
	Answered int `json:"answered"`
	Failed   int `json:"failed"`
}

// All is the number of exchanges.
func (t Tally) All() int { return t.Answered + t.Failed }

// Plus adds two tallies.
func (t Tally) Plus(o Tally) Tally { return Tally{t.Answered + o.Answered, t.Failed + o.Failed} }

// Tally divides the exchanges of the report into those of the targets and all others. If no exchange has one of the
// targets, exchanges of the same clients and protocols replace them: clients may use other servers meanwhile.
func (r *Report) Tally(targets map[Target]bool) (chosen, others Tally) {
	clients := map[Target]bool{}
	for t := range targets {
		clients[Target{Protocol: t.Protocol, Client: t.Client}] = true
	}
	var same, rest Tally
	for t, n := range r.tallies {
		if targets[t] {
			chosen = chosen.Plus(n)
		} else {
			others = others.Plus(n)
		}
		if t.Dest = (netip.AddrPort{}); clients[t] {
			same = same.Plus(n)
		} else {
			rest = rest.Plus(n)
		}
	}
	if chosen.All() == 0 {
		return same, rest
	}
	return chosen, others
}

// count adds an exchange to the tallies.
func (r *Report) count(e *Exchange, v Verdict) {
	t := e.target()
	n := r.tallies[t]
	switch v {
	case Good:
		n.Answered++
	case Failed, Filtered:
		n.Failed++
	default:
		return
	}
	r.tallies[t] = n
}
