// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/table"
)

func newApply(a *app) *cobra.Command {
	var confirm time.Duration
	var cluster bool
	var revision int64
	cmd := &cobra.Command{
		Use:     "apply FILE",
		GroupID: "gateway",
		Short:   "Put a configuration in force in the running daemon",
		Long: `Send a configuration to the running daemon, which applies all of it or nothing.
The change survives restarts and does not modify the daemon's own file: 'sluice
config diff' shows the difference, 'sluice config revert' undoes it.

With --confirm the daemon undoes the change after that time unless 'sluice config
confirm' is run. So a change that cuts your own connection is undone by itself.

With --cluster the configuration becomes that of all nodes of the cluster, in place
of their files. It needs cluster.store in the file of each node. All live nodes
check it first; a node that refuses it afterwards makes the change be taken back.
With --revision it is applied only if the store has this revision, which 'sluice
show nodes' prints; of two changes of one revision, exactly one is made.`,
		Example: `  sluice apply lb-dnat.yaml
  sluice apply new.yaml --confirm 60s && sluice config confirm
  sluice apply --cluster cluster.yaml --revision 17`,
		Args:              requireArgs("file"),
		ValidArgsFunction: completeYAML,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case cluster && confirm != 0:
				return usageError(cmd, "--confirm is for one node: leave it out, or leave out --cluster")
			case !cluster && revision != -1:
				return usageError(cmd, "--revision goes with --cluster")
			}
			raw, err := readChecked(args[0])
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if cluster {
				out, err := c.ApplyCluster(cmd.Context(), args[0], raw, revision)
				if err != nil {
					return err
				}
				return a.print(out, func(w io.Writer) error { return writeClusterOutcome(w, out) })
			}
			if confirm != 0 && (confirm < time.Second || confirm > 24*time.Hour) {
				return usageError(cmd, "--confirm %s: write a time from 1s to 24h", confirm)
			}
			out, err := c.ApplyTrial(cmd.Context(), args[0], raw, int(confirm/time.Second))
			if err != nil {
				return err
			}
			return a.print(out, func(w io.Writer) error {
				if err := writeOutcome(w, out, "applied"); err != nil || confirm == 0 {
					return err
				}
				_, err := table.Line(w, "taken back in %s unless you run: sluice config confirm", confirm)
				return err
			})
		},
	}
	cmd.Flags().DurationVar(&confirm, "confirm", 0, "take the change back after this time unless it is confirmed")
	cmd.Flags().BoolVar(&cluster, "cluster", false, "put it in force on all nodes of the cluster")
	cmd.Flags().Int64Var(&revision, "revision", -1, "with --cluster: refuse unless the store has this revision; 0: none; -1: any")
	return cmd
}

func writeClusterOutcome(w io.Writer, out *api.ClusterOutcome) error {
	_, err := table.Line(w, "revision %d is in force on %s", out.Revision, strings.Join(out.InForce, ", "))
	if err == nil && len(out.Silent) > 0 {
		_, err = table.Line(w, "no report yet from %s: see 'sluice show nodes'", strings.Join(out.Silent, ", "))
	}
	return err
}

func newDiff(a *app) *cobra.Command {
	var exitCode bool
	var node string
	cmd := &cobra.Command{
		Use:     "diff FILE",
		GroupID: "gateway",
		Short:   "Show what applying a configuration would change",
		Long: `Show what applying a configuration would change in the kernel: rules, elements,
scheduler slots, and how many live flows it would end. Nothing is
changed. With a running daemon the comparison is with what it has in force,
without one with what the kernel holds.`,
		Example:           "  sluice diff lb-dnat.yaml\n  sluice diff --exit-code new.yaml && echo no change",
		Args:              requireArgs("file"),
		ValidArgsFunction: completeYAML,
		RunE: func(cmd *cobra.Command, args []string) error {
			out, err := a.dryRun(cmd.Context(), args[0], node)
			if err != nil {
				return err
			}
			if err := a.print(out, func(w io.Writer) error { return writeOutcome(w, out, "would apply") }); err != nil {
				return err
			}
			if exitCode && !isUnchanged(out) {
				return exitError{code: exitFailure}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 1 when something would change")
	cmd.Flags().StringVar(&node, "node", "", "without a daemon: name of this host in the cluster, instead of the host name")
	return cmd
}

// dryRun returns the changes that apply would make, from the daemon or, without one, from the
// kernel.
func (a *app) dryRun(ctx context.Context, file, node string) (*api.Outcome, error) {
	raw, err := readChecked(file)
	if err != nil {
		return nil, err
	}
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	out, err := c.Plan(ctx, file, raw)
	if !errors.Is(err, api.ErrNoDaemon) || a.remote.Server != "" {
		return out, err
	}
	a.progress("no daemon runs: comparing with the kernel")
	cfg, err := config.Decode(file, raw)
	if err != nil {
		return nil, err
	}
	return daemon.Forecast(ctx, a.paths.Directory(), node, cfg)
}

// readChecked reads a configuration and refuses one with errors before contacting the daemon, so
// that messages contain the user's file name.
func readChecked(file string) ([]byte, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	_, err = config.Decode(file, raw)
	return raw, err
}

func isUnchanged(out *api.Outcome) bool {
	return !slices.ContainsFunc(out.Changes, func(c *datapath.Change) bool { return !c.Empty() })
}

func writeOutcome(w io.Writer, out *api.Outcome, verb string) error {
	t := table.New("DATAPATH", "OBJECTS", "RULES", "ELEMENTS", "SLOTS MOVED", "TIME")
	for _, c := range out.Changes {
		took := ""
		if c.Duration > 0 {
			took = c.Duration.Round(100_000).String()
		}
		t.Row(c.Datapath, countText(c.Objects), countText(c.Rules), countText(c.Elements), fmt.Sprintf("%d of %d", c.Slots, c.SlotsTotal), took)
	}
	if isUnchanged(out) {
		fmt.Fprintln(w, "nothing changes")
	} else if err := t.Write(w); err != nil {
		return err
	}
	for _, c := range out.Changes {
		for _, line := range c.Lines {
			table.Line(w, "%s", line)
		}
		if c.Truncated > 0 {
			table.Line(w, "... and %d more changes on %s", c.Truncated, c.Datapath)
		}
	}
	ended := 0
	for _, c := range out.Changes {
		ended += c.Ended
	}
	switch {
	case out.FlowsTotal > 0:
		table.Line(w, "%d of %d live flows end", out.FlowsMoved, out.FlowsTotal)
	case ended > 0:
		table.Line(w, "%d live flows ended, which would be treated otherwise now", ended)
	}
	for _, warning := range out.Warnings {
		table.Line(w, "warning: %s", warning)
	}
	return writePlaces(w, out.Places, verb)
}

func countText(c datapath.Count) string {
	if c == (datapath.Count{}) {
		return "-"
	}
	return c.String()
}

// writePlaces prints the datapath of each rule, and the reason against a faster one.
func writePlaces(w io.Writer, places []api.Placement, verb string) error {
	if len(places) > 20 {
		count := map[string]int{}
		for _, p := range places {
			count[p.Datapath]++
		}
		for _, name := range slices.Sorted(maps.Keys(count)) {
			table.Line(w, "%s %d services and rules on %s", verb, count[name], name)
		}
		return nil
	}
	for _, p := range places {
		table.Line(w, "%s %s %s on %s", verb, p.Kind, p.Name, p.Datapath)
		for _, name := range slices.Sorted(maps.Keys(p.Why)) {
			table.Line(w, "    not on %s: %s", name, p.Why[name])
		}
	}
	return nil
}
