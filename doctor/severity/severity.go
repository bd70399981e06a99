// SPDX-License-Identifier: Apache-2.0

// Package severity defines one scale of severity, and the limits that sluice doctor and sluice top
// share.
package severity

import (
	"fmt"
	"slices"
	"time"
)

// Level is a severity.
type Level uint8

// The levels, in ascending order. Unknown means that a check had no data.
const (
	OK Level = iota
	Unknown
	Info
	Warn
	Critical
)

var names = []string{"ok", "unknown", "info", "warn", "critical"}

// String returns the level in lower case.
func (l Level) String() string { return names[min(int(l), len(names)-1)] }

// MarshalText writes the same.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (l *Level) UnmarshalText(text []byte) error {
	i := slices.Index(names, string(text))
	if i < 0 {
		return fmt.Errorf("level %q: none of %q", text, names)
	}
	*l = Level(i)
	return nil
}

// Limits are two thresholds; a higher value is Warn or Critical.
type Limits struct{ Warn, Critical float64 }

// Level returns the level of a value.
func (l Limits) Level(value float64) Level {
	switch {
	case value > l.Critical:
		return Critical
	case value > l.Warn:
		return Warn
	}
	return OK
}

// The limits of resources that run short.
var (
	// TableFill is a share of nf_conntrack_max. node_exporter's mixin warns at 75 %, netdata
	// at 90 % and 95 %.
	TableFill = Limits{0.75, 0.90}
	// Ports are a share of the source ports of an address towards one destination: refusals
	// were measured from 90 % on.
	Ports = Limits{0.80, 0.90}
	// Softirq is a share of the time of a CPU.
	Softirq = Limits{0.60, 0.85}
	// Refused are new connections a second: more than one is beyond chance.
	Refused = Limits{0, 1}
)

// steadyFill is the fill level below which growth predicts nothing. Above nearlyFull, a burst of
// seconds counts.
const (
	steadyFill = 0.5
	nearlyFull = 0.9
)

// TimeToFull returns the level for the time until the table is full at its present growth. If the
// growth was observed only for a short time (not steady), the level is at most Info.
func TimeToFull(left time.Duration, fill float64, steady bool) Level {
	switch {
	case left < 0 || fill <= steadyFill || left >= 15*time.Minute:
		return OK
	case !steady && fill <= nearlyFull:
		return Info
	case left < 2*time.Minute:
		return Critical
	}
	return Warn
}
