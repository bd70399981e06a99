// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Uplink is one way from this host to the Internet. New connections use the usable uplinks with the lowest priority.
// A connection stays on its uplink while the uplink is usable.
type Uplink struct {
	// Name is unique among uplinks; it appears in rules, metrics and messages.
	Name string `yaml:"name" json:"name" jsonschema:"required"`
	// Interface of the provider. Its addresses, also from DHCP or PPP, are followed.
	Interface string `yaml:"interface" json:"interface" jsonschema:"required"`
	// Gateway is the next hop for its address family. Without it, the next hop is the default route by
	// the interface in the main routing table, as DHCP clients, PPP and router advertisements write it.
	Gateway netip.Addr `yaml:"gateway,omitempty" json:"gateway,omitzero" jsonschema:"type=string"`
	// Prefixes are further addresses that the provider routes to this uplink, besides the networks of
	// the interface. Packets with such a source leave only here.
	Prefixes []netip.Prefix `yaml:"prefixes,omitempty" json:"prefixes,omitempty" jsonschema:"maxItems=256"`
	// Priority class, 1 to 9, 1 first: a class gets new connections only while no better one has a
	// usable uplink; default 1.
	Priority int `yaml:"priority,omitempty" json:"priority,omitempty" jsonschema:"minimum=1,maximum=9,default=1"`
	// Weight is the share of new connections within the class, 1 to 256; default 1.
	Weight int `yaml:"weight,omitempty" json:"weight,omitempty" jsonschema:"minimum=1,maximum=256,default=1"`
	// Probe detects an uplink without a connection to the Internet. Without it, an uplink is usable
	// while its interface is up and has an address and a next hop.
	Probe *UplinkProbe `yaml:"probe,omitempty" json:"probe,omitempty"`
}

// UplinkProbe checks hosts on the Internet through one uplink.
type UplinkProbe struct {
	// Type is icmp (echo requests) or tcp (connections to port).
	Type CheckType `yaml:"type" json:"type" jsonschema:"enum=icmp,enum=tcp,required"`
	// Targets are the probed addresses. The uplink works while one of them answers.
	Targets []netip.Addr `yaml:"targets" json:"targets" jsonschema:"required,minItems=1,maxItems=8"`
	// Port of tcp.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Interval between the starts of two probes of a target, 100ms or more.
	Interval Duration `yaml:"interval,omitempty" json:"interval,omitzero" jsonschema:"default=400ms"`
	// Timeout of one probe, less than the interval; default three quarters of it.
	Timeout Duration `yaml:"timeout,omitempty" json:"timeout,omitzero"`
	// Rise is the number of consecutive successful probes after which a target is up again.
	Rise int `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"minimum=1,maximum=100,default=3"`
	// Fall is the number of consecutive failed probes after which a target is down.
	Fall int `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"minimum=1,maximum=100,default=3"`
}

// UplinkMarks are the bits of packet marks that select an uplink. Other marks of a configuration with uplinks must not
// contain them.
const UplinkMarks = 0x3f00

// defaultUplinkInterval detects a silent cut within 1.5 s by default: three intervals and the timeout of the last probe.
const defaultUplinkInterval = 400 * time.Millisecond

// Mark returns the packet mark of the uplink with an index in the configuration.
func (Uplink) Mark(index int) uint32 { return uint32(index+1) << 8 }

func (u *Uplink) setDefaults() {
	orElse(&u.Priority, 1)
	orElse(&u.Weight, 1)
	if p := u.Probe; p != nil {
		orElse(&p.Interval, Duration(defaultUplinkInterval))
		orElse(&p.Timeout, p.Interval*3/4)
		orElse(&p.Rise, 3)
		orElse(&p.Fall, 3)
	}
}

// uplinks checks the uplinks, and the rest of the configuration for keys that exclude uplinks.
func (v *validator) uplinks() {
	names, interfaces := seenNames{}, seenNames{}
	for i := range v.c.Uplinks {
		u, p := &v.c.Uplinks[i], at("uplinks").index(i)
		v.name(p.key("name"), u.Name)
		v.ifname(p.key("interface"), u.Interface)
		if first := names.recordName(u.Name, i); first >= 0 && u.Name != "" {
			v.errorf(p.key("name"), "write another name", "uplink %d has the name %s too", first+1, u.Name)
		}
		if first := interfaces.recordName(u.Interface, i); first >= 0 && u.Interface != "" {
			v.errorf(p.key("interface"), "write one uplink for each interface", "uplink %s has interface %s too", v.c.Uplinks[first].Name, u.Interface)
		}
		if len(v.c.Interfaces) > 0 && u.Interface != "" && !slices.Contains(v.c.Interfaces, u.Interface) {
			v.errorf(p.key("interface"), "add it to interfaces", "interface %s is not one of interfaces", u.Interface)
		}
		v.specialAddress(p.key("gateway"), asRouter, u.Gateway)
		for n, prefix := range u.Prefixes {
			v.special(p.key("prefixes").index(n), asSource, rangeOf(prefix))
			for j := range i + 1 {
				for m, other := range v.c.Uplinks[j].Prefixes {
					if (j < i || m < n) && other.IsValid() && other.Overlaps(prefix) {
						v.errorf(p.key("prefixes").index(n), "keep one of them", "prefix %s overlaps %s of uplink %s", prefix, other, v.c.Uplinks[j].Name)
					}
				}
			}
		}
		if u.Probe != nil {
			v.uplinkProbe(p.key("probe"), u.Probe)
		}
	}
	if len(v.c.Uplinks) > 0 {
		v.besideUplinks()
	}
}

