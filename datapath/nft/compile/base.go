// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Names of the shared maps. The table dispatches lists the lookups.
const (
	mapServices  = "services"          // Destination of a new connection -> service or port forward.
	mapFullNAT   = "fullnat"           // Original destination -> chain that translates the source.
	mapTurned    = "turned"            // Original destination of services that clients on the network of a backend may use.
	mapHairpin   = "hairpin"           // Original destination of port forwards that inside hosts may use.
	mapGuards    = "guards"            // Destination -> checks of every packet (strict-tcp, reset-rate).
	mapStateless = "stateless"         // Destination -> stateless service.
	mapReplies   = "stateless-replies" // Source of a reply -> stateless service.
	// ICMP errors about packets of a stateless service, by the quoted packet:
	mapServerErrors = "stateless-server-errors" // Quoted destination, of a packet to a server.
	mapClientErrors = "stateless-client-errors" // Quoted source, of a reply.
	mapClamp        = "mss-clamp"               // Original destination of connections with a clamped MSS.
	mapTargets      = "targets"                 // Slot -> address and port of a backend.
	mapHosts        = "hosts"                   // Slot -> address of a backend; the port is kept.
	setMarks        = "marks"                   // Marks to put on every packet of a connection.
	setSameLink     = "same-interface"          // Pairs of an interface with itself.
	setSameNet      = "same-network"            // Pairs of a network of backends with itself.
)

// Suffixes of the variants of a dispatch map: port ranges and whole addresses, and listeners of one
// interface.
const (
	ranges     = "-ranges"
	interfaces = "-interfaces"
)

// base collects the shared parts of all fragments.
type base struct {
	used  map[rs.ID]bool
	marks map[uint32]bool
	// rules that NAT and firewall rules add to base chains
	chains map[rs.ID][]rs.Rule
	// match parts of rules for the inside hosts of NAT rules
	inside  map[rs.Family][]func() []*rs.Builder
	objects []*rs.Object
	lists   map[string][]netip.Prefix
	needs   map[rs.ID]setRef // firewall sets in use
	reply   map[netip.Addr][]replyKey
	extra   []rs.Element
	members map[rs.Element]bool // elements of shared sets that are already in extra
	sets    []*rs.Set
}

// setRef is the part of a firewall set that one table uses: the prefixes of one family.
type setRef struct {
	list   string
	family rs.Family
}

// replyKey is the source endpoint of the replies to a stateless service.
type replyKey struct {
	addr     netip.Addr
	protocol flow.Protocol
	ports    flow.Ports
	owner    string
}

func newBase() *base {
	return &base{
		used: make(map[rs.ID]bool), marks: make(map[uint32]bool), chains: make(map[rs.ID][]rs.Rule),
		inside: make(map[rs.Family][]func() []*rs.Builder), needs: make(map[rs.ID]setRef), reply: make(map[netip.Addr][]replyKey),
		members: make(map[rs.Element]bool),
	}
}

// add merges the shared needs of a compiled service or NAT rule.
func (b *base) add(s *Service) error {
	for _, id := range s.uses {
		b.used[id] = true
		if list, f, ok := listOf(id); ok {
			b.needs[id] = setRef{list, f}
		}
	}
	for _, m := range s.marks {
		b.marks[m] = true
	}
	for _, e := range s.members {
		if !b.members[e] {
			b.members[e] = true
			b.extra = append(b.extra, e)
		}
	}
	for _, k := range s.reply {
		for _, o := range b.reply[k.addr] {
			same := k.protocol == o.protocol || k.protocol == flow.Any || o.protocol == flow.Any
			if same && k.ports.Overlaps(o.ports) {
				return fmt.Errorf("%s: answers of %s port %s already belong to %s: "+
					"a stateless backend endpoint can serve one listener only; give it another port or use mode dnat",
					k.owner, k.addr, k.ports, o.owner)
			}
		}
		b.reply[k.addr] = append(b.reply[k.addr], k)
	}
	return nil
}

// dispatch is a lookup of a packet in a shared map.
type dispatch struct {
	name  string
	chain string // base chain with the lookup
	// by returns the fields of the key for a family, without the interface.
	by func(rs.Family) []rs.Selector
	// set is true for a set. The rule with the lookup then has the action itself.
	set bool
	// errors is true for ICMP errors. The fields are then read from the quoted packet.
	errors bool
}

func byDest(f rs.Family) []rs.Selector {
	return []rs.Selector{rs.Dest(f), rs.L4Proto, rs.DestPort}
}

func bySource(f rs.Family) []rs.Selector {
	return []rs.Selector{rs.Source(f), rs.L4Proto, rs.SourcePort}
}

