// SPDX-License-Identifier: Apache-2.0

// Package nat is the readable reference model of Sluice's datapaths: what
// becomes of a frame under a configuration, written to be read next to RFC 4787
// (UDP), 5382 (TCP), 5508 (ICMP), 6146 (NAT64), 7915 (header translation), 6052
// (addresses), 6296 (NPTv6), 6888 (CGN) and 7422 (deterministic blocks).
//
// It is slow, sequential and pure: the clock is advanced by the caller, chance is
// a seed. The eBPF datapath must give the same bytes, actions, reasons and flows.
// The order of decisions for one packet is written down in [Model.decide].
//
// What the specification leaves free (which free port, which backend, which
// identification) the model asks [Choices] for: in [Model.Receive] its own, by
// chance, in [Model.Follow] those of another, which it takes as far as they are
// legal. What package judge learns from the frames that a datapath has sent is
// such an implementation. A reader of the RFCs may leave out provisional.go: it
// serves a datapath whose choices become known later than they are made.
package nat

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Model is one gateway. It is not safe for use by several goroutines.
type Model struct {
	host    Host
	config  *config.Config
	now     time.Duration // since New
	choices Choices
	chance  Chance // its own choices

	services            []*service // in force
	rules               []*rule    // in force
	prefixes            []*prefix
	allServices         map[string]*service // by name, also those that were in force before
	allRules            map[string]*rule
	sessions            map[flow.Tuple]*half
	replaced            *session                // that the SYN at hand has ended, as it opens another connection in its tuple; or nil
	ended               map[flow.Tuple]*session // by what either side still sends: cut off when their backend went down
	syns                int                     // that left without a session
	synsSent            map[flow.Tuple]int      // as they left, and in which place of these
	synsCame            map[flow.Tuple]syn      // the same, as they came
	cookiesSent         map[flow.Tuple][]*cookie
	bindings            map[bindingKey]*binding
	outside             map[outsideKey]*binding
	ports               map[outsideKey]time.Duration // until when a freed port is held
	clients             map[clientKey]*client
	fragments           map[fragmentKey]*fragment
	rates               []rated // of firewall rules, by their place among the port ranges of all
	releasedProvisional []releasedPort
}

// New returns a model of the configuration on the host. The seed decides what
// chance decides.
func New(c *config.Config, host Host, seed uint64) (*Model, error) {
	m := &Model{
		host: host, chance: NewChance(seed), allServices: map[string]*service{}, allRules: map[string]*rule{},
		sessions: map[flow.Tuple]*half{}, ended: map[flow.Tuple]*session{}, synsSent: map[flow.Tuple]int{}, synsCame: map[flow.Tuple]syn{}, cookiesSent: map[flow.Tuple][]*cookie{}, bindings: map[bindingKey]*binding{}, outside: map[outsideKey]*binding{},
		ports: map[outsideKey]time.Duration{}, clients: map[clientKey]*client{}, fragments: map[fragmentKey]*fragment{},
	}
	m.choices = m.chance
	m.configure(c)
	return m, nil
}

// Advance lets time pass: what is idle for too long is forgotten.
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

// plan is a decision that is not carried out yet.
type plan struct {
	action Action
	reason Reason
	to     flow.Tuple  // what the packet becomes; not valid: unchanged
	via    netip.Addr  // where it is routed to, when that is not to.Dest
	mac    packet.MAC  // dsr: of the backend, when configured
	answer answer      // sent in place of the packet
	quote  *flow.Tuple // ICMP errors: what the quoted packet becomes
	encap  *encapsulation
	of     *half    // session that the packet is of, nil for none
	count  []*tally // what counts the packet when it is forwarded
	clamp  bool     // lower the MSS option of a SYN
	room   int      // leave so much less in the MSS option of a SYN than the link it came by carries
	grow   int      // bytes that edit may add
	here   bool     // for this host, which has asked a backend (a health check): left as it is
	// edit changes the packet that is otherwise ready to leave by a link of that MTU, or
	// tells why it cannot go.
	edit    func(b []byte, mtu int) ([]byte, Reason)
	instead *view               // of the packet, when not nil
	class   config.TrafficClass // siit: of a packet that changes its family
	summed  bool                // siit: UDP without a checksum is dropped
	// neutral leaves the transport checksum alone (RFC 6296).
	neutral bool
}

func drop(r Reason) plan { return plan{action: Drop, reason: r} }
func pass(r Reason) plan { return plan{action: Pass, reason: r} }

// tally counts packets of a service, backend or rule.
type tally struct{ packets, bytes uint64 }

