// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/model"
)

// Advance implements golden.Subject: it makes all entries older, and sweeps.
func (s *subject) Advance(d time.Duration) error {
	ticks := uint32(d.Seconds() * float64(s.d.hz))
	now, err := s.clock()
	if err != nil {
		return err
	}
	// Run time of the packets does not count: a timestamp that a packet wrote belongs to the last time step.
	back := func(seen *uint32) {
		if int32(*seen-s.advanced) > 0 {
			*seen = s.advanced
		}
		*seen += now - s.advanced - ticks
	}
	s.now = now
	s.older(back)
	s.olderLimits(ticks, now-s.advanced)
	s.advanced = now
	return s.sweepDead()
}

// sweepDead ends expired entries and frees them.
func (s *subject) sweepDead() error {
	if err := s.sweep(); err != nil {
		return err
	}
	const dead = wire.EntryDead
	for i := range s.d.t.Flows4.Values { // a second pass frees the entries that died in the first
		if e := &s.d.t.Flows4.Values[i]; e.Key.State == dead {
			e.Meta.Seen -= 2 * s.d.hz
		}
	}
	for i := range s.d.t.Flows6.Values {
		if e := &s.d.t.Flows6.Values[i]; e.Key.State == dead {
			e.Meta.Seen -= 2 * s.d.hz
		}
	}
	return s.sweep()
}

// clock is the kernel's in ticks.
func (s *subject) clock() (ticks uint32, err error) {
	if s.jiffies == nil {
		s.jiffies, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
			Instructions: asm.Instructions{asm.FnJiffies64.Call(), asm.Return()}})
		if err != nil {
			return 0, err
		}
		s.t.Cleanup(func() { s.jiffies.Close() })
	}
	return s.jiffies.Run(&ebpf.RunOptions{Data: make([]byte, 14)})
}

// olderServices is the number of services that may have been in force, one after the other.
const olderServices = 64

func (s *subject) older(back func(*uint32)) {
	t := s.d.t
	for i := range t.Flows4.Values {
		back(&t.Flows4.Values[i].Meta.Seen)
	}
	for i := range t.Flows6.Values {
		back(&t.Flows6.Values[i].Meta.Seen)
	}
	for i := range olderServices {
		if l := &t.ServiceLoads.Values[i]; l.Cookie != 0 {
			back(&l.Cookie)
		}
	}
	s.stickies.each(t.Late("stickies"), func(v *wire.Sticky) { back(&v.Seen) })
	s.fragments.each(t.Maps["fragments"], func(v *wire.Fragment) { back(&v.Seen) })
	s.forgetFragments()
}

// forgetFragments removes fragments older than ten times their life. In the programs, only other fragments
// displace them, and each packet of a test adds some.
func (s *subject) forgetFragments() {
	f := &s.fragments
	old := f.keys[:0]
	for i, k := range f.keys[:f.n] {
		if s.now-f.values[i].Seen > uint32(10*model.FragmentLife.Seconds())*s.d.hz {
			old = append(old, k)
		}
	}
	if len(old) > 0 {
		s.d.t.Maps["fragments"].BatchDelete(old, nil)
	}
}

// olderLimits makes rates older. Run time of the packets does not count here either.
func (s *subject) olderLimits(ticks, took uint32) {
	ns := func(ticks uint32) uint64 { return uint64(ticks) * uint64(time.Second) / uint64(s.d.hz) }
	back := func(tat *uint64) {
		if *tat > 0 {
			*tat += ns(took) - min(*tat, ns(ticks))
		}
	}
	for i := range olderServices {
		back(&s.d.t.ServiceLoads.Values[i].Tat)
		back(&s.d.t.ServiceLoads.Values[i].ResetTat)
	}
	s.clients.each(s.d.t.Late("client_rates"), func(v *wire.Client) { back(&v.Tat) })
	if len(s.snapshot.Rules) > 0 {
		s.rules.each(s.d.t.Maps["firewall_rules"], func(v *wire.FirewallRule) { back(&v.Tat) })
	}
}

// hashed is a hash with elements that change together.
type hashed[K, V any] struct {
	keys   []K
	values []V
	n      int // number of elements in the last part
}

// each changes all elements.
func (h *hashed[K, V]) each(m *ebpf.Map, change func(*V)) {
	if h.keys == nil {
		h.keys, h.values = make([]K, 4096), make([]V, 4096)
	}
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, h.keys, h.values, nil)
		for i := range h.values[:n] {
			change(&h.values[i])
		}
		if h.n = n; n > 0 {
			m.BatchUpdate(h.keys[:n], h.values[:n], nil)
		}
		if err != nil {
			return
		}
	}
}

func each[K, V any](m *ebpf.Map, change func(*V)) { new(hashed[K, V]).each(m, change) }

func (s *subject) sweep() error {
	_, err := s.d.programs.Programs["sweep_all"].Run(&ebpf.RunOptions{Context: make([]byte, 8)})
	return err
}
