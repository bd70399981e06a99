// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// lock keeps a second daemon out of the same state directory. The kernel drops
// it with the process, so a crash leaves nothing to clean.
type lock struct{ file *os.File }

// acquire takes the lock of a state directory and writes into it who holds it: a
// command line.
func acquire(dir, command string) (*lock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, errNoRoot
		}
		return nil, fmt.Errorf("state directory %s: %w", dir, err)
	}
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, errNoRoot
		}
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := io.ReadAll(io.LimitReader(f, 4096))
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s is held by %s: stop that daemon first ('sluice stop'), or use another --state-dir in another network namespace", path, strings.TrimSpace(string(holder)))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := f.Truncate(0); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if _, err := fmt.Fprintf(f, "process %d (%s)\n", os.Getpid(), command); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &lock{f}, nil
}

func (l *lock) release() { l.file.Close() }

const failed = "failed: "

// leave notes in the file how the holder's end went, for who waits in freed.
func (l *lock) leave(err error) {
	text := ""
	if err != nil {
		text = failed + err.Error() + "\n"
	}
	_ = l.file.Truncate(0)
	_, _ = l.file.WriteAt([]byte(text), 0)
}

// freed waits until nobody holds the lock of a state directory, and returns what its
// last holder could not do.
func freed(ctx context.Context, dir string) error {
	f, err := os.Open(filepath.Join(dir, "lock"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	defer f.Close()
	for syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil {
		select {
		case <-ctx.Done():
			return errors.New("the daemon answers no more, but has not ended yet: look at its log")
		case <-time.After(20 * time.Millisecond):
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if why, found := strings.CutPrefix(strings.TrimSpace(string(text)), failed); found {
		return fmt.Errorf("the daemon has ended, but not as it should: %s", why)
	}
	return err
}
