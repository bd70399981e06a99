// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// fake is a Reader with a table of 1,000 connections. They have 20 clients, one SNAT address and two services, one
// with DNAT.
type fake struct {
	mu     sync.Mutex // protects calls
	calls  map[string]int
	filter conntrack.Filter // of the last Flows
	err    error
}

func entry(i int) conntrack.Entry {
	addr := func(s string) conntrack.Addr { return conntrack.AddrOf(netip.MustParseAddr(s)) }
	e := conntrack.Entry{Family: unix.AF_INET, Protocol: flow.TCP, State: uint8(conntrack.TCPEstablished),
		Status: conntrack.Assured | conntrack.SeenReply, Timeout: uint32(1000 + i), Counted: true, Bytes: [2]uint64{uint64(i) * 1000, 5}}
	e.Original = conntrack.Tuple{Source: addr(fmt.Sprintf("10.0.0.%d", 1+i*i%20)), SourcePort: uint16(2000 + i), DestPort: 443, Dest: addr("198.51.100.7")}
	e.Reply = conntrack.Tuple{Source: addr("198.51.100.7"), SourcePort: 443, Dest: addr("203.0.113.5"), DestPort: uint16(2000 + i)}
	if i%4 == 0 {
		e.Original.Dest, e.Reply.Source = addr("192.0.2.80"), addr("10.9.0.2")
		e.State = uint8(conntrack.TCPTimeWait)
	}
	return e
}

func (f *fake) count(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls == nil {
		f.calls = map[string]int{}
	}
	f.calls[name]++
	return f.err
}

func (f *fake) Counts(context.Context) (*Counts, error) {
	return &Counts{Time: time.Unix(0, 0), NewPerSecond: 123, HottestCPU: 1, Softirq: 0.34, Fills: []conntrack.Fill{
		{Namespace: "host", Limits: conntrack.Limits{Count: 1000, Max: 4000, Buckets: 4096}, Held: 750, Growth: 2},
		{Namespace: "blue", Limits: conntrack.Limits{Max: 4000, Buckets: 4096}},
	}}, f.count("counts")
}

func (f *fake) Table(context.Context) (*TableSummary, error) {
	s := conntrack.NewSummary(conntrack.BySource | conntrack.ByDest | conntrack.ByService | conntrack.ByBackend | conntrack.BySNATPort)
	s.Enter("host", 432000)
	for i := range 1000 {
		e := entry(i)
		s.Add(&e)
	}
	return &TableSummary{Time: time.Unix(0, 0), Took: 20 * time.Millisecond, CPU: 400 * time.Millisecond, Summary: s, Held: map[string]uint32{"host": 750}}, f.count("table")
}

func (f *fake) Drops(context.Context) (*trace.DropReport, error) {
	return &trace.DropReport{Window: 3 * time.Second, Groups: []trace.DropGroup{
		{Namespace: "host", Cause: trace.CauseTableFull, Packets: 300, PerSecond: 100},
		{Namespace: "blue", Cause: trace.Cause{Title: "late ACK", Benign: true}, Packets: 3, PerSecond: 1}}}, f.count("drops")
}

func (f *fake) Profile(context.Context) (*trace.Profile, error) {
	return &trace.Profile{Packets: 5000, Phases: []trace.PhaseShare{{Phase: "NAT", Network: true, Share: 0.2, MicrosPerPacket: 0.5}}}, f.count("profile")
}

func (f *fake) Flows(_ context.Context, filter conntrack.Filter, _ string, limit int) (list []Flow, err error) {
	f.filter = filter
	if err := f.count("flows"); err != nil {
		return nil, err
	}
	for i := 0; i < 1000 && len(list) < limit; i++ {
		if e := entry(i); filter.Matches(&e) {
			list = append(list, Flow{"host", e, e.Flow()})
		}
	}
	return list, nil
}

// screen is a model under test.
type screen struct {
	*testing.T
	*Model
	*fake
}

// show makes a model that has read everything once.
func show(t *testing.T) *screen {
	t.Helper()
	f := &fake{}
	s := &screen{t, New(context.Background(), f), f}
	s.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
	s.run(s.start(fetchCounts))
	s.run(s.start(fetchTable))
	return s
}

