// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/severity"
)

// Level is the severity of a verdict.
type Level = severity.Level

// Severity levels of verdicts.
const (
	OK       = severity.OK
	Warn     = severity.Warn
	Critical = severity.Critical
)

// Verdict is the one line about the most urgent shortage.
type Verdict struct {
	Level Level  `json:"level"`
	Text  string `json:"text"`
}

// findVerdict checks the numbers in order of urgency: current losses, then imminent ones.
func findVerdict(c *Counts, t *TableSummary) Verdict {
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
	worst := Verdict{OK, "nothing runs short"}
	for _, v := range imminentLosses(c, fullest, occupied) {
		if v.Level >= Warn && v.Level > worst.Level {
			worst = v
		}
	}
	return worst
}

// imminentLosses returns imminent losses, the most urgent first.
func imminentLosses(c *Counts, fullest conntrack.Fill, occupied *conntrack.Occupancy) []Verdict {
	held := Verdict{severity.TableFill.Level(fullest.Effective()), fmt.Sprintf("%s%.0f%% of the table is held", fullest.Namespace, 100*fullest.Effective())}
	if held.Level == Critical {
		held.Text += ": new connections fail soon; sluice tune"
	}
	left, growing := fullest.TimeToFull(), Verdict{}
	if fullest.Growth > 1 {
		growing.Level = severity.TimeToFull(left, fullest.Fill(), fullest.Over >= conntrack.GrowthWindow)
		unit := time.Minute
		if growing.Level == Critical {
			unit = time.Second
		}
		growing.Text = fmt.Sprintf("%sthe table is full in %v at this growth", fullest.Namespace, left.Round(unit))
	}
	list := []Verdict{held, growing}
	if occupied != nil {
		ports := Verdict{severity.Ports.Level(occupied.Share()), occupancyText(occupied)}
		if ports.Level == Critical {
			ports.Text += ": connections are refused"
		}
		list = append(list, ports)
	}
	if chain := fullest.MeanChain(); chain > 16 {
		list = append(list, Verdict{Warn, fmt.Sprintf("hash chains of %.0f entries: raise nf_conntrack_buckets to nf_conntrack_max", chain)})
	}
	softirq := Verdict{severity.Softirq.Level(c.Softirq), fmt.Sprintf("CPU %d spends %.0f%% in softirqs", c.HottestCPU, 100*c.Softirq)}
	if softirq.Level == Critical {
		softirq.Text += ": packets will be lost"
	}
	return append(list, softirq)
}

// judgeDrops names the main cause of drops. conntrack.Counters.Refused determines the causes. The limits are shared
// with the doctor's CT05, CT09, CT11 and PT01.
func judgeDrops(c *Counts, fullest conntrack.Fill, occupied *conntrack.Occupancy) Verdict {
	switch {
	case c.FullPerSecond > 1 || c.FullPerSecond > 0 && c.PortsPerSecond+c.ChainsPerSecond+c.RacesPerSecond == 0 && c.BacklogPerSecond <= 1:
		return Verdict{severity.Refused.Level(c.FullPerSecond), fmt.Sprintf("%sthe table is full, %s new connections/s are dropped; sluice tune", fullest.Namespace, decimal(c.FullPerSecond))}
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
	return Verdict{severity.Refused.Level(c.RacesPerSecond), fmt.Sprintf("%s new connections/s had the same tuple as another and were dropped; ports are not short", decimal(c.RacesPerSecond))}
}

// worstOccupancy returns the fullest range of SNAT ports; the search runs once per table.
func worstOccupancy(t *TableSummary) *conntrack.Occupancy {
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
