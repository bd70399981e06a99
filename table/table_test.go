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
