// SPDX-License-Identifier: Apache-2.0

package conntrack

// Refused are the packets of new connections that connection tracking refused in a
// window, by cause.
type Refused struct {
	Full  uint64 // the table had no room
	Ports uint64 // source NAT had no free port
	Race  uint64 // another packet had the same tuple first
	Chain uint64 // the hash chain was too long
}

// triesTell is how many taken ports the kernel has tried at least for each connection
// that found none: 248 where all are taken (nf_nat_core.c: 128+64+32+16+8), in small
// pools as many as there are ports. Newer kernels do not count the last 32 of a round
// for TCP (nf_nat_used_tuple_harder), so that the smallest pools tell nothing.
func triesTell(pool uint32) uint64 {
	const least = 8
	if pool == 0 {
		return least
	}
	return min(least, uint64(pool-min(pool, 32))/2)
}

// Use is how many ports of a pool are in use towards the destination that connections were
// refused to. A Pool of 0: not known.
type Use struct{ Used, Pool uint32 }

// short tells whether so many are in use that a search may find none: the first were
// refused between 90 and 95 % of a pool of 1,000, and of small pools all may be tried.
func (u Use) short() bool { return 5*uint64(u.Used) >= 4*uint64(u.Pool) }

// Refused tells by the counters of a window why connections were refused. A packet
// that lost a race, as those of two hosts with equal source ports may that leave at once, is
// dropped at the same place and counted in the same way as one without a port. The ports in
// use towards the destination tell them apart; where they are not known, the search for a
// port does, which other connections add to, those that found one in the end. pool is the
// smallest range of ports that a rule names; 0: none does.
func (c Counters) Refused(pool uint32, use Use) Refused {
	r := Refused{Chain: uint64(c.ChainTooLong)}
	// A long chain counts as failed, without a drop; so does a clash that was resolved.
	failed := uint64(c.InsertFailed) - min(r.Chain, uint64(c.InsertFailed))
	lost := min(failed, uint64(c.Drop))
	r.Full = uint64(c.Drop) - lost
	race := uint64(c.Found) < triesTell(pool)*lost
	if use.Pool > 0 {
		race = !use.short()
	}
	if race {
		r.Race = lost
	} else {
		r.Ports = lost
	}
	return r
}
