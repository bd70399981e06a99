// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// Tick is the unit of time in a run. No sum of ticks is within three seconds of a timeout. A
// datapath may therefore sweep its tables every second or two.
const Tick = 19 * time.Second

// Options of a run. Zero fields mean the default.
type Options struct {
	Packets  int    // Total number; default 10000.
	Seed     uint64 // Seed of the whole run.
	PerReset int    // Events between two resets; default 2000.
	// Ignore may accept a different outcome by the result true. It is for known limits of a
	// subject.
	Ignore func(in model.Arrival, want, got model.Outcome) bool
	// Reloads changes the configuration during traffic.
	Reloads bool
	// Host changes addresses, routes, neighbours and links of the host during traffic.
	Host bool
	// NoShrink reports a disagreement without shrinking.
	NoShrink bool
}

// Disagreement is an outcome of a subject that the model does not permit.
type Disagreement struct {
	Subject  string
	Scenario string
	Seed     uint64 // Seed of the reset interval.
	Packet   int    // Number of correct packets before.
	In       model.Arrival
	Want     model.Outcome
	Got      model.Outcome
	Problem  string
	// Case is the shortest sequence with the disagreement, as a packet case.
	Case string
}

// Error describes the disagreement.
func (d *Disagreement) Error() string {
	return fmt.Sprintf("%s, scenario %s, seed %d, packet %d: %s\nin %s: %s\n\nas a packet case:\n%s", d.Subject, d.Scenario, d.Seed,
		d.Packet, d.Problem, d.In.Interface, packet.Parse(d.In.Frame), d.Case)
}

// Run sends random packets of the scenario through the subject. It returns the first disagreement
// with the model, nil for none, and the number of packets.
func Run(s golden.Subject, sc Scenario, o Options) (*Disagreement, int, error) {
	if o.Packets == 0 {
		o.Packets = 10000
	}
	if o.PerReset == 0 {
		o.PerReset = 2000
	}
	sent := 0
	for round := uint64(0); sent < o.Packets; round++ {
		seed := o.Seed<<20 + round
		events := randomEvents(seed, min(o.PerReset, o.Packets-sent+1))
		t, err := replay(s, sc, seed, events, o)
		if err != nil {
			return nil, sent, err
		}
		sent += t.packets
		if d := t.disagreement; d != nil {
			d.Packet = sent
			if o.NoShrink {
				d.Case = t.text(sc)
				return d, sent, nil
			}
			events = shrink(s, sc, seed, events[:t.at+1], o)
			if t, err = replay(s, sc, seed, events, o); err != nil {
				return nil, sent, err
			}
			d.Case = t.text(sc)
			return d, sent, nil
		}
	}
	return nil, sent, nil
}

// Compare runs the same random events on two subjects. Each has its own model, because both may
// choose ports and backends at random. The actions, the reasons and the number of packets must be
// equal.
func Compare(a, b golden.Subject, sc Scenario, o Options) (*Disagreement, int, error) {
	if o.PerReset == 0 {
		o.PerReset = 2000
	}
	sent := 0
	for round := uint64(0); sent < o.Packets; round++ {
		seed := o.Seed<<20 + round
		events := randomEvents(seed, o.PerReset)
		ta, err := replay(a, sc, seed, events, o)
		if err != nil {
			return nil, sent, err
		}
		tb, err := replay(b, sc, seed, events, o)
		if err != nil {
			return nil, sent, err
		}
		sent += ta.packets
		for i := range min(len(ta.steps), len(tb.steps)) {
			x, y := ta.steps[i].got, tb.steps[i].got
			if x.Action != y.Action || x.Reason != y.Reason || len(x.Out) != len(y.Out) {
				return &Disagreement{Subject: a.Name() + " against " + b.Name(), Scenario: sc.Name, Seed: seed, Packet: i, In: ta.steps[i].in,
					Want: x, Got: y, Problem: describe(x, y), Case: tb.text(sc)}, sent, nil
			}
		}
		for _, t := range []*trace{ta, tb} {
			if t.disagreement != nil {
				return t.disagreement, sent, nil
			}
		}
	}
	return nil, sent, nil
}

