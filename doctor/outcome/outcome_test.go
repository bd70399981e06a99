// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

func TestStages(t *testing.T) {
	private := func(i int) connection {
		r := tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 5000+i), "198.51.100.9:443")
		return connection{r, r.Reverse()}
	}
	published := func(i int) connection {
		return connection{tuple(flow.TCP, fmt.Sprintf("198.51.100.7:%d", 3000+i), "203.0.113.1:8443"), tuple(flow.TCP, "10.0.0.2:443", fmt.Sprintf("198.51.100.7:%d", 3000+i))}
	}
	for _, tc := range []struct {
		name  string
		make  func(s *scene, i int)
		stage Stage
		text  []string
	}{
		{"no answer", func(s *scene, i int) { s.opens(outbound(i, "198.51.100.8:443"), 8, 2) }, NoAnswer,
			[]string{"198.51.100.8:443, got no answer", "wan0", "02:00:00:00:00:08", "nothing came back"}},
		{"dropped by a queue", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.see(trace.Received, "lan0", c.request, flags(syn))
			s.see(trace.Dropped, "wan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original), dropped(trace.CauseQdisc))
		}, NeverLeft, []string{"did not leave this host", "queueing discipline (wan0)"}},
		{"no link address", func(s *scene, i int) {
			s.see(trace.Received, "lan0", outbound(i, "198.51.100.8:443").request, flags(syn))
			s.see(trace.Transmitted, "wan0", flow.Tuple{}, own, func(p *trace.Packet) {
				p.Neighbour = &trace.Neighbour{Sender: netip.MustParseAddr("203.0.113.1"), Target: netip.MustParseAddr("203.0.113.2")}
			})
		}, NeverLeft, []string{"to the next hop 203.0.113.2 on wan0", "does not answer for its address"}},
		{"untranslated", func(s *scene, i int) {
			c := private(i)
			s.see(trace.Received, "lan0", c.request, flags(syn))
			s.see(trace.Transmitted, "wan0", c.request, flags(syn), tracked(c.request, c.reply, flow.Original), hop(8))
		}, Untranslated, []string{"left by wan0", "private source address"}},
		{"back by the interface of arrival", func(s *scene, i int) {
			c := connection{tuple(flow.TCP, fmt.Sprintf("10.0.0.3:%d", 3000+i), "203.0.113.1:80"), tuple(flow.TCP, "10.0.0.2:80", fmt.Sprintf("10.0.0.3:%d", 3000+i))}
			s.see(trace.Received, "lan0", c.request, flags(syn))
			s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
		}, WrongWay, []string{"10.0.0.2:80", "the interface of their arrival, lan0"}},
		{"away from the network of the server", func(s *scene, i int) {
			c := published(i)
			s.see(trace.Received, "wan0", c.request, flags(syn))
			s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
		}, WrongWay, []string{"interface of their arrival, wan0", "10.0.0.0/24 of lan0", "route to it is missing"}},
		{"no link address of the client", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.see(trace.Received, "wan0", c.reply, flags(synAck))
			s.see(trace.Transmitted, "lan0", flow.Tuple{}, own, func(p *trace.Packet) {
				p.Neighbour = &trace.Neighbour{Sender: netip.MustParseAddr("10.0.0.1"), Target: netip.MustParseAddr("10.0.0.2")}
			})
		}, AnswerLost, []string{"were answered", "next hop 10.0.0.2 on lan0 does not answer"}},
		{"loop", func(s *scene, i int) {
			r := tuple(flow.TCP, "198.51.100.7:4000", fmt.Sprintf("203.0.114.%d:80", i+1))
			for ttl := uint8(60); ttl > 50; ttl -= 2 {
				s.see(trace.Received, "wan0", r, flags(syn), func(p *trace.Packet) { p.TTL = ttl })
				s.see(trace.Transmitted, "wan0", r, flags(syn), tracked(r, r.Reverse(), flow.Original))
			}
		}, WrongWay, []string{"circle", "hop limit"}},
		{"answer dropped", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.see(trace.Received, "wan0", c.reply, flags(synAck))
			s.see(trace.Dropped, "wan0", c.request.Reverse(), flags(synAck), tracked(c.request, c.reply, flow.Reply), dropped(trace.CauseRPFilter))
		}, AnswerLost, []string{"were answered", "dropped here", "reverse path filter"}},
		{"refused by the server of a port forward", func(s *scene, i int) {
			c := published(i)
			s.see(trace.Received, "wan0", c.request, flags(syn))
			s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
			s.see(trace.Received, "lan0", c.reply, flags(rst))
			s.see(trace.Transmitted, "wan0", c.request.Reverse(), flags(rst), tracked(c.request, c.reply, flow.Reply))
		}, Refused, []string{"forwarded to 10.0.0.2:443", "were refused", "reset"}},
		{"client repeats", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.answers(c, synAck)
			s.later(time.Second)
			s.opens(c, 8, 1)
			s.answers(c, synAck)
		}, ClientRejects, []string{"were answered by lan0", "repeat their requests"}},
		{"answers by another interface", func(s *scene, i int) {
			c := published(i)
			s.see(trace.Received, "wan1", c.request, flags(syn))
			s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
			s.see(trace.Received, "lan0", c.reply, flags(synAck))
			s.see(trace.Transmitted, "wan0", c.request.Reverse(), flags(synAck), tracked(c.request, c.reply, flow.Reply))
		}, ClientRejects, []string{"arrive by wan1, the answers leave by wan0"}},
		{"large packets", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.answers(c, synAck)
			for range 4 {
				s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Original), func(p *trace.Packet) {
					p.Seq, p.Payload, p.Length = 1000, 1448, 1500
				})
				s.later(300 * time.Millisecond)
			}
			s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Reply), func(p *trace.Packet) { p.Ack = 1000 })
		}, TooBig, []string{"stall", "1500 bytes", "never acknowledged"}},
		{"server does not read", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.answers(c, synAck)
			s.unread(c)
		}, Unread, []string{"stall", "the server does not read", "198.51.100.8:443", "window of 0"}},
		{"client does not read", func(s *scene, i int) {
			c := connection{tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 3000+i), "198.51.100.8:80"), tuple(flow.TCP, "198.51.100.8:80", fmt.Sprintf("203.0.113.1:%d", 3000+i))}
			s.opens(c, 8, 1)
			s.answers(c, synAck)
			for range 4 {
				s.later(400 * time.Millisecond)
				s.see(trace.Received, "lan0", c.request, flags(trace.TCPAck), window(0))
				s.see(trace.Transmitted, "wan0", c.reply.Reverse(), flags(trace.TCPAck), tracked(c.request, c.reply, flow.Original), window(0))
			}
		}, Unread, []string{"the client does not read"}},
		{"another way", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.see(trace.Dropped, "lan0", c.request, flags(trace.TCPAck), dropped(trace.CauseNftRule))
		}, NoAnswer, []string{"answers do not pass this host"}},
		{"own program is silent", func(s *scene, i int) {
			r := tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 3000+i), "10.0.0.1:22")
			s.see(trace.Received, "lan0", r, flags(syn))
		}, NoAnswer, []string{"this host sent no answer"}},
		{"DNS without connection tracking", func(s *scene, i int) {
			r := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", 3000+i), "198.51.100.8:53")
			s.see(trace.Received, "lan0", r)
			s.see(trace.Transmitted, "wan0", r, func(p *trace.Packet) {
				p.Tuple.Source = netip.AddrPortFrom(netip.MustParseAddr("203.0.113.1"), r.Source.Port())
			})
		}, NoAnswer, []string{"UDP", "198.51.100.8:53"}},
		{"answers with another source", func(s *scene, i int) {
			r := tuple(flow.UDP, fmt.Sprintf("198.51.100.8:%d", 3000+i), "203.0.113.1:53")
			s.see(trace.Received, "wan0", r, tracked(r, r.Reverse(), flow.Original))
			s.see(trace.Transmitted, "wan0", tuple(flow.UDP, "10.0.0.1:53", r.Source.String()), own)
		}, ClientRejects, []string{"answered from 10.0.0.1 instead of 203.0.113.1"}},
		{"answers with the last hop", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.see(trace.Received, "wan0", c.reply, flags(synAck), func(p *trace.Packet) { p.TTL = 1 })
			s.see(trace.Dropped, "wan0", c.request.Reverse(), flags(synAck), tracked(c.request, c.reply, flow.Reply), dropped(trace.CauseTTL))
		}, AnswerLost, []string{"arrive by wan0 with a hop limit (TTL) of 1"}},
		{"answers without their connection", func(s *scene, i int) {
			c := outbound(i, "198.51.100.8:443")
			s.opens(c, 8, 1)
			s.see(trace.Received, "wan0", c.reply, flags(synAck))
			s.see(trace.Dropped, "wan0", c.reply, flags(synAck), dropped(trace.CauseNftRule), func(p *trace.Packet) { p.Hook = trace.HookInput })
		}, AnswerLost, []string{"not recognised", "not translated back"}},
		{"answers of DNS in another zone", func(s *scene, i int) {
			r, a := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", 3000+i), "198.51.100.8:53"), tuple(flow.UDP, "198.51.100.8:53", fmt.Sprintf("203.0.113.1:%d", 3000+i))
			s.see(trace.Received, "lan0", r)
			s.see(trace.Transmitted, "wan0", a.Reverse(), tracked(r, a, flow.Original))
			s.see(trace.Received, "wan0", a)
			s.see(trace.Dropped, "wan0", a, tracked(a, a.Reverse(), flow.Original), dropped(trace.CauseNftRule))
		}, AnswerLost, []string{"not recognised", "not translated back"}},
		{"ARP answers that a rule drops", func(s *scene, i int) {
			about := func(answer bool) func(p *trace.Packet) {
				return func(p *trace.Packet) {
					own, hop := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
					if p.Neighbour = (&trace.Neighbour{Answer: answer, Sender: own, Target: hop}); answer {
						p.Neighbour.Sender = hop
					}
				}
			}
			c := outbound(i, "198.51.100.8:443")
			s.see(trace.Received, "lan0", c.request, flags(syn))
			s.see(trace.Transmitted, "wan0", flow.Tuple{}, about(false), own)
			s.see(trace.Received, "wan0", flow.Tuple{}, about(true))
			s.see(trace.Dropped, "wan0", flow.Tuple{}, about(true), dropped(trace.CauseNftRule))
			s.see(trace.Dropped, "wan0", c.request, flags(syn), tracked(c.request, c.reply, flow.Original), dropped(trace.CauseNeighbour))
		}, NeverLeft, []string{"ARP for the next hop 203.0.113.2 on wan0 is dropped here: nftables rule"}},
		{"another link address", func(s *scene, i int) {
			s.see(trace.Received, "lan0", outbound(i, "198.51.100.8:443").request, flags(syn), hop(99))
		}, NeverLeft, []string{"for the hardware address 02:00:00:00:00:63, which this host does not have"}},
		{"fragments of answers, over and over", func(s *scene, i int) {
			r := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", 3000+i), "198.51.100.8:53")
			for range 12 {
				s.see(trace.Received, "lan0", r, tracked(r, r.Reverse(), flow.Original))
				s.see(trace.Transmitted, "wan0", r, tracked(r, r.Reverse(), flow.Original))
				s.see(trace.Received, "wan0", r.Reverse())
				s.later(100 * time.Millisecond)
			}
			s.ends = s.now
		}, AnswerLost, []string{"the answers did not leave this host"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s scene
			s.healthy(0, 12)
			for i := range 5 {
				s.buffer++
				tc.make(&s, 100+i)
				s.later(50 * time.Millisecond)
			}
			r := s.report(trace.PacketLoss{})
			if r.Answered != 12 || r.Failed != 5 || len(r.Classes) != 1 {
				t.Fatalf("report %+v", r)
			}
			c := r.Classes[0]
			if c.Stage != tc.stage || c.Failing != 5 || !c.Sizable {
				t.Errorf("class %s: stage %s, %d failing, sizable %v", &c, c.Stage, c.Failing, c.Sizable)
			}
			for _, text := range tc.text {
				if !strings.Contains(c.String(), text) {
					t.Errorf("%q lacks %q", c.String(), text)
				}
			}
			if strings.Contains(c.String(), "%!") || len(c.Evidence()) == 0 {
				t.Errorf("text %q, evidence %q", c.String(), c.Evidence())
			}
		})
	}
}

