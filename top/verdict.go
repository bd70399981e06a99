// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
)

// Level is how bad a verdict is.
type Level int

// The levels; their names are printed, so that nothing depends on colour.
const (
	OK Level = iota
	Warn
	Critical
)

// String returns "ok", "WARN" or "CRITICAL".
func (l Level) String() string { return [...]string{"ok", "WARN", "CRITICAL"}[l] }

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (l *Level) UnmarshalText(text []byte) error {
	for level := OK; level <= Critical; level++ {
		if level.String() == string(text) {
			*l = level
			return nil
		}
	}
	return fmt.Errorf("verdict %q: not ok, WARN or CRITICAL", text)
}

// Verdict is the one line that says what is short.
type Verdict struct {
	Level Level  `json:"level"`
	Text  string `json:"text"`
}

// judge looks at the numbers in the order in which one has to act: what is lost
// now, then what will be lost soon. Thresholds: 75 and 90 % of the table by
// entries that cannot be evicted, 80 and 90 % of an SNAT address's ports
// (refusals were measured from 90 %), 15 and 2 minutes to a full table.
func judge(c *Counts, t *Table) Verdict {
	if c == nil {
		return Verdict{OK, "reading"}
	}
	_, fullest := c.total()
	if len(c.Fills) > 1 {
		fullest.Namespace += ": "
	} else {
		fullest.Namespace = ""
	}
	occupied := worstOccupancy(t)
	if c.DropsPerSecond > 0 || c.BacklogPerSecond > 1 {
		return judgeDrops(c, fullest, occupied)
	}
	left := fullest.TimeToFull()
	// Below half, and over less than a minute, growth says nothing of minutes to come.
	steady := fullest.Fill() > 0.5 && fullest.Over >= conntrack.GrowthWindow || fullest.Fill() > 0.9
	growing := left >= 0 && fullest.Growth > 1 && steady
	switch {
	case fullest.Effective() > 0.90:
		return Verdict{Critical, fmt.Sprintf("%s%.0f%% of the table is held: new connections fail soon; sluice tune", fullest.Namespace, 100*fullest.Effective())}
	case growing && left < 2*time.Minute:
		return Verdict{Critical, fmt.Sprintf("%sthe table is full in %v at this growth", fullest.Namespace, left.Round(time.Second))}
	case occupied != nil && occupied.Share() > 0.90:
		return Verdict{Critical, occupancyText(occupied) + ": connections are refused"}
	case c.Softirq > 0.85:
		return Verdict{Critical, fmt.Sprintf("CPU %d spends %.0f%% in softirqs: packets will be lost", c.HottestCPU, 100*c.Softirq)}
	case fullest.Effective() > 0.75:
		return Verdict{Warn, fmt.Sprintf("%s%.0f%% of the table is held", fullest.Namespace, 100*fullest.Effective())}
	case growing && left < 15*time.Minute:
		return Verdict{Warn, fmt.Sprintf("%sthe table is full in %v at this growth", fullest.Namespace, left.Round(time.Minute))}
	case occupied != nil && occupied.Share() > 0.80:
		return Verdict{Warn, occupancyText(occupied)}
	case fullest.MeanChain() > 16:
		return Verdict{Warn, fmt.Sprintf("hash chains of %.0f entries: raise nf_conntrack_buckets to nf_conntrack_max", fullest.MeanChain())}
	case c.Softirq > 0.60:
		return Verdict{Warn, fmt.Sprintf("CPU %d spends %.0f%% in softirqs", c.HottestCPU, 100*c.Softirq)}
	}
	return Verdict{OK, "nothing is short"}
}

// judgeDrops names the worst cause of drops. conntrack.Counters.Refused tells them
// apart, here and in the doctor's CT05, CT09, CT11 and PT01, whose limits these are.
func judgeDrops(c *Counts, fullest conntrack.Fill, occupied *conntrack.Occupancy) Verdict {
	beyondChance := func(perSecond float64) Level {
		if perSecond > 1 {
			return Critical
		}
		return Warn
	}
	switch {
	case c.FullPerSecond > 1 || c.FullPerSecond > 0 && c.PortsPerSecond+c.ChainsPerSecond+c.RacesPerSecond == 0 && c.BacklogPerSecond <= 1:
		return Verdict{beyondChance(c.FullPerSecond), fmt.Sprintf("%sthe table is full, %s new connections/s are dropped; sluice tune", fullest.Namespace, decimal(c.FullPerSecond))}
	case c.PortsPerSecond > 0 && occupied != nil:
		return Verdict{Critical, fmt.Sprintf("SNAT %s -> %s %s: %d ports of %s taken, %s/s find none", occupied.Public,
			occupied.Protocol, occupied.Remote, occupied.Used, occupied.Range, decimal(c.PortsPerSecond))}
	case c.PortsPerSecond > 0:
		return Verdict{Critical, fmt.Sprintf("%s new connections/s find no free SNAT port", decimal(c.PortsPerSecond))}
	case c.ChainsPerSecond > 0:
		return Verdict{Critical, fmt.Sprintf("%s new connections/s find their hash chain too long: raise nf_conntrack_buckets to nf_conntrack_max", decimal(c.ChainsPerSecond))}
	case c.BacklogPerSecond > 1:
		return Verdict{Critical, fmt.Sprintf("%.0f packets/s find the backlog of their CPU full", c.BacklogPerSecond)}
	}
	return Verdict{beyondChance(c.RacesPerSecond), fmt.Sprintf("%s new connections/s met an equal one and were dropped; ports are not short", decimal(c.RacesPerSecond))}
}

// worstOccupancy is the fullest range of SNAT ports, searched once for a table.
func worstOccupancy(t *Table) *conntrack.Occupancy {
	if t == nil || t.Summary == nil {
		return nil
	}
	if !t.searched {
		t.searched = true
		if list := t.Summary.Occupancies(1, 0); len(list) > 0 {
			t.worst = &list[0]
		}
	}
	return t.worst
}

func occupancyText(o *conntrack.Occupancy) string {
	return fmt.Sprintf("SNAT %s -> %s %s: %.0f%% of ports", o.Public, o.Protocol, o.Remote, 100*o.Share())
}
