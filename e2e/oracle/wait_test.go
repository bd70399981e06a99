// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"slices"
	"time"
)

// patience is how long a world may take to do what another has done already. The daemon may be loading its programs.
var patience = 8 * time.Second

// routesTime exceeds the time that the datapath takes to read changed routes and settings.
const routesTime = 100 * time.Millisecond

// late reports whether each world has had time to send a packet that waited for its next hop: the daemon keeps it for
// three seconds, from when it has loaded its programs.
func (r *run) late() bool { return time.Since(r.began) > 5*time.Second }

// resolutionTime exceeds the time that the kernel and the daemon take for a silent next hop (see settings).
const resolutionTime = 800 * time.Millisecond

// outstanding reports whether a packet that no world has sent on may wait for its next hop.
func (r *run) outstanding(outcomes []outcome) bool {
	for i, w := range r.worlds {
		if len(outcomes[i].lines) > 0 || w.sent == nil {
			return false
		}
	}
	return slices.ContainsFunc(r.worlds, func(w *world) bool { return time.Since(w.wire.unanswered) < resolutionTime })
}