// TestNoise wants nothing to fail that nobody misses.
func TestNoise(t *testing.T) {
	for _, tc := range []struct {
		name string
		make func(s *scene)
	}{
		{"broadcasts and groups", func(s *scene) {
			for i := range 20 {
				s.see(trace.Received, "lan0", tuple(flow.UDP, fmt.Sprintf("10.0.0.%d:137", i+2), "10.0.0.255:137"))
				s.see(trace.Dropped, "lan0", tuple(flow.UDP, fmt.Sprintf("10.0.0.%d:5353", i+2), "224.0.0.251:5353"), dropped(trace.CauseNftRule))
			}
		}},
		{"scan of closed ports", func(s *scene) {
			for i := range 20 {
				r := tuple(flow.TCP, "198.51.100.66:4000", fmt.Sprintf("203.0.113.1:%d", i+1))
				s.see(trace.Received, "wan0", r, flags(syn))
				s.see(trace.Transmitted, "wan0", r.Reverse(), flags(rst), own)
			}
		}},
		{"sweep of addresses", func(s *scene) {
			for i := range 20 {
				r := tuple(flow.TCP, "198.51.100.66:4000", fmt.Sprintf("10.0.0.%d:22", i+100))
				s.see(trace.Received, "wan0", r, flags(syn))
				s.see(trace.Transmitted, "lan0", r, flags(syn), tracked(r, r.Reverse(), flow.Original))
			}
		}},
		{"datagrams without answers", func(s *scene) {
			for i := range 20 {
				r := tuple(flow.UDP, fmt.Sprintf("10.0.0.2:%d", i+3000), "198.51.100.8:514")
				s.see(trace.Received, "lan0", r)
				s.see(trace.Transmitted, "wan0", r, tracked(r, tuple(flow.UDP, "198.51.100.8:514", fmt.Sprintf("203.0.113.1:%d", i+3000)), flow.Original))
			}
		}},
		{"private sources on a public link", func(s *scene) {
			for i := range 5 {
				r := tuple(flow.UDP, fmt.Sprintf("192.168.77.%d:4000", i+1), "203.0.113.1:53")
				s.see(trace.Received, "wan0", r)
				s.see(trace.Dropped, "wan0", r, dropped(trace.CauseRPFilter))
			}
		}},
		{"filtered by a rule", func(s *scene) {
			for i := range 5 {
				s.see(trace.Received, "wan0", tuple(flow.TCP, fmt.Sprintf("198.51.100.%d:4000", i+60), "203.0.113.1:22"), flags(syn))
				s.see(trace.Dropped, "wan0", tuple(flow.TCP, fmt.Sprintf("198.51.100.%d:4000", i+60), "203.0.113.1:22"), flags(syn), dropped(trace.CauseNftRule))
			}
		}},
		{"one client that gives up", func(s *scene) {
			c := outbound(900, "198.51.100.7:443")
			s.opens(c, 7, 1)
			s.answers(c, synAck)
			s.see(trace.Received, "lan0", c.request, flags(trace.TCPRst))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s scene
			s.healthy(0, 12)
			tc.make(&s)
			if r := s.report(trace.PacketLoss{}); r.Failed != 0 || r.Answered < 12 {
				t.Errorf("report %+v: %v", r, r.Classes)
			}
		})
	}
}

