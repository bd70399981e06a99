// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/health"
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
				if done, err = a.removeLeft(cmd.Context()); !done {
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
	if a.remote.Server != "" || a.socket != "" && a.stateDir == "" {
		return nil // the path of the daemon's lock is unknown
	}
	return freed(ctx, a.directory()) // the daemon closes the API before it removes its state
}

// removeLeft removes the kernel state of a daemon that no longer runs, and reports whether there
// was any.
func (a *app) removeLeft(ctx context.Context) (bool, error) {
	paths, err := openDatapaths(a.directory(), slog.New(slog.DiscardHandler))
	if err != nil {
		return false, err
	}
	e := engine.New(engine.Options{Datapaths: paths.list})
	left, err := paths.left()
	held, unread := announce.Left(a.directory())
	if err := errors.Join(err, unread); err != nil {
		return false, errors.Join(err, e.Stop(ctx, true))
	}
	left = left || held
	if !left {
		rules, err := health.RemovePaths()
		return rules > 0, errors.Join(err, e.Stop(ctx, true))
	}
	lock, err := acquireAlone(a.directory(), "sluice stop --force", slog.New(slog.DiscardHandler))
	if err != nil {
		return false, errors.Join(err, e.Stop(ctx, true))
	}
	defer lock.release()
	_, err = health.RemovePaths()
	err = errors.Join(err, announce.Remove(a.directory()), e.Stop(ctx, false))
	lock.leave(err)
	return true, err
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
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}
