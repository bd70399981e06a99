// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// slowTick is the interval of weight updates, whatever the number of backends in slow start.
const slowTick = time.Second

// slowStartWeights returns the weights of a service's backends while any is in slow start, else nil. was is
// the service in force, or nil. All backends of a new service start together, except those that a
// previous daemon recorded.
func (e *Engine) slowStartWeights(s *config.Service, state []datapath.State, was *datapath.Service, now time.Time) []int {
	if s.SlowStart == 0 || was == nil && e.earlier == nil {
		return nil
	}
	starting := false
	steps := make([]int, len(s.Backends))
	for i := range s.Backends {
		since, ok := e.slowStartBegin(s, i, state[i], was, now)
		if steps[i] = datapath.SlowSteps; ok {
			steps[i] = datapath.SlowStep(now.Sub(since), s)
		}
		starting = starting || steps[i] < datapath.SlowSteps
	}
	if !starting {
		return nil
	}
	scale := datapath.SlowScale(s)
	weights := make([]int, len(s.Backends))
	for i := range weights {
		weights[i] = max(1, max(s.Backends[i].Weight, 1)*scale*steps[i]/datapath.SlowSteps)
	}
	return weights
}

// serviceFinder returns a function that finds services in force by name. It builds its index on first use.
func (e *Engine) serviceFinder() func(name string) *datapath.Service {
	var index map[string]datapath.Service
	return func(name string) *datapath.Service {
		if index == nil {
			index = servicesOf(e.inForce)
		}
		if s, ok := index[name]; ok {
			return &s
		}
		return nil
	}
}

// slowStartBegin returns when a backend began to accept new flows, if its service was in force then.
func (e *Engine) slowStartBegin(s *config.Service, i int, state datapath.State, was *datapath.Service, now time.Time) (time.Time, bool) {
	b := &s.Backends[i]
	if state != datapath.Up {
		return time.Time{}, false
	}
	if was == nil {
		return e.earlierStart(s.Name, b)
	}
	for j := range was.Backends {
		if o := &was.Backends[j]; o.Name == b.Name && o.Address == b.Address && o.Port == b.Port && was.State[j] == datapath.Up {
			since, ok := e.since[backendKey{s.Name, b.Name}]
			return since, ok
		}
	}
	return now, true
}

// noteStarting records when the backends of new snapshots began to accept new flows.
func (e *Engine) noteStarting(next map[string]*datapath.Snapshot, now time.Time) {
	since := map[backendKey]time.Time{}
	var keep []savedSlowStart
	before := e.serviceFinder()
	for _, snapshot := range next {
		for k := range snapshot.Services {
			s := &snapshot.Services[k]
			if s.Weights == nil {
				continue
			}
			was := before(s.Name)
			for i := range s.Backends {
				if at, ok := e.slowStartBegin(s.Service, i, s.State[i], was, now); ok && datapath.SlowStep(now.Sub(at), s.Service) < datapath.SlowSteps {
					b := &s.Backends[i]
					since[backendKey{s.Name, b.Name}] = at
					keep = append(keep, savedSlowStart{s.Name, b.Name, netip.AddrPortFrom(b.Address, b.Port), at.UTC().Truncate(time.Millisecond)})
				}
			}
		}
	}
	e.since, e.earlier = since, nil
	e.saveStarting(keep)
}

// slowStarts raises the weights of backends in slow start until the context ends.
func (e *Engine) slowStarts(ctx context.Context) {
	tick := time.NewTicker(slowTick)
	defer tick.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err, text := e.updateSlowStart(ctx), ""
		if err != nil {
			if text = err.Error(); text != told && !errors.Is(err, ErrStopped) {
				e.opt.Log.Error("weights of backends that come could not be changed; trying again", "every", slowTick, "error", err)
			}
		}
		told = text
	}
}

// updateSlowStart applies the present weights if they differ from those in force.
func (e *Engine) updateSlowStart(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.since) == 0 || e.config == nil || !e.statesChanged() {
		return nil
	}
	_, err := e.commit(ctx, e.config, e.plan)
	return err
}

// slowStartText describes the share of its weight that a backend has; "" for all.
func slowStartText(s *datapath.Service, i int) string {
	full := max(s.Backends[i].Weight, 1) * datapath.SlowScale(s.Service)
	if s.Weights == nil || s.State[i] != datapath.Up || s.Weights[i] == full {
		return ""
	}
	return fmt.Sprintf("slow start: %d %% of its weight", 100*s.Weights[i]/full)
}
