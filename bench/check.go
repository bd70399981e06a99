// SPDX-License-Identifier: Apache-2.0

package bench

import "math"

// Move is a ratio that differs between two runs by more than their noise.
type Move struct {
	Row    string  `json:"row"`
	Point  string  `json:"point"`
	Metric string  `json:"metric"`
	Then   float64 `json:"then"` // ratio to the reference row
	Now    float64 `json:"now"`
	Change float64 `json:"change"` // Now / Then − 1
	Noise  float64 `json:"noise"`  // what the spreads of both runs explain
	Worse  bool    `json:"worse"`
}

// checkFloor is what two quiet runs may differ by.
const checkFloor = 0.05

// Check compares the ratios of two runs of a suite: each figure divided by that
// of a reference row at the same point and metric, so that a faster or slower
// machine cancels out. The reference is the limit row, or else the first row
// that both have.
func Check(then, now *Result) []Move {
	var moves []Move
	for i := range now.Rows {
		for j := range now.Rows[i].Cells {
			c := &now.Rows[i].Cells[j]
			if m, ok := compareCell(then, now, now.Rows[i].Name, c); ok {
				moves = append(moves, m)
			}
		}
	}
	return moves
}

func compareCell(then, now *Result, row string, c *Cell) (Move, bool) {
	ref := reference(then, now, c.Point, c.Metric)
	old := then.Cell(row, c.Point, c.Metric)
	if ref == "" || ref == row || old == nil {
		return Move{}, false
	}
	oldRef, newRef := then.Cell(ref, c.Point, c.Metric), now.Cell(ref, c.Point, c.Metric)
	if oldRef.Median == 0 || newRef.Median == 0 || old.Median == 0 {
		return Move{}, false
	}
	m := Move{Row: row, Point: c.Point, Metric: c.Metric, Then: old.Median / oldRef.Median, Now: c.Median / newRef.Median}
	m.Change = m.Now/m.Then - 1
	// Half a spread is how far a median can be from the middle of its repetitions.
	m.Noise = max(checkFloor, (old.Spread+oldRef.Spread+c.Spread+newRef.Spread)/2)
	m.Worse = m.Change < 0
	for _, metric := range now.Metrics {
		if metric.Name == c.Metric && metric.LowerIsBetter {
			m.Worse = m.Change > 0
		}
	}
	return m, math.Abs(m.Change) > m.Noise
}

func reference(then, now *Result, point, metric string) string {
	usable := func(row string) bool {
		return then.Cell(row, point, metric) != nil && now.Cell(row, point, metric) != nil
	}
	if now.Limit != "" && usable(now.Limit) {
		return now.Limit
	}
	for i := range now.Rows {
		if usable(now.Rows[i].Name) {
			return now.Rows[i].Name
		}
	}
	return ""
}
