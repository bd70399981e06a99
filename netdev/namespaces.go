// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace on this host.
type Namespace struct {
	// Name is "host" for the initial network namespace, the file's name for those under /run/netns and
	// /run/docker/netns, else "pid N (command)".
	Name string
	// Path opens the namespace; empty means the calling thread's own.
	Path string
	// Inode is the namespace's number, as in the kernel's message "table full in netns N"; 0 if unknown.
	Inode uint64
}

// namedDirs contain bind mounts of namespaces: iproute2, Docker, containerd.
var namedDirs = []string{"/run/netns", "/run/docker/netns"}

// HiddenText reports that the namespaces of some processes cannot be read, see [Namespaces].
func HiddenText(processes int) string {
	text := "the network namespace of 1 process is hidden from this user"
	if processes != 1 {
		text = fmt.Sprintf("the network namespaces of %d processes are hidden from this user", processes)
	}
	if os.Geteuid() != 0 {
		text += ": run as root of the host"
	}
	return text
}

// Created returns the creation time of the namespace. It is known for named namespaces, because their file is created
// at the same time.
func (n Namespace) Created() (at time.Time, known bool) {
	if !slices.Contains(namedDirs, filepath.Dir(n.Path)) {
		return at, false
	}
	st, err := os.Stat(n.Path)
	if err != nil {
		return at, false
	}
	return st.ModTime(), true
}

// CurrentNamespace returns the namespace of the calling thread. Its name is "host" if it is the initial one.
func CurrentNamespace() Namespace {
	n := Namespace{Name: "current", Inode: inode("/proc/thread-self/ns/net")}
	if host := HostNamespace(); host.Name == "host" && host.Inode == n.Inode {
		n.Name = "host"
	}
	return n
}

// ownPath is the namespace of the process's main thread. While that thread runs in another namespace, as in
// [Namespace.Do], the path refers to that namespace.
const ownPath = "/proc/self/ns/net"

// own is the initial namespace of this process. ownFD is its open descriptor, or -1 if it could not be opened.
var own, ownFD = openOwn()

func openOwn() (Namespace, int) {
	fd, err := unix.Open(ownPath, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		fd = -1
	}
	return Namespace{Name: "current", Path: ownPath, Inode: inode(ownPath)}, fd
}

