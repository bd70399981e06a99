// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/table"
)

// guardedSuite is the part of a suite that the guard measures. The quick guard measures fewer rows and points.
type guardedSuite struct {
	suite, rows, points    string
	quickRows, quickPoints string
	seconds, quickSeconds  float64
}

// guardedSuites begin with the suites that depend on the most code.
var guardedSuites = []guardedSuite{
	{suite: "flows", rows: `sluice ebpf`, quickRows: `sluice ebpf (dnat|fullnat) \(xdp\)$|sluice ebpf dnat \(tc\)$`, quickSeconds: 1},
	{suite: "fnat64", rows: `sluice ebpf FNAT.. \((xdp|tc)\)$`, quickRows: `sluice ebpf FNAT64 \(xdp\)$`, quickPoints: `^connections$`, quickSeconds: 1},
	{suite: "packets", rows: `sluice ebpf`, points: `^(1 flow|50,000 flows)$`, quickRows: `sluice ebpf (dnat|snat) \(xdp\)$`, quickPoints: `^50,000 flows$`},
	{suite: "ports", rows: `sluice ebpf`},
	{suite: "drop", rows: `sluice ebpf`, quickRows: `sluice ebpf \(xdp\)$`, quickPoints: `^1 address$`},
}

const (
	// GuardShare is the part of a committed share that a row must reach on a quiet machine.
	GuardShare = 0.85
	// GuardShareQuick is the same on a shared machine, where other programs take caches and memory bandwidth from
	// the rows more than from the limit row.
	GuardShareQuick = 0.5

	// guardTime is the time after which the quick guard begins no further run; one run of a suite takes a minute at most.
	guardTime = 3 * time.Minute

	guardReps  = 3
	guardTries = 3 // of a row that is below its share; other programs may have disturbed one of them
)

// Shares are shares of the limit row, by suite, row, point and metric.
type Shares map[string]float64

