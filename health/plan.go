// SPDX-License-Identifier: Apache-2.0

package health

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"syscall"
	"time"
)

// runScheduler starts every due probe until the monitor is closed.
func (m *Monitor) runScheduler() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-timer.C:
		case <-m.wake:
		}
		if wait, waiting := m.startDue(); waiting {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
	}
}

// reschedule makes the planner check the queue again. It never blocks.
func (m *Monitor) reschedule() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// startDue starts due probes up to the limit of concurrent probes, and returns the time until the next.
func (m *Monitor) startDue() (wait time.Duration, waiting bool) {
	lost := m.losses.count(m.opt.TableDrops)
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for len(m.queue) > 0 && m.inFlight < m.opt.MaxInFlight {
		w := m.queue[0]
		if wait := w.due.Sub(now); wait > 0 {
			return wait, true
		}
		heap.Pop(&m.queue)
		w.probing = true
		w.seen.Late = ignoreSmallDelay(now.Sub(w.due))
		m.inFlight++
		m.running.Go(func() { m.probe(w, w.target, now, lost) })
	}
	return 0, false // the end of a probe reschedules
}

// ignoreSmallDelay ignores delays of the machine's scheduler.
func ignoreSmallDelay(d time.Duration) time.Duration {
	if d < 50*time.Millisecond {
		return 0
	}
	return d.Round(time.Millisecond)
}

// probe runs one probe, counts its result and schedules the next. lost is the number of packets that connection
// tracking had dropped before.
func (m *Monitor) probe(w *watch, t *Target, start time.Time, lost uint32) {
	ctx, cancel := context.WithDeadline(w.ctx, start.Add(t.Check.Timeout.D()))
	err := m.runProber(ctx, t)
	cancel()
	end := time.Now()
	lack := missingResource(err)
	if errors.As(err, new(noAnswerError)) && m.losses.count(m.opt.TableDrops) != lost {
		lack = fmt.Sprintf("the connection table is full (nf_conntrack_max): %v", err)
	}

	m.mu.Lock()
	m.inFlight--
	gone := w.ctx.Err() != nil
	var event *Transition
	var news bool
	if !gone && w.target == t { // a result for an old target does not count
		w.seen.Probes++
		w.seen.LastProbe, w.seen.Latency, w.seen.Error = end, end.Sub(start), ""
		if err != nil {
			w.seen.Error = err.Error()
		}
		switch w.lack = lack; {
		case lack != "":
			w.seen.Unknown++
			news = m.recordShortage(end)
		case err != nil:
			w.seen.Failures++
		}
		if lack == "" && w.observe(err, end) {
			event = &Transition{Service: t.Service, Backend: t.Backend, Index: w.index, Up: w.up, Reason: w.reason(), Since: w.since}
		}
	}
	m.mu.Unlock()
	if event != nil {
		m.opt.OnChange(*event)
	}
	if news {
		m.opt.OnLack(lack)
	}

	m.mu.Lock()
	w.probing = false
	if w.ctx.Err() == nil {
		w.due = w.nextDue(start)
		if w.due.Before(end) { // a long timeout; the next probe begins at once and is not late
			w.due = end
		}
		m.queue.push(w)
	}
	m.mu.Unlock()
	m.reschedule()
}

// runProber calls the target's prober. A panic of the prober is a failed probe and does not end the gateway.
func (m *Monitor) runProber(ctx context.Context, t *Target) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the probe broke: %v\n%s", p, debug.Stack())
		}
	}()
	prober := m.probers[t.Check.Type]
	if prober == nil {
		return fmt.Errorf("no prober for checks of type %q", t.Check.Type)
	}
	if t.viaService() {
		mark, err := m.paths.mark(backendKey{t.Service, t.Backend})
		if err == nil {
			err = m.paths.ensureRoute(mark, t.Address, t.Server)
		}
		if err != nil {
			return err
		}
		marked := *t
		marked.Mark = mark
		t = &marked
	}
	return inWords(prober.Probe(ctx, t), t)
}

// inWords removes the repetitions in Go's network errors.
func inWords(err error, t *Target) error {
	var timeout interface{ Timeout() bool }
	var errno syscall.Errno
	var op *net.OpError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EAGAIN): // its text reports a timeout
		return syscall.EAGAIN
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return noAnswerError{t.Check.Timeout}
	case errors.As(err, &op) && errors.As(op.Err, &errno):
		return errno
	}
	return err
}

// dueHeap is a heap of watches by due time.
type dueHeap []*watch

func (q dueHeap) Len() int           { return len(q) }
func (q dueHeap) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q dueHeap) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].position, q[j].position = i, j
}

// Push and Pop are for container/heap; use push.
func (q *dueHeap) Push(x any) {
	w := x.(*watch)
	w.position = len(*q)
	*q = append(*q, w)
}

// Pop takes the last element.
func (q *dueHeap) Pop() any {
	old := *q
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return w
}

func (q *dueHeap) push(w *watch)        { heap.Push(q, w) }
func (q *dueHeap) updateWatch(w *watch) { heap.Fix(q, w.position) }
func (q *dueHeap) remove(w *watch)      { heap.Remove(q, w.position) }
