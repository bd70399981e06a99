// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// TestShorten removes the middle on both sides of an arrow.
func TestShorten(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  string
	}{
		{"198.51.100.7", 12, "198.51.100.7"},
		{"2001:db8:1234:5678:9abc:def0:1234:5678", 32, "2001:db8:1234:5~c:def0:1234:5678"},
		{"[2001:db8:1234:5678:9abc:def0:1234:5678]:443 -> 10.0.0.1:80", 36, "[2001:db8:~:5678]:443 -> 10.0.0.1:80"},
		{"[2001:db8:1234:5678:9abc:def0:1234:5678]:443 -> [2001:db8::1]:80", 40, "[2001:db8~:5678]:443 -> [2001:db8::1]:80"},
	} {
		got := shorten(c.text, c.width)
		if got != c.want || len(got) > c.width {
			t.Errorf("%q in %d columns: %q, want %q", c.text, c.width, got, c.want)
		}
	}
}

// TestNarrowTabs: the open page has its name on a terminal of 40 columns, too.
func TestNarrowTabs(t *testing.T) {
	s := show(t)
	s.Update(tea.WindowSizeMsg{Width: 40, Height: 24})
	s.keys("8")
	s.want(" 1  2  3  4  5  6  7 [8 Netns]\n")
}

// TestLongRanking: filtering and sorting apply to the largest part only, and the page says so.
func TestLongRanking(t *testing.T) {
	s := show(t)
	for i := range 2000 {
		e := entry(1)
		e.Original.Source = conntrack.AddrOf(netip.AddrFrom4([4]byte{10, 7, byte(i >> 8), byte(i)}))
		s.table.Summary.Add(&e)
	}
	s.ranked[tabSources].table = nil
	s.want("1000 of the largest 1,000")
	s.keys("/", "n", "o", "enter")
	s.want("nothing matches no among the largest 1,000")
}

// TestSmallTerminals wants no size to be too small to draw.
func TestSmallTerminals(t *testing.T) {
	for _, size := range [][2]int{{0, 0}, {1, 1}, {10, 3}, {80, 5}} {
		s := show(t)
		s.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		if lines := strings.Count(s.drawScreen(), "\n") + 1; lines != size[1] && size[1] > 0 {
			t.Errorf("%d lines on a terminal of %v", lines, size)
		}
	}
}

func TestHelp(t *testing.T) {
	s := show(t)
	s.keys("?")
	s.want("filter by a regular expression", "any key returns")
	s.keys("q")
	s.want("[1 Sources]")
}

func TestPace(t *testing.T) {
	if got := waitAfter(2700*time.Millisecond, dumpShare, dumpMinimum); got < 60*time.Second {
		t.Errorf("a dump of 2.7 s is repeated every %v: over 5 %% of a core", got)
	}
	if got := waitAfter(time.Millisecond, dumpShare, dumpMinimum); got != dumpMinimum {
		t.Errorf("a dump of 1 ms is repeated every %v", got)
	}
}

func TestVerdict(t *testing.T) {
	fill := func(count, held uint32, growth float64) []conntrack.Fill {
		return []conntrack.Fill{{Namespace: "gw", Limits: conntrack.Limits{Count: count, Max: 1000, Buckets: 1000}, Held: held, Growth: growth, Over: time.Minute}}
	}
	lately := fill(600, 100, 10)
	lately[0].Over = time.Second
	full := fill(950, 100, 10)
	full[0].Over = time.Second
	for _, tc := range []struct {
		name  string
		c     Counts
		level Level
		want  string
	}{
		{"healthy", Counts{Fills: fill(500, 400, 0)}, OK, "nothing runs short"},
		{"full of what can go", Counts{Fills: fill(990, 100, 0)}, OK, "nothing"},
		{"held", Counts{Fills: fill(990, 950, 0)}, Critical, "95% of the table is held"},
		{"filling", Counts{Fills: fill(600, 100, 10)}, Critical, "full in 40s"},
		{"filling slowly", Counts{Fills: fill(600, 100, 1.01)}, Warn, "full in 7m"},
		{"less than half full", Counts{Fills: fill(400, 100, 10)}, OK, "nothing"},
		{"filling for a second", Counts{Fills: lately}, OK, "nothing"},
		{"all but full, and filling for a second", Counts{Fills: full}, Critical, "full in 5s"},
		{"full", Counts{Fills: fill(1000, 1000, 0), DropsPerSecond: 70, FullPerSecond: 70}, Critical, "table is full, 70 new"},
		{"was full", Counts{Fills: fill(900, 100, 0), DropsPerSecond: 70, FullPerSecond: 70}, Critical, "table is full, 70 new"},
		{"one found no room", Counts{Fills: fill(1000, 100, 0), DropsPerSecond: 0.5, FullPerSecond: 0.5}, Warn, "table is full, 0.5 new"},
		{"ports", Counts{Fills: fill(300, 300, 0), DropsPerSecond: 8, PortsPerSecond: 8}, Critical, "no free SNAT port"},
		{"ports, and one found no room", Counts{Fills: fill(300, 300, 0), DropsPerSecond: 8.5, PortsPerSecond: 8, FullPerSecond: 0.5}, Critical, "no free SNAT port"},
		{"races", Counts{Fills: fill(300, 300, 0), DropsPerSecond: 8, RacesPerSecond: 8}, Critical, "had the same tuple as another"},
		{"a race", Counts{Fills: fill(300, 300, 0), DropsPerSecond: 0.5, RacesPerSecond: 0.5}, Warn, "ports are not short"},
		{"chains", Counts{Fills: fill(300, 300, 0), DropsPerSecond: 8, ChainsPerSecond: 8}, Critical, "hash chain too long"},
		{"backlog", Counts{Fills: fill(1, 1, 0), BacklogPerSecond: 8}, Critical, "backlog"},
		{"softirq", Counts{Fills: fill(1, 1, 0), Softirq: 0.9}, Critical, "softirqs"},
	} {
		if v := findVerdict(&tc.c, nil); v.Level != tc.level || !strings.Contains(v.Text, tc.want) {
			t.Errorf("%s: %v: %s; want %v, %q", tc.name, v.Level, v.Text, tc.level, tc.want)
		}
	}
}

func TestOnce(t *testing.T) {
	f := &fake{}
	p, err := Once(context.Background(), f, 5)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Sources) != 5 || p.Entries != 1000 || p.SNATPorts[0].Used != 750 || len(p.Phases) != 1 || p.Drops == nil || p.Verdict.Level != OK {
		t.Errorf("%+v", p)
	}
}

func TestParsers(t *testing.T) {
	for key, want := range map[string]string{"tcp 198.51.100.1:443": "198.51.100.1:443", "icmp 198.51.100.1": "198.51.100.1:0", "icmpv6 2001:db8::1": "[2001:db8::1]:0"} {
		var f conntrack.Filter
		if got := endpoint(key, &f); got.String() != want || f.Protocol == flow.Any {
			t.Errorf("%s: %s, %s", key, got, f.Protocol)
		}
	}
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1,000", 1048576: "1,048,576"} {
		if got := group(n); got != want {
			t.Errorf("%d is written %s", n, got)
		}
	}
}
