// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/replay"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/packet"
)

var _ datapath.Explainer = (*Datapath)(nil)

// Explain replays a packet in its own network namespace with the active rules. If the host tracks
// the connection, the replay has its conntrack entry too.
func (d *Datapath) Explain(ctx context.Context, q datapath.Question) (*datapath.Explanation, error) {
	d.mu.Lock()
	x := explainer{q: q, snapshot: d.snapshot, labels: d.labels(), sysctl: d.host.sysctl, networks: d.networks, bridges: d.host.bridges()}
	compiled := d.compiled
	d.mu.Unlock()
	if compiled == nil || x.snapshot == nil || !slices.ContainsFunc(compiled.Ruleset.Fragments, func(f *ruleset.Fragment) bool { return len(f.Chains) > 0 }) {
		return nil, datapath.ErrIdle
	}
	flags := packet.SYN
	existing, err := d.entry(ctx, q.Tuple)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	if existing != nil {
		x.entry, flags = existing, packet.ACK
		if q.Tuple.Protocol == flow.SCTP {
			return nil, errors.New("explain: an SCTP association with this tuple is tracked already, which cannot be replayed: sluice show flows has it")
		}
	}
	p, err := q.Packet(flags)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	x.answer, err = replay.Run(ctx, replay.Question{Home: d.host.netns, Ruleset: compiled.Ruleset, In: q.Interface, Source: q.Tuple.Source.Addr(), Packet: p, Entry: existing})
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	others, err := d.conn.OtherTables()
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	e := x.explanation()
	if len(others) > 0 {
		e.Notes = append(e.Notes, "not replayed: rules of other programs in the tables "+strings.Join(others, ", "))
	}
	return e, nil
}

// entry returns the conntrack entry of a tuple, or nil.
func (d *Datapath) entry(ctx context.Context, t flow.Tuple) (*conntrack.Entry, error) {
	c, err := d.tracking.Sibling()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Get(ctx, t)
}

// explainer converts the result of a replay to an Explanation.
type explainer struct {
	q        datapath.Question
	snapshot *datapath.Snapshot
	labels   *labels
	sysctl   func(key string) string // of the host
	networks []netip.Prefix          // Directly connected to the host.
	bridges  []bridge                // Without hairpin mode.
	entry    *conntrack.Entry        // Conntrack entry of the host, or nil.
	answer   *replay.Answer
	e        *datapath.Explanation
	service  *config.Service
	nat      *config.NATRule
}

func (x *explainer) addStep(format string, args ...any) {
	x.e.Steps = append(x.e.Steps, fmt.Sprintf(format, args...))
}

func (x *explainer) explanation() *datapath.Explanation {
	a := x.answer
	x.e = &datapath.Explanation{Datapath: "nftables", Interface: a.In, Before: x.q.Tuple, After: x.q.Tuple, Existing: x.entry != nil, Notes: a.Omitted}
	x.addStep("arrives on %s: %s", a.In, x.q.Tuple)
	if x.entry != nil {
		x.addStep("belongs to a tracked connection")
	}
	for _, s := range a.Steps {
		x.e.Rules = append(x.e.Rules, matchOf(s))
	}
	x.setAction()
	x.uplink()
	if x.labels != nil {
		x.owner()
	}
	if x.e.Reason == "" {
		x.e.Reason = x.forwardReason()
	}
	if x.e.After != x.e.Before {
		x.addStep("becomes %s", x.e.After)
	}
	switch {
	case x.e.Out != "" && x.e.NextHop.IsValid():
		x.addStep("leaves by %s, next hop %s", x.e.Out, x.e.NextHop)
	case x.e.Out != "":
		x.addStep("leaves by %s, selected by its mark; see 'ip rule' and 'ip route show table all' for the next hop", x.e.Out)
	}
	x.addCaveats()
	x.addStep("%s: %s", x.e.Action, x.e.Reason)
	return x.e
}

func matchOf(s replay.Step) datapath.Met {
	m := datapath.Met{Chain: s.Chain.Table.String() + " " + s.Chain.Name, Rule: s.Rule.Text, Owner: s.Owner, Verdict: s.Verdict.String()}
	if m.Owner == "" {
		m.Owner = s.Rule.Comment
	}
	switch {
	case s.Goes:
		m.Verdict = "continue"
	case s.Verdict.Code == stolen:
		m.Verdict = "sent"
	}
	return m
}

// stolen is NF_STOLEN: the rule itself has sent the packet.
const stolen = 2

