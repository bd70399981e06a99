// SPDX-License-Identifier: Apache-2.0

package table

import (
	"strings"
	"testing"
)

func TestColumnsAlignAndFit(t *testing.T) {
	tb := New("SERVICE", ">FLOWS", "STATE")
	tb.Row("web", 12, "up")
	tb.Row("a-service-with-a-rather-long-name", 3456, "down")
	var b strings.Builder
	if err := tb.Write(&b); err != nil {
		t.Fatal(err)
	}
	want := "" +
		"SERVICE                            FLOWS  STATE\n" +
		"web                                   12  up\n" +
		"a-service-with-a-rather-long-name   3456  down\n"
	if b.String() != want {
		t.Errorf("got:\n%swant:\n%s", b.String(), want)
	}
	b.Reset()
	tb.Width = 30
	if err := tb.Write(&b); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > 30 {
			t.Errorf("line of %d columns in a terminal of 30: %q", n, line)
		}
	}
	if !strings.Contains(b.String(), "…") {
		t.Error("a shortened cell does not show that it is shortened")
	}
}

func TestColumnsFold(t *testing.T) {
	tb := New("row", ">1 flow", ">50 flows", ">1,000 flows")
	tb.Width, tb.Fold = 18, true
	tb.Row("dnat", 1, 2, 3)
	var b strings.Builder
	if err := tb.Write(&b); err != nil {
		t.Fatal(err)
	}
	want := "" +
		"row   1 flow\n" +
		"dnat       1\n" +
		"\n" +
		"row   50 flows\n" +
		"dnat         2\n" +
		"\n" +
		"row   1,000 flows\n" +
		"dnat            3\n"
	if b.String() != want {
		t.Errorf("got:\n%swant:\n%s", b.String(), want)
	}
	b.Reset()
	tb.Width = 24
	if err := tb.Write(&b); err != nil {
		t.Fatal(err)
	}
	if want := "row   1 flow  50 flows\n"; !strings.HasPrefix(b.String(), want) {
		t.Errorf("got:\n%swant it to begin with:\n%s", b.String(), want)
	}
}
