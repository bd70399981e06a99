// SPDX-License-Identifier: Apache-2.0

package capacity

// Extensions selects the data that the kernel stores with each entry.
type Extensions struct {
	NAT, Accounting, Timestamps, Events, Labels, SeqAdjust, Helper, Timeouts, SYNProxy bool
}

// EntryBytes returns the kernel memory of one entry. The nf_conn object of 248 bytes uses a 256-byte slab. The block
// of extensions is 16 bytes plus its parts, at least 128, rounded up to a kmalloc size
// (net/netfilter/nf_conntrack_extend.c). Measured: 257 bytes plain, 377 with NAT, the same with accounting, time
// stamps, events and labels.
func EntryBytes(x Extensions) uint64 {
	sum := uint64(0)
	for _, part := range []struct {
		on   bool
		size uint64
	}{{x.NAT, 8}, {x.Accounting, 32}, {x.Timestamps, 16}, {x.Events, 32}, {x.Labels, 16},
		{x.SeqAdjust, 24}, {x.Helper, 56}, {x.Timeouts, 8}, {x.SYNProxy, 12}} {
		if part.on {
			sum += part.size
		}
	}
	if sum == 0 {
		return 256
	}
	return 256 + slab(max(128, 16+sum))
}

// slab rounds up to a kmalloc size.
func slab(n uint64) uint64 {
	for _, size := range []uint64{128, 192, 256} {
		if n <= size {
			return size
		}
	}
	return 512
}

// BucketBytes is the size of one hash bucket: a hlist_nulls_head.
const BucketBytes = 8

// TableBytes returns the kernel memory of a table: entries and hash buckets.
func TableBytes(entries, buckets uint64, x Extensions) uint64 {
	return entries*EntryBytes(x) + buckets*BucketBytes
}
