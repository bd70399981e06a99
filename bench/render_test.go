// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"strings"
	"testing"
)

// TestRemarks: a remark about many rows is one line. It counts rows that appear in the table without a figure,
// and names others.
func TestRemarks(t *testing.T) {
	s := fixed(4, 2)
	for _, name := range []string{"b", "c", "d", "e"} {
		row := s.Rows[3]
		row.Name = name
		s.Rows = append(s.Rows, row)
	}
	remarks := func() string {
		var b bytes.Buffer
		run(t, s).WriteMarkdown(&b)
		return b.String()
	}
	if got, want := remarks(), "\n- 5 rows (a): not measured: the moon is full\n"; !strings.Contains(got, want) {
		t.Errorf("%q is missing in\n%s", want, got)
	}
	s.Rows[4].Run = s.Rows[2].Run // b has no figure at all
	if got, want := remarks(), "\n- absent; b; c; d; e (a): not measured: the moon is full\n"; !strings.Contains(got, want) {
		t.Errorf("%q is missing in\n%s", want, got)
	}
}

// TestLegendOfShares: the legend explains brackets if the table has any.
func TestLegendOfShares(t *testing.T) {
	const brackets = "In brackets"
	s := fixed(4, 2)
	if got := run(t, s).legend(); !strings.Contains(got, brackets) {
		t.Errorf("the shares are not explained: %s", got)
	}
	s.Rows = s.Rows[1:] // as --rows leaves the limit out of suites with a yardstick
	if got := run(t, s).legend(); strings.Contains(got, brackets) {
		t.Errorf("shares that are not there: %s", got)
	}
}
