// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

// restorer waits until the other end of its input is closed, for whatever reason, restores the old
// values and verifies them. It holds the lock until then.
const restorer = `trap '' HUP INT TERM; cat >/dev/null; rc=0
while [ $# -gt 1 ]; do
	printf '%s\n' "$2" >"$1" && [ "$(cat "$1")" = "$2" ] || { echo "$1 could not be set back to $2"; rc=1; }
	shift 2
done; exit $rc`

// ErrRestore is in the error of a setting that could not be put back.
var ErrRestore = errors.New("restore")

// Borrow changes host-wide sysctls and returns a function that restores the old values. An empty
// value leaves a setting for the borrower to change later. A small process holds the old values, so
// that they are restored even after SIGKILL. Borrowers wait for each other until ctx ends.
func Borrow(ctx context.Context, settings map[string]string) (restore func() error, err error) {
	lock, err := lab.LockHostSettings(ctx, unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("host settings: %w", err)
	}
	defer lock.Close() // the restorer's copy keeps the lock
	args := []string{"-c", restorer, "sh"}
	for name := range settings {
		text, err := os.ReadFile(sysctlPath(name))
		if err != nil {
			return nil, fmt.Errorf("host settings: %w", err)
		}
		args = append(args, sysctlPath(name), strings.TrimSpace(string(text)))
	}
	guard := exec.Command("/bin/sh", args...)
	guard.ExtraFiles = []*os.File{lock}
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var said bytes.Buffer
	guard.Stdout = &said
	hold, err := guard.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := guard.Start(); err != nil {
		return nil, fmt.Errorf("host settings: start the process that restores them: %w", err)
	}
	restore = func() error { return giveBack(hold, guard, &said) }
	for name, value := range settings {
		if value == "" {
			continue
		}
		if err := os.WriteFile(sysctlPath(name), []byte(value), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("host settings: %s = %s: %w", name, value, err), restore())
		}
	}
	return restore, nil
}

func giveBack(hold io.Closer, guard *exec.Cmd, said *bytes.Buffer) error {
	hold.Close()
	if err := guard.Wait(); err != nil {
		return fmt.Errorf("host settings: %w: %w: %s", ErrRestore, err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}

func sysctlPath(name string) string {
	return "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
}
