// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// polledFile is a polled file. inotify would need a watch on every link and directory along the path,
// renewed after each replacement, and a host with many containers may have no free watches.
type polledFile struct {
	name    string
	seen    identity
	changed time.Time // time of the detected change; zero once reported
}

// identity differs between two files, and between two contents of one file. It is zero without a regular file.
type identity struct {
	device, inode uint64
	size          int64
	written       syscall.Timespec
}

func identify(name string) identity {
	info, err := os.Stat(name)
	if err != nil || !info.Mode().IsRegular() { // opening a pipe can block
		return identity{}
	}
	s := info.Sys().(*syscall.Stat_t)
	return identity{s.Dev, s.Ino, s.Size, s.Mtim}
}

const (
	// glance is the polling interval. It is longer than the granularity of the kernel's
	// modification times.
	glance = 200 * time.Millisecond
	// patience is the maximum wait for a writer to close the file. Some programs keep written files
	// open.
	patience = 10 * time.Second
)

// hasChanged reports whether the file has changed, a glance ago or earlier, and its writer has closed it.
func (w *polledFile) hasChanged(now time.Time) bool {
	is := identify(w.name)
	if is != w.seen {
		w.seen, w.changed = is, now
		return false
	}
	if w.changed.IsZero() || is == (identity{}) || w.beingWritten() && now.Sub(w.changed) < patience {
		return false
	}
	w.changed = time.Time{}
	return true
}

// changes returns a channel with an element after each change of the file, until the context ends.
func (w *polledFile) changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{})
	go func() {
		looks := time.NewTicker(glance)
		defer looks.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-looks.C:
				if !w.hasChanged(now) {
					continue
				}
			}
			select {
			case <-ctx.Done():
			case changes <- struct{}{}:
			}
		}
	}()
	return changes
}

// beingWritten reports whether a process has the file open for writing, so that the file may be
// incomplete. The kernel grants a read lease only without writers (fcntl(2), F_SETLEASE). On a file
// system without leases the result is false.
func (w *polledFile) beingWritten() bool {
	f, err := os.Open(w.name)
	if err != nil {
		return false
	}
	defer f.Close() // releases the lease
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	return errors.Is(err, unix.EAGAIN)
}
