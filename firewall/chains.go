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

// verdictOf returns the verdict of a verdict map's element and its target chain, or "" for none.
func verdictOf(e nftables.SetElement) (kind expr.VerdictKind, chain string) {
	a, err := mdnetlink.NewAttributeDecoder(e.Val) // the verdict as received
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

// pathRule is a rule on the path of a packet.
type pathRule struct {
	every   bool     // Every packet matches it.
	known   bool     // It accepts all packets of established connections.
	returns bool     // Packets leave the chain by it.
	to      []string // Target chains.
}

// chainGraph holds the rules and jumps of each chain, of nftables or of iptables-legacy.
type chainGraph struct {
	steps  map[string][]pathRule
	known  map[string]int         // Results of longest.
	accept map[string]acceptPoint // Results of findAcceptPoint.
	unread int                    // Number of verdict maps that were not read.
}

func newChainGraph() *chainGraph {
	return &chainGraph{steps: map[string][]pathRule{}, known: map[string]int{}, accept: map[string]acceptPoint{}}
}

// acceptPoint is the point where a chain accepts packets of established connections.
type acceptPoint struct {
	at     int // Index of the accepting rule, or of the rule that sends every packet to an accepting chain; -1 for none.
	walked int // Maximum number of rules up to that point.
}

// readNft adds the rules of nftables.
func (w *chainGraph) readNft(rules map[string][]*nftables.Rule, reader *setReader) {
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		for _, rule := range rules[key] {
			w.steps[key] = append(w.steps[key], pathRule{isUnconditional(rule), acceptsKnown(rule), hasReturn(rule), w.jumpTargets(rule, reader)})
		}
	}
}

// jumpTargets returns the chains that a rule jumps to, by its own verdict or through a map.
func (w *chainGraph) jumpTargets(rule *nftables.Rule, reader *setReader) (to []string) {
	noted := map[string]bool{"": true} // duplicates are common: a map of many services may have thousands of elements
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

// longest counts the rules on the longest path through a chain and caches the result. A packet takes only one of the
// branches behind matches and in verdict maps.
func (w *chainGraph) longest(key string) int {
	if n, there := w.known[key]; there {
		return n
	}
	w.known[key] = 0 // for cyclic jumps, which the kernel rejects
	w.known[key] = w.countRules(key, len(w.steps[key]))
	return w.known[key]
}

// countRules counts the rules on the longest path through the first rules of a chain.
func (w *chainGraph) countRules(key string, first int) (n int) {
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

// findAcceptPoint finds the point where a chain accepts packets of established connections. It stops at a rule by which some
// packets leave the chain.
func (w *chainGraph) findAcceptPoint(key string) acceptPoint {
	if a, there := w.accept[key]; there {
		return a
	}
	w.accept[key] = acceptPoint{at: -1} // for cyclic jumps
	for i, s := range w.steps[key] {
		switch {
		case s.known:
			w.accept[key] = acceptPoint{i, w.countRules(key, i+1)}
			return w.accept[key]
		case s.returns:
			return w.accept[key]
		case !s.every:
			continue
		}
		for _, to := range s.to {
			if inner := w.findAcceptPoint(to); inner.at >= 0 {
				w.accept[key] = acceptPoint{i, w.countRules(key, i) + 1 + inner.walked}
				return w.accept[key]
			}
		}
	}
	return w.accept[key]
}

// markReachable records a chain and all chains reachable from it.
func (w *chainGraph) markReachable(key string, reached map[string]bool) {
	if reached[key] {
		return
	}
	reached[key] = true
	for _, s := range w.steps[key] {
		for _, to := range s.to {
			w.markReachable(to, reached)
		}
	}
}
