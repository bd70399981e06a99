// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// natKeys lists the keys of each type of NAT rule, in addition to name, type, mark and datapath.
var natKeys = map[NATType][]string{
	NATMasquerade: {"source", "except", "in", "out", "ports", "fully-random", "hairpin", "mapping", "filtering", "port-block",
		"ports-per-client", "connections-per-client", "new-connections-per-client", "pcp", "unreachable", "mss-clamp", "helper"},
	NATSNAT: {"source", "except", "in", "out", "to", "ports", "fully-random", "hairpin", "mapping", "filtering", "port-block",
		"deterministic", "ports-per-client", "connections-per-client", "new-connections-per-client", "pcp", "unreachable", "mss-clamp", "helper"},
	NATPortForward: {"listen", "protocol", "to", "in", "helper", "hairpin", "mss-clamp"},
	NATStatic:      {"external", "internal", "in", "out", "except", "hairpin", "mss-clamp"},
	NATNPT66:       {"external", "internal", "in", "out", "except", "mss-clamp"},
	NATNAT64: {"source", "except", "in", "out", "prefix", "pool", "ports", "hairpin", "mapping", "filtering", "port-block",
		"deterministic", "ports-per-client", "connections-per-client", "new-connections-per-client", "pcp", "unreachable", "mss-clamp"},
	NATSIIT: {"prefix", "eam", "in", "out", "except", "pool", "traffic-class", "udp-zero-checksum", "mss-clamp"},
}

func (v *validator) nat() {
	names := seenNames{}
	for i := range v.c.NAT {
		r, p := &v.c.NAT[i], at("nat").index(i)
		v.name(p.key("name"), r.Name)
		if first := names.recordName(r.Name, i); first >= 0 && r.Name != "" {
			v.errorf(p.key("name"), "give each NAT rule a name of its own", "name %s is taken by nat[%d]", r.Name, first)
		}
		keys, known := natKeys[r.Type]
		if !known {
			continue
		}
		v.natApplies(p, r, keys)
		v.interfaces(p.key("in"), r.In)
		v.interfaces(p.key("out"), r.Out)
		switch {
		case r.Type.RewritesSource():
			v.sourceNAT(p, r)
			v.helpers(p, r.Helper)
		case r.Type.Forwards():
			v.portForward(p, r)
		case r.Type.OneToOne():
			v.prefixNAT(p, r)
		case r.Type.CrossesStateful():
			v.nat64(p, r)
		case r.Type.CrossesStateless():
			v.siit(p, r)
		}
		v.shares(p, r)
		v.portSet(p, r)
		if slices.Contains(keys, "pcp") {
			v.pcp(p, r)
		}
	}
}

// pcp checks the clients of the Port Control Protocol, and that the rule can create mappings.
func (v *validator) pcp(p path, r *NATRule) {
	switch {
	case !r.PCP:
	case len(r.Source) == 0:
		v.errorf(p.key("pcp"), "write source, the inside prefixes", "pcp needs source, to know the hosts that may ask").atKey = true
	case r.In == "" && r.Out == "":
		v.errorf(p.key("pcp"), "write out, the interface towards the outside, or in, the one that the hosts of source are behind",
			"pcp needs out or in, to answer nobody outside").atKey = true
	case r.Mapping == AddressAndPortDependent:
		v.errorf(p.key("pcp"), "write mapping: endpoint-independent, or remove pcp",
			"pcp maps an endpoint for every remote one, mapping %s for a single one", r.Mapping).atKey = true
	case r.Type.UsesInterfaceAddress() && r.Out.MatchesSeveral():
		v.errorf(p.key("pcp"), "make a rule for each interface, with pcp in one of them, or remove pcp",
			"pcp maps a port of one outside address, and out %s may have several", r.Out).atKey = true
	}
}

