// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"strings"
)

// Removable returns the detached labs. With all it also returns the orphaned labs; without all, exactly one lab must be
// detached.
func Removable(all bool) ([]*Lab, error) {
	records, err := List()
	if err != nil {
		return nil, err
	}
	var labs []*Lab
	for _, r := range records {
		if !r.Detached && (r.Live || !all) {
			continue
		}
		l, err := Find(r.ID)
		if err != nil {
			return nil, err
		}
		labs = append(labs, l)
	}
	if !all && len(labs) != 1 {
		return nil, fmt.Errorf("%d labs of yours are up: name one, or --all; \"sluice lab list\" shows them", len(labs))
	}
	return labs, nil
}

// Named finds a lab by id, or by the name of a topology with only one running lab.
func Named(name string) (*Lab, error) {
	records, err := List()
	if err != nil {
		return nil, err
	}
	var matches []string
	for _, r := range records {
		if r.ID == name {
			return Find(r.ID)
		}
		if r.Topology.Name == name {
			matches = append(matches, r.ID)
		}
	}
	switch len(matches) {
	case 0:
		return nil, fmt.Errorf("lab %q: no such lab is up; \"sluice lab list\" shows what is", name)
	case 1:
		return Find(matches[0])
	}
	return nil, fmt.Errorf("lab %q: up more than once, say which: %s", name, strings.Join(matches, ", "))
}

// NamedNode finds a node of a lab. The lab is named as in [Named].
func NamedNode(labName, node string) (*Lab, *Node, error) {
	l, err := Named(labName)
	if err != nil {
		return nil, nil, err
	}
	n, ok := l.Lookup(node)
	if !ok {
		return nil, nil, fmt.Errorf("lab %s: no node %q; its nodes are %s", l.ID(), node, strings.Join(l.NodeNames(), ", "))
	}
	return l, n, nil
}

// FindNode returns a node by name. id is the id or the topology of its lab; "" selects the only lab with such a node.
func FindNode(id, name string) (*Lab, *Node, error) {
	records, err := List()
	if err != nil {
		return nil, nil, err
	}
	var labs []*Lab
	var nodes []*Node
	for _, r := range records {
		if id != "" && r.ID != id && r.Topology.Name != id {
			continue
		}
		l, err := Find(r.ID)
		if err != nil {
			continue // the lab was removed in the meantime
		}
		if n, ok := l.Lookup(name); ok {
			labs, nodes = append(labs, l), append(nodes, n)
		}
	}
	switch len(nodes) {
	case 0:
		return nil, nil, fmt.Errorf("node %q: no lab that is up has it; \"sluice lab list\" shows the labs", name)
	case 1:
		return labs[0], nodes[0], nil
	}
	return nil, nil, fmt.Errorf("node %q: %d labs have it; write LAB/%s", name, len(nodes), name)
}

// Contains reports whether a process runs in the namespace of a lab's node.
func Contains(pid int) (bool, error) {
	records, err := List()
	if err != nil {
		return false, err
	}
	for _, r := range records {
		l, err := Find(r.ID)
		if err != nil {
			continue // the lab was removed in the meantime
		}
		for _, n := range l.Nodes() {
			if n.Contains(pid) {
				return true, nil
			}
		}
	}
	return false, nil
}
