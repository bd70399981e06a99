// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/netdev"
)

var (
	protocolWords = []string{"tcp", "udp", "sctp", "icmp", "icmpv6", "esp", "gre", "ah", "ipip", "ipv6", "l2tp", "udplite"}
	// stateWords are conntrack states that a filter accepts.
	stateWords = []string{"SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE",
		"UNREPLIED", "REPLIED", "ASSURED"}
)

// completeFlag registers words as completions of a flag.
func completeFlag(cmd *cobra.Command, flag string, words ...string) {
	offerFrom(cmd, flag, func(context.Context) []string { return words })
}

// offerFrom registers the result of words as completions of a flag.
func offerFrom(cmd *cobra.Command, flag string, words func(context.Context) []string) {
	err := cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return words(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
	})
	if err != nil {
		panic(err) // no such flag
	}
}

// namespaces lists the network namespaces that have a name.
func namespaces(context.Context) []string {
	names := []string{"all"}
	list, _ := netdev.Namespaces() // no completions after an error
	for _, n := range list {
		if !strings.Contains(n.Name, " ") {
			names = append(names, n.Name)
		}
	}
	return names
}

// interfaces lists the interfaces of this network namespace.
func interfaces(context.Context) []string {
	list, _ := net.Interfaces() // no completions after an error
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].Name
	}
	return names
}

// owners lists the services and NAT rules of the running daemon; without one there are none.
func (a *app) owners(ctx context.Context) []string {
	c, err := a.client()
	if err != nil {
		return nil
	}
	services, _ := c.Services(ctx)
	rules, _ := c.NAT(ctx)
	var names []string
	for _, s := range services {
		names = append(names, s.Name)
	}
	for _, r := range rules {
		names = append(names, r.Name)
	}
	return names
}

// backends lists the backends of the running daemon; without one there are none.
func (a *app) backends(ctx context.Context) []string {
	c, err := a.client()
	if err != nil {
		return nil
	}
	list, _ := c.Backends(ctx)
	var names []string
	for _, b := range list {
		if !slices.Contains(names, b.Name) {
			names = append(names, b.Name)
		}
	}
	return names
}

// completeBackend completes the services of the running daemon, then the backends of the named
// service, then the states.
func (a *app) completeBackend(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	switch len(args) {
	case 0, 1:
	case 2:
		return []string{"up", "drain", "down", "auto"}, none
	default:
		return nil, none
	}
	c, err := a.client()
	if err != nil {
		return nil, none
	}
	backends, _ := c.Backends(cmd.Context()) // no completions without a daemon
	var names []string
	for _, b := range backends {
		switch {
		case len(args) == 0 && !slices.Contains(names, b.Service):
			names = append(names, b.Service)
		case len(args) == 1 && b.Service == args[0]:
			names = append(names, b.Name)
		}
	}
	return names, none
}

// completeYAML completes the single file argument of a command.
func completeYAML(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

// completeLabs completes the ids of running labs.
func completeLabs(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	records, _ := lab.List() // no completions after an error
	var ids []string
	for _, r := range records {
		ids = append(ids, r.ID+"\t"+r.Topology.Name)
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}

// completeNode completes labs, then the nodes of the named lab, then files.
func completeNode(cmd *cobra.Command, args []string, start string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return completeLabs(cmd, args, start)
	case 1:
		var names []string
		if l, err := lab.Named(args[0]); err == nil {
			names = l.NodeNames()
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveDefault
}

// listInterfaces lists the interfaces of the labs' nodes in the form of load's arguments, then the
// interfaces of this network namespace.
func listInterfaces(ctx context.Context) []string {
	records, _ := lab.List() // no completions after an error
	var names []string
	for _, r := range records {
		prefix := ""
		if len(records) > 1 {
			prefix = r.ID + "/"
		}
		for _, link := range r.Topology.Links {
			for _, e := range []lab.End{link.A, link.B} {
				names = append(names, prefix+e.Node+"/"+e.Iface)
			}
		}
	}
	return append(names, interfaces(ctx)...)
}
