// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/accelerate"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/table"
)

func newAccelerate(a *app) *cobra.Command {
	var o accelerate.Options
	var dryRun bool
	cmd := &cobra.Command{
		Use:     "accelerate",
		GroupID: "gateway",
		Short:   "Make the host's own NAT rules faster, without a configuration",
		Long: `Accelerate runs in the foreground, without a configuration file and beside 'sluice
run'. The host's own rules (nftables, iptables, Docker, firewalld) and connection
tracking decide about each connection. After 16 packets of an established and
translated connection of TCP or UDP, eBPF programs repeat the decision for
its later packets: in XDP between network cards, in TC to and from bridges.

A change of rules, routes, interfaces or bridge entries takes effect as without
acceleration. If the process ends, or hangs for 5 seconds, the kernel forwards all
packets, and the connections continue. Nothing remains after the end.

Rules that depend on single packets (limits, quotas, logs, TCP flags, changes of
packets) exclude the flows that may traverse them by address, port and interface.
A rule without such a condition excludes acceleration: it ends with code 1 and
names the rule, and it pauses while the rule exists. Counters of rules and of
connection tracking do not contain accelerated packets; 'sluice show accelerated'
counts them. Needs root and Linux 6.6.`,
		Example: "  sluice accelerate --dry-run   # the interfaces, and what prevents acceleration\n" +
			"  sluice accelerate --interfaces eth0,eth1\n" +
			"  sluice show accelerated\n" +
			"  sluice accelerate stop",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			run := a.accelerate
			if dryRun {
				run = a.planAcceleration
			}
			err := run(cmd.Context(), o)
			if errors.Is(err, os.ErrPermission) {
				return fmt.Errorf("accelerate: %w", daemon.ErrNoRoot)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "change nothing; print the interfaces and what prevents acceleration")
	cmd.Flags().StringSliceVar(&o.Interfaces, "interfaces", nil, "interfaces to accelerate (default all suitable ones)")
	cmd.Flags().Uint32Var(&o.Flows, "flows", accelerate.DefaultFlows, "maximum number of flows; a connection has two")
	offerFrom(cmd, "interfaces", interfaces)
	cmd.AddCommand(&cobra.Command{
		Use:     "stop",
		Short:   "End the acceleration and remove its programs",
		Example: "  sluice accelerate stop",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 30*time.Second)
			defer cancel()
			if err := accelerate.Stop(ctx, a.paths.Directory()); err != nil {
				return err
			}
			return a.print(map[string]bool{"stopped": true}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "stopped")
				return err
			})
		},
	})
	return cmd
}

// accelerate runs until the end of ctx or 'sluice accelerate stop'.
func (a *app) accelerate(ctx context.Context, o accelerate.Options) error {
	o.Log = a.progress
	return accelerate.Serve(ctx, a.paths.Directory(), o, func(s *accelerate.Accelerator) {
		for _, i := range s.Interfaces() {
			a.progress("interface %s", i)
		}
		a.progress("accelerating; Ctrl-C or 'sluice accelerate stop' ends it")
	})
}

// planAcceleration prints what would be accelerated. The exit code is 1 if that is nothing.
func (a *app) planAcceleration(ctx context.Context, o accelerate.Options) error {
	plan, err := accelerate.Inspect(ctx, o)
	if err != nil {
		return err
	}
	err = a.print(plan, func(w io.Writer) error {
		if err := writeAcceleratedInterfaces(w, plan.Interfaces); err != nil {
			return err
		}
		for _, r := range plan.Refused {
			table.Line(w, "prevented by: %s", r)
		}
		if len(plan.Refused) == 0 {
			fmt.Fprintln(w, "established, translated connections between these interfaces would be accelerated")
		}
		for _, r := range plan.RefusedIPv6 {
			table.Line(w, "prevented for IPv6 by: %s", r)
		}
		for _, r := range plan.Excluding {
			table.Line(w, "prevented for its flows by: %s", r)
		}
		return nil
	})
	if err == nil && len(plan.Refused) > 0 {
		return exitError{code: exitFailure}
	}
	return err
}

func writeAcceleratedInterfaces(w io.Writer, list []accelerate.Interface) error {
	t := table.New("INTERFACE", "HOOKS", "WHY")
	for _, i := range list {
		hooks := strings.Join(i.Hooks, ", ")
		if hooks == "" {
			hooks = "-"
		}
		t.Row(i.Name, hooks, i.Why)
	}
	return t.Write(w)
}

func newShowAccelerated(a *app) *cobra.Command {
	limit := 100
	cmd := &cobra.Command{
		Use:   "accelerated",
		Short: "Accelerated connections, and the slow ones with the reason",
		Long: "Accelerated asks the running 'sluice accelerate'. Each line is one direction of a translated connection. Its packets\n" +
			"and bytes are those of the fast path only: the kernel's counters do not contain them.",
		Example: "  sluice show accelerated\n  sluice show accelerated --limit 1000 --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return usageError(cmd, "--limit is not negative")
			}
			if a.remote.Server != "" {
				return usageError(cmd, "the acceleration of another host cannot be asked: run the command there")
			}
			s, err := accelerate.StatusOf(cmd.Context(), a.paths.Directory(), limit)
			if errors.Is(err, accelerate.ErrNotRunning) {
				return err
			}
			if err != nil {
				return fmt.Errorf("acceleration: %w", err)
			}
			return a.print(s, func(w io.Writer) error { return writeAccelerated(w, s) })
		},
	}
	cmd.Flags().IntVar(&limit, "limit", limit, "list at most so many flows, those with the most packets first")
	return cmd
}

func writeAccelerated(w io.Writer, s *accelerate.Status) error {
	table.Line(w, "process %d, up %s; %d packets in XDP, %d in TC, %s", s.PID, time.Duration(s.Uptime*float64(time.Second)).Round(time.Second),
		s.XDP, s.TC, size(s.Bytes))
	table.Line(w, "%s fast, %d slow; %d learned, %d ended", plural(s.Fast, "flow"), s.Slow, s.Learned, s.Ended)
	for _, r := range s.Refused {
		table.Line(w, "nothing is accelerated: %s", r)
	}
	for _, r := range s.RefusedIPv6 {
		table.Line(w, "no flow of IPv6 is accelerated: %s", r)
	}
	for _, r := range s.Excluding {
		table.Line(w, "its flows are not accelerated: %s", r)
	}
	fmt.Fprintln(w)
	if err := writeAcceleratedInterfaces(w, s.Interfaces); err != nil || len(s.Flows) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t := table.New("PROTOCOL", "SOURCE", "DESTINATION", "TRANSLATED TO", "PATH", "HOOK", ">PACKETS", ">BYTES")
	for _, f := range s.Flows {
		to, path, hook := "-", "-", f.Hook
		if f.NewSource.IsValid() {
			to, path = f.NewSource.String()+" > "+f.NewDest.String(), f.In+" > "+f.Out
		}
		if hook == "" {
			hook = "slow: " + f.Why
		}
		t.Row(f.Protocol, f.Source, f.Dest, to, path, hook, f.Packets, size(f.Bytes))
	}
	return t.Write(w)
}
