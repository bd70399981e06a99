// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
)

func newLabServe(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "serve LAB NODE",
		Short: "Run the servers of a node until Ctrl-C",
		Long: "Serve runs the servers that the topology has for a node, in the foreground. \"lab up\" has\n" +
			"started them; serve starts them again after \"lab kill\".",
		Example:           "  sluice lab kill balancer s1\n  sluice lab serve balancer s1 &",
		ValidArgsFunction: completeNode,
		RunE: func(cmd *cobra.Command, args []string) error {
			l, n, err := nodeOf(cmd, args)
			if err != nil {
				return err
			}
			if len(n.Spec().Servers) == 0 {
				return fmt.Errorf("node %s: has no servers in topology %s", n.Short(), l.Topology().Name)
			}
			if !n.Contains(os.Getpid()) {
				// Start this program again as a process of the node, so that "lab kill" and "lab down" end it.
				self, err := os.Executable()
				if err != nil {
					return err
				}
				child := n.Command(cmd.Context(), self, "lab", "serve", l.ID(), n.Short())
				return fmt.Errorf("node %s: %w", n.Short(), syscall.Exec(child.Path, child.Args, os.Environ()))
			}
			servers, err := host.Serve(cmd.Context(), l, n)
			if err != nil {
				return err
			}
			fmt.Fprintln(a.stdout, host.ServesLine(n.Short(), servers.Running, servers.Absent))
			<-cmd.Context().Done()
			return servers.Stop()
		},
	}
}

func newLabKill(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "kill LAB NODE",
		Short: "End what runs in a node",
		Long: "Kill ends every process in a node's namespace: its servers, or a gateway's daemon. The network\n" +
			"stays.",
		Example:           "  sluice lab kill balancer s1",
		ValidArgsFunction: completeNode,
		RunE: func(cmd *cobra.Command, args []string) error {
			l, n, err := nodeOf(cmd, args)
			if err != nil {
				return err
			}
			if err := n.End(); err != nil {
				return err
			}
			v := map[string]string{"lab": l.ID(), "node": n.Short()}
			return a.print(v, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "nothing runs in %s of lab %s any more\n", n.Short(), l.ID())
				return err
			})
		},
	}
}

// nodeOf finds the lab and node named by the arguments.
func nodeOf(cmd *cobra.Command, args []string) (*lab.Lab, *lab.Node, error) {
	if len(args) != 2 {
		return nil, nil, usageError(cmd, "say which lab and which node")
	}
	if os.Geteuid() != 0 {
		return nil, nil, daemon.ErrNoRoot
	}
	return lab.NamedNode(args[0], args[1])
}