// TestSeparation wants the attribute by which failing exchanges differ from healthy ones.
func TestSeparation(t *testing.T) {
	server := func(i int) string { return fmt.Sprintf("198.51.100.%d:443", 20+i%4) }
	var hops, single scene
	for i := range 40 {
		c := outbound(i, server(i/2))
		mac := byte(7 + i%2)
		hops.opens(c, mac, 2)
		if mac == 7 {
			hops.answers(c, synAck)
		}
		c = outbound(i, server(i))
		single.opens(c, 7, 2)
		if i%4 != 0 {
			single.answers(c, synAck)
		}
	}
	if c := hops.report(trace.PacketLoss{}).Classes[0]; c.Attribute != ByNextHop || c.Failing != 20 || c.Of != 20 || !c.Sizable {
		t.Errorf("half of the connections to each server fail by one next hop: %s, by %s", &c, c.Attribute)
	}
	if c := single.report(trace.PacketLoss{}).Classes[0]; c.Attribute != ByServer || c.Value != "198.51.100.20:443" || c.Failing != 10 {
		t.Errorf("one of four servers is dead: %s, by %s", &c, c.Attribute)
	}
}

// TestClientAmongScan expects the connections of a client to be refused by a rule, although its address also scans.
func TestClientAmongScan(t *testing.T) {
	var s scene
	for i := range 12 {
		r := tuple(flow.TCP, fmt.Sprintf("198.51.100.7:%d", 3000+i), "203.0.113.1:8443")
		s.see(trace.Received, "wan0", r, flags(syn))
		s.see(trace.Transmitted, "wan0", r.Reverse(), flags(synAck), own)
	}
	for i := range 40 {
		to := fmt.Sprintf("198.51.100.%d:161", 10+i)
		if i%2 == 0 {
			to = "198.51.100.8:443"
		}
		r := tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 4000+i), to)
		s.see(trace.Received, "lan0", r, flags(syn))
		s.see(trace.Dropped, "lan0", r, flags(syn), dropped(trace.CauseNftRule))
	}
	if r := s.report(trace.PacketLoss{}); r.Filtered != 20 || r.Noise != 20 || len(r.Refused) == 0 || !r.Refused[0].Sizable {
		t.Errorf("report %+v: %v", r, r.Refused)
	}
}

