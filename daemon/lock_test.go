// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestWaitReleased: a command that stops a daemon waits for the release of its lock, and gets the errors of the
// clean-up.
func TestWaitReleased(t *testing.T) {
	dir := t.TempDir()
	if err := WaitReleased(t.Context(), dir); err != nil {
		t.Errorf("no daemon was ever here: %v", err)
	}
	l, err := lockDirectory(dir, "sluice run")
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := WaitReleased(soon, dir); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
		t.Errorf("while it is held: %v", err)
	}
	l.Leave(errors.New("ebpf: device busy"))
	l.Release()
	if err := WaitReleased(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "device busy") {
		t.Errorf("after a bad end: %v", err)
	}
	if l, err = lockDirectory(dir, "sluice run"); err != nil {
		t.Fatal(err)
	}
	l.Leave(nil)
	l.Release()
	if err := WaitReleased(t.Context(), dir); err != nil {
		t.Errorf("after a good end: %v", err)
	}
}

// TestOneDaemonOfANamespace: another state directory does not make room for a second daemon, and its
// error names the first one. The lock is free after release and after the end of the process.
func TestOneDaemonOfANamespace(t *testing.T) {
	labtest.Require(t, labtest.Root) // a holder without CAP_NET_ADMIN is no gateway
	name := fmt.Sprintf("@sluice/test-%d", os.Getpid())
	own, other := t.TempDir(), t.TempDir()
	log := slog.New(slog.DiscardHandler)
	for range 2 {
		first, err := acquireIn(name, own, "sluice run -c first.yaml", log)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := acquireIn(name, own, "sluice run", log); !errors.Is(err, errHeld) {
			t.Errorf("a second daemon with the same state directory: %v", err)
		}
		_, err = acquireIn(name, other, "sluice run", log)
		if !errors.Is(err, errHeld) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) || !strings.Contains(err.Error(), "first.yaml") || !strings.Contains(err.Error(), own) {
			t.Errorf("a second daemon with another state directory: %v", err)
		}
		if i, err := os.Stat(filepath.Join(own, "lock")); err != nil || i.Mode().Perm()&0o007 != 0 {
			t.Errorf("everybody may take the lock: mode %v, error %v", i.Mode(), err)
		}
		first.Release()
		for _, dir := range []string{own, other} {
			if _, err := os.Stat(filepath.Join(dir, "lock")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a lock is left in %s: %v", dir, err)
			}
		}
	}
}

// TestSquatter: a process without rights that takes the lock's name is reported, and keeps no daemon from
// starting.
func TestSquatter(t *testing.T) {
	if os.Getenv("SLUICE_SQUAT") != "" {
		l, err := net.Listen("unix", os.Getenv("SLUICE_SQUAT"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("listening")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it
		l.Close()
		return
	}
	labtest.Require(t, labtest.Root)
	name := fmt.Sprintf("@sluice/squat-%d", os.Getpid())
	test, err := os.ReadFile("/proc/self/exe") // user 65534 may not enter the directory of the test
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(os.TempDir(), fmt.Sprintf("squat-%d", os.Getpid()))
	if err := os.WriteFile(binary, test, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(binary)
	cmd := exec.Command(binary, "-test.run=^TestSquatter$")
	cmd.Dir, cmd.Env = "/", append(os.Environ(), "SLUICE_SQUAT="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); _ = cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "listening\n" {
		t.Fatalf("%q, %v", line, err)
	}
	var said bytes.Buffer
	l, err := acquireIn(name, t.TempDir(), "sluice run", slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if !strings.Contains(said.String(), "no gateway") || !strings.Contains(said.String(), "of user 65534") {
		t.Errorf("the log: %s", &said)
	}
}

// TestLockOfAFileTakenAway: if the holder deletes the lock file, a waiting process must lock the new file, not
// the deleted one.
func TestLockOfAFileTakenAway(t *testing.T) {
	dir := t.TempDir()
	for range 200 {
		held, err := lockDirectory(dir, "first")
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan *Lock)
		go func() {
			for {
				if l, err := lockDirectory(dir, "second"); err == nil {
					got <- l
					return
				}
			}
		}()
		held.Release()
		second := <-got
		if _, err := lockDirectory(dir, "third"); !errors.Is(err, errHeld) {
			t.Fatalf("a third beside the second: %v", err)
		}
		second.Release()
	}
}

// TestLockIsAFile: a symbolic link in the place of the lock is not followed, and a pipe blocks no process.
func TestLockIsAFile(t *testing.T) {
	dir := t.TempDir()
	path, target := filepath.Join(dir, "lock"), filepath.Join(t.TempDir(), "precious")
	if err := errors.Join(os.WriteFile(target, []byte("data"), 0o600), os.Symlink(target, path)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"symbolic link", "regular file"} {
		if _, err := lockDirectory(dir, "sluice run"); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if err := WaitReleased(t.Context(), dir); err == nil || !strings.Contains(err.Error(), path) {
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
