// SPDX-License-Identifier: Apache-2.0

package conntrack

// Refused counts packets of new connections that connection tracking refused in a window, by cause.
type Refused struct {
	Full  uint64 // The table had no room.
	Ports uint64 // Source NAT had no free port.
	Race  uint64 // Another packet had the same tuple first.
	Chain uint64 // The hash chain was too long.
}

// triesTell returns the minimum number of used ports that the kernel tries per connection without a free port. The
// number is 248 (nf_nat_core.c: 128+64+32+16+8), or the size of a smaller pool. Newer kernels do not count the last
// 32 of a round for TCP (nf_nat_used_tuple_harder), so the smallest pools give no evidence.
func triesTell(pool uint32) uint64 {
	const least = 8
	if pool == 0 {
		return least
	}
	return min(least, uint64(pool-min(pool, 32))/2)
}

// Use is the number of used ports of a pool towards the destination of refused connections. A Pool of 0 is unknown.
type Use struct{ Used, Pool uint32 }

// portsShort reports whether a search for a free port may fail. In a pool of 1,000 ports the first refusals occur at 90 to
// 95 %. In a small pool the kernel may try every port.
func (u Use) portsShort() bool { return 5*uint64(u.Used) >= 4*uint64(u.Pool) }

// Refused derives the causes of refused connections from the counters of a window. A packet may lose a race against
// another with the same tuple: for example, from two hosts that send at once from equal source ports. The kernel
// drops it at the same place and counts it like a packet without a free port.
//
// The used ports towards the destination distinguish the two causes. If they are unknown, the number of port searches
// does, although successful searches count too. pool is the smallest port range of a rule, or 0 if no rule has one.
func (c Counters) Refused(pool uint32, use Use) Refused {
	r := Refused{Chain: uint64(c.ChainTooLong)}
	// A long chain counts as failed without a drop, and so does a resolved clash.
	failed := uint64(c.InsertFailed) - min(r.Chain, uint64(c.InsertFailed))
	lost := min(failed, uint64(c.Drop))
	r.Full = uint64(c.Drop) - lost
	race := uint64(c.Found) < triesTell(pool)*lost
	if use.Pool > 0 {
		race = !use.portsShort()
	}
	if race {
		r.Race = lost
	} else {
		r.Ports = lost
	}
	return r
}
