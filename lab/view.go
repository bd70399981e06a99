// SPDX-License-Identifier: Apache-2.0

package lab

import "time"

// View is the printed form of a lab.
type View struct {
	ID       string    `json:"id"`
	Topology string    `json:"topology"`
	About    string    `json:"about"`
	Created  time.Time `json:"created"`
	// Owner is "user" (until lab down), "process" (until its program ends) or "nobody" (left by a
	// crash; the next lab up removes the lab).
	Owner string     `json:"owner"`
	Nodes []NodeView `json:"nodes"`
}

// NodeView is the printed form of a node.
type NodeView struct {
	Name      string       `json:"name"`
	Namespace string       `json:"namespace"`
	Servers   []ServerSpec `json:"servers"`
	// Absent are the servers that "lab up" did not start, with the reason.
	Absent []string `json:"absent,omitempty"`
	// Interfaces holds the addresses by interface; "lo" only where it has more than its own.
	Interfaces []InterfaceView `json:"interfaces"`
}

// InterfaceView is the printed form of an interface with addresses.
type InterfaceView struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
}

// View returns the printed form of the lab, with Absent empty.
func (l *Lab) View() View {
	r := l.Record()
	v := View{ID: r.ID, Topology: r.Topology.Name, About: r.Topology.About, Created: r.Created, Owner: "nobody"}
	switch {
	case r.Detached:
		v.Owner = "user"
	case r.Live:
		v.Owner = "process"
	}
	for _, n := range l.Nodes() {
		node := NodeView{Name: n.Short(), Namespace: n.Name(), Servers: []ServerSpec{}, Interfaces: []InterfaceView{}}
		node.Servers = append(node.Servers, n.Spec().Servers...)
		for _, link := range r.Topology.Links {
			for _, e := range []End{link.A, link.B} {
				if e.Node == n.Short() && len(e.Addresses) > 0 {
					node.Interfaces = append(node.Interfaces, InterfaceView{e.Iface, e.Addresses})
				}
			}
		}
		if lo := n.Spec().Addresses; len(lo) > 0 {
			node.Interfaces = append(node.Interfaces, InterfaceView{"lo", lo})
		}
		v.Nodes = append(v.Nodes, node)
	}
	return v
}

// NodeNames returns the names of the nodes in the order of the topology.
func (l *Lab) NodeNames() (names []string) {
	for _, n := range l.nodes {
		names = append(names, n.Short())
	}
	return names
}
