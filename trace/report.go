// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/netdev"
)

// samplesKept is the maximum number of packets that a report shows for each cause.
const samplesKept = 3

// DropReport lists the drops of a window, by namespace and cause.
type DropReport struct {
	Window      time.Duration    `json:"window_ns"`
	Groups      []DropGroup      `json:"causes"` // groups with most packets first, benign groups last
	Reconciled  []Reconciliation `json:"reconciliation,omitempty"`
	Uncounted   uint64           `json:"uncounted"`    // Drops beyond the limit of kinds.
	Interrupted uint64           `json:"interrupted"`  // Drops of the whole host that interrupted both programs of the probe.
	Hidden      uint64           `json:"hidden"`       // Drops of the whole host without a run of the probe.
	LostSamples uint64           `json:"lost_samples"` // Sampled but not read in time.
	Limits      []string         `json:"limits,omitempty"`
}

// DropGroup is the drops of one cause in one namespace.
type DropGroup struct {
	Namespace string  `json:"namespace"`
	Netns     uint64  `json:"netns"`
	Cause     Cause   `json:"cause"`
	Packets   uint64  `json:"packets"`
	Bytes     uint64  `json:"bytes"`
	PerSecond float64 `json:"per_second"`
	// Places are the kinds of drops that make up the group.
	Places  []DropPlace     `json:"places"`
	Rules   []firewall.Rule `json:"rules,omitempty"` // for firewall rules: the dropping rule, or several candidates
	Samples []*DropSample   `json:"samples,omitempty"`
	// Sampled are all sampled packets. Samples are those that a report shows.
	Sampled []*DropSample `json:"-"`
}

// DropPlace is a location in the kernel that dropped packets.
type DropPlace struct {
	Function  string  `json:"function"`
	Offset    uint64  `json:"offset"`
	Reason    string  `json:"reason"`
	Hook      Hook    `json:"hook,omitempty"`
	Tracked   Tracked `json:"tracked"`
	Interface string  `json:"interface,omitempty"`
	Packets   uint64  `json:"packets"`
}

// Reconciliation compares drop events with the kernel's own counter.
type Reconciliation struct {
	Namespace string   `json:"namespace"`
	Counter   string   `json:"counter"`
	Causes    []string `json:"causes"`
	Events    uint64   `json:"events"`
	Counted   uint64   `json:"counted"`
	// Unexplained is Counted minus Events. It is positive if the kernel dropped packets without an event.
	Unexplained int64 `json:"unexplained"`
}

// String returns the comparison as one line.
func (r Reconciliation) String() string {
	return fmt.Sprintf("%s: events %d, Δ%s %d (%d unexplained)", r.Namespace, r.Events, r.Counter, r.Counted, r.Unexplained)
}

// counterCauses lists the causes that each kernel counter includes, for both address families.
var counterCauses = []struct {
	counters []string
	causes   []*Cause
}{
	{[]string{"conntrack.drop"}, []*Cause{&CauseTableFull, &CausePortsExhausted, &CauseConfirmRace}},
	{[]string{"conntrack.insert_failed"}, []*Cause{&CausePortsExhausted, &CauseConfirmRace, &CauseLongChain}},
	{[]string{"conntrack.chain_too_long"}, []*Cause{&CauseLongChain}},
	{[]string{"TcpExt.IPReversePathFilter"}, []*Cause{&CauseRPFilter}},
	{[]string{"Ip.InAddrErrors", "Ip6InAddrErrors"}, []*Cause{&CauseForwardOff}},
	{[]string{"IpExt.InNoRoutes", "Ip6InNoRoutes"}, []*Cause{&CauseNoRoute}},
	{[]string{"Ip.FragFails", "Ip6InTooBigErrors"}, []*Cause{&CauseMTU}},
	{[]string{"Ip.InHdrErrors", "Ip6InHdrErrors"}, []*Cause{&CauseTTL, &CauseHeader}},
	{[]string{"Udp.NoPorts", "Udp6NoPorts"}, []*Cause{&CauseClosedPort}},
	{[]string{"Udp.RcvbufErrors", "Udp6RcvbufErrors"}, []*Cause{&CauseReceiveBuffer}},
	{[]string{"TcpExt.ListenOverflows"}, []*Cause{&CauseAcceptQueue}},
}

// snapshot is the state of one namespace at one time.
type snapshot struct {
	counters Counters
	counts   map[dropsDropKey]DropCount // drops of this namespace
	rules    []firewall.Rule
}

