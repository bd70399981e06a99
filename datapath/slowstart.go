// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
)

// SlowSteps is in how many steps a backend that comes gets its full weight.
const SlowSteps = 10

// SlowScale is what the weights of a service with slow-start are multiplied by while one of its backends
// comes, so that a weight of 1 has steps too. Of many heavy backends it is less, for the sake of wrr,
// whose table has a slot for each unit of weight.
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

// SlowStep is how many of the steps of its weight a backend has, by how long it has been there.
func SlowStep(there time.Duration, s *config.Service) int {
	if s.SlowStart <= 0 || there >= s.SlowStart.D() {
		return SlowSteps
	}
	return 1 + int(SlowSteps*max(0, there)/s.SlowStart.D())
}

// Weight returns that of a backend now.
func (s *Service) Weight(i int) int {
	if s.Weights != nil {
		return s.Weights[i]
	}
	return max(s.Backends[i].Weight, 1)
}

// sameStates is Alike without weights: no flow is treated otherwise for another weight.
func (s *Service) sameStates(o *Service) bool {
	return slices.Equal(s.State, o.State) && (s.Service == o.Service || s.Service.Equal(o.Service))
}
