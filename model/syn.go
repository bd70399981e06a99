// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// statelessSYN reports whether a SYN to the service creates no state. The hash selects the same
// backend again, and the backend's endpoint identifies its answer.
func (s *service) statelessSYN(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.Scheduler.Hashes() && s.rule == nil && !s.SYNCookies && s.Persistence == nil && s.uniqueReplies(m)
}

// endpointSuffices reports whether the endpoint of a backend alone identifies its answer to a SYN. Other
// schedulers use this property when half-open connections reach their limit.
func (s *service) endpointSuffices(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.uniqueReplies(m)
}

// uniqueReplies reports whether the replies of each backend have one virtual endpoint, among the services with
// replies to the client's address.
func (s *service) uniqueReplies(m *Model) bool {
	for _, b := range s.Backends {
		found := 0
		for _, o := range m.services {
			if o.Mode != config.ModeDNAT && o.Mode != config.ModeStateless {
				continue // replies to the gateway's address, or past the gateway
			}
			for _, ob := range o.Backends {
				if ob.Address == b.Address && (o.Protocol == s.Protocol || o.Protocol == flow.Any) && sameReplies(s, b, o, ob) {
					found += o.endpoints(ob)
				}
			}
		}
		if found != 1 {
			return false
		}
	}
	return true
}

// sameReplies reports whether the replies of two backends at one address can have the same source port.
// Two services with several source ports always do: the datapaths need not compare ranges.
func sameReplies(s *service, b config.Backend, o *service, ob config.Backend) bool {
	p, q := s.replyPort(b), o.replyPort(ob)
	switch {
	case p != 0 && q != 0:
		return p == q
	case p != 0:
		return o.repliesFrom(p)
	case q != 0:
		return s.repliesFrom(q)
	}
	return true
}

// replyPort returns the source port of a backend's replies, or 0 if they have several.
func (s *service) replyPort(b config.Backend) (port uint16) {
	if b.Port != 0 && s.rule == nil {
		return b.Port
	}
	for _, l := range s.Listen {
		if len(l.Ports) != 1 || l.Ports[0].Len() > 1 {
			return 0
		}
		from := l.Ports[0].First
		if s.rule != nil {
			from = s.rule.Target(from).Port()
		}
		if port != 0 && from != port {
			return 0
		}
		port = from
	}
	return port
}

// repliesFrom reports whether a backend that keeps the listener's port, or shifts it, replies from a port.
func (s *service) repliesFrom(port uint16) bool {
	if s.rule != nil {
		port -= s.rule.Shift()
	}
	for _, l := range s.Listen {
		if inPorts(l.Ports, port) {
			return true
		}
	}
	return false
}

// endpoints counts the virtual endpoints that share one source port of the backend's replies.
func (s *service) endpoints(b config.Backend) int {
	n := 0
	for _, l := range s.Listen {
		switch {
		case b.Port == 0:
			n++ // replies keep the listener's port
		case len(l.Ports) == 0:
			n += 65536
		default:
			for _, p := range l.Ports {
				n += p.Len()
			}
		}
	}
	return n
}

// syn is a SYN without a session.
type syn struct {
	service *service
	backend *backend
	to      flow.Tuple // tuple after translation
}

// rememberSYN stores the translation of a SYN without a session. It replaces the previous entry of
// the same tuple.
func (m *Model) rememberSYN(came flow.Tuple, s syn) {
	delete(m.synsSent, m.synsCame[came].to)
	m.syns++
	m.synsSent[s.to], m.synsCame[came] = m.syns, s
}

// answersSYN reports whether a backend's packet answers a SYN without a session. A newer SYN may
// have evicted the entry; the answer then has no match.
func (m *Model) answersSYN(answer flow.Tuple) bool {
	syn := answer.Reverse()
	if nth := m.synsSent[syn]; nth > 0 && nth < m.syns && m.choices.ForgetsSYN(m.syns) {
		delete(m.synsSent, syn)
	}
	return m.synsSent[syn] > 0
}
