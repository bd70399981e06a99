// SPDX-License-Identifier: Apache-2.0

package conntrack

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

// Namespace is a network namespace that something on this host keeps alive.
type Namespace struct {
	// Name is "host" for the first namespace of the host, the file's name for those
	// under /run/netns and /run/docker/netns, else "pid N (command)".
	Name string
	// Path can be opened to enter the namespace; empty means the calling
	// thread's own.
	Path string
	// Inode is the namespace's number, the one that the kernel's
	// "table full in netns N" message prints; 0 when unknown.
	Inode uint64
}

// namedDirs hold bind mounts of namespaces: iproute2, Docker, containerd.
var namedDirs = []string{"/run/netns", "/run/docker/netns"}

// HiddenText says that the namespaces of some processes cannot be seen, see [Namespaces].
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

// Created is when the namespace was made. It is known of those with a name,
// whose file was made at the same time.
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

// CurrentNamespace is the one of the calling thread, named "host" if that is
// the host's first.
func CurrentNamespace() Namespace {
	n := Namespace{Name: "current", Inode: inode("/proc/thread-self/ns/net")}
	if host := HostNamespace(); host.Name == "host" && host.Inode == n.Inode {
		n.Name = "host"
	}
	return n
}

// ownPath shows the namespace of the process's main thread. While that runs something in another
// one, as [Namespace.Do] may have it do, it shows that.
const ownPath = "/proc/self/ns/net"

// own is the namespace in which this process began. ownFD is it, and stays open; -1 where it could
// not be opened.
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

// ownLimit is the file of nf_conntrack_max as it is in own. Where there is no connection tracking it
// is looked for again.
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

// HostNamespace is the first network namespace of the host. Where process 1
// cannot be looked into, it is this process's, if that is the one in which
// nf_conntrack_max can be written: the kernel allows that in the first only.
// Otherwise this process's own is returned under the name "current".
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

// NamespaceAt names the namespace behind a path such as /run/netns/blue. A name
// without a slash is looked up in the directories of named namespaces; "host" is
// the first of the host.
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

// Namespaces lists every network namespace of the host once: the host's first, then the caller's own,
// the named ones, then those that only processes hold. Without the right to
// look into other users' processes their namespaces are missing from the list;
// hidden tells for how many processes that is so.
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

// inode returns the number of the namespace behind path, 0 when there is none.
func inode(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Ino
}

// isNamespace tells a mounted namespace from the plain file that remains when
// its mount is gone.
func isNamespace(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.NSFS_MAGIC
}

// isNetwork tells network namespaces from other files, and from namespaces of other kinds
// where they may be opened.
func isNetwork(path string) bool {
	if !isNamespace(path) {
		return false
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true // who enters it learns why not
	}
	defer unix.Close(fd)
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	return err != nil || kind == unix.CLONE_NEWNET
}

// Do runs fn on a thread inside the namespace; it is in the caller's again
// afterwards. Files under /proc/sys/net that fn opens are the namespace's own.
// A Namespace without a path runs fn where the caller is.
func (n Namespace) Do(fn func() error) error {
	if n.Path == "" {
		return fn()
	}
	target, err := n.open()
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", n.Name, err)
	}
	defer unix.Close(target)
	// A name, or a process id, may belong to another namespace by now.
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
			return // the locked thread ends with the goroutine
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
