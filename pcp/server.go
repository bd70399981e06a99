// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"cmp"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
)

// Limits of the server.
const (
	minLifetime = 2 * time.Minute // RFC 6887 §15
	maxLifetime = 24 * time.Hour
	perClient   = 256         // Mappings of one client at once; for IPv6 per /64.
	perTick     = 1024        // Expired mappings removed per second.
	over        = time.Minute // Time without a refusal until the next one is logged.
)

// Server answers requests. The datapath owns the mappings and keeps them after the process ends.
type Server struct {
	mapper datapath.Mapper
	log    *slog.Logger
	now    func() time.Duration // kernel.SinceBoot
	kicked chan struct{}

	mu       sync.Mutex // protects the following fields
	rules    []datapath.MappingRule
	mappings map[endpoint]datapath.Mapping
	clients  map[netip.Addr]int        // Mappings of each subscriber.
	networks map[string][]netip.Prefix // On the interfaces with a socket.
	limit    limiter
	fresh    map[string]*rateLimit // of requests of unresolved sources, by interface
	counts   map[Count]uint64
	failed   map[string]time.Duration // time of the datapath's last refusal with a text
}

type endpoint struct {
	protocol flow.Protocol
	inside   netip.AddrPort
}

// Count is the opcode and the result of requests, in words. Requests without an answer have the result
// "rate-limited", "not-a-client" or "unresolved"; the opcode "reply" counts "dropped" replies, for which
// the send buffer had no room.
type Count struct{ Opcode, Result string }

// New returns a server for the mappings of a datapath. It answers nothing before
// Run.
func New(mapper datapath.Mapper, log *slog.Logger) *Server {
	return newServer(mapper, log, kernel.SinceBoot)
}

func newServer(mapper datapath.Mapper, log *slog.Logger, now func() time.Duration) *Server {
	return &Server{mapper: mapper, log: log, now: now, kicked: make(chan struct{}, 1), mappings: map[endpoint]datapath.Mapping{},
		clients: map[netip.Addr]int{}, fresh: map[string]*rateLimit{}, counts: map[Count]uint64{}, failed: map[string]time.Duration{}}
}

// Kick notifies the server of an apply of the datapath. It never blocks.
func (s *Server) Kick() {
	select {
	case s.kicked <- struct{}{}:
	default:
	}
}

// Mappings returns the mappings in the order of their inside endpoints. Expires is the remaining time.
func (s *Server) Mappings() []datapath.Mapping {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.Collect(maps.Values(s.mappings))
	now := s.now()
	for i := range list {
		list[i].Expires = max(list[i].Expires-now, 0)
	}
	slices.SortFunc(list, func(a, b datapath.Mapping) int {
		return cmp.Or(a.Inside.Compare(b.Inside), cmp.Compare(a.Protocol, b.Protocol))
	})
	return list
}

// Counts returns the number of requests by result since the start of the process.
func (s *Server) Counts() map[Count]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

// Use returns the number of mappings of each rule that allows them.
func (s *Server) Use() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	use := map[string]int{}
	for _, r := range s.rules {
		use[r.Name] = 0
	}
	for _, m := range s.mappings {
		use[m.Rule]++
	}
	return use
}

// load reads the datapath's mappings.
func (s *Server) load() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, err := s.mapper.Mappings()
	if err != nil {
		return err
	}
	s.rules = s.mapper.MappingRules()
	clear(s.mappings)
	clear(s.clients)
	for _, m := range list {
		s.storeMapping(m)
	}
	return nil
}

func (s *Server) storeMapping(m datapath.Mapping) {
	s.mappings[endpoint{m.Protocol, m.Inside}] = m
	s.clients[subscriber(m.Inside.Addr())]++
}

func (s *Server) end(m datapath.Mapping) error {
	if err := s.mapper.Unmap(m); err != nil {
		return err
	}
	s.forget(m)
	return nil
}

func (s *Server) forget(m datapath.Mapping) {
	delete(s.mappings, endpoint{m.Protocol, m.Inside})
	a := subscriber(m.Inside.Addr())
	if s.clients[a]--; s.clients[a] == 0 {
		delete(s.clients, a)
	}
}

// expire removes a bounded number of expired mappings.
func (s *Server) expire() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, done := s.now(), 0
	for _, m := range s.mappings {
		if m.Expires > now {
			continue
		}
		if err := s.end(m); err != nil {
			return err
		}
		if done++; done == perTick {
			return nil
		}
	}
	return nil
}

