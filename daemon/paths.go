// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sluice-lb/sluice/netdev"
)

// ErrNoRoot is returned for missing rights to change the kernel's state.
var ErrNoRoot = errors.New("root is needed: run it with sudo, or give the binary CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN")

// Paths are the operator's choice of the files of a gateway. Empty fields select the defaults of the network namespace.
type Paths struct {
	State  string // directory of lock, socket and pins
	Socket string
}

// stateBase is the state directory of the host's own network namespace.
const stateBase = "/run/sluice"

// Directory returns the state directory. The default is one per network namespace, so that one host can have several
// gateways.
func (p Paths) Directory() string {
	if p.State != "" {
		return p.State
	}
	return usualDirectory()
}

// ChangesDirectory returns the directory of the run-time changes. It survives a reboot, except for
// gateways in network namespaces, which do not survive one either.
func (p Paths) ChangesDirectory() string {
	if p.State == "" && usualDirectory() == stateBase {
		return "/var/lib/sluice"
	}
	return filepath.Join(p.Directory(), "changes")
}

// SocketPath returns the path of the daemon's socket.
func (p Paths) SocketPath() string {
	if p.Socket != "" {
		return p.Socket
	}
	return filepath.Join(p.Directory(), "sluice.sock")
}

// LockKnown reports whether the paths name the lock of the daemon that listens on the socket.
func (p Paths) LockKnown() bool { return p.Socket == "" || p.State != "" }

// namespaceID identifies the network namespace where its name or inode number names the state directory: another
// namespace may get both. It is "" for the host's own, and where the operator names the directory.
func (p Paths) namespaceID() string {
	if p.State != "" || usualDirectory() == stateBase {
		return ""
	}
	cookie, err := netdev.NamespaceCookie()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s/%d", strings.TrimSpace(string(boot)), cookie)
}

// SocketIn returns the default path of the daemon's socket in another network namespace.
func SocketIn(ns netdev.Namespace) string {
	dir := filepath.Join(stateBase, "netns", fmt.Sprint(ns.Inode))
	switch {
	case filepath.Dir(ns.Path) == "/run/netns" || filepath.Dir(ns.Path) == "/var/run/netns":
		dir = filepath.Join(stateBase, "netns", filepath.Base(ns.Path))
	case ns.Inode == netdev.HostNamespace().Inode:
		dir = stateBase
	}
	return filepath.Join(dir, "sluice.sock")
}

// usualDirectory returns the default state directory of the network namespace.
func usualDirectory() string {
	const base = stateBase
	if name, ok := namespaceName(); ok {
		return filepath.Join(base, "netns", name)
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return base
	}
	host, err := os.Stat("/proc/1/ns/net")
	if err != nil || os.SameFile(own, host) {
		return base // the host's namespace, or no permission to inspect process 1
	}
	inode := own.Sys().(*syscall.Stat_t).Ino
	return filepath.Join(base, "netns", fmt.Sprint(inode))
}

// namespaceName returns the name of this network namespace under /run/netns.
func namespaceName() (string, bool) {
	self, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return "", false
	}
	entries, _ := os.ReadDir("/run/netns") // absent while no namespace has a name
	for _, e := range entries {
		if other, err := os.Stat(filepath.Join("/run/netns", e.Name())); err == nil && os.SameFile(self, other) {
			return e.Name(), true
		}
	}
	return "", false
}
