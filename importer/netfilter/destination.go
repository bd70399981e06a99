// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// forward is an imported destination translation. It is used to recognise its hairpin rules.
type forward struct {
	object string
	listen []config.Listen
	proto  flow.Protocol
	target netip.Addr
	port   uint16 // 0 means that the port is kept
	made   draftObject
	// hairpin: a rule for its source was found; reflected: one for its destination.
	hairpin, reflected bool
}

// group are the paths to the backends of one destination.
type group struct {
	match match
	paths []*path
	// interfaces exempt from the rules
	exempt []string
	// divided: another group has the same port for other clients.
	divided bool
}

// destinations imports the translations of a prerouting chain.
func (t *translator) destinations(w *walker) {
	groups, index := []*group{}, map[string]*group{}
	for _, p := range w.paths {
		switch p.rule.do {
		case doDNAT, doReject, doDrop:
			m := p.match
			m.share, m.inOrder, m.remember = 0, false, 0
			key := fmt.Sprintf("%+v", m)
			g := index[key]
			if g == nil {
				g = &group{match: m}
				index[key] = g
				groups = append(groups, g)
			}
			g.paths = append(g.paths, p)
		case doNetmap:
			t.netmapIn(p)
		case doAccept, doReturn: // exceptions for later paths
		case doMark:
			if t.isMasquerade(p.rule) {
				t.noteImplied(p, "marks packets to have their source translated")
			} else {
				t.noteLoss(p, "marks in a nat chain have no equivalent", "use mark of the service or NAT rule")
			}
		case doRedirect:
			t.noteLoss(p, "no equivalent for a redirect to a port of the host itself", "let the program listen on that port, or keep it in "+t.program)
		default:
			t.noteLoss(p, "no equivalent for "+actionName(p.rule), "keep it in "+t.program)
		}
	}
	t.byClients(groups)
	// Rules for certain clients may be the hairpin of a rule for all.
	for _, clients := range []bool{false, true} {
		for _, g := range groups {
			if (len(g.match.src) > 0) == clients {
				t.group(g)
			}
		}
	}
}

// byClients rejects groups with different targets for the same port by client. A listener has a
// single list of clients and refuses all others.
func (t *translator) byClients(groups []*group) {
	var near byDestination[*group]
	for _, g := range groups {
		near.add(g.match, g)
	}
	limited := func(m match) bool { return len(m.src)+len(m.notSrc) > 0 || m.srcSet != "" }
	for _, g := range groups {
		if !limited(g.match) || g.paths[0].rule.do != doDNAT {
			continue
		}
		m := g.match
		m.src, m.notSrc, m.srcSet = nil, nil, ""
		for _, h := range near.candidates(m) {
			o := h.match
			o.src, o.notSrc, o.srcSet = nil, nil, ""
			if h != g && h.paths[0].rule.do == doDNAT && h.paths[0].rule.first != g.paths[0].rule.first && m.mayOverlap(o) {
				g.divided, h.divided = true, true
			}
		}
	}
}

// actionName returns the action of a rule in the program's words.
func actionName(r *rule) string {
	if r.to != "" {
		return r.to
	}
	return string(r.do)
}

// unsupportedConditions returns the conditions of a match that listeners do not support.
func (m match) unsupportedConditions() (list []string) {
	list = append(list, m.other...)
	add := func(is bool, what string) {
		if is {
			list = append(list, what)
		}
	}
	add(len(m.sport) > 0, "source ports")
	add(m.dstSet != "", "a set of destinations")
	add(m.rate != "", "a rate")
	add(m.mark != nil || m.notMark != nil, "marks")
	add(m.srcLocal, "connections of the host itself")
	add(len(m.out) > 0 || len(m.notOut) > 0, "an output interface")
	return list
}

