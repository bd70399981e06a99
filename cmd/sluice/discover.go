// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/published"
	"github.com/sluice-lb/sluice/table"
)

// defaultEngine is the socket of the Docker engine.
const defaultEngine = "/var/run/docker.sock"

// newDiscover returns the command 'sluice discover'.
func newDiscover(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "discover",
		Short:   "Find servers that other programs publish on this host",
		GroupID: "diagnosis",
		Long: "Discover lists what other programs publish on this host, so that Sluice can be put in front of it. It needs no\n" +
			"daemon and changes nothing.",
		Example: "  sluice discover docker --check",
	}
	cmd.AddCommand(newDiscoverDocker(a))
	return cmd
}

func newDiscoverDocker(a *app) *cobra.Command {
	var check bool
	var engine string
	cmd := &cobra.Command{
		Use:   "docker",
		Short: "List Docker's published ports, their paths and their cost",
		Long: "Docker lists the ports that running containers publish, and the path of packets to each:\n\n" +
			"  iptables-nft     a DNAT rule in nf_tables\n" +
			"  iptables-legacy  a DNAT rule of iptables-legacy\n" +
			"  userland proxy   docker-proxy, which copies the data between two connections\n" +
			"  none             no rule and no proxy: the port is not reachable\n\n" +
			"With --check it opens and closes up to 200 TCP connections to each port and as many to the\n" +
			"container, in turn and for at most 3 seconds a port. COST is what the path adds to a connection,\n" +
			"as the difference of the medians, from this host: connections of other hosts also cross the\n" +
			"network. Needs root, in the network namespace of the engine.",
		Example: "  sluice discover docker --check\n  sluice discover docker --json --engine /run/user/1000/docker.sock",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ports, err := published.List(cmd.Context(), engine)
			if err != nil {
				return err
			}
			if check {
				if err := published.Measure(cmd.Context(), ports); err != nil {
					return err
				}
			}
			return a.print(ports, func(w io.Writer) error { return printPublished(w, ports, check) })
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "measure what each path costs")
	cmd.Flags().StringVar(&engine, "engine", defaultEngine, "socket of the Docker engine")
	return cmd
}

func printPublished(w io.Writer, ports []published.Port, check bool) error {
	if len(ports) == 0 {
		_, err := fmt.Fprintln(w, "no running container publishes a port")
		return err
	}
	headings := []string{"CONTAINER", "PUBLISHED", "TO", "PATH"}
	if check {
		headings = append(headings, ">COST")
	}
	t := table.New(headings...)
	for _, p := range ports {
		to := "-"
		if p.To.IsValid() {
			to = p.To.String()
		}
		row := []any{table.Middle(p.Container, 16, "..."), p.String(), to, p.Path}
		if check {
			row = append(row, costOf(p))
		}
		t.Row(row...)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	said := map[string]bool{}
	for _, p := range ports {
		note := ""
		switch {
		case p.NotMeasured != "":
			note = fmt.Sprintf("%s: not measured: %s", p, p.NotMeasured)
		case p.Cost != nil && p.Cost.OnlyOpened:
			note = fmt.Sprintf("%s: the server does not close in return, so only the opening is measured", p)
		}
		if note != "" && !said[note] {
			said[note] = true
			fmt.Fprintln(w, wrap(note, 78, "\n  "))
		}
	}
	return nil
}

// costOf returns the cost of a port as in "+41 µs".
func costOf(p published.Port) string {
	if p.Cost == nil {
		return "-"
	}
	return fmt.Sprintf("%+d µs", p.Cost.Added.Round(time.Microsecond).Microseconds())
}
