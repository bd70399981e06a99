// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// NATRule translates traffic that is not load-balanced. Which fields apply
// depends on Type; Validate refuses the others.
type NATRule struct {
	// Name is unique among NAT rules; it appears in rules, metrics and messages.
	Name string `yaml:"name" json:"name" jsonschema:"required"`
	// Type of the translation: masquerade and snat give inside hosts outside
	// addresses, port-forward publishes an inside endpoint, static maps addresses
	// one to one, npt66 IPv6 prefixes (RFC 6296), nat64 lets IPv6 hosts reach IPv4
	// (RFC 6146), siit translates without state (RFC 7915).
	Type NATType `yaml:"type" json:"type" jsonschema:"enum=masquerade,enum=snat,enum=port-forward,enum=static,enum=npt66,enum=nat64,enum=siit,required"`

	// Source limits masquerade, snat and nat64 to these inside prefixes.
	Source []netip.Prefix `yaml:"source,omitempty" json:"source,omitempty" jsonschema:"maxItems=4096"`
	// Except lists destinations that are not translated (RFC 6888 REQ-6). Of siit they
	// are addresses at either end, in either family.
	Except []netip.Prefix `yaml:"except,omitempty" json:"except,omitempty" jsonschema:"maxItems=4096"`
	// Out is the interface that the traffic leaves by: one, a list of them, or all with
	// names that begin alike (ppp*), whenever they come. A masquerade rule gives each
	// its own address. Of nat64 and siit it is where the translated packet leaves; of
	// siit the answers arrive by it.
	Out Interfaces `yaml:"out,omitempty" json:"out,omitempty"`
	// In is the interface that the traffic arrives by, or several, as for out. Of siit the
	// answers leave by it.
	In Interfaces `yaml:"in,omitempty" json:"in,omitempty"`
	// To holds the addresses of snat (a list), or the inside endpoint of
	// port-forward (a mapping with address and port). Of a rule that listens on one
	// range of ports the port is that for the first of them: 8000-8009 to port
	// 9000 leads 8001 to 9001. An IPv6 address for an IPv4 listener needs a nat64
	// rule for that host, whose prefix its clients appear in (RFC 6146).
	To Target `yaml:"to,omitempty" json:"to,omitzero"`
	// Ports of the outside addresses that snat, masquerade and nat64 may use: a range, or a
	// list of ranges, as a customer of MAP-E has them (RFC 7597), which hold for
	// the identifiers of ICMP too; default 512-65535, with port-block 1024-65535. Those
	// below 1024 are for inside ports below 1024, which NFS servers and NTP peers
	// may insist on, and the others for those above; nftables chooses as the kernel does.
	Ports PortSet `yaml:"ports,omitempty" json:"ports,omitzero"`
	// FullyRandom picks outside ports at random (nftables fully-random).
	FullyRandom bool `yaml:"fully-random,omitempty" json:"fully-random,omitempty"`

	// Listen is the outside address of port-forward, with its ports.
	Listen *Listen `yaml:"listen,omitempty" json:"listen,omitempty"`
	// Protocol of port-forward; default any, which takes no ports.
	Protocol flow.Protocol `yaml:"protocol,omitempty" json:"protocol,omitempty"`
	// Helper is the connection tracking helper of a port-forward; of masquerade and snat one or
	// a list of them, for the connections that inside hosts open to the protocol's
	// own port: ftp 21, tftp 69, sip 5060, pptp 1723, snmp (traps) 162, amanda 10080,
	// irc 6667. The kernel's, so that the rule goes to nftables.
	Helper Helpers `yaml:"helper,omitempty" json:"helper,omitempty"`
	// Hairpin lets inside hosts use the outside address; auto is on. Of port-forward, inside hosts are
	// those that a rule with source or in translates, and those on the target's network, with the
	// target itself, which get the address of the gateway's interface there as their source. eBPF: the
	// latter TCP and UDP.
	Hairpin Switch `yaml:"hairpin,omitempty" json:"hairpin,omitempty" jsonschema:"enum=auto,enum=on,enum=off,default=auto"`

	// External is the outside prefix of static (1:1) and npt66.
	External netip.Prefix `yaml:"external,omitempty" json:"external,omitzero" jsonschema:"type=string"`
	// Internal is the inside prefix of static (1:1) and npt66, as long as External.
	Internal netip.Prefix `yaml:"internal,omitempty" json:"internal,omitzero" jsonschema:"type=string"`

	// Prefix of nat64 and siit: an RFC 6052 prefix of length 32, 40, 48, 56, 64 or 96.
	Prefix netip.Prefix `yaml:"prefix,omitempty" json:"prefix,omitzero" jsonschema:"type=string"`
	// Pool of IPv4 addresses of nat64. Of siit one address, range or prefix of at most
	// 255, the sources of ICMP errors from IPv6 routers without an IPv4 address
	// (RFC 6791); without a pool they come from the gateway's own address.
	Pool []AddressRange `yaml:"pool,omitempty" json:"pool,omitempty" jsonschema:"maxItems=256"`
	// EAM is the explicit address mapping table of siit (RFC 7757). An IPv4
	// packet is translated when an entry names its destination; with a prefix also when
	// one names its source, as on a customer's router (RFC 6877). A rule with a prefix
	// and without entries translates all IPv4 packets between its in and out.
	// What the routing table leads to by a more specific route is not translated
	// (RFC 7915 §4.6, §5.6), nor what is for this host.
	EAM []EAMEntry `yaml:"eam,omitempty" json:"eam,omitempty" jsonschema:"maxItems=65536"`
	// TrafficClass of siit is copied from the packet (copy, default), or the same octet
	// for all, 0 to 255 (RFC 7915 §4.1, §5.1).
	TrafficClass TrafficClass `yaml:"traffic-class,omitempty" json:"traffic-class,omitzero"`
	// UDPZeroChecksum is what siit does with IPv4 UDP datagrams without a checksum
	// (RFC 7915 §4.5): compute (default) it, or drop them. First fragments of such are
	// dropped in any case.
	UDPZeroChecksum string `yaml:"udp-zero-checksum,omitempty" json:"udp-zero-checksum,omitempty" jsonschema:"enum=compute,enum=drop,default=compute"`

	// Mapping behaviour (RFC 4787); default endpoint-independent on the eBPF
	// datapath. The kernel's NAT (nftables) maps and filters by
	// address and port, and a rule that asks for more is not given to it.
	Mapping Behaviour `yaml:"mapping,omitempty" json:"mapping,omitempty" jsonschema:"enum=endpoint-independent,enum=address-and-port-dependent"`
	// Filtering behaviour (RFC 4787); default endpoint-independent on the eBPF
	// datapath.
	Filtering Behaviour `yaml:"filtering,omitempty" json:"filtering,omitempty" jsonschema:"enum=endpoint-independent,enum=address-dependent,enum=address-and-port-dependent"`
	// PortBlock gives each inside address blocks of this many ports (RFC 6888
	// REQ-14, RFC 7422); 0 allocates single ports.
	PortBlock int `yaml:"port-block,omitempty" json:"port-block,omitempty" jsonschema:"minimum=0,maximum=65535"`
	// Deterministic derives the block from the inside address (RFC 7422).
	Deterministic bool `yaml:"deterministic,omitempty" json:"deterministic,omitempty"`
	// PortsPerClient is the quota of ports of each inside address (RFC 6888
	// REQ-4); 0 for none. A freed port counts for the two minutes in which nobody
	// else gets it (REQ-8).
	PortsPerClient int `yaml:"ports-per-client,omitempty" json:"ports-per-client,omitempty" jsonschema:"minimum=0"`
	// ConnectionsPerClient is the quota of connections of each inside address
	// (RFC 6888 REQ-5); 0 for none.
	ConnectionsPerClient int `yaml:"connections-per-client,omitempty" json:"connections-per-client,omitempty" jsonschema:"minimum=0"`
	// NewConnectionsPerClient bounds the connections that each inside address
	// opens (RFC 6888 REQ-4C).
	NewConnectionsPerClient Rate `yaml:"new-connections-per-client,omitempty" json:"new-connections-per-client,omitzero"`
	// PCP lets the hosts of source ask for mappings of outside ports by the Port
	// Control Protocol (RFC 6887, RFC 6888 REQ-9) or NAT-PMP (RFC 6886) on UDP port
	// 5351 of the gateway's inside interfaces: in, else those with a network of
	// source, but for out, and there to the hosts of that network. Needs in or out.
	// eBPF datapath.
	PCP bool `yaml:"pcp,omitempty" json:"pcp,omitempty"`
	// Unreachable is the ICMP code sent when no port is left: host (RFC 6888
	// REQ-11B, default) or prohibited (RFC 5508 REQ-8).
	Unreachable string `yaml:"unreachable,omitempty" json:"unreachable,omitempty" jsonschema:"enum=host,enum=prohibited,default=host"`
	// MSSClamp lowers the TCP MSS option to what the path carries.
	MSSClamp bool `yaml:"mss-clamp,omitempty" json:"mss-clamp,omitempty"`
	// Mark is put on the rule's connections.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
	// Datapath overrides the configuration's choice for this rule.
	Datapath DatapathChoice `yaml:"datapath,omitempty" json:"datapath,omitempty" jsonschema:"enum=auto,enum=nftables,enum=ebpf"`
}

