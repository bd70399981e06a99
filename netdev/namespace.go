// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// EnterNamespace moves the calling thread, which must be locked, into a network namespace. It does nothing if the
// thread is already there: setns requires CAP_SYS_ADMIN even then, which containers lack.
func EnterNamespace(ns netns.NsHandle) error {
	if here, err := netns.Get(); err == nil {
		defer here.Close()
		if here.Equal(ns) {
			return nil
		}
	}
	if err := unix.Setns(int(ns), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	return nil
}

// Within calls f on a thread in a network namespace and waits for its return.
func Within(ns netns.NsHandle, f func()) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if here, err := netns.Get(); err == nil {
		defer here.Close()
		if here.Equal(ns) {
			f()
			return nil
		}
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
		err := EnterNamespace(ns)
		if err == nil {
			f()
		}
		done <- err
	}()
	return <-done
}

// NamespaceCookie returns the number of the calling thread's network namespace, which the kernel gives to no other
// until the next boot (SO_NETNS_COOKIE, Linux 5.14).
func NamespaceCookie() (uint64, error) {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(s)
	return unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}
