// SPDX-License-Identifier: Apache-2.0

// Package config is the YAML model: the keys of the file, their defaults, validation and JSON
// Schema. It is pure: it reads no host state. All of Sluice works on a Config that Validate
// accepts. There is no second, internal form.
package config

import (
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// Config is one whole configuration file.
type Config struct {
	// Datapath chooses the datapath. auto selects the fastest one that supports all of a rule, for
	// each rule.
	Datapath DatapathChoice `yaml:"datapath,omitempty" json:"datapath,omitempty" jsonschema:"enum=auto,enum=nftables,enum=ebpf,default=auto"`
	// Attach chooses the hook of the eBPF datapath. auto uses native XDP on network cards, and TC
	// on virtual links with a local stack behind them. While a link is up to which XDP cannot
	// transmit, such as a bridge, TC runs behind XDP. It then handles packets to such links, and
	// packets that open flows.
	Attach Attach `yaml:"attach,omitempty" json:"attach,omitempty" jsonschema:"enum=auto,enum=xdp,enum=xdp-generic,enum=tc,default=auto"`
	// Interfaces that Sluice attaches to. If empty, all interfaces that are up, except loopbacks.
	Interfaces []string `yaml:"interfaces,omitempty" json:"interfaces,omitempty" jsonschema:"maxItems=1024"`
	// Services are the load-balanced virtual addresses.
	Services []Service `yaml:"services,omitempty" json:"services,omitempty" jsonschema:"maxItems=100000"`
	// NAT holds translation of traffic that is not load-balanced.
	NAT []NATRule `yaml:"nat,omitempty" json:"nat,omitempty" jsonschema:"maxItems=10000"`
	// Firewall holds deny and allow sets, logging and notrack rules.
	Firewall Firewall `yaml:"firewall,omitempty" json:"firewall,omitzero"`
	// Established selects the treatment of open TCP and SCTP connections that a new configuration
	// would treat differently (another backend, another address, a new service or rule). keep lets
	// them end by themselves. end ends them during the apply. Connections of other protocols always
	// end, because they would otherwise last as long as the client sends. On eBPF, connections of a
	// removed service or rule always end.
	Established Established `yaml:"established,omitempty" json:"established,omitempty" jsonschema:"enum=keep,enum=end,default=keep"`
	// Timeouts of flows. Zero fields mean the default.
	Timeouts Timeouts `yaml:"timeouts,omitempty" json:"timeouts,omitzero"`
	// Tables sizes the eBPF datapath's tables.
	Tables Tables `yaml:"tables,omitempty" json:"tables,omitzero"`
	// Flowtable offloads established flows of the nftables datapath if the kernel has flowtables.
	// auto uses them if present. on fails without them.
	Flowtable Switch `yaml:"flowtable,omitempty" json:"flowtable,omitempty" jsonschema:"enum=auto,enum=on,enum=off,default=auto"`
	// HoldAddresses adds the addresses of services, port-forwards and pools to this host, if they
	// lie in a connected network and no host uses them. Sluice checks for duplicates, adds the
	// address to the interface of that network, so that the host answers ARP and neighbour
	// discovery, sends gratuitous ARP for it, and removes it at the end. off leaves this to other
	// programs, such as VRRP. Addresses outside the connected networks are reached through routers
	// and are not added.
	HoldAddresses Switch `yaml:"hold-addresses,omitempty" json:"hold-addresses,omitempty" jsonschema:"enum=on,enum=off,default=on"`
	// Uplinks are the ways to the Internet, if there are several. New connections are shared among the
	// usable ones of the best priority class. A connection stays on its uplink, and its packets have an
	// address of that uplink. Everything is then placed on nftables.
	Uplinks []Uplink `yaml:"uplinks,omitempty" json:"uplinks,omitempty" jsonschema:"maxItems=16"`
	// Cluster configures this gateway as one of several behind the same routers.
	Cluster *Cluster `yaml:"cluster,omitempty" json:"cluster,omitempty"`
	// ExecDirectory is a directory of programs that health checks of type exec may run although they
	// are not in this file. Changes by the API and the commands can use its programs, with any
	// arguments, and no others, and cannot change this key. Only root may be able to write to it.
	ExecDirectory string `yaml:"exec-directory,omitempty" json:"exec-directory,omitempty"`
	// LowestIPv6MTU is the largest packet, in bytes, that every IPv6 path behind this gateway
	// carries. IPv4 packets without DF that would become larger leave in fragments of that size
	// (RFC 7915 §4.1). Zero uses the MTU of the output link, and fragments of 1280 bytes.
	LowestIPv6MTU int `yaml:"lowest-ipv6-mtu,omitempty" json:"lowest-ipv6-mtu,omitempty" jsonschema:"minimum=0,maximum=65535"`
	// ICMPErrors controls the ICMP errors that the eBPF datapath generates: for packets that are
	// too large, have an expired TTL, or that cannot be translated (RFC 7915 §4.4). Without these
	// errors hosts do not learn the path MTU. auto is on.
	ICMPErrors Switch `yaml:"icmp-errors,omitempty" json:"icmp-errors,omitempty" jsonschema:"enum=auto,enum=on,enum=off,default=auto"`
	// ICMPErrorsPerSecond limits the generated ICMP errors a second, over all CPUs (RFC 1812
	// §4.3.2.8). 0 means 1000.
	ICMPErrorsPerSecond int `yaml:"icmp-errors-per-second,omitempty" json:"icmp-errors-per-second,omitempty" jsonschema:"minimum=0,maximum=1000000"`

	draft bool // changes are made in place; see Draft
}

// DatapathChoice names a datapath or leaves the choice to Sluice.
type DatapathChoice string

// Datapath choices.
const (
	DatapathAuto     DatapathChoice = "auto"
	DatapathNftables DatapathChoice = "nftables"
	DatapathEBPF     DatapathChoice = "ebpf"
)

// Attach names the hook of the eBPF datapath.
type Attach string

// Hooks.
const (
	AttachAuto       Attach = "auto"
	AttachXDP        Attach = "xdp"
	AttachXDPGeneric Attach = "xdp-generic"
	AttachTC         Attach = "tc"
)

// Established is the treatment of open connections when the configuration changes.
type Established string

// How a change treats open connections.
const (
	EstablishedKeep Established = "keep"
	EstablishedEnd  Established = "end"
)

// Switch is a three-way switch.
type Switch string

// Values of a switch.
const (
	SwitchAuto Switch = "auto"
	SwitchOn   Switch = "on"
	SwitchOff  Switch = "off"
)

// Timeouts after which an idle flow is removed. Zero means the default, the value recommended by
// the named RFC. Values below the RFC's minimum are refused unless Force is set.
type Timeouts struct {
	// TCPEstablished applies to TCP connections with a complete handshake. The default is the
	// minimum of RFC 5382 REQ-5.
	TCPEstablished Duration `yaml:"tcp-established,omitempty" json:"tcp-established,omitzero" jsonschema:"default=2h4m"`
	// TCPTransitory applies to TCP connections that are opening or closing. The default is the
	// minimum of RFC 5382 REQ-5.
	TCPTransitory Duration `yaml:"tcp-transitory,omitempty" json:"tcp-transitory,omitzero" jsonschema:"default=4m"`
	// UDP applies to UDP. The minimum of RFC 4787 REQ-5 is 2m.
	UDP Duration `yaml:"udp,omitempty" json:"udp,omitzero" jsonschema:"default=5m"`
	// ICMP applies to ICMP queries. The default is the minimum of RFC 5508 REQ-2.
	ICMP Duration `yaml:"icmp,omitempty" json:"icmp,omitzero" jsonschema:"default=1m"`
	// Other applies to all other protocols.
	Other Duration `yaml:"other,omitempty" json:"other,omitzero" jsonschema:"default=10m"`
	// Force accepts values below the RFC minimums.
	Force bool `yaml:"force,omitempty" json:"force,omitempty"`
}

// Tables limits the tables of the eBPF datapath. Flow tables grow with the number of flows. Zero
// allows them 1/32 of the machine's memory.
type Tables struct {
	// Flows is the maximum number of concurrent IPv4 flows.
	Flows int `yaml:"flows,omitempty" json:"flows,omitempty" jsonschema:"minimum=0,maximum=268435456"`
	// Flows6 is the maximum number of concurrent flows with an IPv6 side.
	Flows6 int `yaml:"flows6,omitempty" json:"flows6,omitempty" jsonschema:"minimum=0,maximum=268435456"`
	// HalfOpen is the maximum number of concurrent TCP flows with an incomplete handshake. The
	// default is a quarter of the flow tables.
	HalfOpen int `yaml:"half-open,omitempty" json:"half-open,omitempty" jsonschema:"minimum=0,maximum=268435456"`
	// Clients is the maximum number of clients with quotas or persistence.
	Clients int `yaml:"clients,omitempty" json:"clients,omitempty" jsonschema:"minimum=0,maximum=268435456"`
}

// Service spreads one or more virtual endpoints over backends.
type Service struct {
	// Name is unique among services; it appears in rules, metrics and messages.
	Name string `yaml:"name" json:"name" jsonschema:"required"`
	// Listen are the virtual addresses and ports.
	Listen []Listen `yaml:"listen" json:"listen" jsonschema:"required,minItems=1,maxItems=1024"`
	// Protocol is tcp, udp, sctp or any (every protocol, no port translation).
	Protocol flow.Protocol `yaml:"protocol" json:"protocol" jsonschema:"type=string,enum=tcp,enum=udp,enum=sctp,enum=any,required"`
	// Mode selects how packets reach a backend. dnat keeps the client's address; replies return
	// through the gateway. fullnat rewrites both addresses, between any families. dsr rewrites the
	// MAC address; replies bypass the gateway. tunnel encapsulates packets; replies bypass the
	// gateway. stateless rewrites addresses without flow state.
	Mode Mode `yaml:"mode" json:"mode" jsonschema:"enum=dnat,enum=fullnat,enum=dsr,enum=tunnel,enum=stateless,required"`
	// Scheduler picks the backend of a new flow; default rr, in mode stateless
	// source-hash.
	Scheduler Scheduler `yaml:"scheduler,omitempty" json:"scheduler,omitempty" jsonschema:"enum=rr,enum=wrr,enum=random,enum=source-hash,enum=symmetric-hash,enum=maglev,enum=lc,enum=wlc"`
	// SlowStart is the time after which a backend that becomes usable, or is added, receives its
	// full share of new flows. The share grows in ten steps. 1s to 1h; 0 disables it. It needs a
	// scheduler that uses weights.
	SlowStart Duration `yaml:"slow-start,omitempty" json:"slow-start,omitzero"`
	// SourcePool are the addresses that fullnat uses as source instead of the client's. If empty,
	// the address of the output interface is used.
	SourcePool []AddressRange `yaml:"source-pool,omitempty" json:"source-pool,omitempty" jsonschema:"maxItems=256"`
	// Hairpin lets clients on the network of a backend of mode dnat, and the backend itself, use
	// the service. Their source becomes the address of the gateway's interface in that network,
	// because the server would otherwise answer them directly. auto is on. eBPF: TCP and UDP.
	Hairpin Switch `yaml:"hairpin,omitempty" json:"hairpin,omitempty" jsonschema:"enum=auto,enum=on,enum=off"`
	// Persistence keeps a client on its backend for longer than one flow.
	Persistence *Persistence `yaml:"persistence,omitempty" json:"persistence,omitempty"`
	// Sessions assigns clients to backends permanently.
	Sessions []Session `yaml:"sessions,omitempty" json:"sessions,omitempty" jsonschema:"maxItems=65536"`
	// Backends are the real servers. With backends-from there may be none.
	Backends []Backend `yaml:"backends" json:"backends" jsonschema:"maxItems=4096"`
	// BackendsFrom discovers further backends while the gateway runs.
	BackendsFrom *BackendsFrom `yaml:"backends-from,omitempty" json:"backends-from,omitempty"`
	// Check detects which backends work. Without a check all backends are up.
	Check *Check `yaml:"check,omitempty" json:"check,omitempty"`
	// WhenDown is the answer to clients while no backend is usable, and to packets for other ports
	// of the service's addresses, unless the host owns the address or is connected to its network.
	// The default is reset (TCP RST; ICMP port unreachable for other protocols).
	WhenDown WhenDown `yaml:"when-down,omitempty" json:"when-down,omitempty" jsonschema:"enum=reset,enum=reject,enum=drop,default=reset"`
	// Limits protect the service and its backends.
	Limits Limits `yaml:"limits,omitempty" json:"limits,omitzero"`
	// Allow names firewall sets: only their sources may connect.
	Allow []string `yaml:"allow,omitempty" json:"allow,omitempty" jsonschema:"maxItems=256"`
	// Deny names firewall sets: their sources may not connect.
	Deny []string `yaml:"deny,omitempty" json:"deny,omitempty" jsonschema:"maxItems=256"`
	// Mark is set on the service's connections (ct mark) and packets. 0 means none.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
	// Helper is the connection tracking helper of the service's protocol.
	Helper Helper `yaml:"helper,omitempty" json:"helper,omitempty" jsonschema:"enum=ftp,enum=tftp,enum=sip,enum=pptp,enum=snmp,enum=amanda,enum=irc"`
	// Log logs new connections, rate-limited.
	Log *Log `yaml:"log,omitempty" json:"log,omitempty"`
	// Tunnel is the encapsulation of mode tunnel; default ipip.
	Tunnel *Tunnel `yaml:"tunnel,omitempty" json:"tunnel,omitempty"`
	// ClientAddress sends the client's address to fullnat backends.
	ClientAddress ClientAddress `yaml:"client-address,omitempty" json:"client-address,omitempty" jsonschema:"enum=none,enum=toa,enum=proxy-v2,default=none"`
	// SYNCookies answers SYNs with cookies in the datapath while handshakes fill at least half of
	// tables.half-open (ebpf; modes dnat and fullnat, protocol tcp, without client-address).
	SYNCookies bool `yaml:"syn-cookies,omitempty" json:"syn-cookies,omitempty"`
	// MSSClamp lowers the TCP MSS option to the path's limit (ebpf; nftables "rt mtu").
	MSSClamp bool `yaml:"mss-clamp,omitempty" json:"mss-clamp,omitempty"`
	// Datapath overrides the configuration's choice for this service.
	Datapath DatapathChoice `yaml:"datapath,omitempty" json:"datapath,omitempty" jsonschema:"enum=auto,enum=nftables,enum=ebpf"`

	backup []AddressRange // see Backup
}

// Listen is one virtual address with its ports.
type Listen struct {
	// Address is one virtual address, IPv4 or IPv6. Without an address the listener follows the
	// address of interface: its first global address in each family of the backends, or of a
	// port-forward's target. The first one of IPv6 is the oldest static one; without a static one,
	// the newest. Other ports of that address remain the host's. Listeners that name the address
	// take precedence.
	Address netip.Addr `yaml:"address,omitempty" json:"address,omitzero" jsonschema:"type=string"`
	// Ports of the address; if empty, every port (protocol any, or a service for all ports of its
	// protocol).
	Ports []flow.Ports `yaml:"ports,omitempty" json:"ports,omitempty" jsonschema:"maxItems=1024"`
	// Interface restricts the listener to packets that arrive there. Other ports of the address are
	// then left to the owner of the address. Without address, it names the interface whose address
	// is used, wherever packets arrive.
	Interface string `yaml:"interface,omitempty" json:"interface,omitempty"`
}

// Follows reports whether the listener follows the address of its interface.
func (l Listen) Follows() bool { return !l.Address.IsValid() && l.Interface != "" }

// Mode selects how a service's packets reach a backend.
type Mode string

// Modes; see docs/guide/concepts.md.
const (
	ModeDNAT      Mode = "dnat"
	ModeFullNAT   Mode = "fullnat"
	ModeDSR       Mode = "dsr"
	ModeTunnel    Mode = "tunnel"
	ModeStateless Mode = "stateless"
)

// Scheduler picks the backend of a new flow.
type Scheduler string

// Schedulers.
const (
	SchedulerRR            Scheduler = "rr"             // Smooth round robin; weights are ignored.
	SchedulerWRR           Scheduler = "wrr"            // Smooth weighted round robin.
	SchedulerRandom        Scheduler = "random"         // Weighted random.
	SchedulerSourceHash    Scheduler = "source-hash"    // Maglev table over the source address.
	SchedulerSymmetricHash Scheduler = "symmetric-hash" // Same backend for both directions of a tuple.
	SchedulerMaglev        Scheduler = "maglev"         // Maglev table over source address and port, destination address and port.
	SchedulerLC            Scheduler = "lc"             // Fewest flows (ebpf).
	SchedulerWLC           Scheduler = "wlc"            // Fewest flows per weight (ebpf).
)

// Backend is one real server.
type Backend struct {
	// Name is unique within the service; default the address.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// Address of the server.
	Address netip.Addr `yaml:"address" json:"address" jsonschema:"type=string,required"`
	// Port of the server; 0 keeps the port that the client addressed.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Weight is the share of new flows, 1 to 256; default 1.
	Weight int `yaml:"weight,omitempty" json:"weight,omitempty" jsonschema:"minimum=1,maximum=256,default=1"`
	// Priority class, 1 to 9, 1 first: a class is used only while no better one
	// has a usable backend; default 1.
	Priority int `yaml:"priority,omitempty" json:"priority,omitempty" jsonschema:"minimum=1,maximum=9,default=1"`
	// Drain stops new flows; existing flows continue.
	Drain bool `yaml:"drain,omitempty" json:"drain,omitempty"`
	// MaxConnections is the limit of concurrent connections to this backend; 0 means no limit.
	MaxConnections int `yaml:"max-connections,omitempty" json:"max-connections,omitempty" jsonschema:"minimum=0,maximum=4294967295"`
	// MAC of the server for dsr; default: learned from the neighbour table.
	MAC MAC `yaml:"mac,omitempty" json:"mac,omitzero" jsonschema:"type=string"`
	// Mark is set on the connections of this backend.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
}

// PersistenceKey is a part of a packet that identifies a client.
type PersistenceKey string

// Persistence keys.
const (
	KeySourceAddress PersistenceKey = "source-address"
	KeySourcePort    PersistenceKey = "source-port"
	KeySourceMAC     PersistenceKey = "source-mac"
	KeyDestAddress   PersistenceKey = "destination-address"
	KeyDestPort      PersistenceKey = "destination-port"
	KeyDestMAC       PersistenceKey = "destination-mac"
)

// Persistence assigns a client to one backend.
type Persistence struct {
	// Key lists the fields that identify the client; default [source-address].
	Key []PersistenceKey `yaml:"key,omitempty" json:"key,omitempty" jsonschema:"maxItems=6"`
	// Timeout since the client's last new flow.
	Timeout Duration `yaml:"timeout,omitempty" json:"timeout,omitzero" jsonschema:"default=5m"`
	// Size limits the number of remembered clients.
	Size int `yaml:"size,omitempty" json:"size,omitempty" jsonschema:"minimum=1,maximum=268435456,default=65536"`
}

// Session assigns one client to one backend.
type Session struct {
	// Client is an address or a prefix. The longest matching prefix decides, in any order of the
	// list.
	Client netip.Prefix `yaml:"client" json:"client" jsonschema:"type=string,required"`
	// Backend is the name of one of the service's backends.
	Backend string `yaml:"backend" json:"backend" jsonschema:"required"`
}

// WhenDown is the answer to clients while a service has no usable backend.
type WhenDown string

// Answers while no backend is usable.
const (
	WhenDownReset  WhenDown = "reset"  // TCP RST; ICMP port unreachable for other protocols.
	WhenDownReject WhenDown = "reject" // ICMP port unreachable.
	WhenDownDrop   WhenDown = "drop"   // Silence.
)

// Limits protect a service. Zero means no limit.
type Limits struct {
	// NewConnections limits new connections of the whole service.
	NewConnections Rate `yaml:"new-connections,omitempty" json:"new-connections,omitzero"`
	// NewConnectionsPerClient limits new connections of each source address (IPv6: of each /64).
	NewConnectionsPerClient Rate `yaml:"new-connections-per-client,omitempty" json:"new-connections-per-client,omitzero"`
	// Connections limits concurrent connections of the whole service.
	Connections int `yaml:"connections,omitempty" json:"connections,omitempty" jsonschema:"minimum=0,maximum=4294967295"`
	// ConnectionsPerClient limits concurrent connections of each source address (IPv6: of each
	// /64).
	ConnectionsPerClient int `yaml:"connections-per-client,omitempty" json:"connections-per-client,omitempty" jsonschema:"minimum=0,maximum=16777214"`
	// ConnectionsPerBackend limits concurrent connections of each backend.
	ConnectionsPerBackend int `yaml:"connections-per-backend,omitempty" json:"connections-per-backend,omitempty" jsonschema:"minimum=0,maximum=4294967295"`
	// ResetRate limits TCP RSTs from clients.
	ResetRate Rate `yaml:"reset-rate,omitempty" json:"reset-rate,omitzero"`
	// StrictTCP drops new TCP flows that do not begin with a plain SYN, and packets that conntrack
	// marks as invalid.
	StrictTCP bool `yaml:"strict-tcp,omitempty" json:"strict-tcp,omitempty"`
}

// Helper is a connection tracking helper (application layer gateway).
type Helper string

// Helpers are one or several helpers, separated by commas: "ftp,tftp". In YAML and JSON one word,
// or a list of words.
type Helpers string

// Each lists the helpers.
func (h Helpers) Each() (list []Helper) {
	for _, w := range splitWords(string(h)) {
		list = append(list, Helper(w))
	}
	return list
}

// MarshalJSON writes one word, or a list.
func (h Helpers) MarshalJSON() ([]byte, error) { return marshalWords(string(h)) }

// UnmarshalJSON is the inverse of MarshalJSON.
func (h *Helpers) UnmarshalJSON(b []byte) (err error) {
	*(*string)(h), err = unmarshalWords("helper", b)
	return err
}

// Log logs new connections of a service.
type Log struct {
	// Prefix of each line, up to 127 bytes.
	Prefix string `yaml:"prefix,omitempty" json:"prefix,omitempty" jsonschema:"maxLength=127"`
	// Rate limits the logged lines; default 10/second.
	Rate Rate `yaml:"rate,omitempty" json:"rate,omitzero" jsonschema:"default=10/second"`
	// Burst is the number of lines logged above the rate.
	Burst int `yaml:"burst,omitempty" json:"burst,omitempty" jsonschema:"minimum=1,default=5"`
	// Level of the lines, a syslog level.
	Level LogLevel `yaml:"level,omitempty" json:"level,omitempty" jsonschema:"enum=emerg,enum=alert,enum=crit,enum=err,enum=warning,enum=notice,enum=info,enum=debug,default=info"`
}

// LogLevel is a syslog level; default info.
type LogLevel string

// Tunnel is the encapsulation towards the backends of a service in mode tunnel.
type Tunnel struct {
	// Type is ipip (4in4, 4in6, 6in6 by the families of client and backend) or gue.
	Type TunnelType `yaml:"type,omitempty" json:"type,omitempty" jsonschema:"enum=ipip,enum=gue,default=ipip"`
	// Port is the UDP destination port of gue; default 6080 (IANA).
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
}

// TunnelType names an encapsulation.
type TunnelType string

// Encapsulations.
const (
	TunnelIPIP TunnelType = "ipip"
	TunnelGUE  TunnelType = "gue"
)

// ClientAddress is a method that carries the client's address to a fullnat backend.
type ClientAddress string

// Methods that carry the client's address.
const (
	ClientAddressNone    ClientAddress = "none"
	ClientAddressTOA     ClientAddress = "toa"      // TCP option 254 on the first data segment.
	ClientAddressProxyV2 ClientAddress = "proxy-v2" // PROXY protocol version 2 header.
)
