// SPDX-License-Identifier: Apache-2.0

// Package labtest lets tests declare requirements of the machine. It builds labs with the lifetime of a test, and
// waits for conditions instead of sleeping.
package labtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

// Need is a requirement of a test.
type Need struct {
	// check returns "" or the missing requirement. deserved reports that the machine cannot have it, so that even CI
	// may skip.
	check func() (missing string, deserved bool)
}

// Common requirements of tests.
var (
	// Root is the right to create namespaces and to change networks.
	Root = Need{func() (string, bool) {
		if os.Geteuid() != 0 {
			return "root", false
		}
		return "", false
	}}
	// BPF is a kernel that allows this process to create BPF maps.
	BPF = Need{func() (string, bool) {
		if err := createMap(); err != nil {
			return fmt.Sprintf("bpf: %v", err), false
		}
		return "", false
	}}
	// Nftables is a kernel with nf_tables.
	Nftables = Need{func() (string, bool) {
		c, err := nftables.New()
		if err == nil {
			_, err = c.ListTables()
		}
		if err != nil {
			return fmt.Sprintf("nf_tables: %v", err), false
		}
		return "", false
	}}
	// Conntrack is a kernel with connection tracking and its netlink interface.
	Conntrack = Need{func() (string, bool) {
		if _, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET); err != nil {
			return fmt.Sprintf("nf_conntrack: %v", err), false
		}
		return "", false
	}}
)

// Kernel requires a kernel version, such as "6.6", for a feature. On an older kernel the skip is deserved.
func Kernel(version, feature string) Need {
	return Need{func() (string, bool) {
		var u unix.Utsname
		if err := unix.Uname(&u); err != nil {
			return fmt.Sprintf("kernel %s for %s: %v", version, feature, err), false
		}
		have := unix.ByteSliceToString(u.Release[:])
		if !atLeast(have, version) {
			return fmt.Sprintf("kernel %s for %s (this is %s)", version, feature, have), true
		}
		return "", false
	}}
}

// Tool requires a program in $PATH.
func Tool(name string) Need {
	return Need{func() (string, bool) {
		if _, err := exec.LookPath(name); err != nil {
			return "the program " + name, false
		}
		return "", false
	}}
}

// Require skips the test if the machine lacks a requirement. With CI=true in the environment the test fails instead,
// unless the kernel is too old.
func Require(t testing.TB, needs ...Need) {
	t.Helper()
	for _, n := range needs {
		missing, deserved := n.check()
		switch {
		case missing == "":
		case deserved:
			t.Skipf("needs %s", missing)
		default:
			Lacks(t, "needs %s", missing)
		}
	}
}

// Lacks skips a test because of a missing requirement found during the test. With CI=true in the environment the test
// fails instead.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf(format+", and CI=true forbids the skip", args...)
	} else {
		t.Skipf(format, args...)
	}
}

// New builds the topology and removes it at the end of the test. It requires [Root].
func New(t testing.TB, topology lab.Topology) *lab.Lab {
	t.Helper()
	Require(t, Root)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	l, err := lab.Up(ctx, topology)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// KeepHostSettings blocks changes of host-wide settings until the test ends. Without it, another test might shrink
// the connection tables of all namespaces to a few hundred entries.
func KeepHostSettings(t testing.TB) {
	t.Helper()
	lockHostSettings(t, unix.LOCK_SH)
}

// ChangeHostSettings blocks other users of host-wide settings until the test ends.
func ChangeHostSettings(t testing.TB) {
	t.Helper()
	lockHostSettings(t, unix.LOCK_EX)
}

func lockHostSettings(t testing.TB, how int) {
	t.Helper()
	f, err := lab.LockHostSettings(t.Context(), how)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
}

// Eventually calls condition until it returns nil, and fails the test with the last error after the timeout. The
// failure message contains what.
func Eventually(t testing.TB, timeout time.Duration, what string, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for over := false; ; {
		err := condition()
		if err == nil {
			return
		}
		if over {
			t.Fatalf("waited %v for %s: %v", timeout, what, err)
		}
		time.Sleep(5 * time.Millisecond)  // Between two looks at the condition.
		over = time.Now().After(deadline) // Check once more, also if the machine was suspended.
	}
}

// atLeast compares the leading numbers of two kernel versions.
func atLeast(have, want string) bool {
	h, w := numbers(have), numbers(want)
	for i := range w {
		if h[i] != w[i] {
			return h[i] > w[i]
		}
	}
	return true
}

func numbers(version string) (n [3]int) {
	for i, part := range strings.SplitN(version, ".", 3) {
		digits := strings.IndexFunc(part, func(r rune) bool { return r < '0' || r > '9' })
		if digits >= 0 {
			part = part[:digits]
		}
		n[i], _ = strconv.Atoi(part)
	}
	return n
}

// createMap creates and closes a one-element BPF array, by the bare system call.
func createMap() error {
	attr := struct {
		mapType, keySize, valueSize, maxEntries uint32
	}{unix.BPF_MAP_TYPE_ARRAY, 4, 4, 1}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_CREATE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}
