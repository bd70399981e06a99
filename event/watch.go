// SPDX-License-Identifier: Apache-2.0

package event

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Gauge is the fill of a table or pool.
type Gauge struct {
	Kind   Kind   // Table or Ports.
	Object string // DATAPATH/TABLE.
	Used   int
	Size   int
}

// Dropped counts the packets dropped for one reason since a fixed start.
type Dropped struct {
	Object  string // DATAPATH/REASON
	Packets uint64
}

// Reading is the state of the gateway at one instant.
type Reading struct {
	Gauges   []Gauge
	Drops    []Dropped
	Warnings []string
}

// Watch reads the state of the gateway periodically, and logs conditions that begin or end.
type Watch struct {
	Log  *Log
	Read func(context.Context) Reading

	mu   sync.Mutex
	full map[string]string // text of gauges above the highest level, by kind and object

	levels  map[string]int // by kind and object: index of the gauge's highest level reached, plus 1
	dropped map[string]*dropState
	warned  map[string]bool
	at      time.Time // time of the last reading
}

// Full levels: an event reports a gauge that reaches a level. A second event reports its return below the lowest
// level minus leave, so a gauge near a level is reported once.
var fullLevels = []float64{0.80, 0.95}

const leave = 0.10

// Drops for one reason are reported from dropBegin packets per second on. They end after dropQuiet readings below
// dropEnd.
const (
	dropBegin = 10.0
	dropEnd   = 1.0
	dropQuiet = 3
)

// Full returns a sentence, with the remedy, for each nearly full table and pool.
func (w *Watch) Full() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Values(w.full))
}

// remedy returns the setting that enlarges a table or pool.
func remedy(g Gauge) string {
	switch {
	case g.Kind == Ports:
		return "no new connections when there are none left; add addresses to the pool"
	case strings.HasPrefix(g.Object, "kernel/"):
		return "new connections are dropped when it is full; 'sluice doctor' says what fills it, 'sluice tune' enlarges it"
	}
	return "new connections are refused when it is full; 'sluice conns' says what fills it, 'tables' in the configuration enlarges it"
}

// readEvery is the time between two readings, which use at most 5 % of one CPU.
const readEvery = 2 * time.Second

// Run watches until the context ends.
func (w *Watch) Run(ctx context.Context) {
	for {
		start := time.Now()
		w.compareReading(start, w.Read(ctx))
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(readEvery, 20*time.Since(start))):
		}
	}
}

// compareReading compares a reading with the previous ones.
func (w *Watch) compareReading(now time.Time, r Reading) {
	if w.levels == nil {
		w.full = map[string]string{}
		w.levels, w.dropped, w.warned = map[string]int{}, map[string]*dropState{}, map[string]bool{}
	}
	for _, g := range r.Gauges {
		w.gauge(g)
	}
	for _, d := range r.Drops {
		w.drops(d, now.Sub(w.at).Seconds())
	}
	w.warnings(r.Warnings)
	w.at = now
}

func (w *Watch) gauge(g Gauge) {
	if g.Size <= 0 {
		return
	}
	key, fill := string(g.Kind)+" "+g.Object, float64(g.Used)/float64(g.Size)
	was := w.levels[key]
	is := 0
	for i, level := range fullLevels {
		if fill >= level || i < was && fill >= level-leave {
			is = i + 1
		}
	}
	what := "entries"
	if g.Kind == Ports {
		what = "ports"
	}
	text := fmt.Sprintf("%s: %d of %d %s are in use, %.0f %%", g.Object, g.Used, g.Size, what, 100*fill)
	w.mu.Lock()
	if delete(w.full, key); is == len(fullLevels) {
		w.full[key] = text + ": " + remedy(g)
	}
	w.mu.Unlock()
	if is == was {
		return
	}
	w.levels[key] = is
	w.Log.Add(Event{Kind: g.Kind, Object: g.Object, Text: text, Used: g.Used, Size: g.Size, Ended: is == 0})
}

// dropState is the state of one drop reason.
type dropState struct {
	packets uint64
	active  bool
	quiet   int // consecutive readings with few drops
}

func (w *Watch) drops(d Dropped, seconds float64) {
	was := w.dropped[d.Object]
	if was == nil { // the time of earlier drops is unknown
		was = &dropState{packets: d.Packets}
		if !w.at.IsZero() {
			was.packets = 0 // the first packets since the last reading
		}
		w.dropped[d.Object] = was
	}
	rate := 0.0
	if d.Packets > was.packets && seconds > 0 && !w.at.IsZero() {
		rate = float64(d.Packets-was.packets) / seconds
	}
	was.packets = d.Packets
	switch {
	case !was.active && rate >= dropBegin:
		was.active, was.quiet = true, 0
		w.Log.Add(Event{Kind: Drops, Object: d.Object, Text: fmt.Sprintf("%s: %.0f packets a second are dropped", d.Object, rate), Rate: rate})
	case was.active && rate >= dropEnd:
		was.quiet = 0
	case was.active:
		if was.quiet++; was.quiet == dropQuiet {
			was.active = false
			w.Log.Add(Event{Kind: Drops, Object: d.Object, Text: d.Object + ": packets are dropped no more", Rate: rate, Ended: true})
		}
	}
}

func (w *Watch) warnings(list []string) {
	now := map[string]bool{}
	for _, text := range list {
		if now[text] = true; !w.warned[text] {
			w.Log.Add(Event{Kind: Warning, Text: text})
		}
	}
	for text := range w.warned {
		if !now[text] {
			w.Log.Add(Event{Kind: Warning, Text: text, Ended: true})
		}
	}
	w.warned = now
}