// natApplies refuses keys that the rule's type does not use.
func (v *validator) natApplies(p path, r *NATRule, keys []string) {
	rv := reflect.ValueOf(r).Elem()
	for _, f := range layoutOf(rv.Type()).fields {
		switch f.key {
		case "name", "type", "mark", "datapath":
			continue
		}
		if !slices.Contains(keys, f.key) && !rv.Field(f.index).IsZero() {
			v.errorf(p.key(f.key), "remove it; "+string(r.Type)+" takes "+strings.Join(keys, ", "),
				"%s does not apply to type %s", f.key, r.Type).atKey = true
		}
	}
}

func (v *validator) requireKey(p path, absent bool, key, hint string) {
	if absent {
		v.errorf(p.key(key), hint, "%s is missing", key)
	}
}

func (v *validator) sourceNAT(p path, r *NATRule) {
	if len(r.Source) == 0 && r.Out == "" {
		v.errorf(p, "write source, the inside prefixes, or out, the interface towards the outside",
			"neither source nor out: the rule would translate every packet").depends = []path{p.key("source")}
	}
	v.hosts(p.key("source"), r.Source)
	if r.Type.UsesInterfaceAddress() {
		return
	}
	if r.To.Address.IsValid() {
		v.errorf(p.key("to"), fmt.Sprintf("write to: [%s]", r.To.Address), "snat takes a list of addresses, not an endpoint")
		return
	}
	v.requireKey(p, len(r.To.Addresses) == 0, "to", "write to: [192.0.2.1], the outside addresses")
	v.specialRanges(p.key("to"), asSource, r.To.Addresses)
	inside := make([]AddressRange, len(r.Source))
	for i, s := range r.Source {
		inside[i] = rangeOf(s)
	}
	sources := spansOf(inside)
	for i, pool := range r.To.Addresses {
		if n := sources.indexOverlapping(pool); n >= 0 {
			v.errorf(p.key("to").index(i), "write outside addresses", "pool %s lies inside source %s", pool, r.Source[n]).depends = []path{p.key("source")}
		}
	}
	for i, s := range r.Source {
		same := func(a AddressRange) bool { return a.Is4() == s.Addr().Is4() }
		if s.IsValid() && len(r.To.Addresses) > 0 && !slices.ContainsFunc(r.To.Addresses, same) {
			v.errorf(p.key("source").index(i), "add an address of that family to the list to, or remove the prefix",
				"source %s is %s, but to has no such address", s, familyOf(s.Addr())).depends = []path{p.key("to")}
		}
	}
}

