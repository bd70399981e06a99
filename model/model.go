// SPDX-License-Identifier: Apache-2.0

// Package model is the readable reference model of Sluice's datapaths. It computes the outcome of a
// frame under a configuration. Read it with RFC 4787 (UDP), 5382 (TCP), 5508 (ICMP), 6146 (NAT64),
// 7915 (header translation), 6052 (addresses), 6296 (NPTv6), 6888 (CGN) and 7422 (deterministic
// blocks).
//
// The model is slow, sequential and pure. The caller advances the clock and provides a random seed.
// The eBPF datapath must produce the same bytes, actions, reasons and flows. [Model.decide] lists
// the decisions for one packet in order.
//
// The RFCs leave some choices free: the port, the backend, the identification. The model gets them
// from [Choices]. [Model.Receive] uses random choices. [Model.Follow] uses the choices of the
// caller if they are legal. Package judge implements Choices from the frames that a datapath sent.
// A reader of the RFCs may skip provisional.go: it serves a datapath with choices that become
// visible late.
package model

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Model is one gateway. It is not safe for concurrent use.
type Model struct {
	host    Host
	config  *config.Config
	now     time.Duration // time since New
	choices Choices
	chance  Chance // random choices

	services            []*service // in the current configuration
	rules               []*rule    // in the current configuration
	prefixes            []*prefix
	allServices         map[string]*service // by name, with the services of former configurations
	allRules            map[string]*rule
	sessions            map[flow.Tuple]*sessionHalf
	replaced            *session                // Session that the current SYN replaced with a new connection in its tuple, or nil.
	ended               map[flow.Tuple]*session // Cut-off sessions by both tuples: their backend became down.
	syns                int                     // Number of SYNs without a session.
	synsSent            map[flow.Tuple]int      // by translated tuple, with their ordinal number
	synsCame            map[flow.Tuple]syn      // by received tuple
	cookiesSent         map[flow.Tuple][]*cookie
	bindings            map[bindingKey]*binding
	outside             map[outsideKey]*binding
	ports               map[outsideKey]time.Duration // end of the hold-down of each freed port
	clients             map[clientKey]*client
	fragments           map[fragmentKey]*fragment
	rates               []ratedRule // rates of firewall rules, one entry for each port range
	releasedProvisional []releasedPort
}

// New returns a model of the configuration on the host. The seed determines all random choices.
func New(c *config.Config, host Host, seed uint64) (*Model, error) {
	m := &Model{
		host: host, chance: NewChance(seed), allServices: map[string]*service{}, allRules: map[string]*rule{},
		sessions: map[flow.Tuple]*sessionHalf{}, ended: map[flow.Tuple]*session{}, synsSent: map[flow.Tuple]int{}, synsCame: map[flow.Tuple]syn{}, cookiesSent: map[flow.Tuple][]*cookie{}, bindings: map[bindingKey]*binding{}, outside: map[outsideKey]*binding{},
		ports: map[outsideKey]time.Duration{}, clients: map[clientKey]*client{}, fragments: map[fragmentKey]*fragment{},
	}
	m.choices = m.chance
	m.configure(c)
	return m, nil
}

// Advance adds d to the clock and expires idle state.
func (m *Model) Advance(d time.Duration) {
	m.now += d
	m.expire()
}

// SetState changes the state of a backend.
func (m *Model) SetState(service, backend string, state datapath.State) error {
	for _, s := range m.services {
		for _, b := range s.backends {
			if s.Name == service && b.Name == backend {
				b.state = state
				s.schedule()
				return nil
			}
		}
	}
	return fmt.Errorf("service %s: no backend %s", service, backend)
}

// plan is the decision for one packet, before apply.
type plan struct {
	action Action
	reason Reason
	to     flow.Tuple  // Tuple after translation; invalid: unchanged.
	via    netip.Addr  // Routing destination, if it differs from to.Dest.
	mac    packet.MAC  // Dsr: configured MAC address of the backend.
	answer errorReply  // Reply to the sender of a dropped packet.
	quote  *flow.Tuple // ICMP errors: tuple of the quoted packet after translation.
	encap  *encapsulation
	half   *sessionHalf // Session of the packet, nil for none.
	count  []*tally     // Counters to increase when the packet is forwarded.
	clamp  bool         // Lower the MSS option of a SYN.
	room   int          // Reserved bytes below the ingress link's limit for the MSS option of a SYN.
	grow   int          // Maximum growth by edit, in bytes.
	local  bool         // Reply to a health check of this host: left unchanged.
	// edit changes the packet after translation, for a link with that MTU. It may return a drop
	// reason.
	edit            func(b []byte, mtu int) ([]byte, Reason)
	replacement     *view               // Replacement for the packet, if not nil.
	class           config.TrafficClass // Siit: traffic class after a change of family.
	requireChecksum bool                // Siit: drop UDP without a checksum.
	// neutral keeps the transport checksum unchanged (RFC 6296).
	neutral bool
}