// TestProbes expects unanswered health checks of the daemon to be no failures, and connections of clients to the same
// backend to be some.
func TestProbes(t *testing.T) {
	var s scene
	s.healthy(0, 12)
	probe := func(i int) flow.Tuple { return tuple(flow.TCP, fmt.Sprintf("10.0.0.1:%d", 4000+i), "10.0.0.9:80") }
	for i := range 6 {
		s.see(trace.Transmitted, "lan0", probe(i), flags(syn), own)
	}
	host := sceneHost
	host.Probed = map[netip.Addr]bool{netip.MustParseAddr("10.0.0.9"): true}
	report := func() *Report {
		c := NewCollector(host, NewBudget())
		for i := range s.packets {
			c.Add(&s.packets[i])
		}
		return c.Report(s.now+3*time.Second, trace.PacketLoss{}, nil)
	}
	if r := report(); r.Failed != 0 || r.Probes != 6 || !strings.Contains(r.Text(), "6 health checks") {
		t.Errorf("report %+v", r)
	}
	for i := range 5 {
		c := connection{tuple(flow.TCP, fmt.Sprintf("198.51.100.7:%d", 3000+i), "203.0.113.1:8080"), tuple(flow.TCP, "10.0.0.9:80", fmt.Sprintf("198.51.100.7:%d", 3000+i))}
		s.see(trace.Received, "wan0", c.request, flags(syn))
		s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original))
	}
	if r := report(); r.Failed != 5 || r.Probes != 6 {
		t.Errorf("with clients: report %+v", r)
	}
}

