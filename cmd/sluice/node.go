// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/table"
)

// nodeStates are the states that 'sluice node' sets.
var nodeStates = []string{"drain", "auto"}

func newNode(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "node drain|auto",
		GroupID: "gateway",
		Short:   "Withdraw the addresses of this node, or announce them again",
		Long: `Node drain withdraws the addresses of services, port-forwards and one-to-one rules, so
that routers send their packets to the other nodes. This node serves the packets that
still arrive, new connections too; 'sluice drain' refuses these. GET /api/v1/ready
answers 503. Addresses of snat and nat64 rules stay announced, because the
replies of their flows must return to this node.

The drain survives restarts. Node auto ends it.`,
		Example:   "  sluice node drain\n  sluice node auto",
		ValidArgs: nodeStates,
		Args:      requireArgs("state"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(nodeStates, args[0]) {
				return usageError(cmd, "state %q: write drain or auto", args[0])
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			now, err := c.SetNode(cmd.Context(), api.SetNode{State: args[0]})
			if err != nil {
				return err
			}
			return a.print(now, func(w io.Writer) error {
				_, err := table.Line(w, "%s", nodeText(now))
				return err
			})
		},
	}
}

// nodeText describes the state of a node after a change.
func nodeText(n *api.NodeState) string {
	name := "the node"
	if n.Node != "" {
		name = "node " + n.Node
	}
	all := n.Announced + n.Withdrawn
	if n.State != "drain" {
		return fmt.Sprintf("%s does not drain: %d of %d addresses and prefixes are announced", name, n.Announced, all)
	}
	text := fmt.Sprintf("%s drains: %d of %d addresses and prefixes are withdrawn", name, n.Withdrawn, all)
	if n.Announced > 0 {
		text += "; the others stay announced, because the replies of their flows return to this node"
	}
	return text
}
