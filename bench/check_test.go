// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	then := run(t, fixed(4, 2))
	moves := func(limit, row float64) []Move {
		now := run(t, fixed(limit, row))
		now.Compare(then, "then.json")
		if now.Check.Compared != 3 { // the figures of the first row are the unit
			t.Errorf("%d figures compared, want 3", now.Check.Compared)
		}
		return now.Check.Moves
	}
	if m := moves(8, 4); len(m) != 0 {
		t.Errorf("a machine twice as fast: %+v", m)
	}
	m := moves(4, 1)
	if len(m) != 2 || !m[0].Worse || m[0].Row != "row" || m[0].Change != -0.5 {
		t.Errorf("half the rate: %+v", m)
	}
	if m := moves(4, 3); len(m) != 2 || m[0].Worse {
		t.Errorf("a better rate: %+v", m)
	}
	if m := moves(4, 2.08); len(m) != 0 {
		t.Errorf("4 %% is no move: %+v", m)
	}
}

// TestAgreement: the distance of two runs is reported, independent of their noise.
func TestAgreement(t *testing.T) {
	then, now := run(t, fixed(4, 2)), run(t, fixed(4, 2.08))
	now.Compare(then, "then.json")
	c, near := now.Check, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
	if !near(c.Half, 0.04) || !near(c.NineOfTen, 0.04) || c.Ratios != 1 || c.Most == nil || !near(c.Most.Change, 0.04) || c.Quiet != 1 || c.MostQuiet != c.Most {
		t.Errorf("%+v, %+v", c, c.Most)
	}
	var text bytes.Buffer
	if c.write(&text); !strings.Contains(text.String(), "nine of ten by 4.0 % or less; ratios (1) agree within 4.0 %: the most, row / limit, was 0.50 and is 0.52") {
		t.Errorf("says %s", text.String())
	}
	// A ratio marked as noisy is not compared; the others are.
	now.Ratios = append(now.Ratios, Ratio{What: "b", Ours: 3, Noisy: true})
	then.Ratios = append(then.Ratios, Ratio{What: "b", Ours: 1})
	now.Compare(then, "then.json")
	text.Reset()
	if now.Check.write(&text); !strings.Contains(text.String(), "the most, b, was 1.00 and is 3.00; those not noisy (1) within 4.0 %: row / limit, 0.50 and 0.52\n") {
		t.Errorf("says %s", text.String())
	}
}

// TestCheckOfWhatIsGone: a row that was measured and now fails counts as worse. So does the first lost
// connection.
func TestCheckOfWhatIsGone(t *testing.T) {
	s := fixed(4, 0)
	s.Metrics[0].LowerIsBetter, s.Metrics[0].Absolute = true, true
	then := run(t, s)
	now := fixed(4, 3)
	now.Metrics = s.Metrics
	now.Rows[0].Run = func(*Trial) error { return errors.New("no room") }
	r := run(t, now)
	r.Compare(then, "then.json")
	if len(r.Check.Failed) != 2 || !strings.Contains(r.Check.Failed[0], "limit (a): failed: no room") || r.Check.Worse() != 4 {
		t.Errorf("%+v", r.Check)
	}
	var text bytes.Buffer
	if r.WriteMarkdown(&text); !strings.Contains(text.String(), "no room") || !strings.Contains(text.String(), "worse") {
		t.Errorf("the page does not say so:\n%s", text.String())
	}
}

// TestCheckAgainstAnotherMachine reports that the machine differs: ratios change there without a change of the
// program.
func TestCheckAgainstAnotherMachine(t *testing.T) {
	then, now := run(t, fixed(4, 2)), run(t, fixed(4, 2))
	for machine, says := range map[string]bool{now.Environment.Machine: false, "Z80": true} {
		then.Environment.Machine = machine
		now.Compare(then, "then.json")
		var text bytes.Buffer
		if now.Check.write(&text); strings.Contains(text.String(), "another machine (Z80") != says || (now.Check.Machine != "") != says {
			t.Errorf("%s: %+v\n%s", machine, now.Check, text.String())
		}
	}
}