// group adds one object, or one per listener, for the paths to a destination.
func (t *translator) group(g *group) {
	loseAll := func(reason, next string) {
		for _, p := range g.paths {
			t.noteLoss(p, reason, next)
		}
	}
	first := g.paths[0]
	if first.rule.do != doDNAT {
		loseAll("a nat chain that drops has no equivalent", "keep it in "+t.program)
		return
	}
	if g.divided {
		loseAll("no equivalent for one port with different targets by client address", "keep these rules together in "+t.program)
		return
	}
	if list := g.match.unsupportedConditions(); len(list) > 0 {
		loseAll("no equivalent for "+strings.Join(list, ", "), nextFor(list, t.program))
		return
	}
	for _, p := range g.paths {
		if !p.rule.first.IsValid() {
			loseAll("no equivalent for a redirect to a port of the host itself", "let the program listen on that port, or keep it in "+t.program)
			return
		}
		if !p.rule.targetsOnePort(g.match.dport) {
			loseAll("no equivalent for a range of target ports from which the kernel chooses one", "write to: with the target port of the first port; the other ports follow in order")
			return
		}
	}
	g.exempt = slices.Clone(g.match.notIn)
	for _, p := range g.paths {
		p.except = slices.DeleteFunc(p.except, func(e exception) bool {
			bare := e.match
			bare.in, bare.dstLocal = nil, false
			if len(e.match.in) == 0 || !bare.includes(p.match) {
				return false
			}
			g.exempt = union(g.exempt, e.match.in)
			return true
		})
	}
	t.otherInterfaces(g)
	listen, in, problem, next := t.listeners(g, first.rule.first, first.rule.ports.First != 0 && first.rule.shift == 0 && first.rule.ports.Len() == 1)
	if problem != "" {
		loseAll(problem, next)
		return
	}
	masquerade, differences := t.allMasqueraded(g)
	way := t.wayOut(g)
	single := len(g.paths) == 1 && first.rule.first == first.rule.last && len(t.masquerading) == 0 && way.all == nil
	clients := len(g.match.src) > 0 || len(g.match.notSrc) > 0 || g.match.srcSet != ""
	var names []draftObject
	if single && !clients {
		if t.isHairpinOf(g.match, first) {
			return
		}
		names = t.portForwards(g, listen, in)
	} else if single && t.isReflection(g, first) {
		return
	} else {
		names = []draftObject{t.service(g, listen, in, masquerade || way.all != nil, way.pool)}
	}
	for _, o := range names {
		t.followWay(way, o.name)
		for _, p := range g.paths {
			t.markTranslated(p, o)
			t.noteExceptions(p, o.name, map[*rule]bool{})
		}
		t.objects = append(t.objects, &objectOf{g.paths[0], o.name})
		for _, s := range differences {
			t.d.Changed(o.name, s.line, s.text, s.reason, s.next)
		}
		t.differences(g, o.name, listen)
	}
}

func (t *translator) portForwards(g *group, listen []config.Listen, in config.Interfaces) (names []draftObject) {
	p := g.paths[0]
	r := p.rule
	name := defaultName(g.match)
	for _, l := range listen {
		n := config.NATRule{Name: objectName(p, name), Type: config.NATPortForward, Listen: &l, Protocol: g.match.proto, In: in,
			To: config.Target{Address: r.first, Port: targetPort(r, l.Ports)}}
		o := draftObject{t.d.NAT(n, r.line), -1, len(t.d.Config.NAT) - 1}
		names = append(names, o)
		t.forwards = append(t.forwards, &forward{object: o.name, listen: []config.Listen{l}, proto: g.match.proto, target: r.first, port: n.To.Port, made: o})
	}
	return names
}

// targetsOnePort reports whether each listener port has exactly one target port. It is a single
// port, the same port because it lies in the kernel's range, or the port at the same position of
// the range (iptables: 9000-9010/8000).
func (r *rule) targetsOnePort(asked []flow.Ports) bool {
	switch {
	case r.ports.First == r.ports.Last:
		return true
	case len(asked) != 1:
		return false
	case r.shift != 0:
		return asked[0].First >= r.shift && int(r.ports.First)+int(asked[0].Last-r.shift) <= int(r.ports.Last)
	}
	return r.ports.First <= asked[0].First && asked[0].Last <= r.ports.Last
}

// maxSingles is the maximum number of single ports written for a range.
const maxSingles = 256

// singlePorts expands ranges to single ports, or returns nil if there are none or too many.
func singlePorts(ports []flow.Ports) (list []flow.Ports) {
	for _, r := range ports {
		for n := int(r.First); n <= int(r.Last); n++ {
			if list = append(list, flow.Ports{First: uint16(n), Last: uint16(n)}); len(list) > maxSingles {
				return nil
			}
		}
	}
	return list
}

