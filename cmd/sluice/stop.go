// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/pause"
)

func newStop(a *app) *cobra.Command {
	var stop api.Stop
	var force bool
	cmd := &cobra.Command{
		Use:     "stop",
		GroupID: "gateway",
		Short:   "End the running daemon and restore the host",
		Long: `End the running daemon and remove everything that it added to the host.

With --force, rules and flows that a daemon left behind are removed too, when
none runs: after kill -9, after --keep, or when a new version refuses the tables
of an old one.`,
		Example: "  sluice stop\n  sluice stop --keep   # the rules stay, traffic goes on\n  sluice stop --force  # no daemon runs: remove what one left",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if force && stop.Keep {
				return usageError(cmd, "--force removes what --keep leaves: name one of them")
			}
			if force && a.remote.Server != "" {
				return usageError(cmd, "--force removes what was left on this host, --server names another one")
			}
			done, said := true, "stopped"
			err := a.stopDaemon(cmd.Context(), stop)
			if force && errors.Is(err, api.ErrNoDaemon) {
				said = "removed what a daemon had left"
				if done, err = daemon.RemoveLeft(cmd.Context(), a.paths.Directory()); !done {
					said = "nothing to stop: no daemon runs, and none left rules or flows in this network namespace"
				}
			}
			if err != nil {
				return err
			}
			return a.print(map[string]bool{"stopped": done, "kept": stop.Keep}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, said)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&stop.Keep, "keep", false, "leave the rules in the kernel: traffic goes on")
	cmd.Flags().BoolVar(&force, "force", false, "without a daemon, remove what one left in this network namespace")
	return cmd
}

func (a *app) stopDaemon(ctx context.Context, stop api.Stop) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if err := c.Stop(ctx, stop); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := waitGone(ctx, c); err != nil {
		return err
	}
	if a.remote.Server != "" || !a.paths.LockKnown() {
		return nil // the path of the daemon's lock is unknown
	}
	return daemon.WaitReleased(ctx, a.paths.Directory()) // the daemon closes the API before it removes its state
}

// waitGone returns when no process answers on the socket.
func waitGone(ctx context.Context, c *api.Client) error {
	for {
		_, err := c.Status(ctx)
		switch {
		case errors.Is(err, api.ErrNoDaemon):
			return nil
		case ctx.Err() != nil:
			return errors.New("the daemon accepted the stop but still answers after 30s: look at its log")
		}
		_ = pause.For(ctx, 20*time.Millisecond)
	}
}