// open opens the namespace.
func (n Namespace) open() (fd int, err error) {
	if n.Path == ownPath && n.Inode == own.Inode && ownFD >= 0 {
		return unix.FcntlInt(uintptr(ownFD), unix.F_DUPFD_CLOEXEC, 0)
	}
	return unix.Open(n.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// ownLimit returns the file of nf_conntrack_max in own. It is looked up again as long as connection tracking is not
// loaded.
func ownLimit() (st os.FileInfo, err error) {
	limit.Lock()
	defer limit.Unlock()
	if limit.FileInfo != nil {
		return limit.FileInfo, nil
	}
	errDo := own.Do(func() error {
		limit.FileInfo, err = os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
		return nil
	})
	return limit.FileInfo, cmp.Or(errDo, err)
}

var limit struct {
	sync.Mutex
	os.FileInfo
}

// HostNamespace returns the initial network namespace of the host. If process 1 cannot be inspected, it is this
// process's namespace if nf_conntrack_max is writable there: the kernel allows that in the initial namespace only.
// Otherwise this process's namespace is returned under the name "current".
func HostNamespace() Namespace {
	host := own
	host.Name = "host"
	first := Namespace{Name: "host", Path: "/proc/1/ns/net", Inode: inode("/proc/1/ns/net")}
	switch {
	case first.Inode == own.Inode:
		return host
	case first.Inode != 0:
		return first
	}
	if st, err := ownLimit(); err != nil || st.Mode()&0o200 == 0 {
		return own
	}
	return host
}

// NamespaceAt names the namespace at a path such as /run/netns/blue. A name without a slash is looked up in
// namedDirs; "host" is the host's initial namespace.
func NamespaceAt(nameOrPath string) (Namespace, error) {
	if nameOrPath == "host" {
		return HostNamespace(), nil
	}
	candidates := []string{nameOrPath}
	if !strings.Contains(nameOrPath, "/") {
		candidates = nil
		for _, dir := range namedDirs {
			candidates = append(candidates, filepath.Join(dir, nameOrPath))
		}
	}
	for _, p := range candidates {
		i := inode(p)
		switch {
		case i == 0:
		case !isNetwork(p):
			return Namespace{}, fmt.Errorf("network namespace %q: %s is not one", nameOrPath, p)
		default:
			return Namespace{Name: filepath.Base(nameOrPath), Path: p, Inode: i}, nil
		}
	}
	return Namespace{}, fmt.Errorf("network namespace %q: not found in %s; give a path such as /proc/PID/ns/net",
		nameOrPath, strings.Join(namedDirs, " or "))
}

// NamespacesAt resolves names and paths as [NamespaceAt] does, without duplicates. It returns nil, which means every
// namespace of the host, for no names or if one is "all".
func NamespacesAt(names []string) (list []Namespace, err error) {
	if slices.Contains(names, "all") {
		return nil, nil
	}
	for _, name := range names {
		ns, err := NamespaceAt(name)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(list, func(other Namespace) bool { return other.Inode == ns.Inode }) {
			list = append(list, ns)
		}
	}
	return list, nil
}

// Namespaces lists every network namespace of the host once. The order is: the initial one, the caller's own, named
// ones, namespaces that only processes use. Without the right to inspect processes of other users, their namespaces
// are missing. hidden is the number of such processes.
func Namespaces() (list []Namespace, hidden int) {
	seen := map[uint64]bool{0: true}
	add := func(n Namespace) {
		if !seen[n.Inode] {
			seen[n.Inode] = true
			list = append(list, n)
		}
	}
	add(HostNamespace())
	add(own)
	for _, dir := range namedDirs {
		files, _ := os.ReadDir(dir)
		for _, f := range files {
			p := filepath.Join(dir, f.Name())
			if isNamespace(p) {
				add(Namespace{Name: f.Name(), Path: p, Inode: inode(p)})
			}
		}
	}
	procs, _ := os.ReadDir("/proc")
	var pids []int
	for _, p := range procs {
		if pid, err := strconv.Atoi(p.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.SortFunc(pids, cmp.Compare[int])
	for _, pid := range pids {
		p := fmt.Sprintf("/proc/%d/ns/net", pid)
		var st unix.Stat_t
		if err := unix.Stat(p, &st); errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			hidden++
		}
		if !seen[st.Ino] {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			add(Namespace{Name: fmt.Sprintf("pid %d (%s)", pid, strings.TrimSpace(string(comm))), Path: p, Inode: st.Ino})
		}
	}
	return list, hidden
}

// inode returns the number of the namespace at path, or 0 if none exists.
func inode(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Ino
}

// isNamespace reports whether path is a mounted namespace. After an unmount a plain file remains.
func isNamespace(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.NSFS_MAGIC
}

// isNetwork reports whether path is a network namespace. The type of a namespace is known only if it may be opened.
func isNetwork(path string) bool {
	if !isNamespace(path) {
		return false
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true // an attempt to enter it reports the error
	}
	defer unix.Close(fd)
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	return err != nil || kind == unix.CLONE_NEWNET
}

// Do runs fn on a thread inside the namespace and restores the caller's namespace. Files under /proc/sys/net that fn
// opens belong to the namespace. A Namespace without a path runs fn in the caller's namespace.
func (n Namespace) Do(fn func() error) error {
	if n.Path == "" {
		return fn()
	}
	target, err := n.open()
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", n.Name, err)
	}
	defer unix.Close(target)
	// The name or process ID may now belong to another namespace.
	var st unix.Stat_t
	if err := unix.Fstat(target, &st); err != nil || n.Inode != 0 && st.Ino != n.Inode {
		return fmt.Errorf("network namespace %s: it is gone: %w", n.Name, cmp.Or(err, error(unix.ENOENT)))
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			result <- err
			return // the locked thread exits with the goroutine
		}
		defer unix.Close(home)
		if inode("/proc/thread-self/ns/net") != n.Inode || n.Inode == 0 {
			if err := unix.Setns(target, unix.CLONE_NEWNET); err != nil {
				runtime.UnlockOSThread()
				result <- fmt.Errorf("network namespace %s: enter: %w (needs CAP_SYS_ADMIN)", n.Name, err)
				return
			}
		}
		err = fn()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}