// Watcher runs one observation of drops over a window.
type Watcher struct {
	Options    DropOptions
	Namespaces []netdev.Namespace // namespaces with compared counters
	// Probe, if set, is a paused probe with the same options. Start resumes it, and Stop pauses it again.
	Probe *Drops
	// Listed, if set, caches the dropping rules of namespaces, by inode, between watches. Then rules are listed only in
	// namespaces with drops, because a list of thousands of rules costs time. If nil, the rules of every namespace are
	// listed at the start.
	Listed map[uint64][]firewall.Rule
	// PortsInUse reads the conntrack table after packets were dropped without a source port, to
	// separate exhausted pools from lost races.
	PortsInUse bool
	// OnSample, if set, receives each sample as it arrives, with its cause.
	OnSample func(*DropSample, Cause)

	drops    *Drops
	mu       sync.Mutex // protects samples while they are collected
	samples  []*DropSample
	before   map[uint64]snapshot
	problems []string
	started  time.Time
	stop     context.CancelFunc
	reading  sync.WaitGroup
}

// maxSamples limits the number of samples in a watcher's memory. A sample has about 600 bytes.
const maxSamples = 20000

// Start starts the probe and reads the counters of each namespace.
func (w *Watcher) Start(ctx context.Context) error {
	drops := w.Probe
	if drops != nil {
		if err := drops.Resume(); err != nil {
			return errors.Join(err, drops.Pause())
		}
	} else {
		var err error
		if drops, err = OpenDrops(w.Options); err != nil {
			return err
		}
	}
	w.drops = drops
	sampling, stop := context.WithCancel(ctx)
	w.stop = stop
	w.reading.Go(func() {
		if err := drops.Samples(sampling, w.addSample); err != nil {
			w.addProblem(err)
		}
	})
	w.before = map[uint64]snapshot{}
	for _, ns := range w.Namespaces {
		before := w.snapshot(ctx, ns)
		if before.rules = w.Listed[ns.Inode]; w.Listed == nil {
			before.rules, _ = dropRules(ctx, ns)
		}
		w.before[ns.Inode] = before
	}
	w.started = time.Now()
	return nil
}

func (w *Watcher) addSample(s *DropSample) {
	w.mu.Lock()
	if len(w.samples) < maxSamples {
		w.samples = append(w.samples, s)
	}
	w.mu.Unlock()
	if w.OnSample != nil {
		w.OnSample(s, causeOf(w.placeOf(&s.DropCount, s)))
	}
}

// addProblem records a failed reading. A namespace that was removed is not a problem.
func (w *Watcher) addProblem(err error) {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if text := err.Error(); !slices.Contains(w.problems, text) {
		w.problems = append(w.problems, text)
	}
}

// Started returns the start of the window.
func (w *Watcher) Started() time.Time { return w.started }

// snapshot reads the drop counts and the kernel counters of a namespace, with little time in between.
func (w *Watcher) snapshot(ctx context.Context, ns netdev.Namespace) snapshot {
	var s snapshot
	counters, _, err := ReadCounters(ctx, ns)
	if err != nil {
		w.addProblem(err)
	}
	s.counters = counters
	s.counts = map[dropsDropKey]DropCount{}
	all, err := w.drops.Counts()
	if err != nil {
		w.addProblem(err)
	}
	for _, c := range all {
		if uint64(c.Netns) == ns.Inode {
			s.counts[c.key] = c
		}
	}
	return s
}

func (w *Watcher) placeOf(c *DropCount, sample *DropSample) dropSite {
	p := dropSite{function: c.Location.Name, reason: c.Reason, hook: c.Hook, ct: c.Tracked, nftSeparate: w.drops.nftSeen}
	if sample != nil {
		p.unicast = sample.Packet.IsValid() && !sample.Packet.Dest.Addr().IsMulticast()
		p.linkLocal = sample.Packet.IsValid() && sample.Packet.Source.Addr().IsLinkLocalUnicast()
		if len(sample.Stack) > 1 {
			p.caller = sample.Stack[1].Name
		}
	}
	return p
}

// Stop ends the window and returns its report. It may be called once.
func (w *Watcher) Stop(ctx context.Context) (*DropReport, error) {
	if w.Probe != nil {
		defer func() { _ = w.Probe.Pause() }()
	} else {
		defer w.drops.Close()
	}
	r := &DropReport{Window: time.Since(w.started), Limits: w.drops.Limits()}
	known := map[uint64]bool{}
	after := map[uint64]snapshot{}
	for _, ns := range w.Namespaces {
		known[ns.Inode] = true
		after[ns.Inode] = w.snapshot(ctx, ns)
	}
	all, err := w.drops.Counts()
	w.stop()
	w.reading.Wait()
	if err != nil {
		return nil, err
	}
	for _, ns := range w.Namespaces {
		w.report(ctx, r, ns, after[ns.Inode])
	}
	w.addUnlisted(r, all, known)
	w.hostCounters(r, after)
	missed := w.drops.Missed()
	r.Uncounted, r.Interrupted, r.Hidden, r.LostSamples = missed.Kinds, missed.Interrupted, missed.Hidden, missed.Samples
	r.Limits = append(r.Limits, w.problems...)
	slices.SortStableFunc(r.Groups, func(a, b DropGroup) int {
		if a.Cause.Benign != b.Cause.Benign {
			if a.Cause.Benign {
				return 1
			}
			return -1
		}
		return cmp.Compare(b.Packets, a.Packets)
	})
	return r, nil
}

