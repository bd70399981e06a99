// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-lb/sluice/config"
)

// FuzzDecode: for any bytes, the decoder returns a configuration or errors with positions. An accepted
// configuration equals itself after a round trip through YAML and JSON.
func FuzzDecode(f *testing.F) {
	for _, glob := range []string{"../examples/*.yaml", "testdata/*.txt"} {
		files, err := filepath.Glob(glob)
		if err != nil || len(files) == 0 {
			f.Fatal(glob, err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			input, _, _ := strings.Cut(string(data), divider)
			f.Add([]byte(input))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := config.Decode("fuzz", data)
		if err != nil {
			var errs config.Errors
			if !errors.As(err, &errs) || len(errs) == 0 {
				t.Fatalf("error of type %T: %v", err, err)
			}
			errs.Render(io.Discard, true)
			for _, e := range errs {
				if e.Line < 1 || e.Column < 1 || e.Cause == "" {
					t.Errorf("no place or no cause: %+v", e)
				}
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Fatalf("decoded, but not valid: %v", err)
		}
		roundTrip(t, c)
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := config.Decode("json", text)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if diff := cmp.Diff(c, again, exact, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("after JSON (-before +after):\n%s", diff)
		}
	})
}
