// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
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
			fmt.Fprintln(a.stdout, servesLine(n.Short(), servers.Running, servers.Absent))
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
	return lookupNode(args[0], args[1])
}

// notStarted separates the absent servers in the line of "lab serve".
const notStarted = "; not started: "

// servesLine reports the servers of a node in one line.
func servesLine(node string, running []lab.ServerSpec, absent []string) string {
	line := node + " serves " + cmp.Or(joinServers(running), "nothing")
	if len(absent) > 0 {
		line += notStarted + strings.Join(absent, ", ")
	}
	return line
}

// startServers starts the servers of every node as processes that outlive this one, and returns when they listen. The
// result contains the servers that were not started, with the reason, by node.
func startServers(ctx context.Context, l *lab.Lab) (absent map[string][]string, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	absent = map[string][]string{}
	for _, n := range l.Nodes() {
		if len(n.Spec().Servers) == 0 {
			continue
		}
		cmd := n.Command(context.WithoutCancel(ctx), self, "lab", "serve", l.ID(), n.Short())
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C at the terminal is not for them
		var stderr strings.Builder
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		cmd.Stdout, cmd.Stderr = write, write
		err = cmd.Start()
		write.Close()
		if err != nil {
			read.Close()
			return nil, err
		}
		line, err := bufio.NewReader(io.TeeReader(read, &stderr)).ReadString('\n')
		read.Close()
		if err != nil || !strings.HasPrefix(line, n.Short()+" serves ") {
			return nil, errors.Join(fmt.Errorf("node %s: its servers did not start: %s", n.Short(), strings.TrimSpace(stderr.String())), cmd.Wait())
		}
		if _, missing, ok := strings.Cut(strings.TrimSpace(line), notStarted); ok {
			absent[n.Short()] = strings.Split(missing, ", ")
		}
	}
	return absent, nil
}

func joinServers(servers []lab.ServerSpec) string {
	var words []string
	for _, s := range servers {
		words = append(words, s.String())
	}
	return strings.Join(words, ", ")
}
