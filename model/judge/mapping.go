// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

// MapRequests describes random mapping requests of inside hosts under a rule (RFC 6887).
type MapRequests struct {
	Rule    string
	Inside  []netip.Addr
	Outside []netip.Addr
	Ports   flow.Ports // ports of the outside endpoint
}

// mapRequest returns a new mapping, or an existing one to end.
func (w *generatorState) mapRequest(r *rand.Rand) (m datapath.Mapping, again bool) {
	if n := len(w.mapped); n > 0 && r.IntN(3) == 0 {
		return w.mapped[r.IntN(n)], true
	}
	ask := pick(r, w.scenario.MapRequests)
	m = datapath.Mapping{Rule: ask.Rule, Protocol: pick(r, []flow.Protocol{flow.TCP, flow.UDP}),
		Inside:  netip.AddrPortFrom(pick(r, ask.Inside), uint16(4000+r.IntN(20))),
		Outside: netip.AddrPortFrom(pick(r, ask.Outside), ask.Ports.First+uint16(r.IntN(ask.Ports.Len())))}
	for _, old := range w.mapped {
		if old.Rule == m.Rule && old.Protocol == m.Protocol && old.Inside == m.Inside {
			return old, true
		}
	}
	return m, false
}

// mapping creates or ends a mapping.
func (t *trace) mapping(s golden.Subject, model *model.Model, w *generatorState, r *rand.Rand, seed uint64) error {
	m, again := w.mapRequest(r)
	if !again && !model.MayAsk(m) {
		return nil
	}
	line := fmt.Sprintf("map %s %s %s %s", m.Rule, m.Protocol, m.Inside, m.Outside)
	w.age++ // existing flows may be different now
	if again {
		t.steps = append(t.steps, judgedStep{change: "un" + line})
		w.mapped = slices.DeleteFunc(w.mapped, func(x datapath.Mapping) bool { return x == m })
		model.Unmap(m)
		return s.Unmap(m)
	}
	got, want := s.Map(m), model.Map(m)
	switch {
	case got == nil && want == nil:
		w.mapped = append(w.mapped, m)
	case want != nil:
		line += " refused"
	}
	t.steps = append(t.steps, judgedStep{change: line})
	if (got == nil) == (want == nil) {
		return nil
	}
	if t.undecidable = model.MappingUndecidable(m); !t.undecidable {
		t.disagreement = &Disagreement{Subject: s.Name(), Scenario: w.scenario.Name, Seed: seed,
			Problem: fmt.Sprintf("%s: the model returns %v, the datapath %v", line, want, got)}
	}
	return nil
}
