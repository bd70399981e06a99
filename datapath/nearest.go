// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Nearest describes the closest object for a packet that matches no service or NAT rule. It returns the object with
// the most satisfied conditions and its first unsatisfied condition; "" if no object has the packet's address. in and
// out are the packet's input and output interface, "" if unknown.
func Nearest(c *config.Config, t flow.Tuple, in, out string) string {
	n := nearestMatch{t: t, in: in, out: out}
	for i := range c.Services {
		for _, l := range c.Services[i].Listen {
			n.listener("service "+c.Services[i].Name, l, c.Services[i].Protocol, "")
		}
	}
	for i := range c.NAT {
		n.rule(&c.NAT[i])
	}
	return n.text
}

// nearestMatch holds the best candidate: among the candidates with the packet's address, the first with the most satisfied
// conditions.
type nearestMatch struct {
	t       flow.Tuple
	in, out string
	met     int
	text    string
}

// condition is one condition of a rule.
type condition struct {
	met bool
	why string // the reason why the condition is not satisfied
}

// evaluate evaluates a candidate's conditions in order. The first is its address: without a match there, it is not a
// candidate.
func (n *nearestMatch) evaluate(who string, list ...condition) {
	met := 0
	for _, c := range list {
		if !c.met {
			break
		}
		met++
	}
	if met > n.met && met < len(list) {
		n.met, n.text = met, who+" is nearest: "+list[met].why
	}
}

func (n *nearestMatch) listener(who string, l config.Listen, protocol flow.Protocol, in config.Interfaces) {
	port, have := n.t.Dest.Port(), "no port"
	if n.t.Protocol.HasPorts() {
		have = fmt.Sprintf("%d", port)
	}
	ports := len(l.Ports) == 0 || n.t.Protocol.HasPorts() && slices.ContainsFunc(l.Ports, func(p flow.Ports) bool { return p.First <= port && port <= p.Last })
	at := in
	if l.Interface != "" {
		at = config.Interfaces(l.Interface)
	}
	n.evaluate(who,
		condition{l.Address == n.t.Dest.Addr(), ""},
		condition{protocol == flow.Any || protocol == n.t.Protocol, fmt.Sprintf("it takes protocol %s, not %s", protocol, n.t.Protocol)},
		condition{ports, fmt.Sprintf("on %s it takes ports %v, not %s", l.Address, l.Ports, have)},
		condition{at.Has(n.in), fmt.Sprintf("it takes packets that arrive by %s, not by %s", at, n.in)})
}

