// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestOpenWithoutABPFFS opens the datapath as in a container that may load programs but has no bpffs and may not
// mount one. The datapath is not available, so that nftables gets all objects that support both.
func TestOpenWithoutABPFFS(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		for err == nil && isBPFFS("/sys/fs/bpf") {
			err = unix.Unmount("/sys/fs/bpf", unix.MNT_DETACH)
		}
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var have [2]unix.CapUserData
		for _, c := range []int{unix.CAP_NET_ADMIN, unix.CAP_PERFMON, unix.CAP_BPF} {
			have[c/32].Effective |= 1 << (c % 32)
			have[c/32].Permitted |= 1 << (c % 32)
		}
		if err := errors.Join(err, unix.Capset(&header, &have[0])); err != nil {
			done <- err
			return
		}
		d, err := Open(Options{StateDir: t.TempDir()})
		if err == nil {
			d.Close()
		}
		done <- err
	}()
	if err := <-done; !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "no right to mount one") {
		t.Errorf("error %v", err)
	}
}
