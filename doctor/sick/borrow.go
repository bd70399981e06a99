// SPDX-License-Identifier: Apache-2.0

package sick

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockPath serialises those who change settings that rule the whole host.
const lockPath = "/run/lock/sluice-host-sysctl.lock"

// restorer waits until nobody holds the other end of its input any more, however
// that came about, and then writes the old values back.
const restorer = `trap '' HUP INT TERM; cat >/dev/null; rc=0
while [ $# -gt 1 ]; do printf '%s\n' "$2" >"$1" || rc=1; shift 2; done; exit $rc`

// Borrow changes host-wide settings, given by sysctl name, and returns a function
// that puts the old values back. A small process holds the old values, so that
// they come back even when this one is killed. Borrowers wait for each other.
func Borrow(settings map[string]string) (restore func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(lockPath), 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(lockPath, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("host settings: %w", err)
	}
	defer lock.Close() // the restorer's copy keeps the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("host settings: lock %s: %w", lockPath, err)
	}
	old := map[string]string{}
	args := []string{"-c", restorer, "sh"}
	for name := range settings {
		text, err := os.ReadFile(sysctlPath(name))
		if err != nil {
			return nil, fmt.Errorf("host settings: %w", err)
		}
		old[name] = strings.TrimSpace(string(text))
		args = append(args, sysctlPath(name), old[name])
	}
	guard := exec.Command("/bin/sh", args...)
	guard.ExtraFiles = []*os.File{lock}
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	hold, err := guard.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := guard.Start(); err != nil {
		return nil, fmt.Errorf("host settings: start the process that restores them: %w", err)
	}
	restore = func() error { return giveBack(hold, guard, old) }
	for name, value := range settings {
		if err := os.WriteFile(sysctlPath(name), []byte(value), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("host settings: %s = %s: %w", name, value, err), restore())
		}
	}
	return restore, nil
}

func giveBack(hold io.Closer, guard *exec.Cmd, old map[string]string) error {
	hold.Close()
	if err := guard.Wait(); err != nil {
		return fmt.Errorf("host settings: restore: %w", err)
	}
	for name, value := range old {
		if now, err := os.ReadFile(sysctlPath(name)); err != nil || strings.TrimSpace(string(now)) != value {
			return fmt.Errorf("host settings: %s is %q and was %q before", name, strings.TrimSpace(string(now)), value)
		}
	}
	return nil
}

func sysctlPath(name string) string {
	return "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
}
