// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestWalk compares the entries that Walk and Dump return, of random connections of both families.
func TestWalk(t *testing.T) {
	labtest.Require(t, labtest.BPF, labtest.Kernel("6.6", "bpf_skb_ct_lookup"))
	labtest.KeepHostSettings(t) // the number of buckets
	ns, other := alone(t), alone(t)
	r := rand.New(rand.NewPCG(1, 2))
	address := func(six bool) Addr {
		if six {
			return AddrOf(netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 2: 0xd, 3: 0xb8, 14: byte(r.Uint32()), 15: byte(r.Uint32())}))
		}
		return AddrOf(netip.AddrFrom4([4]byte{10, 0, byte(r.Uint32()), byte(r.Uint32())}))
	}
	var list []Entry
	for i := range 300 {
		e := Entry{Family: unix.AF_INET, Protocol: []flow.Protocol{flow.TCP, flow.UDP, flow.ICMP, flow.SCTP}[i%4], Timeout: 100 + r.Uint32N(1000), Mark: r.Uint32N(3)}
		six := i%3 == 0
		if six {
			e.Family = unix.AF_INET6
		}
		o := Tuple{Source: address(six), Dest: address(six), SourcePort: uint16(i), DestPort: uint16(r.Uint32())}
		e.Original, e.Reply = o, Tuple{Source: o.Dest, Dest: address(six), SourcePort: o.DestPort, DestPort: uint16(r.Uint32())}
		switch {
		case e.Protocol == flow.TCP:
			e.State = uint8(1 + r.Uint32N(8))
			e.Status = bit(Assured|SeenReply, i%8 == 0)
		case e.Protocol == flow.SCTP:
			e.State = 4
		case e.Protocol == flow.ICMP:
			if six {
				e.Protocol = flow.ICMPv6
			}
			e.Original.DestPort, e.Original.ICMPType = o.SourcePort, map[bool]uint8{false: 8, true: 128}[six]
			e.Reply.SourcePort, e.Reply.DestPort, e.Reply.ICMPType = o.SourcePort, o.SourcePort, map[bool]uint8{false: 0, true: 129}[six]
		}
		if i%10 == 0 {
			e.Zone = 7
		}
		list = append(list, e)
	}
	for _, where := range []struct {
		c    *Conn
		list []Entry
	}{{openIn(t, ns), list}, {openIn(t, other), list[:50]}} {
		if made, err := where.c.Insert(t.Context(), where.list); err != nil || made != len(where.list) {
			t.Fatalf("Insert made %d of %d: %v", made, len(where.list), err)
		}
	}
	read := func(all func(func(*Entry) error) error) map[string]Entry {
		got := map[string]Entry{}
		err := all(func(e *Entry) error {
			key := fmt.Sprint(e.Protocol, e.Zone, e.Original)
			if _, twice := got[key]; twice {
				t.Errorf("twice: %s", key)
			}
			got[key] = *e
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	dump := func(visit func(*Entry) error) error { return openIn(t, ns).Dump(t.Context(), nil, visit) }
	want := read(dump)
	got := read(func(visit func(*Entry) error) error {
		_, err := Walk(t.Context(), ns, visit)
		return err
	})
	after := read(dump)
	if len(want) != len(list) || len(got) != len(want) {
		t.Errorf("Dump returns %d entries, Walk %d, of %d", len(want), len(got), len(list))
	}
	for key, w := range want {
		g := got[key]
		if g.Timeout <= w.Timeout && g.Timeout >= after[key].Timeout {
			g.Timeout = w.Timeout
		}
		w.ID, w.Packets, w.Bytes, w.Start, w.Stop = 0, [2]uint64{}, [2]uint64{}, 0, 0
		if g != w {
			t.Errorf("%s:\nWalk %+v\nDump %+v", key, g, w)
		}
	}
	var sums [2][]Row
	for i, entries := range []uint32{0, walkedEntries} {
		s := NewSummary(BySource)
		if all, err := s.addSifted(t.Context(), ns, entries, nil); err != nil || int(all.Entries) != len(list) {
			t.Errorf("%d entries: %+v, %v", entries, all, err)
		}
		sums[i] = append(s.States(), s.Sources(0)...)
	}
	if !slices.Equal(sums[0], sums[1]) {
		t.Errorf("sums of a dump %v\nand of a walk %v", sums[0], sums[1])
	}
}

// TestWalkNeedsAConnection: without a TCP or UDP connection, the table is not found, and no entry is read.
func TestWalkNeedsAConnection(t *testing.T) {
	labtest.Require(t, labtest.BPF, labtest.Kernel("6.6", "bpf_skb_ct_lookup"))
	if started, err := Walk(context.Background(), alone(t), func(*Entry) error { return nil }); started || err == nil {
		t.Errorf("started %v, %v", started, err)
	}
}
