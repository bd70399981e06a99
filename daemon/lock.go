// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/disk"
	"github.com/sluice-lb/sluice/pause"
)

// Lock excludes a second daemon from the same state directory. The kernel releases it with the
// process, so a crash needs no cleanup.
type Lock struct {
	file      *os.File
	keeps     bool      // The lock file contains the result of the daemon's end for processes that wait in WaitReleased.
	namespace io.Closer // The lock of the network namespace; nil if it could not be taken.
}

// errHeld is wrapped when another daemon holds a lock.
var errHeld = errors.New("stop that daemon first ('sluice stop'): a network namespace has one gateway")

// Acquire is lockDirectory for a process that changes the kernel. It also takes the lock of the
// network namespace. Two daemons with different state directories, such as one in a container on
// the host's network, would otherwise undo each other's rules.
func Acquire(own, command string, log *slog.Logger) (*Lock, error) {
	return acquireIn(namespaceLock, own, command, log)
}

func acquireIn(namespace, own, command string, log *slog.Logger) (*Lock, error) {
	l, err := lockDirectory(own, command)
	if err != nil {
		return nil, err
	}
	if l.namespace, err = lockNamespace(namespace, command+", state directory "+own, log); errors.Is(err, errHeld) {
		l.Release()
		return nil, err
	} else if err != nil {
		log.Warn("a second daemon in this network namespace would not be noticed", "error", err)
	}
	return l, nil
}

// lockDirectory takes the lock of a state directory and writes the holder's command line into it.
func lockDirectory(dir, command string) (*Lock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, ErrNoRoot
		}
		return nil, fmt.Errorf("state directory %s: %w; name one that can be written with --state-dir", dir, err)
	}
	for path := filepath.Join(dir, "lock"); ; {
		f, err := lockFile(path)
		if err != nil {
			return nil, err
		}
		// The previous holder may have removed the file before this process locked it.
		mine, err := f.Stat()
		there, gone := os.Stat(path)
		if err != nil || gone != nil || !os.SameFile(mine, there) {
			f.Close()
			if err == nil && (gone == nil || errors.Is(gone, os.ErrNotExist)) {
				continue
			}
			return nil, fmt.Errorf("lock %s: %w", path, errors.Join(err, gone))
		}
		// A full disk does not invalidate the lock.
		_ = f.Truncate(0)
		_, _ = fmt.Fprintf(f, "process %d (%s)\n", os.Getpid(), command)
		return &Lock{file: f}, nil
	}
}

// lockFile opens or creates a lock's file and locks it.
func lockFile(path string) (*os.File, error) {
	// A process that can read the file can lock it and prevent every daemon from starting. The mode
	// therefore excludes other users.
	f, err := disk.Open(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o640)
	switch {
	case errors.Is(err, os.ErrPermission):
		return nil, ErrNoRoot
	case errors.Is(err, syscall.ELOOP):
		return nil, fmt.Errorf("lock %s: the file is a symbolic link, whose target would be overwritten: remove it", path)
	case err != nil:
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := f.Chmod(0o640); err != nil { // older versions created it readable for all users
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := io.ReadAll(io.LimitReader(f, 4096))
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s is held by %s: %w", path, cmp.Or(strings.TrimSpace(string(holder)), "another daemon"), errHeld)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// Release removes the file while no other process can hold the lock.
func (l *Lock) Release() {
	if l.namespace != nil { // first: a process that waits in WaitReleased may start the next daemon
		l.namespace.Close()
	}
	if !l.keeps {
		_ = os.Remove(l.file.Name())
	}
	l.file.Close()
}

const failed = "failed: "

// Leave writes the result of the holder's end into the file for processes that wait in WaitReleased.
func (l *Lock) Leave(err error) {
	text := ""
	if err != nil {
		text = failed + err.Error() + "\n"
		l.keeps = true
	}
	_ = l.file.Truncate(0)
	_, _ = l.file.WriteAt([]byte(text), 0)
}

// WaitReleased waits for the release of a state directory's lock and returns the error that the last
// holder left.
func WaitReleased(ctx context.Context, dir string) error {
	f, err := disk.Open(filepath.Join(dir, "lock"), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	defer f.Close()
	for syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil {
		if pause.For(ctx, 20*time.Millisecond) != nil {
			return errors.New("the daemon answers no more, but has not ended yet: look at its log")
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if why, found := strings.CutPrefix(strings.TrimSpace(string(text)), failed); found {
		return fmt.Errorf("the daemon has ended, but not as it should: %s", why)
	}
	return err
}
