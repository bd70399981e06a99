// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/load"
)

// yardstick is the redirect-only loop with one flow, measured directly before
// and after every run. A virtual machine's CPU changes its speed from second to
// second (its sibling, the shared cache, the host); a figure divided by what the
// yardstick did around it changes much less, and that quotient is what two runs
// of a suite are compared by.
type yardstick struct {
	trial  *Trial
	sender *load.Sender
	sink   *load.Sink
	last   float64 // the latest measurement in Mpps, 0 before the first
}

// yardstickTime is what one measurement takes, besides about 50 ms to begin and end.
const yardstickTime = 100 * time.Millisecond

// unsteady is by how much the yardstick may differ before and after a run; beyond
// it the machine was disturbed meanwhile and the run is made once more.
const unsteady = 0.10

func newYardstick(ctx context.Context, cpu int) (y *yardstick, err error) {
	y = &yardstick{trial: &Trial{Context: ctx, CPU: cpu, Seconds: yardstickTime.Seconds()}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("bench: yardstick: %w", err), y.close())
			y = nil
		}
	}()
	n, err := newNetwork(y.trial)
	if err != nil {
		return y, err
	}
	ref, err := load.NewReference(n.gateway, load.Redirect, load.ReferenceOptions{In: "wan0", Out: "lan0"})
	if err != nil {
		return y, err
	}
	y.trial.closeLater(ref)
	if y.sink, err = load.NewSink(load.SinkOptions{}); err != nil {
		return y, err
	}
	y.trial.closeLater(y.sink)
	if err := y.sink.Attach(n.server, "eth0"); err != nil {
		return y, err
	}
	_, _, spec := n.ends(stream{dest: one(vip4, 53), flows: 1})
	if y.sender, err = load.NewSender(n.client, spec, []int{cpu}); err != nil {
		return y, err
	}
	y.trial.closeLater(y.sender)
	_, err = y.measure()
	return y, err
}

// measure returns the yardstick's packets in a microsecond of CPU time.
func (y *yardstick) measure() (float64, error) {
	for try := 1; ; try++ {
		mpps, away, err := y.once()
		if err != nil || away < maxElsewhere || try == maxTries {
			y.last = mpps
			return mpps, err
		}
	}
}

func (y *yardstick) once() (mpps, away float64, err error) {
	ctx, stop := context.WithCancel(y.trial)
	done := make(chan error, 1)
	began := y.sender.Sent()
	go func() { done <- y.sender.Run(ctx, nil) }()
	defer func() {
		stop()
		err = errors.Join(err, <-done)
	}()
	// The call begins with a grace period.
	for y.sender.Sent() == began {
		if err := wait(ctx, 1); err != nil {
			return 0, 0, err
		}
	}
	if err := wait(ctx, 5); err != nil {
		return 0, 0, err
	}
	cpus, err := y.sink.ByCPU()
	if err != nil {
		return 0, 0, err
	}
	begin := y.sender.CPUTime()
	if err := y.trial.window(ctx, y.sender.CPUTime); err != nil {
		return 0, 0, err
	}
	took := y.sender.CPUTime() - begin
	after, err := y.sink.ByCPU()
	if err != nil {
		return 0, 0, err
	}
	var arrived uint64
	for i := range after {
		arrived += after[i] - cpus[i]
	}
	if arrived == 0 || took <= 0 {
		return 0, 0, errors.New("nothing arrived")
	}
	return float64(arrived) / float64(took.Microseconds()), elsewhere(cpus, after, y.trial.CPU), nil
}

// around measures before (unless that was just done) and after f and returns the
// mean of both, and whether they agree.
func (y *yardstick) around(f func()) (mean float64, steady bool, err error) {
	before := y.last
	f()
	after, err := y.measure()
	if err != nil {
		return 0, false, err
	}
	mean = (before + after) / 2
	return mean, math.Abs(after-before) <= unsteady*mean, nil
}

func (y *yardstick) close() error {
	var errs []error
	for _, f := range slices.Backward(y.trial.cleanup) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}
