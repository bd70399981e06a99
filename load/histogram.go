// SPDX-License-Identifier: Apache-2.0

package load

import (
	"math"
	"math/bits"
	"time"
)

// The histogram's layout equals hist_bucket in bpf/load/frame.h. Values below 2^(sub+1) have a bucket each; above, each
// octave has 2^sub buckets.
const (
	histSubBits = 5
	histBuckets = (40 - histSubBits + 1) << histSubBits
)

// Histogram counts durations in log-linear buckets 3 % wide, from 1 ns to 18 minutes.
type Histogram struct {
	counts []uint64
	total  uint64
}

// Bucket is one nonempty bucket of a histogram.
type Bucket struct {
	// From and To in nanoseconds; To is not part of the bucket.
	From  uint64 `json:"from_ns"`
	To    uint64 `json:"to_ns"`
	Count uint64 `json:"count"`
}

// Add counts one duration.
func (h *Histogram) Add(d time.Duration) {
	h.add(bucketOf(uint64(max(d, 0))), 1)
}

func (h *Histogram) add(bucket int, n uint64) {
	if h.counts == nil {
		h.counts = make([]uint64, histBuckets)
	}
	h.counts[bucket] += n
	h.total += n
}

func bucketOf(ns uint64) int {
	exp := bits.Len64(ns) - 1
	switch {
	case exp < histSubBits:
		return int(ns)
	case exp >= 40:
		return histBuckets - 1
	}
	exp -= histSubBits
	return exp<<histSubBits + int(ns>>exp)
}

// bucketEdges returns the range of values of a bucket in nanoseconds.
func bucketEdges(bucket int) (from, to uint64) {
	if bucket < 2<<histSubBits {
		return uint64(bucket), uint64(bucket) + 1
	}
	exp := bucket>>histSubBits - 1
	m := uint64(bucket - exp<<histSubBits)
	return m << exp, (m + 1) << exp
}

// Count returns the number of values.
func (h *Histogram) Count() uint64 { return h.total }

// Quantile returns the smallest value that the share q of all values does not exceed (nearest rank). It returns the
// upper edge of the bucket, which is at most 3 % too high, or 0 if the histogram is empty.
func (h *Histogram) Quantile(q float64) time.Duration {
	const rounding = 1e-6 // 0.07 · 100 is more than 7 in binary
	want := max(uint64(math.Ceil(q*float64(h.total)-rounding)), 1)
	var seen uint64
	for b, n := range h.counts {
		if seen += n; seen >= want {
			_, to := bucketEdges(b)
			return time.Duration(to)
		}
	}
	return 0
}

// Max returns the upper edge of the highest bucket in use.
func (h *Histogram) Max() time.Duration { return h.Quantile(1) }

// Mean returns the average of the values, using the middle of each bucket.
func (h *Histogram) Mean() time.Duration {
	if h.total == 0 {
		return 0
	}
	var sum float64
	for b, n := range h.counts {
		from, to := bucketEdges(b)
		sum += float64(n) * float64(from+to-1) / 2
	}
	return time.Duration(sum / float64(h.total))
}

// Buckets returns the nonempty buckets, lowest first.
func (h *Histogram) Buckets() []Bucket {
	var out []Bucket
	for b, n := range h.counts {
		if n > 0 {
			from, to := bucketEdges(b)
			out = append(out, Bucket{from, to, n})
		}
	}
	return out
}

// Latency is the summary of a histogram in nanoseconds.
type Latency struct {
	Count uint64        `json:"count"`
	Mean  time.Duration `json:"mean_ns"`
	P50   time.Duration `json:"p50_ns"`
	P90   time.Duration `json:"p90_ns"`
	P99   time.Duration `json:"p99_ns"`
	P999  time.Duration `json:"p999_ns"`
	Max   time.Duration `json:"max_ns"`
}

// Latency summarizes the histogram.
func (h *Histogram) Latency() Latency {
	return Latency{
		Count: h.total, Mean: h.Mean(), P50: h.Quantile(0.50), P90: h.Quantile(0.90),
		P99: h.Quantile(0.99), P999: h.Quantile(0.999), Max: h.Max(),
	}
}