// HiddenText describes Hidden in a sentence.
func (r *DropReport) HiddenText() string {
	return fmt.Sprintf("%d drops of the whole host were not counted: this kernel ran no probe for them", r.Hidden)
}

// report adds the groups and reconciliations of one namespace.
func (w *Watcher) report(ctx context.Context, r *DropReport, ns netdev.Namespace, after snapshot) {
	before := w.before[ns.Inode]
	delta := after.counters.Sub(before.counters)
	groups := map[string]*DropGroup{}
	names := sync.OnceValue(func() map[uint32]string { return interfaceNames(ns) })
	listed := sync.OnceValue(func() []firewall.Rule { return w.list(ctx, ns) })
	for key, c := range after.counts {
		c.Packets -= before.counts[key].Packets
		c.Bytes -= before.counts[key].Bytes
		if c.Packets == 0 {
			continue
		}
		samples := w.samplesOf(key)
		var first *DropSample
		if len(samples) > 0 {
			first = samples[0]
		}
		cause := causeOf(w.placeOf(&c, first))
		if w.Options.Filter.Empty() {
			cause = refineCause(cause, delta, w.drops.nftSeen)
		}
		if cause.ID == CauseLegacyRule.ID && !slices.ContainsFunc(listed(), func(r firewall.Rule) bool { return r.Legacy }) {
			cause = CauseHookRule // nftables, on a kernel without a separate location for its drops
		}
		g := groups[cause.ID]
		if g == nil {
			g = &DropGroup{Namespace: ns.Name, Netns: ns.Inode, Cause: cause}
			groups[cause.ID] = g
		}
		g.add(&c, samples, names())
	}
	if w.Options.Filter.Empty() {
		lost, err := w.drops.losses.groups(ns, names)
		if err != nil {
			w.addProblem(err)
		}
		maps.Copy(groups, lost)
	}
	if n := delta["TcpExt.ListenOverflows"]; n > 0 && w.Options.Filter.Empty() {
		groups[CauseAcceptQueue.ID] = &DropGroup{Namespace: ns.Name, Netns: ns.Inode, Cause: CauseAcceptQueue, Packets: n}
	}
	w.correctRaced(ctx, ns, groups)
	for _, g := range groups {
		g.finish(r.Window)
		switch g.Cause.ID {
		case CauseNftRule.ID, CauseHookRule.ID, CauseLegacyRule.ID:
			w.setSuspectRules(ctx, ns, g, before.rules, listed())
		}
		r.Groups = append(r.Groups, *g)
	}
	if w.Options.Filter.Empty() && w.before[ns.Inode].counters != nil {
		r.Reconciled = append(r.Reconciled, reconcile(ns.Name, delta, groups)...)
	}
}

// Refine corrects a cause with the counters of the same window.
func Refine(c Cause, delta Counters) Cause { return refineCause(c, delta, nftDropsApart()) }

// refineCause corrects a cause that the counters of the same window exclude. If connection tracking counted no drop, a rule
// dropped the packets.
func refineCause(c Cause, delta Counters, nftSeparate bool) Cause {
	if _, known := delta["conntrack.drop"]; !known {
		return c
	}
	switch c.ID {
	case CauseTableFull.ID:
		if delta["conntrack.drop"] == 0 {
			return ruleCause(nftSeparate)
		}
	case CausePortsExhausted.ID, CauseConfirmRace.ID:
		switch failed := delta["conntrack.insert_failed"]; {
		case failed == 0:
			return ruleCause(nftSeparate)
		case failed == delta["conntrack.chain_too_long"]: // the kernel counts these as failed, too
			return CauseLongChain
		}
	}
	return c
}

func (w *Watcher) samplesOf(key dropsDropKey) []*DropSample {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*DropSample
	for _, s := range w.samples {
		if s.key == key {
			out = append(out, s)
		}
	}
	return out
}

func (g *DropGroup) add(c *DropCount, samples []*DropSample, interfaces map[uint32]string) {
	g.Packets += c.Packets
	g.Bytes += c.Bytes
	g.Places = append(g.Places, DropPlace{Function: c.Location.Name, Offset: c.Location.Offset, Reason: c.Reason,
		Hook: c.Hook, Tracked: c.Tracked, Interface: interfaces[c.IfIndex], Packets: c.Packets})
	g.Samples = append(g.Samples, samples...)
}