// byQuotedDest and byQuotedSource select the destination and the source of the packet that an ICMP
// error quotes. The destination identifies a packet to a server, the source a packet to a client.
func byQuotedDest(f rs.Family) []rs.Selector {
	q := rs.QuotedIn(f)
	return []rs.Selector{q.Dest, q.Protocol, q.DestPort}
}

func byQuotedSource(f rs.Family) []rs.Selector {
	q := rs.QuotedIn(f)
	return []rs.Selector{q.Source, q.Protocol, q.SourcePort}
}

// icmpErrors starts the rules for ICMP errors that quote a packet without IP options. These are
// destination unreachable, time exceeded and parameter problem, and packet too big of ICMPv6.
func icmpErrors(f rs.Family) []*rs.Builder {
	kind := rs.Field("@th,0,8", rs.Integer8, 0)
	start := func() *rs.Builder { return rs.NewRule().Is(rs.L4Proto, icmpOf(f)) }
	if f == rs.IP6 {
		return []*rs.Builder{start().Between(kind, rs.Uint8(1), rs.Uint8(4))}
	}
	whole := func(r *rs.Builder) *rs.Builder { return r.Is(rs.QuotedIn(f).First, rs.Uint8(0x45)) }
	return []*rs.Builder{whole(start().Is(kind, rs.Uint8(3))), whole(start().Between(kind, rs.Uint8(11), rs.Uint8(12)))}
}

func byOriginal(f rs.Family) []rs.Selector {
	return []rs.Selector{rs.OriginalDest(f), rs.L4Proto, rs.OriginalPort}
}

// Base chains of the tables ip and ip6. Stateless translation and notrack run before connection
// tracking (-200), and after its defragmentation (-400), because they read the ports.
var baseChains = map[string]rs.Hook{
	"raw":    {Type: "filter", Point: "prerouting", Priority: -300},
	"mangle": {Type: "filter", Point: "prerouting", Priority: -150},
	// Before destination NAT, because the choice depends on the addresses of the client's packet.
	chainChoice:  {Type: "filter", Point: "prerouting", Priority: -140},
	"prerouting": {Type: "nat", Point: "prerouting", Priority: -100},
	// After destination NAT (-100).
	"untranslated": {Type: "filter", Point: "prerouting", Priority: -90},
	"output":       {Type: "nat", Point: "output", Priority: -100},
	"forward":      {Type: "filter", Point: "forward", Priority: -150},
	"translate":    {Type: "filter", Point: "postrouting", Priority: -150},
	"postrouting":  {Type: "nat", Point: "postrouting", Priority: 100},
	// After source NAT.
	chainForeign: {Type: "filter", Point: "postrouting", Priority: 300},
}

// Base chains of the table inet, for firewall rules without a family.
var filterChains = map[string]rs.Hook{
	"early":   {Type: "filter", Point: "prerouting", Priority: -300},
	"input":   {Type: "filter", Point: "input", Priority: 0},
	"forward": {Type: "filter", Point: "forward", Priority: 0},
	"output":  {Type: "filter", Point: "output", Priority: 0},
	// After the rules of other programs, such as firewalld (10). Packets of an offloaded flow skip
	// these rules, so they must see the packets before.
	offloadChain: {Type: "filter", Point: "forward", Priority: 100},
}

var dispatches = []dispatch{
	{name: mapServerErrors, chain: "raw", by: byQuotedDest, errors: true},
	{name: mapClientErrors, chain: "raw", by: byQuotedSource, errors: true},
	{name: mapStateless, chain: "raw", by: byDest},
	{name: mapReplies, chain: "raw", by: bySource},
	{name: mapGuards, chain: "mangle", by: byDest},
	{name: mapServices, chain: "prerouting", by: byDest},
	{name: mapServices, chain: "output", by: byDest},
	{name: mapHairpin, chain: "postrouting", by: byOriginal, set: true},
	{name: mapTurned, chain: "postrouting", by: byOriginal, set: true},
	{name: mapFullNAT, chain: "postrouting", by: byOriginal},
	{name: mapClamp, chain: "forward", by: byOriginal, set: true},
}

