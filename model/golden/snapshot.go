// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// Snapshot returns a snapshot of the whole configuration. Backends are up unless they drain.
func Snapshot(c *config.Config) *datapath.Snapshot {
	s := &datapath.Snapshot{Config: c}
	for i := range c.Services {
		states := make([]datapath.State, len(c.Services[i].Backends))
		for n, b := range c.Services[i].Backends {
			if b.Drain {
				states[n] = datapath.Drain
			}
		}
		s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: states})
	}
	for i := range c.NAT {
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	for i := range c.Firewall.Rules {
		s.Rules = append(s.Rules, &c.Firewall.Rules[i])
	}
	return s
}

// SetState changes the state of a backend in a snapshot.
func SetState(s *datapath.Snapshot, service, backend string, state datapath.State) {
	for i := range s.Services {
		v := &s.Services[i]
		for n, b := range v.Backends {
			if v.Name == service && b.Name == backend {
				v.State[n] = state
			}
		}
	}
}

// Refusal returns the reason why a datapath does not support a configuration, or nil.
func Refusal(d datapath.Carrier, c *config.Config) error {
	for i := range c.Services {
		if err := d.CarriesService(&c.Services[i]); err != nil {
			return err
		}
	}
	for i := range c.NAT {
		if err := d.CarriesNAT(&c.NAT[i]); err != nil {
			return err
		}
	}
	for i := range c.Firewall.Rules {
		if err := d.CarriesRule(&c.Firewall.Rules[i]); err != nil {
			return err
		}
	}
	return nil
}
