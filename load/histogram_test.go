// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/xml"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// TestBucketsHoldTheirValues checks that each value lies within the edges of its
// bucket and that a bucket is at most 1/32 of its value wide.
func TestBucketsHoldTheirValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ns := rapid.Uint64Range(0, 1<<40-1).Draw(t, "ns")
		from, to := bucketEdges(bucketOf(ns))
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
		from, to := bucketEdges(b)
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
		0.5: 500 * time.Microsecond, 0.99: 990 * time.Microsecond, 1: 1000 * time.Microsecond,
	} {
		if got := h.Quantile(q); !near(got, want) {
			t.Errorf("quantile %g is %v, want about %v", q, got, want)
		}
	}
	for _, c := range []struct {
		values int // 1 ns, 2 ns …, which have a bucket each
		q      float64
		rank   int
	}{{1, 0.5, 1}, {2, 0.5, 1}, {3, 0.5, 2}, {50, 0.99, 50}, {50, 0.98, 49}, {50, 0.5, 25}, {10, 0.7, 7}, {2, 0, 1}, {50, 1, 50}} {
		var h Histogram
		for ns := range c.values {
			h.Add(time.Duration(ns + 1))
		}
		if got := h.Quantile(c.q); got != time.Duration(c.rank+1) {
			t.Errorf("quantile %g of %d values is below %d, want below %d", c.q, c.values, got, c.rank+1)
		}
	}
	if got := new(Histogram).Quantile(0.5); got != 0 {
		t.Errorf("quantile of nothing is %v", got)
	}
}

// TestHistogramFitsItsPicture: words stay within it, wherever the percentiles are.
func TestHistogramFitsItsPicture(t *testing.T) {
	const letter = 8 // pixels, generously
	for name, values := range map[string][]time.Duration{
		"one value":        {12 * time.Microsecond},
		"narrow":           {99 * time.Microsecond, 100 * time.Microsecond, 101 * time.Microsecond},
		"the tail decides": {9 * time.Microsecond, 950 * time.Microsecond, 1300 * time.Microsecond},
		"wide":             {time.Nanosecond, time.Hour},
	} {
		var h Histogram
		for _, v := range values {
			h.Add(v)
		}
		type word struct {
			X      float64 `xml:"x,attr"`
			Anchor string  `xml:"text-anchor,attr"`
			Text   string  `xml:",chardata"`
		}
		var picture struct {
			Words []word `xml:"text"`
			Above []word `xml:"g>text"`
		}
		if err := xml.Unmarshal(h.SVG(""), &picture); err != nil {
			t.Fatal(err)
		}
		if len(picture.Words) < 3 || len(picture.Above) != 3 { // title and at least two marks; percentiles
			t.Errorf("%s: words %+v and %+v", name, picture.Words, picture.Above)
		}
		for _, w := range append(picture.Words, picture.Above...) {
			width := float64(letter * utf8.RuneCountInString(w.Text))
			from := map[string]float64{"start": w.X, "middle": w.X - width/2, "end": w.X - width}[w.Anchor]
			if from < 0 || from+width > svgWidth {
				t.Errorf("%s: %q from %g to %g", name, w.Text, from, from+width)
			}
		}
	}
}
