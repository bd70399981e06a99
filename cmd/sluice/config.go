// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/docs"
)

func newConfig(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "config",
		GroupID: "gateway",
		Short:   "The configuration: schema, changes at run time, history",
		Long: `The configuration in force is the daemon's file, merged with what was
changed at run time by 'sluice apply', 'sluice backend' or the API. These changes
are kept over restarts. A changed file is merged with them; where both changed the
same value, nothing is applied, and the conflict is named.`,
		Example: "  sluice config show --origin\n  sluice config diff\n  sluice config history\n  sluice config revert 12",
	}
	cmd.AddCommand(&cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of the configuration file",
		Long:    "Schema prints the JSON Schema (draft 2020-12) of the configuration file, by which editors complete and check keys.",
		Example: "  sluice config schema > sluice.schema.json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.stdout.Write(docs.Schema)
			return err
		},
	}, asksRemote(a, newConfigShow(a)), asksRemote(a, newConfigDiff(a)), asksRemote(a, newConfigHistory(a)),
		asksRemote(a, newConfigRevert(a)), asksRemote(a, newConfigSave(a)), asksRemote(a, newConfigConfirm(a)))
	return cmd
}

func newConfigShow(a *app) *cobra.Command {
	var origin bool
	cmd := &cobra.Command{
		Use:   "show [FILE]",
		Short: "Print a configuration with all defaults filled in",
		Long: `Show prints a file with all defaults filled in, or without FILE what the running
daemon has in force. With --origin it lists what was changed at run time instead,
with who changed it and when; everything else comes from the daemon's file.`,
		Example:           "  sluice config show /etc/sluice/sluice.yaml\n  sluice config show --origin",
		Args:              atMost(1),
		ValidArgsFunction: completeYAML,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && origin {
				return usageError(cmd, "--origin is about the running daemon: leave the file out")
			}
			if len(args) == 1 {
				c, err := a.load(args[0])
				if err != nil {
					return err
				}
				return a.printConfig(c)
			}
			if origin {
				changes, err := a.changes(cmd)
				if err != nil {
					return err
				}
				rows := changes.Origins()
				return a.print(map[string]any{"file": changes.File, "changed": rows}, func(w io.Writer) error { return writeOrigins(w, changes.File, rows) })
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			text, err := c.Config(cmd.Context())
			if err != nil {
				return err
			}
			inForce, err := config.Decode("the daemon's configuration", text)
			if err != nil {
				return err
			}
			return a.printConfig(inForce)
		},
	}
	cmd.Flags().BoolVar(&origin, "origin", false, "list which values were changed at run time, by whom and when, and the backends that were discovered")
	return cmd
}

func (a *app) printConfig(c *config.Config) error {
	if a.json {
		return a.writeJSON(a.stdout, c)
	}
	data, err := config.Marshal(c)
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(data)
	return err
}
