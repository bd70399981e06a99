// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// examined is a sample of one router read from testdata/healthy, a few seconds
// apart, with nothing wrong; tests then make one thing wrong.
func examined(t *testing.T) *observe.Sample {
	t.Helper()
	root := os.DirFS("testdata/healthy")
	reading := func() observe.NamespaceReading {
		r, err := observe.ReadNamespaceFiles(root)
		if err != nil {
			t.Fatal(err)
		}
		r.ReadSockets(root)
		r.Counters.AddConntrack(conntrack.Counters{})
		r.Links = []observe.Link{{Name: "lo", Loopback: true, Up: true, MTU: 65536}, {Name: "wan0", Kind: "device", Up: true, MTU: 1500, Queues: 2, GRO: 1, RxChecksum: 1, RxPackets: 1000},
			{Name: "lan0", Kind: "veth", Up: true, MTU: 1500, RxPackets: 1000}}
		r.Generation = 7
		return r
	}
	n := &observe.Namespace{Namespace: netdev.Namespace{Name: "router", Inode: 4711}, Before: reading(), After: reading(),
		Rules: &firewall.Ruleset{Tables: 1, SourceNAT: 1, Forwards: firewall.Forwards{IPv4: 1}, Chains: []firewall.Chain{{Name: "ip mangle post", Hook: "postrouting", Longest: 2, Established: -1}}}}
	n.Before.At = n.After.At.Add(-3 * time.Second)
	n.Delta, n.Entries = trace.Counters{}, &observe.Entries{}
	n.Table = conntrack.NewSummary(conntrack.BySource | conntrack.ByService | conntrack.ByBackend | conntrack.BySNATPort)
	fill(n.Table, 100, conntrack.TCPEstablished)
	s := &observe.Sample{Window: 3 * time.Second, Before: observe.ReadHostCounters(root), After: observe.ReadHostFiles(root), Namespaces: []*observe.Namespace{n}}
	return s
}

// fill adds assured, translated connections of many clients.
func fill(table *conntrack.Summary, n int, state conntrack.TCPState) {
	for i := range n {
		client := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		table.Add(&conntrack.Entry{Protocol: 6, State: uint8(state), Status: conntrack.Assured | conntrack.SeenReply, Timeout: 100,
			Original: conntrack.Tuple{Source: conntrack.AddrOf(client), Dest: conntrack.AddrOf(netip.MustParseAddr("198.51.100.2")), SourcePort: uint16(2000 + i), DestPort: uint16(i)},
			Reply:    conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("198.51.100.2")), Dest: conntrack.AddrOf(netip.MustParseAddr("203.0.113.1")), SourcePort: uint16(i), DestPort: uint16(2000 + i)}})
	}
}

// before makes the first reading of an interface.
func before(l observe.Link) func(*observe.Sample) {
	return func(s *observe.Sample) {
		l.Name, l.Kind, l.Up = "wan0", "device", true
		s.Namespaces[0].Before.Links[1] = l
	}
}

// counts has so many entries at the two ends of a window.
func counts(before, after uint32, window time.Duration) func(*observe.Sample) {
	return func(s *observe.Sample) {
		n := s.Namespaces[0]
		n.Before.Limits.Count, n.After.Limits.Count, n.Before.At = before, after, n.After.At.Add(-window)
	}
}

func fills(n int, state conntrack.TCPState) func(*observe.Sample) {
	return func(s *observe.Sample) { fill(s.Namespaces[0].Table, n, state) }
}

// entries adds n entries of one client each, changed by change.
func entries(n int, change func(i int, e *conntrack.Entry)) func(*observe.Sample) {
	return func(s *observe.Sample) {
		for i := range n {
			client := conntrack.AddrOf(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
			server := conntrack.AddrOf(netip.MustParseAddr("198.51.100.2"))
			e := conntrack.Entry{Protocol: 6, State: uint8(conntrack.TCPEstablished), Status: conntrack.Assured | conntrack.SeenReply, Timeout: 100,
				Original: conntrack.Tuple{Source: client, Dest: server, SourcePort: uint16(i), DestPort: uint16(i)},
				Reply:    conntrack.Tuple{Source: server, Dest: client, SourcePort: uint16(i), DestPort: uint16(i)}}
			change(i, &e)
			s.Namespaces[0].Table.Add(&e)
		}
	}
}

func unanswered(without, with int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		fill(s.Namespaces[0].Table, with, conntrack.TCPEstablished)
		entries(without, func(_ int, e *conntrack.Entry) { e.Status, e.State = 0, uint8(conntrack.TCPSynSent) })(s)
	}
}