func randomEvents(seed uint64, n int) []event {
	r := rand.New(rand.NewPCG(seed, 7))
	events := make([]event, n)
	for i := range events {
		events[i] = randomEvent(r)
	}
	return events
}

// trace is the record of a run.
type trace struct {
	unresolved   []string // Unresolved neighbours.
	reloads      []reload // Other configurations for reloads.
	host         bool     // The host changes.
	steps        []judgedStep
	packets      int
	at           int // event of the disagreement
	disagreement *Disagreement
	noRoute      uint64 // Packets without a route.
	undecidable  bool   // Provisional choices permit two outcomes.
}

type judgedStep struct {
	in     model.Arrival
	want   model.Outcome
	got    model.Outcome
	wait   time.Duration
	change string // change of a backend, a mapping or the configuration, as a line of a packet case
}

// replay runs events on a fresh subject and a fresh model.
func replay(s golden.Subject, sc Scenario, seed uint64, events []event, o Options) (*trace, error) {
	c, err := sc.Config()
	if err != nil {
		return nil, err
	}
	host, unresolved := sc.hostOf(seed)
	model, err := model.New(c, host, seed)
	if err != nil {
		return nil, err
	}
	if err := s.Reset(c, host); err != nil {
		return nil, fmt.Errorf("%s: reset: %w", s.Name(), err)
	}
	w, f := &generatorState{scenario: sc, host: host}, newFollower(model)
	t := &trace{unresolved: unresolved, host: o.Host}
	if o.Reloads {
		if t.reloads, err = sc.reloads(o.Seed); err != nil {
			return nil, err
		}
	}
	for _, n := range c.NAT {
		if n.Prefix.IsValid() {
			w.prefixes = append(w.prefixes, n.Prefix)
		}
	}
	for i, e := range events {
		t.at = i
		if e.kind == waiting {
			d := Tick * time.Duration(1+e.seed%8)
			if e.seed%31 == 0 {
				d = Tick * 400
			}
			w.age++
			model.Advance(d)
			if err := s.Advance(d); err != nil {
				return nil, err
			}
			t.steps = append(t.steps, judgedStep{wait: d})
			continue
		}
		if e.kind == changing {
			if err := t.change(s, model, w, e, seed); err != nil || t.disagreement != nil || t.undecidable {
				return t, err
			}
			continue
		}
		wire := rand.New(rand.NewPCG(e.seed, 5))
		for _, a := range w.arrivals(e) {
			if err := t.packet(s, f, w, seed, a, w.alterFrame(wire, a.Arrival), o.Ignore); err != nil || t.disagreement != nil {
				return t, err
			}
		}
	}
	if err := t.flows(s, model, sc, seed); err != nil || t.disagreement != nil {
		return t, err
	}
	return t, t.counters(s, model, sc, seed)
}

// change applies one change: a mapping, a backend's state, another configuration, or the host.
func (t *trace) change(s golden.Subject, model *model.Model, w *generatorState, e event, seed uint64) error {
	r := rand.New(rand.NewPCG(e.seed, 2))
	if t.host && r.IntN(4) > 0 {
		return t.hostChanges(s, model, w, r)
	}
	if len(t.reloads) > 0 && (len(w.scenario.MapRequests)+len(w.scenario.Changing) == 0 || r.IntN(3) == 0) {
		return t.reload(s, model, w, r)
	}
	if len(w.scenario.MapRequests) > 0 {
		return t.mapping(s, model, w, r, seed)
	}
	if len(w.scenario.Changing) == 0 {
		return nil
	}
	service, backend, _ := strings.Cut(pick(r, w.scenario.Changing), "/")
	state := pick(r, []datapath.State{datapath.Up, datapath.Up, datapath.Drain, datapath.Down})
	if err := model.SetState(service, backend, state); err != nil {
		if len(t.reloads) > 0 { // the backend is not configured now
			err = nil
		}
		return err
	}
	w.dropUncertain()
	t.steps = append(t.steps, judgedStep{change: fmt.Sprintf("backend %s/%s %s", service, backend, state)})
	return s.SetState(service, backend, state)
}

