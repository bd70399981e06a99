// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Verdict is what became of an exchange.
type Verdict uint8

// The verdicts.
const (
	Ongoing  Verdict = iota // Too little was seen, or too little time passed.
	Good                    // Answered.
	Failed                  // by its stage
	Filtered                // A firewall rule refused the opening.
	Noise                   // A scan or a probe.
	OneWay                  // Datagrams of a protocol that may have no answers.
	Unknown                 // Packets were lost by the observer.
	Probe                   // A health check of this host's own daemon without an answer: clients are sent elsewhere.
)

// waits is how long an answer may take.
const waits = 800 * time.Millisecond

// answering are UDP ports of protocols with answers: DNS, DHCP, TFTP, NTP, SNMP, QUIC, IKE, RADIUS, L2TP,
// OpenVPN, STUN, SIP, CoAP, WireGuard.
var answering = []uint16{53, 67, 69, 123, 161, 443, 500, 853, 1194, 1701, 1812, 1813, 3478, 4500, 5060, 5683, 51820}

// judge decides all exchanges.
func (c *Collector) judge(lost trace.PacketLoss) map[*Exchange]Verdict {
	verdicts := make(map[*Exchange]Verdict, len(c.exchanges))
	answered := map[uint16]bool{} // UDP ports of servers
	for _, e := range c.exchanges {
		if e.into != nil {
			continue
		}
		e.request.settle()
		e.reply.settle()
		if e.Request.Protocol == flow.UDP && c.delivered(e) {
			answered[e.Request.Dest.Port()] = true
		}
	}
	others := c.otherSources()
	for _, e := range c.exchanges {
		if e.into != nil || !c.delivered(e) {
			continue
		}
		if e.keepsPrivateSource() {
			c.routed[e.request.out] = true
		}
		if e.returns() {
			c.oneArmed[e.request.out] = true
		}
	}
	for _, e := range c.exchanges {
		if e.into != nil {
			continue
		}
		v := c.verdict(e)
		switch other := others[e]; {
		case other == e: // the answers of another exchange
			v = Noise
		case other != nil:
			e.Stage, e.Reason.OtherSource, v = ClientRejects, other.ownSource(c), Failed
		}
		if v == Failed {
			switch {
			case c.host.Probed[e.Server().Addr()] && c.fromHost(e):
				v = Probe
			case lost.Any() && !e.proven(), lost.Others > 0 && (e.Stage == ClientRejects || e.Request.Protocol != flow.TCP && !e.proven()):
				v = Unknown
			case e.Request.Protocol == flow.UDP && e.Stage == NoAnswer && !answered[e.Request.Dest.Port()] && !slices.Contains(answering, e.Request.Dest.Port()):
				v = OneWay
			}
		}
		if v == Failed && c.strays(e) {
			v = Noise
		}
		verdicts[e] = v
	}
	shareRejections(verdicts)
	c.findScans(verdicts)
	return verdicts
}

// otherSources finds datagrams to this host that a program answers from another of its addresses: a socket that is
// bound to no address sends from the address of the route. The exchange of such answers is in the map with itself.
func (c *Collector) otherSources() map[*Exchange]*Exchange {
	type ends struct {
		client netip.AddrPort
		port   uint16 // of the server
	}
	asked, found := map[ends]*Exchange{}, map[*Exchange]*Exchange{}
	of := func(e *Exchange, visit func(e *Exchange, client, server netip.AddrPort)) {
		if e.into != nil || e.Request.Protocol != flow.UDP {
			return
		}
		visit(e, e.Request.Source, e.Request.Dest)
		visit(e, e.Request.Dest, e.Request.Source)
	}
	for _, e := range c.exchanges {
		if e.into == nil && e.Request.Protocol == flow.UDP && c.host.Addresses[e.Request.Dest.Addr()] && e.request.received > 0 && e.reply.transmitted == 0 {
			asked[ends{e.Request.Source, e.Request.Dest.Port()}] = e
		}
	}
	for _, e := range c.exchanges {
		of(e, func(e *Exchange, client, server netip.AddrPort) {
			to := asked[ends{client, server.Port()}]
			if to == nil || to == e || !c.host.Addresses[server.Addr()] || e.request.received+e.reply.received > 0 || e.request.transmitted+e.reply.transmitted == 0 {
				return
			}
			found[to], found[e] = e, e
		})
	}
	return found
}

// ownSource is the address of this host in an exchange.
func (e *Exchange) ownSource(c *Collector) netip.Addr {
	if a := e.Request.Source.Addr(); c.host.Addresses[a] {
		return a
	}
	return e.Request.Dest.Addr()
}

