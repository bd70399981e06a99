// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFreed: who stops a daemon waits until it has let go of its lock, and hears what it
// could not remove.
func TestFreed(t *testing.T) {
	dir := t.TempDir()
	if err := freed(t.Context(), dir); err != nil {
		t.Errorf("no daemon was ever here: %v", err)
	}
	l, err := acquire(dir, "sluice run")
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := freed(soon, dir); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
		t.Errorf("while it is held: %v", err)
	}
	l.leave(errors.New("ebpf: device busy"))
	l.release()
	if err := freed(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "device busy") {
		t.Errorf("after a bad end: %v", err)
	}
	if l, err = acquire(dir, "sluice run"); err != nil {
		t.Fatal(err)
	}
	l.leave(nil)
	l.release()
	if err := freed(t.Context(), dir); err != nil {
		t.Errorf("after a good end: %v", err)
	}
}

// TestOneDaemonOfANamespace: another state directory does not make room for a second one.
func TestOneDaemonOfANamespace(t *testing.T) {
	usual, own, other := filepath.Join(t.TempDir(), "sluice"), t.TempDir(), t.TempDir()
	log := slog.New(slog.DiscardHandler)
	first, err := acquireAlone(usual, own, "sluice run", log)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{usual, own, other} {
		if _, err := acquireAlone(usual, dir, "sluice run", log); !errors.Is(err, errHeld) {
			t.Errorf("a second daemon with the state directory %s: %v", dir, err)
		}
	}
	if i, err := os.Stat(filepath.Join(usual, "lock")); err != nil || i.Mode().Perm()&0o007 != 0 {
		t.Errorf("everybody may take the lock: mode %v, error %v", i.Mode(), err)
	}
	first.release()
	link := filepath.Join(own, "link") // as /var/run is one to /run
	if err := os.Symlink(usual, link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{link, usual, other} {
		l, err := acquireAlone(usual, dir, "sluice run", log)
		if err != nil {
			t.Fatal(err)
		}
		l.release()
	}
	for _, dir := range []string{usual, own, other} {
		if _, err := os.Stat(filepath.Join(dir, "lock")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a lock is left in %s: %v", dir, err)
		}
	}
}

// TestLockOfAFileTakenAway: who waits for a lock whose file its holder takes away gets the lock
// of a new one, not that of a file which nobody else will find.
func TestLockOfAFileTakenAway(t *testing.T) {
	dir := t.TempDir()
	for range 200 {
		held, err := acquire(dir, "first")
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan *lock)
		go func() {
			for {
				if l, err := acquire(dir, "second"); err == nil {
					got <- l
					return
				}
			}
		}()
		held.release()
		second := <-got
		if _, err := acquire(dir, "third"); !errors.Is(err, errHeld) {
			t.Fatalf("a third beside the second: %v", err)
		}
		second.release()
	}
}

// TestLockIsAFile: a symbolic link in the place of the lock is not followed, and a pipe blocks nobody.
func TestLockIsAFile(t *testing.T) {
	dir := t.TempDir()
	path, target := filepath.Join(dir, "lock"), filepath.Join(t.TempDir(), "precious")
	if err := errors.Join(os.WriteFile(target, []byte("data"), 0o600), os.Symlink(target, path)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"symbolic link", "regular file"} {
		if _, err := acquire(dir, "sluice run"); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if err := freed(t.Context(), dir); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(target)
	if text, _ := os.ReadFile(target); err != nil || string(text) != "data" || info.Mode().Perm() != 0o600 {
		t.Errorf("the target of the link has %q, mode %v, %v", text, info.Mode(), err)
	}
}

// TestSocketReplacesNoFile: only a socket without a listener is removed.
func TestSocketReplacesNoFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("over a file: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(link); err == nil {
		t.Error("over a symbolic link")
	}
	if text, err := os.ReadFile(path); string(text) != "data" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "another process listens") {
		t.Errorf("over a listener: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as kill -9 leaves it
	l.Close()
	if l, err = listen(path); err != nil {
		t.Errorf("over a socket that nobody listens to: %v", err)
	} else {
		l.Close()
	}
}
