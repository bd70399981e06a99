// SPDX-License-Identifier: Apache-2.0

package conntrack

import "time"

// GrowthWindow is over how long a table has to grow before that says anything of the
// minutes to come: the kernel collects in rounds of up to a minute, which makes a
// sawtooth of the count.
const GrowthWindow = time.Minute

// Growth follows the entries of a table. The zero value is ready.
type Growth struct{ noted []noted }

type noted struct {
	at    time.Time
	count uint32
}

// Add notes the entries of a moment. It returns how many have come each second since
// the youngest note that is GrowthWindow old, or the first one, and over how long.
func (g *Growth) Add(at time.Time, count uint32) (perSecond float64, over time.Duration) {
	g.noted = append(g.noted, noted{at, count})
	for len(g.noted) > 1 && at.Sub(g.noted[1].at) >= GrowthWindow {
		g.noted = g.noted[1:]
	}
	first := g.noted[0]
	if over = at.Sub(first.at); over <= 0 {
		return 0, 0
	}
	return (float64(count) - float64(first.count)) / over.Seconds(), over
}