// TestForeignSource expects unanswered connections to name a translated source that this host does not have.
func TestForeignSource(t *testing.T) {
	var s scene
	for i := range 5 {
		c := outbound(i, "198.51.100.8:443")
		c.reply.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.77"), c.reply.Dest.Port())
		s.opens(c, 8, 1)
	}
	r := s.report(trace.PacketLoss{})
	if len(r.Classes) != 1 || !strings.Contains(r.Classes[0].String(), "source was translated to 192.0.2.77, which this host does not have") {
		t.Errorf("report %+v: %v", r, r.Classes)
	}
}

// TestOwnProgram wants a silent program of this host to matter, however small its share.
func TestOwnProgram(t *testing.T) {
	var s scene
	s.healthy(0, 100)
	for i := range 5 {
		s.see(trace.Received, "lan0", tuple(flow.TCP, fmt.Sprintf("10.0.0.2:%d", 9000+i), "10.0.0.1:8444"), flags(syn))
	}
	if r := s.report(trace.PacketLoss{}); len(r.Classes) != 1 || !r.Classes[0].Sizable {
		t.Errorf("report %+v", r)
	}
}

// TestOneArmed wants an unanswered request on a gateway with one interface to be no wrong way.
func TestOneArmed(t *testing.T) {
	var s scene
	for i := range 12 {
		c := outbound(i, "198.51.100.7:443")
		if i%2 == 0 {
			c = outbound(i, "198.51.100.8:443")
		}
		s.buffer++
		s.see(trace.Received, "lan0", c.request, flags(syn))
		s.see(trace.Transmitted, "lan0", c.reply.Reverse(), flags(syn), tracked(c.request, c.reply, flow.Original), hop(7))
		if i%2 == 1 {
			s.see(trace.Received, "lan0", c.reply, flags(synAck))
			s.see(trace.Transmitted, "lan0", c.request.Reverse(), flags(synAck), tracked(c.request, c.reply, flow.Reply))
		}
	}
	r := s.report(trace.PacketLoss{})
	if len(r.Classes) != 1 || r.Classes[0].Stage != NoAnswer || r.Classes[0].Value != "198.51.100.8:443" {
		t.Errorf("report %+v", r)
	}
}

