// SPDX-License-Identifier: Apache-2.0

package severity

import (
	"testing"
	"time"
)

func TestLimits(t *testing.T) {
	for value, want := range map[float64]Level{0.75: OK, 0.76: Warn, 0.90: Warn, 0.91: Critical} {
		if got := TableFill.Level(value); got != want {
			t.Errorf("%g: %v, want %v", value, got, want)
		}
	}
}

func TestTimeToFull(t *testing.T) {
	for _, tc := range []struct {
		left   time.Duration
		fill   float64
		steady bool
		want   Level
	}{
		{time.Minute, 0.6, true, Critical}, {10 * time.Minute, 0.6, true, Warn}, {time.Hour, 0.6, true, OK},
		{time.Minute, 0.4, true, OK}, {time.Minute, 0.6, false, Info}, {time.Minute, 0.95, false, Critical}, {-1, 0.95, true, OK},
	} {
		if got := TimeToFull(tc.left, tc.fill, tc.steady); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
}

func TestText(t *testing.T) {
	for l := OK; l <= Critical; l++ {
		text, _ := l.MarshalText()
		var back Level
		if err := back.UnmarshalText(text); err != nil || back != l {
			t.Errorf("%s: %v, %v", text, back, err)
		}
	}
	if err := new(Level).UnmarshalText([]byte("bad")); err == nil {
		t.Error("an unknown level was taken")
	}
}