func (v *validator) portForward(p path, r *NATRule) {
	v.requireKey(p, r.Listen == nil, "listen", "write listen: {address: 192.0.2.1, ports: [80]}")
	v.requireKey(p, r.To.IsZero(), "to", "write to: {address: 10.0.0.2, port: 80}")
	if len(r.To.Addresses) > 0 {
		v.errorf(p.key("to"), fmt.Sprintf("write to: {address: %s}, or make a service to spread over several", r.To.Addresses[0].First),
			"port-forward takes one endpoint, not a list")
	}
	v.specialAddress(p.key("to").key("address"), asServer, r.To.Address)
	if v.helpers(p, r.Helper) {
		v.helper(p, Helper(r.Helper), r.Protocol)
	}
	if len(r.Helper.Each()) > 1 {
		v.errorf(p.key("helper"), "keep the one that reads what the server speaks", "a port-forward takes one helper")
	}
	if r.Listen == nil {
		return
	}
	l, lp := r.Listen, p.key("listen")
	v.listenAddress(lp, l)
	v.ifname(lp.key("interface"), l.Interface)
	depends := []path{p.key("protocol"), lp}
	if r.To.Address.IsValid() && l.Address.IsValid() {
		switch {
		case r.Crosses() && r.Translator(v.natRules()) != nil:
		case r.Crosses():
			v.errorf(p.key("to").key("address"), "add a nat64 rule with this host in source, whose prefix its clients get addresses in, or make it a service of mode fullnat",
				"%s is IPv6, but the rule listens on %s, and no nat64 rule translates for it", r.To.Address, l.Address).depends = []path{lp, at("nat")}
		case r.To.Address.Is4() != l.Address.Is4():
			v.errorf(p.key("to").key("address"), "make it a service of mode fullnat, which translates between the families",
				"%s is %s, but the rule listens on %s", r.To.Address, familyOf(r.To.Address), l.Address).depends = []path{lp}
		case r.To.Address == l.Address:
			v.errorf(p.key("to").key("address"), "write the inside address", "%s is the address that the rule listens on", r.To.Address)
		}
	}
	switch {
	case !r.Protocol.HasPorts() && len(l.Ports) > 0:
		v.errorf(lp.key("ports"), "write protocol: tcp, udp or sctp, or remove the ports", "protocol %s has no ports", r.Protocol).depends = depends
	case !r.Protocol.HasPorts() && r.To.Port != 0:
		v.errorf(p.key("to").key("port"), "write protocol: tcp, udp or sctp, or remove the port", "protocol %s has no ports", r.Protocol).depends = depends
	case r.To.Port != 0:
		span, one := r.Range()
		_, ranged := (&Service{Listen: []Listen{*l}}).portSpan()
		switch {
		case one && int(r.To.Port)+span.Len() > 1<<16:
			v.errorf(p.key("to").key("port"), fmt.Sprintf("write a port up to %d", 1<<16-span.Len()),
				"port %d is for %d, the first of %s: there are not as many ports from there on", r.To.Port, span.First, span).depends = depends
		case ranged && !one:
			v.errorf(p.key("to").key("port"), "write a rule for each range, list single ports, or remove the port so that each is kept",
				"port %d can stand for one range of ports, or for single ones", r.To.Port).depends = depends
		}
	}
}

// natRules lists the NAT rules of the configuration.
func (v *validator) natRules() (list []*NATRule) {
	for i := range v.c.NAT {
		list = append(list, &v.c.NAT[i])
	}
	return list
}

func (v *validator) prefixNAT(p path, r *NATRule) {
	v.requireKey(p, !r.External.IsValid(), "external", "write external: 198.51.100.0/24, the outside prefix")
	v.requireKey(p, !r.Internal.IsValid(), "internal", "write internal: 10.9.0.0/24, the inside prefix")
	if r.In != "" && r.In == r.Out {
		v.errorf(p.key("out"), "write in, the interface of the inside hosts, and out, the one towards the outside; of a gateway with one interface write out alone",
			"in and out are both %s: only what leaves by the interface that it came by would be translated", r.Out)
	}
	e, n := r.External, r.Internal
	if !e.IsValid() || !n.IsValid() {
		return
	}
	ip := p.key("internal")
	v.special(ip, asHosts, rangeOf(n))
	v.special(p.key("external"), asTranslated, rangeOf(e))
	switch {
	case r.Type.ChecksumNeutral() && (e.Addr().Is4() || n.Addr().Is4()):
		v.errorf(ip, "write IPv6 prefixes, or type: static", "npt66 translates IPv6 prefixes")
	case e.Addr().Is4() != n.Addr().Is4():
		v.errorf(ip, "write two prefixes of one family; siit translates between them", "internal %s and external %s are of two families", n, e).depends = []path{p.key("external")}
	case e.Bits() != n.Bits():
		v.errorf(ip, fmt.Sprintf("write a prefix of /%d", e.Bits()), "internal %s and external %s are not equally long", n, e).depends = []path{p.key("external")}
	case r.Type.ChecksumNeutral() && e.Bits() > 64:
		v.errorf(p.key("external"), "write prefixes of /64 or shorter", "npt66 needs an interface identifier of 64 bits (RFC 6296 §3.5)")
	case e.Overlaps(n):
		v.errorf(ip, "write two prefixes that share no address", "internal %s and external %s overlap", n, e)
	}
}

