// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// watch is one probed backend with its state. The Monitor's mutex protects it.
type watch struct {
	target *Target // the value is replaced as a whole, never modified
	index  int
	// generation is the last Configure that requested the watch.
	generation uint64
	ctx        context.Context // ends when the backend is no longer watched
	cancel     context.CancelFunc

	due      time.Time // of the next probe
	position int       // in the queue
	probing  bool

	up, known bool
	since     time.Time
	good, bad int    // Consecutive probes.
	failure   error  // of the last counted probe
	lack      string // Why the last probe was not counted; empty if it was.
	seen      Status // The part of the status that the last probe filled in.
}

func (w *watch) start(ctx context.Context, now time.Time) {
	w.ctx, w.cancel = context.WithCancel(ctx)
	w.up, w.since = w.target.Check.Initial == "up", now
}

// observe counts the result of one probe and reports whether it changed or first determined the state. The first good
// probe brings a new backend up, so a restarted daemon does not exclude working servers for rise × interval. Later
// changes need rise consecutive good probes to go up and fall bad ones to go down.
func (w *watch) observe(err error, now time.Time) (changed bool) {
	first, up := !w.known, w.up
	w.known, w.failure = true, err
	if err == nil {
		w.good, w.bad = w.good+1, 0
		w.up = up || first || w.good >= w.target.Check.Rise
	} else {
		w.good, w.bad = 0, w.bad+1
		w.up = up && w.bad < w.target.Check.Fall
	}
	if w.up != up {
		w.since = now
	}
	return w.up != up || first
}

// reason returns the reason for w's state in words.
func (w *watch) reason() string {
	if w.lack != "" {
		return fmt.Sprintf("unknown: %s; before: %s", w.lack, w.resultText())
	}
	return w.resultText()
}

func (w *watch) resultText() string {
	k := w.target.Check
	switch {
	case !w.known:
		return "not probed yet, counts as " + k.Initial
	case w.up && w.bad > 0:
		return fmt.Sprintf("%s failed, %d in a row take it down: %v", count(w.bad), k.Fall, w.failure)
	case w.bad > 0:
		return fmt.Sprintf("%s in a row failed: %v", count(w.bad), w.failure)
	case w.up:
		return count(w.good) + " in a row passed"
	}
	return fmt.Sprintf("%s passed, %d in a row bring it up", count(w.good), k.Rise)
}

func count(n int) string {
	if n == 1 {
		return "1 probe"
	}
	return fmt.Sprintf("%d probes", n)
}

// reportSlack is the permitted delay of a failure report beyond interval × fall, minus a tenth of a second for the machine.
const reportSlack = 400 * time.Millisecond

// period is the maximum time between the beginnings of two probes: the interval, or less for a long timeout. A silent
// backend is reported within interval × fall + 0.5 s. In the worst case it dies directly after an answer. Then fall
// probes must begin, and the last one must time out, within that time.
func (w *watch) period() time.Duration {
	k := w.target.Check
	interval, timeout, fall := k.Interval.D(), k.Timeout.D(), time.Duration(max(1, k.Fall))
	p := interval - max(0, timeout-reportSlack)/fall
	if p < timeout { // a failing probe would still run when the next is due
		p = min(timeout, fall*(interval-timeout)+reportSlack)
	}
	return p
}

// nextDue returns the due time of the probe after one that began at start. Jitter shortens the period, so that it does
// not delay the detection of a failure.
func (w *watch) nextDue(start time.Time) time.Time {
	p := w.period()
	if j := w.target.Check.Jitter; j != nil {
		p -= time.Duration(*j * rand.Float64() * float64(p))
	}
	return start.Add(p)
}

// randomPart returns a random duration of less than d.
func randomPart(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return rand.N(d)
}
