// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// One client port may reach one server by two virtual addresses, or by a virtual address and directly. The server would
// see one connection. As Linux does, the second one gets another source port.

// sourceTries bounds the ports that are tried, the client's own included.
const sourceTries = 8

// moveSource gives a session whose answers would look like another's another source port, and reports whether one is free.
func (m *Model) moveSource(n *session) bool {
	if p := n.tuple[1].Protocol; n.port != nil || n.binding != nil || p != flow.TCP && p != flow.UDP {
		return false
	}
	for range sourceTries - 1 {
		client := n.tuple[1].Dest
		n.tuple[1].Dest = netip.AddrPortFrom(client.Addr(), 1024+uint16((int(client.Port())+16381)%(65536-1024)))
		if !m.clashes(n) {
			return true
		}
	}
	return false
}

// beside opens a session for a packet that goes to a server directly, from the endpoint of a client with a session to
// this server by a service.
func (m *Model) openDirect(v *view) (plan, bool) {
	reply := v.tuple().Reverse()
	h := m.sessions[reply]
	if h == nil || h.direction != flow.Reply || h.service == nil || v.protocol != flow.UDP && (v.protocol != flow.TCP || v.flags&tcpOpening != tcpSYN) {
		return plan{}, false
	}
	n := &session{service: h.service, backend: h.backend, rule: h.rule}
	n.tuple = [2]flow.Tuple{v.tuple(), reply}
	if !m.moveSource(n) {
		return m.refuse(n.service, v, ReasonClash), true
	}
	n.client = m.countClient(n.service, nil, v.src.Addr())
	n.service.connections++
	n.backend.connections++
	m.addSession(n)
	return m.first(v, n), true
}
