// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// addRefusedChain makes the chain that counts and drops the connections refused by a set or a limit. It
// exists only if a rule leads to it.
func (p *servicePart) addRefusedChain() {
	s := p.svc
	guarded := s.Limits != config.Limits{} || len(s.Allow)+len(s.Deny) > 0 ||
		slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.MaxConnections > 0 })
	if guarded {
		p.chain(p.table, p.prefix+"/refused", rs.NewRule().Counter().Drop().Rule(""))
	}
}

// accessRules returns the rules of the service's allow and deny sets.
func (p *servicePart) accessRules() []rs.Rule {
	var rules []rs.Rule
	source := rs.Source(p.family)
	for _, list := range p.svc.Deny {
		rules = append(rules, p.rule().InSet(p.list(list), source).Goto(p.prefix+"/refused").Rule(""))
	}
	if len(p.svc.Allow) > 0 {
		r := p.rule()
		for _, list := range p.svc.Allow {
			r.NotInSet(p.list(list), source)
		}
		rules = append(rules, r.Goto(p.prefix+"/refused").Rule(""))
	}
	return rules
}

// list records that the service uses a firewall set, and returns the set's name.
func (p *servicePart) list(name string) string {
	id := listID(p.table, p.family, name)
	p.addReference(id)
	return id.Name
}

// Prefixes of the names of firewall sets. Tables with both families have IPv6 in a set of its own.
const (
	listPrefix  = "firewall/"
	listPrefix6 = "firewall6/"
)

func listID(table, f rs.Family, name string) rs.ID {
	if f == rs.IP6 && table != rs.IP6 {
		return rs.ID{Table: table, Name: listPrefix6 + identifier(name)}
	}
	return rs.ID{Table: table, Name: listPrefix + identifier(name)}
}

// listOf is the inverse of listID. The name is in the form of identifier.
func listOf(id rs.ID) (name string, f rs.Family, ok bool) {
	if name, ok = strings.CutPrefix(id.Name, listPrefix6); ok {
		return name, rs.IP6, true
	}
	name, ok = strings.CutPrefix(id.Name, listPrefix)
	f = id.Table
	if f == rs.Inet || f == rs.Netdev {
		f = rs.IP
	}
	return name, f, ok
}

// list writes a firewall set and its prefixes of one family.
func (c *compiler) list(f *rs.Fragment, id rs.ID, n setRef) {
	f.Sets = append(f.Sets, &rs.Set{ID: id, Key: []rs.Type{addrType(n.family)}, Interval: true})
	for name, prefixes := range c.sets {
		if identifier(name) != n.list {
			continue
		}
		f.Elements = append(f.Elements, prefixElements(id, n.family, prefixes)...)
	}
}

// prefixElements returns the prefixes of one family as separate ranges: the kernel's interval sets
// reject overlaps.
func prefixElements(id rs.ID, f rs.Family, prefixes []netip.Prefix) []rs.Element {
	var all []config.AddressRange
	for _, p := range prefixes {
		all = append(all, config.AddressRange{First: p.Masked().Addr(), Last: rs.LastAddr(p)})
	}
	var list []rs.Element
	for _, s := range spans(f, all) {
		list = append(list, rs.Element{Set: id, Key: rs.Addr(s.First).Raw, End: rs.Addr(s.Last).Raw})
	}
	return list
}

// spans returns the ranges of one family in order. Adjacent and overlapping ranges are joined.
func spans(f rs.Family, all []config.AddressRange) (merged []config.AddressRange) {
	all = slices.DeleteFunc(slices.Clone(all), func(r config.AddressRange) bool { return familyOf(r.First) != f })
	slices.SortFunc(all, func(a, b config.AddressRange) int { return a.First.Compare(b.First) })
	for _, s := range all {
		if n := len(merged); n > 0 {
			if next := merged[n-1].Last.Next(); !next.IsValid() || s.First.Compare(next) <= 0 {
				if merged[n-1].Last.Less(s.Last) {
					merged[n-1].Last = s.Last
				}
				continue
			}
		}
		merged = append(merged, s)
	}
	return merged
}

// limits writes the chain of the service's limits and returns the jump to it. nf_tables keeps
// counts in rules, and they end with the rules of the chain. In a chain of their own, these rules
// change only with the limits.
func (p *servicePart) limits() []rs.Rule {
	l := p.svc.Limits
	if len(p.active) == 0 {
		return nil
	}
	refused, source := p.prefix+"/refused", p.client()
	var rules []rs.Rule
	if r := l.NewConnections; !r.IsZero() {
		rules = append(rules, rs.NewRule().Limit(r.Count, r.Per, burst(r), true).Goto(refused).Rule(""))
	}
	if r := l.NewConnectionsPerClient; !r.IsZero() {
		set := p.clientSet("/rate", true)
		rules = append(rules, p.rule().RateOver(set, rateMemory(r), r.Count, r.Per, burst(r), source).Goto(refused).Rule(""))
	}
	if n := l.ConnectionsPerClient; n > 0 {
		set := p.clientSet("/connections", false)
		rules = append(rules, p.rule().KeyConnectionsOver(set, n, source).Goto(refused).Rule(""))
	}
	if n := l.Connections; n > 0 {
		rules = append(rules, rs.NewRule().ConnectionsOver(n).Goto(refused).Rule(""))
	}
	if len(rules) == 0 {
		return nil
	}
	p.chain(p.table, p.prefix+"/limits", rules...)
	return []rs.Rule{rs.NewRule().Jump(p.prefix + "/limits").Rule("")}
}

