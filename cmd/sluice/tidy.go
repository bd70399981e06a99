// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/table"
)

// withCleanup wraps commands that create or change something and undo it at the end. A closed terminal or
// output pipe then ends the command like Ctrl-C, so that it can clean up.
func withCleanup(a *app, cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, end := context.WithCancel(cmd.Context())
		defer end()
		if !signal.Ignored(syscall.SIGHUP) { // as under nohup
			var stop context.CancelFunc
			ctx, stop = signal.NotifyContext(ctx, syscall.SIGHUP)
			defer stop()
		}
		// A caught SIGPIPE leaves the write error. Sockets raise it, too.
		pipe := make(chan os.Signal, 1)
		signal.Notify(pipe, syscall.SIGPIPE)
		defer signal.Stop(pipe)
		go func() {
			for {
				select {
				case <-pipe:
					if isReaderGone(a.stdout) || isReaderGone(a.stderr) {
						end()
					}
				case <-ctx.Done():
					return
				}
			}
		}()
		cmd.SetContext(ctx)
		err := run(cmd, args)
		if errors.Is(err, syscall.EPIPE) && isReaderGone(a.stdout) {
			return exitError{code: exitFailure} // no message, like a command killed by the signal
		}
		return err
	}
	return cmd
}

// isReaderGone reports whether the reader of a stream has closed it.
func isReaderGone(w io.Writer) bool {
	f, ok := table.File(w)
	if !ok {
		return false
	}
	p := []unix.PollFd{{Fd: int32(f.Fd())}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0 && p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
}
