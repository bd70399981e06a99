// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/table"
)

func newConfigDiff(a *app) *cobra.Command {
	return addFileFlag(&cobra.Command{
		Use:   "diff",
		Short: "Show what was changed at run time, against the daemon's file",
		Long: `Diff lists each value that was changed at run time: + added, - removed, ~ replaced.
A path consists of keys and of the names of services, backends, rules and sets. 'sluice
diff FILE' shows what another file would change.`,
		Example: "  sluice config diff\n  sluice config diff --json | jq .edits",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			changes, err := a.changes(cmd)
			if err != nil {
				return err
			}
			return a.print(changes, func(w io.Writer) error {
				edits := changes.AllEdits()
				if len(edits) == 0 {
					table.Line(w, "nothing: what is in force is %s", changes.File)
				}
				return writeEdits(w, "", edits)
			})
		},
	})
}

// changes returns the run-time changes from the daemon or, without one, from disk.
func (a *app) changes(cmd *cobra.Command) (*api.ConfigChanges, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	changes, err := c.Changes(cmd.Context())
	if file, there := fileFlag(cmd); there && a.mayReadDisk(err) {
		return a.paths.StoredChanges(file)
	}
	return changes, err
}

// addFileFlag adds the flag of commands that work without a daemon.
func addFileFlag(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringP("config", "c", "", "without a daemon: its file, if several files have changes")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

func fileFlag(cmd *cobra.Command) (file string, there bool) {
	flag := cmd.Flags().Lookup("config")
	if flag == nil {
		return "", false
	}
	return flag.Value.String(), true
}

func newConfigHistory(a *app) *cobra.Command {
	var edits bool
	cmd := &cobra.Command{
		Use:     "history",
		Short:   "List the last 20 changes: who, when and what",
		Long:    "History lists the last 20 revisions, the newest first. With --edits it shows the values, too.",
		Example: "  sluice config history\n  sluice config history --edits",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			changes, err := a.changes(cmd)
			if err != nil {
				return err
			}
			slices.Reverse(changes.History)
			return a.print(changes.History, func(w io.Writer) error { return writeHistory(w, changes.History, edits) })
		},
	}
	cmd.Flags().BoolVar(&edits, "edits", false, "show the values that each revision changed")
	return addFileFlag(cmd)
}

func writeHistory(w io.Writer, history []api.ConfigRevision, edits bool) error {
	if len(history) == 0 {
		_, err := fmt.Fprintln(w, "nothing was changed yet")
		return err
	}
	if edits {
		for _, r := range history {
			table.Line(w, "revision %d, %s, %s: %s", r.Revision, r.At.Local().Format(time.DateTime), r.Who, r.What)
			if err := writeEdits(w, "  ", r.Edits); err != nil {
				return err
			}
		}
		return nil
	}
	t := table.New(">REVISION", "WHEN", ">VALUES", "WHAT", "WHO")
	for _, r := range history {
		t.Row(r.Revision, r.At.Local().Format(time.DateTime), len(r.Edits), r.What, r.Who)
	}
	return t.Write(w)
}

func writeEdits(w io.Writer, indent string, edits []config.Edit) error {
	for _, e := range edits {
		if _, err := table.Line(w, "%s%s", indent, e); err != nil {
			return err
		}
	}
	return nil
}

func newConfigRevert(a *app) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "revert REVISION | --all",
		Short: "Go back to an earlier revision, or to the daemon's file",
		Long: `Revert applies the configuration that was in force after a revision of 'sluice config history'.
With --all it drops everything that was changed at run time. Either is a new revision,
which can be reverted too. Without a daemon it changes what the next one starts with.`,
		Example: "  sluice config revert 12\n  sluice config revert --all",
		RunE: func(cmd *cobra.Command, args []string) error {
			to := api.Revert{All: all}
			switch {
			case all && len(args) == 0:
			case !all && len(args) == 1:
				n, err := strconv.ParseUint(args[0], 10, 64)
				if err != nil || n == 0 {
					return usageError(cmd, "revision %q: write a number of 'sluice config history'", args[0])
				}
				to.Revision = n
			default:
				return usageError(cmd, "name one revision, or --all")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			out, err := c.Revert(cmd.Context(), to)
			if a.mayReadDisk(err) {
				file, _ := fileFlag(cmd)
				if err := a.paths.Revert(file, to); err != nil {
					return err
				}
				return a.print(map[string]bool{"reverted": true}, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, "reverted; no daemon runs: the next one starts with it")
					return err
				})
			}
			if err != nil {
				return err
			}
			return a.print(out, func(w io.Writer) error { return writeOutcome(w, out, "applied") })
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "drop everything that was changed at run time")
	return addFileFlag(cmd)
}

func newConfigConfirm(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "confirm",
		Short:   "Keep the change of 'sluice apply --confirm'",
		Long:    "Confirm keeps a change of 'sluice apply --confirm' that the daemon would undo otherwise. Until then other\nchanges are refused, and a changed file is read afterwards.",
		Example: "  sluice apply new.yaml --confirm 60s && sluice config confirm",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if err := c.Confirm(cmd.Context()); err != nil {
				return err
			}
			return a.print(map[string]bool{"confirmed": true}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "confirmed: the change stays")
				return err
			})
		},
	}
}

func newConfigSave(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "save",
		Short: "Write the configuration in force into the daemon's file",
		Long: `Save replaces the daemon's file by the configuration in force, in full and without
comments. The states of backends ('sluice backend') do not change; they are not part of the file.`,
		Example: "  sluice config save",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if err := c.Save(cmd.Context()); err != nil {
				return err
			}
			changes, err := c.Changes(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(map[string]string{"file": changes.File}, func(w io.Writer) error {
				_, err := table.Line(w, "%s is what is in force", changes.File)
				return err
			})
		},
	}
}

func writeOrigins(w io.Writer, file string, rows []api.Origin) error {
	if len(rows) == 0 {
		_, err := table.Line(w, "everything comes from %s", file)
		return err
	}
	for _, r := range rows {
		from := "older than the history"
		if r.Found != "" {
			table.Line(w, "%s: %s", r.Path, r.Value)
			if _, err := table.Line(w, "    discovered by %s", r.Found); err != nil {
				return err
			}
			continue
		}
		if r.Revision > 0 {
			from = fmt.Sprintf("revision %d, %s, %s", r.Revision, r.At.Local().Format(time.DateTime), r.Who)
		}
		value, inFile := r.Value, r.File
		if value == "" {
			value = "removed"
		}
		if inFile == "" {
			inFile = "nothing"
		}
		table.Line(w, "%s: %s", r.Path, value)
		if _, err := table.Line(w, "    %s; the file has %s", from, inFile); err != nil {
			return err
		}
	}
	_, err := table.Line(w, "everything else comes from %s", file)
	return err
}
