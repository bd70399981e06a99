// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// Entries are findings from single entries of a connection table, for checks that need more than its sums.
type Entries struct {
	// Privileged are translated flows whose client port is below 1024.
	Privileged uint32
	// Hairpin are connections without an answer to a server in the client's own network. The server sees the client's
	// address.
	Hairpin Odd
	// Leaks are connections from private to public addresses that are not translated and saw no answer.
	Leaks []Leak
	// Bypassed are connections that match an IPsec policy before the translation of their source, but not after it.
	// BypassedPolicy is the policy of the first.
	Bypassed       Odd
	BypassedPolicy netdev.IPsecPolicy
	// Detached are connections between hosts of a link and an address of its network that is routed by
	// another interface, by the route.
	Detached map[Detached]*Exchanges
	// Unanswered counts TCP connections with packets of one side only. TCP counts all TCP
	// connections.
	Unanswered, TCP uint32
	// OldSources are connections with a translated source that is not an address of this host, by that address.
	OldSources map[netip.Addr]*Odd
	// ToHost are connections other than TCP to the host's own addresses that are not
	// translated and saw no answer, by port.
	ToHost map[TrackedPort]*Odd
	// Handshakes are TCP connections to this host, by its address.
	Handshakes map[netip.Addr]*Handshakes
	// Reached are the targets of port forwards with open or recent connections.
	Reached map[netip.AddrPort]bool
	// FTP are control connections without a helper.
	FTP []Pair

	leaks      map[netip.Prefix]*Leak // by the sources' networks
	translated map[netip.Prefix]bool  // Networks with translated sources.
}

// Leak is a group of untranslated connections from one network.
type Leak struct {
	Odd
	Network  netip.Prefix // network of the sources
	Answered uint32       // of its untranslated connections
	Before   bool         // Connections of the network are, or were, translated.
	Out      string       // Egress interface of the first connection.
	Matched  bool         // A rule would translate the first today.
}

// Exchanges counts connections with and without an answer.
type Exchanges struct {
	Unanswered Odd
	Answered   uint32
}

// networkOf returns the network of 256 IPv4 addresses, or of 64 bits for IPv6, that holds an
// address. A rule that translates one address often translates its whole network.
func networkOf(a netip.Addr) netip.Prefix {
	bits := 64
	if a.Is4() {
		bits = 24
	}
	p, _ := a.Prefix(bits)
	return p
}

// fewLeaks is the number of unanswered connections of a network that shows a missing translation. Fewer may have other
// causes.
const fewLeaks = 3

// finish selects the leaks of networks with other, translated connections, and of networks without any answer.
func (s *Entries) finish() {
	for network, l := range s.leaks {
		l.Network, l.Before = network, s.translated[network]
		if l.Entries > 0 && l.Before || l.Entries >= fewLeaks && l.Answered == 0 || l.Entries > 0 && l.Answered == 0 && len(s.translated) == 0 {
			s.Leaks = append(s.Leaks, *l)
		}
	}
	slices.SortFunc(s.Leaks, func(a, b Leak) int { return int(b.Entries) - int(a.Entries) })
}

// Odd is a group of suspicious entries, with one example.
type Odd struct {
	Entries uint32
	First   conntrack.Entry
}

func (o *Odd) add(e *conntrack.Entry) {
	if o.Entries++; o.Entries == 1 {
		o.First = *e
	}
}

// TrackedPort is a port of a protocol.
type TrackedPort struct {
	Protocol flow.Protocol
	Port     uint16
}

// Handshakes are the TCP connections to one address of the host.
type Handshakes struct {
	Stuck  Odd // the SYN-ACK was sent and never acknowledged
	Others uint32
	// Out is the egress interface of answers to the first client. Gateway is a router on the link
	// of the address. Both are looked up if many handshakes are stuck.
	Out     string
	Gateway netip.Addr
}

// manyStuck is the number of stuck handshakes from which the route of their answers is looked up. Scans and clients that
// gave up leave a few.
const manyStuck = 5

// routes looks up the egress interfaces of untranslated connections, and of the answers to stuck handshakes.
func (s *Entries) routes(links []Link) {
	for i := range s.Leaks {
		s.Leaks[i].Out = wayTo(s.Leaks[i].First.Original.Dest.Netip(), s.Leaks[i].First.Mark)
	}
	for own, h := range s.Handshakes {
		if h.Stuck.Entries < manyStuck {
			continue
		}
		h.Out = wayTo(h.Stuck.First.Original.Source.Netip(), h.Stuck.First.Mark)
		for _, l := range links {
			if slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Addr() == own }) {
				h.Gateway = gatewayOn(&l)
			}
		}
	}
}

