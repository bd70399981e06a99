// SPDX-License-Identifier: Apache-2.0

// Package labtest lets tests say what they need of the machine, build a lab that is removed with
// the test, and wait on conditions instead of sleeping.
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

// Need is something a test needs of the machine.
type Need struct {
	// check returns "" or what is missing. Deserved says that the machine cannot have it, so
	// that even CI may skip.
	check func() (missing string, deserved bool)
}

// Needs that tests have in common.
var (
	// Root is the right to make namespaces and to change networks.
	Root = Need{func() (string, bool) {
		if os.Geteuid() != 0 {
			return "root", false
		}
		return "", false
	}}
	// BPF is a kernel that lets this process create BPF maps.
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

// Kernel needs a kernel version, such as "6.6", for a feature. On an older kernel the skip is
// deserved.
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

// Tool needs a program in $PATH.
func Tool(name string) Need {
	return Need{func() (string, bool) {
		if _, err := exec.LookPath(name); err != nil {
			return "the program " + name, false
		}
		return "", false
	}}
}

// Require skips the test when the machine lacks one of the needs. With CI=true in the environment
// the test fails instead, unless the kernel is too old to have it.
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

// Lacks skips a test that has found out what this machine lacks. With CI=true in the environment
// the test fails instead.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf(format+", and CI=true forbids the skip", args...)
	} else {
		t.Skipf(format, args...)
	}
}

// New builds the topology and takes it down with the test. It requires [Root].
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

// KeepHostSettings has who changes settings of the whole host wait until the test ends: where the connection
// tables of all namespaces have room for a few hundred entries for a while, others lose theirs.
func KeepHostSettings(t testing.TB) {
	t.Helper()
	lockHostSettings(t, unix.LOCK_SH)
}

// ChangeHostSettings has others who change settings of the whole host, or need them, wait until the test ends.
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

// Eventually calls condition until it returns nil, and fails the test with the last error when the
// time is over. What is waited for stands in the failure.
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
		time.Sleep(5 * time.Millisecond)  // between two looks at the condition
		over = time.Now().After(deadline) // one more look, also when the machine stood still
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
