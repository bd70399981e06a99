// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPartsAreAddedAllOrNone makes the kernel refuse the second of two parts. Neither exists then, and a retry adds
// both.
func TestPartsAreAddedAllOrNone(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 4096, Flags: unix.BPF_F_MMAPABLE}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 2, InnerMap: inner})
	if err != nil {
		t.Fatal(err)
	}
	defer outer.Close()
	p, err := MapParts[uint64](outer, inner, 2*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	good := inner.ValueSize
	err = p.Add(func(yield func(uint32) bool) {
		if yield(0) {
			inner.ValueSize = 0 // no such map
			yield(1)
		}
	})
	if inner.ValueSize = good; err == nil || p.Bytes() != 0 {
		t.Fatalf("%d bytes are there: %v", p.Bytes(), err)
	}
	for n := range uint32(2) {
		if err := p.Add(sequence(0, n+1)); err != nil {
			t.Fatal(err)
		}
		if got := len(p.Shown()); got != int(n+1)*4096 {
			t.Errorf("%d parts are there, and %d elements shown", n+1, got)
		}
	}
	for n := range uint32(2) {
		var part *ebpf.Map
		if err := outer.Lookup(n, &part); err != nil {
			t.Fatalf("part %d: %v", n, err)
		}
		defer part.Close()
		p.Values[n*4096] = uint64(n) + 7
		var v uint64
		if err := part.Lookup(uint32(0), &v); err != nil || v != uint64(n)+7 {
			t.Errorf("part %d holds %d (%v)", n, v, err)
		}
	}
}

// TestEntriesOfPartsThatAreThere: parts that do not exist are skipped, and the numbers of other entries are
// unchanged.
func TestEntriesOfPartsThatAreThere(t *testing.T) {
	inner := &ebpf.MapSpec{MaxEntries: 4}
	tables := &Tables{Flows4: &Parts[wire.Flow4]{inner: inner, Values: make([]wire.Flow4, 10)}, Flows6: &Parts[wire.Flow6]{inner: inner, Values: make([]wire.Flow6, 6)}}
	for _, c := range []struct {
		four, six uint32 // parts
		first     int
		want      []int
	}{
		{0, 0, 0, nil},
		{1, 0, 0, []int{0, 1, 2, 3}},
		{1, 1, 2, []int{2, 3, 10, 11, 12, 13}},
		{1, 1, 5, []int{10, 11, 12, 13}},
		{3, 2, 8, []int{8, 9, 10, 11, 12, 13, 14, 15}},
		{3, 2, 15, []int{15}},
		{3, 2, 16, nil},
	} {
		tables.Flows4.shown.Store(c.four)
		tables.Flows6.shown.Store(c.six)
		if got := slices.Collect(tables.Entries(c.first)); !slices.Equal(got, c.want) {
			t.Errorf("%d and %d parts from %d on: %v, want %v", c.four, c.six, c.first, got, c.want)
		}
	}
}