// run does a command's work at once and feeds the result back. Timers are not
// waited for.
func (s *screen) run(cmd tea.Cmd) {
	s.Helper()
	if cmd == nil {
		return
	}
	done := make(chan tea.Msg, 1)
	go func() { done <- cmd() }()
	select {
	case msg := <-done:
		if batch, ok := msg.(tea.BatchMsg); ok {
			for _, c := range batch {
				s.run(c)
			}
			return
		}
		s.Update(msg) // the result is the timer of the next refresh
	case <-time.After(time.Minute):
		s.Fatal("a command does not end")
	}
}

// keys presses keys, written as bubbletea names them.
func (s *screen) keys(names ...string) {
	s.Helper()
	for _, n := range names {
		k := tea.KeyPressMsg{}
		switch n {
		case "enter":
			k.Code = tea.KeyEnter
		case "esc":
			k.Code = tea.KeyEscape
		case "down":
			k.Code = tea.KeyDown
		case "tab":
			k.Code = tea.KeyTab
		case "end":
			k.Code = tea.KeyEnd
		case "backspace":
			k.Code = tea.KeyBackspace
		default:
			k.Code, k.Text = []rune(n)[0], n
		}
		if k.String() != n {
			s.Fatalf("key %q is %q to bubbletea", n, k.String())
		}
		_, cmd := s.Update(k)
		s.run(cmd)
	}
}

func (s *screen) text() string { return ansi.Strip(s.drawScreen()) }

func (s *screen) want(parts ...string) {
	s.Helper()
	text := s.text()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			s.Errorf("screen lacks %q:\n%s", p, text)
		}
	}
}

func TestScreenFits(t *testing.T) {
	for _, size := range []struct{ w, h int }{{80, 24}, {132, 50}, {60, 10}, {40, 8}} {
		s := show(t)
		s.Update(tea.WindowSizeMsg{Width: size.w, Height: size.h})
		for tab := range tabCount {
			s.keys(fmt.Sprint(int(tab) + 1))
			lines := strings.Split(s.text(), "\n")
			if len(lines) != size.h {
				t.Errorf("tab %d at %dx%d has %d lines", tab, size.w, size.h, len(lines))
			}
			for _, l := range lines {
				if ansi.StringWidth(l) > size.w {
					t.Errorf("tab %d at %dx%d: line of %d columns: %q", tab, size.w, size.h, ansi.StringWidth(l), l)
				}
			}
		}
	}
}

func TestHeader(t *testing.T) {
	s := show(t)
	s.want("table 1,000 of 4,000  fill 25% [##......]  held 19%  full in 25m00s", "fullest: host; 1,000 in 2 netns",
		"new ~123/s", "growth +2/s", "softirq cpu1 34%", "ok: nothing runs short", "[1 Sources]", "every "+waitAfter(400*time.Millisecond, dumpShare, dumpMinimum).Round(time.Second).String())
}

func TestPages(t *testing.T) {
	s := show(t)
	s.want("SOURCE", "> 10.0.0.")
	s.keys("3")
	s.want("[3 Services]", "> tcp 198.51.100.7:443", "tcp 192.0.2.80:443", "-> tcp 10.9.0.2:443", "750", "250")
	s.keys("4")
	s.want("203.0.113.5 -> tcp 198.51.100.7:443", "2001-2999", "1.2%", "[......]")
	s.keys("5")
	s.want("tcp ESTABLISHED", "tcp TIME_WAIT")
	s.keys("8")
	s.want("> host", "1,000", "+2", "25m00s")
}

func TestOnlyOpenPagesTrace(t *testing.T) {
	s := show(t)
	if s.calls["drops"]+s.calls["profile"] != 0 {
		t.Errorf("traced before the page was open: %v", s.calls)
	}
	s.keys("6")
	s.want("connection table full", "late ACK (harmless)", "300")
	s.keys("7")
	s.want("NAT", "0.50", "20%")
	if s.calls["drops"] != 1 || s.calls["profile"] != 1 {
		t.Errorf("calls %v", s.calls)
	}
	s.keys("1")
	if cmd := s.start(fetchDrops); cmd != nil {
		t.Error("drops are traced on another page")
	}
	s.keys("6", "enter")
	s.want("connection table full", "remedy: raise net.netfilter.nf_conntrack_max")
	s.keys("esc")
	s.want("> connection table full")
}

