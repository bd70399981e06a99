// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// mostMaps bounds how many nftables maps and sets are read: each is a request of its
// own, and a checkup of a host takes seconds in all.
const mostMaps = 1024

// mapReader reads the elements of nftables maps and sets, each once.
type mapReader struct {
	conn *nftables.Conn
	read map[string][]nftables.SetElement
}

// elements returns those of a map; false where it was not read.
func (m *mapReader) elements(table *nftables.Table, name string) ([]nftables.SetElement, bool) {
	key := chainKey(table, name)
	if list, known := m.read[key]; known || len(m.read) >= mostMaps {
		return list, known && list != nil
	}
	list, err := m.conn.GetSetElements(&nftables.Set{Table: table, Name: name})
	switch {
	case err != nil:
		list = nil
	case list == nil:
		list = []nftables.SetElement{}
	}
	if m.read == nil {
		m.read = map[string][]nftables.SetElement{}
	}
	m.read[key] = list
	return list, list != nil
}

// verdictChain is the chain that the verdict of an element sends packets to; "": none.
func verdictChain(e nftables.SetElement) string {
	attributes, err := mdnetlink.NewAttributeDecoder(e.Val) // the library leaves it as it came
	if err != nil {
		return ""
	}
	attributes.ByteOrder = binary.BigEndian
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_VERDICT_CHAIN {
			return attributes.String()
		}
	}
	return ""
}

// ways are the chains that the rules of each chain send packets to.
type ways struct {
	rules  map[string][]*nftables.Rule
	to     map[*nftables.Rule][]string
	known  map[string]int // longest
	unread int            // verdict maps that are not followed
}

func newWays(rules map[string][]*nftables.Rule, reader *mapReader) *ways {
	w := &ways{rules: rules, to: map[*nftables.Rule][]string{}, known: map[string]int{}}
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		for _, rule := range rules[key] {
			w.add(rule, reader)
		}
	}
	return w
}

// add notes where a rule jumps to, by its own verdict or by one of a map.
func (w *ways) add(rule *nftables.Rule, reader *mapReader) {
	noted := map[string]bool{"": true}
	note := func(chain string) {
		if !noted[chain] {
			noted[chain] = true
			w.to[rule] = append(w.to[rule], chainKey(rule.Table, chain))
		}
	}
	for _, e := range rule.Exprs {
		switch e := e.(type) {
		case *expr.Verdict:
			note(e.Chain)
		case *expr.Lookup:
			if !e.IsDestRegSet || e.DestRegister != unix.NFT_REG_VERDICT {
				continue
			}
			elements, read := reader.elements(rule.Table, e.SetName)
			if !read {
				w.unread++
			}
			for _, element := range elements {
				note(verdictChain(element))
			}
		}
	}
}

// longest counts the rules on the longest way through a chain, and keeps it in known.
// A packet takes one of the branches behind matches and in verdict maps, as those of
// services.
func (w *ways) longest(key string) int {
	if n, there := w.known[key]; there {
		return n
	}
	w.known[key] = 0 // for chains that jump in a circle, which the kernel refuses
	w.known[key] = w.through(w.rules[key])
	return w.known[key]
}

// through counts the rules on the longest way through some that follow each other.
func (w *ways) through(rules []*nftables.Rule) (n int) {
	branch := 0
	for _, rule := range rules {
		n++
		for _, to := range w.to[rule] {
			if unconditional(rule) {
				n += w.longest(to)
			} else {
				branch = max(branch, w.longest(to))
			}
		}
	}
	return n + branch
}

// reach notes a chain and those that its rules jump to.
func (w *ways) reach(key string, reached map[string]bool) {
	if reached[key] {
		return
	}
	reached[key] = true
	for _, rule := range w.rules[key] {
		for _, to := range w.to[rule] {
			w.reach(to, reached)
		}
	}
}
