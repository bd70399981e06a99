// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// nat compiles one NAT rule: its chain, and the rule or map elements that lead to the chain.
func (c *compiler) nat(n *config.NATRule, b *base) (*Service, error) {
	if err := CarriesNAT(n); err != nil {
		return nil, err
	}
	s := &Service{Name: n.Name, Fragment: &rs.Fragment{Owner: "nat " + n.Name}}
	chain := "nat/" + identifier(n.Name)
	switch {
	case n.Type.RewritesSource():
		return s, c.sourceNAT(s, n, b, chain)
	case n.Type.Forwards():
		c.portForward(s, n, chain)
	case n.Type == config.NATStatic:
		c.static(s, n, b, chain)
	case n.Type.ChecksumNeutral():
		c.npt66(s, n, b, chain)
	}
	return s, nil
}

// staticFirst orders static rules before the others, so that a host with its own outside address
// keeps it even if another rule translates its whole network.
func staticFirst(a, b *config.NATRule) int {
	switch one, other := a.Type == config.NATStatic, b.Type == config.NATStatic; {
	case one && !other:
		return -1
	case other && !one:
		return 1
	}
	return 0
}

// egressRules starts the rules for forwarded packets from the interfaces in to the interfaces out:
// one for each pair.
func egressRules(in, out config.Interfaces) (list []*rs.Builder) {
	for _, i := range namesOrAny(in) {
		for _, o := range namesOrAny(out) {
			r := rs.NewRule()
			if i != "" {
				r.Is(rs.InName, rs.Ifaces(i))
			}
			if o != "" {
				r.Is(rs.OutName, rs.Ifaces(o))
			}
			list = append(list, r)
		}
	}
	return list
}

// namesOrAny returns the names in a list of interfaces, or "" for every interface.
func namesOrAny(i config.Interfaces) []string {
	if i == "" {
		return []string{""}
	}
	return i.Words()
}

// bothDirections starts the rules for both directions of the connections that leave by the rule's
// interfaces.
func bothDirections(n *config.NATRule) []*rs.Builder {
	if n.In == n.Out {
		return egressRules(n.In, n.Out)
	}
	return append(egressRules(n.In, n.Out), egressRules(n.Out, n.In)...)
}

// sourceNAT compiles masquerade and snat. A rule without a source applies to IPv4, unless its
// addresses are IPv6. IPv6 is translated only on request.
func (c *compiler) sourceNAT(s *Service, n *config.NATRule, b *base, chain string) error {
	for _, f := range []rs.Family{rs.IP, rs.IP6} {
		var sources, except []netip.Prefix
		var pool []config.AddressRange
		for _, p := range n.Source {
			if familyOf(p.Addr()) == f {
				sources = append(sources, p)
			}
		}
		for _, p := range n.Except {
			if familyOf(p.Addr()) == f {
				except = append(except, p)
			}
		}
		for _, r := range n.To.Addresses {
			if r.Is4() == (f == rs.IP) {
				pool = append(pool, r)
			}
		}
		wanted := len(sources) > 0 || len(n.Source) == 0 && f == rs.IP
		if n.Type == config.NATSNAT {
			wanted = len(pool) > 0 && (len(sources) > 0 || len(n.Source) == 0)
		}
		if !wanted {
			continue
		}
		if err := c.sourceNATFamily(s, n, f, chain, except, pool); err != nil {
			return err
		}
		base := rs.ID{Table: f, Name: "postrouting"}
		if len(sources) > 1 {
			s.intervals(rs.ID{Table: f, Name: chain + "/source"}, f, sources)
		}
		for _, r := range c.sourceRules(n, f, sources, chain) {
			b.chains[base] = append(b.chains[base], r.Jump(chain).Rule(""))
		}
		for _, stays := range c.sourceRules(n, f, sources, chain) {
			if len(except) > 0 {
				stays.NotInSet(chain+"/except", rs.Dest(f))
			}
			b.dropUntranslated(f, stays)
		}
		b.clamp(n, f)
		if namesInside(n) {
			by := *n
			by.Out = ""
			b.inside[f] = append(b.inside[f], func() []*rs.Builder { return c.sourceRules(&by, f, sources, chain) })
		}
	}
	return nil
}