// sharedBase builds the fragment without an owner: shared maps and base chains.
func (c *compiler) sharedBase(b *base, p *peers) *rs.Fragment {
	f := &rs.Fragment{Objects: b.objects, Sets: b.sets}
	head := make(map[rs.ID][]rs.Rule)
	for _, table := range []rs.Family{rs.IP, rs.IP6} {
		if p.used[rs.ID{Table: table, Name: mapOwnedBound}] {
			c.sameLinks(b, table)
		}
		c.markRules(b, f, table, head)
		c.uplinks(f, table, head)
		c.dispatchRules(b, f, table, head)
		c.keepSources(b, p, table, head)
	}
	c.ingress(b, f, head)
	f.Elements = append(f.Elements, b.extra...)
	for _, id := range sortedIDs(b.used) {
		if s := sharedSet(id); s != nil {
			f.Sets = append(f.Sets, s)
		}
	}
	for _, id := range sortedIDs(b.needs) {
		c.list(f, id, b.needs[id])
	}
	for id, rules := range b.chains {
		head[id] = append(head[id], rules...)
	}
	for _, table := range []rs.Family{rs.IP, rs.IP6} {
		c.addUntranslated(b, p, table, head)
	}
	for _, id := range sortedIDs(head) {
		chain := &rs.Chain{ID: id, Rules: head[id]}
		hooks := baseChains
		if id.Table == rs.Inet {
			hooks = filterChains
		}
		if h, ok := hooks[id.Name]; ok && id.Table != rs.Netdev {
			chain.Hook = &h
		}
		f.Chains = append(f.Chains, chain)
	}
	return f
}

func (c *compiler) dispatchRules(b *base, f *rs.Fragment, table rs.Family, head map[rs.ID][]rs.Rule) {
	if b.used[rs.ID{Table: table, Name: mapReplies}] || b.used[rs.ID{Table: table, Name: mapReplies + ranges}] {
		raw := rs.ID{Table: table, Name: "raw"}
		head[raw] = append(head[raw], c.defragment(table))
	}
	for _, d := range dispatches {
		chain := rs.ID{Table: table, Name: d.chain}
		if b.used[rs.ID{Table: table, Name: d.name + interfaces}] && d.chain != "output" {
			key := append([]rs.Selector{rs.InName}, d.by(table)...)
			head[chain] = append(head[chain], rs.NewRule().VerdictFrom(d.name+interfaces, key...).Rule(""))
		}
		for _, name := range []string{d.name, d.name + ranges} {
			if !b.used[rs.ID{Table: table, Name: name}] {
				continue
			}
			if d.errors {
				c.errorRules(chain, name, d.by(table), head)
				continue
			}
			if d.name == mapHairpin {
				for _, start := range b.inside[table] {
					for _, r := range start() {
						r.InSet(setSameLink, rs.InName, rs.OutName).InSet(name, d.by(table)...).Masquerade(flow.Ports{}, false)
						head[chain] = append(head[chain], r.Rule(""))
					}
				}
				c.sameLinks(b, table)
				continue
			}
			r := rs.NewRule()
			switch {
			case d.name == mapTurned:
				r.InSet(setSameNet, rs.Source(table), rs.Dest(table)).InSet(name, d.by(table)...).Masquerade(flow.Ports{}, false)
			case d.name == mapClamp:
				const syn, rst = 0x02, 0x04
				r.TCPFlags(syn|rst, syn, "tcp flags syn / syn,rst").InSet(name, d.by(table)...).ClampMSS()
			default:
				r.VerdictFrom(name, d.by(table)...)
			}
			head[chain] = append(head[chain], r.Rule(""))
		}
	}
}

// chainErrors is the chain that looks up the stateless service of an ICMP error.
const chainErrors = "errors"

// errorRules adds the lookups of the packets that ICMP errors quote. They are in a chain of their
// own, so that other packets skip them.
func (c *compiler) errorRules(from rs.ID, name string, by []rs.Selector, head map[rs.ID][]rs.Rule) {
	to := rs.ID{Table: from.Table, Name: chainErrors}
	if len(head[to]) == 0 {
		head[from] = append(head[from], rs.NewRule().Is(rs.L4Proto, icmpOf(from.Table)).Jump(chainErrors).Rule(""))
	}
	for _, r := range icmpErrors(from.Table) {
		head[to] = append(head[to], r.VerdictFrom(name, by...).Rule(""))
	}
}

// icmpOf returns the ICMP protocol of a family.
func icmpOf(f rs.Family) rs.Value {
	if f == rs.IP6 {
		return rs.Proto(flow.ICMPv6)
	}
	return rs.Proto(flow.ICMP)
}

// markRules sets the marks of services and backends on every packet of their connections: NAT
// chains see only the first packet. A mark set by an earlier rule is not overwritten.
func (c *compiler) markRules(b *base, f *rs.Fragment, table rs.Family, head map[rs.ID][]rs.Rule) {
	if len(b.marks) == 0 {
		return
	}
	id := rs.ID{Table: table, Name: setMarks}
	f.Sets = append(f.Sets, &rs.Set{ID: id, Key: []rs.Type{rs.Mark}})
	marks := make([]uint32, 0, len(b.marks))
	for m := range b.marks {
		marks = append(marks, m)
	}
	slices.Sort(marks)
	for _, m := range marks {
		f.Elements = append(f.Elements, rs.Element{Set: id, Key: rs.Number(m).Raw})
	}
	chain := rs.ID{Table: table, Name: "mangle"}
	head[chain] = append(head[chain], rs.NewRule().Is(rs.PacketMark, rs.Number(0)).InSet(setMarks, rs.CtMark).RestoreMark().Rule(""))
}

