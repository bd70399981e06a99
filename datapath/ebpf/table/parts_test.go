// SPDX-License-Identifier: Apache-2.0

package table

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPartsAreAddedAllOrNone has the kernel refuse the second of two parts: neither is there, and both come
// when they are asked for again.
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
	if err := p.Add(between(0, 2)); err != nil {
		t.Fatal(err)
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
