// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watched is a file that is looked at now and then. The kernel's events (inotify) would have to
// be asked for at every link and directory that the name leads through, and again whenever one
// of them is replaced or made anew, and a host with many containers has none left.
type watched struct {
	name    string
	seen    identity
	changed time.Time // when it was seen to be another than before; zero once that was told
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
	// glance is how often the file is looked at: more than the tick in which the kernel
	// counts when a file was written.
	glance = 200 * time.Millisecond
	// patience is how long a writer is waited for: some programs keep what they have written open.
	patience = 10 * time.Second
)

// look tells whether the file has become another, since a glance ago and its writer has closed it.
func (w *watched) look(now time.Time) bool {
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

// follow returns a channel that tells of every change of the file until the context ends.
func (w *watched) follow(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{})
	go func() {
		looks := time.NewTicker(glance)
		defer looks.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-looks.C:
				if !w.look(now) {
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

// beingWritten tells whether some process has the file open for writing, so that it may
// hold half a configuration: the kernel grants a read lease only when none has (fcntl(2),
// F_SETLEASE). A file system without leases cannot tell.
func (w *watched) beingWritten() bool {
	f, err := os.Open(w.name)
	if err != nil {
		return false
	}
	defer f.Close() // gives the lease back
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	return errors.Is(err, unix.EAGAIN)
}
