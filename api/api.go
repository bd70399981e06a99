// SPDX-License-Identifier: Apache-2.0

// Package api holds the wire types of Sluice's HTTP API under /api/v1 and a
// client for it. The OpenAPI document is made from the handlers in package
// server.
package api

import (
	"encoding/json"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// Status is the daemon at a glance.
type Status struct {
	Version    string    `json:"version"`
	PID        int       `json:"pid"`
	Started    time.Time `json:"started"`
	Uptime     float64   `json:"uptime" doc:"seconds since the daemon began, whatever the clock was set to meanwhile"`
	File       string    `json:"file" doc:"configuration file that the daemon watches"`
	Revision   uint64    `json:"revision" doc:"grows by one with every change that was applied"`
	ETag       string    `json:"etag" doc:"of the configuration in force; send it as If-Match to change just that"`
	AppliedAt  time.Time `json:"applied_at"`
	Error      string    `json:"error,omitempty" doc:"why the last change was refused; the state before it is in force"`
	Datapaths  []string  `json:"datapaths" doc:"available on this host, preferred first"`
	Warnings   []string  `json:"warnings,omitempty" doc:"things on this host that keep the rules from working"`
	Services   int       `json:"services"`
	NATRules   int       `json:"nat_rules"`
	BackendsUp int       `json:"backends_up"`
	Backends   int       `json:"backends"`
	Drain      *Drain    `json:"drain,omitempty" doc:"while the whole gateway takes no new connections"`
	Uplinks    []Uplink  `json:"uplinks,omitempty" doc:"as in /uplinks; absent if the configuration has none"`
	NodeDrains bool      `json:"node_drains,omitempty" doc:"the operator withdrew the addresses that other nodes serve too"`
}

// Service is a service as it is in force.
type Service struct {
	Name      string   `json:"name"`
	Listen    []string `json:"listen" doc:"address and ports, for example 192.0.2.10:80"`
	Protocol  string   `json:"protocol"`
	Mode      string   `json:"mode"`
	Scheduler string   `json:"scheduler"`
	Datapath  string   `json:"datapath" doc:"the datapath that carries the service"`
	// Why is the reason against each faster datapath, by name.
	Why         map[string]string `json:"why,omitempty" doc:"why a faster datapath does not carry it"`
	Connections uint64            `json:"connections" doc:"new flows since the service was made"`
	Active      int               `json:"active" doc:"flows alive; -1 when unknown"`
	Packets     uint64            `json:"packets"`
	Bytes       uint64            `json:"bytes"`
	Refused     uint64            `json:"refused" doc:"new flows refused by a limit, a set, or because no backend is usable"`
	Backends    []Backend         `json:"backends"`
}

// Backend is one real server of a service.
type Backend struct {
	Service     string         `json:"service"`
	Name        string         `json:"name"`
	Address     netip.AddrPort `json:"address" doc:"port 0 keeps the port that the client asked for"`
	Weight      int            `json:"weight"`
	Priority    int            `json:"priority"`
	State       string         `json:"state" enum:"up,drain,down"`
	InUse       bool           `json:"in_use" doc:"takes new flows now"`
	Why         string         `json:"why,omitempty"`
	Drain       *Drain         `json:"drain,omitempty" doc:"while its state is drain: how far it is"`
	Connections uint64         `json:"connections"`
	Active      int            `json:"active"`
	Packets     uint64         `json:"packets"`
	Bytes       uint64         `json:"bytes"`
}

// NATRule is a NAT rule as it is in force.
type NATRule struct {
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Summary  string            `json:"summary"`
	Datapath string            `json:"datapath"`
	Why      map[string]string `json:"why,omitempty"`
	Packets  uint64            `json:"packets"`
	Bytes    uint64            `json:"bytes"`
}

// Mapping is an outside endpoint by which everybody reaches an inside host that asked
// for it (PCP, RFC 6887).
type Mapping struct {
	Rule     string         `json:"rule" doc:"NAT rule under which it was made"`
	Protocol string         `json:"protocol"`
	Inside   netip.AddrPort `json:"inside"`
	Outside  netip.AddrPort `json:"outside"`
	Expires  float64        `json:"expires" doc:"seconds left unless it is renewed"`
}

// Interface is an interface that is up, and the eBPF hook on it.
type Interface struct {
	Name  string   `json:"name"`
	Kind  string   `json:"kind" doc:"device for hardware, else the kind of virtual link"`
	Hooks []string `json:"hooks" enum:"xdp,xdp-generic,tc" doc:"in the order in which a packet meets them; none: left to the kernel"`
	Why   string   `json:"why,omitempty" doc:"why it is not native XDP alone"`
}

// Address is one or several consecutive addresses of a service or a pool, and the host that answers
// for them.
type Address struct {
	Address   string   `json:"address" doc:"one, or the first and the last with a dash between them"`
	Owners    []string `json:"owners" doc:"services and NAT rules, such as \"service web\""`
	State     string   `json:"state" enum:"held,probing,own,routed,lost,foreign,absent" doc:"held on an interface by Sluice; probing: about to be; own: the host's by somebody else's doing; routed: in no connected network; lost: was own, and its owner took it away; foreign: another station answers; absent: nobody answers"`
	Interface string   `json:"interface,omitempty" doc:"that has it, or has its network"`
	Station   string   `json:"station,omitempty" doc:"hardware address that answers for a foreign one"`
	Why       string   `json:"why,omitempty" doc:"why it is not held"`
}

// Announcement is an address of a service or a pool, and whether a route to it is announced.
type Announcement struct {
	Address string    `json:"address" doc:"an address or a prefix"`
	Owners  []string  `json:"owners" doc:"services and NAT rules, such as \"service web\""`
	State   string    `json:"state" enum:"announced,withdrawn"`
	Table   uint32    `json:"table" doc:"routing table of the route"`
	Metric  uint32    `json:"metric" doc:"metric of the route"`
	Since   time.Time `json:"since,omitzero" doc:"when the state changed; absent if it has not changed since the daemon began"`
	Why     string    `json:"why,omitempty" doc:"why it is withdrawn"`
}

// Node is one gateway of a cluster, with its part of the pools.
type Node struct {
	Name    string      `json:"name"`
	Address string      `json:"address" doc:"of the configuration"`
	This    bool        `json:"this" doc:"the node that answers"`
	State   string      `json:"state,omitempty" enum:"auto,drain" doc:"of the node that answers, and with cluster.store of each live node; drain: the operator withdrew the addresses that other nodes serve too"`
	Shared  *SharedNode `json:"shared,omitempty" doc:"the node according to the cluster's store; absent without cluster.store"`
	Pools   []NodeShare `json:"pools"`
}

// SharedNode is a node according to the cluster's store.
type SharedNode struct {
	Live     bool      `json:"live" doc:"the node has a lease in the store"`
	Revision int64     `json:"revision" doc:"of the cluster's configuration in force on the node; 0: its own file"`
	Since    time.Time `json:"since,omitzero" doc:"when the node that answers learned this revision, or that the node is no longer live; absent for a node that it has not seen"`
	Version  string    `json:"version,omitempty"`
	Refused  int64     `json:"refused,omitempty" doc:"revision that the node refused"`
	Error    string    `json:"error,omitempty" doc:"why it refused the revision"`
}

// ClusterOutcome is the result of a change of all nodes.
type ClusterOutcome struct {
	Revision int64    `json:"revision" doc:"of the store"`
	InForce  []string `json:"in_force" doc:"nodes that have the revision in force"`
	Silent   []string `json:"silent" doc:"live nodes that did not report in time"`
}

// ClusterDrain is the result of a request to another node.
type ClusterDrain struct {
	Node string `json:"node"`
	Done bool   `json:"done" doc:"the node has done it; otherwise it is not live, and does it when it is back"`
}

// SetNode begins or ends the drain of a node.
type SetNode struct {
	State string `json:"state" enum:"drain,auto" doc:"drain withdraws the addresses that other nodes serve too; auto ends the drain"`
}

// NodeState is the state of the node that answers.
type NodeState struct {
	Node      string `json:"node,omitempty" doc:"absent without cluster.nodes"`
	State     string `json:"state" enum:"drain,auto"`
	Announced int    `json:"announced" doc:"announced addresses and prefixes"`
	Withdrawn int    `json:"withdrawn" doc:"withdrawn addresses and prefixes"`
}

// NodeShare is the part of a pool that a node uses.
type NodeShare struct {
	Owner     string   `json:"owner" doc:"service or NAT rule, such as \"nat out\""`
	Addresses []string `json:"addresses" doc:"addresses and ranges from which the node allocates ports"`
	Backup    []string `json:"backup" doc:"addresses and ranges that the node announces in case that their owner fails"`
}

// Uplink is an uplink of the configuration with its state.
type Uplink struct {
	Name      string       `json:"name"`
	Interface string       `json:"interface"`
	State     string       `json:"state" enum:"carrying,standby,down" doc:"carrying: it gets new connections; standby: usable, but an uplink of a better class gets them"`
	Priority  int          `json:"priority"`
	Weight    int          `json:"weight"`
	Addresses []netip.Addr `json:"addresses" doc:"addresses of the interface"`
	Gateways  []netip.Addr `json:"gateways" doc:"next hops, at most one for each family"`
	Table     int          `json:"table" doc:"routing table with its default route"`
	Mark      uint32       `json:"mark" doc:"packet mark that selects the table"`
	Since     time.Time    `json:"since,omitzero" doc:"when the state changed; absent if it has not changed since the daemon began"`
	ShareIPv4 float64      `json:"share_ipv4" doc:"part of the new connections over IPv4, 0 to 1"`
	ShareIPv6 float64      `json:"share_ipv6" doc:"part of the new connections over IPv6, 0 to 1"`
	Why       string       `json:"why,omitempty" doc:"why it is down, or which family or probe fails"`
}

// Flow is one tracked connection.
type Flow struct {
	Protocol string         `json:"protocol"`
	Client   netip.AddrPort `json:"client" doc:"original source"`
	Dest     netip.AddrPort `json:"destination" doc:"original destination"`
	Replier  netip.AddrPort `json:"replier" doc:"who answers: the backend, after translation"`
	ReplyTo  netip.AddrPort `json:"reply_to" doc:"the source that the replier sees"`
	State    string         `json:"state,omitempty"`
	Owner    string         `json:"owner,omitempty"`
	Backend  string         `json:"backend,omitempty"`
	Datapath string         `json:"datapath"`
	Timeout  float64        `json:"timeout" doc:"seconds left when idle"`
	Packets  [2]uint64      `json:"packets" doc:"original, reply"`
	Bytes    [2]uint64      `json:"bytes" doc:"original, reply"`
}

// Flows is a bounded list of flows.
type Flows struct {
	Flows []Flow `json:"flows"`
	Total int    `json:"total" doc:"flows that match, of which at most limit are listed"`
}

// FlowLine is a line of GET /api/v1/flows/stream: a flow, or the end.
type FlowLine struct {
	*Flow
	End *FlowEnd `json:"end,omitempty"`
}

// FlowEnd is the last line. A stream without it was cut off.
type FlowEnd struct {
	Total int    `json:"total" doc:"flows that match and were listed"`
	Error string `json:"error,omitempty" doc:"why they are not all"`
}

// Outcome is the effect of a change, or of a plan.
type Outcome struct {
	Revision uint64             `json:"revision,omitempty"`
	Changes  []*datapath.Change `json:"changes"`
	Places   []Placement        `json:"places,omitempty"`
	// FlowsMoved is the number of live flows that the change ends; only in a plan.
	FlowsMoved int `json:"flows_moved"`
	FlowsTotal int `json:"flows_total"`
	// Warnings are conditions of this host that prevent the rules from working; not in a plan.
	Warnings []string `json:"warnings,omitempty"`
}

// Placement is the datapath of a service or NAT rule.
type Placement struct {
	Kind     string            `json:"kind" enum:"service,nat,rule"`
	Name     string            `json:"name"`
	Datapath string            `json:"datapath"`
	Why      map[string]string `json:"why,omitempty"`
}

// Stop asks the daemon to end.
type Stop struct {
	Keep bool `json:"keep" doc:"leave the rules in the kernel: traffic goes on"`
}

// BackendState sets the state of a backend.
type BackendState struct {
	State    string `json:"state" enum:"up,drain,down,auto" doc:"auto gives it back to configuration and check"`
	Deadline int    `json:"deadline,omitempty" minimum:"0" maximum:"2592000" doc:"of drain: seconds until it ends; 0: never"`
	Then     string `json:"then,omitempty" enum:"keep,reset" doc:"with a deadline: what becomes of the connections that are left then; default keep"`
}

// StartDrain stops new connections to the whole gateway.
type StartDrain struct {
	Deadline int    `json:"deadline,omitempty" minimum:"0" maximum:"2592000" doc:"seconds until it ends; 0: never"`
	Then     string `json:"then,omitempty" enum:"keep,reset" doc:"with a deadline: what becomes of the connections that are left then; default keep"`
}

// Drain is the progress of a draining backend or gateway.
type Drain struct {
	Until    time.Time `json:"until,omitzero" doc:"when it ends; absent: never"`
	Then     string    `json:"then,omitempty" enum:"keep,reset" doc:"what becomes of the connections that are left then"`
	Left     int       `json:"left" doc:"connections; -1: not known yet, or not at all as of services that keep none"`
	Counted  time.Time `json:"counted,omitzero" doc:"when they were counted; absent: not yet"`
	Estimate float64   `json:"estimate,omitempty" doc:"seconds until none is left, if they go on ending as they have since the drain began; absent: not known"`
}

// GatewayDrain is the drain of the whole gateway.
type GatewayDrain struct {
	Draining bool   `json:"draining"`
	Drain    *Drain `json:"drain,omitempty"`
	Backends int    `json:"backends" doc:"that take no new connections"`
}

// ConfigChanges are the run-time changes.
type ConfigChanges struct {
	File     string           `json:"file" doc:"the daemon's file, which the changes stand on top of"`
	Revision uint64           `json:"revision" doc:"number of the last change that is kept, 0 for none"`
	Edits    []config.Edit    `json:"edits" doc:"what makes the configuration in force of the file's"`
	States   []OperatorState  `json:"states" doc:"what the operator made of backends"`
	History  []ConfigRevision `json:"history" doc:"the last 20 revisions, oldest first"`
	Trial    *Trial           `json:"trial,omitempty" doc:"the last change waits to be confirmed"`
	// Discovered backends are neither in the file nor stored as changes.
	Discovered []DiscoveredBackend `json:"discovered" doc:"backends that were found by the backends-from of services"`
}

// DiscoveredBackend is a backend that was found while the gateway runs.
type DiscoveredBackend struct {
	Service string     `json:"service"`
	Backend string     `json:"backend"`
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port,omitempty" doc:"0: the one that the client asked for"`
	Weight  int        `json:"weight"`
	From    string     `json:"from" doc:"the source, as in: dns app.example"`
	Since   time.Time  `json:"since,omitzero" doc:"of the last change of what is found for the service; absent: before the start"`
}

// Trial is the pending confirmation of the last change, which is reverted without it.
type Trial struct {
	Until time.Time `json:"until"`
	Back  uint64    `json:"back" doc:"revision to go back to"`
}

// OperatorState is a state set by the operator.
type OperatorState struct {
	Service string    `json:"service"`
	Backend string    `json:"backend" doc:"with service empty: the whole gateway"`
	Node    bool      `json:"node,omitempty" doc:"the node, not the gateway or a backend"`
	State   string    `json:"state" enum:"up,drain,down"`
	Until   time.Time `json:"until,omitzero" doc:"of a drain: when it ends"`
	Then    string    `json:"then,omitempty" enum:"keep,reset"`
	Text    string    `json:"text" doc:"all of it, as edits have it"`
}

// ConfigRevision is one change.
type ConfigRevision struct {
	Revision uint64        `json:"revision"`
	At       time.Time     `json:"at"`
	Who      string        `json:"who" doc:"process and user at the socket, certificate and address over TCP, or the file"`
	What     string        `json:"what" doc:"what was asked for"`
	Edits    []config.Edit `json:"edits" doc:"what it changed; a path that ends in /@state is the state of a backend"`
}

// Revert selects the revision to restore.
type Revert struct {
	Revision uint64 `json:"revision,omitempty" doc:"a revision of the history"`
	All      bool   `json:"all,omitempty" doc:"to the daemon's file, without anything that was changed at run time"`
}

// UnmarshalJSON accepts a revision in every JSON form of a whole number, such as 7.0.
func (r *Revert) UnmarshalJSON(b []byte) error {
	var v struct {
		Revision float64 `json:"revision"`
		All      bool    `json:"all"`
	}
	err := json.Unmarshal(b, &v)
	r.Revision, r.All = uint64(v.Revision), v.All
	return err
}

// ObjectChange is one of several changes.
type ObjectChange struct {
	Op    string `json:"op" enum:"add,put,patch,remove,add-elements,remove-elements" doc:"add: the object must be new; put: add or replace; patch: a JSON merge patch; the last two are for sets, and add-elements makes one"`
	Path  string `json:"path" minLength:"1" doc:"services/web/backends/a, nat/office, firewall/sets/banned, timeouts/udp; for add that of the list, as services/web/backends. In names ~ is written ~0, / is written ~1"`
	Value any    `json:"value,omitempty" doc:"the object, in the words of the configuration file; for patch the keys that change"`
}
