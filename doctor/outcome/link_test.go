// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// TestLinks wants the own addresses for which a host asks in vain, and the addresses that several hosts use.
func TestLinks(t *testing.T) {
	mac := func(last byte) func(p *trace.Packet) {
		return func(p *trace.Packet) { p.HasMACs, p.SourceMAC = true, [6]byte{2, 0, 0, 0, 0, last} }
	}
	message := func(s *scene, point trace.Point, answer bool, sender, target string, last byte) {
		s.see(point, "wan0", flow.Tuple{}, mac(last), func(p *trace.Packet) {
			p.Neighbour = &trace.Neighbour{Answer: answer, Sender: netip.MustParseAddr(sender), Target: netip.MustParseAddr(target)}
		})
	}
	for _, tc := range []struct {
		name            string
		make            func(s *scene)
		mute, conflicts int
	}{
		{"questions without an answer", func(s *scene) {
			for range 3 {
				message(s, trace.Received, false, "203.0.113.2", "203.0.113.1", 8)
				s.later(time.Second)
			}
		}, 1, 0},
		{"one question, which another host may answer", func(s *scene) { message(s, trace.Received, false, "203.0.113.2", "203.0.113.1", 8) }, 0, 0},
		{"questions with an answer", func(s *scene) {
			for range 3 {
				message(s, trace.Received, false, "203.0.113.2", "203.0.113.1", 8)
				message(s, trace.Transmitted, true, "203.0.113.1", "203.0.113.1", 1)
				s.later(time.Second)
			}
		}, 0, 0},
		{"questions for other addresses", func(s *scene) {
			for range 3 {
				message(s, trace.Received, false, "203.0.113.2", "203.0.113.9", 8)
				s.later(time.Second)
			}
		}, 0, 0},
		{"the own address announced by another host", func(s *scene) { message(s, trace.Received, false, "203.0.113.1", "203.0.113.1", 9) }, 0, 1},
		{"the own address in an answer of another host", func(s *scene) { message(s, trace.Received, true, "203.0.113.1", "203.0.113.1", 9) }, 0, 1},
		{"the own announcement, reflected by a switch", func(s *scene) { message(s, trace.Received, false, "203.0.113.1", "203.0.113.1", 1) }, 0, 0},
		{"a neighbour with two cards", func(s *scene) {
			message(s, trace.Received, true, "203.0.113.2", "203.0.113.2", 8)
			message(s, trace.Received, true, "203.0.113.2", "203.0.113.2", 9)
		}, 0, 1},
		{"two neighbours", func(s *scene) {
			message(s, trace.Received, true, "203.0.113.2", "203.0.113.2", 8)
			message(s, trace.Received, true, "203.0.113.3", "203.0.113.3", 9)
		}, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s scene
			tc.make(&s)
			if r := s.report(trace.PacketLoss{}); len(r.Mute) != tc.mute || len(r.Conflicts) != tc.conflicts {
				t.Errorf("mute %v, conflicts %v", r.Mute, r.Conflicts)
			}
		})
	}
}
