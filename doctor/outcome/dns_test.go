// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// TestTransactions wants the loss of one of two queries of a socket to be seen, with and without connection tracking, and
// behind a service that translates the port.
func TestTransactions(t *testing.T) {
	query := func(id uint16) func(p *trace.Packet) { return func(p *trace.Packet) { p.Query = id } }
	none := func(*trace.Packet) {}
	for _, tc := range []struct{ name, asked, server string }{
		{"DNS", "198.51.100.8:53", "198.51.100.8:53"}, {"a resolver at another port", "198.51.100.8:53", "10.0.9.2:5353"}, {"a service at another port", "198.51.100.8:5300", "10.0.9.2:53"},
	} {
		for _, tracking := range []bool{true, false} {
			if !tracking && tc.asked != tc.server {
				continue
			}
			t.Run(fmt.Sprint(tc.name, tracking), func(t *testing.T) {
				var s scene
				for i := range 8 {
					request := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", 3000+i), tc.asked)
					reply := tuple(flow.UDP, tc.server, fmt.Sprintf("10.0.0.2:%d", 3000+i))
					there, back := none, none
					if tracking {
						there, back = tracked(request, reply, flow.Original), tracked(request, reply, flow.Reply)
					}
					for id := range uint16(2) {
						s.buffer++
						s.see(trace.Received, "lan0", request, query(2*uint16(i)+id+1))
						s.see(trace.Transmitted, "wan0", reply.Reverse(), query(2*uint16(i)+id+1), there)
					}
					s.buffer++
					s.see(trace.Received, "wan0", reply, query(2*uint16(i)+1))
					s.see(trace.Transmitted, "lan0", request.Reverse(), query(2*uint16(i)+1), back)
				}
				want := 8
				if tc.asked != "198.51.100.8:53" { // not known for DNS by the client's packets
					want = 0
				}
				r := s.report(trace.PacketLoss{})
				if r.Answered != 8 || r.Failed != want {
					t.Errorf("report %+v: %v", r, r.Classes)
				}
			})
		}
	}
}

// TestSilentServer expects the silence of a DNS server to matter among many healthy exchanges, and other silent servers not to.
func TestSilentServer(t *testing.T) {
	for server, want := range map[string]bool{"198.51.100.8:53": true, "198.51.100.8:123": false} {
		var s scene
		s.healthy(0, 60)
		for i := range 6 {
			r := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", 3000+i), server)
			s.buffer++
			s.see(trace.Received, "lan0", r)
			s.see(trace.Transmitted, "wan0", r, tracked(r, tuple(flow.UDP, server, fmt.Sprintf("203.0.113.1:%d", 3000+i)), flow.Original), hop(7))
		}
		if r := s.report(trace.PacketLoss{}); len(r.Classes) != 1 || r.Classes[0].Sizable != want {
			t.Errorf("%s: report %+v: %v", server, r, r.Classes)
		}
	}
}