func oneWay(n int) func(*observe.Sample) {
	return entries(n, func(_ int, e *conntrack.Entry) { e.Status = conntrack.Assured })
}

// translated adds an entry of a protocol with its destination translated to 10.9.0.2.
func translated(protocol flow.Protocol) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Table.Add(&conntrack.Entry{Protocol: protocol, Status: conntrack.Assured | conntrack.SeenReply,
			Original: conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("198.51.100.7")), Dest: conntrack.AddrOf(netip.MustParseAddr("203.0.113.1")), DestPort: 80},
			Reply:    conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("10.9.0.2")), SourcePort: 80, Dest: conntrack.AddrOf(netip.MustParseAddr("198.51.100.7"))}})
	}
}

// targets has the rules translate destinations to one address.
func targets(address string) func(*observe.Sample) {
	return func(s *observe.Sample) {
		r := s.Namespaces[0].Rules
		r.DestNAT, r.Targets = 1, firewall.Targets{Addresses: map[netip.Addr]bool{netip.MustParseAddr(address): true}}
	}
}

// untracked has so many rules keep packets of IPv4, of IPv6, and of either, from being tracked.
func untracked(four, six, either int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Rules.Untracked = firewall.Forwards{IPv4: four, IPv6: six, Either: either}
	}
}

// noEntries empties the connection table.
func noEntries(s *observe.Sample) {
	n := s.Namespaces[0]
	n.Table, n.Before.Limits.Count, n.After.Limits.Count = nil, 0, 0
}

// forwards has so many rules need forwarding of IPv4, of IPv6, and of either.
func forwards(four, six, either int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Rules.Forwards = firewall.Forwards{IPv4: four, IPv6: six, Either: either}
	}
}

func plain(n int) func(*observe.Sample) { return entries(n, func(int, *conntrack.Entry) {}) }

func fillOne(n int) func(*observe.Sample) {
	return entries(n, func(_ int, e *conntrack.Entry) { e.Original.DestPort = 443 })
}

// oneSource has one client hold a share of the limit, in percent.
func oneSource(percent int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].After.Limits.Max = 10000
		entries(percent*100, func(i int, e *conntrack.Entry) {
			e.Original.Source = conntrack.AddrOf(netip.MustParseAddr("10.2.0.1"))
		})(s)
	}
}

func usedPorts(n int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Rules.Pools = firewall.Pools{Smallest: 100, ByAddress: map[netip.Addr]uint32{netip.MustParseAddr("203.0.113.1"): 100}}
		entries(n, func(i int, e *conntrack.Entry) {
			e.Original.Source = conntrack.AddrOf(netip.MustParseAddr("10.0.0.1"))
			e.Reply = conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("198.51.100.9")), SourcePort: 443,
				Dest: conntrack.AddrOf(netip.MustParseAddr("203.0.113.1")), DestPort: uint16(i)}
		})(s)
	}
}

// listens has a service wait at a port that it asked for, as long as it is watched.
func listens(protocol flow.Protocol, port uint16) func(*observe.Sample) {
	return func(s *observe.Sample) {
		n := s.Namespaces[0]
		l := observe.Listener{LocalPort: trace.LocalPort{Protocol: protocol, Port: port}, User: 53, Socket: uint64(port)}
		n.Before.Listeners, n.After.Listeners = append(n.Before.Listeners, l), append(n.After.Listeners, l)
		if n.After.Asked == nil {
			n.After.Asked = map[trace.LocalPort]bool{}
		}
		n.After.Asked[l.LocalPort] = true
		n.Before.Asked = maps.Clone(n.After.Asked)
	}
}

func unasked(s *observe.Sample) {
	n := s.Namespaces[0]
	n.Before.Asked, n.After.Asked, n.After.AskedErr = nil, nil, errors.New("not permitted")
}

// router forwards in its namespace, while monitors look at the host's and at another.
func router(host bool, other uint64) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Delta["Ip.ForwDatagrams"] = 100
		if host {
			s.After.Monitors = append(s.After.Monitors, observe.Monitor{Name: "node_exporter", Netns: 1, Host: true})
		}
		if other != 0 {
			s.After.Monitors = append(s.After.Monitors, observe.Monitor{Name: "node_exporter", Netns: other})
		}
	}
}

func uncounted(s *observe.Sample) { s.Namespaces[0].NewErr = errors.New("no events") }

// mtus has a busy link of each kind.
func mtus(of map[string]int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].After.Links = nil
		for kind, mtu := range of {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: kind + "0", Kind: kind, Up: true, MTU: mtu, RxPackets: 1000})
		}
	}
}