// Pair is a client and its server.
type Pair struct{ Client, Server netip.Addr }

// Bounds on the data from a table, because a flood may have filled it.
const (
	oddKeys  = 256
	ftpPairs = 64
	ftpPort  = 21
)

// placing locates the addresses of an entry.
type placing struct {
	own   map[netip.Addr]bool
	links []netip.Prefix // networks of the host's links

	policies []netdev.IPsecPolicy
	detached []Detached
	// lingers is how many seconds the entry of a closed connection stays, by its state.
	lingers map[conntrack.TCPState]uint32
}

// MostReached bounds the number of recorded targets of port forwards. Other targets may have been
// reached too.
const MostReached = 16_384

// recentSeconds: a connection that ended at most so long ago still counts as a current one.
const recentSeconds = 5

// over reports whether a connection ended some time ago and only its entry remains.
func (p *placing) over(e *conntrack.Entry) bool {
	if !e.Closing() {
		return false
	}
	whole := p.lingers[conntrack.TCPState(e.State)]
	return e.Protocol != flow.TCP || whole == 0 || e.Timeout+recentSeconds < whole
}

// lingering reads how long entries of closed connections stay in the calling thread's namespace.
func (p *placing) lingering(root fs.FS) {
	p.lingers = map[conntrack.TCPState]uint32{}
	for state, name := range map[conntrack.TCPState]string{conntrack.TCPFinWait: "fin_wait", conntrack.TCPCloseWait: "close_wait",
		conntrack.TCPLastAck: "last_ack", conntrack.TCPTimeWait: "time_wait", conntrack.TCPClose: "close"} {
		n, _ := strconv.ParseUint(strings.TrimSpace(text(root, "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_"+name)), 10, 32)
		p.lingers[state] = uint32(n)
	}
}

func placingOf(r *NamespaceReading) *placing {
	p := &placing{own: map[netip.Addr]bool{}, policies: r.Routing.Policies, detached: r.Routing.Detached}
	for _, l := range r.Links {
		for _, a := range l.Addresses {
			p.own[a.Addr()] = true
			if !l.Loopback && !a.IsSingleIP() {
				p.links = append(p.links, a.Masked())
			}
		}
	}
	return p
}

// sameNetwork reports whether one directly connected network holds both addresses.
func (p *placing) sameNetwork(a, b netip.Addr) bool {
	for _, n := range p.links {
		if n.Contains(a) && n.Contains(b) {
			return true
		}
	}
	return false
}

// public reports whether an address may belong to the Internet.
func public(a netip.Addr) bool { return a.IsGlobalUnicast() && !a.IsPrivate() }

// add looks at one entry.
func (s *Entries) add(e *conntrack.Entry, p *placing) {
	if e.Original.SourcePort < 1024 && e.Protocol.HasPorts() && e.SourceTranslated() {
		s.Privileged++
	}
	source, dest := e.Original.Source.Netip(), e.Original.Dest.Netip()
	server, outside := e.Reply.Source.Netip(), e.Reply.Dest.Netip()
	answered := e.Status&conntrack.SeenReply != 0
	if e.Protocol == flow.TCP {
		s.addTCP(e, p, answered)
	}
	if e.SourceTranslated() {
		s.translates(networkOf(source))
	}
	if e.DestTranslated() && !p.over(e) && len(s.Reached) < MostReached {
		if s.Reached == nil {
			s.Reached = map[netip.AddrPort]bool{}
		}
		s.Reached[netip.AddrPortFrom(server, e.Reply.SourcePort)] = true
	}
	if e.SourceTranslated() && source != outside {
		s.bypassed(e, p)
	}
	s.addDetached(e, p, answered)
	switch {
	case e.Status&conntrack.Expected != 0 || e.Zone != 0: // a helper's, or Open vSwitch's: by no rule
	case e.SourceTranslated() && source != outside && !p.own[outside]:
		s.oldSource(outside, e)
	case e.DestTranslated() && source == outside && !p.own[server] && p.sameNetwork(source, server):
		if !answered || e.Protocol == flow.TCP && conntrack.TCPState(e.State) == conntrack.TCPSynSent {
			s.Hairpin.add(e)
		}
	case e.SourceTranslated() || e.DestTranslated() || !e.Protocol.HasPorts():
	case p.own[dest]:
		if !answered && e.Protocol != flow.TCP {
			s.toHost(TrackedPort{e.Protocol, e.Original.DestPort}, e)
		}
	case source.IsPrivate() && !p.own[source] && public(dest):
		s.leak(networkOf(source), e, answered)
	}
}