func TestDrillDown(t *testing.T) {
	s := show(t)
	s.keys("5", "down", "enter")
	if s.filter.State != "TIME_WAIT" || s.filter.Protocol != flow.TCP {
		t.Errorf("filter %+v", s.filter)
	}
	s.want("connections of tcp TIME_WAIT", "-> 192.0.2.80:443", "TIME_WAIT")
	s.keys("enter")
	s.want("source translated to 203.0.113.5:2000, destination to 10.9.0.2:443", "closing: evicted when")
	s.keys("esc", "esc")
	s.want("[5 States]", "> tcp TIME_WAIT")
	for page, want := range map[string]func(f conntrack.Filter) bool{
		"1": func(f conntrack.Filter) bool { return f.Source.IsSingleIP() },
		"2": func(f conntrack.Filter) bool { return f.Dest.String() == "198.51.100.7/32" },
		"3": func(f conntrack.Filter) bool { return f.DestPort.First == 443 && f.Dest.IsSingleIP() },
		"4": func(f conntrack.Filter) bool {
			return f.TranslatedSource.String() == "203.0.113.5/32" && f.TranslatedDestPort.First == 443
		},
	} {
		s.keys(page, "enter")
		if !want(s.filter) {
			t.Errorf("page %s asks for %+v", page, s.filter)
		}
		s.keys("esc")
	}
}

// TestRowsOpenWhatTheyCount: a row counts as many connections as it opens.
func TestRowsOpenWhatTheyCount(t *testing.T) {
	addr := func(s string) conntrack.Addr { return conntrack.AddrOf(netip.MustParseAddr(s)) }
	var all []conntrack.Entry
	for i := range 24 {
		e := entry(4 * i) // by DNAT
		e.Reply.SourcePort = uint16(443 + i%3)
		switch i % 4 {
		case 1:
			e.Protocol, e.State, e.Status = flow.UDP, 0, conntrack.SeenReply
		case 2:
			e.Protocol, e.State = flow.UDP, 0
		case 3: // a ping, masqueraded
			e.Protocol, e.State = flow.ICMP, 0
			e.Original.DestPort = e.Original.SourcePort
			e.Reply.Source, e.Reply.SourcePort = addr("192.0.2.80"), e.Reply.DestPort
		}
		all = append(all, e)
	}
	s := conntrack.NewSummary(conntrack.BySource | conntrack.ByDest | conntrack.ByService | conntrack.ByBackend | conntrack.BySNATPort)
	for i := range all {
		s.Add(&all[i])
	}
	for _, page := range []tab{tabSources, tabDests, tabServices, tabSNAT, tabStates} {
		for _, r := range tableRows(page, s) {
			opened := 0
			for i := range all {
				if r.filter.Matches(&all[i]) {
					opened++
				}
			}
			if r.cells[0] != group(uint32(opened)) {
				t.Errorf("%s: %s counts %s connections and opens %d", tabNames[page], r.key, r.cells[0], opened)
			}
		}
	}
}

func TestSort(t *testing.T) {
	s := show(t)
	s.keys("3", "s")
	s.want("SERVICE OR BACKEND (->)v")
	if first := s.rows()[0].key; first != "-> tcp 10.9.0.2:443" {
		t.Errorf("by name the first row is %s", first)
	}
	s.keys("s", "r")
	s.want("ENTRIES^")
	if rows := s.rows(); rows[0].cells[0] != "250" || rows[len(rows)-1].cells[0] != "750" {
		t.Errorf("ascending by entries: %v", rows)
	}
	s.keys("s", "s", "s", "s", "s")
	if s.currentPage().sort != -1 {
		t.Errorf("after all columns the order is %d", s.currentPage().sort)
	}
}

