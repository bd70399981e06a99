// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"reflect"
	"strings"
	"testing"
)

// TestExtend: a run and its continuation equal one run with all repetitions.
func TestExtend(t *testing.T) {
	s := fixed(4, 2)
	do := func(o Options) *Result {
		r, err := Run(t.Context(), s, o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	whole := do(Options{Reps: 3})
	first := do(Options{Reps: 1})
	both := do(Options{Reps: 2, Earlier: first})
	if both.Reps != 3 || both.Started != first.Started || len(both.Foreign) != len(whole.Foreign) || !reflect.DeepEqual(both.Noise, whole.Noise) {
		t.Errorf("%d repetitions from %v, %d loads, noise %q; want %d, %v, %d, %q", both.Reps, both.Started, len(both.Foreign), both.Noise,
			whole.Reps, first.Started, len(whole.Foreign), whole.Noise)
	}
	if !reflect.DeepEqual(both.Rows, whole.Rows) {
		t.Errorf("rows %+v, want %+v", both.Rows, whole.Rows)
	}

	first.Environment.Kernel = "1.0"
	if r, err := Run(t.Context(), s, Options{Reps: 1, Earlier: first}); err == nil || r != nil || !strings.Contains(err.Error(), "its kernel is 1.0") {
		t.Errorf("a run on another kernel is continued: %v", err)
	}
}