// NATType names a kind of translation.
type NATType string

// Kinds of translation.
const (
	NATMasquerade  NATType = "masquerade"
	NATSNAT        NATType = "snat"
	NATPortForward NATType = "port-forward"
	NATStatic      NATType = "static"
	NATNPT66       NATType = "npt66"
	NATNAT64       NATType = "nat64"
	NATSIIT        NATType = "siit"
)

// Behaviour is a mapping or filtering behaviour of RFC 4787.
type Behaviour string

// Behaviours.
const (
	EndpointIndependent     Behaviour = "endpoint-independent"
	AddressDependent        Behaviour = "address-dependent"
	AddressAndPortDependent Behaviour = "address-and-port-dependent"
)

// Target is what a rule translates to: a list of addresses (snat) or one inside
// endpoint (port-forward). In YAML a sequence or a mapping.
type Target struct {
	Addresses []AddressRange
	Address   netip.Addr
	Port      uint16 // 0 keeps the port
}

// Range returns the range of ports that a port-forward listens on, when that is all of them.
func (r *NATRule) Range() (flow.Ports, bool) {
	if r.Listen == nil || len(r.Listen.Ports) != 1 || r.Listen.Ports[0].Len() == 1 {
		return flow.Ports{}, false
	}
	return r.Listen.Ports[0], true
}

