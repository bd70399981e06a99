// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// Node returns a function that finds the node of this host in a configuration: the one with the given name or, without
// a name, the one with the host name or with an address of this host. It returns "" for a configuration without nodes,
// in which no node can have a given name.
func Node(name string) func(*config.Config) (string, error) {
	return func(c *config.Config) (string, error) {
		switch {
		case name != "" && len(c.Nodes()) == 0:
			return "", fmt.Errorf("--node %s: the configuration has no cluster.nodes: list them, or start without --node", name)
		case name != "":
			return nodeName(c.Nodes(), name)
		case len(c.Nodes()) == 0:
			return "", nil
		}
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("host name: %w", err)
		}
		list, err := net.InterfaceAddrs()
		if err != nil {
			return "", fmt.Errorf("addresses of this host: %w", err)
		}
		var addresses []netip.Addr
		for _, a := range list {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				addresses = append(addresses, p.Addr())
			}
		}
		return nodeOf(c.Nodes(), host, addresses)
	}
}

// nodeName returns the node with a name.
func nodeName(nodes []config.Node, name string) (string, error) {
	if slices.ContainsFunc(nodes, func(n config.Node) bool { return n.Name == name }) {
		return name, nil
	}
	return "", fmt.Errorf("--node %s is none of cluster.nodes: %s", name, listNodes(nodes))
}

// nodeOf returns the node with the name of a host, else the one with one of its addresses. A host with the name of a
// node and the address of another one is refused: as a copy of a machine it would use the ports of the first.
func nodeOf(nodes []config.Node, host string, addresses []netip.Addr) (string, error) {
	short, _, _ := strings.Cut(host, ".")
	byName := slices.IndexFunc(nodes, func(n config.Node) bool { return n.Name == host })
	if byName < 0 {
		byName = slices.IndexFunc(nodes, func(n config.Node) bool { return n.Name == short })
	}
	if byName >= 0 && slices.Contains(addresses, nodes[byName].Address) {
		return nodes[byName].Name, nil
	}
	byAddress := slices.IndexFunc(nodes, func(n config.Node) bool { return slices.Contains(addresses, n.Address) })
	switch {
	case byName >= 0 && byAddress >= 0:
		return "", fmt.Errorf("this host has the name of node %s and the address %s of node %s: correct one of them, or name the node with --node", nodes[byName].Name, nodes[byAddress].Address, nodes[byAddress].Name)
	case byName >= 0:
		return nodes[byName].Name, nil
	case byAddress >= 0:
		return nodes[byAddress].Name, nil
	}
	return "", fmt.Errorf("this host, %s, is none of cluster.nodes (%s) and has none of their addresses: add it at the end of the list, or name its node with --node", host, listNodes(nodes))
}

func listNodes(nodes []config.Node) string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return strings.Join(names, ", ")
}