// sourceRules starts the rules for the connections that a source translation matches.
func (c *compiler) sourceRules(n *config.NATRule, f rs.Family, sources []netip.Prefix, chain string) []*rs.Builder {
	rules := egressRules(n.In, n.Out)
	for _, r := range rules {
		switch len(sources) {
		case 0:
		case 1:
			r.Within(rs.Source(f), sources[0])
		default:
			r.InSet(chain+"/source", rs.Source(f))
		}
	}
	return rules
}

// clamp lowers the MSS of the connections that a rule translates.
func (b *base) clamp(n *config.NATRule, f rs.Family) {
	if !n.MSSClamp {
		return
	}
	forward := rs.ID{Table: f, Name: "forward"}
	const syn, rst = 0x02, 0x04
	for _, way := range bothDirections(n) {
		b.chains[forward] = append(b.chains[forward], way.TCPFlags(syn|rst, syn, "tcp flags syn / syn,rst").ClampMSS().Rule(n.Name))
	}
}

func (c *compiler) sourceNATFamily(s *Service, n *config.NATRule, f rs.Family, chain string, except []netip.Prefix, pool []config.AddressRange) error {
	var rules []rs.Rule
	if len(except) > 0 {
		set := rs.ID{Table: f, Name: chain + "/except"}
		s.intervals(set, f, except)
		rules = append(rules, rs.NewRule().InSet(set.Name, rs.Dest(f)).Accept().Rule("")) // this also skips the later rules
	}
	if r := n.NewConnectionsPerClient; !r.IsZero() {
		set := &rs.Set{ID: rs.ID{Table: f, Name: chain + "/rate"}, Key: []rs.Type{addrType(f)}, Dynamic: true, Size: maxClients, Timeout: rateMemory(r)}
		s.Fragment.Sets = append(s.Fragment.Sets, set)
		rules = append(rules, rs.NewRule().RateOver(set.Name, set.Timeout, r.Count, r.Per, burst(r), rs.Source(f)).Drop().Rule(""))
	}
	if q := n.ConnectionsPerClient; q > 0 {
		set := &rs.Set{ID: rs.ID{Table: f, Name: chain + "/connections"}, Key: []rs.Type{addrType(f)}, Dynamic: true, Size: maxClients}
		s.Fragment.Sets = append(s.Fragment.Sets, set)
		rules = append(rules, rs.NewRule().KeyConnectionsOver(set.Name, q, rs.Source(f)).Drop().Rule(""))
	}
	if n.Mark != 0 {
		s.marks = append(s.marks, n.Mark)
		rules = append(rules, rs.NewRule().SetCtMark(n.Mark).SetMark(n.Mark).Rule(""))
	}
	// Before the translation: it adds the extension for adjusted sequence numbers if the connection
	// has a helper.
	for _, h := range n.Helper.Each() {
		if f == rs.IP || helpsIPv6(h) {
			rules = append(rules, c.helpersTo(s, f, chain, h, flow.Any, h.Port())...)
		}
	}
	rules = append(rules, c.assignTimeouts(s, f, flow.Any)...)
	if n.Type.UsesInterfaceAddress() {
		rules = append(rules, c.withoutAddress(s, n, f, chain)...)
		named, err := c.routeSources(s, n, f, chain)
		if err != nil {
			return err
		}
		rules = append(rules, named...)
	}
	translate, err := c.snat(s, f, chain, pool, restrictedPorts(n.Ports), n.FullyRandom)
	if err != nil {
		return err
	}
	s.chain(f, chain, append(rules, translate...)...)
	return nil
}

