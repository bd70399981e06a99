// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/doctor/outcome"
)

// TestHealed compares the state of traffic before and after a remedy.
func TestHealed(t *testing.T) {
	fate := func(answered, failed, othersAnswered, othersFailed int) Fate {
		return Fate{Observed: true, Concerns: outcome.Tally{Answered: answered, Failed: failed}, Others: outcome.Tally{Answered: othersAnswered, Failed: othersFailed}}
	}
	unobserved := func(found bool) Fate { return Fate{Found: found, Others: outcome.Tally{Answered: 10}} }
	for _, tc := range []struct {
		name          string
		before, after Fate
		why           string // empty: healed
	}{
		{"all are answered", fate(0, 20, 50, 0), fate(20, 0, 50, 0), ""},
		{"one in twenty still fails", fate(0, 20, 50, 0), fate(19, 1, 50, 0), ""},
		{"half of them still fail", fate(0, 20, 50, 0), fate(10, 10, 50, 0), "10 exchanges of this kind still failed"},
		{"nobody asks any more", fate(0, 20, 50, 0), fate(0, 0, 50, 0), "no exchange of this kind was seen"},
		{"others fail instead", fate(0, 20, 50, 0), fate(20, 0, 30, 20), "other exchanges fail now"},
		{"others failed before, too", fate(0, 20, 30, 20), fate(20, 0, 30, 20), ""},
		{"no others are left", fate(0, 20, 50, 0), fate(20, 0, 0, 0), ""},
		{"the check finds nothing any more", unobserved(true), unobserved(false), ""},
		{"the check finds it again", unobserved(true), unobserved(true), "the check still finds it"},
	} {
		if healed, why := tc.after.Healed(tc.before); healed != (tc.why == "") || !strings.Contains(why, tc.why) {
			t.Errorf("%s: healed %v, %q, want %q", tc.name, healed, why, tc.why)
		}
	}
}