// shareRejections gives unanswered exchanges the ICMP error that their server sent about others of the same
// protocol and port: hosts limit the rate of their errors (RFC 1812 §4.3.2.8, RFC 4443 §2.4).
func shareRejections(verdicts map[*Exchange]Verdict) {
	type server struct {
		protocol flow.Protocol
		endpoint netip.AddrPort
	}
	of := func(e *Exchange) server { return server{e.Request.Protocol, e.Server()} }
	rejected := map[server]*Rejection{}
	for e, v := range verdicts {
		if r := e.Reason.Rejection; v == Failed && e.Stage == Refused && r != nil && !r.Reset {
			rejected[of(e)] = r
		}
	}
	for e, v := range verdicts {
		if r := rejected[of(e)]; v == Failed && e.Stage == NoAnswer && r != nil {
			e.Stage, e.Reason.Rejection = Refused, r
		}
	}
}

// proven reports whether a packet shows the failure, and not the absence of one.
func (e *Exchange) proven() bool {
	return e.Reason.Drop != nil || e.Reason.Rejection != nil || e.Stage == ClientRejects || e.Stage == TooBig || e.Stage == Unread || e.Reason.Loop
}

// fromHost and toHost report whether this host is the client or the server.
func (c *Collector) fromHost(e *Exchange) bool {
	return e.request.received == 0 && c.host.Addresses[e.Request.Source.Addr()]
}
func (c *Collector) toHost(e *Exchange) bool { return c.host.Addresses[e.Server().Addr()] }

// delivered reports whether an answer was given to the client.
func (c *Collector) delivered(e *Exchange) bool {
	if c.fromHost(e) {
		return e.reply.received > 0 && (e.reply.drop == nil || e.reply.received > e.reply.dropped)
	}
	return e.reply.transmitted > 0
}

// verdict decides one exchange, and sets its stage and reason where it failed.
func (c *Collector) verdict(e *Exchange) Verdict {
	e.Stage = StageUnknown
	tcp := e.Request.Protocol == flow.TCP
	fail := func(s Stage) Verdict {
		e.Stage = s
		return Failed
	}
	if v, stalled := c.stalled(e); stalled {
		return v
	}
	if e.attempts == 0 { // began before the window
		if tcp && e.request.transmitted > 0 && e.reply.transmitted > 0 {
			e.Stage = Answered
			return Good
		}
		return Ongoing
	}
	if e.refused != nil && !(tcp && e.resets > 0 && (e.reply.ack == 0 || e.acknowledged)) {
		e.Reason.Rejection = e.refused
	}
	if c.delivered(e) {
		switch {
		case tcp && e.resets > 0 && !e.acknowledged:
			return c.reset(e)
		case tcp && e.repeated > 0 && !e.acknowledged, tcp && c.splits(e):
			return fail(ClientRejects)
		}
		e.Stage, e.Reason = Answered, Reason{}
		return Good
	}
	if c.end-e.lastAttempt < waits && c.end-e.firstAttempt < 3*time.Second && e.request.drop == nil && e.Reason.Rejection == nil {
		if c.end-e.firstAttempt < waits {
			return Ongoing
		}
	}
	e.Reason.Loop = e.request.ttl[1]-e.request.ttl[0] >= 3
	if d := e.reply.drop; d != nil || e.reply.received > 0 {
		if c.end-e.reply.first < waits && d == nil {
			return Ongoing
		}
		if d != nil {
			e.Reason.Drop, e.Reason.HopLimit = d.ofAnswer(), e.reply.ttl == [2]uint8{1, 1}
			e.Reason.Unrecognised = e.SourceTranslated() && d.Hook == trace.HookInput && !c.fromHost(e)
		}
		e.Reason.Unrecognised = e.Reason.Unrecognised || e.unrecognised
		c.unresolved(e, e.Client().Addr())
		return fail(AnswerLost)
	}
	if c.toHost(e) {
		return c.unserved(e)
	}
	if e.request.transmitted == 0 {
		return c.stayed(e)
	}
	switch {
	case e.Reason.Loop, e.returns() && !c.oneArmed[e.request.out]:
		if n, there := c.host.network(e.Server().Addr()); there && n.Interface != e.request.out {
			e.Reason.Network = n
		}
		return fail(WrongWay)
	case !(tcp && e.acknowledged) && e.keepsPrivateSource() && !c.routed[e.request.out]:
		return fail(Untranslated)
	}
	e.Reason.Bypass = tcp && e.acknowledged
	e.Reason.ForeignSource = e.SourceTranslated() && !c.host.Addresses[e.Reply.Dest.Addr()]
	if d := e.request.drop; d != nil {
		e.Reason.Drop = d
	}
	if e.Reason.Rejection != nil && !e.Reason.Rejection.Own {
		return fail(Refused)
	}
	return fail(NoAnswer)
}

