// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
)

var exact = cmp.Exporter(func(reflect.Type) bool { return true })

func TestExampleFilesLoadAndRoundTrip(t *testing.T) {
	files, err := filepath.Glob("../examples/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("examples: %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := config.Load(file)
			if err != nil {
				t.Fatal(err)
			}
			roundTrip(t, c)
		})
	}
}

func roundTrip(t *testing.T, c *config.Config) {
	t.Helper()
	data, err := config.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	again, err := config.Decode("marshalled", data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	if diff := cmp.Diff(c, again, exact); diff != "" {
		t.Fatalf("after Marshal and Decode (-before +after):\n%s\n%s", diff, data)
	}
	if os.Getenv("SLUICE_SHOW") != "" {
		t.Logf("%s", data)
	}
}
