// SPDX-License-Identifier: Apache-2.0

// Package datapath is the contract between the engine and the datapaths: the desired state (Snapshot)
// and the interface that applies it (Datapath). datapath/nft and datapath/ebpf implement it; only engine
// calls Apply.
package datapath

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Datapath applies snapshots to the kernel.
//
// A Datapath is bound to the network namespace of the thread that opened it. Its methods are safe for concurrent use.
type Datapath interface {
	// Name returns "nftables" or "ebpf".
	Name() string

	Carrier

	// Plan returns the changes that Apply would make, and changes nothing.
	Plan(context.Context, *Snapshot) (*Change, error)
	// Apply makes the kernel's state equal to the snapshot in one transaction and returns after reading it back. On
	// error the previous state is in force and has been read back. The error names the rule and the kernel's error.
	// State of an earlier process is adopted, not flushed.
	Apply(context.Context, *Snapshot) (*Change, error)

	// Flows calls yield for each flow until it returns false.
	Flows(ctx context.Context, yield func(flow.Flow) bool) error
	// Counters returns the counts since the creation of the objects.
	Counters(context.Context) (*Counters, error)

	// Remove removes all of Sluice's state from the kernel and restores the host.
	Remove(context.Context) error
	// Close closes the kernel objects without removing them: traffic continues.
	Close() error
}

// Carrier reports the capabilities of a datapath. Each method returns nil if the datapath supports the whole object
// on this host. Otherwise it returns the reason for the operator ("persistence by MAC address is not available at
// XDP").
type Carrier interface {
	CarriesService(*config.Service) error
	CarriesNAT(*config.NATRule) error
	CarriesRule(*config.FirewallRule) error
}

// Gauger is a Datapath that reports the fill of its tables and its drops at low cost.
type Gauger interface {
	// Gauges returns only the counters of reasons and tables.
	Gauges(context.Context) (*Counters, error)
}

// Snapshot is the complete desired state of one datapath at one instant. It contains only the services and rules that
// the engine assigned to the datapath. It is immutable after its creation.
type Snapshot struct {
	// Revision is incremented with every snapshot of a process.
	Revision uint64
	// Config is the complete validated configuration with defaults filled in. Datapaths use it for interfaces,
	// timeouts, table sizes and sets.
	Config *config.Config
	// Services, NAT and Rules are assigned to this datapath.
	Services []Service
	NAT      []*config.NATRule
	Rules    []*config.FirewallRule
	// Uplinks are the uplinks of the configuration.
	Uplinks []Uplink
	// Arriving names the services and port-forwards, like Listener.Name, that move here from another datapath. That
	// datapath has their flows until Take has created them here. Until then, packets that match no flow and open none
	// pass to the kernel.
	//
	// Gone names the services and port-forwards that another datapath has taken with their flows.
	Arriving, Gone map[string]bool
}

// Moves reports whether a flow moves to another datapath with its service or port-forward, named like Listener.Name.
// SCTP flows do not move: connection tracking would need the tags of both ends, which only the handshake contains.
func (s *Snapshot) Moves(listener string, p flow.Protocol) bool {
	return s.Gone[listener] && (p == flow.TCP || p == flow.UDP)
}

// Service is a configured service with the current state of its backends.
type Service struct {
	*config.Service
	// State of each of Service.Backends, by index.
	State []State
	// Weights of the backends during slow-start, by index; nil means the weights of the configuration. Only their
	// ratios matter.
	Weights []int
}

// State of a backend.
type State uint8

// States.
const (
	Up       State = iota // Accepts new flows.
	Drain                 // Keeps its flows, accepts no new ones.
	Unprobed              // Like Drain until the first check: it may have had flows before a restart.
	Down                  // Its flows end.
)

// Operators see an unprobed backend as down.
var stateNames = [...]string{"up", "drain", "down", "down"}

// String returns "up", "drain" or "down".
func (s State) String() string { return stateNames[s] }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Active returns the indices of the backends that accept new flows: the backends that are up in the best priority
// class with such a backend.
func (s Service) Active() []int {
	best := 0
	for i, b := range s.Backends {
		if s.State[i] == Up && (best == 0 || b.Priority < best) {
			best = b.Priority
		}
	}
	var active []int
	for i, b := range s.Backends {
		if s.State[i] == Up && b.Priority == best {
			active = append(active, i)
		}
	}
	return active
}

