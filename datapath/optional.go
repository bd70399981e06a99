// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// A datapath may also implement these interfaces, and Attacher, Explainer and Mapper. The engine tests each by a type
// assertion.

// Warner is a Datapath that detects problems of the active snapshot on this host.
type Warner interface {
	// Warnings returns one sentence per problem, with the remedy.
	Warnings() []string
}

// Adopter is a Datapath that can adopt the kernel state of an earlier process.
type Adopter interface {
	// Left reports whether an earlier process left kernel state.
	Left() (bool, error)
}

// ChangeDetector is a Datapath with kernel objects that other programs can change.
type ChangeDetector interface {
	// Touched reports whether another program changed or removed them since the last Apply.
	Touched() (bool, error)
}

// Bypasser is a Datapath with packets that bypass a function of the host, such as IPsec, which would change or drop
// them. The engine assigns such objects to another datapath if possible.
type Bypasser interface {
	// BypassesService describes the function that packets of the service would bypass; nil if there is none.
	BypassesService(*config.Service) error
	// BypassesNAT does the same for a NAT rule.
	BypassesNAT(*config.NATRule) error
}

// Mover is a Datapath that transfers the flows of services and port-forwards that move between datapaths. The order
// is: Apply of the taker with Snapshot.Arriving, Give of the giver, Take of the taker, Apply of the giver with
// Snapshot.Gone.
type Mover interface {
	// Give returns the flows of the named services and port-forwards, named like Listener.Name. Afterwards this
	// datapath opens no new flow for them if that can be prevented. Open flows continue.
	Give(ctx context.Context, names map[string]bool) ([]flow.Flow, error)
	// Take creates flows given by another datapath, and ends the state of Snapshot.Arriving. It returns the number of
	// created flows. It skips existing flows and flows of missing backends.
	Take(ctx context.Context, flows []flow.Flow) (int, error)
}