// rfc6052 checks the prefix that embeds IPv4 addresses in IPv6 addresses.
func (v *validator) rfc6052(p path, prefix netip.Prefix) {
	if !prefix.IsValid() {
		return
	}
	pp := p.key("prefix")
	v.special(pp, asTranslated, rangeOf(prefix))
	switch bits := prefix.Bits(); {
	case prefix.Addr().Is4():
		v.errorf(pp, "write 64:ff9b::/96 or a prefix of your own network", "prefix %s is not IPv6", prefix)
	case !slices.Contains([]int{32, 40, 48, 56, 64, 96}, bits):
		v.errorf(pp, "write a prefix of /32, /40, /48, /56, /64 or /96", "a prefix of /%d cannot hold IPv4 addresses (RFC 6052 §2.2)", bits)
	case bits == 96 && prefix.Addr().As16()[8] != 0:
		v.errorf(pp, "write a prefix whose bits 64 to 71 are zero", "prefix %s uses the bits that RFC 6052 §2.2 keeps zero", prefix)
	}
}

func (v *validator) nat64(p path, r *NATRule) {
	v.requireKey(p, !r.Prefix.IsValid(), "prefix", "write prefix: 64:ff9b::/96")
	v.requireKey(p, len(r.Pool) == 0, "pool", "write pool: [203.0.113.1], the outside IPv4 addresses")
	v.rfc6052(p, r.Prefix)
	v.hosts(p.key("source"), r.Source)
	v.specialRanges(p.key("pool"), asSource, r.Pool)
	for i, a := range r.Pool {
		if a.First.IsValid() && !a.Is4() {
			v.errorf(p.key("pool").index(i), "write IPv4 addresses", "%s is not IPv4", a)
		}
	}
	for i, s := range r.Source {
		if s.IsValid() && s.Addr().Is4() {
			v.errorf(p.key("source").index(i), "write the IPv6 prefixes of the inside", "source %s is not IPv6", s)
		} else if s.IsValid() && r.Prefix.IsValid() && s.Overlaps(r.Prefix) {
			v.errorf(p.key("source").index(i), "write the prefixes of the inside hosts", "source %s overlaps the prefix %s (RFC 6146 §3.5)", s, r.Prefix).depends = []path{p.key("prefix")}
		}
	}
}

func (v *validator) siit(p path, r *NATRule) {
	if !r.Prefix.IsValid() && len(r.EAM) == 0 {
		v.errorf(p.key("prefix"), "write prefix: 2001:db8:64::/96, or eam: [{ipv4: ..., ipv6: ...}]", "neither prefix nor eam").depends = []path{p.key("eam")}
	}
	v.rfc6052(p, r.Prefix)
	v.specialRanges(p.key("pool"), asSource, r.Pool)
	switch n := len(r.Pool); {
	case n > 1:
		v.errorf(p.key("pool").index(1), "write one address, range or prefix", "siit takes one pool for errors, these are %d", n)
	case n == 1 && r.Pool[0].First.IsValid() && !r.Pool[0].Is4():
		v.errorf(p.key("pool").index(0), "write IPv4 addresses", "%s is not IPv4", r.Pool[0])
	case n == 1 && r.Pool[0].First.IsValid() && len(poolOf(r.Pool[0])) == 0:
		v.errorf(p.key("pool").index(0), "write at most 255 addresses", "%s has more addresses than the sources of errors need", r.Pool[0])
	}
	four, six := seenNames{}, seenNames{}
	for i, e := range r.EAM {
		ep := p.key("eam").index(i)
		if !e.IPv4.IsValid() || !e.IPv6.IsValid() {
			continue
		}
		v.within(ep.key("ipv4"), asTranslated, e.IPv4)
		v.within(ep.key("ipv6"), asTranslated, e.IPv6)
		switch {
		case !e.IPv4.Addr().Is4():
			v.errorf(ep.key("ipv4"), "write an IPv4 prefix", "%s is not IPv4", e.IPv4)
		case e.IPv6.Addr().Is4():
			v.errorf(ep.key("ipv6"), "write an IPv6 prefix", "%s is not IPv6", e.IPv6)
		case 32-e.IPv4.Bits() > 128-e.IPv6.Bits():
			v.errorf(ep.key("ipv6"), fmt.Sprintf("write a prefix of /%d or shorter", e.IPv4.Bits()+96),
				"%s has fewer addresses than %s (RFC 7757 §3.1)", e.IPv6, e.IPv4).depends = []path{ep.key("ipv4")}
		}
		if first := four.recordName(e.IPv4.String(), i); first >= 0 {
			v.errorf(ep.key("ipv4"), "keep one of them", "%s is mapped by eam[%d] already", e.IPv4, first)
		}
		if first := six.recordName(e.IPv6.String(), i); first >= 0 {
			v.errorf(ep.key("ipv6"), "keep one of them", "%s is mapped by eam[%d] already", e.IPv6, first)
		}
	}
}

