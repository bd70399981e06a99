// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestRemoveLabs: an error names a lab that cannot be removed, and the others are removed.
func TestRemoveLabs(t *testing.T) {
	one := lab.Topology{Name: "remove", Nodes: []lab.NodeSpec{{Name: "a"}}}
	stays, goes := labtest.New(t, one), labtest.New(t, one)
	obstacle := filepath.Join("/run/sluice/lab", stays.ID(), "directory", "file")
	if err := os.MkdirAll(obstacle, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(obstacle) })
	var out bytes.Buffer
	err := (&app{stdout: &out}).removeLabs([]*lab.Lab{stays, goes})
	if !errors.Is(err, lab.ErrDown) || !strings.Contains(err.Error(), stays.ID()) {
		t.Errorf("lab %s is not named: %v", stays.ID(), err)
	}
	if want := "lab " + goes.ID() + " (remove) is removed\n"; out.String() != want {
		t.Errorf("says %q, want %q", out.String(), want)
	}
}