// other drops packets for a reason that no cause is known for.
func other(reason string) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Drops = []trace.DropGroup{{Cause: trace.CauseOther, Packets: 300, PerSecond: 100, Places: []trace.DropPlace{{Function: "somewhere", Reason: reason, Packets: 300}}}}
	}
}

// dropped makes drop events of a cause in the window of three seconds.
func dropped(cause trace.Cause, n uint64) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Drops = append(s.Namespaces[0].Drops, trace.DropGroup{Cause: cause, Packets: n, PerSecond: float64(n) / 3})
	}
}

// connections adds n from one more local address to the same remote endpoint.
func connections(n int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		remotes := s.Namespaces[0].After.Remotes
		from := netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + len(remotes))})
		remotes[observe.Remote{From: from, To: netip.MustParseAddrPort("192.0.2.9:443")}] = n
	}
}

// listeners has programs that hear every event all the time, of so many new connections.
func listeners(n int, perSecond float64) func(*observe.Sample) {
	return func(s *observe.Sample) {
		ns := s.Namespaces[0]
		ns.Before.EventListeners, ns.After.EventListeners, ns.NewPerSecond = n, n, perSecond
	}
}

func busy(s *observe.Sample) { s.After.CPUs[0].Total += 300; s.After.CPUs[0].Softirq += 290 }

// cores makes a host of n CPUs. The first is the CPU of the original sample.
func cores(n int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Before.CPUs, s.After.CPUs = s.Before.CPUs[:1:1], s.After.CPUs[:1:1]
		for cpu := range n - 1 {
			s.Before.CPUs = append(s.Before.CPUs, trace.CPUTime{CPU: cpu + 1})
			s.After.CPUs = append(s.After.CPUs, trace.CPUTime{CPU: cpu + 1})
		}
	}
}

// xdp attaches a program to one interface. The other end of the link has the given XDP features.
func xdp(features uint64) func(*observe.Sample) {
	return func(s *observe.Sample) {
		links := s.Namespaces[0].After.Links
		links[1].XDP, links[1].XDPKnown, links[1].XDPFeatures = true, true, features
		links[2].XDPKnown, links[2].XDPFeatures = true, 7
	}
}

// pool has the rules use so many ports of the address of usedPorts.
func pool(n uint32) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Rules.Pools = firewall.Pools{Smallest: n, ByAddress: map[netip.Addr]uint32{netip.MustParseAddr("203.0.113.1"): n}}
	}
}

func unread(s *observe.Sample) {
	s.Namespaces[0].Table, s.Namespaces[0].TableErr = nil, errors.New("no")
}

// old changes what single entries show.
func old(change func(*observe.Entries)) func(*observe.Sample) {
	return func(s *observe.Sample) { change(s.Namespaces[0].Entries) }
}

// leaks are n untranslated connections of a network. matched: other connections of the network are translated.
func leaks(n uint32, matched bool) []observe.Leak {
	return []observe.Leak{{Odd: observe.Odd{Entries: n, First: fourEntry}, Network: netip.MustParsePrefix("10.0.0.0/24"), Out: "wan0", Matched: matched}}
}

// fourEntry is an entry of UDP over IPv4.
var fourEntry = conntrack.Entry{Protocol: flow.UDP, Original: conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("10.0.0.2")), Dest: conntrack.AddrOf(netip.MustParseAddr("203.0.113.1"))}}

func toHost(port uint16) func(*observe.Sample) {
	return old(func(e *observe.Entries) {
		e.ToHost = map[observe.TrackedPort]*observe.Odd{{Protocol: flow.UDP, Port: port}: {Entries: 1, First: fourEntry}}
	})
}

// half makes n TCP connections have packets in one direction only.
func half(n uint32) func(*observe.Sample) {
	return old(func(e *observe.Entries) { e.Unanswered, e.TCP = n, n+1 })
}

// cutOff is a segment of a connection that the host does not know and resets.
func cutOff(s *observe.Sample) {
	data := make([]byte, 40)
	data[0], data[9], data[33] = 0x45, byte(flow.TCP), tcpACK
	packet := &trace.DropSample{Data: data}
	packet.Tracked = trace.TrackedNone
	s.Namespaces[0].Drops = append(s.Namespaces[0].Drops, trace.DropGroup{Cause: trace.CauseClosedTCP, Packets: 1, PerSecond: 0.3, Samples: []*trace.DropSample{packet}, Sampled: []*trace.DropSample{packet}})
}

