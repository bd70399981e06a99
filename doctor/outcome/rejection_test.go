// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// TestServersRefuse expects one class for a port that several servers refuse, where each server has a small share.
func TestServersRefuse(t *testing.T) {
	var s scene
	for i := range 40 {
		c := connection{tuple(flow.TCP, fmt.Sprintf("198.51.100.9:%d", 3000+i), "203.0.113.1:8080"), tuple(flow.TCP, "10.0.0.2:80", fmt.Sprintf("198.51.100.9:%d", 3000+i))}
		s.buffer++
		s.see(trace.Received, "wan0", c.request, flags(syn))
		s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
		s.see(trace.Received, "lan0", c.reply, flags(synAck))
		s.see(trace.Transmitted, "wan0", c.request.Reverse(), flags(synAck), tracked(c.request, c.reply, flow.Reply))
	}
	for i := range 12 {
		c := outbound(i, fmt.Sprintf("198.51.100.%d:8443", 20+i%3))
		s.opens(c, 8, 1)
		s.answers(c, rst)
	}
	r := s.report(trace.PacketLoss{})
	if len(r.Classes) != 1 || !r.Classes[0].Sizable || r.Classes[0].Attribute != ByPort || !strings.Contains(r.Classes[0].String(), "12 of 12 connections to TCP port 8443 were refused") {
		t.Errorf("report %+v: %v", r, r.Classes)
	}
}

// TestServersFailTogether expects servers that refuse to matter together, if a healthy server has the same port.
func TestServersFailTogether(t *testing.T) {
	var s scene
	for i := range 78 {
		c, answer := outbound(i, "198.51.100.40:8443"), byte(synAck)
		switch {
		case i < 18:
			c, answer = outbound(i, fmt.Sprintf("198.51.100.%d:8443", 20+i%3)), rst
		case i < 38:
			c = outbound(i, "198.51.100.7:443")
		}
		s.opens(c, 8, 1)
		s.answers(c, answer)
	}
	r := s.report(trace.PacketLoss{})
	if len(r.Classes) != 3 {
		t.Fatalf("report %+v: %v", r, r.Classes)
	}
	for _, c := range r.Classes {
		if c.Attribute != ByServer || c.Failing != 6 || c.Alike != 18 || !c.Sizable {
			t.Errorf("class %s: %+v", &c, c)
		}
	}
}

// TestRejectionsAreLimited expects connections without an answer to have the cause of the ICMP error that their
// server sent about another one.
func TestRejectionsAreLimited(t *testing.T) {
	var s scene
	s.healthy(0, 12)
	for i := range 8 {
		c := outbound(100+i, "198.51.100.8:443")
		s.opens(c, 8, 1)
		if i == 3 {
			s.see(trace.Received, "wan0", tuple(flow.ICMP, "198.51.100.8:0", "203.0.113.1:0"), func(p *trace.Packet) {
				p.ICMPType, p.ICMPCode, p.Quoted = 3, 13, c.reply.Reverse()
			})
		}
	}
	r := s.report(trace.PacketLoss{})
	if len(r.Classes) != 1 || r.Classes[0].Failing != 8 || !strings.Contains(r.Classes[0].String(), "were refused: 198.51.100.8 answers by an ICMP error (prohibited)") {
		t.Errorf("report %+v: %v", r, r.Classes)
	}
}
