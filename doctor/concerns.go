// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net/netip"

	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/flow"
)

// Concerns is the traffic that a finding can explain. A field that is empty matches all traffic;
// a field with values matches traffic with one of them.
type Concerns struct {
	Interfaces   []string        `json:"interfaces,omitempty"`   // of arrival or departure
	Sources      []netip.Prefix  `json:"sources,omitempty"`      // before or after translation
	Destinations []netip.Prefix  `json:"destinations,omitempty"` // before or after translation
	NextHops     []netip.Addr    `json:"next_hops,omitempty"`
	Protocols    []flow.Protocol `json:"protocols,omitempty"`
	Ports        []uint16        `json:"ports,omitempty"` // of the server, before or after translation
	// Stages at which exchanges end for this reason; empty: as the list of the check says.
	Stages []outcome.Stage `json:"stages,omitempty"`
}

// concerning names the traffic that the finding can explain.
func (f Finding) concerning(c Concerns) Finding {
	f.Concerns = &c
	return f
}

// hosts are the single addresses as prefixes.
func hosts(addresses ...netip.Addr) (list []netip.Prefix) {
	for _, a := range addresses {
		if a.IsValid() {
			list = append(list, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return list
}