// setAction sets the action: forward, drop, or pass to the host.
func (x *explainer) setAction() {
	a, e := x.answer, x.e
	var answers []string
	var left *replay.Sent
	for i := range a.Sent {
		if text := x.describeRefusal(a.Sent[i]); text != "" {
			answers = append(answers, text)
		} else if left == nil && x.sameProtocol(a.Sent[i].Packet) {
			left = &a.Sent[i]
		}
	}
	dropped := slices.IndexFunc(a.Steps, func(s replay.Step) bool { return !s.Goes && s.Verdict.Code == ruleset.Drop })
	if a.Routed.IsValid() && a.Routed.Protocol.HasPorts() {
		e.After = a.Routed
	}
	switch {
	case dropped >= 0:
		e.Action, e.Reason, e.After = "drop", dropReason(a.Steps[:dropped+1]), e.Before
	case a.Local:
		e.Action, e.Reason = "pass", "not-routed"
		return // the replies of its sockets are not part of the explanation
	case left != nil:
		e.Action, e.Out = "forward", left.Out
		if a.HopOut == left.Out {
			e.NextHop = a.Hop
		}
		if out, ok := x.tuple(left.Packet); ok {
			e.After = out
		}
	default:
		e.Action = "drop"
		e.Reason = x.kernelReason(answers)
	}
	for _, text := range answers {
		x.addStep("answered with %s", text)
	}
}

// sameProtocol reports whether a packet has the protocol of the question. The kernel also sends packets of
// its own, such as reports of multicast groups.
func (x *explainer) sameProtocol(p packet.Packet) bool {
	for _, l := range p {
		switch l := l.(type) {
		case *packet.TCP:
			return x.q.Tuple.Protocol == flow.TCP
		case *packet.UDP:
			return x.q.Tuple.Protocol == flow.UDP
		case *packet.SCTP:
			return x.q.Tuple.Protocol == flow.SCTP
		case *packet.ICMP:
			return l.V6 == (x.q.Tuple.Protocol == flow.ICMPv6) && l.IsQuery()
		}
	}
	for i, l := range p {
		switch b := p[i:].Build(); l.(type) {
		case *packet.IPv4:
			return flow.Protocol(b[9]) == x.q.Tuple.Protocol
		case *packet.IPv6:
			return flow.Protocol(b[6]) == x.q.Tuple.Protocol
		}
	}
	return false
}

// describeRefusal describes a packet that refuses the replayed one: a TCP reset or an ICMP error to its
// source. It returns "" for other packets.
func (x *explainer) describeRefusal(s replay.Sent) string {
	t, _ := x.tuple(s.Packet)
	if t.Dest.Addr() != x.q.Tuple.Source.Addr() {
		return ""
	}
	if p, ok := packet.Find[*packet.TCP](s.Packet); ok && p.Flags&packet.RST != 0 {
		return "tcp reset"
	}
	if p, ok := packet.Find[*packet.ICMP](s.Packet); ok && p.IsError() {
		return fmt.Sprintf("icmp type %d code %d", p.Type, p.Code)
	}
	return ""
}

// tuple returns the packet's outermost addresses and ports.
func (x *explainer) tuple(p packet.Packet) (t flow.Tuple, ok bool) {
	var src, dst netip.Addr
	sport, dport := x.q.Tuple.Source.Port(), x.q.Tuple.Dest.Port()
	for _, l := range p {
		switch l := l.(type) {
		case *packet.IPv4:
			if src.IsValid() {
				continue // quoted in an ICMP error
			}
			src, dst = l.Src, l.Dst
		case *packet.IPv6:
			if src.IsValid() {
				continue
			}
			src, dst = l.Src, l.Dst
		case *packet.TCP:
			sport, dport = l.SrcPort, l.DstPort
		case *packet.UDP:
			sport, dport = l.SrcPort, l.DstPort
		case *packet.SCTP:
			sport, dport = l.SrcPort, l.DstPort
		case *packet.ICMP:
			sport = l.ID()
		}
	}
	return flow.Tuple{Protocol: x.q.Tuple.Protocol, Source: netip.AddrPortFrom(src, sport), Dest: netip.AddrPortFrom(dst, dport)}, src.IsValid()
}

// reasonWords maps a part of the rule before the drop to the reason. The first match applies.
var reasonWords = []struct{ text, reason string }{
	{"ct count over", "limit-connections"}, {"limit rate", "limit-rate"}, {"tcp flags", "strict-tcp"}, {"!= @", "not-allowed"}, {" @", "denied"},
}

// dropReason returns the reason why the last step dropped the packet.
func dropReason(steps []replay.Step) string {
	last := steps[len(steps)-1]
	if compile.DropsWithoutAddress(last.Chain.Name) {
		return "no-address"
	}
	if last.Rule.Comment == "no backend is usable" {
		return "no-backend"
	}
	if reason := compile.CommentReason(last.Rule.Comment); reason != "" {
		return reason
	}
	if strings.HasSuffix(last.Chain.Name, "/refused") && len(steps) > 1 {
		last = steps[len(steps)-2]
		for _, w := range reasonWords {
			if strings.Contains(last.Rule.Text, w.text) {
				return w.reason
			}
		}
	}
	return "denied"
}