// answerMessage returns the answer to a message of a client on an interface, nil for none. The client is resolved
// if the kernel has its hardware address, or needs none.
func (s *Server) answerMessage(b []byte, client netip.Addr, iface string, resolved bool) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, res, ok := parse(b, client)
	if !ok {
		return nil
	}
	now := s.now()
	if b[0] == natpmpVersion {
		return s.answerNATPMP(b, client, iface, resolved, now)
	}
	rules := s.rulesOf(client, iface)
	switch {
	case len(rules) == 0:
		s.counts[Count{r.opcode.String(), "not-a-client"}]++
		return nil
	case !resolved && !s.allowUnresolved(iface, now):
		s.counts[Count{r.opcode.String(), "unresolved"}]++
		return nil
	case !s.limit.allow(client, now):
		s.counts[Count{r.opcode.String(), "rate-limited"}]++
		return nil
	}
	g := mappingGrant{external: r.external}
	if res == success && r.opcode == mapOp {
		g, res = s.mapRequest(&r, client, rules, now)
	}
	s.counts[Count{r.opcode.String(), res.String()}]++
	epoch := s.epochSeconds(now)
	if res != success {
		s.log.Debug("pcp request refused", "client", client, "request", &r, "result", res)
		return errorAnswer(b, res, cmp.Or(g.lifetime, res.lifetime()), epoch)
	}
	return r.reply(g.external, g.lifetime, epoch)
}

// allowUnresolved counts a request of an unresolved source, and reports whether it is within the limit of
// the interface.
func (s *Server) allowUnresolved(iface string, now time.Duration) bool {
	if s.fresh[iface] == nil {
		s.fresh[iface] = &rateLimit{}
	}
	return s.fresh[iface].allow(unresolvedPerSecond, now)
}

// countDropped counts a reply for which the send buffer had no room.
func (s *Server) countDropped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[Count{"reply", "dropped"}]++
}

// epochSeconds is for how many seconds no mapping was lost.
func (s *Server) epochSeconds(now time.Duration) uint32 {
	return uint32(max(now-s.mapper.Epoch(), 0) / time.Second)
}

// rulesOf returns the rules that permit a client on an interface. If a rule names no inside interface, the client
// must be on the interface with its network: on another interface its address belongs to another host.
func (s *Server) rulesOf(client netip.Addr, iface string) (list []datapath.MappingRule) {
	onLink := slices.ContainsFunc(s.networks[iface], func(p netip.Prefix) bool { return p.Contains(client) })
	for _, r := range s.rules {
		if (r.In != "" && r.In.Has(iface) || r.In == "" && onLink) && !leavesBy(r, iface) &&
			slices.ContainsFunc(r.Source, func(p netip.Prefix) bool { return p.Contains(client) }) {
			list = append(list, r)
		}
	}
	return list
}

// mappingGrant is the result for a client. For an error it holds only a lifetime; 0 means the default of the error.
type mappingGrant struct {
	external netip.AddrPort
	lifetime uint32 // seconds
}

// mapRequest creates, renews or ends a mapping (RFC 6887 §11.3, §15).
func (s *Server) mapRequest(r *request, client netip.Addr, rules []datapath.MappingRule, now time.Duration) (mappingGrant, result) {
	if r.protocol == 0 && r.internal != 0 {
		return mappingGrant{}, malformedRequest
	}
	if r.lifetime == 0 {
		return s.remove(r, client, now)
	}
	if r.internal == 0 || (r.protocol != flow.TCP && r.protocol != flow.UDP) {
		return mappingGrant{}, unsuppProtocol // mappings of all ports or all protocols are not supported
	}
	return s.grantMapping(r, client, rules, now, min(max(time.Duration(r.lifetime)*time.Second, minLifetime), maxLifetime))
}