// LoadShares reads committed shares.
func LoadShares(path string) (Shares, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var s Shares
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// Save writes shares to a file, and keeps the shares of rows that were not measured.
func (s Shares) Save(path string) error {
	all, err := LoadShares(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if all == nil {
		all = Shares{}
	}
	maps.Copy(all, s)
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// GuardOptions are options of Guard.
type GuardOptions struct {
	Quick bool
	CPU   int
	// Committed shares; nil only measures.
	Committed Shares
	// Least is the part of a committed share that a row must reach.
	Least    float64
	Progress func(string)
}

// Guarded is what the guard measured.
type Guarded struct {
	Least    float64       `json:"least"`
	Took     time.Duration `json:"took_ns"`
	Measured Shares        `json:"measured"`
	Rows     []GuardedRow  `json:"rows"`
	// Failed are rows that did not run, with the reason.
	Failed []string `json:"failed,omitempty"`
	// Skipped are suites that the quick guard had no time for.
	Skipped []string `json:"skipped,omitempty"`

	end time.Time
}

// GuardedRow is a row with a committed share.
type GuardedRow struct {
	Row       string  `json:"row"`
	Share     float64 `json:"share"` // the best of all tries
	Committed float64 `json:"committed"`
	Low       bool    `json:"low"`
}

// Guard measures the guarded rows and compares their shares of the limit row with committed ones. A row fails if it
// is below the least part of its share in every try.
func Guard(ctx context.Context, o GuardOptions) (*Guarded, error) {
	begin := time.Now()
	g := &Guarded{Least: o.Least, Measured: Shares{}, end: begin.Add(guardTime)}
	for _, part := range guardedSuites {
		if err := g.suite(ctx, part, o); err != nil {
			return nil, err
		}
	}
	for _, key := range slices.Sorted(maps.Keys(g.Measured)) {
		if want, ok := o.Committed[key]; ok {
			g.Rows = append(g.Rows, GuardedRow{Row: key, Share: g.Measured[key], Committed: want, Low: g.Measured[key] < want*o.Least})
		}
	}
	g.Took = time.Since(begin)
	return g, nil
}

// suite measures the rows of a suite, and again those that failed or are low.
func (g *Guarded) suite(ctx context.Context, part guardedSuite, o GuardOptions) error {
	s, err := Find(part.suite)
	if err != nil {
		return err
	}
	rows, points, seconds := part.rows, part.points, part.seconds
	if o.Quick {
		if part.quickRows == "" {
			return nil
		}
		rows, points, seconds = part.quickRows, cmp.Or(part.quickPoints, part.points), part.quickSeconds
	}
	for try := range guardTries {
		if o.Quick && time.Now().After(g.end) {
			if try < 2 { // one low figure may be due to other programs
				g.forget(part.suite, o)
			}
			return nil
		}
		broken := map[string]string{}
		r, err := Run(ctx, s, Options{Reps: guardReps, Seconds: seconds, CPU: o.CPU, Progress: o.Progress,
			Rows: withLimit(s, rows), Points: regexp.MustCompile(points)})
		if err != nil {
			return err
		}
		again := g.addShares(r, o, broken)
		if len(again) == 0 {
			return nil
		}
		rows = `^(` + strings.Join(again, "|") + `)$`
		g.Failed = slices.DeleteFunc(g.Failed, func(f string) bool { return strings.HasPrefix(f, part.suite+": ") })
		for _, row := range slices.Sorted(maps.Keys(broken)) {
			g.Failed = append(g.Failed, part.suite+": "+broken[row])
		}
	}
	return nil
}

// forget drops what a suite that could not be measured again says against a row.
func (g *Guarded) forget(suite string, o GuardOptions) {
	of := func(s string) bool { return strings.HasPrefix(s, suite) }
	g.Skipped = append(g.Skipped, suite)
	g.Failed = slices.DeleteFunc(g.Failed, of)
	maps.DeleteFunc(g.Measured, func(key string, share float64) bool { return of(key) && share < o.Committed[key]*o.Least })
}

// withLimit selects rows and the limit row.
func withLimit(s Suite, rows string) *regexp.Regexp {
	if s.Limit == "" {
		return regexp.MustCompile(rows)
	}
	return regexp.MustCompile(`^` + regexp.QuoteMeta(s.Limit) + `$|` + rows)
}

// addShares notes the shares of a run and returns patterns of the rows to be measured again.
func (g *Guarded) addShares(r *Result, o GuardOptions, broken map[string]string) (again []string) {
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Name == r.Limit {
			continue
		}
		low := false
		for point, why := range row.Absent {
			if strings.HasPrefix(why, failed) {
				broken[row.Name], low = fmt.Sprintf("%s (%s): %s", row.Name, point, why), true
			}
		}
		for _, c := range row.Cells {
			share := r.shareOf(&c)
			key := strings.Join([]string{r.Suite, row.Name, c.Point, c.Metric}, " / ")
			g.Measured[key] = max(g.Measured[key], share)
			low = low || g.Measured[key] < o.Committed[key]*o.Least
		}
		if low {
			again = append(again, regexp.QuoteMeta(row.Name))
		}
	}
	return again
}

// shareOf is a figure as a part of the limit row's. Without a limit row it is in the unit of the yardstick.
func (r *Result) shareOf(c *Cell) float64 {
	if r.ShareOfYardstick {
		return c.Relative
	}
	if limit := r.Cell(r.Limit, c.Point, c.Metric); limit != nil && limit.Relative > 0 {
		return c.Relative / limit.Relative
	}
	return c.Relative
}

// OK reports whether no row is low and none failed.
func (g *Guarded) OK() bool {
	return len(g.Failed) == 0 && !slices.ContainsFunc(g.Rows, func(r GuardedRow) bool { return r.Low })
}

// WriteTable prints the rows.
func (g *Guarded) WriteTable(w io.Writer) error {
	t := table.New("row", ">share", ">committed", ">part", "")
	for _, r := range g.Rows {
		verdict := ""
		if r.Low {
			verdict = fmt.Sprintf("below %.2f in %d tries", g.Least, guardTries)
		}
		t.Row(r.Row, fmt.Sprintf("%.3f", r.Share), fmt.Sprintf("%.3f", r.Committed), fmt.Sprintf("%.2f", r.Share/r.Committed), verdict)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, f := range g.Failed {
		fmt.Fprintf(w, "\n%s\n", f)
	}
	if len(g.Skipped) > 0 {
		fmt.Fprintf(w, "\nnot measured within %s: %s\n", guardTime, strings.Join(g.Skipped, ", "))
	}
	_, err := fmt.Fprintf(w, "\n%d rows in %s\n", len(g.Rows), g.Took.Round(time.Second))
	return err
}
