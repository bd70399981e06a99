// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/load"
)

// yardstick is the redirect-only loop with one flow, in a network of its own. It sends on the same CPU and at the
// same time as the measured row; the scheduler alternates between them every few milliseconds. Each is measured by
// the CPU time of its own thread. The time of ksoftirqd counts for both: hardly any with packets, a tenth with
// connections.
//
// The speed of a virtual CPU changes within tenths of a second (sibling thread, shared cache, host). Both programs
// see the same change, so rows and runs are compared by the quotient.
type yardstick struct {
	trial  *Trial
	sender *load.Sender
	sink   *load.Sink
}

func newYardstick(ctx context.Context, cpu int) (y *yardstick, err error) {
	y = &yardstick{trial: &Trial{Context: ctx, CPU: cpu}}
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
	_, _, spec := n.ends(stream{dest: singleEndpoint(vip4, 53), flows: 1})
	if y.sender, err = load.NewSender(n.client, spec, []int{cpu}); err != nil {
		return y, err
	}
	y.trial.closeLater(y.sender)
	_, _, err = y.measureAlone(ctx)
	return y, err
}

// measureWith runs f while the yardstick sends. It returns the yardstick's packets per microsecond of its CPU time, and
// the share that another CPU handled.
func (y *yardstick) measureWith(ctx context.Context, f func() error) (mpps, away float64, err error) {
	ctx, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	sent := y.sender.Sent()
	go func() {
		done <- y.sender.Run(ctx, nil)
		stop() // if it could not begin, the loop below must not wait for packets
	}()
	defer func() {
		stop()
		err = errors.Join(err, <-done)
	}()
	// The call begins with an RCU grace period.
	for y.sender.Sent() == sent {
		if err := wait(ctx, 1); err != nil {
			return 0, 0, err
		}
	}
	before, err := y.sink.ByCPU()
	if err != nil {
		return 0, 0, err
	}
	begin := y.sender.CPUTime()
	if err := f(); err != nil {
		return 0, 0, err
	}
	// On a busy machine the yardstick may not have been scheduled yet.
	for deadline := time.Now().Add(30 * time.Second); ; {
		took := y.sender.CPUTime() - begin
		after, err := y.sink.ByCPU()
		if err != nil {
			return 0, 0, err
		}
		var arrived uint64
		for i := range after {
			arrived += after[i] - before[i]
		}
		if arrived > 0 && took > 0 {
			return float64(arrived) / float64(took.Microseconds()), otherCPUShare(before, after, y.trial.CPU), nil
		}
		if time.Now().After(deadline) {
			return 0, 0, errors.New("yardstick: nothing arrived")
		}
		if err := wait(ctx, 5); err != nil {
			return 0, 0, err
		}
	}
}

// measureAlone measures the yardstick without another load.
func (y *yardstick) measureAlone(ctx context.Context) (mpps, away float64, err error) {
	return y.measureWith(ctx, func() error { return wait(ctx, 100) })
}

// withYardstick runs the measurement f while the yardstick runs, in suites that have one. For a profile, the yardstick runs
// after f, so that the profile does not include it.
func (t *Trial) withYardstick(ctx context.Context, f func() error) error {
	t.away = false
	if t.yardstick == nil {
		return f()
	}
	run := func() (float64, float64, error) { return t.yardstick.measureWith(ctx, f) }
	if t.profile != "" {
		if err := f(); err != nil {
			return err
		}
		run = func() (float64, float64, error) { return t.yardstick.measureAlone(ctx) }
	}
	mpps, away, err := run()
	if err != nil {
		return err
	}
	t.per, t.away = mpps, t.away || away >= maxElsewhere
	return nil
}

func (y *yardstick) close() error {
	var errs []error
	for _, f := range slices.Backward(y.trial.cleanup) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}