// Receive tells what becomes of a frame, and takes it into account.
func (m *Model) Receive(in Arrival) Outcome {
	group := len(in.Frame) > 0 && in.Frame[0]&1 == 1
	i, known := m.host.Interface(in.Interface)
	foreign := known && !group && len(in.Frame) >= 6 && !i.takes(packet.MAC(in.Frame[:6]))
	if foreign && isIP(in.Frame) {
		return Outcome{Action: Pass, Reason: ReasonOtherStation}
	}
	if !foreign {
		in.Frame = Untagged(in.Frame)
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

// Follow does what Receive does, with the choices of another as far as they are legal: the outcome
// of a datapath that has made them equals the one that is returned, when it did right.
func (m *Model) Follow(in Arrival, by Choices) Outcome {
	m.choices = by
	defer func() { m.choices = m.chance }()
	return m.Receive(in)
}

// Chance returns the model's own choices.
func (m *Model) Chance() Chance { return m.chance }

// toGroup decides about a broadcast or multicast frame, which the host may want and nobody
// forwards (RFC 1812 §5.3.4).
func (m *Model) toGroup(in Arrival, v *view) Outcome {
	switch {
	case v.kind == icmpLink:
		return Outcome{Action: Pass, Reason: ReasonNotRouted}
	case v.firewalled(m, in.Interface):
		return Outcome{Action: Drop, Reason: ReasonDenied}
	case v.neverRouted():
		return Outcome{Action: Pass, Reason: ReasonNotRouted}
	}
	return Outcome{Action: Pass, Reason: ReasonOtherStation}
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// unroutable reports whether a has no meaning in the other IP version.
func unroutable(a netip.Addr) bool { return martian(a) || a.IsLinkLocalUnicast() }

// martian reports whether Linux routes nothing that comes from a.
func martian(a netip.Addr) bool {
	return a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a == broadcast || a.Is4In6()
}

// decide finds what is to be done with a packet. The order matters: what is known
// goes before what is new, the published before the private.
func (m *Model) decide(in Arrival, v *view) plan {
	if v.kind == icmpLink { // also past the firewall, which would leave the host without neighbours
		return pass(ReasonNotRouted)
	}
	if v.later {
		return m.laterFragment(in, v)
	}
	p := drop(ReasonDenied)
	switch {
	case v.firewalled(m, in.Interface):
	case m.session(v) == nil && v.kind != icmpError && m.host.refuses(in.Interface, v.src.Addr()):
		p = pass(ReasonNotRouted)
	case m.session(v) == nil && v.neverRouted():
		p = m.martianError(in, v)
	default:
		p = m.decidePacket(in, v)
	}
	if p.action == Pass && p.reason == ReasonNotOurs {
		p = m.unserved(in, v)
	}
	if v.first {
		m.rememberFragment(v, p)
	}
	return p
}

// martianError handles what is never routed: an IPv4 error that nothing but its source keeps from
// it is translated between the families, for those who look for faults (RFC 7915 §4.1).
func (m *Model) martianError(in Arrival, v *view) plan {
	to := v.dst.Addr()
	if v.v6 || v.kind != icmpError || v.quoted == nil || to.IsMulticast() || to == broadcast {
		return pass(ReasonNotRouted)
	}
	p, ok := m.errorOf(in, v)
	if !ok || p.action == Forward && (p.quote == nil || p.quote.Source.Addr().Is4()) || p.action == Pass {
		return pass(ReasonNotRouted)
	}
	if !validError(v) {
		return drop(ReasonBadChecksum)
	}
	return p
}

// neverRouted reports whether Linux forwards no packet between these addresses. It forwards link-local ones of IPv4.
func (v *view) neverRouted() bool {
	from, to := v.src.Addr(), v.dst.Addr()
	return to.IsMulticast() || to == broadcast || martian(from) || v.v6 && (to.IsLinkLocalUnicast() || from.IsLinkLocalUnicast())
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
	if p, ok := m.inbound(in, v); ok {
		return p
	}
	if p, ok := m.stateless(in, v); ok {
		return p
	}
	if p, ok := m.outbound(in, v); ok {
		return p
	}
	if p, ok := m.openDirect(v); ok {
		return p
	}
	return pass(ReasonNotOurs)
}

// firewalled applies the rules of the first hook in their order.
func (v *view) firewalled(m *Model, iface string) bool {
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
			if !r.Rate.IsZero() && m.rates[at].conforms(m.now) {
				continue
			}
			return true
		case config.ActionAccept:
			return false
		}
	}
	return false
}

// rated is a firewall rule with when the next packet conforms to its rate.
type rated struct {
	rule config.FirewallRule
	next time.Duration
}

// conforms reports whether a packet is within the rate above which the rule drops:
// burst packets at once.
func (r *rated) conforms(now time.Duration) bool {
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
