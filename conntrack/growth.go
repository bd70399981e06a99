// SPDX-License-Identifier: Apache-2.0

package conntrack

import "time"

// GrowthWindow is the minimum observation time for a prediction of the growth. The kernel collects entries in rounds
// of up to a minute, so the count follows a sawtooth.
const GrowthWindow = time.Minute

// Growth tracks the number of entries of a table. The zero value is ready.
type Growth struct{ samples []sample }

type sample struct {
	at    time.Time
	count uint32
}

// Add records the number of entries at a time. It returns the growth per second since the newest sample that is
// GrowthWindow old, or since the first sample, and that period.
func (g *Growth) Add(at time.Time, count uint32) (perSecond float64, over time.Duration) {
	g.samples = append(g.samples, sample{at, count})
	for len(g.samples) > 1 && at.Sub(g.samples[1].at) >= GrowthWindow {
		g.samples = g.samples[1:]
	}
	first := g.samples[0]
	if over = at.Sub(first.at); over <= 0 {
		return 0, 0
	}
	return (float64(count) - float64(first.count)) / over.Seconds(), over
}
