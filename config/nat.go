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
	// Type of the translation. masquerade and snat give inside hosts outside addresses.
	// port-forward publishes an inside endpoint. static maps addresses one to one. npt66 maps IPv6
	// prefixes (RFC 6296). nat64 connects IPv6 hosts to IPv4 (RFC 6146). siit translates without
	// state (RFC 7915).
	Type NATType `yaml:"type" json:"type" jsonschema:"enum=masquerade,enum=snat,enum=port-forward,enum=static,enum=npt66,enum=nat64,enum=siit,required"`

	// Source limits masquerade, snat and nat64 to these inside prefixes.
	Source []netip.Prefix `yaml:"source,omitempty" json:"source,omitempty" jsonschema:"maxItems=4096"`
	// Except lists destinations that are not translated (RFC 6888 REQ-6). For siit, addresses at
	// either end, in either family.
	Except []netip.Prefix `yaml:"except,omitempty" json:"except,omitempty" jsonschema:"maxItems=4096"`
	// Out is the output interface: one, a list, or a pattern (ppp*), which also matches interfaces
	// that appear later. A masquerade rule uses the address of each interface. For nat64 and siit,
	// the interface where the translated packet leaves; for siit, replies arrive there.
	Out Interfaces `yaml:"out,omitempty" json:"out,omitempty"`
	// In is the input interface: one, a list or a pattern, like out. For siit, replies leave there.
	In Interfaces `yaml:"in,omitempty" json:"in,omitempty"`
	// To has the addresses of snat (a list), or the inside endpoint of port-forward (a mapping with
	// address and port). If the rule listens on one range of ports, port is the target of the
	// first: with 8000-8009 and port 9000, 8001 becomes 9001. An IPv6 address for an IPv4 listener
	// needs a nat64 rule for that host; clients appear within its prefix (RFC 6146).
	To Target `yaml:"to,omitempty" json:"to,omitzero"`
	// Ports of the outside addresses that snat, masquerade and nat64 may use: a range, or a list of
	// ranges such as a MAP-E port set (RFC 7597). They also apply to ICMP identifiers. The default
	// is 512-65535, with port-block 1024-65535. Ports below 1024 are for inside ports below 1024,
	// which NFS servers and NTP peers may require. Other inside ports use the rest. nftables
	// selects as the kernel does.
	Ports PortSet `yaml:"ports,omitempty" json:"ports,omitzero"`
	// FullyRandom selects outside ports at random (nftables fully-random).
	FullyRandom bool `yaml:"fully-random,omitempty" json:"fully-random,omitempty"`

	// Listen is the outside address of port-forward, with its ports.
	Listen *Listen `yaml:"listen,omitempty" json:"listen,omitempty"`
	// Protocol of port-forward; default any, without ports.
	Protocol flow.Protocol `yaml:"protocol,omitempty" json:"protocol,omitempty"`
	// Helper is the conntrack helper of a port-forward. For masquerade and snat, one helper or a
	// list, for connections that inside hosts open to the protocol's own port: ftp 21, tftp 69, sip
	// 5060, pptp 1723, snmp (traps) 162, amanda 10080, irc 6667. Helpers belong to the kernel, so
	// the rule is placed on nftables.
	Helper Helpers `yaml:"helper,omitempty" json:"helper,omitempty"`
	// Hairpin lets inside hosts use the outside address. auto is on. For port-forward, inside hosts
	// are those that a rule with source or in translates, and those on the target's network,
	// including the target. The latter get the address of the gateway's interface in that network
	// as source. On eBPF, the latter are limited to TCP and UDP.
	Hairpin Switch `yaml:"hairpin,omitempty" json:"hairpin,omitempty" jsonschema:"enum=auto,enum=on,enum=off,default=auto"`

	// External is the outside prefix of static (1:1) and npt66.
	External netip.Prefix `yaml:"external,omitempty" json:"external,omitzero" jsonschema:"type=string"`
	// Internal is the inside prefix of static (1:1) and npt66, with the length of External.
	Internal netip.Prefix `yaml:"internal,omitempty" json:"internal,omitzero" jsonschema:"type=string"`

	// Prefix of nat64 and siit: an RFC 6052 prefix of length 32, 40, 48, 56, 64 or 96.
	Prefix netip.Prefix `yaml:"prefix,omitempty" json:"prefix,omitzero" jsonschema:"type=string"`
	// Pool of IPv4 addresses of nat64. For siit: one address, range or prefix with at most 255
	// addresses, the sources of ICMP errors from IPv6 routers without an IPv4 address (RFC 6791).
	// Without a pool they have the gateway's own address.
	Pool []AddressRange `yaml:"pool,omitempty" json:"pool,omitempty" jsonschema:"maxItems=256"`
	// EAM is the explicit address mapping table of siit (RFC 7757). An IPv4 packet is translated if
	// an entry contains its destination, and with a prefix also if an entry contains its source, as
	// on a customer's router (RFC 6877). A rule with a prefix and without entries translates all
	// IPv4 packets between its in and out. Destinations with a more specific route in the routing
	// table are not translated (RFC 7915 §4.6, §5.6). Neither are packets for this host.
	EAM []EAMEntry `yaml:"eam,omitempty" json:"eam,omitempty" jsonschema:"maxItems=65536"`
	// TrafficClass of siit: copied from the packet (copy, default), or one fixed value, 0 to 255
	// (RFC 7915 §4.1, §5.1).
	TrafficClass TrafficClass `yaml:"traffic-class,omitempty" json:"traffic-class,omitzero"`
	// UDPZeroChecksum selects the handling of IPv4 UDP datagrams without a checksum in siit (RFC
	// 7915 §4.5): compute (default) or drop. First fragments without a checksum are always dropped.
	UDPZeroChecksum string `yaml:"udp-zero-checksum,omitempty" json:"udp-zero-checksum,omitempty" jsonschema:"enum=compute,enum=drop,default=compute"`

	// Mapping behaviour (RFC 4787); default endpoint-independent on the eBPF datapath. The kernel's
	// NAT (nftables) maps and filters by address and port. A rule that requests another behaviour
	// is not placed there.
	Mapping Behaviour `yaml:"mapping,omitempty" json:"mapping,omitempty" jsonschema:"enum=endpoint-independent,enum=address-and-port-dependent"`
	// Filtering behaviour (RFC 4787); default endpoint-independent on the eBPF
	// datapath.
	Filtering Behaviour `yaml:"filtering,omitempty" json:"filtering,omitempty" jsonschema:"enum=endpoint-independent,enum=address-dependent,enum=address-and-port-dependent"`
	// PortBlock gives each inside address blocks of this many ports (RFC 6888
	// REQ-14, RFC 7422); 0 allocates single ports.
	PortBlock int `yaml:"port-block,omitempty" json:"port-block,omitempty" jsonschema:"minimum=0,maximum=65535"`
	// Deterministic derives the block from the inside address (RFC 7422).
	Deterministic bool `yaml:"deterministic,omitempty" json:"deterministic,omitempty"`
	// PortsPerClient is the quota of ports of each inside address (RFC 6888 REQ-4); 0 means none. A
	// freed port counts during its two minutes of hold-down (REQ-8).
	PortsPerClient int `yaml:"ports-per-client,omitempty" json:"ports-per-client,omitempty" jsonschema:"minimum=0,maximum=16777214"`
	// ConnectionsPerClient is the quota of connections of each inside address (RFC 6888 REQ-5); 0
	// means none.
	ConnectionsPerClient int `yaml:"connections-per-client,omitempty" json:"connections-per-client,omitempty" jsonschema:"minimum=0,maximum=16777214"`
	// NewConnectionsPerClient limits the new connections of each inside address (RFC 6888 REQ-4C).
	NewConnectionsPerClient Rate `yaml:"new-connections-per-client,omitempty" json:"new-connections-per-client,omitzero"`
	// PCP lets the hosts of source request mappings of outside ports by the Port Control Protocol
	// (RFC 6887, RFC 6888 REQ-9) or NAT-PMP (RFC 6886), on UDP port 5351 of the gateway's inside
	// interfaces. These are the interfaces in, else those with a network of source, except out.
	// Only hosts of that network are served. It needs in or out. eBPF datapath.
	PCP bool `yaml:"pcp,omitempty" json:"pcp,omitempty"`
	// Unreachable is the ICMP code sent if no port is free: host (RFC 6888 REQ-11B, default) or
	// prohibited (RFC 5508 REQ-8).
	Unreachable string `yaml:"unreachable,omitempty" json:"unreachable,omitempty" jsonschema:"enum=host,enum=prohibited,default=host"`
	// MSSClamp lowers the TCP MSS option to the path's limit.
	MSSClamp bool `yaml:"mss-clamp,omitempty" json:"mss-clamp,omitempty"`
	// Mark is set on the rule's connections.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
	// Datapath overrides the configuration's choice for this rule.
	Datapath DatapathChoice `yaml:"datapath,omitempty" json:"datapath,omitempty" jsonschema:"enum=auto,enum=nftables,enum=ebpf"`

	backup []AddressRange // see Backup
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

