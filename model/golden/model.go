// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
)

// Model is the reference model as a Subject.
type Model struct {
	Seed  uint64
	model *model.Model
}

var _ Subject = (*Model)(nil)

// Name returns "model".
func (*Model) Name() string { return "model" }

// Reset implements Subject.
func (s *Model) Reset(c *config.Config, h model.Host) (err error) {
	s.model, err = model.New(c, h, s.Seed)
	return err
}

// Step implements Subject.
func (s *Model) Step(in model.Arrival) (model.Outcome, error) { return s.model.Receive(in), nil }

// Advance implements Subject.
func (s *Model) Advance(d time.Duration) error { s.model.Advance(d); return nil }

// Apply implements Subject.
func (s *Model) Apply(c *config.Config) error { s.model.Apply(c); return nil }

// SetHost implements Subject.
func (s *Model) SetHost(h model.Host) error { s.model.SetHost(h); return nil }

// SetState implements Subject.
func (s *Model) SetState(service, backend string, state datapath.State) error {
	return s.model.SetState(service, backend, state)
}

// Map implements Subject.
func (s *Model) Map(m datapath.Mapping) error { return s.model.Map(m) }

// Unmap implements Subject.
func (s *Model) Unmap(m datapath.Mapping) error { s.model.Unmap(m); return nil }

// Flows implements Subject.
func (s *Model) Flows() ([]flow.Flow, error) { return s.model.Flows(), nil }

// Counters implements Subject.
func (s *Model) Counters() (*datapath.Counters, error) {
	if s.model == nil {
		return nil, fmt.Errorf("model: no configuration")
	}
	return s.model.Counters(), nil
}