// routeSources returns the rules for interfaces with a source address in their default route. The
// kernel's masquerade uses the next hop only.
func (c *compiler) routeSources(s *Service, n *config.NATRule, f rs.Family, chain string) (rules []rs.Rule, err error) {
	for _, by := range c.env.Sources {
		if familyOf(by.Address) != f || !n.Out.Has(by.Interface) {
			continue
		}
		to := chain + "/source-" + identifier(by.Interface)
		translate, err := c.snat(s, f, to, []config.AddressRange{{First: by.Address, Last: by.Address}}, restrictedPorts(n.Ports), n.FullyRandom)
		if err != nil {
			return nil, err
		}
		s.chain(f, to, translate...)
		rule := rs.NewRule().Is(rs.OutName, rs.Iface(by.Interface))
		for _, p := range withoutNested(by.Networks) {
			rule.NotWithin(rs.Dest(f), p)
		}
		rules = append(rules, rule.Goto(to).Rule(""))
	}
	return rules, nil
}

// noAddress is the suffix of chains that drop packets because the egress interface has no address.
const noAddress = "/no-address"

// withoutAddress returns the rules for interfaces without an address of the family. The kernel's
// masquerade would use an address of another interface, to which the hosts there may have no route.
func (c *compiler) withoutAddress(s *Service, n *config.NATRule, f rs.Family, chain string) (rules []rs.Rule) {
	for _, i := range c.env.Interfaces {
		if bare := f == rs.IP && i.Bare4 || f == rs.IP6 && i.Bare6; bare && n.Out != "" && n.Out.Has(i.Name) {
			rules = append(rules, rs.NewRule().Is(rs.OutName, rs.Iface(i.Name)).Goto(chain+noAddress).Rule(""))
		}
	}
	if len(rules) > 0 {
		s.chain(f, chain+noAddress, rs.NewRule().Counter().Drop().Rule(""))
	}
	return rules
}

// DropsWithoutAddress reports whether the chain drops packets because the egress interface has no
// address.
func DropsWithoutAddress(chain string) bool { return strings.HasSuffix(chain, noAddress) }

// restrictedPorts returns the ports, or nil for the default. By default the kernel chooses in the
// same way: it keeps a free port, and otherwise stays on the same side of port 1024.
func restrictedPorts(p config.PortSet) config.PortSet {
	if len(p) == 1 && p[0] == config.DefaultPorts(0) {
		return nil
	}
	return p
}

// intervals adds a set of prefixes to the rule's fragment.
func (s *Service) intervals(id rs.ID, f rs.Family, prefixes []netip.Prefix) {
	s.Fragment.Sets = append(s.Fragment.Sets, &rs.Set{ID: id, Key: []rs.Type{addrType(f)}, Interval: true})
	s.Fragment.Elements = append(s.Fragment.Elements, prefixElements(id, f, prefixes)...)
}

// portForward compiles a port-forward as an entry in the map of services.
func (c *compiler) portForward(s *Service, n *config.NATRule, chain string) {
	f := familyOf(n.Listen.Address)
	var rules []rs.Rule
	if n.Mark != 0 {
		s.marks = append(s.marks, n.Mark)
		rules = append(rules, rs.NewRule().SetCtMark(n.Mark).SetMark(n.Mark).Rule(""))
	}
	if n.Helper != "" {
		rules = append(rules, c.helpers(s, f, chain, config.Helper(n.Helper), n.Protocol)...)
	}
	rules = append(rules, c.assignTimeouts(s, f, n.Protocol)...)
	rules = append(rules, s.toTarget(f, n, chain))
	s.chain(f, chain, rules...)
	at := []string{n.Listen.Interface}
	if at[0] == "" {
		at = namesOrAny(n.In)
	}
	if n.Hairpin == config.SwitchOn {
		at = []string{""}
	}
	e := endpoint{addr: n.Listen.Address, protocol: n.Protocol, ports: portsOf(*n.Listen)}
	for _, e.iface = range at {
		endpoints(s, f, mapServices, e, rs.Verdict{Code: rs.Goto, Chain: chain})
	}
	if n.Hairpin != config.SwitchOff {
		e.iface = ""
		endpoints(s, f, mapTurned, e, rs.Verdict{})
		if slices.ContainsFunc(c.snapshot.NAT, namesInside) {
			endpoints(s, f, mapHairpin, e, rs.Verdict{})
		}
	}
	if n.MSSClamp {
		e.iface = ""
		endpoints(s, f, mapClamp, e, rs.Verdict{})
	}
}