// targetPort returns the port of a target, or 0 if it equals the listener's port.
func targetPort(r *rule, asked []flow.Ports) uint16 {
	switch {
	case r.shift != 0 && len(asked) == 1: // the rule shifts ports: the target's port for the first one
		return r.ports.First + asked[0].First - r.shift
	case r.ports.First != r.ports.Last:
		return 0
	}
	if len(asked) == 1 && asked[0].First == r.ports.First && asked[0].Last == r.ports.First {
		return 0
	}
	return r.ports.First
}

func defaultName(m match) string {
	name := m.proto.String()
	if m.proto == flow.Any {
		name = "forward"
	}
	if len(m.dport) > 0 {
		name += "-" + m.dport[0].String()
	}
	return name
}

// service adds a service with several targets, or with one target for certain clients.
func (t *translator) service(g *group, listen []config.Listen, in config.Interfaces, fullnat bool, pool []config.AddressRange) draftObject {
	p, m := g.paths[0], g.match
	s := config.Service{Name: objectName(p, defaultName(m)), Listen: listen, Protocol: m.proto, Mode: config.ModeDNAT}
	if fullnat {
		s.Mode, s.SourcePool = config.ModeFullNAT, pool
	}
	for i := range s.Listen {
		if names := in.Words(); len(names) == 1 && s.Listen[i].Interface == "" {
			s.Listen[i].Interface = names[0]
		}
	}
	t.backends(&s, g)
	if len(m.src) > 0 {
		s.Allow = []string{t.d.Set(s.Name+"-clients", m.src)}
	}
	if m.srcSet != "" {
		s.Allow = []string{t.useSet(m.srcSet, p.rule)}
	}
	if len(m.notSrc) > 0 {
		s.Deny = []string{t.d.Set(s.Name+"-others", m.notSrc)}
	}
	o := draftObject{t.d.Service(s, linesOf(g.paths)...), len(t.d.Config.Services) - 1, -1}
	for _, b := range s.Backends {
		t.forwards = append(t.forwards, &forward{object: o.name, listen: listen, proto: m.proto, target: b.Address, port: b.Port, made: o})
	}
	return o
}

// backends fills in the backends of a service, their weights, the scheduler and persistence.
func (t *translator) backends(s *config.Service, g *group) {
	left, inOrder, equal := 1.0, false, true
	var shares []float64
	seconds := 0
	for _, p := range g.paths {
		r := p.rule
		seconds = max(seconds, p.match.remember)
		if p.match.remember > 0 {
			continue // returns a known client to its backend
		}
		share := left
		if p.match.share > 0 {
			share = left * p.match.share
			inOrder = p.match.inOrder
		}
		left -= share
		addresses := 0
		for a := r.first; a.IsValid() && a.Compare(r.last) <= 0 && addresses < 4096; a = a.Next() {
			s.Backends = append(s.Backends, config.Backend{Address: a, Port: targetPort(r, s.Listen[0].Ports)})
			addresses++
		}
		for range addresses {
			shares = append(shares, share/float64(addresses))
		}
	}
	for _, x := range shares {
		equal = equal && math.Abs(x-shares[0]) < 0.001
	}
	switch {
	case len(s.Backends) == 1:
	case len(g.paths) == 1:
		s.Scheduler = config.SchedulerSourceHash
		t.d.Changed("service "+s.Name, g.paths[0].rule.line, "", "the kernel spreads clients over the range by its own hash, the service by source-hash", "")
	case inOrder && equal:
		s.Scheduler = config.SchedulerRR
	case inOrder:
		s.Scheduler = config.SchedulerWRR
	default:
		s.Scheduler = config.SchedulerRandom
	}
	if !equal {
		weights(s.Backends, shares)
	}
	if seconds > 0 {
		s.Persistence = &config.Persistence{Timeout: config.Duration(time.Duration(seconds) * time.Second)}
	}
}

// weights sets the weights to the integers closest to the shares.
func weights(list []config.Backend, shares []float64) {
	scale, best := 1.0, math.Inf(1)
	smallest := slices.Min(shares)
	for n := 1; n <= 100; n++ {
		k, off := float64(n)/smallest, 0.0
		for _, x := range shares {
			off = max(off, math.Abs(x*k-math.Round(x*k)))
		}
		if off < best-1e-6 && slices.Max(shares)*k <= 256 {
			scale, best = k, off
		}
	}
	for i := range list {
		list[i].Weight = min(max(int(math.Round(shares[i]*scale)), 1), 256)
	}
}
