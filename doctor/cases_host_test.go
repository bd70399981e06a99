// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// hostCases are the cases of checks on interfaces, sockets and the kernel.
var hostCases = []checkCase{
	{"RX11", "a port that listens", link(func(l *observe.Link) { l.STP = observe.STPListening }), Warn},
	{"RX11", "a port that forwards", link(func(l *observe.Link) { l.STP = observe.STPForwarding }), OK},
	{"RX12", "unequal MTUs", link(func(l *observe.Link) { l.PeerMTU = 1400 }), Info},
	{"RX12", "unequal MTUs, and frames that are lost", all(link(func(l *observe.Link) { l.PeerMTU = 1400 }), dropped(trace.CauseFarEnd, 9)), Warn},
	{"RX01", "one packet on an idle host", func(s *observe.Sample) { s.After.Softnet[1].Dropped = 1 }, Warn},
	{"RX01", "backlog", func(s *observe.Sample) { s.After.Softnet[1].Dropped = 100 }, Critical},
	{"RX02", "squeezed", func(s *observe.Sample) { s.After.Softnet[1].Squeezed = 100 }, Warn},
	{"RX03", "one queue and a full CPU", all(busy, link(func(l *observe.Link) { l.Queues = 1 }), cores(4)), Warn},
	{"RX03", "one queue, steered", all(busy, link(func(l *observe.Link) { l.Queues = 1 }), cores(4), func(s *observe.Sample) { s.After.Softnet[0].RPS = 1000 }), OK},
	{"RX04", "all on one CPU", all(busy, cores(4), func(s *observe.Sample) {
		s.Before.Interrupts = map[string][]uint64{"wan0 30:": {0, 0, 0, 0}}
		s.After.Interrupts = map[string][]uint64{"wan0 30:": {9900, 100, 0, 0}}
	}), Warn},
	{"RX05", "by the driver's counters", link(func(l *observe.Link) { l.RingLost = 1000 }), Critical},
	{"RX05", "ring", link(func(l *observe.Link) { l.RxMissed = 10 }), Warn},
	{"RX06", "errors", link(func(l *observe.Link) { l.RxErrors, l.RxPackets = 100, 2000 }), Warn},
	{"RX07", "qdisc", link(func(l *observe.Link) { l.QdiscDrops, l.QdiscPackets = 100, 1000 }), Warn},
	{"RX05", "counters that began anew", before(observe.Link{RxMissed: 50, RxFifo: 50}), OK},
	{"RX06", "counters that began anew", before(observe.Link{RxErrors: 50, TxErrors: 50, RxDropped: 50, RxPackets: 5000, TxPackets: 5000}), OK},
	{"RX06", "an interface made anew", all(before(observe.Link{Index: 7}), link(func(l *observe.Link) { l.Index, l.RxErrors, l.RxPackets = 8, 100, 2000 })), OK},
	{"RX07", "counters that began anew", all(before(observe.Link{QdiscPackets: 5000}), link(func(l *observe.Link) { l.QdiscDrops, l.QdiscPackets = 100, 1000 })), Warn},
	{"RX01", "a counter that wrapped", func(s *observe.Sample) { s.Before.Softnet[1].Dropped, s.After.Softnet[1].Dropped = 0xffffffff, 0 }, Warn},
	{"RX01", "a CPU that went away", func(s *observe.Sample) {
		s.Before.Softnet[0].Dropped, s.After.Softnet = 0, []trace.SoftnetCPU{{Dropped: 100}}
	}, OK},
	{"RX02", "a CPU that went away", func(s *observe.Sample) { s.After.Softnet = []trace.SoftnetCPU{{Squeezed: 100}} }, OK},
	{"RX08", "no xdp", func(*observe.Sample) {}, OK},
	{"RX08", "xdp", link(func(l *observe.Link) { l.XDP = true }), Info},
	{"RX08", "xdp, and all can send", all(xdp(3), link(func(l *observe.Link) { l.XDPFeatures = 7 })), Info},
	{"RX08", "xdp, and one cannot send, to which nothing may be redirected", xdp(3), Info},
	{"RX08", "xdp, and one cannot send what is redirected", all(xdp(3), dropped(trace.CauseXDPRedirect, 300)), Warn},
	{"RX08", "xdp, and one frame was lost", all(xdp(3), dropped(trace.CauseXDPRedirect, 1)), Info},
	{"RX09", "slow calls and a full CPU", all(busy, func(s *observe.Sample) {
		s.After.Mitigations = map[string]string{"spectre_v2": "Mitigation: Retpolines"}
	}), Info},
	{"RX09", "unreadable", func(s *observe.Sample) { s.After.Mitigations = nil }, Unknown},
	{"RX10", "full CPU", busy, Critical},
	{"RX10", "a moment of a full CPU", all(busy, func(s *observe.Sample) { s.Window = 100 * time.Millisecond }), Warn},
	{"RX10", "busy CPU", func(s *observe.Sample) { s.After.CPUs[0].Total += 300; s.After.CPUs[0].Softirq += 200 }, Warn},
	{"LS01", "overflow", set("TcpExt.ListenOverflows", 60), Critical},
	{"LS01", "a few", set("TcpExt.ListenOverflows", 6), Warn},
	{"LS01", "one", set("TcpExt.ListenOverflows", 1), OK},
	{"LS02", "cookies", set("TcpExt.TCPReqQFullDoCookies", 60), Warn},
	{"LS03", "files", func(s *observe.Sample) { s.After.Sysctl["fs.file-nr"] = "95000 0 100000" }, Critical},
	{"LS03", "some files", func(s *observe.Sample) { s.After.Sysctl["fs.file-nr"] = "75000 0 100000" }, Warn},
	{"LS03", "a process at its limit", func(s *observe.Sample) {
		s.After.Files = observe.ProcessFiles{Name: "nginx", PID: 7, Open: 1000, Limit: 1024, Hard: 4096}
	}, Warn},
	{"LS03", "unreadable", func(s *observe.Sample) { delete(s.After.Sysctl, "fs.file-nr") }, Unknown},
	{"LS04", "near the end", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.mem"] = 1 << 40 }, Critical},
	{"LS04", "orphans", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.orphan"] = 1 << 30 }, Critical},
	{"LS04", "unreadable", func(s *observe.Sample) { delete(s.After.Sysctl, "net.ipv4.tcp_mem") }, Unknown},
	{"LS04", "pressure", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.mem"] = 140000 }, Warn},
	{"LS05", "buffer", set("Udp.RcvbufErrors", 100), Warn},
	{"LS05", "one socket", lossy(30), Warn},
	{"LS05", "one datagram", lossy(1), Info},
	{"LS01", "half-open connections that ICMP errors ended", set("TcpExt.ListenDrops", 60), OK},
	{"RX13", "a program that does not read", link(func(l *observe.Link) { l.Kind, l.TxDropped = "tuntap", 60 }), Warn},
	{"RX14", "a cable that is out", all(lostBy(trace.CauseNeighbour, "wan0", observe.Gateway{Address: netip.MustParseAddr("203.0.113.2"), Interface: "wan0", Route: netip.MustParsePrefix("0.0.0.0/0")}),
		link(func(l *observe.Link) { l.Index, l.Carrier = 2, false })), Critical},
	{"RX14", "a cable that is out, and nobody uses it", link(func(l *observe.Link) { l.Carrier = false }), OK},
	{"RX15", "a duplicate", link(func(l *observe.Link) { l.Duplicates = []netip.Addr{netip.MustParseAddr("2001:db8::1")} }), Critical},
	{"RX15", "tentative at the end", link(func(l *observe.Link) { l.Tentative = []netip.Addr{netip.MustParseAddr("2001:db8::1")} }), OK},
	{"RX15", "another host has the address", watched(&outcome.Report{Conflicts: []outcome.Conflict{{Address: wanAddress, Interface: "wan0", MACs: [][6]byte{{2, 0, 0, 0, 0, 9}}, Own: true}}}), Critical},
	{"RX15", "a neighbour with two cards", watched(&outcome.Report{Conflicts: []outcome.Conflict{{Address: wanAddress.Next(), Interface: "wan0", MACs: [][6]byte{{2}, {4}}}}}), Info},
	{"FW21", "an address that is not answered for", all(link(func(l *observe.Link) {
		l.Addresses = append(l.Addresses, netip.PrefixFrom(wanAddress, 24))
	}), watched(&outcome.Report{Mute: []outcome.Mute{{Address: wanAddress, Interface: "wan0", By: wanAddress.Next(), Questions: 3}}})), Warn},
	{"FW21", "asked by a host of another network", watched(&outcome.Report{Mute: []outcome.Mute{{Address: wanAddress, Interface: "wan0", By: netip.MustParseAddr("192.168.9.9"), Questions: 3}}}), Info},
	{"FW22", "entries by hand, and nothing fails", all(func(s *observe.Sample) {
		s.Namespaces[0].After.ByHand = []observe.Neighbour{{Address: wanAddress.Next(), Interface: "wan0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}}
	}, watched(&outcome.Report{})), OK},
	{"FW22", "a dead next hop by hand", byHand, Warn},
	{"KV01", "kernel 6.1", func(s *observe.Sample) { s.After.Release = "6.1.0-28-amd64" }, Info},
	{"KV01", "no BTF", func(s *observe.Sample) { s.After.BTF = false }, Info},
}

// wanAddress is an address of the uplink.
var wanAddress = netip.MustParseAddr("203.0.113.1")

func watched(r *outcome.Report) func(s *observe.Sample) {
	return func(s *observe.Sample) { s.Namespaces[0].Traffic = r }
}

// byHand has requests leave to a hardware address that was entered by hand.
func byHand(s *observe.Sample) {
	s.Namespaces[0].After.ByHand = []observe.Neighbour{{Address: wanAddress.Next(), Interface: "wan0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}}
	c := outcome.NewCollector(outcome.Host{}, outcome.NewBudget())
	for i := range uint16(5) {
		p := trace.Packet{Time: time.Millisecond, Point: trace.Received, Interface: "lan0", TCPFlags: trace.TCPSyn,
			Tuple: flow.Tuple{Protocol: flow.TCP, Source: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), 4000+i), Dest: netip.MustParseAddrPort("198.51.100.8:443")}}
		c.Add(&p)
		p.Point, p.Interface, p.InIfIndex, p.HasMACs, p.DestMAC = trace.Transmitted, "wan0", 2, true, [6]byte{2, 0, 0, 0, 0, 9}
		p.Tuple.Source = netip.AddrPortFrom(wanAddress, 4000+i)
		p.Original, p.Reply = flow.Tuple{Protocol: flow.TCP, Source: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), 4000+i), Dest: p.Tuple.Dest}, p.Tuple.Reverse()
		c.Add(&p)
	}
	s.Namespaces[0].Traffic = c.Report(5*time.Second, trace.PacketLoss{}, nil)
}
