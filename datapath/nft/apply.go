// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Apply makes the kernel's tables equal to the snapshot in one transaction. The kernel accepts all
// changes or none, and no packet sees a partial ruleset. Apply reads the changes back before it
// returns.
func (d *Datapath) Apply(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	start := time.Now()
	result, delta, mismatch, err := d.prepare(ctx, s)
	if err != nil {
		return nil, err
	}
	change := d.describe(result, delta)
	if !delta.Empty() {
		ended := d.readRetired(delta)
		if err := d.conn.Apply(delta); err != nil {
			return nil, d.checkRefused(err)
		}
		d.retired.merge(ended)
		if err := d.verify(delta, result); err != nil {
			d.inForce, d.compiled = nil, nil // the next call reads all tables
			return nil, err
		}
		if d.generation, err = d.conn.Generation(); err != nil {
			return nil, err
		}
	}
	up := d.host.uplinks()
	old := d.staleAfter(d.snapshot, s, up)
	d.uplinks = up
	d.inForce, d.compiled, d.snapshot, d.mismatch = result.Ruleset, result, s, mismatch
	change.Ended, d.endError = d.end(ctx, old)
	change.Duration = time.Since(start)
	return change, nil
}

// useFlowtable reports whether the snapshot is compiled with a flowtable.
func (d *Datapath) useFlowtable(s *datapath.Snapshot) bool {
	switch s.Config.Flowtable {
	case config.SwitchOn:
		return true
	case config.SwitchOff:
		return false
	}
	return d.flowtables && len(s.Services)+len(s.NAT) > 0 && compile.SeesEveryPacket(s) == ""
}

// checkRefused returns the error of a refused transaction, after it has checked that the previous
// ruleset is unchanged.
func (d *Datapath) checkRefused(cause error) error {
	generation, err := d.conn.Generation()
	if err != nil {
		return errors.Join(cause, err)
	}
	if generation == d.generation {
		return cause // no transaction since the last known one
	}
	before := d.inForce
	read, _, err := d.conn.Read()
	if err != nil {
		return errors.Join(cause, err)
	}
	left, err := d.diffFromKernel(read, before)
	if err != nil {
		return errors.Join(cause, err)
	}
	if !left.Empty() {
		d.inForce, d.compiled = nil, nil
		return fmt.Errorf("%w; and the rules in force are not the previous ones: another program changes table %s", cause, ruleset.TableName)
	}
	return cause
}

// manyElements is the number of changed elements above which the whole set is read back instead of
// each element.
const manyElements = 256

// verify reads back the changes: everything after a large change, only the changed chains and
// elements after a small one.
func (d *Datapath) verify(delta *ruleset.Delta, result *compile.Result) error {
	if len(delta.AddChains)+len(delta.AddSets) > manyElements || len(delta.AddTables) > 0 {
		return d.verifyAll(result)
	}
	for _, c := range delta.AddRules {
		rules, err := d.conn.Chain(c.Of.ID)
		if err != nil {
			return fmt.Errorf("%s: chain %s: read back: %w", c.Owner, c.Of.Name, err)
		}
		if !slices.EqualFunc(c.Of.Rules, rules, ruleset.Rule.Equal) {
			return fmt.Errorf("%s: chain %s: its rules read back differ from those written", c.Owner, c.Of.Name)
		}
	}
	return d.verifyElements(delta)
}

// verifyAll reads back all tables.
func (d *Datapath) verifyAll(result *compile.Result) error {
	read, _, err := d.conn.Read()
	if err != nil {
		return err
	}
	left, err := d.diffFromKernel(read, result.Ruleset)
	if err != nil {
		return err
	}
	if !left.Empty() {
		return fmt.Errorf("rules read back differ from those written: %s", firstLine(describe(left, 1)))
	}
	return nil
}

// diffFromKernel compares the ruleset read from the kernel with the expected one. The kernel dumps a
// set by walking a hash table. For each message it starts again and skips the number of elements
// already dumped (nft_rhash_walk). For some milliseconds after many additions the table is resized,
// and a dump then omits elements. Missing elements are therefore requested one by one.
func (d *Datapath) diffFromKernel(read *ruleset.Fragment, want *ruleset.Ruleset) (*ruleset.Delta, error) {
	left := ruleset.Diff(&ruleset.Ruleset{Fragments: []*ruleset.Fragment{read}}, want)
	lacking := left.AddElements
	left.AddElements = nil
	for _, e := range lacking {
		set := left.Sets[e.Of.Set]
		missing := []ruleset.Element{e.Of}
		if !set.Interval {
			var err error
			if missing, err = d.conn.Has(set, missing); err != nil {
				return nil, err
			}
		}
		if len(missing) > 0 {
			left.AddElements = append(left.AddElements, e)
		}
	}
	return left, nil
}

