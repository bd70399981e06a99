// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// statelessSYN reports whether a SYN to the service creates no state. The hash selects the same
// backend again, and the backend's endpoint identifies its answer.
func (s *service) statelessSYN(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.Scheduler.Hashes() && s.rule == nil && !s.SYNCookies && s.Persistence == nil && s.unambiguous(m)
}

// recognised reports whether the endpoint of a backend alone identifies its answer to a SYN. Other
// schedulers use this property when half-open connections reach their limit.
func (s *service) recognised(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.unambiguous(m)
}

// unambiguous reports whether every backend of the service answers for one
// virtual endpoint only, among all services.
func (s *service) unambiguous(m *Model) bool {
	for _, b := range s.Backends {
		found := 0
		for _, o := range m.services {
			for _, ob := range o.Backends {
				if ob.Address == b.Address && (ob.Port == b.Port || ob.Port == 0 || b.Port == 0) && (o.Protocol == s.Protocol || o.Protocol == flow.Any) {
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

// endpoints counts the virtual endpoints that one endpoint of the backend can
// stand for.
func (s *service) endpoints(b config.Backend) int {
	n := 0
	for _, l := range s.Listen {
		switch {
		case b.Port == 0:
			n++ // each port is its own
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