func drop(r Reason) plan     { return plan{action: Drop, reason: r} }
func passPlan(r Reason) plan { return plan{action: Pass, reason: r} }

// tally counts packets of a service, backend or rule.
type tally struct{ packets, bytes uint64 }

// Receive processes a frame and returns the outcome.
func (m *Model) Receive(in Arrival) Outcome {
	group := len(in.Frame) > 0 && in.Frame[0]&1 == 1
	i, known := m.host.Interface(in.Interface)
	foreign := known && !group && len(in.Frame) >= 6 && !i.isUnicastTo(packet.MAC(in.Frame[:6]))
	if foreign && isIP(in.Frame) {
		return Outcome{Action: Pass, Reason: ReasonOtherStation}
	}
	if !foreign {
		in.Frame = Untagged(in.Frame)
	}
	if from, ok := earlySource(in.Frame); ok && m.isDeniedSource(from) {
		return Outcome{Action: Drop, Reason: ReasonDenied}
	}
	v, action, reason := read(in.Frame)
	if v == nil {
		return Outcome{Action: action, Reason: reason}
	}
	if group {
		return m.toGroup(in, v)
	}
	return m.apply(in, v, m.decide(in, v))
}

// Follow processes a frame with the caller's choices, as far as they are legal. A correct datapath
// with the same choices has the same outcome.
func (m *Model) Follow(in Arrival, by Choices) Outcome {
	m.choices = by
	defer func() { m.choices = m.chance }()
	return m.Receive(in)
}

// Chance returns the random choices of the model.
func (m *Model) Chance() Chance { return m.chance }

// toGroup handles a broadcast or multicast frame. The host may accept such a frame, but a router
// must not forward it (RFC 1812 §5.3.4).
func (m *Model) toGroup(in Arrival, v *view) Outcome {
	switch {
	case v.kind == icmpLink:
		return Outcome{Action: Pass, Reason: ReasonNotRouted}
	case v.firewallDrops(m, in.Interface):
		return Outcome{Action: Drop, Reason: ReasonDenied}
	case v.neverRouted():
		return Outcome{Action: Pass, Reason: ReasonNotRouted}
	}
	return Outcome{Action: Pass, Reason: ReasonOtherStation}
}

var broadcast, unspecified = netip.AddrFrom4([4]byte{255, 255, 255, 255}), netip.IPv4Unspecified()

// isUnroutable reports whether a is invalid in the other address family.
func isUnroutable(a netip.Addr) bool { return isMartian(a) || a.IsLinkLocalUnicast() }

// isMartian reports whether Linux drops packets with source a.
func isMartian(a netip.Addr) bool {
	return a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a == broadcast || a.Is4In6()
}

// decide returns the plan for a packet. The order matters: an existing session has priority over a
// new one, and a service has priority over a NAT rule.
func (m *Model) decide(in Arrival, v *view) plan {
	if v.kind == icmpLink { // the firewall does not apply: it would block neighbour discovery of the host
		return passPlan(ReasonNotRouted)
	}
	if v.later {
		if m.isDeniedSource(v.src.Addr()) {
			return drop(ReasonDenied)
		}
		return m.laterFragment(in, v)
	}
	p := drop(ReasonDenied)
	switch {
	case v.firewallDrops(m, in.Interface):
	case m.session(v) == nil && v.kind != icmpError && m.host.refusesSource(in.Interface, v.src.Addr()):
		p = passPlan(ReasonNotRouted)
	case m.session(v) == nil && v.neverRouted():
		p = m.martianError(in, v)
	default:
		p = m.decidePacket(in, v)
	}
	if p.action == Pass && p.reason == ReasonNotOurs {
		p = m.unmatchedPlan(in, v)
	}
	if v.first {
		m.rememberFragment(v, p)
	}
	return p
}

