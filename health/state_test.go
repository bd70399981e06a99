// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
)

func TestObserve(t *testing.T) {
	// Each letter of probes is one probe, + good and - bad; each of states the
	// state after it, U up and d down, ! where a change is reported.
	for _, c := range []struct {
		name, initial, probes, states string
		rise, fall                    int
	}{
		{"the first good probe decides", "down", "+", "U!", 3, 3},
		{"the first bad probe decides", "down", "-", "d!", 3, 3},
		{"up at first, and it is true", "up", "+", "U!", 3, 3},
		{"up at first, falls after fall", "up", "---", "U!Ud!", 3, 3},
		{"rise counts good probes in a row", "down", "-++-+++", "d!dddddU!", 3, 3},
		{"fall counts bad probes in a row", "down", "+--+---", "U!UUUUUd!", 3, 3},
		{"rise 1 and fall 1", "down", "+-+-", "U!d!U!d!", 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &watch{target: &Target{Check: &config.Check{Rise: c.rise, Fall: c.fall, Initial: c.initial}}}
			w.up = c.initial == "up"
			got, now := "", time.Unix(0, 0)
			for _, p := range c.probes {
				now = now.Add(time.Second)
				var err error
				if p == '-' {
					err = errors.New("bad")
				}
				changed := w.observe(err, now)
				got += map[bool]string{true: "U", false: "d"}[w.up]
				if changed {
					got += "!"
				}
			}
			if got != c.states {
				t.Errorf("probes %s: states %s, want %s", c.probes, got, c.states)
			}
		})
	}
}

func TestReason(t *testing.T) {
	refused := errors.New("connection refused")
	for _, c := range []struct {
		w    watch
		want string
	}{
		{watch{}, "not probed yet, counts as down"},
		{watch{known: true, up: true, good: 7}, "7 probes in a row passed"},
		{watch{known: true, up: true, bad: 1, failure: refused}, "1 probe failed, 3 in a row take it down: connection refused"},
		{watch{known: true, bad: 4, failure: refused}, "4 probes in a row failed: connection refused"},
		{watch{known: true, good: 1}, "1 probe passed, 2 in a row bring it up"},
	} {
		c.w.target = &Target{Check: &config.Check{Rise: 2, Fall: 3, Initial: "down"}}
		if got := c.w.reason(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// TestPeriod: fall probes that begin a period apart, with a timeout of the last one, end within interval × fall + 0.5
// s. This holds for every valid interval, timeout and fall.
func TestPeriod(t *testing.T) {
	for interval := 100 * time.Millisecond; interval <= 10*time.Second; interval += 137 * time.Millisecond {
		for timeout := 10 * time.Millisecond; timeout < interval; timeout += 73 * time.Millisecond {
			for _, fall := range []int{1, 2, 3, 5, 100} {
				w := &watch{target: &Target{Check: &config.Check{Interval: config.Duration(interval), Timeout: config.Duration(timeout), Fall: fall}}}
				p := w.period()
				if p <= 0 || p > interval {
					t.Fatalf("interval %s, timeout %s, fall %d: period %s", interval, timeout, fall, p)
				}
				step := max(p, timeout) // a probe begins no earlier than the one before ended
				found := p + time.Duration(fall-1)*step + timeout
				if limit := time.Duration(fall)*interval + 500*time.Millisecond; found > limit {
					t.Fatalf("interval %s, timeout %s, fall %d: period %s, found after %s, want %s", interval, timeout, fall, p, found, limit)
				}
			}
		}
	}
}
