// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/packet"
)

// generator makes random steps. The meaning of a step does not depend on earlier steps, so that a failing script can be
// shortened.
type generator struct {
	*rand.Rand
	scene scene
	talks []talk     // conversations; only the last few get more packets
	done  [][]string // changes in force
	undo  [][]string // steps that revert each change in done
	next  int
	queue []string // steps that follow each other
}

// talk is a conversation.
type talk struct {
	id       string
	v6       bool
	protocol string
}

// newGenerator returns a generator for a random scene.
func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 35))}
	name := pick(g, sortedKeys(scenes))
	g.scene = scenes[name]
	g.queue = []string{"known", "config " + name}
	return g
}

func pick[T any](g *generator, of []T) T { return of[g.IntN(len(of))] }

func (g *generator) maybe(n int, text string) string {
	if g.IntN(n) > 0 {
		return ""
	}
	return text
}

// mostChanges is how many changes of the environment are in force at once.
const mostChanges = 5

func (g *generator) step() string {
	if len(g.queue) == 0 {
		g.queue = g.steps()
	}
	s := g.queue[0]
	g.queue = g.queue[1:]
	return s
}

func (g *generator) steps() []string {
	switch n := g.IntN(100); {
	case n < 8 && len(g.undo) > 0 || len(g.undo) > mostChanges:
		at := g.IntN(len(g.undo))
		steps := g.undo[at]
		g.undo, g.done = append(g.undo[:at:at], g.undo[at+1:]...), append(g.done[:at:at], g.done[at+1:]...)
		return steps
	case n < 20:
		steps, undo := g.change()
		if undo != nil {
			g.undo, g.done = append(g.undo, undo), append(g.done, steps)
		}
		return steps
	case n < 26:
		s := g.odd()
		g.talks = g.talks[:len(g.talks)-1] // it gets no answer
		return []string{s}
	case n < 34:
		return []string{g.local()}
	case n < 55 || len(g.talks) == 0:
		return []string{g.open()}
	default:
		return []string{g.goOn()}
	}
}

// open begins a conversation.
func (g *generator) open() string {
	o := pick(g, g.scene.openings)
	return g.sendFrom(o.link, pick(g, o.from), pick(g, o.to), pick(g, o.ports), pick(g, o.protocols))
}

func (g *generator) sendFrom(link, from, to string, port uint16, protocol string) string {
	g.next++
	id := fmt.Sprintf("c%d", g.next)
	src, dst := netip.MustParseAddr(from), netip.MustParseAddr(to)
	g.talks = append(g.talks, talk{id, src.Is6(), protocol})
	mac, ok := hostMAC(link, src)
	if !ok { // behind the router on the link
		mac = packet.MAC{2, 0, 0, 0, linkNumber[link], map[string]byte{"wan": 2, "lan": 8, "dmz": 8}[link]}
	}
	ports := fmt.Sprintf("sport=%d,dport=%d", 30000+g.next%30000, port)
	payload := fmt.Sprintf("data(%q)", id)
	df := false
	if size := g.size(); size > 0 {
		payload = fmt.Sprintf("data(%d)", size)
		df = g.IntN(2) == 0
	}
	var l4, net string
	switch protocol {
	case "udp":
		l4 = "udp(" + ports + ")/" + payload
	case "tcp":
		l4 = fmt.Sprintf("tcp(%s,flags=S,seq=%d,opts=[mss:1460])", ports, 1000*g.next)
		df = true
	default:
		l4 = fmt.Sprintf("icmp(type=8,id=%d,seq=1)/", 30000+g.next%30000) + payload
		if src.Is6() {
			l4 = fmt.Sprintf("icmp6(type=128,id=%d,seq=1)/", 30000+g.next%30000) + payload
		}
	}
	if src.Is6() {
		net = fmt.Sprintf("ip6(src=%s,dst=%s%s%s)", src, dst, g.hops("hl"), g.maybe(8, fmt.Sprintf(",tc=%#x", pick(g, classes))))
	} else {
		net = fmt.Sprintf("ip4(src=%s,dst=%s,id=%d%s%s%s%s)", src, dst, injectedID+g.next%200, g.hops("ttl"), g.maybe(8, fmt.Sprintf(",tos=%#x", pick(g, classes))),
			map[bool]string{true: ",df"}[df], g.maybe(25, ",opts="+pick(g, options4)))
	}
	return fmt.Sprintf("send %s %s eth(src=%s,dst=%s)/%s/%s", id, link, mac, gatewayMAC(link), net, l4)
}

// Traffic classes: congestion marks and others.
var classes = []uint8{1, 2, 3, 0x10, 0xb8, 0xbb, 0xc0}

// IPv4 options: nothing, router alert, record route, timestamp, and loose source route by the gateway.
var options4 = []string{"0x01010101", "0x94040000", "0x070b0400000000000000000000", "0x440c0500000000000000000000", "0x8307040a0002090000"}

func (g *generator) hops(field string) string {
	return g.maybe(8, fmt.Sprintf(",%s=%d", field, pick(g, []uint8{1, 2, 0, 255})))
}

// size returns the size of a payload in bytes; 0 for a small default.
func (g *generator) size() int {
	if g.IntN(4) > 0 {
		return 0
	}
	return pick(g, []int{400, 1200, 1300, 1352, 1400, 1432, 1452, 1472, 1472, 1452})
}

