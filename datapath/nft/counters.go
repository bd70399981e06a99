// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/nfnl"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// retiredCounts has the counts of rules and elements that were rewritten or removed, by owner and
// backend. Counters of Sluice never decrease while it runs.
type retiredCounts map[counterKey]nfnl.Counts

// counterKey identifies a counter: a backend of a service, its refused packets, a NAT rule, or a reason.
type counterKey struct {
	owner   string // "service web", "nat office", or for untranslated packets the reason: "reason invalid".
	backend string // Key of the backend; "refused"; "" for NAT rules; the family for reasons.
}

const (
	refusedMeter = "refused"
	reasonPrefix = "reason "
)

// readRetired reads the counts that a delta is about to remove. A count that cannot be read is omitted,
// so that it does not fail the apply.
func (d *Datapath) readRetired(delta *ruleset.Delta) retiredCounts {
	ended := make(retiredCounts)
	if d.compiled == nil {
		return ended
	}
	d.retireChains(delta, ended)
	ending := make(map[ruleset.ID]map[ruleset.Element]counterKey)
	for _, e := range delta.DelElements {
		s := d.compiled.Service(strings.TrimPrefix(e.Owner, "service "))
		if set := delta.Sets[e.Of.Set]; s == nil || set == nil || !set.Counter {
			continue
		}
		if ending[e.Of.Set] == nil {
			ending[e.Of.Set] = make(map[ruleset.Element]counterKey)
		}
		ending[e.Of.Set][e.Of] = counterKey{e.Owner, s.SlotOwner(e.Of)}
	}
	for id, elements := range ending {
		set := delta.Sets[id]
		if len(elements) > manyElements {
			_ = d.conn.EachElementCount(set, func(e ruleset.Element, n nfnl.Counts) {
				if m, ok := elements[e]; ok {
					ended.add(m, n)
				}
			})
			continue
		}
		for e, m := range elements {
			if n, err := d.conn.ElementCounts(set, e); err == nil {
				ended.add(m, n)
			}
		}
	}
	return ended
}

// retireChains is like readRetired, for the rules of chains.
func (d *Datapath) retireChains(delta *ruleset.Delta, ended retiredCounts) {
	ending := make(map[ruleset.ID]counterKey)
	for _, c := range delta.FlushChains {
		if m, ok := d.chainMeter(c.Owner, c.Of); ok {
			ending[c.Of.ID] = m
		}
	}
	_ = d.chainCounts(ending, ended)
}

// chainCounts adds the counts of the rules in chains. A missing chain has no counts.
func (d *Datapath) chainCounts(chains map[ruleset.ID]counterKey, to retiredCounts) error {
	add := func(id ruleset.ID, n nfnl.Counts) {
		if m, ok := chains[id]; ok && n != (nfnl.Counts{}) {
			to.add(m, n)
		}
	}
	if len(chains) > manyElements {
		return d.conn.EachCount(add)
	}
	for id := range chains {
		n, err := d.conn.ChainCounts(id)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		add(id, n)
	}
	return nil
}

func (r retiredCounts) add(m counterKey, n nfnl.Counts) {
	was := r[m]
	r[m] = nfnl.Counts{Packets: was.Packets + n.Packets, Bytes: was.Bytes + n.Bytes}
}

// merge adds the counts of removed objects.
func (r *retiredCounts) merge(ended retiredCounts) {
	if *r == nil {
		*r = make(retiredCounts)
	}
	for m, n := range ended {
		r.add(m, n)
	}
}

// chainMeter returns the meter of the counters in a chain, and false if they have none.
func (d *Datapath) chainMeter(owner string, c *ruleset.Chain) (counterKey, bool) {
	if reason := compile.StrayReason(c.ID); owner == "" && reason != "" {
		return counterKey{reasonPrefix + reason, map[ruleset.Family]string{ruleset.IP: "ipv4", ruleset.IP6: "ipv6"}[c.ID.Table]}, true
	}
	name, isService := strings.CutPrefix(owner, "service ")
	if !isService {
		return counterKey{owner, ""}, strings.HasPrefix(owner, "nat ") && !compile.DropsWithoutAddress(c.Name)
	}
	s := d.compiled.Service(name)
	if s == nil {
		return counterKey{}, false
	}
	if key, ok := s.ChainOwner(c.Name); ok {
		return counterKey{owner, key}, true
	}
	return counterKey{owner, refusedMeter}, strings.HasSuffix(c.Name, "/refused") || s.IsDown(c)
}