// poolOf returns up to 255 addresses of a range; none for a longer range.
func poolOf(r AddressRange) (list []netip.Addr) {
	for a := r.First; r.Contains(a); a = a.Next() {
		if list = append(list, a); len(list) > 255 {
			return nil
		}
	}
	return list
}

// checkSIITRules checks siit rules against each other: only one rule can translate all IPv4 packets, and
// a packet is translated once.
func (v *validator) checkSIITRules() {
	first := ""
	var mapped []AddressRange
	var of []string
	for i := range v.c.NAT {
		r := &v.c.NAT[i]
		if !r.Type.CrossesStateless() {
			continue
		}
		for _, e := range r.EAM {
			if e.IPv4.IsValid() && e.IPv4.Addr().Is4() {
				mapped, of = append(mapped, rangeOf(e.IPv4)), append(of, r.Name)
			}
		}
		if !r.Default4() {
			continue
		}
		if first != "" {
			v.errorf(at("nat").index(i).key("prefix"), "write eam: [{ipv4: ..., ipv6: ...}], the hosts that are the rule's",
				"NAT rule %s takes every IPv4 packet already: eam is missing here", first)
		}
		first = r.Name
	}
	all := spansOf(mapped)
	for i := range v.c.NAT {
		r := &v.c.NAT[i]
		if r.Type != NATSNAT {
			continue
		}
		for j, a := range r.To.Addresses {
			if n := all.indexOverlapping(a); n >= 0 && a.First.Is4() {
				v.errorf(at("nat").index(i).key("to").index(j), "remove the snat rule, and map its sources themselves in eam",
					"%s is mapped by eam of NAT rule %s: a packet is translated once, by snat or by siit", a, of[n])
			}
		}
	}
}

// Default4 reports whether a siit rule translates every IPv4 packet between its interfaces.
func (r *NATRule) Default4() bool {
	return r.Type.CrossesStateless() && r.Prefix.IsValid() && len(r.EAM) == 0 && (r.In != "" || r.Out != "")
}

// shares checks the distribution of outside ports to inside addresses.
func (v *validator) shares(p path, r *NATRule) {
	usable := r.Ports.Len()
	switch {
	case len(r.Ports) > 1: // portSet reports the error
	case r.PortBlock > usable && len(r.Ports) > 0:
		v.errorf(p.key("port-block"), fmt.Sprintf("write up to %d", usable), "a block of %d ports is larger than ports %s", r.PortBlock, r.Ports)
	case r.PortBlock > 0 && r.PortsPerClient > 0 && r.PortsPerClient < r.PortBlock:
		v.errorf(p.key("ports-per-client"), fmt.Sprintf("write %d or more", r.PortBlock), "%d ports are less than one block of %d", r.PortsPerClient, r.PortBlock)
	case r.Deterministic && r.PortBlock == 0:
		v.errorf(p.key("deterministic"), "write port-block: 1024", "deterministic needs port-block").atKey = true
	case r.Deterministic && len(r.Source) == 0:
		v.errorf(p.key("deterministic"), "write source, the inside prefixes", "deterministic needs source, to count the inside addresses").atKey = true
	}
}
