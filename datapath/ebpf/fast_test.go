// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// TestHints keeps hints longer than their flow, while another flow gets its entries, and fills the table of
// hints. No packet may be translated differently.
func TestHints(t *testing.T) {
	const packets = 40
	s := office(t, "")
	sets := s.d.t.Maps["hints4"].MaxEntries()
	hinted := func(what uint32) (n int) {
		for i := range sets {
			var h wire.Hint
			if err := s.d.t.Maps["hints4"].Lookup(i, &h); err != nil {
				t.Fatal(err)
			}
			for _, slot := range h.Slots {
				if slot != what {
					n++
				}
			}
		}
		return n
	}
	talk := func(client int) {
		t.Helper()
		want := sentFrom(t, send(t, s, "lan0", question(client, 1)))
		for i := range packets - 1 {
			if got := sentFrom(t, send(t, s, "lan0", question(client, 1))); got != want {
				t.Fatalf("packet %d of client %d left from %s, the first from %s", i+2, client, got, want)
			}
		}
	}
	counted := func(clients int) {
		t.Helper()
		flows, err := s.Flows()
		if err != nil {
			t.Fatal(err)
		}
		if len(flows) != clients {
			t.Errorf("%d flows, want %d", len(flows), clients)
		}
		for _, f := range flows {
			if f.Packets != [2]uint64{packets, 0} {
				t.Errorf("%v has %v packets, want %d in one direction", f.Original, f.Packets, packets)
			}
		}
	}
	talk(2)
	if n := hinted(0); n != 1 {
		t.Errorf("%d hints after one direction's packets, want 1", n)
	}
	for range 2 {
		if err := s.Advance(301 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	held{}.want(t, s, "the flow has ended")
	talk(3) // uses the entries of the first flow
	talk(2) // its hint still refers to these entries
	counted(2)

	const nobody = 0xffffffff
	for i := range sets {
		if err := s.d.t.Maps["hints4"].Put(i, wire.Hint{Slots: [4]uint32{nobody, nobody, nobody, nobody}}); err != nil {
			t.Fatal(err)
		}
	}
	talk(4)
	counted(3)
	if n := hinted(nobody); n != 1 {
		t.Errorf("%d hints were overwritten by a flow of %d packets, want 1", n, packets)
	}
}

// TestIdentifications: packets of a flow that is translated to IPv4 have consecutive identifications (RFC 7739
// §5.3). Among a thousand random ones, some would repeat.
func TestIdentifications(t *testing.T) {
	s := changing(t, "nat:\n  - {name: v6only, type: nat64, prefix: \"64:ff9b::/96\", source: [\"fd00:2::/64\"], pool: [203.0.113.1]}\n")
	seen := map[uint16]bool{}
	for i := range 1003 {
		out := send(t, s, "lan0", "ip6(src=fd00:2::2,dst=64:ff9b::c612:1)/udp(sport=4000,dport=53)")
		if len(out.Out) != 1 {
			t.Fatalf("packet %d: %v", i, out)
		}
		if i < 3 {
			continue // the full path creates and settles the flow
		}
		id := binary.BigEndian.Uint16(out.Out[0].Frame[14+4:])
		if seen[id] {
			t.Fatalf("packet %d: identification %d again", i, id)
		}
		seen[id] = true
	}
}