// NAT behaviours of RFC 4787.
const (
	EndpointIndependent     Behaviour = "endpoint-independent"
	AddressDependent        Behaviour = "address-dependent"
	AddressAndPortDependent Behaviour = "address-and-port-dependent"
)

// Target is the new endpoint of a rule: a list of addresses (snat) or one inside endpoint
// (port-forward). In YAML a sequence or a mapping.
type Target struct {
	Addresses []AddressRange
	Address   netip.Addr
	Port      uint16 // 0 means that the port is kept
}

// Range returns the port range of a port-forward's listener, if the listener has exactly one range.
func (r *NATRule) Range() (flow.Ports, bool) {
	if r.Listen == nil || len(r.Listen.Ports) != 1 || r.Listen.Ports[0].Len() == 1 {
		return flow.Ports{}, false
	}
	return r.Listen.Ports[0], true
}

// Shift returns the offset that a port-forward adds to each port of its range. It is 0 if the rule
// keeps the port, or has one target port.
func (r *NATRule) Shift() uint16 {
	if p, ranged := r.Range(); ranged && r.To.Port != 0 {
		return r.To.Port - p.First
	}
	return 0
}

// Target returns the inside endpoint for a port of the listener.
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

// Crosses reports whether a port-forward has an IPv4 listener and an IPv6 target.
func (r *NATRule) Crosses() bool {
	return r.Listens() && r.Listen.Address.Is4() && r.To.Address.Is6()
}