// dropUncertain drops conversations with uncertain flows after a change. Flows may have ended. The
// remaining fragments of a packet may also lose their flow, or reach another backend of a stateless
// service.
func (w *generatorState) dropUncertain() {
	w.age++
	w.conversations = slices.DeleteFunc(w.conversations, func(c *hostPair) bool { return isFragment(c.in[0].Frame) || isFragment(c.in[1].Frame) })
}

// packet sends one packet as frame "in", and compares the outcomes.
func (t *trace) packet(s golden.Subject, f *choiceFollower, w *generatorState, seed uint64, a arrivingFrame, in model.Arrival, ignore func(model.Arrival, model.Outcome, model.Outcome) bool) error {
	sc := w.scenario
	got, err := s.Step(in)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", s.Name(), packet.Parse(in.Frame), err)
	}
	t.packets++
	want := f.expectedOutcome(in, got)
	t.steps = append(t.steps, judgedStep{in: in, want: want, got: got})
	if w.noRoute(want) || w.noRoute(got) {
		t.noRoute++
	}
	if p := describe(w.observablePart(in.Frame, want), w.observablePart(in.Frame, got)); p != "" && (ignore == nil || !ignore(in, want, got)) {
		t.disagreement = &Disagreement{Subject: s.Name(), Scenario: sc.Name, Seed: seed, In: in, Want: want, Got: got, Problem: p}
		return nil
	}
	if p := Unsound(in.Frame, got); p != "" {
		t.disagreement = &Disagreement{Subject: s.Name(), Scenario: sc.Name, Seed: seed, In: in, Want: want, Got: got, Problem: p}
		return nil
	}
	w.record(a, got)
	return nil
}

// Unsound returns the fault if a datapath made an incorrect packet from a correct one, otherwise
// "".
func Unsound(in []byte, got model.Outcome) string {
	for _, d := range got.Out {
		if err := packet.Verify(d.Frame); err != nil && packet.Verify(in) == nil && !quotesRouted(in) {
			return fmt.Sprintf("a correct packet became an incorrect one: %v: %s", err, packet.Parse(d.Frame))
		}
	}
	return ""
}

// quotesRouted reports whether a frame is an ICMP error about a packet with an unexpired routing
// header. The quoted checksum covers the final destination in that header. An IPv4 translation has
// no place for this destination.
func quotesRouted(in []byte) bool {
	p := packet.Parse(in)
	if _, ok := packet.Find[*packet.ICMP](p); !ok {
		return false
	}
	r, ok := packet.Find[*packet.Routing](p)
	return ok && r.SegmentsLeft > 0
}

// describe returns the difference between two outcomes, "" for none.
func describe(want, got model.Outcome) string {
	var out []string
	if want.Action != got.Action || want.Reason != got.Reason {
		out = append(out, fmt.Sprintf("want %s %s, got %s %s", want.Action, want.Reason, got.Action, got.Reason))
	}
	if want.Planned != got.Planned {
		out = append(out, fmt.Sprintf("want the plan %v, got %v", want.Planned, got.Planned))
	}
	if len(want.Out) != len(got.Out) {
		out = append(out, fmt.Sprintf("want %d packets out, got %d", len(want.Out), len(got.Out)))
	}
	for i := range min(len(want.Out), len(got.Out)) {
		if want.Out[i].Interface != got.Out[i].Interface {
			out = append(out, fmt.Sprintf("want it out of %s, got it out of %s", want.Out[i].Interface, got.Out[i].Interface))
		}
		if d := packet.Diff(want.Out[i].Frame, got.Out[i].Frame); d != "" {
			out = append(out, d)
		}
	}
	return strings.Join(out, "\n")
}

// flows compares the live flows at the end of a run.
func (t *trace) flows(s golden.Subject, model *model.Model, sc Scenario, seed uint64) error {
	got, err := s.Flows()
	if err != nil {
		return err
	}
	want := model.Flows()
	a, b := flowNames(want), flowNames(got)
	if slices.Equal(a, b) {
		return nil
	}
	var diff []string
	for _, n := range a {
		if !slices.Contains(b, n) {
			diff = append(diff, "missing: "+n)
		}
	}
	for _, n := range b {
		if !slices.Contains(a, n) {
			diff = append(diff, "too many: "+n)
		}
	}
	t.disagreement = &Disagreement{Subject: s.Name(), Scenario: sc.Name, Seed: seed,
		Problem: fmt.Sprintf("want %d flows, got %d\n%s", len(a), len(b), strings.Join(diff[:min(len(diff), 10)], "\n"))}
	return nil
}

