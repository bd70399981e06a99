// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// One client port may reach one server through two virtual addresses, or through one virtual
// address and directly. The server would see one connection. As in Linux, the second session gets
// another source port.

// sourceTries is the maximum number of source ports to try. It includes the port of the client.
const sourceTries = 8

// moveSource changes the source port of a session with an ambiguous reply direction. It reports
// whether it found a free port.
func (m *Model) moveSource(n *session) bool {
	if p := n.tuple[1].Protocol; n.port != nil || n.binding != nil || p != flow.TCP && p != flow.UDP {
		return false
	}
	for range sourceTries - 1 {
		client := n.tuple[1].Dest
		n.tuple[1].Dest = netip.AddrPortFrom(client.Addr(), 1024+uint16((int(client.Port())+16381)%(65536-1024)))
		if !m.hasReplyClash(n) {
			return true
		}
	}
	return false
}

// openDirect opens a session for a packet that a client sends directly to a server. It applies only
// to an endpoint with a service session to the same server.
func (m *Model) openDirect(v *view) (plan, bool) {
	reply := v.tuple().Reverse()
	h := m.sessions[reply]
	if h == nil || h.direction != flow.Reply || h.service == nil || v.protocol != flow.UDP && (v.protocol != flow.TCP || v.flags&tcpOpening != tcpSYN) {
		return plan{}, false
	}
	n := &session{service: h.service, backend: h.backend, rule: h.rule}
	n.tuple = [2]flow.Tuple{v.tuple(), reply}
	if !m.moveSource(n) {
		return m.countRefused(n.service, v, ReasonClash), true
	}
	n.client = m.countClient(n.service, nil, v.src.Addr())
	n.service.connections++
	n.backend.connections++
	m.addSession(n)
	return m.firstPacket(v, n), true
}