// goOn is the next packet of a conversation.
func (g *generator) goOn() string {
	t := g.talks[max(0, len(g.talks)-1-g.IntN(12))]
	changes := ""
	if t.v6 {
		if h := g.hops("hl"); h != "" {
			changes += " ip6(" + h[1:] + ")"
		}
		changes += g.maybe(10, fmt.Sprintf(" ip6(tc=%#x)", pick(g, classes)))
	} else {
		if h := g.hops("ttl"); h != "" {
			changes += " ip4(" + h[1:] + ")"
		}
		changes += g.maybe(10, fmt.Sprintf(" ip4(tos=%#x)", pick(g, classes))) + g.maybe(6, " ip4(df)") + g.maybe(30, " ip4(opts="+pick(g, options4)+")")
	}
	if size := g.size(); size > 0 && t.protocol != "tcp" {
		changes += fmt.Sprintf(" data(%d)", size)
	}
	switch n := g.IntN(10); {
	case n < 6:
		return "reply " + t.id + changes
	case n < 9:
		return "again " + t.id + g.maybe(12, " on="+pick(g, linkNames)) + changes
	}
	if t.v6 {
		return fmt.Sprintf("error %s %s %s", t.id, pick(g, []string{"host", "2001:db8:9::1", "fd00:2::8"}),
			pick(g, []string{"icmp6(type=1,code=4)", "icmp6(type=2,mtu=1300)", "icmp6(type=3)", "icmp6(type=1,code=0)"}))
	}
	return fmt.Sprintf("error %s %s %s", t.id, pick(g, []string{"host", "198.51.100.1", "10.0.2.8"}),
		pick(g, []string{"icmp(type=3,code=3)", "icmp(type=3,code=4,mtu=1300)", "icmp(type=11)", "icmp(type=3,code=1)"}))
}

// odd is a packet to or from an address that is seldom routed.
func (g *generator) odd() string {
	link := pick(g, linkNames)
	if g.IntN(3) == 0 {
		from6 := []string{"::", "::1", "fe80::2", "ff02::1", "2001:db8:9::7", "::ffff:10.0.2.3", "fd00:2::1", "2001:db8:1::1", "fd00:2::3", "2001:db8:66::6"}
		to6 := []string{"::1", "ff02::1", "ff0e::7", "fe80::2", "::ffff:10.0.2.3", "fd00:2::", "2001:db8:1::1", "2001:db8:9::7", "fd00:2::77", "2001:db8:1::77"}
		return g.sendFrom(link, pick(g, from6), pick(g, to6), 53, pick(g, allProtocols))
	}
	from := []string{"0.0.0.0", "0.1.2.3", "127.0.0.1", "169.254.7.7", "224.0.0.5", "240.0.0.7", "255.255.255.255", "10.0.2.255", "10.0.2.1", "203.0.113.1", "10.0.2.3", "198.51.100.7", "172.16.6.6"}
	to := []string{"0.0.0.0", "0.1.2.3", "127.0.0.1", "169.254.7.7", "224.0.0.5", "239.1.2.3", "240.0.0.7", "255.255.255.255", "10.0.2.255", "10.0.2.0", "203.0.113.255", "203.0.113.201", "203.0.113.204", "198.51.100.7", "10.0.2.77", "203.0.113.77"}
	s := g.sendFrom(link, pick(g, from), pick(g, to), pick(g, []uint16{53, 80, 8080, 5353}), pick(g, allProtocols))
	switch g.IntN(8) {
	case 0:
		s = strings.Replace(s, "dst="+gatewayMAC(link).String(), "dst=ff:ff:ff:ff:ff:ff", 1)
	case 1:
		s = strings.Replace(s, "dst="+gatewayMAC(link).String(), "dst=02:00:00:00:77:77", 1)
	}
	return s
}

// local has to do with the gateway's own sockets, or its addresses.
func (g *generator) local() string {
	switch g.IntN(6) {
	case 0:
		return "listen own " + pick(g, []string{"0.0.0.0:53", "203.0.113.1:9", "10.0.3.1:53", "203.0.113.1:7000"})
	case 1:
		return "listen six " + pick(g, []string{"[::]:53", "[2001:db8:1::1]:9", "[fd00:3::1]:53"})
	case 2:
		g.next++
		return fmt.Sprintf("emit own %s own%d", pick(g, []string{"198.51.100.7:53", "10.0.2.3:53", "203.0.113.9:53", "10.0.3.2:80"}), g.next)
	case 3:
		g.next++
		return fmt.Sprintf("emit six %s six%d", pick(g, []string{"[2001:db8:9::7]:53", "[fd00:2::3]:53"}), g.next)
	}
	link := pick(g, linkNames)
	g.next++
	to := map[string]string{"wan": "203.0.113.1", "lan": "10.0.2.1", "dmz": "10.0.3.1"}[pick(g, linkNames)]
	from := map[string]string{"wan": "203.0.113.5", "lan": "10.0.2.5", "dmz": "10.0.3.5"}[link]
	mac, _ := hostMAC(link, netip.MustParseAddr(from))
	return fmt.Sprintf("send a%d %s eth(src=%s,dst=ff:ff:ff:ff:ff:ff)/arp(sha=%s,spa=%s,tpa=%s)", g.next, link, mac, mac, from, pick(g, []string{to, "203.0.113.201", "10.0.2.77"}))
}
