// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestNoProfile: if a profile is requested, a row that supports none reports it.
func TestNoProfile(t *testing.T) {
	r, err := Run(context.Background(), fixed(4, 2), Options{Reps: 1, Profile: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if why := r.Rows[0].Absent["a"]; !strings.Contains(why, "no profile was taken") || r.HasFigures() {
		t.Errorf("%q", why)
	}
}

// TestProfiled: the parts of one trial share a file, additional measurements have their own, and failures
// produce no profile.
func TestProfiled(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	dir := t.TempDir()
	trial := &Trial{Context: t.Context(), profile: filepath.Join(dir, "suite-row-point.folded")}
	busy := func() error {
		for i := 0; i < 300_000_000 && i >= 0; i++ {
		}
		return nil
	}
	for _, what := range []string{"", "new-flows", "new-flows"} {
		if err := trial.withProfile(what, busy); err != nil {
			t.Fatal(err)
		}
	}
	fault := errors.New("a cable came off")
	if err := trial.withProfile("fault", func() error { return fault }); !errors.Is(err, fault) {
		t.Error(err)
	}
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(found) != 2 {
		t.Errorf("%v, %v", found, err)
	}
	for name, text := range trial.profiles {
		if b, err := os.ReadFile(name); err != nil || string(b) != text || text == "" {
			t.Errorf("%s: %v, %.200q", name, err, b)
		}
	}
}
