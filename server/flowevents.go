// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/flow"
)

// maxFlowsOfInterest limits the flows that one client follows. flowLook is the interval of scans: a
// scan reads a table and may use 5 % of one CPU.
const (
	maxFlowsOfInterest = 1000
	flowLook           = 2 * time.Second
)

// flowWatch detects flows of a filter that begin or end.
type flowWatch struct {
	match  func(*flow.Flow) bool
	source string
	seen   map[flowKey]string // Name of the flow.
	full   bool               // More flows matched than can be followed, and the client was informed.
}

type flowKey struct {
	flow.Tuple
	datapath string
}

// scanFlows reads the flows once, and returns the changes and the time of the next scan.
func (w *flowWatch) scanFlows(ctx context.Context, e *engine.Engine) (events []event.Event, next time.Duration, err error) {
	start := time.Now()
	is, full := map[flowKey]string{}, false
	err = e.Flows(ctx, w.source, func(f flow.Flow) bool {
		if !w.match(&f) {
			return true
		}
		if full = len(is) == maxFlowsOfInterest; full {
			return false
		}
		is[flowKey{f.Original, f.Datapath}] = flowName(&f)
		return true
	})
	if err != nil {
		return nil, 0, err
	}
	tell := func(e event.Event) {
		e.Kind, e.At = event.Flow, start
		events = append(events, e)
	}
	if full && !w.full {
		tell(event.Event{Text: fmt.Sprintf("more than %d flows match: the others are not told; ask for fewer", maxFlowsOfInterest)})
	}
	for k, name := range is {
		if _, was := w.seen[k]; !was {
			tell(event.Event{Object: name, Text: "flow " + name})
		}
	}
	for k, name := range w.seen {
		if _, still := is[k]; !still && !full { // otherwise the scan may not have included the flow
			tell(event.Event{Object: name, Text: "flow " + name, Ended: true})
		}
	}
	w.seen, w.full = is, full
	return events, max(flowLook, 20*time.Since(start)), nil
}

func flowName(f *flow.Flow) string {
	name := f.Original.String()
	switch {
	case f.Backend != "":
		name += " by " + f.Owner + "/" + f.Backend
	case f.Owner != "":
		name += " by " + f.Owner
	}
	return name
}
