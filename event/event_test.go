// SPDX-License-Identifier: Apache-2.0

package event

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestAfter: a reader gets every event once and in order, and the number of lost ones.
func TestAfter(t *testing.T) {
	l := New(4)
	begin := l.Last()
	if events, missed, _ := l.After(begin, 10); len(events) != 0 || missed != 0 {
		t.Errorf("of an empty list: %v, %d missed", events, missed)
	}
	_, _, added := l.After(begin, 10)
	for i := range 6 {
		l.Add(Event{Kind: Apply, Text: fmt.Sprint(i)})
	}
	select {
	case <-added:
	default:
		t.Error("a waiting reader is not woken")
	}
	for _, c := range []struct {
		after  uint64
		limit  int
		want   string
		missed uint64
	}{
		{begin, 10, "2 3 4 5", 2},
		{begin + 1, 2, "2 3", 1},
		{begin + 2, 10, "2 3 4 5", 0},
		{begin + 5, 10, "5", 0},
		{begin + 6, 10, "", 0},
		{0, 10, "2 3 4 5", 2},           // of an earlier process
		{begin + 100, 10, "2 3 4 5", 2}, // a process with a clock ahead
	} {
		events, missed, _ := l.After(c.after, c.limit)
		var got []string
		for i, e := range events {
			got = append(got, e.Text)
			if i > 0 && e.ID != events[i-1].ID+1 {
				t.Errorf("IDs %d and %d follow each other", events[i-1].ID, e.ID)
			}
		}
		if strings.Join(got, " ") != c.want || missed != c.missed {
			t.Errorf("after %d: %q, %d missed, want %q, %d", int64(c.after-begin), got, missed, c.want, c.missed)
		}
	}
	if l.Knows(0) || !l.Knows(begin) || !l.Knows(begin+6) || l.Knows(begin+7) {
		t.Error("it knows the IDs of others, or not its own")
	}
}

func TestLongTextsAreCut(t *testing.T) {
	l := New(1)
	l.Add(Event{Text: strings.Repeat("x", 5000), Error: strings.Repeat("y", 5000)})
	events, _, _ := l.After(0, 1)
	if e := events[0]; len(e.Text) != maxText || len(e.Error) != maxText {
		t.Errorf("texts of %d and %d bytes", len(e.Text), len(e.Error))
	}
	var none *Log
	none.Add(Event{}) // must not panic
}

// told applies readings at intervals of two seconds and returns the events.
func told(readings ...Reading) string {
	l := New(100)
	w := &Watch{Log: l}
	at := time.Unix(1000, 0)
	for _, r := range readings {
		w.compareReading(at, r)
		at = at.Add(2 * time.Second)
	}
	events, _, _ := l.After(0, 100)
	var lines []string
	for _, e := range events {
		text := e.Text
		if e.Ended {
			text = "ended: " + text
		}
		lines = append(lines, text)
	}
	return strings.Join(lines, "\n")
}

// TestGauges: each level is reported once, even if the fill stays near it.
func TestGauges(t *testing.T) {
	var readings []Reading
	for _, used := range []int{79, 80, 78, 81, 75, 96, 94, 97, 84, 79, 69, 79} {
		readings = append(readings, Reading{Gauges: []Gauge{{Table, "ebpf/flows4", used, 100}, {Ports, "ebpf/ports", 0, 0}}})
	}
	want := `ebpf/flows4: 80 of 100 entries are in use, 80 %
ebpf/flows4: 96 of 100 entries are in use, 96 %
ebpf/flows4: 84 of 100 entries are in use, 84 %
ended: ebpf/flows4: 69 of 100 entries are in use, 69 %`
	if got := told(readings...); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// TestFull: a nearly full table is reported with its current numbers as long as it is nearly full.
func TestFull(t *testing.T) {
	w := &Watch{Log: New(10)}
	for _, c := range []struct {
		used int
		want string
	}{{94, ""}, {95, "ebpf/flows: 95 of 100"}, {99, "ebpf/flows: 99 of 100"}, {86, "ebpf/flows: 86 of 100"}, {84, ""}} {
		w.compareReading(time.Unix(1000, 0), Reading{Gauges: []Gauge{{Table, "ebpf/flows", c.used, 100}}})
		if got := strings.Join(w.Full(), "\n"); !strings.HasPrefix(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("%d: %q, want %q", c.used, got, c.want)
		}
	}
}

// TestDrops: drops before the first reading are not reported; bursts and their end are.
func TestDrops(t *testing.T) {
	var readings []Reading
	for _, packets := range []uint64{1000, 1010, 1050, 1100, 1100, 1110, 1110, 1110, 1110, 1110} {
		readings = append(readings, Reading{Drops: []Dropped{{"ebpf/table-full", packets}}})
	}
	readings[2].Drops = append(readings[2].Drops, Dropped{"ebpf/no-port", 40}) // the first ones ever
	want := `ebpf/table-full: 20 packets a second are dropped
ebpf/no-port: 20 packets a second are dropped
ended: ebpf/table-full: packets are dropped no more`
	if got := told(readings...); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func TestWarnings(t *testing.T) {
	got := told(Reading{Warnings: []string{"a", "b"}}, Reading{Warnings: []string{"b"}}, Reading{Warnings: []string{"b"}}, Reading{})
	if want := "a\nb\nended: a\nended: b"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}