// finish sorts the locations and selects samples of different packets.
func (g *DropGroup) finish(window time.Duration) {
	g.PerSecond = float64(g.Packets) / window.Seconds()
	slices.SortFunc(g.Places, func(a, b DropPlace) int {
		return cmp.Or(cmp.Compare(b.Packets, a.Packets), cmp.Compare(a.Function, b.Function))
	})
	g.Sampled = g.Samples
	var kept []*DropSample
	seen := map[string]bool{}
	for _, s := range g.Samples {
		if id := s.Packet.Dest.String() + s.Packet.Source.Addr().String(); !seen[id] && len(kept) < samplesKept {
			seen[id] = true
			kept = append(kept, s)
		}
	}
	g.Samples = kept
}

// list returns the dropping rules of a namespace at the end of the window.
func (w *Watcher) list(ctx context.Context, ns netdev.Namespace) []firewall.Rule {
	rules, err := dropRules(ctx, ns)
	if err != nil {
		w.addProblem(err)
	}
	if w.Listed != nil {
		w.Listed[ns.Inode] = firewall.Counters(rules)
	}
	return rules
}

// setSuspectRules sets the rules that may have dropped the packets of the group, from a listing before and one after.
func (w *Watcher) setSuspectRules(ctx context.Context, ns netdev.Namespace, g *DropGroup, before, after []firewall.Rule) {
	hooks := map[Hook]bool{}
	for _, p := range g.Places {
		hooks[p.Hook] = true
	}
	if err := ns.Do(func() error {
		g.Rules = suspectRules(before, after, hooks, g.Sampled)
		return firewall.Describe(ctx, g.Rules)
	}); err != nil {
		w.addProblem(err)
	}
}

// reconcile compares events with counters, if one is not zero.
func reconcile(namespace string, delta Counters, groups map[string]*DropGroup) []Reconciliation {
	var out []Reconciliation
	for _, pair := range counterCauses {
		line := Reconciliation{Namespace: namespace, Counter: pair.counters[0]}
		for _, name := range pair.counters {
			line.Counted += delta[name]
		}
		for _, cause := range pair.causes {
			if g := groups[cause.ID]; g != nil {
				if cause.ID != CauseAcceptQueue.ID { // these events are derived from the counter
					line.Events += g.Packets
				}
				line.Causes = append(line.Causes, cause.ID)
			}
		}
		line.Unexplained = int64(line.Counted) - int64(line.Events)
		if line.Counted > 0 || line.Events > 0 {
			out = append(out, line)
		}
	}
	return out
}

// addUnlisted adds the drops in namespaces that were not listed, for example new ones.
func (w *Watcher) addUnlisted(r *DropReport, all []DropCount, known map[uint64]bool) {
	groups := map[string]*DropGroup{}
	for _, c := range all {
		if known[uint64(c.Netns)] {
			continue
		}
		samples := w.samplesOf(c.key)
		cause := causeOf(w.placeOf(&c, nil))
		id := fmt.Sprint(c.Netns, cause.ID)
		if groups[id] == nil {
			name := fmt.Sprintf("netns %d", c.Netns)
			if c.Netns == 0 {
				name = "unknown namespace"
			}
			groups[id] = &DropGroup{Namespace: name, Netns: uint64(c.Netns), Cause: cause}
		}
		groups[id].add(&c, samples, nil)
	}
	for _, g := range groups {
		g.finish(r.Window)
		r.Groups = append(r.Groups, *g)
	}
}

// hostCounters reconciles the counters that the kernel has for the whole host only.
func (w *Watcher) hostCounters(r *DropReport, after map[uint64]snapshot) {
	if len(w.Namespaces) == 0 || !w.Options.Filter.Empty() || w.Options.Netns != 0 {
		return
	}
	first := w.Namespaces[0].Inode
	delta := after[first].counters.Sub(w.before[first].counters)
	line := Reconciliation{Namespace: "whole host", Counter: "softnet.dropped", Counted: delta["softnet.dropped"]}
	for _, g := range r.Groups {
		if g.Cause.ID == CauseBacklog.ID {
			line.Events += g.Packets
			line.Causes = []string{CauseBacklog.ID}
		}
	}
	line.Unexplained = int64(line.Counted) - int64(line.Events)
	if line.Counted > 0 || line.Events > 0 {
		r.Reconciled = append(r.Reconciled, line)
	}
}

// interfaceNames returns the names of a namespace's interfaces by index.
func interfaceNames(ns netdev.Namespace) map[uint32]string {
	names := map[uint32]string{}
	_ = ns.Do(func() error {
		list, err := net.Interfaces()
		for _, i := range list {
			names[uint32(i.Index)] = i.Name
		}
		return err
	})
	return names
}
