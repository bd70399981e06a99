// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
)

var update = flag.Bool("update", false, "rewrite the expected output of testdata/*.txt")

const divider = "----------\n"

// TestGolden decodes the part of each testdata/*.txt above the line of dashes and compares the result with the
// part below. A new case is a new file; -update fills in the lower part.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no cases in testdata", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, ok := strings.Cut(string(data), divider)
			if !ok && !*update {
				t.Fatalf("%s has no line %q", file, strings.TrimSpace(divider))
			}
			got := say(t, input)
			if *update {
				if err := os.WriteFile(file, []byte(input+divider+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// say renders the errors of input, or the configuration with its defaults.
func say(t *testing.T, input string) string {
	t.Helper()
	c, err := config.Decode("f.yaml", []byte(input))
	if err == nil {
		roundTrip(t, c)
		out, err := config.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	var errs config.Errors
	if !errors.As(err, &errs) {
		t.Fatalf("error of type %T: %v", err, err)
	}
	for i, e := range errs {
		if e.Line < 1 || e.Column < 1 {
			t.Errorf("no position: %v", e)
		}
		if i > 0 && (e.Line < errs[i-1].Line || e.Line == errs[i-1].Line && e.Column < errs[i-1].Column) {
			t.Errorf("not in file order: %v", e)
		}
	}
	var b strings.Builder
	errs.Render(&b, false)
	return b.String()
}
