// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
)

// SlowSteps is the number of steps of slow-start until the full weight.
const SlowSteps = 10

// SlowScale is the factor of a service's weights during slow-start, so that a weight of 1 has steps too. It is
// smaller for many heavy backends, because the table of wrr has a slot per unit of weight.
func SlowScale(s *config.Service) int {
	least, sum := 0, 0
	for _, b := range s.Backends {
		w := max(b.Weight, 1)
		if least == 0 || w < least {
			least = w
		}
		sum += w
	}
	if s.SlowStart == 0 || sum == 0 {
		return 1
	}
	return max(1, min((SlowSteps+least-1)/least, balance.MaxTable/sum))
}

// SlowStep returns the number of steps of its weight that a backend has after the given time.
func SlowStep(there time.Duration, s *config.Service) int {
	if s.SlowStart <= 0 || there >= s.SlowStart.D() {
		return SlowSteps
	}
	return 1 + int(SlowSteps*max(0, there)/s.SlowStart.D())
}

// Weight returns the current weight of a backend.
func (s *Service) Weight(i int) int {
	if s.Weights != nil {
		return s.Weights[i]
	}
	return max(s.Backends[i].Weight, 1)
}

// sameStates is Alike without weights: a different weight does not affect existing flows.
func (s *Service) sameStates(o *Service) bool {
	return slices.Equal(s.State, o.State) && (s.Service == o.Service || s.Service.Equal(o.Service))
}
