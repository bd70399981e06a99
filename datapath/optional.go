// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// A datapath may implement these interfaces too, and Attacher, Explainer and Mapper. The engine
// asks for each by a type assertion.

// Warner is a Datapath that knows why, on this host, the snapshot in force may not work.
type Warner interface {
	// Warnings returns one sentence for each cause, with the remedy.
	Warnings() []string
}

// Adopter is a Datapath that can take over what an earlier process left in the kernel.
type Adopter interface {
	// Left reports whether an earlier process left anything of Sluice's in the kernel.
	Left() (bool, error)
}

// ChangeDetector is a Datapath whose kernel objects other programs can change.
type ChangeDetector interface {
	// Touched reports whether another program changed or removed them since the last Apply.
	Touched() (bool, error)
}

// Bypasser is a Datapath whose packets bypass something of the host that would not let them leave as they
// are. What another datapath can carry goes there.
type Bypasser interface {
	// BypassesService returns what packets of the service would bypass, in a sentence; nil for nothing.
	BypassesService(*config.Service) error
	// BypassesNAT does the same for a NAT rule.
	BypassesNAT(*config.NATRule) error
}

// Mover is a Datapath that gives and takes the flows of services and port-forwards that move from one
// datapath to another. The one that takes is applied first, with Snapshot.Arriving, then the other one gives,
// then the first one takes, then the other one is applied, with Snapshot.Gone.
type Mover interface {
	// Give returns the flows of what is named, as Listener.Name does. From then on nothing opens here any
	// more where that can be prevented; what is open goes on.
	Give(ctx context.Context, names map[string]bool) ([]flow.Flow, error)
	// Take makes flows that another datapath has given, and ends the state of Snapshot.Arriving. It returns
	// how many it made: one that is there already, or whose backend is not there any more, is left out.
	Take(ctx context.Context, flows []flow.Flow) (int, error)
}
