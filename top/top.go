// SPDX-License-Identifier: Apache-2.0

// Package top is the terminal view of a NAT host: how full the connection table
// is and when it overflows, who fills it, where SNAT ports run out, what is
// dropped and why, and where the CPUs' network time goes.
//
// It only reads. Cheap numbers come every second; the table is dumped as often
// as three percent of one core allow, or half a percent of all cores if that
// is less: from six cores on a table of a million entries is read about once a
// minute. Drops and CPU phases are traced only while their tab is open.
package top

import (
	"context"
	"runtime"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Reader is where the view gets its data. Each call may block; calls of
// different methods may overlap, calls of one method do not.
type Reader interface {
	// Counts reads what is cheap; rates are those since the last call.
	Counts(ctx context.Context) (*Counts, error)
	// Table dumps and adds up the connection tables.
	Table(ctx context.Context) (*Table, error)
	// Drops watches dropped packets for a few seconds.
	Drops(ctx context.Context) (*trace.DropReport, error)
	// Profile samples the CPUs for a few seconds.
	Profile(ctx context.Context) (*trace.Profile, error)
	// Flows lists at most limit connections that f lets through.
	Flows(ctx context.Context, f conntrack.Filter, namespace string, limit int) ([]Flow, error)
}

// Counts are the numbers that are refreshed every second.
type Counts struct {
	Time  time.Time        `json:"time"`
	Fills []conntrack.Fill `json:"namespaces"`
	// NewPerSecond are connections begun, from a sample of the kernel's events;
	// negative when they could not be sampled.
	NewPerSecond float64 `json:"new_per_second"`
	// DropsPerSecond are packets dropped by connection tracking, and of them
	// FullPerSecond those for which the table had no room, PortsPerSecond for which no
	// SNAT port was free, RacesPerSecond before which an equal one was, and
	// ChainsPerSecond whose hash chain was too long.
	DropsPerSecond   float64 `json:"drops_per_second"`
	FullPerSecond    float64 `json:"table_full_per_second"`
	PortsPerSecond   float64 `json:"port_failures_per_second"`
	RacesPerSecond   float64 `json:"races_per_second"`
	ChainsPerSecond  float64 `json:"long_chains_per_second"`
	EarlyPerSecond   float64 `json:"early_drops_per_second"`
	BacklogPerSecond float64 `json:"backlog_drops_per_second"`
	// HottestCPU spends Softirq of its time (0 to 1) in softirqs.
	HottestCPU int      `json:"hottest_cpu"`
	Softirq    float64  `json:"softirq"`
	Blind      []string `json:"not_seen,omitempty"`
	// Took is how long reading the counters took, without the wait for samples.
	Took time.Duration `json:"-"`
}

// Table is one dump, added up.
type Table struct {
	Time    time.Time
	Took    time.Duration // wall clock
	CPU     time.Duration // of this process, kernel included
	Summary *conntrack.Summary
	// Held are the entries of each namespace that the kernel does not evict.
	Held  map[string]uint32
	Blind []string

	searched bool // worst is known
	worst    *conntrack.Occupancy
}

// Flow is one connection with where it was found.
type Flow struct {
	Namespace string
	Entry     conntrack.Entry
	flow.Flow
}

// dumpShare is the share of one core that dumps may take: a gateway of few cores
// forwards with the same ones.
var dumpShare = min(0.03, 0.005*float64(runtime.NumCPU()))

// The fastest refresh of the table; the share of one core that the numbers may
// take, and their fastest and slowest refresh.
const (
	dumpMinimum  = 2 * time.Second
	countShare   = 0.008
	countEvery   = time.Second
	countSlowest = 5 * time.Second
)

// pace is how long to wait so that work of that cost takes the given share of a
// core, at least least.
func pace(cost time.Duration, share float64, least time.Duration) time.Duration {
	return max(least, time.Duration(float64(cost)/share))
}

// total adds the fills of all namespaces. The limit is one for all of them, but
// each namespace is held against it alone: what matters is the fullest.
func (c *Counts) total() (count uint32, fullest conntrack.Fill) {
	for i, f := range c.Fills {
		count += f.Count
		if i == 0 || f.Fill() > fullest.Fill() {
			fullest = f
		}
	}
	return count, fullest
}
