// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Report is what became of the exchanges of a namespace.
type Report struct {
	Answered int `json:"answered"`
	Failed   int `json:"failed"`
	Filtered int `json:"filtered"` // Refused by a firewall rule.
	Noise    int `json:"noise"`    // Scans, and probes of closed ports.
	OneWay   int `json:"one_way"`  // Datagrams that may have no answers.
	Probes   int `json:"probes"`   // Unanswered health checks of this host's own daemon.
	Ongoing  int `json:"ongoing"`
	Unknown  int `json:"unknown"` // not decided, because packets were lost by the observer
	// Classes of failing exchanges, those with the most first.
	Classes []Class          `json:"classes,omitempty"`
	Lost    trace.PacketLoss `json:"lost,omitzero"`
	Cut     bool             `json:"cut,omitempty"` // there were more exchanges than could be kept
	// Refused are the exchanges that firewall rules refused, by class.
	Refused []Class `json:"refused_by_rules,omitempty"`
	// Mute are own addresses for which hosts of a link ask in vain. Conflicts are addresses that several hosts use.
	Mute      []Mute     `json:"mute,omitempty"`
	Conflicts []Conflict `json:"conflicts,omitempty"`

	tallies map[Target]Tally
}

// Attribute is what the exchanges of a class have in common.
type Attribute uint8

// The attributes. If several separate equally well, the first is used, because it is nearest to a cause.
const (
	ByService Attribute = iota
	ByNextHop
	ByOut
	ByIn
	ByServer
	ByServerAddress
	ByPort
	BySource
	BySourceNetwork
	ByProtocol
	ByNothing
)

var attributeNames = [...]string{"service", "next hop", "output interface", "input interface", "server", "server address", "server port", "source", "source network", "protocol", "all"}

// String names the attribute.
func (a Attribute) String() string { return attributeNames[min(int(a), len(attributeNames)-1)] }

// MarshalText writes the name.
func (a Attribute) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// rank orders attributes that separate equally well. The interface is nearer to the cause than the server if a
// request leaves untranslated or by the wrong way, or is too large. It is no cause if the server refuses.
func (a Attribute) rank(s Stage) int {
	switch {
	case a == ByOut && (s == Untranslated || s == WrongWay || s == TooBig):
		return -1
	case (s == Refused || s == Unread) && (a == ByNextHop || a == ByOut || a == ByIn):
		return int(ByNothing) + int(a)
	}
	return int(a)
}

// Class is a group of exchanges that fail at the same stage for the same visible reason, with the attribute
// that separates them best from the healthy ones.
type Class struct {
	Stage     Stage     `json:"stage"`
	Attribute Attribute `json:"attribute"`
	Value     string    `json:"value"`
	Failing   int       `json:"failing"`
	Of        int       `json:"of"` // exchanges with the attribute, healthy ones included
	// Alike are the exchanges that fail at this stage for this reason, those of other classes included. Remote servers
	// that refuse and those that are silent are alike.
	Alike int `json:"alike"`
	// All are the exchanges of the namespace that were decided, healthy ones included.
	All    int    `json:"all"`
	Reason Reason `json:"-"`
	// Example is one exchange; Members are up to mostMembers.
	Example *Exchange   `json:"-"`
	Members []*Exchange `json:"-"`
	// Sizable is set if too many fail for an accident.
	Sizable bool `json:"sizable"`
}

// Bounds of a report.
const (
	mostClasses = 6
	mostMembers = 64
)

// Report decides all exchanges at the end of the window, in the time of packets. lost is what the observer
// missed. refine, if set, corrects the causes of drops.
func (c *Collector) Report(end time.Duration, lost trace.PacketLoss, refine func(trace.Cause) trace.Cause) *Report {
	c.end = max(c.end, end)
	if refine != nil {
		for _, e := range c.exchanges {
			for _, w := range []*way{&e.request, &e.reply} {
				if w.drop != nil {
					w.drop.Cause = refine(w.drop.Cause)
				}
			}
		}
	}
	r := &Report{Lost: lost, Cut: c.cut, tallies: map[Target]Tally{}}
	c.links(r)
	failed, refused := map[string][]*Exchange{}, map[string][]*Exchange{}
	var decided []*Exchange
	for e, v := range c.judge(lost) {
		r.count(e, v)
		switch v {
		case Good:
			r.Answered++
			decided = append(decided, e)
		case Failed:
			r.Failed++
			decided = append(decided, e)
			failed[e.group()] = append(failed[e.group()], e)
		case Filtered:
			r.Filtered++
			refused[e.group()] = append(refused[e.group()], e)
		case Noise:
			r.Noise++
		case OneWay:
			r.OneWay++
		case Probe:
			r.Probes++
		case Unknown:
			r.Unknown++
		default:
			r.Ongoing++
		}
	}
	healthy, remote := counts(decided, nil), 0
	for _, members := range failed {
		if members[0].atServer() {
			remote += len(members)
		}
	}
	for _, members := range failed {
		alike := len(members)
		if members[0].atServer() {
			alike = remote
		}
		r.Classes = append(r.Classes, classes(members, healthy, alike, len(decided))...)
	}
	for _, members := range refused {
		r.Refused = append(r.Refused, classes(members, healthy, len(members), len(decided))...)
	}
	for _, list := range []*[]Class{&r.Classes, &r.Refused} {
		slices.SortFunc(*list, compareClasses)
		*list = (*list)[:min(len(*list), mostClasses)]
	}
	return r
}

