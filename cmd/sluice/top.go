// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/colorprofile"
	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
	"github.com/sluice-lb/sluice/top"
)

func newTop(a *app) *cobra.Command {
	var (
		once  bool
		netns []string
		rows  int
	)
	cmd := &cobra.Command{
		Use:     "top",
		GroupID: "diagnosis",
		Short:   "Watch the connection table, ports, drops and CPU in the terminal",
		Long: `Shows how full the connection table is and when it overflows, new connections,
drops, the busiest CPU and the scarcest resource, above pages of sources, destinations,
services and backends, SNAT ports, states, drops by cause, CPU phases and network
namespaces. Enter opens a row, '?' shows the keys.

It only reads, and costs at most about 5 % of one core: a table of a million
connections is read about once a minute from six cores on, every three minutes with two.
NO_COLOR is honoured.`,
		Example: `  sluice top
  sluice top --netns blue
  sluice top --once
  sluice top --once --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rows < 0 {
				return usageError(cmd, "--rows %d: must not be negative", rows)
			}
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			only, err := netdev.NamespacesAt(netns)
			if err != nil {
				return err
			}
			h := &top.Host{Only: only}
			if only == nil {
				h.Sources = a.flowSources()
			}
			return a.runTop(cmd, h, once, rows)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&once, "once", false, "print once and stop; with --json everything that the pages show")
	flags.StringSliceVar(&netns, "netns", nil, "network namespaces: names, paths, 'host' or 'all' (default all)")
	flags.IntVar(&rows, "rows", 20, "rows of each ranking with --once --json")
	offerFrom(cmd, "netns", namespaces)
	return cmd
}

func (a *app) runTop(cmd *cobra.Command, h *top.Host, once bool, rows int) error {
	out, terminal := table.File(a.stdout)
	terminal = terminal && term.IsTerminal(int(out.Fd()))
	switch {
	case a.json:
		p, err := top.Once(cmd.Context(), h, rows)
		if err != nil {
			return err
		}
		return a.writeJSON(a.stdout, p)
	case once:
		width, height := 80, 24
		if terminal {
			// A serial console reports a size of zero.
			if w, h, err := term.GetSize(int(out.Fd())); err == nil && w > 0 && h > 1 {
				width, height = w, h-1
			}
		}
		text, err := top.Screen(cmd.Context(), h, width, height)
		if err != nil {
			return err
		}
		if !a.usesColour(a.stdout) {
			text = ansi.Strip(text)
		}
		_, err = fmt.Fprintln(a.terminal, text)
		return err
	case !terminal:
		return usageError(cmd, "standard output is not a terminal: use --once")
	}
	return top.Run(cmd.Context(), h, a.stdin, a.terminal, a.topOptions()...)
}

// topOptions disables colours if requested.
func (a *app) topOptions() []tea.ProgramOption {
	if a.usesColour(a.stdout) {
		return nil
	}
	return []tea.ProgramOption{tea.WithColorProfile(colorprofile.ASCII)}
}
