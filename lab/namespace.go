// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// netnsDir is iproute2's directory of named network namespaces.
const netnsDir = "/run/netns"

func netnsPath(name string) string { return filepath.Join(netnsDir, name) }

// prepareNetnsDir makes netnsDir a shared mount, as iproute2 does. The deletion of a name then unmounts it in every
// mount namespace with a copy, which releases the network namespace.
func prepareNetnsDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	// iproute2 uses the same lock for the same two mounts.
	dir, err := os.Open(netnsDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("%s: lock: %w", netnsDir, err)
	}
	err = unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EINVAL) { // EINVAL: not a mount point yet
		return fmt.Errorf("%s: make shared: %w", netnsDir, err)
	}
	if err := unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("%s: bind to itself: %w", netnsDir, err)
	}
	if err := unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("%s: make shared: %w", netnsDir, err)
	}
	return nil
}

// createNamespace creates a network namespace and bind-mounts it at its name under netnsDir.
func createNamespace(name string) error {
	path := netnsPath(name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	f.Close()

	// The thread that unshares returns to its namespace. If it cannot, it exits with this goroutine, which then never
	// unlocks it.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- fmt.Errorf("namespace %s: %w", name, err)
			return
		}
		defer home.Close()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("namespace %s: unshare: %w (are you root?)", name, err)
			return
		}
		err = unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, "")
		// The runtime cannot end the main thread. In the new namespace, it would change /proc/self for the process.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		if err != nil {
			done <- fmt.Errorf("namespace %s: bind to %s: %w", name, path, err)
			return
		}
		done <- nil
	}()
	if err := <-done; err != nil {
		os.Remove(path)
		return err
	}
	return nil
}

// deleteNamespace removes the name. The namespace ends with its last process or socket.
func deleteNamespace(name string) error {
	path := netnsPath(name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	// EINVAL: a name without a namespace, from a crash between the two steps of its creation.
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("namespace %s: unmount: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	return nil
}

// inNamespace runs f on the calling goroutine with its thread in the network namespace at path. It restores the
// thread's namespace afterwards, also if f panics or ends the goroutine.
func inNamespace(path string, f func() error) (err error) {
	target, err := os.Open(path)
	if err != nil {
		return err
	}
	defer target.Close()

	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter %s: %w", path, err)
	}
	defer func() {
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			// The thread stays locked: no other goroutine runs on it, and the runtime ends it together with this
			// goroutine.
			err = errors.Join(err, fmt.Errorf("leave %s: %w", path, back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}
