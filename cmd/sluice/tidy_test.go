// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
)

// closedPipe returns the write end of a pipe without a reader.
func closedPipe(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	t.Cleanup(func() { w.Close() })
	return w
}

// TestTidy: a hangup, or output without a reader, ends a command with clean-up by its context. A broken pipe
// elsewhere does not.
func TestTidy(t *testing.T) {
	broken := closedPipe(t)
	write := func() error {
		_, err := broken.WriteString("x")
		return err
	}
	errDone := errors.New("cleaned up")
	for _, c := range []struct {
		name string
		app  app
		do   func() error
		ends bool
	}{
		{"hangup", app{stdout: os.Stdout, stderr: os.Stderr}, func() error { return syscall.Kill(os.Getpid(), syscall.SIGHUP) }, !signal.Ignored(syscall.SIGHUP)},
		{"the reader of standard error is gone", app{stdout: os.Stdout, stderr: broken}, write, true},
		{"the reader of standard output is gone", app{stdout: broken, stderr: os.Stderr}, write, true},
		{"another pipe breaks", app{stdout: os.Stdout, stderr: os.Stderr}, write, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ended := false
			cmd := withCleanup(&c.app, &cobra.Command{RunE: func(cmd *cobra.Command, _ []string) error {
				if err := c.do(); err != nil && !errors.Is(err, syscall.EPIPE) {
					return err
				}
				wait := time.Minute
				if !c.ends {
					wait = 50 * time.Millisecond
				}
				select {
				case <-cmd.Context().Done():
					ended = true
				case <-time.After(wait):
				}
				return errDone
			}})
			cmd.SetArgs([]string{})
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			if err := cmd.ExecuteContext(t.Context()); !errors.Is(err, errDone) {
				t.Errorf("ended with %v", err)
			}
			if ended != c.ends {
				t.Errorf("the context ended: %t, want %t", ended, c.ends)
			}
		})
	}
}

// TestTidyIsQuietBehindHead: a result without a reader is not an error.
func TestTidyIsQuietBehindHead(t *testing.T) {
	a := &app{stdout: closedPipe(t), stderr: os.Stderr}
	cmd := withCleanup(a, &cobra.Command{RunE: func(*cobra.Command, []string) error { return a.writeJSON(a.stdout, "x") }})
	cmd.SetArgs([]string{})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var status exitError
	if err := cmd.ExecuteContext(t.Context()); !errors.As(err, &status) || status.err != nil || status.code != exitFailure {
		t.Errorf("ended with %v, want a bare exit code", err)
	}
}

// TestInterruptedSaysWhatIsLeft: an interrupted case study reports a restored host only if it is restored.
func TestInterruptedSaysWhatIsLeft(t *testing.T) {
	const fine = "everything is as it was before"
	if err := interruptedError("the demo", fmt.Errorf("client: %w", context.Canceled)); !strings.Contains(err.Error(), fine) {
		t.Error(err)
	}
	for _, left := range []error{fmt.Errorf("lab 1: %w: busy", lab.ErrDown), fmt.Errorf("host settings: %w: refused", faults.ErrRestore)} {
		err := interruptedError("the demo", errors.Join(context.Canceled, left))
		if strings.Contains(err.Error(), fine) || !strings.Contains(err.Error(), left.Error()) {
			t.Error(err)
		}
	}
}