func TestFilterTyped(t *testing.T) {
	s := show(t)
	s.keys("3", "/", "1", "9", "2")
	s.want("/192_", "192.0.2.80")
	if rows := s.rows(); len(rows) != 1 {
		t.Errorf("%d rows match 192", len(rows))
	}
	s.keys("enter")
	s.want("filter 192")
	s.keys("/", "backspace", "backspace", "backspace", "!", "1", "9", "2", "enter")
	if rows := s.rows(); len(rows) != 2 {
		t.Errorf("%d rows do not match 192", len(rows))
	}
	s.keys("/", "(")
	s.want("not a regular expression yet")
	s.keys("esc")
	if rows := s.rows(); len(rows) != 3 {
		t.Errorf("%d rows after esc", len(rows))
	}
	s.keys("/", "ä", "backspace")
	if s.typed != "" || s.typedErr != nil {
		t.Errorf("after a letter of two bytes was taken back: %q, %v", s.typed, s.typedErr)
	}
	s.keys("esc", "/", "q")
	if s.typing != true {
		t.Error("q ended the typing")
	}
}

func TestPause(t *testing.T) {
	s := show(t)
	s.keys("p")
	s.want("PAUSED")
	calls := s.calls["counts"]
	for f := fetchCounts; f <= fetchProfile; f++ {
		_, cmd := s.Update(dueMsg(f))
		s.run(cmd)
	}
	if s.calls["counts"] != calls {
		t.Error("a paused view reads")
	}
	s.keys("p")
	if s.calls["counts"] != calls+1 || s.calls["table"] != 2 {
		t.Errorf("after the pause: %v", s.calls)
	}
}

func TestOneTimerEach(t *testing.T) {
	s := show(t)
	if !s.due[fetchTable] {
		t.Fatal("no timer after the first dump")
	}
	s.keys("u") // read now: its end must not start a second chain of timers
	if s.calls["table"] != 2 {
		t.Errorf("u read the table %d times", s.calls["table"]-1)
	}
	if _, cmd := s.Update(tableMsg{s.table, nil}); cmd != nil {
		t.Error("a second timer was started")
	}
}

func TestErrorsAreShownAndRetried(t *testing.T) {
	s := show(t)
	s.fake.err = errors.New("permission denied")
	s.due[fetchCounts] = false
	s.run(s.start(fetchCounts))
	s.want("cannot see: permission denied", "table 1,000")
	if !s.due[fetchCounts] {
		t.Error("nothing is retried")
	}
}

// TestErrorOfAPageStays: numbers that can be read do not hide that the page cannot.
func TestErrorOfAPageStays(t *testing.T) {
	for _, key := range []string{"6", "7"} {
		s := show(t)
		s.fake.err = errors.New("permission denied")
		s.keys(key)
		s.fake.err = nil
		s.due[fetchCounts] = false
		s.run(s.start(fetchCounts))
		s.want("cannot see: permission denied", "ok: ")
		s.keys("1")
		if strings.Contains(s.drawScreen(), "denied") {
			t.Errorf("the sources can be seen:\n%s", s.drawScreen())
		}
	}
	s := show(t)
	s.fake.err = errors.New("permission denied")
	s.keys("enter")
	s.want("connections of", "cannot see: permission denied")
}

// TestRowOpenedWhileAnotherIsRead: the connections of the new row appear too.
func TestRowOpenedWhileAnotherIsRead(t *testing.T) {
	s := show(t)
	slow := s.open()
	s.keys("esc", "down")
	if cmd := s.open(); cmd != nil {
		t.Fatal("two dumps at a time")
	}
	_, next := s.Update(slow())
	if next == nil {
		t.Fatalf("nothing reads it:\n%s", s.drawScreen())
	}
	s.run(next)
	if !s.flows.loaded || len(s.flows.list) == 0 || s.fake.filter != s.flows.filter {
		t.Errorf("loaded %v, %d connections", s.flows.loaded, len(s.flows.list))
	}
}

// TestNotSeen: the view shows which data are missing.
func TestNotSeen(t *testing.T) {
	s := show(t)
	s.counts.Blind, s.table.Blind = []string{"8 network namespaces may not be entered"}, []string{"8 network namespaces may not be entered", "flows of ebpf: gone"}
	s.want("nothing runs short  (not seen: 8 network namespaces may not be entered")
	s.keys("?")
	s.want("not seen: 8 network namespaces may not be entered\n", "not seen: flows of ebpf: gone\n")
}
