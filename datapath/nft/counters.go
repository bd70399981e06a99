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

// retired holds what rules and elements had counted before they were rewritten
// or removed, by owner and backend: counts of Sluice never go back while it runs.
type retired map[meter]nfnl.Counts

// meter names what is counted: a backend of a service, or what it refused.
type meter struct {
	owner   string // "service web", "nat office"; of what no rule translates the reason: "reason invalid"
	backend string // key of the backend; "refused"; "" for NAT rules; of a reason the family
}

const (
	refusedMeter = "refused"
	reasonPrefix = "reason "
)

// retire reads the counts that a delta is about to end. Counts are not worth an
// apply that fails: what cannot be read is left out.
func (d *Datapath) retire(delta *ruleset.Delta) retired {
	ended := make(retired)
	if d.compiled == nil {
		return ended
	}
	d.retireChains(delta, ended)
	ending := make(map[ruleset.ID]map[ruleset.Element]meter)
	for _, e := range delta.DelElements {
		s := d.compiled.Service(strings.TrimPrefix(e.Owner, "service "))
		if set := delta.Sets[e.Of.Set]; s == nil || set == nil || !set.Counter {
			continue
		}
		if ending[e.Of.Set] == nil {
			ending[e.Of.Set] = make(map[ruleset.Element]meter)
		}
		ending[e.Of.Set][e.Of] = meter{e.Owner, s.SlotOwner(e.Of)}
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

// retireChains is retire for the rules of chains.
func (d *Datapath) retireChains(delta *ruleset.Delta, ended retired) {
	ending := make(map[ruleset.ID]meter)
	for _, c := range delta.FlushChains {
		if m, ok := d.chainMeter(c.Owner, c.Of); ok {
			ending[c.Of.ID] = m
		}
	}
	_ = d.chainCounts(ending, ended)
}

// chainCounts adds what the rules of chains counted. A chain that is not there counted nothing.
func (d *Datapath) chainCounts(chains map[ruleset.ID]meter, to retired) error {
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

func (r retired) add(m meter, n nfnl.Counts) {
	was := r[m]
	r[m] = nfnl.Counts{Packets: was.Packets + n.Packets, Bytes: was.Bytes + n.Bytes}
}

// merge adds counts that have ended.
func (r *retired) merge(ended retired) {
	if *r == nil {
		*r = make(retired)
	}
	for m, n := range ended {
		r.add(m, n)
	}
}

// chainMeter tells what the counters of a chain mean.
func (d *Datapath) chainMeter(owner string, c *ruleset.Chain) (meter, bool) {
	if reason := compile.StrayReason(c.ID); owner == "" && reason != "" {
		return meter{reasonPrefix + reason, map[ruleset.Family]string{ruleset.IP: "ipv4", ruleset.IP6: "ipv6"}[c.ID.Table]}, true
	}
	name, isService := strings.CutPrefix(owner, "service ")
	if !isService {
		return meter{owner, ""}, strings.HasPrefix(owner, "nat ") && !compile.DropsWithoutAddress(c.Name)
	}
	s := d.compiled.Service(name)
	if s == nil {
		return meter{}, false
	}
	if key, ok := s.ChainOwner(c.Name); ok {
		return meter{owner, key}, true
	}
	return meter{owner, refusedMeter}, strings.HasSuffix(c.Name, "/refused") || s.IsDown(c)
}

// Counters reads what was counted. Connections are exact: they are the packets
// that open them, counted where the backend is chosen. Packets and Bytes are
// those of all packets in the modes dsr and stateless, and of the opening
// packets alone in the modes dnat and fullnat, whose other packets meet no rule
// of Sluice. Active is -1: Flows tells.
func (d *Datapath) Counters(ctx context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &datapath.Counters{}
	if d.compiled == nil || ctx.Err() != nil {
		return out, ctx.Err()
	}
	counts := make(retired, len(d.retired))
	for m, n := range d.retired {
		counts[m] = n
	}
	chains := make(map[ruleset.ID]meter)
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
		c := counts[meter{"nat " + n.Name, ""}]
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

// slotCounts adds what the elements of the shared maps of slots counted.
func (d *Datapath) slotCounts(counts retired) error {
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
				counts.add(meter{owner, s.SlotOwner(e)}, n)
			}
		}
	}
	return nil
}

func (d *Datapath) serviceCounters(out *datapath.Counters, counts retired) {
	for _, s := range d.snapshot.Services {
		owner := "service " + s.Name
		c := datapath.ServiceCounters{Name: s.Name, Active: -1, Refused: counts[meter{owner, refusedMeter}].Packets}
		perPacket := s.Mode == "dsr" || s.Mode == "stateless"
		for _, b := range s.Backends {
			n := counts[meter{owner, b.Key()}]
			k := datapath.BackendCounters{Name: b.Name, Connections: n.Packets, Packets: n.Packets, Bytes: n.Bytes, Active: -1}
			if perPacket {
				k.Connections = 0 // not told apart without connection tracking
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