// Shift returns what a port-forward adds to each port of the range that it listens on; 0 when
// it keeps the port, or has a single one for all.
func (r *NATRule) Shift() uint16 {
	if p, ranged := r.Range(); ranged && r.To.Port != 0 {
		return r.To.Port - p.First
	}
	return 0
}

// Target returns where a port-forward sends what is for a port that it listens on.
func (r *NATRule) Target(port uint16) netip.AddrPort {
	_, ranged := r.Range()
	switch {
	case r.To.Port == 0:
	case ranged:
		port += r.Shift()
	default:
		port = r.To.Port
	}
	return netip.AddrPortFrom(r.To.Address, port)
}

// Crosses reports whether the target of a port-forward is an IPv6 host that listens at an IPv4
// address.
func (r *NATRule) Crosses() bool {
	return r.Type == NATPortForward && r.Listen != nil && r.Listen.Address.Is4() && r.To.Address.Is6()
}

// Translator returns the nat64 rule by which the target of such a port-forward speaks to IPv4
// hosts: the first that translates what it sends; nil when none does.
func (r *NATRule) Translator(rules []*NATRule) *NATRule {
	for _, n := range rules {
		if n.Type == NATNAT64 && n.Prefix.IsValid() && (len(n.Source) == 0 || slices.ContainsFunc(n.Source, func(p netip.Prefix) bool { return p.Contains(r.To.Address) })) {
			return n
		}
	}
	return nil
}

