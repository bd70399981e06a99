// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/table"
)

// drainFlags are the flags of a drain.
type drainFlags struct {
	deadline time.Duration
	then     string
	wait     bool
}

func (f *drainFlags) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.deadline, "deadline", 0, "with drain: it ends after this time; 0: never")
	cmd.Flags().StringVar(&f.then, "then", "", "with --deadline: keep the connections that are left then, or reset them (default keep)")
	cmd.Flags().BoolVar(&f.wait, "wait", false, "with drain: return when no connection is left, or at the deadline")
	completeFlag(cmd, "then", control.Keep, control.Reset)
}

// check validates the flags; drains reports whether they belong to a drain.
func (f *drainFlags) check(cmd *cobra.Command, drains bool) error {
	switch {
	case !drains && (f.deadline != 0 || f.then != "" || f.wait):
		return usageError(cmd, "--deadline, --then and --wait go with drain")
	case f.then != "" && f.then != control.Keep && f.then != control.Reset:
		return usageError(cmd, "--then %q: write keep or reset", f.then)
	case f.then != "" && f.deadline == 0:
		return usageError(cmd, "--then goes with --deadline: without one a drain never ends")
	case f.deadline != 0 && (f.deadline < time.Second || f.deadline > control.MaxDeadline || f.deadline%time.Second != 0):
		return usageError(cmd, "--deadline %v: write whole seconds, from 1s to 720h", f.deadline)
	}
	return nil
}

func newBackend(a *app) *cobra.Command {
	var f drainFlags
	cmd := &cobra.Command{
		Use:     "backend SERVICE BACKEND up|drain|down|auto",
		GroupID: "gateway",
		Short:   "Take a backend out of a service or back in; add, change, remove",
		Long: `Override the state of one backend in the running daemon: drain sends it no new
flows and keeps those it has, down gives up on it, up uses it whatever its check
says, auto gives it back to configuration and check.

A drain with --deadline ends then, also over a restart of the daemon: the connections
that are left go on, or with --then reset they end and the backend is down. It takes
no new ones before 'auto'. 'sluice show backends' tells how many are left.

The subcommands change which backends there are: applied as a whole or not at all,
answered when the kernel has them, and kept over restarts.`,
		Example:           "  sluice backend web a drain --deadline 5m --then reset\n  sluice backend web a auto\n  sluice backend add web d address=10.0.2.5 port=8080",
		Args:              requireArgs("service", "backend", "state"),
		ValidArgsFunction: a.completeBackend,
		RunE: func(cmd *cobra.Command, args []string) error {
			service, backend, state := args[0], args[1], args[2]
			if !slices.Contains([]string{"up", "drain", "down", "auto"}, state) {
				return usageError(cmd, "state %q: write up, drain, down or auto", state)
			}
			if err := f.check(cmd, state == "drain"); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			to := api.BackendState{State: state, Deadline: int(f.deadline / time.Second), Then: f.then}
			if err := c.SetBackend(cmd.Context(), service, backend, to); err != nil {
				return err
			}
			if state != "drain" {
				return a.print(to, func(w io.Writer) error {
					_, err := table.Line(w, "%s/%s: %s", service, backend, state)
					return err
				})
			}
			d, err := api.AwaitDrain(cmd.Context(), f.wait, func(ctx context.Context) (*api.Drain, error) { return c.BackendDrain(ctx, service, backend) }, a.drainProgress)
			if err != nil {
				return err
			}
			return a.print(drainResult{Draining: d != nil, Drain: d}, func(w io.Writer) error {
				text := "its drain is over"
				if d != nil {
					text = joinTexts("drain", drainText(d))
				}
				_, err := table.Line(w, "%s/%s: %s", service, backend, text)
				return err
			})
		},
	}
	f.add(cmd)
	return cmd
}

// drainResult is the JSON output of 'sluice backend ... drain'.
type drainResult struct {
	Draining bool       `json:"draining"` // the command did not wait, or connections remain
	Drain    *api.Drain `json:"drain,omitempty"`
}

func newDrain(a *app) *cobra.Command {
	var f drainFlags
	var cancel bool
	cmd := &cobra.Command{
		Use:     "drain",
		GroupID: "gateway",
		Short:   "Let the whole gateway take no new connections to services",
		Long: `Drain lets no backend of any service take new connections, as before the gateway is
taken out: those that are open go on. It holds over restarts, until --cancel or the
deadline. New connections are answered as 'when-down' says, so first lead them to
another gateway: GET /api/v1/ready answers 503 while this one drains. NAT rules go on.

A drain with --deadline ends then: the connections that are left go on, or with --then
reset they end. The gateway takes no new ones before --cancel.`,
		Example: "  sluice drain --deadline 10m --then reset --wait\n  sluice drain --cancel",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd, !cancel); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if cancel {
				_, err := c.CancelDrain(cmd.Context())
				if err != nil {
					return err
				}
				return a.print(api.GatewayDrain{}, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, "the gateway takes new connections")
					return err
				})
			}
			now, err := c.Drain(cmd.Context(), api.StartDrain{Deadline: int(f.deadline / time.Second), Then: f.then})
			if err != nil {
				return err
			}
			_, err = api.AwaitDrain(cmd.Context(), f.wait, func(ctx context.Context) (*api.Drain, error) {
				now, err = c.DrainState(ctx)
				if err != nil {
					return nil, err
				}
				return now.Drain, nil
			}, a.drainProgress)
			if err != nil {
				return err
			}
			return a.print(now, func(w io.Writer) error {
				if !now.Draining {
					_, err := fmt.Fprintln(w, "somebody has cancelled the drain: the gateway takes new connections")
					return err
				}
				_, err := table.Line(w, "the gateway drains: %s", joinTexts(plural(now.Backends, "backend"), drainText(now.Drain)))
				return err
			})
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&cancel, "cancel", false, "take new connections again")
	return cmd
}

func (a *app) drainProgress(d *api.Drain) { a.progress("%s", drainText(d)) }

// leftText describes the remaining connections of a drain; "" for nil.
func leftText(d *api.Drain) string {
	switch {
	case d == nil || d.Left < 0:
		return ""
	case d.Estimate == 0:
		return fmt.Sprintf("%d left", d.Left)
	}
	return fmt.Sprintf("%d left, about %s", d.Left, time.Duration(d.Estimate)*time.Second)
}

// drainText describes the progress and the end of a drain.
func drainText(d *api.Drain) string {
	if d == nil {
		return ""
	}
	left := "connections are not counted"
	if d.Left >= 0 {
		left = plural(d.Left, "connection") + " left"
	}
	if d.Estimate > 0 {
		left += fmt.Sprintf(", none in about %s", time.Duration(d.Estimate)*time.Second)
	}
	if d.Until.IsZero() {
		return left
	}
	end := "then they go on"
	if d.Then == control.Reset {
		end = "then they are ended"
	}
	return fmt.Sprintf("%s; until %s, %s", left, d.Until.Local().Format(time.DateTime), end)
}

// joinTexts joins the non-empty texts.
func joinTexts(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(s string) bool { return s == "" }), "; ")
}
