// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestBucketsHoldTheirValues checks that each value lies within the edges of its
// bucket and that a bucket is at most 1/32 of its value wide.
func TestBucketsHoldTheirValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ns := rapid.Uint64Range(0, 1<<40-1).Draw(t, "ns")
		from, to := edges(bucketOf(ns))
		if ns < from || ns >= to {
			t.Fatalf("%d is outside its bucket [%d, %d)", ns, from, to)
		}
		if width := to - from; width > 1 && width > from/32 {
			t.Fatalf("bucket [%d, %d) is wider than 1/32", from, to)
		}
	})
}

func TestBucketsAreConsecutive(t *testing.T) {
	var last uint64
	for b := range histBuckets {
		from, to := edges(b)
		if from != last || to <= from {
			t.Fatalf("bucket %d is [%d, %d), the one before ended at %d", b, from, to, last)
		}
		last = to
	}
}

func TestQuantiles(t *testing.T) {
	var h Histogram
	for us := range 1000 {
		h.Add(time.Duration(us+1) * time.Microsecond)
	}
	near := func(got, want time.Duration) bool { return got >= want && got <= want+want/25 }
	for q, want := range map[float64]time.Duration{
		0.5: 501 * time.Microsecond, 0.99: 991 * time.Microsecond, 1: 1000 * time.Microsecond,
	} {
		if got := h.Quantile(q); !near(got, want) {
			t.Errorf("quantile %g is %v, want about %v", q, got, want)
		}
	}
	if got := new(Histogram).Quantile(0.5); got != 0 {
		t.Errorf("quantile of nothing is %v", got)
	}
}
