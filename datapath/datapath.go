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

// Datapath turns snapshots into kernel state.
//
// A Datapath is bound to the network namespace of the thread that opened it. Its
// methods are safe for use by several goroutines.
type Datapath interface {
	// Name returns "nftables" or "ebpf".
	Name() string

	Carrier

	// Plan returns what Apply would change, and changes nothing.
	Plan(context.Context, *Snapshot) (*Change, error)
	// Apply makes the kernel's state equal to the snapshot in one transaction and
	// returns after reading it back. On error the previous state is in force and
	// has been read back; the error names the rule and the kernel's error.
	// State found from an earlier process is adopted, not flushed.
	Apply(context.Context, *Snapshot) (*Change, error)

	// Flows calls yield for each flow until it returns false.
	Flows(ctx context.Context, yield func(flow.Flow) bool) error
	// Counters reads what was counted since the objects were made.
	Counters(context.Context) (*Counters, error)

	// Remove takes everything of Sluice's out of the kernel and leaves the host as
	// it was found.
	Remove(context.Context) error
	// Close closes the kernel objects without removing them: traffic continues.
	Close() error
}

// Carrier says what a datapath can carry. Each method returns nil when it can carry all of the
// object on this host, otherwise the reason why not, for the operator ("persistence by MAC address
// is not available at XDP").
type Carrier interface {
	CarriesService(*config.Service) error
	CarriesNAT(*config.NATRule) error
	CarriesRule(*config.FirewallRule) error
}

// Gauger is a Datapath that tells at little cost how full its tables are and what it drops.
type Gauger interface {
	// Gauges returns counters of reasons and tables alone.
	Gauges(context.Context) (*Counters, error)
}

// Snapshot is the complete desired state at one instant of one datapath: only
// the services and rules that the engine gave to it. It is never modified after
// it was handed out.
type Snapshot struct {
	// Revision grows by one with every snapshot of a process.
	Revision uint64
	// Config is the validated configuration with defaults filled in, whole: for
	// interfaces, timeouts, table sizes and sets.
	Config *config.Config
	// Services, NAT and Rules are what this datapath carries.
	Services []Service
	NAT      []*config.NATRule
	Rules    []*config.FirewallRule
	// Arriving names the services and port-forwards, as Listener.Name does, that another datapath had
	// until now. It has their flows until Take has made them here: what belongs to no flow here and
	// opens none goes to the kernel. Gone names those that another datapath has taken with their flows.
	Arriving, Gone map[string]bool
}

// Moves reports whether a flow goes to another datapath, with the service or port-forward that it belongs to,
// named as Listener.Name does. SCTP's do not: connection tracking would have to know the tags of both ends,
// which only the handshake tells.
func (s *Snapshot) Moves(listener string, p flow.Protocol) bool {
	return s.Gone[listener] && (p == flow.TCP || p == flow.UDP)
}

// Service is a configured service with the present state of its backends.
type Service struct {
	*config.Service
	// State of each of Service.Backends, by index.
	State []State
	// Weights of the backends while some of them come (slow-start), by index; nil: those of the
	// configuration. Beside each other they count, not beside those of the configuration.
	Weights []int
}

// State of a backend.
type State uint8

// States.
const (
	Up       State = iota // takes new flows
	Drain                 // keeps its flows, takes no new ones
	Unprobed              // the same, until its first check is over: it may have left with flows a moment ago
	Down                  // its flows end
)

// To an operator a backend is down that was not probed yet.
var stateNames = [...]string{"up", "drain", "down", "down"}

// String returns "up", "drain" or "down".
func (s State) String() string { return stateNames[s] }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Active returns the indices of the backends that take new flows: those that
// are up in the best priority class that has one.
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

// Change is what an Apply did, or would do.
type Change struct {
	Datapath string `json:"datapath"`
	// Objects are tables, chains, sets, maps, programs and links; Rules are rules
	// in chains; Elements are entries of sets, maps and tables.
	Objects  Count `json:"objects"`
	Rules    Count `json:"rules"`
	Elements Count `json:"elements"`
	// Lines describes the change for people, one object a line, in the datapath's
	// own words ("add element dnat4 { 192.0.2.10 . tcp . 80 : goto svc-web }"),
	// at most a few hundred; Truncated counts the rest.
	Lines     []string `json:"lines,omitempty"`
	Truncated int      `json:"truncated,omitempty"`
	// Slots is how many scheduler slots change their backend, of SlotsTotal.
	Slots      int `json:"slots"`
	SlotsTotal int `json:"slots_total"`
	// Ended is how many live flows it ends because the new configuration treats them differently. For
	// a plan it is counted from the flows of that moment.
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

// String is what people read, in the log too: added, removed and changed.
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
	// Reasons counts packets by why the datapath did what it did with them.
	Reasons []ReasonCounter `json:"reasons,omitempty"`
	// Tables tells how full the datapath's own tables are.
	Tables []TableUse `json:"tables,omitempty"`
	// Missed counts packets and events that the kernel passed to the daemon and that the daemon could
	// not handle, since it started.
	Missed uint64 `json:"missed,omitempty"`
}

// ServiceCounters counts one service. Connections counts new flows; Active are
// flows alive now, -1 when unknown.
type ServiceCounters struct {
	Name        string            `json:"name"`
	Connections uint64            `json:"connections"`
	Packets     uint64            `json:"packets"`
	Bytes       uint64            `json:"bytes"`
	Refused     uint64            `json:"refused"` // by a limit, a set, or because no backend is usable
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
	Bytes uint64 `json:"bytes"` // memory that the table takes now
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