// kernelReason returns the reason why a packet did not leave although no rule dropped it.
func (x *explainer) kernelReason(answers []string) string {
	a := x.answer
	switch {
	case slices.Contains(answers, "icmp type 3 code 4"), slices.Contains(answers, "icmp type 2 code 0"):
		return "too-big"
	case errors.Is(a.NoRoute, unix.EXDEV):
		x.addStep("the kernel's reverse path filter (rp_filter) drops it: the way back to %s is not by %s", x.q.Tuple.Source.Addr(), a.In)
		return "rp-filter"
	case errors.Is(a.NoRoute, unix.EINVAL):
		x.addStep("the kernel drops it: %s cannot be the source of a packet that arrives, or its destination is a blackhole", x.q.Tuple.Source.Addr())
		return "martian"
	}
	if off := kernel.ForwardingOff(x.sysctl, a.In, !x.q.Tuple.Source.Addr().Is4()); off != "" {
		x.addStep("%s", off)
		return "forwarding-off"
	}
	if a.NoRoute != nil {
		x.addStep("the kernel does not forward it: %v", a.NoRoute)
		return "no-route"
	}
	x.addStep("the kernel drops it, not a replayed rule; sluice drops shows the place in the kernel")
	return "kernel"
}

// owner sets the service or NAT rule. For a tracked connection it is the owner in the list of
// flows, otherwise the owner of the chains that the packet passed.
func (x *explainer) owner() {
	e := x.e
	entry := x.entry
	if entry == nil {
		entry = x.answer.Entry
	}
	if entry != nil {
		f := entry.Flow()
		x.labels.set(&f)
		e.Owner, e.Backend = f.Owner, f.Backend
	}
	for i := range x.snapshot.Services {
		s := x.snapshot.Services[i].Service
		if e.Owner == s.Name || e.Owner == "" && x.matchedRule("service "+s.Name) {
			e.Owner, x.service = s.Name, s
		}
	}
	for _, n := range x.snapshot.NAT {
		if e.Owner == n.Name || e.Owner == "" && x.matchedRule("nat "+n.Name) && (e.After != e.Before || e.Action == "drop") {
			e.Owner, x.nat = n.Name, n
		}
	}
	if x.service == nil || e.Backend != "" || e.Action == "drop" {
		return
	}
	for _, b := range x.service.Backends {
		if slices.ContainsFunc(x.answer.Steps, func(s replay.Step) bool { return compile.IsBackendChain(s.Chain.Name, x.service, b) }) {
			e.Backend = b.Name
			if x.service.Mode == config.ModeDSR {
				e.NextHop = b.Address // directly connected, without a router
			}
		}
	}
}

// matchedRule reports whether the packet matched a rule of an owner.
func (x *explainer) matchedRule(owner string) bool {
	return slices.ContainsFunc(x.answer.Steps, func(s replay.Step) bool { return s.Owner == owner })
}

// uplink sets the uplink of a packet that leaves by its interface.
func (x *explainer) uplink() {
	for i, s := range x.answer.Steps {
		name := compile.UplinkOf(s.Chain.Name, x.snapshot.Uplinks)
		if name == "" || i == 0 {
			continue
		}
		if u := x.snapshot.Uplinks[slices.IndexFunc(x.snapshot.Uplinks, func(u datapath.Uplink) bool { return u.Name == name })]; x.e.Out == u.Interface {
			x.e.Uplink, x.e.UplinkWhy = name, x.answer.Steps[i-1].Rule.Comment
		}
	}
}

func (x *explainer) forwardReason() string {
	switch {
	case x.labels == nil: // all rules of the host were replayed, without owners
		return "host-rules"
	case x.entry != nil:
		return "flow"
	case x.service != nil && !isTracked(x.service.Mode):
		return "stateless"
	case x.nat != nil && x.nat.Type.OneToOne():
		return "static"
	case x.e.Owner != "":
		return "new-flow"
	}
	return "not-ours"
}

// addCaveats adds notes on possible differences between the replay and a real packet.
func (x *explainer) addCaveats() {
	e := x.e
	note := func(format string, args ...any) { e.Notes = append(e.Notes, fmt.Sprintf(format, args...)) }
	if e.Action != "forward" {
		return
	}
	if text := datapath.AnswersBypass(x.snapshot, x.networks, e); text != "" {
		note("%s", text)
	}
	if client := e.Before.Source.Addr(); client == e.After.Dest.Addr() && e.After.Source.Addr() != client {
		if why := hairpinObstacle(x.bridges, client); why != "" {
			note("the client %s", why)
		}
	}
	if x.entry != nil {
		return
	}
	if x.service != nil && !x.service.Scheduler.Hashes() && len(x.service.Backends) > 1 {
		note("scheduler %s: a new connection may get another backend", x.service.Scheduler)
	}
	if x.answer.Entry != nil && e.After.Source.Addr() != e.Before.Source.Addr() && e.Reason == "new-flow" {
		if e.After.Source.Port() != e.Before.Source.Port() {
			e.After.Source = netip.AddrPortFrom(e.After.Source.Addr(), 0)
			note("the source port is chosen when a packet is really sent")
		} else {
			note("another source port if a connection has this one already")
		}
	}
	for _, word := range []string{"update @", "add @", "ct count", "limit rate", "meta priority set"} {
		if slices.ContainsFunc(x.answer.Steps, func(s replay.Step) bool { return strings.Contains(s.Rule.Text, word) }) {
			note("rates, counts of connections and remembered backends are empty at the start of the replay")
			return
		}
	}
}