func (v *validator) uplinkProbe(p path, k *UplinkProbe) {
	if len(k.Targets) == 0 {
		v.errorf(p.key("targets"), "write addresses on the Internet, such as [1.1.1.1, 9.9.9.9]", "there are no targets")
	}
	for i, a := range k.Targets {
		v.specialAddress(p.key("targets").index(i), asTarget, a)
		if slices.Index(k.Targets, a) < i {
			v.errorf(p.key("targets").index(i), "keep one of them", "%s is listed twice", a)
		}
	}
	switch {
	case k.Interval.D() < minInterval:
		v.errorf(p.key("interval"), "write 100ms or more", "interval %s is too short", k.Interval)
	case k.Timeout >= k.Interval:
		v.errorf(p.key("timeout"), "write less than the interval, or a longer interval",
			"timeout %s is not less than the interval of %s", k.Timeout, k.Interval).depends = []path{p.key("interval"), p.key("timeout")}
	}
	v.rules(p, []rule{
		{k.Type == CheckTCP && k.Port == 0, "port", "write port: 443", "a tcp probe needs a port"},
		{k.Type == CheckICMP && k.Port != 0, "port", "remove it", "port does not apply to a probe of type icmp"},
	})
}

// besideUplinks refuses the rest of a configuration where it would not follow the choice of the uplink. That choice is
// made by rules of nftables and connection tracking.
func (v *validator) besideUplinks() {
	onEBPF := func(p path, d DatapathChoice) {
		if d == DatapathEBPF {
			v.errorf(p.key("datapath"), "write datapath: nftables, or remove the key", "uplinks need the nftables datapath for the whole configuration")
		}
	}
	mark := func(p path, m uint32) {
		if m&UplinkMarks != 0 {
			v.errorf(p.key("mark"), fmt.Sprintf("write a mark without the bits %#x", UplinkMarks), "mark %#x has bits that select an uplink", m)
		}
	}
	onEBPF(nil, v.c.Datapath)
	if v.c.Flowtable == SwitchOn {
		v.errorf(at("flowtable"), "write flowtable: off, or remove the key", "packets in a flowtable would stay on an uplink that has failed")
	}
	for i := range v.c.Services {
		s, p := &v.c.Services[i], at("services").index(i)
		onEBPF(p, s.Datapath)
		mark(p, s.Mark)
		if s.Check != nil {
			mark(p.key("check"), s.Check.Mark)
		}
		for j := range s.Backends {
			mark(p.key("backends").index(j), s.Backends[j].Mark)
		}
	}
	for i := range v.c.Firewall.Rules {
		mark(at("firewall").key("rules").index(i), v.c.Firewall.Rules[i].Mark)
	}
	for i := range v.c.NAT {
		n, p := &v.c.NAT[i], at("nat").index(i)
		onEBPF(p, n.Datapath)
		mark(p, n.Mark)
		switch {
		case n.Type.ChecksumNeutral():
			v.errorf(p.key("type"), "write type: masquerade with an IPv6 source", "npt66 has no connections that could stay on their uplink")
		case n.Type.CrossesFamilies():
			v.errorf(p.key("type"), "run it on another gateway", "%s needs the eBPF datapath, and uplinks need the nftables datapath", n.Type)
		case n.Type.OneToOne(), n.Type.RewritesSource() && !n.Type.UsesInterfaceAddress():
			v.outOfOneUplink(p, n)
		}
	}
}

// outOfOneUplink refuses a rule with fixed outside addresses that applies to several uplinks: at most one of the
// providers routes the addresses.
func (v *validator) outOfOneUplink(p path, n *NATRule) {
	var of []string
	for _, u := range v.c.Uplinks {
		if n.Out.Has(u.Interface) {
			of = append(of, u.Name)
		}
	}
	if len(of) > 1 {
		v.errorf(p.key("out"), "write out with the interface of the provider of the addresses", "the rule applies to uplinks %s and %s, and only one provider routes its addresses", of[0], of[1])
	}
}
