// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/table"
)

func newLab(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "lab",
		Short:   "Build a network of namespaces for experiments",
		GroupID: "measure",
		Long: "Lab builds a small network out of network namespaces: clients, gateways and servers, which\n" +
			"answer HTTP, DNS and echo. It leaves the rest of the machine alone and is removed without a\n" +
			"trace.",
		Example: "  sluice lab up balancer\n" +
			"  sluice lab exec balancer gateway -- sluice run -c examples/lb-dnat.yaml &\n" +
			"  sluice lab exec balancer client -- curl http://192.0.2.10/\n" +
			"  sluice lab down balancer",
	}
	cmd.AddCommand(withCleanup(a, newLabUp(a)), newLabDown(a), newLabList(a), newLabExec(a), withCleanup(a, newLabServe(a)), newLabKill(a), withCleanup(a, newCaseStudy(a)))
	return cmd
}

func newLabUp(a *app) *cobra.Command {
	var names []string
	var bare bool
	long := "Up builds a network, starts its servers, and leaves it up until \"sluice lab down\". A server\n" +
		"answers with the name of its node and the client's address as it sees it. In the office, the\n" +
		"gateway also runs dnsmasq, OpenVPN and \"sluice run\" with examples/office.yaml; the node outside\n" +
		"is a client of the VPN, and the laptop gets its address by DHCP. The output names the programs\n" +
		"that are not installed. The topologies:\n\n"
	for _, t := range lab.All() {
		names = append(names, t.Name)
		long += fmt.Sprintf("  %-12s  %s\n", t.Name, t.About)
	}
	cmd := &cobra.Command{
		Use:               "up TOPOLOGY",
		Short:             "Build a network",
		Long:              long,
		Example:           "  sluice lab up balancer\n  sluice lab up office --json",
		ValidArgs:         names,
		ValidArgsFunction: cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError(cmd, "say which topology: %s", strings.Join(names, ", "))
			}
			topology, ok := lab.TopologyByName(args[0])
			if !ok {
				return usageError(cmd, "topology %q: not one of %s", args[0], strings.Join(names, ", "))
			}
			l, err := lab.Up(cmd.Context(), topology)
			if err != nil {
				return err
			}
			var absent map[string][]string
			if !bare {
				absent, err = host.Start(cmd.Context(), l)
			}
			if err == nil {
				err = l.Detach()
			}
			if err != nil {
				return errors.Join(err, l.Down())
			}
			v := l.View()
			for i := range v.Nodes {
				v.Nodes[i].Absent = absent[v.Nodes[i].Name]
			}
			return a.print(v, func(w io.Writer) error { return printLabUp(w, v, bare) })
		},
	}
	cmd.Flags().BoolVar(&bare, "no-servers", false, "start no servers")
	return cmd
}

func printLabUp(w io.Writer, v lab.View, bare bool) error {
	fmt.Fprintf(w, "lab %s is up: %s\n\n", v.ID, v.About)
	t := table.New("NODE", "INTERFACE", "ADDRESSES")
	for _, n := range v.Nodes {
		name := n.Name
		switch {
		case len(n.Interfaces) > 0:
		case slices.Contains(n.Servers, lab.ServerSpec{Kind: "dhcp-client"}):
			t.Row(name, "eth0", "(by DHCP)")
		default:
			t.Row(name, "", "(a switch)")
		}
		for _, i := range n.Interfaces {
			t.Row(name, i.Name, strings.Join(i.Addresses, " "))
			name = ""
		}
	}
	if err := t.Write(w); err != nil {
		return err
	}
	if !bare {
		fmt.Fprintln(w)
		for _, n := range v.Nodes {
			if len(n.Servers) > 0 {
				running := slices.DeleteFunc(slices.Clone(n.Servers), func(s lab.ServerSpec) bool {
					return slices.ContainsFunc(n.Absent, func(why string) bool { return strings.HasPrefix(why, s.String()+": ") })
				})
				fmt.Fprintln(w, host.ServesLine(n.Name, running, n.Absent))
			}
		}
	}
	_, err := fmt.Fprintf(w, "\nA shell in a node:  sluice lab exec %s %s -- bash\nRemove it:          sluice lab down %s\n",
		v.ID, v.Nodes[0].Name, v.ID)
	return err
}