// Counters reads all counters. Connections are exact: the first packet of each is counted when its
// backend is chosen. Packets and Bytes include all packets in the modes dsr and stateless. In the
// modes dnat and fullnat they include the first packets only, because later packets pass no rule of
// Sluice. Active is -1; see Flows.
func (d *Datapath) Counters(ctx context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &datapath.Counters{}
	if d.compiled == nil || ctx.Err() != nil {
		return out, ctx.Err()
	}
	counts := make(retiredCounts, len(d.retired))
	for m, n := range d.retired {
		counts[m] = n
	}
	chains := make(map[ruleset.ID]counterKey)
	for _, f := range d.compiled.Ruleset.Fragments {
		for _, c := range f.Chains {
			if !slices.ContainsFunc(c.Rules, nfnl.HasCounter) {
				continue
			}
			if m, ok := d.chainMeter(f.Owner, c); ok {
				chains[c.ID] = m
			}
		}
	}
	if err := d.chainCounts(chains, counts); err != nil {
		return nil, nfnl.Explain(err)
	}
	if err := d.slotCounts(counts); err != nil {
		return nil, err
	}
	d.serviceCounters(out, counts)
	for _, n := range d.snapshot.NAT {
		c := counts[counterKey{"nat " + n.Name, ""}]
		out.NAT = append(out.NAT, datapath.RuleCounters{Name: n.Name, Packets: c.Packets, Bytes: c.Bytes})
	}
	for m, n := range counts {
		if reason, ok := strings.CutPrefix(m.owner, reasonPrefix); ok {
			out.Reasons = append(out.Reasons, datapath.ReasonCounter{Family: m.backend, Action: "drop", Reason: reason, Packets: n.Packets})
		}
	}
	slices.SortFunc(out.Reasons, func(a, b datapath.ReasonCounter) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Reason, b.Reason))
	})
	return out, d.ruleCounters(out)
}

// slotCounts adds the counts of the elements in the shared maps of slots.
func (d *Datapath) slotCounts(counts retiredCounts) error {
	counted := map[ruleset.Element]nfnl.Counts{}
	for _, set := range d.compiled.Ruleset.Fragments[0].Sets {
		if !set.Counter {
			continue
		}
		err := d.conn.EachElementCount(set, func(e ruleset.Element, n nfnl.Counts) {
			if n != (nfnl.Counts{}) {
				counted[e] = n
			}
		})
		if err != nil {
			return nfnl.Explain(err)
		}
	}
	if len(counted) == 0 {
		return nil
	}
	for _, s := range d.compiled.Services {
		owner := "service " + s.Name
		for _, e := range s.Fragment.Elements {
			if n, ok := counted[e]; ok && s.InSlots(e) {
				counts.add(counterKey{owner, s.SlotOwner(e)}, n)
			}
		}
	}
	return nil
}

func (d *Datapath) serviceCounters(out *datapath.Counters, counts retiredCounts) {
	for _, s := range d.snapshot.Services {
		owner := "service " + s.Name
		c := datapath.ServiceCounters{Name: s.Name, Active: -1, Refused: counts[counterKey{owner, refusedMeter}].Packets}
		perPacket := s.Mode == "dsr" || s.Mode == "stateless"
		for _, b := range s.Backends {
			n := counts[counterKey{owner, b.Key()}]
			k := datapath.BackendCounters{Name: b.Name, Connections: n.Packets, Packets: n.Packets, Bytes: n.Bytes, Active: -1}
			if perPacket {
				k.Connections = 0 // unknown without connection tracking
			}
			c.Connections += k.Connections
			c.Packets += k.Packets
			c.Bytes += k.Bytes
			c.Backends = append(c.Backends, k)
		}
		out.Services = append(out.Services, c)
	}
}

// ruleCounters reads the named counters of firewall rules.
func (d *Datapath) ruleCounters(out *datapath.Counters) error {
	if len(d.snapshot.Rules) == 0 {
		return nil
	}
	named := make(map[string]nfnl.Counts)
	err := d.conn.EachCounter(func(name string, n nfnl.Counts) { named[name] = n })
	if err != nil {
		return nfnl.Explain(err)
	}
	for i, r := range d.snapshot.Rules {
		name := compile.RuleName(r, i)
		n := named[compile.RuleCounter(name)]
		out.Rules = append(out.Rules, datapath.RuleCounters{Name: name, Packets: n.Packets, Bytes: n.Bytes})
	}
	return nil
}
