// SPDX-License-Identifier: Apache-2.0

package table

import (
	"strings"
	"testing"
)

func written(t *testing.T, tb *Table) string {
	t.Helper()
	var b strings.Builder
	if err := tb.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestColumnsAlignAndFit(t *testing.T) {
	tb := New("SERVICE", ">FLOWS", "STATE")
	tb.Row("web", 12, "up")
	tb.Row("a-service-with-a-rather-long-name", 3456, "down")
	want := "" +
		"SERVICE                            FLOWS  STATE\n" +
		"web                                   12  up\n" +
		"a-service-with-a-rather-long-name   3456  down\n"
	if got := written(t, tb); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	tb.Width = 30
	got := written(t, tb)
	for line := range strings.Lines(got) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > 30 {
			t.Errorf("line of %d columns in a terminal of 30: %q", n, line)
		}
	}
	if !strings.Contains(got, "…") {
		t.Error("a shortened cell does not show that it is shortened")
	}
}

// TestMiddle: of an address that is too wide both ends stay.
func TestMiddle(t *testing.T) {
	tb := New("SOURCE", ">ENTRIES")
	tb.Width, tb.Middle = 30, true
	tb.Row("2001:db8:1234:5678:9abc:def0:1234:5678", 1)
	tb.Row("größe:größe:größe:größe", 2)
	want := "" +
		"SOURCE                 ENTRIES\n" +
		"2001:db8:1…:1234:5678        1\n" +
		"größe:größ…röße:größe        2\n"
	if got := written(t, tb); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
}

func TestColumnsFold(t *testing.T) {
	tb := New("row", ">1 flow", ">50 flows", ">1,000 flows")
	tb.Width, tb.Fold = 18, true
	tb.Row("dnat", 1, 2, 3)
	want := "" +
		"row   1 flow\n" +
		"dnat       1\n" +
		"\n" +
		"row   50 flows\n" +
		"dnat         2\n" +
		"\n" +
		"row   1,000 flows\n" +
		"dnat            3\n"
	if got := written(t, tb); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	tb.Width = 24
	if got, want := written(t, tb), "row   1 flow  50 flows\n"; !strings.HasPrefix(got, want) {
		t.Errorf("got:\n%swant it to begin with:\n%s", got, want)
	}
}