func newLabDown(a *app) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "down [LAB | --all]",
		Short: "Remove a network and end what runs in it",
		Long: "Down ends the processes inside the lab's namespaces and removes the lab. LAB is an id, or the\n" +
			"name of a topology that is up once. Without it, your only lab is meant; with --all,\n" +
			"every lab except those that another running program uses.",
		Example:           "  sluice lab down 3fa9c1\n  sluice lab down --all",
		ValidArgsFunction: completeLabs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 || all && len(args) > 0 {
				return usageError(cmd, "name one lab, or --all")
			}
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			var chosen []*lab.Lab
			var err error
			if len(args) == 1 {
				chosen = make([]*lab.Lab, 1)
				chosen[0], err = lab.Named(args[0])
			} else {
				chosen, err = lab.Removable(all)
			}
			if err != nil {
				return err
			}
			return a.removeLabs(chosen)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove every lab that no running program uses")
	return cmd
}

// removeLabs removes all labs and reports failures.
func (a *app) removeLabs(labs []*lab.Lab) error {
	ids := []string{}
	text := ""
	var errs []error
	for _, l := range labs {
		if err := l.Down(); err != nil {
			errs = append(errs, err)
			continue
		}
		ids = append(ids, l.ID())
		text += fmt.Sprintf("lab %s (%s) is removed\n", l.ID(), l.Topology().Name)
	}
	if len(labs) == 0 {
		text = "no lab to remove\n"
	}
	errs = append(errs, a.print(map[string][]string{"removed": ids}, func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}))
	return errors.Join(errs...)
}

func newLabList(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the networks that are up",
		Long: "List shows every lab on this machine. Its owner is \"user\" (stays until lab down), \"process\" (ends\n" +
			"with the program that made it) or \"nobody\" (left by a crash; the next lab up removes it).",
		Example: "  sluice lab list --json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			records, err := lab.List()
			if err != nil {
				return err
			}
			views := []lab.View{}
			for _, r := range records {
				l, err := lab.Find(r.ID)
				if err != nil {
					continue // removed meanwhile
				}
				views = append(views, l.View())
			}
			return a.print(views, func(w io.Writer) error {
				if len(views) == 0 {
					_, err := fmt.Fprintln(w, "no lab is up; \"sluice lab up balancer\" builds one")
					return err
				}
				t := table.New("ID", "TOPOLOGY", ">AGE", "OWNER", "NODES")
				for _, v := range views {
					var names []string
					for _, n := range v.Nodes {
						names = append(names, n.Name)
					}
					age := time.Since(v.Created).Round(time.Second)
					t.Row(v.ID, v.Topology, age, v.Owner, strings.Join(names, " "))
				}
				return t.Write(w)
			})
		},
	}
}

func newLabExec(_ *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec LAB NODE -- COMMAND [ARGUMENT...]",
		Short: "Run a command inside a node",
		Long: "Exec becomes the command, inside the node's network namespace, with the /sys that belongs to it.\n" +
			"On a gateway, /sys/fs/bpf is that gateway's own and lasts as long as the lab. The command\n" +
			"sluice is this program, where $PATH has no other.",
		Example:           "  sluice lab exec balancer client -- dig @192.0.2.20 example.org\n  sluice lab exec 3fa9c1 gateway -- bash",
		ValidArgsFunction: completeNode,
		RunE: func(cmd *cobra.Command, args []string) error {
			// Flags end at the first argument; the "--" that marks it is optional.
			if len(args) > 2 && args[2] == "--" {
				args = append(args[:2:2], args[3:]...)
			}
			if len(args) < 3 {
				return usageError(cmd, "say which lab, which node, and what to run")
			}
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			_, n, err := lab.NamedNode(args[0], args[1])
			if err != nil {
				return err
			}
			program := args[2]
			if program == "sluice" {
				if _, err := exec.LookPath(program); err != nil {
					if program, err = os.Executable(); err != nil {
						return err
					}
				}
			}
			child := n.Command(cmd.Context(), program, args[3:]...)
			if child.Err != nil {
				return child.Err
			}
			// Become the command rather than its parent: terminal, signals and exit code are its own.
			return fmt.Errorf("node %s: %w", n.Short(), unix.Exec(child.Path, child.Args, os.Environ()))
		},
	}
	cmd.Flags().SetInterspersed(false)
	return cmd
}
