// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// checkLimits checks the limits for new connections. Connections beyond a client's limit do not count
// against the service. The limits apply to the SYN only. For a cookie's proof the rates are charged
// but not enforced.
func (s *service) checkLimits(m *Model, v *view, handshake bool) Reason {
	switch reason := s.connectionLimit(m, v); {
	case handshake:
	case v.cookie != nil:
		s.credit.withinRate(m.now, clientAddress(v.src.Addr()), s.Limits.NewConnectionsPerClient)
		s.credit.withinRate(m.now, allClients, s.Limits.NewConnections)
	case reason != "":
		return reason
	case !s.credit.withinRate(m.now, clientAddress(v.src.Addr()), s.Limits.NewConnectionsPerClient):
		return ReasonLimitClientRate
	case !s.credit.withinRate(m.now, allClients, s.Limits.NewConnections):
		return ReasonLimitRate
	}
	return ""
}

// connectionLimit returns the reason against one more connection of the client, or "".
func (s *service) connectionLimit(m *Model, v *view) Reason {
	if s.Limits.Connections > 0 && s.active >= s.Limits.Connections {
		return ReasonLimitConnections
	}
	c := m.clients[clientKey{service: s, address: clientAddress(v.src.Addr())}]
	if most := s.Limits.ConnectionsPerClient; most > 0 && c != nil && c.flows >= most {
		return ReasonClientFlows
	}
	return ""
}

// hasRoom reports whether the service accepts one more connection after the proof of a cookie. The
// client treats the connection as open from the SYN-ACK on.
func (s *service) hasRoom(m *Model, v *view) bool {
	return s.connectionLimit(m, v) == "" && !s.credit.rateExceeded(m.now, clientAddress(v.src.Addr()), s.Limits.NewConnectionsPerClient) &&
		!s.credit.rateExceeded(m.now, allClients, s.Limits.NewConnections) &&
		slices.ContainsFunc(s.table, func(b *backend) bool { return s.provisional > 0 || !s.isFull(b) })
}

// countRefused counts a refused connection once for all SYN retransmissions.
func (m *Model) countRefused(s *service, v *view, reason Reason) plan {
	if v.protocol != flow.TCP || v.flags&tcpOpening != tcpSYN || v.cookie != nil {
		s.refused++
		return drop(reason)
	}
	number := binary.BigEndian.Uint32(v.payload()[4:])
	if last, ok := s.synsRefused[v.tuple()]; ok && last == number {
		s.retransmissions++
		return drop(reason)
	}
	s.synsRefused[v.tuple()] = number
	s.refused++
	return drop(reason)
}

// checkSets checks the client against the allow and deny sets.
func (s *service) checkSets(m *Model, v *view) Reason {
	in := func(names []string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return m.inSet(n, v.src.Addr()) })
	}
	switch {
	case in(s.Deny):
		return ReasonDenied
	case len(s.Allow) > 0 && !in(s.Allow):
		return ReasonNotAllowed
	}
	return ""
}

// resets reports whether a client's reset exceeds the rate limit.
func (s *service) resets(m *Model, v *view) bool {
	return v.protocol == flow.TCP && v.flags&packet.RST != 0 && !takeCredit(&s.reset, m.now, s.Limits.ResetRate)
}

// rateCredits maps each client to the time of its next conforming connection.
type rateCredits map[netip.Addr]time.Duration

// allClients is the key for all clients of a service together.
var allClients = netip.Addr{}

func (c rateCredits) withinRate(now time.Duration, who netip.Addr, r config.Rate) bool {
	credit := c[who]
	ok := takeCredit(&credit, now, r)
	if credit != 0 {
		c[who] = credit
	}
	return ok
}

// rateExceeded reports whether one more connection would exceed the rate now.
func (c rateCredits) rateExceeded(now time.Duration, who netip.Addr, r config.Rate) bool {
	credit := c[who]
	return !takeCredit(&credit, now, r)
}

// takeCredit is a leaky bucket with a burst of one second. Variable credit is the time of the next
// conforming event.
func takeCredit(credit *time.Duration, now time.Duration, r config.Rate) bool {
	if r.IsZero() {
		return true
	}
	each := time.Duration(float64(time.Second) / r.PerSecond())
	burst := max(time.Second, each)
	next := max(*credit, now)
	if next-now > burst-each {
		return false
	}
	*credit = next + each
	return true
}