// sampled makes a rule drop one packet among thousands. The packet's transport header has the first bytes begins.
func sampled(protocol string, tracked trace.Tracked, begins []byte) func(*observe.Sample) {
	return func(s *observe.Sample) {
		data := make([]byte, 48)
		packet := &trace.DropSample{Data: data, Packet: flow.Tuple{Source: netip.MustParseAddrPort("10.0.0.2:40000"), Dest: netip.MustParseAddrPort("203.0.113.2:50000")}}
		packet.Tracked = tracked
		switch protocol {
		case "icmpv6":
			data[0], data[6], packet.Packet.Protocol = 0x60, byte(flow.ICMPv6), flow.ICMPv6
			copy(data[40:], begins)
		case "icmp":
			data[0], data[9], packet.Packet.Protocol = 0x45, byte(flow.ICMP), flow.ICMP
			copy(data[20:], begins)
		case "tcp":
			data[0], data[9], packet.Packet.Protocol = 0x45, byte(flow.TCP), flow.TCP
		}
		s.Namespaces[0].Delta["Ip.InReceives"] = 100_000
		s.Namespaces[0].Drops = append(s.Namespaces[0].Drops, trace.DropGroup{Cause: trace.CauseNftRule, Packets: 1, PerSecond: 0.3, Sampled: []*trace.DropSample{packet}})
	}
}

// handshakes are answered to an address of wan0, by an interface; others were finished.
func handshakes(stuck, others uint32, out string) func(*observe.Sample) {
	return func(s *observe.Sample) {
		n := s.Namespaces[0]
		n.After.Links[1].Addresses = []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24")}
		n.Entries.Handshakes = map[netip.Addr]*observe.Handshakes{netip.MustParseAddr("203.0.113.1"): {
			Stuck: observe.Odd{Entries: stuck, First: fourEntry}, Others: others, Out: out, Gateway: netip.MustParseAddr("203.0.113.2")}}
	}
}

// closed has 300 packets go to two ports where nothing listens.
func closed(ports ...string) func(*observe.Sample) {
	return func(s *observe.Sample) {
		g := trace.DropGroup{Cause: trace.CauseClosedPort, Packets: 300, PerSecond: 100}
		for _, port := range append(ports, ports...) {
			packet := &trace.DropSample{Packet: flow.Tuple{Protocol: flow.UDP, Source: netip.MustParseAddrPort("10.0.0.2:4000"), Dest: netip.MustParseAddrPort(port)}}
			packet.Tracked = trace.TrackedNew
			g.Sampled = append(g.Sampled, packet)
		}
		s.Namespaces[0].Drops = append(s.Namespaces[0].Drops, g)
	}
}

// opened makes a rule of the input hook accept a port.
func opened(port uint16) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Rules.Opened = []firewall.PortRange{{Low: port, High: port}}
	}
}

// silent makes a rule translate to an address without an answer to ARP. The table has connections without and with a
// reply.
func silent(without, with int) func(*observe.Sample) {
	return func(s *observe.Sample) {
		n := s.Namespaces[0]
		n.Silent = []hold.Silent{{Address: netip.MustParseAddr("198.51.100.50"), Interface: "lan0"}}
		for i := range without + with {
			e := conntrack.Entry{Protocol: 17, Original: conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("192.0.2.2")), Dest: conntrack.AddrOf(netip.MustParseAddr("198.51.100.2")), SourcePort: uint16(i), DestPort: 53},
				Reply: conntrack.Tuple{Source: conntrack.AddrOf(netip.MustParseAddr("198.51.100.2")), Dest: conntrack.AddrOf(netip.MustParseAddr("198.51.100.50")), SourcePort: 53, DestPort: uint16(i)}}
			if i >= without {
				e.Status = conntrack.SeenReply | conntrack.Assured
			}
			n.Table.Add(&e)
		}
	}
}

// set sets the increase of a counter in the window.
func set(name string, n uint64) func(*observe.Sample) {
	return func(s *observe.Sample) { s.Namespaces[0].Delta[name] = n }
}

func sysctl(name, value string) func(*observe.Sample) {
	return func(s *observe.Sample) { s.Namespaces[0].After.Sysctl[name] = value; s.After.Sysctl[name] = value }
}

func rules(change func(*firewall.Ruleset)) func(*observe.Sample) {
	return func(s *observe.Sample) { change(s.Namespaces[0].Rules) }
}

func link(change func(*observe.Link)) func(*observe.Sample) {
	return func(s *observe.Sample) { change(&s.Namespaces[0].After.Links[1]) }
}

// count has so many entries at both ends of the window.
func count(n uint32) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].After.Limits.Count = n
		s.Namespaces[0].Before.Limits.Count = n
	}
}

func all(changes ...func(*observe.Sample)) func(*observe.Sample) {
	return func(s *observe.Sample) {
		for _, change := range changes {
			change(s)
		}
	}
}

