// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// retired holds counts of chains that were rewritten or removed.
type retired struct{}

func (d *Datapath) retire(*ruleset.Delta) {}

// Counters reads what was counted.
func (d *Datapath) Counters(context.Context) (*datapath.Counters, error) {
	return &datapath.Counters{}, nil
}

// Flows calls yield for each flow.
func (d *Datapath) Flows(context.Context, func(flow.Flow) bool) error { return nil }
