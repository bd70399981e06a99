// SPDX-License-Identifier: Apache-2.0

// Package top is the terminal view of a NAT host. It shows the fill of the connection table, the largest sources,
// exhausted SNAT ports, drops with reasons, and the CPUs' network time.
//
// It only reads. Cheap numbers are refreshed every second. Dumps of the table use at most three percent of one core,
// or half a percent of all cores if that is less. With six cores or more, a table of a million entries is read about
// once a minute. Drops and CPU phases are traced only while their tab is open.
package top

import (
	"context"
	"runtime"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Reader supplies the data of the view. Each call may block. Calls of different methods may overlap, calls of one
// method do not.
type Reader interface {
	// Counts reads the cheap numbers; rates count since the last call.
	Counts(ctx context.Context) (*Counts, error)
	// Table dumps and summarizes the connection tables.
	Table(ctx context.Context) (*TableSummary, error)
	// Drops observes dropped packets for a few seconds.
	Drops(ctx context.Context) (*trace.DropReport, error)
	// Profile samples the CPUs for a few seconds.
	Profile(ctx context.Context) (*trace.Profile, error)
	// Flows lists at most limit connections that match f.
	Flows(ctx context.Context, f conntrack.Filter, namespace string, limit int) ([]Flow, error)
}

// Counts are the numbers refreshed every second.
type Counts struct {
	Time  time.Time        `json:"time"`
	Fills []conntrack.Fill `json:"namespaces"`
	// NewPerSecond is the rate of new connections, from a sample of the kernel's events; negative if no sample was
	// possible.
	NewPerSecond float64 `json:"new_per_second"`
	// DropsPerSecond counts packets dropped by connection tracking. The other rates are the parts by cause.
	// FullPerSecond: the table was full. PortsPerSecond: no SNAT port was free. RacesPerSecond: an equal connection
	// was first. ChainsPerSecond: the hash chain was too long.
	DropsPerSecond   float64 `json:"drops_per_second"`
	FullPerSecond    float64 `json:"table_full_per_second"`
	PortsPerSecond   float64 `json:"port_failures_per_second"`
	RacesPerSecond   float64 `json:"races_per_second"`
	ChainsPerSecond  float64 `json:"long_chains_per_second"`
	EarlyPerSecond   float64 `json:"early_drops_per_second"`
	BacklogPerSecond float64 `json:"backlog_drops_per_second"`
	// HottestCPU is the CPU with the largest share Softirq of its time (0 to 1) in softirqs.
	HottestCPU int      `json:"hottest_cpu"`
	Softirq    float64  `json:"softirq"`
	Blind      []string `json:"not_seen,omitempty"`
	// Took is the duration of reading the counters, without the wait for samples.
	Took time.Duration `json:"-"`
}

// TableSummary is the summary of one dump.
type TableSummary struct {
	Time    time.Time
	Took    time.Duration // Wall clock.
	CPU     time.Duration // of this process, kernel included
	Summary *conntrack.Summary
	// Held is the number of entries per namespace that the kernel does not evict.
	Held  map[string]uint32
	Blind []string

	searched bool // worst has been computed
	worst    *conntrack.Occupancy
}

// Flow is one connection with its table.
type Flow struct {
	Namespace string
	Entry     conntrack.Entry
	flow.Flow
}

// dumpShare is the maximum share of one core for dumps: a gateway with few cores forwards with the same ones.
var dumpShare = min(0.03, 0.005*float64(runtime.NumCPU()))

// Fastest refresh of the table; maximum share of one core for the numbers, and their fastest and slowest refresh.
const (
	dumpMinimum  = 2 * time.Second
	countShare   = 0.008
	countEvery   = time.Second
	countSlowest = 5 * time.Second
)

// waitAfter returns the wait after which work of that cost takes the given share of a core, and at least least.
func waitAfter(cost time.Duration, share float64, least time.Duration) time.Duration {
	return max(least, time.Duration(float64(cost)/share))
}

// total adds the fills of all namespaces and returns the fullest. The limit is the same for all, but the kernel
// compares each namespace with it separately.
func (c *Counts) total() (count uint32, fullest conntrack.Fill) {
	for i, f := range c.Fills {
		count += f.Count
		if i == 0 || f.Fill() > fullest.Fill() {
			fullest = f
		}
	}
	return count, fullest
}