// bypassed adds a connection that left outside of a tunnel because its source was translated.
func (s *Entries) bypassed(e *conntrack.Entry, p *placing) {
	source, server, outside := e.Original.Source.Netip(), e.Reply.Source.Netip(), e.Reply.Dest.Netip()
	for _, policy := range p.policies {
		if !policy.Blocks && policy.Source.Contains(source) && policy.Dest.Contains(server) && !policy.Source.Contains(outside) &&
			(policy.Protocol == flow.Any || policy.Protocol == e.Protocol) {
			if s.Bypassed.Entries == 0 {
				s.BypassedPolicy = policy
			}
			s.Bypassed.add(e)
			return
		}
	}
}

// addDetached adds a connection between a link and an address of its network that is routed elsewhere.
func (s *Entries) addDetached(e *conntrack.Entry, p *placing, answered bool) {
	source, server := e.Original.Source.Netip(), e.Reply.Source.Netip()
	for _, d := range p.detached {
		if !(d.Prefix.Contains(source) && d.Network.Contains(server)) && !(d.Prefix.Contains(server) && d.Network.Contains(source)) || p.own[source] || p.own[server] {
			continue
		}
		if s.Detached == nil {
			s.Detached = map[Detached]*Exchanges{}
		}
		if s.Detached[d] == nil {
			s.Detached[d] = &Exchanges{}
		}
		if answered {
			s.Detached[d].Answered++
		} else {
			s.Detached[d].Unanswered.add(e)
		}
		return
	}
}

func (s *Entries) translates(network netip.Prefix) {
	if s.translated == nil {
		s.translated = map[netip.Prefix]bool{}
	}
	if len(s.translated) < oddKeys {
		s.translated[network] = true
	}
}

func (s *Entries) leak(network netip.Prefix, e *conntrack.Entry, answered bool) {
	if s.leaks == nil {
		s.leaks = map[netip.Prefix]*Leak{}
	}
	if s.leaks[network] == nil {
		if len(s.leaks) == oddKeys {
			return
		}
		s.leaks[network] = &Leak{}
	}
	if answered {
		s.leaks[network].Answered++
	} else {
		s.leaks[network].add(e)
	}
}

func (s *Entries) addTCP(e *conntrack.Entry, p *placing, answered bool) {
	s.TCP++
	if !answered {
		s.Unanswered++
	}
	if e.Original.DestPort == ftpPort && !e.Helped && conntrack.TCPState(e.State) == conntrack.TCPEstablished && len(s.FTP) < ftpPairs {
		s.FTP = append(s.FTP, Pair{e.Original.Source.Netip(), e.Reply.Source.Netip()})
	}
	dest := e.Original.Dest.Netip()
	if !p.own[dest] {
		return
	}
	if s.Handshakes == nil {
		s.Handshakes = map[netip.Addr]*Handshakes{}
	}
	h := s.Handshakes[dest]
	if h == nil {
		h = &Handshakes{}
		s.Handshakes[dest] = h
	}
	if conntrack.TCPState(e.State) == conntrack.TCPSynRecv {
		h.Stuck.add(e)
	} else if answered {
		h.Others++
	}
}

func (s *Entries) oldSource(a netip.Addr, e *conntrack.Entry) {
	if s.OldSources == nil {
		s.OldSources = map[netip.Addr]*Odd{}
	}
	if s.OldSources[a] == nil {
		if len(s.OldSources) == oddKeys {
			return
		}
		s.OldSources[a] = &Odd{}
	}
	s.OldSources[a].add(e)
}

func (s *Entries) toHost(port TrackedPort, e *conntrack.Entry) {
	if s.ToHost == nil {
		s.ToHost = map[TrackedPort]*Odd{}
	}
	if s.ToHost[port] == nil {
		if len(s.ToHost) == oddKeys {
			return
		}
		s.ToHost[port] = &Odd{}
	}
	s.ToHost[port].add(e)
}
