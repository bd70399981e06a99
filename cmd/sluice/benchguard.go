// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/bench"
	"github.com/sluice-lb/sluice/load"
)

func newBenchGuard(a *app) *cobra.Command {
	var path string
	var quick, write bool
	var least float64
	cmd := &cobra.Command{
		Use:   "guard",
		Short: "Compare the shares of the limit row with committed ones",
		Long: "guard measures the eBPF rows of the suites packets, flows, fnat64, ports and drop with three repetitions, and\n" +
			"divides each by the limit row of the same run. It exits 1 when a row is below the least part of its committed\n" +
			"share in three tries, or fails. With --quick it measures fewer rows, for shared machines; in at most four minutes.",
		Example: "  sluice bench guard\n  sluice bench guard --quick\n  sluice bench guard --write",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if least == 0 {
				least = bench.GuardShare
				if quick {
					least = bench.GuardShareQuick
				}
			}
			if !(least > 0 && least <= 1) {
				return usageError(cmd, "--least %g: more than 0, and 1 at most", least)
			}
			cpus, err := load.CPUs()
			if err != nil {
				return fmt.Errorf("bench: %w", err)
			}
			o := bench.GuardOptions{Quick: quick, CPU: cpus[len(cpus)-1], Least: least, Progress: func(s string) { a.progress("%s", s) }}
			if !write {
				if o.Committed, err = bench.LoadShares(path); err != nil {
					return fmt.Errorf("bench: guard: %w", err)
				}
			}
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench: network namespaces need root: run it with sudo")
			}
			g, err := bench.Guard(cmd.Context(), o)
			if err != nil {
				return fmt.Errorf("bench: guard: %w", err)
			}
			if write && len(g.Failed) == 0 {
				if err := g.Measured.Save(path); err != nil {
					return fmt.Errorf("bench: guard: %w", err)
				}
				a.progress("%d shares are written to %s", len(g.Measured), path)
			}
			if err := a.print(g, func(w io.Writer) error { return g.WriteTable(w) }); err != nil {
				return err
			}
			if !g.OK() {
				return exitError{code: exitFailure}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&path, "shares", filepath.Join("bench", "shares.json"), "file of the committed shares")
	cmd.Flags().BoolVar(&quick, "quick", false, "measure fewer rows, and allow for other programs on the machine")
	cmd.Flags().BoolVar(&write, "write", false, "write the measured shares to the file instead")
	cmd.Flags().Float64Var(&least, "least", 0, "part of its committed share that a row must reach; 0: 0.85, with --quick 0.5")
	return cmd
}