// counters compares the counts of services, backends and rules with the model. It compares the
// counts by reason with the subject's outcomes.
func (t *trace) counters(s golden.Subject, model *model.Model, sc Scenario, seed uint64) error {
	c, err := s.Counters()
	if err != nil {
		return err
	}
	want, got := counts(model.Counters(), model), counts(c, model)
	for _, s := range c.Services {
		name, again := s.Name+" refused", model.Retransmissions(s.Name)
		if more := got[name] - want[name]; got[name] > want[name] && more <= min(again, 2+again/20) {
			want[name] = got[name]
		}
	}
	for _, n := range c.NAT {
		packets, bytes := n.Name+" packets", n.Name+" bytes"
		if d := int64(got[packets] - want[packets]); d != 0 && max(d, -d) <= int64(t.noRoute) {
			want[packets], want[bytes] = got[packets], got[bytes]
		}
	}
	for _, st := range t.steps {
		if st.in.Frame != nil && c.Reasons != nil {
			want[fmt.Sprintf("reason %s %s %s", golden.Family(st.in.Frame, st.got.Reason), st.got.Action, st.got.Reason)]++
		}
	}
	var diff []string
	for k, n := range want {
		if got[k] != n {
			diff = append(diff, fmt.Sprintf("%s: want %d, got %d", k, n, got[k]))
		}
	}
	for k, n := range got {
		if _, ok := want[k]; !ok && n > 0 {
			diff = append(diff, fmt.Sprintf("%s: want none, got %d", k, n))
		}
	}
	if len(diff) > 0 {
		slices.Sort(diff)
		t.disagreement = &Disagreement{Subject: s.Name(), Scenario: sc.Name, Seed: seed,
			Problem: "counters: " + strings.Join(diff[:min(len(diff), 10)], "\n")}
	}
	return nil
}

// counts returns the counters as a map. It omits live flows, because flows compares them. It adds
// up backends with provisional shares.
func counts(c *datapath.Counters, model *model.Model) map[string]uint64 {
	out := map[string]uint64{}
	for _, s := range c.Services {
		out[s.Name+" connections"], out[s.Name+" packets"], out[s.Name+" bytes"] = s.Connections, s.Packets, s.Bytes
		out[s.Name+" refused"] = s.Refused
		for _, b := range s.Backends {
			if model.Uncountable(s.Name) {
				continue
			}
			name := s.Name + "/" + b.Name
			if model.Miscounted(s.Name) {
				name = s.Name + "/*"
			}
			out[name+" connections"] += b.Connections
			out[name+" packets"] += b.Packets
			out[name+" bytes"] += b.Bytes
		}
	}
	for _, n := range c.NAT {
		out[n.Name+" packets"], out[n.Name+" bytes"] = n.Packets, n.Bytes
	}
	for _, r := range c.Reasons {
		out["reason "+r.Family+" "+r.Action+" "+r.Reason] = r.Packets
	}
	return out
}

func flowNames(flows []flow.Flow) []string {
	var out []string
	for _, f := range flows {
		out = append(out, f.Original.String()) // the reply tuple may contain an unconfirmed port
	}
	sort.Strings(out)
	return out
}

// shrinkFor limits the time for shrinking: each try may reload the programs.
const shrinkFor = time.Minute

// shrink removes events while the disagreement remains: first halves, then smaller groups.
func shrink(s golden.Subject, sc Scenario, seed uint64, events []event, o Options) []event {
	fails := func(e []event) bool {
		t, err := replay(s, sc, seed, e, o)
		return err == nil && t.disagreement != nil
	}
	end := time.Now().Add(shrinkFor)
	for size := len(events) / 2; size > 0; size /= 2 {
		for from := 0; from+size <= len(events) && time.Now().Before(end); {
			fewer := slices.Concat(events[:from], events[from+size:])
			if fails(fewer) {
				events = fewer
			} else {
				from += size
			}
		}
	}
	return events
}