// EAMEntry maps an IPv4 prefix to an IPv6 prefix whose suffix is as long, or longer:
// then the bits of the IPv4 suffix stand first in it (RFC 7757 §3.3).
type EAMEntry struct {
	// IPv4 is an IPv4 address or prefix.
	IPv4 netip.Prefix `yaml:"ipv4" json:"ipv4" jsonschema:"type=string,required"`
	// IPv6 is an IPv6 address or prefix with as many addresses, or more.
	IPv6 netip.Prefix `yaml:"ipv6" json:"ipv6" jsonschema:"type=string,required"`
}

// Firewall holds what is filtered, logged or not tracked.
type Firewall struct {
	// Sets are named lists of prefixes and addresses of both families.
	Sets map[string][]netip.Prefix `yaml:"sets,omitempty" json:"sets,omitempty"`
	// Rules are tried in order within their hook.
	Rules []FirewallRule `yaml:"rules,omitempty" json:"rules,omitempty" jsonschema:"maxItems=10000"`
}

// FirewallRule matches packets and does one thing with them. Empty fields match
// everything.
type FirewallRule struct {
	// Name is unique among the rules; default rule-N by its place in the list.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// Action is what is done with a packet that matches: drop, accept, reject (an
	// answer by TCP RST or ICMP), log, notrack (no connection tracking) or mark.
	Action Action `yaml:"action" json:"action" jsonschema:"enum=drop,enum=accept,enum=reject,enum=log,enum=notrack,enum=mark,required"`
	// Hook where the rule stands: ingress (first hook, before everything),
	// prerouting, forward, input or output. Default ingress for drop and accept of
	// a set, prerouting for notrack, forward for the rest.
	Hook Hook `yaml:"hook,omitempty" json:"hook,omitempty" jsonschema:"enum=ingress,enum=prerouting,enum=forward,enum=input,enum=output"`
	// Protocol that is matched; default any.
	Protocol flow.Protocol `yaml:"protocol,omitempty" json:"protocol,omitempty"`
	// Source is a set ("@name"), a prefix or an address.
	Source Match `yaml:"source,omitempty" json:"source,omitzero"`
	// Destination is a set ("@name"), a prefix or an address.
	Destination Match `yaml:"destination,omitempty" json:"destination,omitzero"`
	// Ports are destination ports.
	Ports []flow.Ports `yaml:"ports,omitempty" json:"ports,omitempty" jsonschema:"maxItems=1024"`
	// In is the interface that the packet arrives by.
	In string `yaml:"in,omitempty" json:"in,omitempty"`
	// Out is the interface that the packet leaves by.
	Out string `yaml:"out,omitempty" json:"out,omitempty"`
	// Rate of a log rule: it logs at most that much. A drop rule drops what is
	// above it.
	Rate Rate `yaml:"rate,omitempty" json:"rate,omitzero"`
	// Burst is how many packets above the rate count as within it; default 5.
	Burst int `yaml:"burst,omitempty" json:"burst,omitempty" jsonschema:"minimum=0"`
	// Prefix of a log line, up to 127 bytes.
	Prefix string `yaml:"prefix,omitempty" json:"prefix,omitempty" jsonschema:"maxLength=127"`
	// Level of a log line; default info.
	Level LogLevel `yaml:"level,omitempty" json:"level,omitempty" jsonschema:"enum=emerg,enum=alert,enum=crit,enum=err,enum=warning,enum=notice,enum=info,enum=debug"`
	// Mark that action mark puts on the packets and their connections.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
}

// Action of a firewall rule.
type Action string

// Actions.
const (
	ActionDrop    Action = "drop"
	ActionAccept  Action = "accept"
	ActionReject  Action = "reject"
	ActionLog     Action = "log"
	ActionNotrack Action = "notrack"
	ActionMark    Action = "mark"
)

// Hook is where a firewall rule stands.
type Hook string

// Hooks.
const (
	HookIngress    Hook = "ingress"
	HookPrerouting Hook = "prerouting"
	HookForward    Hook = "forward"
	HookInput      Hook = "input"
	HookOutput     Hook = "output"
)
