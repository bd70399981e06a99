// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/capacity"
)

// Change is one setting now and then.
type Change struct {
	Setting
	Now string `json:"now"`
	// Skipped says why the setting is left alone; empty when it is changed.
	Skipped string `json:"skipped,omitempty"`
	// WholeHost: it rules all namespaces, and cannot be set from the one that is tuned.
	WholeHost bool `json:"whole_host,omitempty"`
}

// Proposal is what Apply would do.
type Proposal struct {
	Profile   string   `json:"profile"`
	Namespace string   `json:"namespace"`
	Changes   []Change `json:"changes"`
	// Notes say what the numbers do not.
	Notes []string `json:"notes,omitempty"`
}

// Pending returns the outstanding changes.
func (p *Proposal) Pending() []Change {
	return slices.DeleteFunc(slices.Clone(p.Changes), func(c Change) bool { return c.Skipped != "" })
}

// Cost is the memory in bytes that the changes may take at most.
func (p *Proposal) Cost() (sum uint64) {
	for _, c := range p.Pending() {
		sum += c.Cost
	}
	return sum
}

// Options modify the proposal.
type Options struct {
	// Set are manual values, which replace those of the profile.
	Set []Setting
	// Force accepts timeouts below the RFC minimums, and a limit below present usage.
	Force bool
}

// Propose computes the changes of a profile.
func Propose(s *System, p Profile, o Options) (*Proposal, error) {
	h, err := s.machine()
	if err != nil {
		return nil, err
	}
	var list []Setting
	for _, g := range p.groups {
		list = append(list, g(s, h)...)
	}
	return propose(s, p.Name, list, o)
}

// ProposeFor computes the changes that a planned load needs. Sizes that are
// larger already stay.
func ProposeFor(s *System, load capacity.Load, o Options) (*Proposal, error) {
	plan, err := capacity.For(load)
	if err != nil {
		return nil, err
	}
	list := tableOf(s, max(plan.Entries, s.number(conntrackMax)))
	for _, w := range plan.Settings() {
		if w.Key != conntrackMax && w.Key != conntrackBuckets {
			list = append(list, Setting{Key: w.Key, Value: w.Value, Why: w.Why, AtLeast: true})
		}
	}
	p, err := propose(s, "load", list, o)
	if err == nil {
		p.Notes = append(p.Notes, plan.Notes...)
	}
	return p, err
}

func propose(s *System, profile string, list []Setting, o Options) (*Proposal, error) {
	for _, set := range o.Set {
		i := slices.IndexFunc(list, func(have Setting) bool { return have.Key == set.Key })
		if i >= 0 {
			list[i] = set
		} else {
			list = append(list, set)
		}
	}
	p := &Proposal{Profile: profile, Namespace: s.Namespace.Name}
	var errs []error
	for _, w := range order(list) {
		if err := refuse(s, w, o.Force); err != nil {
			errs = append(errs, err)
			continue
		}
		p.Changes = append(p.Changes, s.change(w))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	p.remark(s)
	return p, nil
}

// order puts buckets before the limit and reserved ports before the range.
func order(list []Setting) []Setting {
	rank := func(s Setting) int {
		switch s.Key {
		case conntrackBuckets, localReserved:
			return 0
		}
		return 1
	}
	slices.SortStableFunc(list, func(a, b Setting) int { return rank(a) - rank(b) })
	return list
}

// change compares a desired setting with the present one.
func (s *System) change(w Setting) Change {
	c := Change{Setting: w, WholeHost: errors.Is(s.writable(w.Key), errHostWide)}
	now, err := s.Get(w.Key)
	c.Now = now
	switch {
	case errors.Is(err, fs.ErrNotExist) && !errors.Is(s.writable(w.Key), errHostWide):
		c.Skipped = "not on this kernel, or its module is not loaded"
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		c.Skipped = err.Error()
	case err == nil && same(now, w.Value):
		c.Skipped = "set already"
	case err == nil && w.AtLeast && larger(now, w.Value):
		c.Skipped = "larger already"
	default:
		if err := s.writable(w.Key); err != nil {
			c.Skipped = err.Error()
		}
	}
	if c.Skipped != "" {
		c.Cost = 0
	}
	return c
}

func larger(now, then string) bool {
	a, e1 := strconv.ParseInt(strings.TrimSpace(now), 10, 64)
	b, e2 := strconv.ParseInt(then, 10, 64)
	return e1 == nil && e2 == nil && a > b
}

// floors are the shortest timeouts that the RFCs allow, in seconds.
var floors = map[string]struct {
	seconds int64
	rfc     string
}{
	timeoutPrefix + "tcp_timeout_established": {7440, "RFC 5382 REQ-5: 2 h 4 min"},
	timeoutPrefix + "tcp_timeout_syn_sent":    {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "tcp_timeout_syn_recv":    {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "tcp_timeout_fin_wait":    {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "tcp_timeout_close_wait":  {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "tcp_timeout_last_ack":    {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "tcp_timeout_time_wait":   {240, "RFC 5382 REQ-5: transitory connections 4 min"},
	timeoutPrefix + "udp_timeout":             {120, "RFC 4787 REQ-5: 2 min"},
	timeoutPrefix + "udp_timeout_stream":      {120, "RFC 4787 REQ-5: 2 min"},
	timeoutPrefix + "icmp_timeout":            {60, "RFC 5508 REQ-2: 60 s"},
}

// refuse returns why a setting must not be made. Raising a timeout is never
// refused, even if it stays below its floor.
func refuse(s *System, w Setting, force bool) error {
	if !strings.HasPrefix(w.Key, "net.") || strings.Contains(w.Key, "..") || strings.Contains(w.Key, "/") {
		return fmt.Errorf("%s: only keys of the form net.x.y are tuned", w.Key)
	}
	if last := w.Key[strings.LastIndexByte(w.Key, '.')+1:]; last == "mtu" {
		return fmt.Errorf("%s: MTUs are not tuned: they depend on the path, not on this host", w.Key)
	}
	if w.Key == localRange {
		return validRange(w.Value)
	}
	v, err := strconv.ParseInt(strings.TrimSpace(w.Value), 10, 64)
	if err != nil || force {
		return nil
	}
	if floor, ok := floors[w.Key]; ok && v < floor.seconds && uint64(max(v, 0)) < s.number(w.Key) {
		return fmt.Errorf("%s = %d: below the floor of %s; peers lose connections that they hold for alive: --force if that is wanted",
			w.Key, v, floor.rfc)
	}
	if count := s.number(conntrackCount); w.Key == conntrackMax && v > 0 && uint64(v) < count {
		return fmt.Errorf("%s = %d: %d connections are tracked now: every new one would be dropped at once; --force if that is wanted",
			w.Key, v, count)
	}
	return nil
}

func (p *Proposal) remark(s *System) {
	h, err := s.machine()
	if cost := p.Cost(); err == nil && float64(cost) > 0.25*float64(h.Memory) {
		p.Notes = append(p.Notes, fmt.Sprintf("the changes may take %s of %s of memory", capacity.Bytes(cost), h.Memory))
	}
	if !s.persistent() {
		p.Notes = append(p.Notes, "a network namespace has no /etc/sysctl.d: the values last as long as it does")
	}
	for _, c := range p.Pending() {
		if c.Key == conntrackBuckets {
			p.Notes = append(p.Notes, "at boot the values take effect only if nf_conntrack is loaded before systemd-sysctl runs: "+
				"name it in /etc/modules-load.d")
			break
		}
	}
}
