// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/docs"
)

func newConfig(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "config",
		GroupID: "gateway",
		Short:   "The form of the configuration file",
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
	}, &cobra.Command{
		Use:               "show FILE",
		Short:             "Print a configuration file with all defaults filled in",
		Example:           "  sluice config show /etc/sluice/sluice.yaml",
		Args:              exactly("file"),
		ValidArgsFunction: completeYAML,
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := a.load(args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.writeJSON(a.stdout, c)
			}
			data, err := config.Marshal(c)
			if err != nil {
				return err
			}
			_, err = a.stdout.Write(data)
			return err
		},
	})
	return cmd
}