// Translator returns the first nat64 rule that translates the target of a port-forward between
// families, or nil.
func (r *NATRule) Translator(rules []*NATRule) *NATRule {
	for _, n := range rules {
		if n.Type.CrossesStateful() && n.Prefix.IsValid() && (len(n.Source) == 0 || slices.ContainsFunc(n.Source, func(p netip.Prefix) bool { return p.Contains(r.To.Address) })) {
			return n
		}
	}
	return nil
}

// EAMEntry maps an IPv4 prefix to an IPv6 prefix with an equal or longer suffix. The IPv4 suffix
// fills the first bits of a longer one (RFC 7757 §3.3).
type EAMEntry struct {
	// IPv4 is an IPv4 address or prefix.
	IPv4 netip.Prefix `yaml:"ipv4" json:"ipv4" jsonschema:"type=string,required"`
	// IPv6 is an IPv6 address or prefix with as many addresses, or more.
	IPv6 netip.Prefix `yaml:"ipv6" json:"ipv6" jsonschema:"type=string,required"`
}

// Firewall has the rules that filter, log or exclude packets from conntrack.
type Firewall struct {
	// Sets are named lists of prefixes and addresses of both families.
	Sets map[string][]netip.Prefix `yaml:"sets,omitempty" json:"sets,omitempty"`
	// Rules are evaluated in order within their hook.
	Rules []FirewallRule `yaml:"rules,omitempty" json:"rules,omitempty" jsonschema:"maxItems=10000"`
}

// FirewallRule matches packets and applies one action. Empty fields match everything.
type FirewallRule struct {
	// Name is unique among the rules; default rule-N by its place in the list.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// Action for a matching packet: drop, accept, reject (TCP RST or an ICMP error), log, notrack
	// (no conntrack) or mark.
	Action Action `yaml:"action" json:"action" jsonschema:"enum=drop,enum=accept,enum=reject,enum=log,enum=notrack,enum=mark,required"`
	// Hook of the rule: ingress (first hook), prerouting, forward, input or output. The default is
	// ingress for drop and accept of a set, prerouting for notrack, and forward for all others.
	Hook Hook `yaml:"hook,omitempty" json:"hook,omitempty" jsonschema:"enum=ingress,enum=prerouting,enum=forward,enum=input,enum=output"`
	// Protocol that is matched; default any.
	Protocol flow.Protocol `yaml:"protocol,omitempty" json:"protocol,omitempty"`
	// Source is a set ("@name"), a prefix or an address.
	Source Match `yaml:"source,omitempty" json:"source,omitzero"`
	// Destination is a set ("@name"), a prefix or an address.
	Destination Match `yaml:"destination,omitempty" json:"destination,omitzero"`
	// Ports are destination ports.
	Ports []flow.Ports `yaml:"ports,omitempty" json:"ports,omitempty" jsonschema:"maxItems=1024"`
	// In is the input interface.
	In string `yaml:"in,omitempty" json:"in,omitempty"`
	// Out is the output interface.
	Out string `yaml:"out,omitempty" json:"out,omitempty"`
	// Rate limits a log rule. A drop rule drops the packets above its rate.
	Rate Rate `yaml:"rate,omitempty" json:"rate,omitzero"`
	// Burst is the number of packets above the rate that still count as within it; default 5.
	Burst int `yaml:"burst,omitempty" json:"burst,omitempty" jsonschema:"minimum=0"`
	// Prefix of a log line, up to 127 bytes.
	Prefix string `yaml:"prefix,omitempty" json:"prefix,omitempty" jsonschema:"maxLength=127"`
	// Level of a log line; default info.
	Level LogLevel `yaml:"level,omitempty" json:"level,omitempty" jsonschema:"enum=emerg,enum=alert,enum=crit,enum=err,enum=warning,enum=notice,enum=info,enum=debug"`
	// Mark that action mark sets on packets and their connections.
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

// Hook is the hook of a firewall rule.
type Hook string

// Hooks.
const (
	HookIngress    Hook = "ingress"
	HookPrerouting Hook = "prerouting"
	HookForward    Hook = "forward"
	HookInput      Hook = "input"
	HookOutput     Hook = "output"
)
