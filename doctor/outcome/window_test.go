// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// TestClosedWindow expects no decision about a connection if its window was closed a moment ago, although segments repeat.
func TestClosedWindow(t *testing.T) {
	var s scene
	for i := range 5 {
		c := outbound(i, "198.51.100.8:443")
		s.opens(c, 8, 1)
		s.answers(c, synAck)
		for range 3 {
			s.later(250 * time.Millisecond)
			s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Original), func(p *trace.Packet) { p.Seq, p.Payload, p.Length = 9, 1448, 1500 })
			s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Reply), window(0))
		}
	}
	if r := s.report(trace.PacketLoss{}); r.Ongoing != 5 || r.Answered+r.Failed != 0 {
		t.Errorf("report %+v: %v", r, r.Classes)
	}
}

// TestSlowReader expects no failure of a connection if its window opens again.
func TestSlowReader(t *testing.T) {
	for name, resumes := range map[string]func(s *scene, c connection){
		"opens": func(s *scene, c connection) {
			s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Reply))
		},
		"takes data": func(s *scene, c connection) {
			s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Original), func(p *trace.Packet) { p.Seq, p.Payload, p.Length = 9, 500, 552 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			var s scene
			for i := range 5 {
				c := outbound(i, "198.51.100.8:443")
				s.opens(c, 8, 1)
				s.answers(c, synAck)
				s.unread(c)
				resumes(&s, c)
			}
			if r := s.report(trace.PacketLoss{}); r.Answered != 5 || r.Failed != 0 {
				t.Errorf("report %+v: %v", r, r.Classes)
			}
		})
	}
}