// lostBy has 30 packets to several destinations of the Internet dropped on their way to a router.
func lostBy(cause trace.Cause, link string, gateways ...observe.Gateway) func(*observe.Sample) {
	return func(s *observe.Sample) {
		n := s.Namespaces[0]
		n.After.Routing.Gateways, n.Ways = gateways, map[*trace.DropSample]observe.Way{}
		g := trace.DropGroup{Cause: cause, Packets: 30, PerSecond: 10}
		for i := range 6 {
			packet := &trace.DropSample{Interface: link, Packet: flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort("203.0.113.1:4000"), Dest: netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i / 2)}), 443)}}
			g.Sampled = append(g.Sampled, packet)
			n.Ways[packet] = observe.Way{Interface: link, NextHop: gateways[0].Address}
		}
		g.Samples = g.Sampled[:1]
		n.Drops = append(n.Drops, g)
	}
}

// looping has the TTL of many packets expire that go back by the interface of their arrival.
func looping(s *observe.Sample) {
	n := s.Namespaces[0]
	n.After.Links[1].Index, n.After.Links[1].Addresses = 2, []netip.Prefix{netip.MustParsePrefix("2001:db8::1/64")}
	n.After.Links[2].Addresses = []netip.Prefix{netip.MustParsePrefix("2001:db8:1:1::1/64")}
	n.Ways = map[*trace.DropSample]observe.Way{}
	g := trace.DropGroup{Cause: trace.CauseTTL, Packets: 90, PerSecond: 30}
	for _, to := range []string{"[2001:db8:1:7000::1]:53", "[2001:db8:1:f000::1]:53"} {
		packet := &trace.DropSample{InIfIndex: 2, Packet: flow.Tuple{Protocol: flow.UDP, Source: netip.MustParseAddrPort("[2001:db8:7::1]:4000"), Dest: netip.MustParseAddrPort(to)}}
		g.Sampled = append(g.Sampled, packet)
		n.Ways[packet] = observe.Way{Interface: "wan0", NextHop: netip.MustParseAddr("2001:db8::2")}
	}
	n.Drops = append(n.Drops, g)
}

// ruleDrops has a rule drop packets, each from a source to a destination.
func ruleDrops(protocol flow.Protocol, pairs ...string) func(*observe.Sample) {
	return func(s *observe.Sample) {
		g := trace.DropGroup{Cause: trace.CauseNftRule, Packets: 90, PerSecond: 30, Rules: []firewall.Rule{{Chain: "inet filter input", Text: "policy drop"}}}
		for i := 0; i < len(pairs); i += 2 {
			g.Sampled = append(g.Sampled, &trace.DropSample{Interface: "lan0", Packet: flow.Tuple{Protocol: protocol, Source: netip.MustParseAddrPort(pairs[i]), Dest: netip.MustParseAddrPort(pairs[i+1])}})
		}
		s.Namespaces[0].Delta["Ip.InReceives"] = 300
		s.Namespaces[0].Drops = append(s.Namespaces[0].Drops, g)
	}
}

// repeated is the same element n times.
func repeated(n int, pair ...string) (list []string) {
	for range n {
		list = append(list, pair...)
	}
	return list
}

// scan has one source try so many ports.
func scan(n int) (list []string) {
	for i := range n {
		list = append(list, "198.51.100.9:4000", fmt.Sprintf("203.0.113.1:%d", 1000+i))
	}
	return list
}

// lossy has sockets lose datagrams.
func lossy(drops uint64) func(*observe.Sample) {
	return func(s *observe.Sample) {
		s.Namespaces[0].Lossy = []observe.LossySocket{{Protocol: flow.UDP, Local: netip.MustParseAddrPort("0.0.0.0:1900"), Drops: drops, Program: observe.Program{Name: "minissdpd", PID: 77}}}
	}
}

// detached routes an address of lan0's network by a tunnel, with so many connections to it.
func detached(unanswered, answered uint32, proxied bool) func(*observe.Sample) {
	return func(s *observe.Sample) {
		d := observe.Detached{Prefix: netip.MustParsePrefix("10.0.0.200/32"), By: "tun0", Within: "lan0", Network: netip.MustParsePrefix("10.0.0.0/24"), Proxied: proxied}
		s.Namespaces[0].After.Routing.Detached = []observe.Detached{d}
		s.Namespaces[0].Entries.Detached = map[observe.Detached]*observe.Exchanges{d: {Unanswered: observe.Odd{Entries: unanswered, First: fourEntry}, Answered: answered}}
	}
}