// client returns the selector of one client: an IPv4 address, or an IPv6 /64, because an IPv6 host
// may use any address of its /64.
func (p *servicePart) client() rs.Selector {
	if p.family == rs.IP {
		return rs.Source(p.family)
	}
	mask := netip.MustParseAddr("ffff:ffff:ffff:ffff::")
	return rs.Masked(rs.Source(p.family), rs.Addr(mask))
}

// maxClients is the maximum size of sets of clients.
const maxClients = 1 << 20

func (p *servicePart) clientSet(suffix string, timeout bool) string {
	s := &rs.Set{ID: rs.ID{Table: p.table, Name: p.prefix + suffix}, Key: []rs.Type{addrType(p.family)}, Dynamic: true, Size: maxClients}
	if timeout {
		s.Timeout = rateMemory(p.svc.Limits.NewConnectionsPerClient)
	}
	p.Fragment.Sets = append(p.Fragment.Sets, s)
	return s.Name
}

// burst returns the burst of a rate: the count of one unit of time.
func burst(r config.Rate) int { return max(r.Count, 1) }

// rateMemory returns the lifetime of a client's rate entry. After twice the unit of the rate its
// bucket is full again.
func rateMemory(r config.Rate) time.Duration { return 2 * r.Per }

// guard writes the checks that apply to every packet of the service, not only to the first of a
// connection.
func (p *servicePart) guard() {
	l := p.svc.Limits
	if len(p.active) == 0 || !l.StrictTCP && l.ResetRate.IsZero() || p.svc.Protocol != flow.TCP && p.svc.Protocol != flow.Any {
		return
	}
	const fin, syn, rst, ack = 0x01, 0x02, 0x04, 0x10
	refused := p.prefix + "/refused"
	var rules []rs.Rule
	if l.StrictTCP {
		rules = append(rules,
			rs.NewRule().Is(rs.L4Proto, rs.Proto(flow.TCP)).State("invalid").Goto(refused).Rule(""),
			rs.NewRule().State("new").TCPFlagsNot(fin|syn|rst|ack, syn, "tcp flags != syn / fin,syn,rst,ack").Goto(refused).Rule(""))
	}
	if r := l.ResetRate; !r.IsZero() {
		rules = append(rules, rs.NewRule().TCPFlags(rst, rst, "tcp flags rst / rst").Limit(r.Count, r.Per, burst(r), true).Goto(refused).Rule(""))
	}
	p.chain(p.table, p.prefix+"/guard", rules...)
	p.listen(mapGuards, rs.Verdict{Code: rs.Goto, Chain: p.prefix + "/guard"})
}

// downRules returns the rules of a service without a usable backend.
func (p *servicePart) downRules() []rs.Rule {
	// The kernel calls nat chains only if connection tracking is active. A rule that matches a
	// connection state activates it, as translations do.
	count := func() *rs.Builder { return rs.NewRule().State("new") }
	switch p.svc.WhenDown {
	case config.WhenDownDrop:
		return []rs.Rule{count().Counter().Drop().Rule("no backend is usable")}
	case config.WhenDownReject:
		return []rs.Rule{count().Counter().RejectPort(p.table).Rule("no backend is usable")}
	}
	rules := []rs.Rule{}
	if p.svc.Protocol == flow.TCP || p.svc.Protocol == flow.Any {
		rules = append(rules, count().Is(rs.L4Proto, rs.Proto(flow.TCP)).Counter().RejectReset().Rule("no backend is usable"))
	}
	if p.svc.Protocol != flow.TCP {
		rules = append(rules, count().Counter().RejectPort(p.table).Rule("no backend is usable"))
	}
	return rules
}

// log returns the rule that logs new connections.
func (p *servicePart) log(l *config.Log) rs.Rule {
	rate := l.Rate
	if rate.IsZero() {
		rate = config.Rate{Count: 10, Per: time.Second}
	}
	level, name := logLevel(l.Level)
	return rs.NewRule().Limit(rate.Count, rate.Per, l.Burst, false).Log(l.Prefix, level, name).Rule("")
}

var logLevels = []string{"emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"}

// logLevel returns the kernel's number of a level and nft's keyword.
func logLevel(l config.LogLevel) (uint32, string) {
	if i := slices.Index(logLevels, string(l)); i >= 0 {
		if l == "warning" {
			return uint32(i), "warn"
		}
		return uint32(i), string(l)
	}
	return 6, "info"
}

// helpers returns the rules that assign a helper to connections. Each protocol of the helper has an
// object.
func (c *compiler) helpers(s *Service, f rs.Family, prefix string, h config.Helper, protocol flow.Protocol) []rs.Rule {
	return c.helpersTo(s, f, prefix, h, protocol, 0)
}

// helpersTo is like helpers, for connections to one port; 0 is any port.
func (c *compiler) helpersTo(s *Service, f rs.Family, prefix string, h config.Helper, protocol flow.Protocol, port uint16) []rs.Rule {
	var rules []rs.Rule
	for _, p := range helperProtocols(h, protocol) {
		o := &rs.Object{ID: rs.ID{Table: f, Name: prefix + "/" + string(h) + "-" + p.String()}, Kind: rs.ObjectHelper, Helper: kernelHelper(h), Protocol: uint8(p)}
		s.Fragment.Objects = append(s.Fragment.Objects, o)
		r := rs.NewRule().Is(rs.L4Proto, rs.Proto(p))
		if port != 0 {
			r.Is(rs.DestPort, rs.Port(port))
		}
		rules = append(rules, r.Helper(o.Name).Rule(""))
	}
	return rules
}
