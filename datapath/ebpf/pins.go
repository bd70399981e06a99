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

// Pins must outlive the process, and so must the mount that they are in. A mount
// namespace that is the process's own ("ip netns exec", a unit with
// PrivateMounts) ends with it; process 1's does not.

// outside is the root directory as process 1 sees it, "" when this process sees
// the same.
func outside() string {
	own, err := os.Stat("/proc/thread-self/ns/mnt")
	if err != nil {
		return ""
	}
	first, err := os.Stat("/proc/1/ns/mnt")
	if errors.Is(err, fs.ErrPermission) && topMount("/proc/1") != topMount("/proc/thread-self") {
		return "/proc/1/root" // which is as closed: whoever needs it says so
	}
	if err != nil || os.SameFile(own, first) {
		return ""
	}
	return "/proc/1/root"
}

// topMount returns the number of the first mount that a process sees: every mount of a
// namespace has one of its own.
func topMount(process string) string {
	b, _ := os.ReadFile(process + "/mountinfo") // needs no right
	id, _, _ := strings.Cut(string(b), " ")
	return id
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

// pinDir finds the directory on a bpffs that maps and links are pinned in, or ""
// when there is none yet and none is to be mounted.
func (d *Datapath) pinDir(mount bool) (string, error) {
	if d.opt.Dir != "" {
		return d.opt.Dir, nil
	}
	root := outside()
	for _, dir := range []string{"/sys/fs/bpf", root + "/sys/fs/bpf"} {
		if isBPFFS(dir) {
			return fmt.Sprintf("%s/sluice/%d", dir, d.cookie), nil
		}
	}
	dir, err := filepath.Abs(filepath.Join(d.opt.StateDir, "bpf"))
	if err != nil {
		return "", fmt.Errorf("bpffs: %w", err)
	}
	d.fleeting = nil
	if !isBPFFS(root + dir) {
		if !mount {
			return "", nil
		}
		if d.fleeting = inMountsOfInit(func() error { return mountBPFFS(dir) }); d.fleeting != nil {
			if root = ""; !isBPFFS(dir) {
				if err := mountBPFFS(dir); err != nil {
					return "", fmt.Errorf("no bpffs for maps and programs: %w, %w; mount one at /sys/fs/bpf before the start, or give CAP_SYS_ADMIN", d.fleeting, err)
				}
			}
		}
	}
	d.mounted = dir
	return filepath.Join(root+dir, "sluice"), nil
}

// pinnable says why nothing could be pinned, as in a container without a bpffs and without the right to mount one.
func (d *Datapath) pinnable() error {
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

// unmount takes the bpffs away that pinDir mounted, in this process or an earlier
// one.
func (d *Datapath) unmount() error {
	if d.mounted == "" {
		return nil
	}
	dir := d.mounted
	d.mounted = ""
	away := func() error { return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)) }
	if d.fleeting != nil {
		return away()
	}
	return inMountsOfInit(away)
}

// inMountsOfInit runs f on a thread in the mount namespace of process 1.
func inMountsOfInit(f func() error) error {
	if outside() == "" {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread must stay where it is: it is what /proc/self shows
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