// martianError handles packets that Linux never routes. An IPv4 error with a martian source still
// crosses to IPv6 for path diagnosis (RFC 7915 §4.1).
func (m *Model) martianError(in Arrival, v *view) plan {
	to := v.dst.Addr()
	if v.v6 || v.kind != icmpError || v.quoted == nil || to.IsMulticast() || to == broadcast || to == unspecified {
		return passPlan(ReasonNotRouted)
	}
	p, ok := m.errorOf(in, v)
	if !ok || p.action == Forward && (p.quote == nil || p.quote.Source.Addr().Is4()) || p.action == Pass {
		return passPlan(ReasonNotRouted)
	}
	if !validError(v) {
		return drop(ReasonBadChecksum)
	}
	return p
}

// neverRouted reports whether Linux forwards no packet between these addresses. Linux forwards IPv4
// link-local addresses.
func (v *view) neverRouted() bool {
	from, to := v.src.Addr(), v.dst.Addr()
	return to.IsMulticast() || to == broadcast || to == unspecified || isMartian(from) || v.v6 && (to.IsLinkLocalUnicast() || from.IsLinkLocalUnicast())
}

func (m *Model) decidePacket(in Arrival, v *view) plan {
	if v.kind == icmpError {
		return m.icmpError(in, v)
	}
	m.replaced = nil
	m.confirmInbound(v)
	m.confirmAnswer(v)
	if h := m.session(v); h != nil && !m.endReused(v, h) {
		return m.handleSession(v, h)
	}
	if m.wasCutOff(v) {
		return plan{action: Drop, reason: ReasonNoFlow, answer: reset}
	}
	if s, l := m.serviceOf(v, in.Interface); s != nil {
		return m.newService(in, v, s, l)
	}
	if p, ok := m.serviceReply(v); ok {
		return p
	}
	if p, ok := m.handleInbound(in, v); ok {
		return p
	}
	if p, ok := m.stateless(in, v); ok {
		return p
	}
	if p, ok := m.handleOutbound(in, v); ok {
		return p
	}
	if p, ok := m.openDirect(v); ok {
		return p
	}
	return passPlan(ReasonNotOurs)
}

// firewallDrops applies the rules of the ingress hook in order, and reports whether one drops the
// packet.
func (v *view) firewallDrops(m *Model, iface string) bool {
	place := 0
	for i := range m.config.Firewall.Rules {
		r := &m.config.Firewall.Rules[i]
		at := place
		place += max(1, len(r.Ports))
		if r.Hook != config.HookIngress || r.In != "" && r.In != iface || r.Protocol != flow.Any && r.Protocol != v.protocol ||
			!m.matches(r.Source, v.src.Addr()) || !m.matches(r.Destination, v.dst.Addr()) || !inPorts(r.Ports, v.dst.Port()) {
			continue
		}
		switch r.Action {
		case config.ActionDrop:
			if !r.Rate.IsZero() && m.rates[at].withinRate(m.now) {
				continue
			}
			return true
		case config.ActionAccept:
			return false
		}
	}
	return false
}

// ratedRule is a firewall rule with the time of the next conforming packet.
type ratedRule struct {
	rule config.FirewallRule
	next time.Duration
}

// withinRate reports whether a packet is within the rate of the rule. It admits bursts of the
// configured size.
func (r *ratedRule) withinRate(now time.Duration) bool {
	each := r.rule.Rate.Per / time.Duration(r.rule.Rate.Count)
	next := max(r.next, now)
	if next-now > each*time.Duration(max(r.rule.Burst, 1)-1) {
		return false
	}
	r.next = next + each
	return true
}

func (m *Model) matches(want config.Match, a netip.Addr) bool {
	switch {
	case want.Set != "":
		return m.inSet(want.Set, a)
	case want.Prefix.IsValid():
		return want.Prefix.Contains(a)
	}
	return true
}

func (m *Model) inSet(name string, a netip.Addr) bool {
	for _, p := range m.config.Firewall.Sets[name] {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func inPorts(ranges []flow.Ports, port uint16) bool {
	for _, r := range ranges {
		if r.Contains(port) {
			return true
		}
	}
	return len(ranges) == 0
}
