// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Pins must outlive the process, and so must the mount that contains them. A private mount
// namespace ("ip netns exec", a unit with PrivateMounts) ends with the process; the namespace of
// process 1 does not.

// hostRoot returns the root directory of process 1, or "" if this process has the same.
func hostRoot() string {
	own, err := os.Stat("/proc/thread-self/ns/mnt")
	if err != nil {
		return ""
	}
	first, err := os.Stat("/proc/1/ns/mnt")
	if errors.Is(err, fs.ErrPermission) && topMount("/proc/1") != topMount("/proc/thread-self") {
		return "/proc/1/root" // access to it fails as well, and the caller reports the error
	}
	if err != nil || os.SameFile(own, first) {
		return ""
	}
	return "/proc/1/root"
}

// topMount returns the id of the first mount of a process. Ids differ between mount namespaces.
func topMount(process string) string {
	b, _ := os.ReadFile(process + "/mountinfo") // needs no privilege
	id, _, _ := strings.Cut(string(b), " ")
	return id
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

// pinDir returns the bpffs directory for pinned maps and links. It returns "" if there is no bpffs
// and mount is false.
func (d *Datapath) pinDir(mount bool) (string, error) {
	if d.opt.Dir != "" {
		return d.opt.Dir, nil
	}
	root := hostRoot()
	for _, dir := range []string{"/sys/fs/bpf", root + "/sys/fs/bpf"} {
		if isBPFFS(dir) {
			return fmt.Sprintf("%s/sluice/%d", dir, d.cookie), nil
		}
	}
	dir, err := filepath.Abs(filepath.Join(d.opt.StateDir, "bpf"))
	if err != nil {
		return "", fmt.Errorf("bpffs: %w", err)
	}
	d.ephemeralErr = nil
	if !isBPFFS(root + dir) {
		if !mount {
			return "", nil
		}
		if d.ephemeralErr = inMountsOfInit(func() error { return mountBPFFS(dir) }); d.ephemeralErr != nil {
			if root = ""; !isBPFFS(dir) {
				if err := mountBPFFS(dir); err != nil {
					return "", fmt.Errorf("no bpffs for maps and programs: %w, %w; mount one at /sys/fs/bpf before the start, or give CAP_SYS_ADMIN", d.ephemeralErr, err)
				}
			}
		}
	}
	d.mounted = dir
	return filepath.Join(root+dir, "sluice"), nil
}

// checkPinning returns an error if pinning is impossible, for example in a container without a bpffs
// and without the privilege to mount one.
func (d *Datapath) checkPinning() error {
	if dir, err := d.pinDir(false); dir != "" || err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData
	if err := unix.Capget(&header, &have[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	if have[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return fmt.Errorf("no bpffs for maps and programs, and no right to mount one: mount one at /sys/fs/bpf before the start, or give CAP_SYS_ADMIN: %w", os.ErrPermission)
	}
	return nil
}

func mountBPFFS(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("bpffs: %w", err)
	}
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("bpffs: mount %s: %w", dir, err)
	}
	return nil
}

// unmount removes the bpffs mounted by pinDir in this process or an earlier one.
func (d *Datapath) unmount() error {
	if d.mounted == "" {
		return nil
	}
	dir := d.mounted
	d.mounted = ""
	away := func() error { return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)) }
	if d.ephemeralErr != nil {
		return away()
	}
	return inMountsOfInit(away)
}

// inMountsOfInit runs f on a thread in the mount namespace of process 1.
func inMountsOfInit(f func() error) error {
	if hostRoot() == "" {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread must keep its namespace, because /proc/self shows it
			defer runtime.UnlockOSThread()
			done <- inMountsOfInit(f)
			return
		}
		done <- func() error { // the thread is never unlocked: it ends with this goroutine
			mounts, err := os.Open("/proc/1/ns/mnt")
			if err != nil {
				return fmt.Errorf("mount namespace of process 1: %w", err)
			}
			defer mounts.Close()
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return fmt.Errorf("mount namespace of process 1: %w", err)
			}
			if err := unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("mount namespace of process 1: %w", err)
			}
			return f()
		}()
	}()
	return <-done
}