// chooseBackend returns the backend for a packet: pinned, persistent or scheduled. With admitted set, the
// SYN passed the limits already, and no limit applies.
func (s *service) chooseBackend(m *Model, v *view, remember, admitted bool) (*backend, Reason) {
	midConnection, room := v.midConnection(), s.checkRoom
	if admitted {
		room = func(*backend) Reason { return "" }
	}
	if came := m.synsCame[v.tuple()]; midConnection && s.Mode == config.ModeDNAT && came.service == s && came.backend.state != datapath.Down {
		return came.backend, room(came.backend)
	}
	if b := s.pinnedBackend(v); b != nil {
		if midConnection {
			return b, room(b)
		}
		return b, ""
	}
	key := s.stickyKey(v)
	if k, ok := s.sticky[key]; ok && key != "" && m.now-k.seen <= s.Persistence.Timeout.D() && k.backend.state == datapath.Up && !s.isFull(k.backend) {
		s.sticky[key] = stickyEntry{k.backend, m.now}
		return k.backend, ""
	}
	b, ok := s.byHash(v), true
	if !midConnection {
		b, ok = s.scheduledBackend(m, v)
	}
	switch {
	case !ok && admitted:
		return s.byHash(v), ""
	case !ok:
		return nil, ReasonLimitBackend
	}
	if key != "" && remember {
		s.sticky[key] = stickyEntry{b, m.now}
	}
	if midConnection && remember {
		return b, room(b)
	}
	return b, ""
}

// pinnedBackend returns the backend of the longest configured prefix with the client, or nil. The
// scheduler decides for a client if its pinned backend takes no new connections.
func (s *service) pinnedBackend(v *view) *backend {
	name, bits := "", -1
	for _, p := range s.Sessions {
		if p.Client.Contains(v.src.Addr()) && p.Client.Bits() > bits {
			name, bits = p.Backend, p.Client.Bits()
		}
	}
	i := slices.IndexFunc(s.backends, func(b *backend) bool { return b.Name == name && b.state == datapath.Up })
	if bits < 0 || i < 0 {
		return nil
	}
	return s.backends[i]
}

func (s *service) stickyKey(v *view) string {
	if s.Persistence == nil {
		return ""
	}
	key := "client"
	for _, k := range s.Persistence.Key {
		switch k {
		case config.KeySourceAddress:
			key += " " + v.src.Addr().String()
		case config.KeySourcePort:
			key += fmt.Sprint(" ", v.src.Port())
		case config.KeyDestAddress:
			key += " " + v.dst.Addr().String()
		case config.KeyDestPort:
			key += fmt.Sprint(" ", v.dst.Port())
		case config.KeyDestMAC:
			key += fmt.Sprintf(" %x", v.macs[:6])
		case config.KeySourceMAC:
			key += fmt.Sprintf(" %x", v.macs[6:])
		}
	}
	return key
}

// midConnection reports whether a packet without a session belongs to an existing TCP connection.
// Another backend would break that connection.
func (v *view) midConnection() bool { return v.protocol == flow.TCP && v.flags&tcpOpening != tcpSYN }

// checkRoom returns the reason against one more connection to the backend, or "".
func (s *service) checkRoom(b *backend) Reason {
	if s.isFull(b) {
		return ReasonLimitBackend
	}
	return ""
}

// byHash returns the backend by hash. All packets of a connection have the same one without state.
func (s *service) byHash(v *view) *backend {
	return s.table[balance.Slot(balance.JHash(s.hashInput(v), balance.Seed), len(s.table))]
}

// scheduledBackend returns the backend by the scheduler. It skips backends at their connection limit.
func (s *service) scheduledBackend(m *Model, v *view) (*backend, bool) {
	start := 0
	switch {
	case s.Scheduler.Hashes():
		start = balance.Slot(balance.JHash(s.hashInput(v), balance.Seed), len(s.table))
	case s.Scheduler == config.SchedulerRandom:
		start = m.chance.Slot(len(s.table))
	default:
		start = s.sequence % len(s.table)
		s.sequence++
	}
	if b := s.chosenBackend(m, v); b != nil {
		return b, true
	}
	fits := s.possibleBackends(m, v)
	for n := range s.table {
		if b := s.table[(start+n)%len(s.table)]; fits(b) {
			return b, true
		}
	}
	return nil, false
}

