// SPDX-License-Identifier: Apache-2.0

package casestudy

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestNginxIsNobodyElses: what root's nginx reads and writes is in a directory that
// no other user can change, and nginx answers all the same.
func TestNginxIsNobodyElses(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nginx"))
	t.Setenv("TMPDIR", t.TempDir())
	s := &study{lab: labtest.New(t, faults.Topology("nginx")), report: &Report{}}
	stop, err := s.nginx(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), "sluice-nginx-*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("directories of nginx: %v (%v)", dirs, err)
	}
	st, err := os.Stat(dirs[0])
	if err != nil {
		t.Fatal(err)
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; uid != 0 || st.Mode().Perm() != 0o700 {
		t.Errorf("%s is of user %d with mode %v, want root's alone", dirs[0], uid, st.Mode())
	}
}