// TestLoss wants no conclusion from silence when packets were lost, and one from a packet that was dropped.
func TestLoss(t *testing.T) {
	var s scene
	s.healthy(0, 3)
	for i := range 5 {
		s.opens(outbound(100+i, "198.51.100.8:443"), 8, 2)
		c := outbound(200+i, "198.51.100.9:443")
		s.opens(c, 8, 1)
		s.see(trace.Dropped, "wan0", c.reply, flags(synAck), tracked(c.request, c.reply, flow.Reply), dropped(trace.CauseRPFilter))
	}
	r := s.report(trace.PacketLoss{Openings: 1})
	if r.Unknown != 5 || r.Failed != 5 || len(r.Classes) != 1 || r.Classes[0].Stage != AnswerLost {
		t.Errorf("report %+v", r)
	}
}

// TestRefine wants the counters of the window to correct the cause of a drop before it is judged.
func TestRefine(t *testing.T) {
	var s scene
	for i := range 5 {
		r := outbound(i, "198.51.100.8:443").request
		s.see(trace.Received, "lan0", r, flags(syn))
		s.see(trace.Dropped, "lan0", r, flags(syn), dropped(trace.CauseTableFull))
	}
	for refine, filtered := range map[trace.Cause]int{trace.CauseTableFull: 0, trace.CauseHookRule: 5} {
		c := NewCollector(sceneHost, NewBudget())
		for i := range s.packets {
			c.Add(&s.packets[i])
		}
		r := c.Report(s.now+time.Second, trace.PacketLoss{}, func(trace.Cause) trace.Cause { return refine })
		if r.Filtered != filtered || r.Failed != 5-filtered {
			t.Errorf("cause %s: %+v", refine.ID, r)
		}
	}
}

// TestTooEarly wants no verdict about requests that just left.
func TestTooEarly(t *testing.T) {
	var s scene
	s.opens(outbound(1, "198.51.100.8:443"), 8, 1)
	c := NewCollector(sceneHost, NewBudget())
	for i := range s.packets {
		c.Add(&s.packets[i])
	}
	if r := c.Report(s.now+100*time.Millisecond, trace.PacketLoss{}, nil); r.Failed != 0 || r.Ongoing != 1 {
		t.Errorf("report %+v", r)
	}
}

// TestBounds wants a flood to be cut, and to say so.
func TestBounds(t *testing.T) {
	c := NewCollector(sceneHost, NewBudget())
	for i := range mostExchanges + 10 {
		p := trace.Packet{Time: time.Duration(i), Point: trace.Received, Interface: "wan0", TCPFlags: syn,
			Tuple: tuple(flow.TCP, fmt.Sprintf("198.51.%d.%d:%d", i>>16, i>>8&255, 1000+i&255), "10.0.0.2:80")}
		c.Add(&p)
	}
	if r := c.Report(time.Second, trace.PacketLoss{}, nil); !r.Cut || len(c.exchanges) != mostExchanges {
		t.Errorf("%d exchanges, cut %v", len(c.exchanges), r.Cut)
	}
}

// TestTally expects the exchanges of a class to be found in another observation, by their clients if they use other servers.
func TestTally(t *testing.T) {
	var sick, healed, moved scene
	sick.healthy(0, 5)
	healed.healthy(0, 5)
	for i := range 5 {
		sick.opens(outbound(100+i, "198.51.100.8:443"), 8, 1)
		c := outbound(200+i, "198.51.100.8:443")
		healed.opens(c, 8, 1)
		healed.answers(c, synAck)
		c = outbound(300+i, "198.51.100.9:443")
		moved.opens(c, 8, 1)
	}
	r := sick.report(trace.PacketLoss{})
	targets := r.Classes[0].Targets()
	for name, tc := range map[string]struct {
		report         *Report
		chosen, others Tally
	}{
		"before":       {r, Tally{0, 5}, Tally{5, 0}},
		"after":        {healed.report(trace.PacketLoss{}), Tally{5, 0}, Tally{5, 0}},
		"other server": {moved.report(trace.PacketLoss{}), Tally{0, 5}, Tally{}},
	} {
		if chosen, others := tc.report.Tally(targets); chosen != tc.chosen || others != tc.others {
			t.Errorf("%s: %+v and others %+v, want %+v and %+v", name, chosen, others, tc.chosen, tc.others)
		}
	}
}
