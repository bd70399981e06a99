// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// pinsOf mounts a bpffs for one test and returns a directory on it.
func pinsOf(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return filepath.Join(dir, "sluice")
}
