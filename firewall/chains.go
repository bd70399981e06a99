// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// verdictOf reads the verdict of an element of a verdict map, and the chain that it sends
// packets to; "": none.
func verdictOf(e nftables.SetElement) (kind expr.VerdictKind, chain string) {
	a, err := mdnetlink.NewAttributeDecoder(e.Val) // as it came
	if err != nil {
		return expr.VerdictContinue, ""
	}
	a.ByteOrder = binary.BigEndian
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_VERDICT_CODE:
			kind = expr.VerdictKind(int32(a.Uint32()))
		case unix.NFTA_VERDICT_CHAIN:
			chain = a.String()
		}
	}
	return kind, chain
}

// step is a rule on the path of a packet.
type step struct {
	every   bool     // whether every packet matches it
	known   bool     // whether it accepts all packets of known connections
	returns bool     // whether packets leave the chain by it
	to      []string // the chains that it sends packets to
}

// chainGraph are the rules of each chain and where they lead, of nftables or of
// iptables-legacy.
type chainGraph struct {
	steps  map[string][]step
	known  map[string]int      // longest
	accept map[string]accepted // accepts
	unread int                 // verdict maps that are not followed
}

func newChainGraph() *chainGraph {
	return &chainGraph{steps: map[string][]step{}, known: map[string]int{}, accept: map[string]accepted{}}
}

// accepted is where packets of known connections are accepted.
type accepted struct {
	at     int // index of the chain's rule that does, or sends every packet to a chain that does; -1: none
	walked int // rules that they walk through at most until then
}

// readNft adds the rules of nftables.
func (w *chainGraph) readNft(rules map[string][]*nftables.Rule, reader *setReader) {
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		for _, rule := range rules[key] {
			w.steps[key] = append(w.steps[key], step{unconditional(rule), acceptsKnown(rule), returns(rule), w.from(rule, reader)})
		}
	}
}

// from is where a rule jumps to, by its own verdict or by one of a map.
func (w *chainGraph) from(rule *nftables.Rule, reader *setReader) (to []string) {
	noted := map[string]bool{"": true} // of thousands, in the maps of many services
	note := func(chain string) {
		if !noted[chain] {
			noted[chain] = true
			to = append(to, chainKey(rule.Table, chain))
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
				_, chain := verdictOf(element)
				note(chain)
			}
		}
	}
	return to
}

// longest counts the rules on the longest path through a chain, and keeps it in known.
// A packet takes one of the branches behind matches and in verdict maps, as those of
// services.
func (w *chainGraph) longest(key string) int {
	if n, there := w.known[key]; there {
		return n
	}
	w.known[key] = 0 // for chains that jump in a circle, which the kernel refuses
	w.known[key] = w.through(key, len(w.steps[key]))
	return w.known[key]
}

// through counts the rules on the longest path through the first so many of a chain.
func (w *chainGraph) through(key string, first int) (n int) {
	branch := 0
	for _, s := range w.steps[key][:first] {
		n++
		for _, to := range s.to {
			if s.every {
				n += w.longest(to)
			} else {
				branch = max(branch, w.longest(to))
			}
		}
	}
	return n + branch
}

// accepts finds where a chain accepts packets of known connections. Behind a rule by which
// some packets leave the chain it is not known of all of them.
func (w *chainGraph) accepts(key string) accepted {
	if a, there := w.accept[key]; there {
		return a
	}
	w.accept[key] = accepted{at: -1} // for chains that jump in a circle
	for i, s := range w.steps[key] {
		switch {
		case s.known:
			w.accept[key] = accepted{i, w.through(key, i+1)}
			return w.accept[key]
		case s.returns:
			return w.accept[key]
		case !s.every:
			continue
		}
		for _, to := range s.to {
			if inner := w.accepts(to); inner.at >= 0 {
				w.accept[key] = accepted{i, w.through(key, i) + 1 + inner.walked}
				return w.accept[key]
			}
		}
	}
	return w.accept[key]
}

// reach notes a chain and those that its rules jump to.
func (w *chainGraph) reach(key string, reached map[string]bool) {
	if reached[key] {
		return
	}
	reached[key] = true
	for _, s := range w.steps[key] {
		for _, to := range s.to {
			w.reach(to, reached)
		}
	}
}
