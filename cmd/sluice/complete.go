// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/lab"
)

var (
	protocolWords = []string{"tcp", "udp", "sctp", "icmp", "icmpv6", "esp", "gre", "ah", "ipip", "ipv6", "l2tp", "udplite"}
	// stateWords are states of the kernel's connection table that a filter may name.
	stateWords = []string{"SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE",
		"UNREPLIED", "REPLIED", "ASSURED"}
)

// offer has the shell offer words as values of a flag.
func offer(cmd *cobra.Command, flag string, words ...string) {
	offerFrom(cmd, flag, func(context.Context) []string { return words })
}

// offerFrom has the shell offer what words returns as values of a flag.
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
	list, _ := conntrack.Namespaces() // what cannot be read is not offered
	for _, n := range list {
		if !strings.Contains(n.Name, " ") {
			names = append(names, n.Name)
		}
	}
	return names
}

// interfaces lists those of this network namespace.
func interfaces(context.Context) []string {
	list, _ := net.Interfaces() // what cannot be read is not offered
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

// completeBackend offers the services of the running daemon, the backends of the one that
// is named, then the states.
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
	backends, _ := c.Backends(cmd.Context()) // without a daemon nothing is offered
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

// completeYAML offers the one file of a command.
func completeYAML(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

// completeLabs offers the ids of the labs that are up.
func completeLabs(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	records, _ := lab.List() // what cannot be read is not offered
	var ids []string
	for _, r := range records {
		ids = append(ids, r.ID+"\t"+r.Topology.Name)
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}

// completeNode offers labs, then the nodes of the one that is named, then files.
func completeNode(cmd *cobra.Command, args []string, start string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return completeLabs(cmd, args, start)
	case 1:
		var names []string
		if l, err := findLab(args[0]); err == nil {
			names = viewLab(l).nodeNames()
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveDefault
}

// places lists the interfaces of the labs' nodes, as load takes them, then those of this
// network namespace.
func places(ctx context.Context) []string {
	records, _ := lab.List() // what cannot be read is not offered
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
