// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// Explainer is a Datapath that can tell what it would do with a packet without
// sending it.
type Explainer interface {
	Explain(context.Context, Question) (*Explanation, error)
}

// Question is a packet to be explained.
type Question struct {
	Tuple     flow.Tuple
	Interface string // where it arrives; empty: the first attached interface
	Size      int    // bytes of the network packet; 0: 60
}

// Explanation is the datapath's decision about one packet.
type Explanation struct {
	Datapath  string     `json:"datapath"`
	Interface string     `json:"interface"`
	Owner     string     `json:"owner,omitempty"`   // service or NAT rule
	Backend   string     `json:"backend,omitempty"` // of the service
	Before    flow.Tuple `json:"before"`
	// After is the packet as it leaves; an unspecified address or port 0 is chosen
	// from a pool when a packet is really sent.
	After    flow.Tuple `json:"after"`
	Out      string     `json:"out,omitempty"` // interface the packet leaves by
	NextHop  netip.Addr `json:"next-hop,omitzero"`
	Action   string     `json:"action"` // forward, drop, pass
	Reason   string     `json:"reason"`
	Existing bool       `json:"existing"` // an existing flow decided
	Steps    []string   `json:"steps,omitempty"`
}