// Change describes the effect of an Apply.
type Change struct {
	Datapath string `json:"datapath"`
	// Objects counts tables, chains, sets, maps, programs and links. Rules counts rules in chains. Elements counts
	// entries of sets, maps and tables.
	Objects  Count `json:"objects"`
	Rules    Count `json:"rules"`
	Elements Count `json:"elements"`
	// Lines describes the change for people, one object per line, in the datapath's own syntax ("add element dnat4 {
	// 192.0.2.10 . tcp . 80 : goto svc-web }"), at most a few hundred. Truncated counts the rest.
	Lines     []string `json:"lines,omitempty"`
	Truncated int      `json:"truncated,omitempty"`
	// Slots is the number of scheduler slots that change their backend, of SlotsTotal.
	Slots      int `json:"slots"`
	SlotsTotal int `json:"slots_total"`
	// Ended is the number of live flows that end because the new configuration treats them differently. For a plan it
	// is computed from the current flows.
	Ended int `json:"ended"`
	// Duration of the kernel transaction with its read-back; 0 for a plan.
	Duration time.Duration `json:"duration,omitempty"`
}

// Count of additions and removals.
type Count struct {
	Added   int `json:"added"`
	Removed int `json:"removed"`
	Changed int `json:"changed"`
}

// String returns added, removed and changed for people and the log.
func (c Count) String() string { return fmt.Sprintf("+%d -%d ~%d", c.Added, c.Removed, c.Changed) }

// Empty reports whether nothing changes.
func (c *Change) Empty() bool {
	return c.Objects == Count{} && c.Rules == Count{} && c.Elements == Count{}
}

// Counters are monotonic counts of a datapath.
type Counters struct {
	Services []ServiceCounters `json:"services,omitempty"`
	NAT      []RuleCounters    `json:"nat,omitempty"`
	Rules    []RuleCounters    `json:"rules,omitempty"`
	// Reasons counts packets by the datapath's reason for their treatment.
	Reasons []ReasonCounter `json:"reasons,omitempty"`
	// Tables is the fill of the datapath's own tables.
	Tables []TableUse `json:"tables,omitempty"`
	// Missed counts packets and events that the kernel passed to the daemon and that the daemon could not handle,
	// since its start.
	Missed uint64 `json:"missed,omitempty"`
}

// ServiceCounters counts one service. Connections counts new flows. Active counts live flows, -1 if unknown.
type ServiceCounters struct {
	Name        string            `json:"name"`
	Connections uint64            `json:"connections"`
	Packets     uint64            `json:"packets"`
	Bytes       uint64            `json:"bytes"`
	Refused     uint64            `json:"refused"` // by a limit, a set, or for lack of a usable backend
	Active      int               `json:"active"`
	Backends    []BackendCounters `json:"backends"`
}

// BackendCounters counts one backend of a service.
type BackendCounters struct {
	Name        string `json:"name"`
	Connections uint64 `json:"connections"`
	Packets     uint64 `json:"packets"`
	Bytes       uint64 `json:"bytes"`
	Active      int    `json:"active"`
}

// RuleCounters counts one NAT or firewall rule.
type RuleCounters struct {
	Name    string `json:"name"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// ReasonCounter counts packets by family ("ipv4", "ipv6", "other"), action
// ("forward", "drop", "pass") and reason.
type ReasonCounter struct {
	Family  string `json:"family"`
	Action  string `json:"action"`
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
}

// TableUse is the fill of one table of a datapath.
type TableUse struct {
	Name  string `json:"name"`
	Used  int    `json:"used"`
	Size  int    `json:"size"`
	Bytes uint64 `json:"bytes"` // current memory of the table
}

// Slots returns the scheduling table of some active backends: the index into Backends of each slot. A hash of
// the packet selects a slot of the Maglev table; rr, wrr and random select from the smooth weighted sequence;
// for lc and wlc each backend has one slot.
func (s *Service) Slots(active []int) []int {
	members := make([]balance.Member, len(active))
	for n, i := range active {
		members[n] = balance.Member{Key: s.Backends[i].Key(), Weight: 1}
		if s.Scheduler.UsesWeights() {
			members[n].Weight = s.Weight(i)
		}
	}
	switch {
	case s.Scheduler.CountsFlows():
		return slices.Clone(active)
	case s.Scheduler.Hashes():
		table := balance.Maglev(members, balance.TableSize(len(s.Backends)))
		order := make([]int, len(table))
		for slot, n := range table {
			order[slot] = active[n]
		}
		return order
	}
	order := balance.Smooth(members)
	for slot, n := range order {
		order[slot] = active[n]
	}
	return order
}
