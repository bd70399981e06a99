// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/flow"
)

// TestFilterTerms: every listed term sets a condition, and refuses a text that is none.
func TestFilterTerms(t *testing.T) {
	valid := map[string]string{"proto": "udp", "src": "10.1.2.3", "dst": "10.1.2.3/8", "nat-src": "::ffff:192.0.2.1", "nat-dst": "2001:db8::/32",
		"sport": "1024-2048", "port": "443", "mark": "0x10/0xf0", "state": "time_wait", "zone": "65535"}
	var f Filter
	for _, term := range FilterTerms {
		before := f
		if err := f.Set(term, valid[term]); err != nil || f == before {
			t.Errorf("%s %q: %v, filter %+v", term, valid[term], err, f)
		}
		var other Filter
		if err := other.Set(term, "no such text"); err == nil {
			t.Errorf("%s accepts a text that is no condition", term)
		}
	}
	want := Filter{Protocol: flow.UDP, Source: netip.MustParsePrefix("10.1.2.3/32"), Dest: netip.MustParsePrefix("10.0.0.0/8"),
		TranslatedSource: netip.MustParsePrefix("192.0.2.1/32"), TranslatedDest: netip.MustParsePrefix("2001:db8::/32"),
		SourcePort: flow.Ports{First: 1024, Last: 2048}, DestPort: flow.Ports{First: 443, Last: 443},
		Mark: 0x10, MarkMask: 0xf0, State: "time_wait", Zone: 65535, HasZone: true}
	if f != want {
		t.Errorf("filter %+v, want %+v", f, want)
	}
	if err := f.Set("color", "red"); err == nil {
		t.Error("an unknown term is accepted")
	}
}

// TestGroupings: each grouping fills one ranking, and requests only dimensions that it shows.
func TestGroupings(t *testing.T) {
	for _, by := range Groupings() {
		g := Grouping{By: by}
		s := NewSummary(g.Dimensions())
		s.Enter("host", 0)
		s.Add(&Entry{Family: 2, Protocol: flow.TCP, State: uint8(TCPEstablished), Status: Assured | SeenReply, Timeout: 100,
			Original: Tuple{Source: AddrOf(netip.MustParseAddr("10.0.0.1")), Dest: AddrOf(netip.MustParseAddr("192.0.2.1")), SourcePort: 1000, DestPort: 80},
			Reply:    Tuple{Source: AddrOf(netip.MustParseAddr("10.9.0.1")), Dest: AddrOf(netip.MustParseAddr("203.0.113.1")), SourcePort: 8080, DestPort: 1000}})
		r := NewReport(&Survey{Summary: s}, g)
		if rows, ports := len(r.Rows), len(r.SNATPorts); by != "age" && rows+ports == 0 || by == "snat-port" != (ports > 0) || r.By != by {
			t.Errorf("by %s: %d rows, %d SNAT addresses", by, rows, ports)
		}
	}
}

func TestLevel(t *testing.T) {
	fill := func(effective float64, drops uint32) FillReport {
		return FillReport{Effective: effective, Fill: Fill{Counted: Counters{Drop: drops}}}
	}
	for _, tc := range []struct {
		name string
		list []FillReport
		want int
	}{
		{"healthy", []FillReport{fill(0.5, 0), fill(0, 0)}, 0},
		{"filling", []FillReport{fill(0.1, 0), fill(0.8, 0)}, 1},
		{"held", []FillReport{fill(0.8, 0), fill(0.95, 0)}, 2},
		{"dropping", []FillReport{fill(0.1, 1)}, 2},
	} {
		if got := (&Report{Namespaces: tc.list}).Level(); got != tc.want {
			t.Errorf("%s: level %d, want %d", tc.name, got, tc.want)
		}
	}
}