func (n *nearestMatch) rule(r *config.NATRule) {
	who, source, dest := "nat rule "+r.Name, n.t.Source.Addr(), n.t.Dest.Addr()
	within := func(list []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	in := condition{r.In.Has(n.in), fmt.Sprintf("it takes packets that arrive by %s, not by %s", r.In, n.in)}
	out := condition{n.out == "" || r.Out.Has(n.out), fmt.Sprintf("it takes packets that leave by %s, and this one leaves by %s", r.Out, n.out)}
	except := condition{!within(r.Except, dest), fmt.Sprintf("%s is among its exceptions", dest)}
	switch {
	case r.Type.Forwards():
		n.listener(who, *r.Listen, r.Protocol, r.In)
	case r.Type.HasBindings():
		any := len(r.Source) == 0 && source.Is4() != r.Type.CrossesStateful()
		list := []condition{{any || within(r.Source, source), ""}}
		if r.Type.CrossesStateful() {
			list = append(list, condition{r.Prefix.Contains(dest), fmt.Sprintf("it translates packets to %s, not to %s", r.Prefix, dest)})
		}
		n.evaluate(who, append(list, in, out, except)...)
	case r.Type.OneToOne():
		n.evaluate(who, condition{r.Internal.Contains(source), ""}, in, out, except)
	case r.Type.CrossesStateless():
		n.evaluate(who, condition{r.Prefix.Contains(dest) || slices.ContainsFunc(r.EAM, func(e config.EAMEntry) bool {
			return e.IPv4.Contains(dest) || e.IPv6.Contains(dest)
		}), ""}, in, except, condition{r.Prefix.Contains(source) || slices.ContainsFunc(r.EAM, func(e config.EAMEntry) bool {
			return e.IPv4.Contains(source) || e.IPv6.Contains(source)
		}), fmt.Sprintf("it has no mapping for the source %s", source)})
	}
}

// OneNetwork returns the connected network of the host that contains both addresses. Hosts in it reach each other
// without this host.
func OneNetwork(networks []netip.Prefix, a, b netip.Addr) (netip.Prefix, bool) {
	for _, p := range networks {
		if !p.IsSingleIP() && p.Contains(a) && p.Contains(b) {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// Connected returns the longest connected network of a host that contains an address, or the address alone if there
// is none.
func Connected(networks []netip.Prefix, a netip.Addr) (best netip.Prefix, ok bool) {
	for _, p := range networks {
		if p.Contains(a) && (!ok || p.Bits() > best.Bits()) {
			best, ok = p, true
		}
	}
	if !ok {
		best = netip.PrefixFrom(a, a.BitLen())
	}
	return best, ok
}

// Turns reports whether clients on the network of a service's backend get an address of the gateway as source, so
// that the backend answers through the gateway.
func Turns(s *config.Service) bool {
	return s.Mode == config.ModeDNAT && s.Hairpin != config.SwitchOff
}

// Turns reports whether the gateway translates the source of clients on the network of the service's backends. The
// backend then answers through the gateway.
func AnswersBypass(s *Snapshot, networks []netip.Prefix, e *Explanation) string {
	server, remedy := directServer(s, e.Owner)
	client, to := e.Before.Source.Addr(), e.After.Dest.Addr()
	if server == "" || e.After.Source.Addr() != client || to == e.Before.Dest.Addr() {
		return ""
	}
	p, one := OneNetwork(networks, client, to)
	if !one {
		return ""
	}
	if client == to {
		return fmt.Sprintf("the client is the %s itself, which answers itself under its own address: the connection does not open; use %s for clients on %s", server, remedy, p)
	}
	return fmt.Sprintf("the %s is on the client's own network %s and answers it directly, under its own address: the connection does not open; use %s", server, p, remedy)
}

// directServer describes the server that may answer clients of a service or port-forward directly, and the remedy.
func directServer(s *Snapshot, owner string) (server, remedy string) {
	if at := slices.IndexFunc(s.Services, func(svc Service) bool { return svc.Name == owner }); at >= 0 {
		if svc := s.Services[at]; svc.Mode == config.ModeDNAT || svc.Mode == config.ModeStateless {
			return "backend", hairpinSetting(svc.Service)
		}
	}
	for _, n := range s.NAT {
		if n.Name == owner && n.Type.Forwards() && n.Hairpin == config.SwitchOff {
			return "target", "hairpin: auto in nat rule " + n.Name
		}
	}
	return "", ""
}

// Unhelped returns a note if a connection opens others, which a rule without the protocol's helper does not
// translate; "" otherwise.
func Unhelped(c *config.Config, e *Explanation) string {
	at := slices.IndexFunc(c.NAT, func(n config.NATRule) bool { return n.Name == e.Owner })
	h := config.HelperFor(e.Before.Protocol, e.Before.Dest.Port())
	if at < 0 || h == "" || e.Action != "forward" || slices.Contains(c.NAT[at].Helper.Each(), h) {
		return ""
	}
	n := &c.NAT[at]
	if !n.Type.RewritesSource() && !n.Type.Forwards() {
		return ""
	}
	if n.Type.RewritesSource() && h == "tftp" && e.Datapath == "ebpf" && n.Filtering != config.AddressAndPortDependent {
		return "" // the answers have another source port, which may send to the host
	}
	return fmt.Sprintf("%s opens other connections, and those that the other side opens (as in active FTP) are not translated: "+
		"write helper: %s in nat rule %s, which nftables then carries", h, h, e.Owner)
}

// hairpinSetting returns the setting that makes backends answer their neighbours through the gateway.
func hairpinSetting(s *config.Service) string {
	if s.Mode == config.ModeDNAT && !Turns(s) {
		return "hairpin: auto, or mode fullnat,"
	}
	return "mode fullnat"
}

// Bypassed warns about services with backends on the network of a listening address: clients on that network get no
// answer through the gateway.
func Bypassed(s *Snapshot, networks []netip.Prefix) (out []string) {
	for _, svc := range s.Services {
		if svc.Mode != config.ModeDNAT && svc.Mode != config.ModeStateless || Turns(svc.Service) {
			continue
		}
		if w := bypassReason(svc.Service, networks); w != "" {
			out = append(out, w)
		}
	}
	return out
}

func bypassReason(svc *config.Service, networks []netip.Prefix) string {
	for _, l := range svc.Listen {
		for _, b := range svc.Backends {
			if p, one := OneNetwork(networks, l.Address, b.Address); one {
				return fmt.Sprintf("service %s: backend %s is on the network %s of the address %s: it answers clients on that network directly, under its own "+
					"address, and their connections do not open; use %s for them, or put backends on a network of their own", svc.Name, b.Name, p, l.Address, hairpinSetting(svc))
			}
		}
	}
	return ""
}