func (d *Datapath) verifyElements(delta *ruleset.Delta) error {
	added := make(map[ruleset.ID][]ruleset.Element)
	for _, e := range delta.AddElements {
		added[e.Of.Set] = append(added[e.Of.Set], e.Of)
	}
	gone := make(map[ruleset.ID][]ruleset.Element)
	removedSets := make(map[ruleset.ID]bool)
	for _, s := range delta.DelSets {
		removedSets[s.Of.ID] = true
	}
	for _, e := range delta.DelElements {
		if !removedSets[e.Of.Set] {
			gone[e.Of.Set] = append(gone[e.Of.Set], e.Of)
		}
	}
	for id, list := range added {
		missing, err := d.missingElements(delta.Sets[id], list)
		if err != nil {
			return fmt.Errorf("set %s: read back: %w", id.Name, err)
		}
		if len(missing) > 0 {
			return fmt.Errorf("set %s: element { %s } is not there after it was written", id.Name, delta.Sets[id].Element(missing[0]))
		}
	}
	for id, list := range gone {
		list = slices.DeleteFunc(list, func(e ruleset.Element) bool { // the object is replaced, not removed
			return slices.ContainsFunc(added[id], func(a ruleset.Element) bool { return a.Key == e.Key && a.End == e.End })
		})
		missing, err := d.missingElements(delta.Sets[id], list)
		if err != nil {
			return fmt.Errorf("set %s: read back: %w", id.Name, err)
		}
		if len(missing) != len(list) {
			return fmt.Errorf("set %s: an element is still there after it was removed", id.Name)
		}
	}
	return nil
}

// missingElements returns the elements that the kernel does not have. See diffFromKernel for omissions in a
// dump.
func (d *Datapath) missingElements(set *ruleset.Set, list []ruleset.Element) ([]ruleset.Element, error) {
	if len(list) <= manyElements && !set.Interval {
		return d.conn.Has(set, list)
	}
	held, err := d.conn.Elements(set)
	if err != nil {
		return nil, err
	}
	have := make(map[ruleset.Element]bool, len(held))
	for _, e := range held {
		have[e] = true
	}
	missing := slices.DeleteFunc(slices.Clone(list), func(e ruleset.Element) bool { return have[e] })
	if len(missing) == 0 || set.Interval {
		return missing, nil
	}
	return d.conn.Has(set, missing) // a dump may omit elements: see difference
}

// maxLines is the maximum number of lines in the description of a change.
const maxLines = 300

// describe turns a delta into a datapath.Change.
func (d *Datapath) describe(result *compile.Result, delta *ruleset.Delta) *datapath.Change {
	c := &datapath.Change{Datapath: d.Name(), Lines: describe(delta, maxLines)}
	c.Objects.Added = len(delta.AddTables) + len(delta.AddChains) + len(delta.AddSets) + len(delta.AddObjects)
	c.Objects.Removed = len(delta.DelTables) + len(delta.DelChains) + len(delta.DelSets) + len(delta.DelObjects)
	c.Rules = datapath.Count{Added: delta.RulesAdded, Removed: delta.RulesRemoved}
	replaced := make(map[ruleset.Element]bool)
	for _, e := range delta.DelElements {
		replaced[ruleset.Element{Set: e.Of.Set, Key: e.Of.Key, End: e.Of.End}] = true
	}
	for _, e := range delta.AddElements {
		if replaced[ruleset.Element{Set: e.Of.Set, Key: e.Of.Key, End: e.Of.End}] {
			c.Elements.Changed++
		} else {
			c.Elements.Added++
		}
	}
	c.Elements.Removed = len(delta.DelElements) - c.Elements.Changed
	c.Truncated = lineCount(delta) - len(c.Lines)
	c.Slots, c.SlotsTotal = slotsMoved(d.compiled, result)
	return c
}

func firstLine(lines []string) string {
	if len(lines) == 0 {
		return "in a definition"
	}
	return lines[0]
}

func movedSlots(before, after []string) int { return balance.Moved(before, after) }