// splits reports whether the answers of a connection leave by another interface than its requests arrive by,
// and the client does not acknowledge them.
func (c *Collector) splits(e *Exchange) bool {
	if e.request.in == "" || e.reply.out == "" || e.reply.out == e.request.in || e.acknowledged || c.end-e.reply.firstSent < waits {
		return false
	}
	// Acknowledgements to this host itself are not sampled: the answer is repeated without them.
	return !c.toHost(e) || e.reply.lastSent-e.reply.firstSent >= waits
}

// strays reports whether the reverse path filter refused a private source at an interface with public addresses alone:
// packets of other networks leak to shared links, and no answer could reach their senders.
func (c *Collector) strays(e *Exchange) bool {
	d, source, public := e.request.drop, e.Request.Source.Addr(), false
	if d == nil || d.Cause.ID != trace.CauseRPFilter.ID || !source.IsPrivate() || c.host.IPsec {
		return false
	}
	for _, n := range c.host.Networks {
		if n.Interface == e.request.in && n.Prefix.Addr().Is4() == source.Is4() && !n.Prefix.Addr().IsLinkLocalUnicast() {
			if n.Prefix.Addr().IsPrivate() {
				return false
			}
			public = true
		}
	}
	return public
}

// ofAnswer is the drop as one of the answer.
func (d Drop) ofAnswer() *Drop {
	d.Answer = true
	return &d
}

// reset decides a connection that is answered by resets.
func (c *Collector) reset(e *Exchange) Verdict {
	e.Reason = Reason{Rejection: e.refused}
	e.Stage = Refused
	switch {
	case c.toHost(e): // a closed port of this host
		return Noise
	case e.refused != nil && e.refused.Own: // by a rule, on behalf of the server
		return Filtered
	}
	return Failed
}

// unserved decides a request to this host that has no answer.
func (c *Collector) unserved(e *Exchange) Verdict {
	e.Stage, e.Reason.Drop = NeverLeft, e.request.drop
	if d := e.request.drop; d != nil {
		switch {
		case byRule(&d.Cause):
			return Filtered
		case d.Cause.ID == trace.CauseClosedPort.ID || d.Cause.ID == trace.CauseClosedTCP.ID:
			e.Stage = Refused
			return Noise
		}
		return Failed
	}
	e.Stage = NoAnswer
	if e.Reason.Rejection != nil && e.Reason.Rejection.Own {
		e.Stage = Refused
		return Noise
	}
	if e.Request.Protocol != flow.TCP {
		return OneWay
	}
	return Failed
}

// stayed decides a request that did not leave.
func (c *Collector) stayed(e *Exchange) Verdict {
	e.Stage, e.Reason.Drop = NeverLeft, e.request.drop
	switch d := e.request.drop; {
	case d != nil && byRule(&d.Cause):
		return Filtered
	case d == nil && e.Reason.Rejection != nil && e.Reason.Rejection.prohibited():
		return Filtered
	}
	if mac := e.request.elsewhere; mac != [6]byte{} && e.Reason.Drop == nil {
		if e.reply.received > 0 { // traffic of others, which this host sees as well
			return Noise
		}
		e.Reason.Elsewhere = net.HardwareAddr(mac[:]).String()
		return Failed
	}
	c.unresolved(e, e.Server().Addr())
	if e.Reason.Drop == nil && e.Reason.Rejection == nil && !e.Reason.Unresolved.IsValid() && e.Request.Protocol != flow.TCP {
		return Unknown // packets that leave by XDP, or inside others, are not seen
	}
	return Failed
}

// prohibited reports whether a rule may have sent the error (RFC 1812 §5.2.7.1, RFC 4443 §3.1).
func (r *Rejection) prohibited() bool {
	return r.Own && (r.Type == 3 && (r.Code == 9 || r.Code == 10 || r.Code == 13) || r.Type == 1 && (r.Code == 1 || r.Code == 5 || r.Code == 6) || r.Reset)
}

func byRule(cause *trace.Cause) bool {
	return cause.ID == trace.CauseNftRule.ID || cause.ID == trace.CauseLegacyRule.ID || cause.ID == trace.CauseHookRule.ID
}

// unresolved notes the next hop towards an address that answers no questions for its link address: the address itself, or
// the only one that is asked for in vain. If rules drop the messages of all, each shows the cause.
func (c *Collector) unresolved(e *Exchange, to netip.Addr) {
	found := to
	if c.neighbours[to] == nil {
		var candidates []netip.Addr
		for target, a := range c.neighbours {
			if a.inVain() && target.Is4() == to.Is4() {
				candidates = append(candidates, target)
			}
		}
		slices.SortFunc(candidates, netip.Addr.Compare)
		if len(candidates) == 0 || len(candidates) > 1 && slices.ContainsFunc(candidates, func(a netip.Addr) bool { return c.neighbours[a].drop == nil }) {
			return
		}
		found = candidates[0]
	}
	if a := c.neighbours[found]; a.inVain() {
		e.Reason.Unresolved, e.Reason.UnresolvedOn = found, a.iface
		if a.drop != nil && (e.Reason.Drop == nil || e.Reason.Drop.Cause.ID == trace.CauseNeighbour.ID) {
			e.Reason.Drop, e.Reason.Unheard = a.drop, true
		}
	}
}

