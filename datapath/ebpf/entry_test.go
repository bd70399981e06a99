// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet/golden"
)

// office is a gateway with a snat rule from 10.0.2.0/24 to 203.0.113.1.
func office(t *testing.T, options string) *subject {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("office", []byte("nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]"+options+"}\n"))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, "xdp")
	if err := s.Reset(c, golden.StandardHost()); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestLooseEntry leaves an entry beside the stock, as a program does that many others
// keep from it: the sweeper puts it back.
func TestLooseEntry(t *testing.T) {
	s := office(t, "")
	const loose = 3
	stock := wireStock{Fresh: loose + 1} // of entries, the last one taken is loose
	if err := s.d.t.maps["stock6"].Put(uint32(0), &stock); err != nil {
		t.Fatal(err)
	}
	e := &s.d.t.flows6.values[loose]
	e.Key.State = uint8(wireEntryStateENTRY_LOOSE)
	if err := s.sweep(); err != nil {
		t.Fatal(err)
	}
	if err := s.d.t.maps["stock6"].Lookup(uint32(0), &stock); err != nil {
		t.Fatal(err)
	}
	if uint32(stock.Top) != loose+1 || e.Key.State != uint8(wireEntryStateENTRY_FREE) {
		t.Errorf("top of the stock %d, state %d; want entry %d + 1, free", uint32(stock.Top), e.Key.State, loose)
	}
}