// sharedSet returns the definition of a shared set or map by name, or nil if the name is not
// shared.
func sharedSet(id rs.ID) *rs.Set {
	s := &rs.Set{ID: id, Verdicts: true}
	name := id.Name
	switch kind, _, _ := strings.Cut(name, "-"); kind {
	case mapTargets, mapHosts:
		s.Key, s.Verdicts, s.Counter = []rs.Type{rs.Mark}, false, true
		s.Data = []rs.Type{addrType(id.Table)}
		if kind == mapTargets {
			s.Data = append(s.Data, rs.InetService)
		}
		return s
	}
	if name == setSameLink {
		s.Key, s.Verdicts = []rs.Type{rs.IfName, rs.IfName}, false
		return s
	}
	addr := addrType(id.Table)
	if name == setSameNet {
		s.Key, s.Verdicts, s.Interval = []rs.Type{addr, addr}, false, true
		return s
	}
	if id.Table == rs.Netdev {
		base, six := strings.CutPrefix(name, "ip6-")
		if addr = rs.IPv4Addr; six {
			name, addr = base, rs.IPv6Addr
		}
	}
	s.Key = []rs.Type{addr, rs.InetProto, rs.InetService}
	if base, ok := strings.CutSuffix(name, ranges); ok {
		name, s.Interval = base, true
	} else if base, ok := strings.CutSuffix(name, interfaces); ok {
		name, s.Interval = base, true
		s.Key = append([]rs.Type{rs.IfName}, s.Key...)
	}
	switch name {
	case mapHairpin, mapTurned, mapClamp, setListeners, setServers:
		s.Verdicts = false
	case mapOwned, mapOwnedBound, setOwnedPools:
		s.Key, s.Verdicts, s.Interval = []rs.Type{addr}, name != setOwnedPools, name == setOwnedPools
	case mapServices, mapFullNAT, mapGuards, mapStateless, mapReplies, mapServerErrors, mapClientErrors:
	default:
		return nil
	}
	return s
}

func sortedIDs[V any](m map[rs.ID]V) []rs.ID {
	ids := make([]rs.ID, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b rs.ID) int {
		if a.Table != b.Table {
			return int(a.Table) - int(b.Table)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return ids
}

// endpoints adds a listener to a shared map. Single ports are keys of the exact map. Ranges and
// whole addresses are in the interval map.
func endpoints(s *Service, table rs.Family, name string, l endpoint, v rs.Verdict) {
	for _, ports := range l.ports {
		exact := l.protocol != flow.Any && ports != flow.Ports{} && ports.First == ports.Last && l.iface == ""
		key := []rs.Value{rs.Addr(l.addr), rs.Proto(l.protocol), rs.Port(ports.First)}
		if exact {
			s.element(rs.Element{Set: rs.ID{Table: table, Name: name}, Key: rs.Concat(key...), Verdict: v})
			continue
		}
		end := []rs.Value{rs.Addr(l.addr), rs.Proto(l.protocol), rs.Port(ports.Last)}
		if ports == (flow.Ports{}) {
			end[2] = rs.Port(65535)
		}
		if l.protocol == flow.Any {
			end[1] = rs.Value{Raw: "\xff"}
		}
		suffix := ranges
		if l.iface != "" {
			suffix = interfaces
			first, last := rs.IfaceSpan(l.iface)
			key = append([]rs.Value{first}, key...)
			end = append([]rs.Value{last}, end...)
		}
		s.element(rs.Element{Set: rs.ID{Table: table, Name: name + suffix}, Key: rs.Concat(key...), End: rs.Concat(end...), Verdict: v})
	}
}

// endpoint is a listener as the key of a dispatch map.
type endpoint struct {
	addr     netip.Addr
	protocol flow.Protocol
	ports    []flow.Ports
	iface    string // a prefix of names ends in *; "" is every interface
}

// element adds an element with a verdict to the service's fragment, or a member without a verdict
// to a shared set. Services that listen on the same address at different interfaces share a member.
// The member must remain until the last such service is removed.
func (s *Service) element(e rs.Element) {
	if e.Verdict == (rs.Verdict{}) {
		s.members = append(s.members, e)
	} else {
		s.Fragment.Elements = append(s.Fragment.Elements, e)
	}
	s.addReference(e.Set)
}

func (s *Service) addReference(id rs.ID) {
	if !slices.Contains(s.uses, id) {
		s.uses = append(s.uses, id)
	}
}

func (s *Service) chain(table rs.Family, name string, rules ...rs.Rule) {
	s.Fragment.Chains = append(s.Fragment.Chains, &rs.Chain{ID: rs.ID{Table: table, Name: name}, Rules: rules})
}
