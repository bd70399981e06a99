// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// skipsFlowLookup reports whether packets of a service can skip the flow lookup. The service must create no
// flow and have none left, and no list, limit or edit may apply to single packets. w is the
// compiled service.
func (c *compiler) skipsFlowLookup(id uint32, s *config.Service, w *wire.Service) bool {
	keepsNone := (s.Mode == config.ModeDSR || s.Mode == config.ModeTunnel || s.Mode == config.ModeStateless) && s.Scheduler.Hashes()
	return keepsNone && (s.Protocol == flow.TCP || s.Protocol == flow.UDP) && s.Limits == (config.Limits{}) && !keepsFlows(s) &&
		len(s.Sessions)+len(s.Allow)+len(s.Deny) == 0 && w.Flags&wire.ServiceMSSClamp == 0 &&
		c.state.ServiceFlows(id) == 0
}

// sharesPool reports whether a listener's address is also a pool address. Its packets then need the
// flow lookup first.
func (c *compiler) sharesPool(d wire.Direct) bool {
	for _, p := range c.Pools {
		if p.Family == wire.Family4 && p.Addr.W[0] == uint32(d.Key) {
			return true
		}
	}
	return false
}

// directKey returns the key defined in bpf/datapath/direct.h.
func directKey(l wire.ListenerKey) uint64 {
	return uint64(l.Addr[0]) | uint64(l.Addr[1])<<8 | uint64(l.Addr[2])<<16 | uint64(l.Addr[3])<<24 | uint64(l.Port)<<32 | uint64(l.L4Proto)<<48
}

// PlaceDirects assigns each direct listener to one of two adjacent places, in the order of their
// keys. Listeners without a free place are left out and take the full path.
func PlaceDirects(list []wire.Direct) map[uint32]wire.Direct {
	slices.SortFunc(list, func(a, b wire.Direct) int { return cmp.Compare(a.Key, b.Key) })
	out := map[uint32]wire.Direct{}
	for _, d := range list {
		at := uint32(d.Key * wire.DirectMultiplier >> (64 - wire.DirectBits))
		for _, at := range []uint32{at, at ^ 1} {
			if _, taken := out[at]; !taken {
				out[at] = d
				break
			}
		}
	}
	return out
}
