// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math"
	"testing"
	"time"
	"unsafe"
)

// TestSecondsFollowTheClock: times before a change of the clock are reported by the new clock.
func TestSecondsFollowTheClock(t *testing.T) {
	for _, set := range []time.Duration{0, 300 * time.Millisecond, time.Hour, -time.Hour} {
		now := time.Now()
		then := now
		// The wall clock of a time.Time: nanoseconds, seconds from bit 30 on (package time).
		wall := (*uint64)(unsafe.Pointer(&then))
		nanoseconds := int64(*wall&(1<<30-1)) - int64(set%time.Second)
		*wall = (*wall>>30-uint64(int64(set/time.Second)))<<30 | uint64(max(0, nanoseconds))
		if now.Sub(then) != 0 {
			t.Fatal("a time.Time is not what it was")
		}
		if got, want := seconds(then), float64(now.UnixMilli())/1e3; math.Abs(got-want) > 1 {
			t.Errorf("clock set by %s: %f, want %f", set, got, want)
		}
	}
}