// returns reports whether a request left by the interface of its arrival.
func (e *Exchange) returns() bool {
	return e.request.in != "" && e.request.out == e.request.in && !e.request.encapsulated
}

// keepsPrivateSource reports whether a request left with a private source to a public destination. Unless
// the network beyond knows the way back, such a request is never answered.
func (e *Exchange) keepsPrivateSource() bool {
	source, dest := e.request.tuple.Source.Addr(), e.request.tuple.Dest.Addr()
	return source.IsPrivate() && dest.IsGlobalUnicast() && !dest.IsPrivate() && !e.SourceTranslated() && !e.request.encapsulated
}

// stalled decides a connection with segments that are repeated and not acknowledged.
func (c *Collector) stalled(e *Exchange) (Verdict, bool) {
	if e.Request.Protocol != flow.TCP {
		return 0, false
	}
	if e.request.closed.count+e.reply.closed.count > 0 { // what repeats meanwhile probes the window
		return e.unread(), true
	}
	for _, pair := range [][2]*way{{&e.request, &e.reply}, {&e.reply, &e.request}} {
		w, other := pair[0], pair[1]
		answer := w == &e.reply
		switch {
		case w.large.stuck(other):
			e.Stage = TooBig
			e.Reason = Reason{Large: w.large.size}
			if w.drop != nil {
				e.Reason.Drop = w.drop
				if answer {
					e.Reason.Drop = w.drop.ofAnswer()
				}
			}
			return Failed, true
		case w.small.stuck(other) && c.end-w.small.last < 3*time.Second:
			if answer {
				e.Stage = ClientRejects
			} else {
				e.Stage = NoAnswer
			}
			if d := other.drop; d != nil && !answer {
				e.Stage, e.Reason.Drop = AnswerLost, d.ofAnswer()
			}
			if e.attempts == 0 {
				e.attempts = w.small.count
			}
			return Failed, true
		}
	}
	return 0, false
}

// unread decides a connection with a closed window.
func (e *Exchange) unread() Verdict {
	for _, w := range []*way{&e.request, &e.reply} {
		since := w.closed.last - w.closed.first
		if w.closed.count < 2 || since < closedFor {
			continue
		}
		e.Stage, e.Reason, e.attempts = Unread, Reason{Unread: e.Client(), UnreadFor: since}, max(e.attempts, 1)
		if w == &e.reply { // a client may read as slowly as it wants to
			e.Reason.Unread, e.attempts = e.Server(), max(e.attempts, manyAttempts)
		}
		return Failed
	}
	return Ongoing
}

// Limits of a scan.
const (
	scannedTargets = 8
	scannedShare   = 0.1 // of a scanner's exchanges are answered at most
	scannedAgain   = 3   // exchanges with one target: a client repeats what fails
)

// findScans takes exchanges of sources that try many targets in vain for noise, if other sources are answered.
// Exchanges with a target that the source tries again and again remain failures.
func (c *Collector) findScans(verdicts map[*Exchange]Verdict) {
	type source struct {
		targets   map[netip.AddrPort]int
		good, all int
	}
	sources := map[netip.Addr]*source{}
	good := 0
	for e, v := range verdicts {
		if v == Ongoing {
			continue
		}
		s := sources[e.Request.Source.Addr()]
		if s == nil {
			s = &source{targets: map[netip.AddrPort]int{}}
			sources[e.Request.Source.Addr()] = s
		}
		s.all++
		s.targets[e.Request.Dest]++
		if v == Good {
			s.good++
			good++
		}
	}
	for e, v := range verdicts {
		s := sources[e.Request.Source.Addr()]
		if v != Filtered && !(v == Failed && mayBeScan(e)) || s == nil || len(s.targets) < scannedTargets || float64(s.good) > scannedShare*float64(s.all) {
			continue
		}
		if good-s.good > 0 && s.targets[e.Request.Dest] <= scannedAgain {
			verdicts[e] = Noise
		}
	}
}

// mayBeScan reports whether a target that does not exist would fail alike.
func mayBeScan(e *Exchange) bool {
	switch e.Stage {
	case NoAnswer, Refused:
		return true
	case NeverLeft:
		return e.Reason.Drop == nil || e.Reason.Drop.Cause.ID == trace.CauseNeighbour.ID
	}
	return false
}