func compareClasses(a, b Class) int {
	sizable := func(c Class) int {
		if c.Sizable {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(sizable(a), sizable(b)), cmp.Compare(b.Failing, a.Failing), cmp.Compare(a.Stage, b.Stage), cmp.Compare(a.Attribute, b.Attribute), cmp.Compare(a.Value, b.Value))
}

// atServer reports whether a request left for a server that refused it or was silent. Hosts limit the rate of their
// errors, so that one firewall may do both.
func (e *Exchange) atServer() bool { return e.Stage == Refused || e.Stage == NoAnswer }

// group is the visible reason of a failure, apart from the endpoints.
func (e *Exchange) group() string {
	s := fmt.Sprint(e.Stage)
	if d := e.Reason.Drop; d != nil {
		s += " " + d.Cause.ID
	}
	if r := e.Reason.Rejection; r != nil && e.Reason.Drop == nil {
		s += fmt.Sprint(" ", r.Type, r.Code, r.Reset, r.Own)
	}
	if e.Reason.Unread.IsValid() {
		s += fmt.Sprint(" ", e.Reason.Unread == e.Server())
	}
	if e.Reason.Bypass {
		s += " bypass"
	}
	if e.Reason.Evident() {
		s += fmt.Sprint(" ", e.Reason.HopLimit, e.Reason.Unrecognised, e.Reason.OtherSource, e.Reason.Elsewhere)
	}
	return s
}

// trait is a value of an attribute.
type trait struct {
	attribute Attribute
	value     string
}

// traits of an exchange.
func (e *Exchange) traits() []trait {
	t := []trait{{ByProtocol, e.Request.Protocol.String()}, {ByNothing, ""}, {ByServerAddress, e.Server().Addr().String()}, {BySource, e.Client().Addr().String()}}
	add := func(a Attribute, v string) {
		if v != "" {
			t = append(t, trait{a, v})
		}
	}
	if e.Reason.Unresolved.IsValid() {
		add(ByNextHop, e.Reason.Unresolved.String())
	}
	if mac, known := e.NextHopMAC(); known && e.Out() != "" {
		add(ByNextHop, fmt.Sprintf("%x on %s", mac, e.Out()))
	}
	server := e.Server().Addr().String()
	if e.Request.Protocol.HasPorts() {
		server = e.Server().String()
		add(ByPort, fmt.Sprintf("%s port %d", strings.ToUpper(e.Request.Protocol.String()), e.Server().Port()))
	}
	if e.DestTranslated() {
		add(ByService, server)
	}
	add(ByServer, server)
	add(ByOut, e.Out())
	add(ByIn, e.In())
	bits := 24
	if !e.Client().Addr().Is4() {
		bits = 64
	}
	if p, err := e.Client().Addr().Prefix(bits); err == nil {
		add(BySourceNetwork, p.String())
	}
	return t
}

// counts adds up the traits of exchanges.
func counts(list []*Exchange, into map[trait]int) map[trait]int {
	if into == nil {
		into = map[trait]int{}
	}
	for _, e := range list {
		for _, t := range e.traits() {
			into[t]++
		}
	}
	return into
}

// classes divides exchanges with the same failure by the traits that distinguish them best from all other exchanges.
func classes(members []*Exchange, all map[trait]int, alike, decided int) (list []Class) {
	for len(members) > 0 && len(list) < mostClasses {
		failing := counts(members, nil)
		var best trait
		score := -1.0
		for t, f := range failing {
			n := max(all[t], f)
			cover, pure := float64(f)/float64(len(members)), float64(f)/float64(n)
			s := cover * pure
			rank, bestRank := t.attribute.rank(members[0].Stage), best.attribute.rank(members[0].Stage)
			if s > score+1e-9 || s > score-1e-9 && (rank < bestRank || rank == bestRank && t.value < best.value) {
				best, score = t, s
			}
		}
		c := Class{Attribute: best.attribute, Value: best.value, Of: max(all[best], failing[best]), Alike: alike, All: max(decided, len(members))}
		var rest []*Exchange
		attempts := 0
		for _, e := range members {
			if !slices.Contains(e.traits(), best) {
				rest = append(rest, e)
				continue
			}
			c.Failing++
			attempts += e.attempts
			if c.Example == nil || e.firstAttempt < c.Example.firstAttempt {
				c.Example = e
			}
			if len(c.Members) < mostMembers {
				c.Members = append(c.Members, e)
			}
		}
		c.Stage, c.Reason = c.Example.Stage, c.Example.Reason
		c.Sizable = c.sizable(attempts)
		list = append(list, c)
		members = rest
	}
	return list
}

// From these limits on failures are no accident.
const (
	manyFailing  = 3
	manyAttempts = 4
	shareFailing = 0.2
	// shareRemote is the share of all exchanges from which on remote servers without answers matter.
	shareRemote = 0.2
)

// sizable judges how many exchanges fail.
func (c *Class) sizable(attempts int) bool {
	if c.Failing < manyFailing && attempts < manyAttempts || float64(c.Failing) < shareFailing*float64(c.Of) {
		return false
	}
	switch c.Stage {
	case NoAnswer, Refused, ClientRejects, Unread:
		// One remote server is not this host's fault; its own programs and servers of port forwards are its concern.
		if (c.Stage == NoAnswer || c.Stage == Unread) && c.Example.Out() == "" || c.Reason.OtherSource.IsValid() {
			return true
		}
		// Without a DNS server its clients reach nothing, whatever its share of the exchanges.
		if c.Stage == NoAnswer && c.Failing == c.Of && c.Attribute == ByServer && c.Example.Server().Port() == dnsPort {
			return true
		}
		switch c.Attribute {
		case ByServer, ByServerAddress, ByPort, BySource, BySourceNetwork, ByProtocol, ByNothing:
			return float64(c.Alike) >= shareRemote*float64(c.All)
		}
	}
	return true
}

// Interfaces are those that packets of the class passed, or at which they were dropped.
func (c *Class) Interfaces() (list []string) {
	add := func(name string) {
		if name != "" && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	for _, e := range c.Members {
		add(e.request.in)
		add(e.request.out)
		add(e.reply.in)
		add(e.reply.out)
		add(e.Reason.UnresolvedOn)
		if d := e.Reason.Drop; d != nil {
			add(d.Interface)
		}
	}
	return list
}

// Servers and Clients are the addresses of the members, before and after translation.
func (c *Class) Servers() []netip.Addr {
	return c.addresses(func(e *Exchange) [2]netip.Addr { return [2]netip.Addr{e.Request.Dest.Addr(), e.Reply.Source.Addr()} })
}

// Clients are the addresses of the clients, before and after translation.
func (c *Class) Clients() []netip.Addr {
	return c.addresses(func(e *Exchange) [2]netip.Addr { return [2]netip.Addr{e.Request.Source.Addr(), e.Reply.Dest.Addr()} })
}

func (c *Class) addresses(of func(e *Exchange) [2]netip.Addr) (list []netip.Addr) {
	for _, e := range c.Members {
		for _, a := range of(e) {
			if !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
	}
	return list
}

// NextHops are the next hops that do not resolve.
func (c *Class) NextHops() (list []netip.Addr) {
	for _, e := range c.Members {
		if a := e.Reason.Unresolved; a.IsValid() && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	return list
}

// LinkAddresses are the hardware addresses to which the requests were sent.
func (c *Class) LinkAddresses() (list []string) {
	for _, e := range c.Members {
		if mac, known := e.NextHopMAC(); known {
			if text := net.HardwareAddr(mac[:]).String(); !slices.Contains(list, text) {
				list = append(list, text)
			}
		}
	}
	return list
}

// Ports are the ports of the servers, before and after translation.
func (c *Class) Ports() (list []uint16) {
	for _, e := range c.Members {
		for _, p := range []uint16{e.Request.Dest.Port(), e.Reply.Source.Port()} {
			if e.Request.Protocol.HasPorts() && !slices.Contains(list, p) {
				list = append(list, p)
			}
		}
	}
	return list
}

// Protocols of the members.
func (c *Class) Protocols() (list []flow.Protocol) {
	for _, e := range c.Members {
		if !slices.Contains(list, e.Request.Protocol) {
			list = append(list, e.Request.Protocol)
		}
	}
	return list
}

// Duration is the time from the first request of the example to the last.
func (e *Exchange) Duration() time.Duration { return e.lastAttempt - e.firstAttempt }
