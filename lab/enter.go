// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// enterArg0 is argv[0] of a process that enters a namespace. A Go process has threads before main runs and cannot
// choose a namespace between fork and exec. So [Node.Command] starts this same binary, which enters the namespace and
// executes the requested program.
const enterArg0 = "sluice-lab-enter"

func init() {
	if len(os.Args) < 5 || os.Args[0] != enterArg0 {
		return
	}
	runtime.LockOSThread()
	err := enterNamespace(os.Args[1], os.Args[2], os.Args[3], os.Args[4:])
	fmt.Fprintln(os.Stderr, "sluice lab:", err)
	os.Exit(126)
}

// enterNamespace moves the calling thread to the network namespace, builds its view of /sys and executes the program. It
// returns only on error.
func enterNamespace(netns, bpffs, program string, argv []string) error {
	ns, err := os.Open(netns)
	if err != nil {
		return err
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter %s: %w", netns, err)
	}
	ns.Close()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("new mount namespace: %w", err)
	}
	// Mounts made here do not propagate to the host; unmounts on the host propagate here.
	if err := unix.Mount("", "/", "none", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	if err := mountSys(); err != nil {
		return err
	}
	if bpffs != "" {
		if err := unix.Mount(bpffs, "/sys/fs/bpf", "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s to /sys/fs/bpf: %w", bpffs, err)
		}
	}
	err = unix.Exec(program, argv, os.Environ())
	return fmt.Errorf("%s: %w", program, err)
}

// mountSys mounts the current network namespace's sysfs over /sys. It moves the mounts directly below the old /sys to
// the new one.
func mountSys() error {
	points, err := mountsBelow("/sys")
	if err != nil {
		return err
	}
	type carried struct {
		path string
		fd   int
	}
	var carry []carried
	for _, p := range points {
		fd, err := unix.OpenTree(unix.AT_FDCWD, p, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			continue // no access; the new /sys shows the bare directory
		}
		carry = append(carry, carried{p, fd})
	}
	err = unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if errors.Is(err, unix.EBUSY) { // the parent process has entered this namespace, so /sys is the same file system
		for _, c := range carry {
			unix.Close(c.fd)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	for _, c := range carry {
		err := unix.MoveMount(c.fd, "", unix.AT_FDCWD, c.path, unix.MOVE_MOUNT_F_EMPTY_PATH)
		unix.Close(c.fd)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("carry %s over: %w", c.path, err)
		}
	}
	return nil
}

// mountsBelow returns the mount points below dir that are not below another result.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var points []string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		p := fields[4] // field 5 is the mount point (proc_pid_mountinfo(5))
		if !isBelow(p, dir) {
			continue
		}
		covered := false
		for _, q := range points {
			covered = covered || p == q || isBelow(p, q)
		}
		if !covered {
			points = append(points, p)
		}
	}
	return points, sc.Err()
}

func isBelow(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != "." && !strings.HasPrefix(rel, "..")
}