// possibleBackends returns a filter for the possible backends of a packet that does not show its backend.
func (s *service) possibleBackends(m *Model, v *view) func(*backend) bool {
	if s.Scheduler.Hashes() {
		return s.isSelectable
	}
	some := func(is func(*backend) bool) bool {
		return slices.ContainsFunc(s.table, func(b *backend) bool { return s.isSelectable(b) && is(b) })
	}
	// An untranslatable packet has a backend in the other address family.
	other := func(b *backend) bool { return b.Address.Is6() != v.v6 }
	crossed := m.choices.Ends(ReasonUntranslatable) && some(other)
	// The MTU in an ICMP error limits the backends by their route.
	mtu := m.choices.AnswerMTU()
	mtuMatches := func(b *backend) bool { return m.reportedMTU(v, b) == mtu }
	hasMTU := mtu != 0 && some(mtuMatches)
	// A packet is fragmented only for a resolved next hop.
	measured := m.choices.Ends(ReasonToFragment6) && some(m.isResolved)
	return func(b *backend) bool {
		return s.isSelectable(b) && (!crossed || other(b)) && (!hasMTU || mtuMatches(b)) && (!measured || m.isResolved(b))
	}
}

// isResolved reports whether the MAC address of a backend's next hop is known.
func (m *Model) isResolved(b *backend) bool {
	_, _, known := m.host.NextHop(b.Address)
	return known
}

// reportedMTU returns the MTU in the "too big" error for a packet to a backend.
func (m *Model) reportedMTU(v *view, b *backend) int {
	next, _ := m.host.route(b.Address)
	switch {
	case b.Address.Is6() == v.v6:
		return next.MTU
	case v.v6:
		return max(next.MTU+v.header-20, 1280)
	}
	return next.MTU + v.header - 40
}

// isSelectable reports whether the scheduler may select the backend. The backend has room, and for lc and
// wlc it has the fewest connections for its weight.
func (s *service) isSelectable(b *backend) bool {
	if s.provisional > 0 { // the connection counts are provisional
		return true
	}
	if s.isFull(b) {
		return false
	}
	if !s.Scheduler.CountsFlows() {
		return true
	}
	weight := func(b *backend) int {
		if !s.Scheduler.UsesWeights() {
			return 1
		}
		return max(b.Weight, 1)
	}
	for _, other := range s.table {
		if !s.isFull(other) && (other.active+1)*weight(b) < (b.active+1)*weight(other) {
			return false
		}
	}
	return true
}

func (s *service) isFull(b *backend) bool {
	limit := b.MaxConnections
	if limit == 0 || s.Limits.ConnectionsPerBackend > 0 && s.Limits.ConnectionsPerBackend < limit {
		limit = s.Limits.ConnectionsPerBackend
	}
	return limit > 0 && b.active >= limit
}

// chosenBackend returns the backend from Choices among the legal ones, or nil for the scheduler's choice.
func (s *service) chosenBackend(m *Model, v *view) *backend {
	if s.Scheduler.Hashes() {
		return nil
	}
	var legal []*backend
	var candidates []Candidate
	for _, b := range s.table {
		if !s.isSelectable(b) {
			continue
		}
		c := Candidate{Address: b.Address, Direct: s.Mode == config.ModeDSR}
		_, c.MAC, c.Known = m.host.NextHop(b.Address)
		legal, candidates = append(legal, b), append(candidates, c)
	}
	if i := m.choices.Backend(candidates); i >= 0 {
		return legal[i]
	}
	return nil
}

// hashInput returns the hash input of the service. Each field is padded to four bytes, as in an
// nftables concatenation.
func (s *service) hashInput(v *view) []byte {
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	pad := func(b []byte) []byte { return append(b, 0, 0) }
	switch s.Scheduler {
	case config.SchedulerSourceHash:
		return v.src.Addr().AsSlice()
	case config.SchedulerSymmetricHash:
		a, b := v.src, v.dst
		if b.Compare(a) < 0 {
			a, b = b, a
		}
		return slices.Concat(a.Addr().AsSlice(), pad(port(a.Port())), b.Addr().AsSlice(), pad(port(b.Port())))
	}
	return slices.Concat(v.src.Addr().AsSlice(), pad(port(v.src.Port())), v.dst.Addr().AsSlice(), pad(port(v.dst.Port())))
}
