// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestReadersOfTheTable: a program that reads the whole table is reported with its own memory. A program that
// does not fails the row.
func TestReadersOfTheTable(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Tool("conntrack"))
	for _, row := range tableSuite().Rows {
		if row.Name != "conntrack -L" {
			continue // Sluice is another program in this test
		}
		trial := &Trial{Context: t.Context(), Point: Point{Value: 5000}, values: map[string]reportedValue{}}
		err := row.Run(trial)
		if endErr := trial.end(); err != nil || endErr != nil {
			t.Fatalf("%v, %v", err, endErr)
		}
		if rate, took := trial.values["rate"].value, trial.values["time"].value; rate <= 0 || took <= 0 {
			t.Errorf("%+v", trial.values)
		}
	}
	if n, err := shownEntries(nil, []byte("conntrack v1.4.7 (conntrack-tools): 1000 flow entries have been shown.\n")); err != nil || n != 1000 {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := summedEntries([]byte(`{"total": {"entries": 7}}`), nil); err != nil || n != 7 {
		t.Errorf("%d, %v", n, err)
	}
}

// TestWatchPeak: the peak excludes the memory of this process before it started the program.
func TestWatchPeak(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if peak := watchPeak(ctx, os.Getpid(), self); peak < 1e6 {
		t.Errorf("the peak of this process is %.0f bytes", peak)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if peak := watchPeak(ctx, os.Getpid(), "sh"); peak != 0 {
		t.Errorf("another program has a peak of %.0f bytes", peak)
	}
}

// TestTailBuffer keeps the end of a long output in bounded memory.
func TestTailBuffer(t *testing.T) {
	var b tailBuffer
	for range 1000 {
		if n, err := b.Write([]byte(strings.Repeat("x", 9999) + "\n")); n != 10_000 || err != nil {
			t.Fatal(n, err)
		}
	}
	if _, err := b.Write([]byte("end")); err != nil || len(b.kept) > 3<<20 || !strings.HasSuffix(string(b.kept), "x\nend") {
		t.Errorf("%d bytes kept: %v", len(b.kept), err)
	}
}
