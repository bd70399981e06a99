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
		Use:     "node [NAME] drain|auto",
		GroupID: "gateway",
		Short:   "Withdraw the addresses of this node, or announce them again",
		Long: `Node drain withdraws the addresses of services, port-forwards and one-to-one rules, so
that routers send their packets to the other nodes. This node serves the packets that
still arrive, new connections too; 'sluice drain' refuses these. GET /api/v1/ready
answers 503. Addresses of snat and nat64 rules stay announced, because the
replies of their flows must return to this node.

The drain survives restarts. Node auto ends it.

With NAME, another node of a cluster with a store does so; a node that is not live
does it when it is back.`,
		Example:   "  sluice node drain\n  sluice node auto\n  sluice node n2 drain",
		ValidArgs: nodeStates,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 2 {
				return nil
			}
			return requireArgs("state")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			state := args[len(args)-1]
			if !slices.Contains(nodeStates, state) {
				return usageError(cmd, "state %q: write drain or auto", state)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if len(args) == 2 {
				out, err := c.DrainNode(cmd.Context(), args[0], api.SetNode{State: state})
				if err != nil {
					return err
				}
				return a.print(out, func(w io.Writer) error {
					text := "node %s has the state %s"
					if !out.Done {
						text = "node %s did not answer: it gets the state %s when it is back"
					}
					_, err := table.Line(w, text, out.Node, state)
					return err
				})
			}
			now, err := c.SetNode(cmd.Context(), api.SetNode{State: state})
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