// toTarget returns the rule that translates to the target of a port-forward. nf_tables cannot add
// to a port, so that a shifted range is a map with each of its ports.
func (s *Service) toTarget(f rs.Family, n *config.NATRule, chain string) rs.Rule {
	p, ranged := n.Range()
	if n.Shift() == 0 {
		port := n.To.Port
		if ranged {
			port = 0 // the destination port is kept
		}
		return rs.NewRule().Counter().DNAT(f, n.To.Address, port).Rule("")
	}
	set := rs.ID{Table: f, Name: chain + "/ports"}
	s.Fragment.Sets = append(s.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{rs.InetService}, Data: []rs.Type{addrType(f), rs.InetService}})
	for port := int(p.First); port <= int(p.Last); port++ {
		to := n.Target(uint16(port))
		s.Fragment.Elements = append(s.Fragment.Elements, rs.Element{Set: set, Key: rs.Port(uint16(port)).Raw,
			Value: rs.Concat(rs.Addr(to.Addr()), rs.Port(to.Port()))})
	}
	return rs.NewRule().Counter().DNATFrom(f, set.Name, true, rs.DestPort).Rule("")
}

// static compiles a one-to-one mapping of prefixes for connections in both directions.
func (c *compiler) static(s *Service, n *config.NATRule, b *base, chain string) {
	f := familyOf(n.External.Addr())
	pre, post := rs.ID{Table: f, Name: "prerouting"}, rs.ID{Table: f, Name: "postrouting"}
	b.chains[pre] = append(b.chains[pre], rs.NewRule().Within(rs.Dest(f), n.External).Goto(chain+"/in").Rule(""))
	if n.Out != "" || len(n.Except) > 0 {
		// An inside host may use the outside address of another one. The reply must then pass the
		// gateway.
		for i := range c.snapshot.NAT {
			if o := c.snapshot.NAT[i]; o.Type == config.NATStatic && familyOf(o.External.Addr()) == f {
				for _, turned := range egressRules(n.In, "") {
					turned.Within(rs.OriginalDest(f), o.External).Within(rs.Source(f), n.Internal)
					b.chains[post] = append(b.chains[post], turned.Goto(chain+"/out").Rule(""))
				}
			}
		}
	}
	if len(n.Except) > 0 {
		set := rs.ID{Table: f, Name: chain + "/except"}
		s.intervals(set, f, n.Except)
		for _, except := range egressRules(n.In, n.Out) {
			except.Within(rs.Source(f), n.Internal).InSet(set.Name, rs.Dest(f))
			b.chains[post] = append(b.chains[post], except.Accept().Rule(""))
		}
	}
	for _, out := range egressRules(n.In, n.Out) {
		b.chains[post] = append(b.chains[post], out.Within(rs.Source(f), n.Internal).Goto(chain+"/out").Rule(""))
	}
	for _, stays := range egressRules(n.In, n.Out) {
		stays.Within(rs.Source(f), n.Internal)
		if len(n.Except) > 0 {
			stays.NotInSet(chain+"/except", rs.Dest(f))
		}
		b.dropUntranslated(f, stays)
	}
	strays := rs.ID{Table: f, Name: chainInvalid}
	b.chains[strays] = append(b.chains[strays], rs.NewRule().Within(rs.Dest(f), n.External).Counter().Drop().Rule(commentInvalid))
	b.clamp(n, f)
	mark := func(r *rs.Builder) *rs.Builder {
		if n.Mark != 0 {
			r.SetCtMark(n.Mark).SetMark(n.Mark)
		}
		return r.Counter()
	}
	if n.Mark != 0 {
		s.marks = append(s.marks, n.Mark)
	}
	s.chain(f, chain+"/in", append(c.assignTimeouts(s, f, flow.Any), mark(rs.NewRule()).NATPrefix(f, true, n.Internal).Rule(""))...)
	s.chain(f, chain+"/out", append(c.assignTimeouts(s, f, flow.Any), mark(rs.NewRule()).NATPrefix(f, false, n.External).Rule(""))...)
}

// errNot returns the error for a setting that only the eBPF datapath supports.
func errNot(what string, args ...any) error {
	return fmt.Errorf(what+" needs the eBPF datapath: nftables cannot do it", args...)
}