// grantMapping creates or renews a mapping for a lifetime.
func (s *Server) grantMapping(r *request, client netip.Addr, rules []datapath.MappingRule, now, lifetime time.Duration) (mappingGrant, result) {
	m, there := s.mappings[endpoint{r.protocol, netip.AddrPortFrom(client, r.internal)}]
	if there {
		if m.Nonce != r.nonce {
			return remainingGrant(m, now), notAuthorized
		}
		if r.preferFailure && !matchesSuggestion(m.Outside, r.external) {
			return mappingGrant{}, cannotProvideExternal
		}
		m.Expires = now + lifetime
		err := s.mapper.Renew(m)
		switch {
		case errors.Is(err, fs.ErrNotExist): // an Apply has removed it, and the list is not read yet
			s.forget(m)
			there = false
		case err != nil:
			s.logRefusal("pcp: a mapping is not renewed", m, err, now)
			return mappingGrant{}, noResources
		}
	}
	if !there {
		var res result
		if m, res = s.createMapping(r, client, rules, now, lifetime); res != success {
			return mappingGrant{}, res
		}
	}
	s.mappings[endpoint{m.Protocol, m.Inside}] = m
	return mappingGrant{m.Outside, uint32(lifetime / time.Second)}, success
}

// remainingGrant returns the remaining time of a conflicting mapping.
func remainingGrant(m datapath.Mapping, now time.Duration) mappingGrant {
	return mappingGrant{lifetime: uint32(max(m.Expires-now, time.Second) / time.Second)}
}

// matchesSuggestion reports whether an outside endpoint satisfies the suggestion. Unspecified parts match any value.
func matchesSuggestion(outside, suggested netip.AddrPort) bool {
	return (suggested.Addr().IsUnspecified() || suggested.Addr() == outside.Addr()) &&
		(suggested.Port() == 0 || suggested.Port() == outside.Port())
}

// remove ends the mapping of an endpoint. Port 0 means all mappings of a protocol; with protocol 0, all mappings of
// the client with this nonce. It succeeds without a mapping.
func (s *Server) remove(r *request, client netip.Addr, now time.Duration) (mappingGrant, result) {
	g := mappingGrant{external: r.external}
	var list []datapath.Mapping
	if r.internal != 0 {
		m, there := s.mappings[endpoint{r.protocol, netip.AddrPortFrom(client, r.internal)}]
		if there && m.Nonce != r.nonce {
			return remainingGrant(m, now), notAuthorized
		}
		if there {
			list = append(list, m)
		}
	} else if s.clients[subscriber(client)] > 0 {
		for _, m := range s.mappings {
			if m.Inside.Addr() == client && m.Nonce == r.nonce && (r.protocol == 0 || r.protocol == m.Protocol) {
				list = append(list, m)
			}
		}
	}
	for _, m := range list {
		if err := s.end(m); err != nil {
			s.logRefusal("pcp: a mapping is not taken away", m, err, now)
			return mappingGrant{}, noResources
		}
	}
	return g, success
}

// createMapping creates the mapping of an endpoint.
func (s *Server) createMapping(r *request, client netip.Addr, rules []datapath.MappingRule, now, lifetime time.Duration) (m datapath.Mapping, res result) {
	rule := rules[0]
	for _, other := range rules { // the family of the suggested address selects the family
		if slices.ContainsFunc(other.Outside, func(a netip.Addr) bool { return a.Is4() == r.external.Addr().Is4() }) {
			rule = other
			break
		}
	}
	if s.clients[subscriber(client)] >= perClient {
		return m, userExQuota
	}
	m = datapath.Mapping{Rule: rule.Name, Protocol: r.protocol, Inside: netip.AddrPortFrom(client, r.internal), Outside: r.external,
		Nonce: r.nonce, Expires: now + lifetime}
	m, err := s.mapper.Map(m, r.preferFailure)
	switch {
	case errors.Is(err, datapath.ErrQuota):
		return m, userExQuota
	case errors.Is(err, datapath.ErrNoPort) && r.preferFailure:
		return m, cannotProvideExternal
	case err != nil:
		if !errors.Is(err, datapath.ErrNoPort) {
			s.logRefusal("pcp: a mapping is not made", m, err, now)
		}
		return m, noResources
	}
	s.clients[subscriber(client)]++
	return m, success
}

// logRefusal logs a refusal of the datapath. It suppresses repetitions until there was none for a while, because
// clients repeat their requests.
func (s *Server) logRefusal(what string, m datapath.Mapping, err error, now time.Duration) {
	text := what + err.Error()
	last, known := s.failed[text]
	s.failed[text] = now
	if !known || now-last > over {
		s.log.Warn(what, "inside", m.Inside, "error", err)
	}
}
