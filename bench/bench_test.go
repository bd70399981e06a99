// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// fixed returns a suite with rows that report given values.
func fixed(limit, row float64) Suite {
	say := func(v float64) func(*Trial) error {
		return func(t *Trial) error { t.Report("rate", v); return nil }
	}
	return Suite{
		Name: "fixed", Title: "A suite that needs no network", About: "Nothing is measured.",
		Points: []Point{{Name: "a"}, {Name: "b"}}, Metrics: []Metric{{Name: "rate", Unit: "Mpps", Digits: 2}}, Limit: "limit",
		Rows: []Row{
			{Name: "limit", Run: say(limit)},
			{Name: "row", Run: say(row)},
			{Name: "broken", Run: func(*Trial) error { return errors.New("a cable is missing") }},
			{Name: "absent", Absent: func(p Point) string {
				if p.Name == "a" {
					return "the moon is full"
				}
				return ""
			}, Run: say(limit / 4)},
		},
		Comparisons: []Comparison{{What: "row / limit", Row: "row", Against: "limit", Published: 1, PublishedAgainst: 4, Source: "a book"}},
		NotShown:    []string{"Anything."},
	}
}

func run(t *testing.T, s Suite) *Result {
	t.Helper()
	r, err := Run(context.Background(), s, Options{Reps: 3})
	if err != nil {
		t.Fatal(err)
	}
	// Other programs on this machine do not matter here.
	r.Noise = slices.DeleteFunc(r.Noise, func(n string) bool { return strings.HasPrefix(n, "other programs") })
	return r
}

func TestResult(t *testing.T) {
	r := run(t, fixed(4, 2))
	c := r.Cell("row", "a", "rate")
	if c == nil || c.Median != 2 || c.Share != 0.5 || len(c.Raw) != 3 || c.Spread != 0 {
		t.Errorf("cell %+v", c)
	}
	if len(r.Ratios) != 1 || r.Ratios[0].Ours != 0.5 || r.Ratios[0].OfRatios != 2 {
		t.Errorf("ratios %+v", r.Ratios)
	}
	if r.Cell("absent", "a", "rate") != nil || r.Cell("absent", "b", "rate") == nil {
		t.Error("the absent point was measured, or the other was not")
	}
	if len(r.Noise) != 0 {
		t.Errorf("constant figures are called noisy: %v", r.Noise)
	}
}

// TestStopped keeps the measurements before an interruption, and reports where it ended.
func TestStopped(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	s, runs := fixed(4, 2), 0
	row := s.Rows[1].Run
	s.Rows[1].Run = func(t *Trial) error {
		if runs++; runs == 4 { // two points of two repetitions
			stop()
		}
		return row(t)
	}
	r, err := Run(ctx, s, Options{Reps: 3})
	if !errors.Is(err, context.Canceled) || r == nil {
		t.Fatalf("result %v, %v", r, err)
	}
	if c := r.Cell("row", "a", "rate"); c == nil || len(c.Raw) != 2 || r.Reps != 2 {
		t.Errorf("%d repetitions, cell %+v", r.Reps, c)
	}
	if c := r.Cell("row", "b", "rate"); c == nil || len(c.Raw) != 1 {
		t.Errorf("what was stopped counts: %+v", c)
	}
	if !slices.ContainsFunc(r.Noise, func(n string) bool { return strings.Contains(n, "stopped in repetition 2 of 3") }) {
		t.Errorf("noise %q", r.Noise)
	}
	stop()
	if r, err := Run(ctx, s, Options{Reps: 3}); r != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("nothing was measured: %v, %v", r, err)
	}
}

// TestFailedRepetitions: a failed repetition, or one without a number, affects neither the others nor the file.
func TestFailedRepetitions(t *testing.T) {
	s, runs := fixed(4, 2), 0
	s.Rows[1].Run = func(t *Trial) error {
		switch runs++; runs {
		case 1:
			t.Report("rate", math.Inf(1))
		case 2:
			t.Report("rate", math.NaN())
		case 3:
			return errors.New("a cable came off")
		default:
			t.Report("rate", 2)
		}
		return nil
	}
	r := run(t, s)
	for point, want := range map[string]int{"a": 1, "b": 2} {
		if c := r.Cell("row", point, "rate"); c == nil || len(c.Raw) != want || c.Median != 2 {
			t.Errorf("point %s: %+v", point, c)
		}
	}
	path := filepath.Join(t.TempDir(), "result.json")
	if err := r.Save(path); err != nil {
		t.Error(err)
	}
	if again, err := Load(path); err != nil || again.Cell("row", "b", "rate") == nil {
		t.Errorf("read back: %v", err)
	}
	var text strings.Builder
	if err := r.WriteTable(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"row (a): not in every repetition: failed: a cable came off", "row (b): not in every repetition: failed: rate: NaN Mpps", "broken: not measured: failed: a cable is missing",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table does not say %q:\n%s", want, &text)
		}
	}
}

// TestAims: an aim is missed if the figure is below it. An aim may be a figure alone or a ratio to another
// point. It is evaluated anew from the repetitions.
func TestAims(t *testing.T) {
	s := fixed(4, 2)
	s.Comparisons = append(goals("row / limit", "row", "limit", map[string]float64{"a": 0.6, "b": 0.5}),
		Comparison{What: "alone", Row: "limit", Published: 5, Source: goal},
		Comparison{What: "b / a", Row: "row", Against: "row", Point: "b", AgainstPoint: "a", Published: 0.9, Source: goal})
	r := run(t, s)
	r.summarize(s)
	got := ""
	for _, q := range r.Ratios {
		got += fmt.Sprintf("%s %g %v; ", q.What, q.Ours, q.Missed)
	}
	if want := "row / limit, a 0.5 true; row / limit, b 0.5 false; alone 4 true; b / a 1 false; "; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// TestHostsTable: the host's limit is lowered with consent only, and restored, also if a row sets it twice.
func TestHostsTable(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	trial := &Trial{Context: t.Context()}
	if err := trial.setConntrackMax(1); err == nil || !strings.Contains(err.Error(), "--allow-host-sysctl") {
		t.Errorf("lowered without consent: %v", err)
	}
	before, err := readConntrackMax() // the limit is borrowed, so no other test changes it
	if err != nil {
		t.Fatal(err)
	}
	trial.lower = true
	for _, n := range []int{before - 1, before - 2} {
		if err := trial.setConntrackMax(n); err != nil {
			t.Fatal(err)
		}
		if now, _ := readConntrackMax(); now != n {
			t.Errorf("the limit is %d, want %d", now, n)
		}
	}
	if err := trial.end(); err != nil {
		t.Error(err)
	}
	if now, _ := readConntrackMax(); now != before {
		t.Errorf("%d stayed behind, %d was there", now, before)
	}
}

// TestNeededTable: a limit that is too low only until another program restores it is not changed.
func TestNeededTable(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	trial := &Trial{Context: t.Context()}
	before, err := trial.borrowConntrack()
	if err != nil {
		t.Fatal(err)
	}
	if err := writeConntrackMax(before - 2); err != nil {
		t.Fatal(err)
	}
	other := &Trial{Context: t.Context()}
	needed := make(chan error)
	go func() { needed <- other.needConntrack(before - 1) }()
	time.Sleep(50 * time.Millisecond) // lets the check find a limit that is too low; without the pause the test would always pass
	if err := trial.end(); err != nil {
		t.Error(err)
	}
	if err := <-needed; err != nil {
		t.Error(err)
	}
	if now, _ := readConntrackMax(); now != before {
		t.Errorf("the limit is %d, want %d", now, before)
	}
	if err := other.end(); err != nil {
		t.Error(err)
	}
}

// TestDaemonsChildren: if the children of a program keep its output open, the test does not block. A program
// that ends early is an error.
func TestDaemonsChildren(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "daemon", Nodes: []lab.NodeSpec{{Name: "server"}}})
	ctx, cancel := context.WithCancel(t.Context())
	trial := &Trial{Context: ctx}
	if _, err := daemon(trial, l.Node("server"), nil, "sh", "-c", "sleep 1000 & wait"); err != nil {
		t.Fatal(err)
	}
	cancel()
	done := make(chan error, 1)
	go func() { done <- trial.cleanup[len(trial.cleanup)-1]() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the child keeps the bench waiting")
	}
	trial.cleanup[0]() // its directory
	trial = &Trial{Context: t.Context()}
	cmd, err := daemon(trial, l.Node("server"), nil, "sh", "-c", "echo no room >&2")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { trial.cleanup[0]() }() // its directory
	labtest.Eventually(t, time.Minute, "the program to end", func() error {
		if cmd.Process.Signal(unix.Signal(0)) == nil {
			return errors.New("it runs")
		}
		return nil
	})
	// Its output may end a little later than the process.
	labtest.Eventually(t, time.Minute, "word of it", func() error {
		if err := trial.cleanup[len(trial.cleanup)-1](); err == nil || !strings.Contains(err.Error(), "ended early: no room") {
			return fmt.Errorf("a program that ended: %w", err)
		}
		return nil
	})
}

// TestMaxReps: if runs take long, fewer repetitions are made, and the result has their number.
func TestMaxReps(t *testing.T) {
	s := fixed(4, 2)
	s.MaxReps, s.Points[1].MaxReps = 2, 1
	r, err := Run(context.Background(), s, Options{Reps: 5})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := r.Cell("row", "a", "rate"), r.Cell("row", "b", "rate"); r.Reps != 2 || len(a.Raw) != 2 || len(b.Raw) != 1 {
		t.Errorf("%d repetitions, cells %+v %+v", r.Reps, a, b)
	}
}

func TestTables(t *testing.T) {
	r := run(t, fixed(4, 2))
	var text, markdown bytes.Buffer
	if err := r.WriteTable(&text); err != nil {
		t.Fatal(err)
	}
	r.WriteMarkdown(&markdown)
	for _, out := range []string{text.String(), markdown.String()} {
		for _, want := range []string{"2.00 (0.50)", "the moon is full", "a cable is missing", "a book"} {
			if !strings.Contains(out, want) {
				t.Errorf("%q is missing in:\n%s", want, out)
			}
		}
	}
	d := xml.NewDecoder(bytes.NewReader(r.Chart()))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the chart is not XML: %v", err)
		}
	}
}

// TestSuitesAreConsistent checks names that refer to each other, and the validity of every configuration of
// Sluice's rows.
func TestSuitesAreConsistent(t *testing.T) {
	for _, s := range Suites() {
		rows, points, metrics := map[string]bool{}, map[string]bool{}, map[string]bool{}
		for _, r := range s.Rows {
			if rows[r.Name] {
				t.Errorf("%s: two rows %q", s.Name, r.Name)
			}
			rows[r.Name] = true
		}
		for _, p := range s.Points {
			points[p.Name] = true
		}
		for _, m := range s.Metrics {
			metrics[m.Name] = true
		}
		if s.Limit != "" && !rows[s.Limit] {
			t.Errorf("%s: limit row %q", s.Name, s.Limit)
		}
		for _, c := range s.Comparisons {
			if !rows[c.Row] || c.Against != "" && !rows[c.Against] || c.AgainstPoint != "" && !points[c.AgainstPoint] || c.Point != "" && !points[c.Point] || c.Metric != "" && !metrics[c.Metric] {
				t.Errorf("%s: comparison %q names what is not there", s.Name, c.What)
			}
		}
		if len(s.NotShown) == 0 || s.About == "" {
			t.Errorf("%s: does not say what it measures and what not", s.Name)
		}
	}
	for _, yaml := range []string{
		service{mode: "dnat", protocol: "udp", port: 53, vip: vip4, backend: server4}.yaml(Point{Value: 1}),
		service{mode: "fullnat", protocol: "udp", attach: "xdp", port: 53, vip: vip6, backend: server4}.yaml(Point{Value: 1}),
		service{mode: "fullnat", protocol: "udp", attach: "tc", port: 53, vip: vip4, backend: server6}.yaml(Point{Value: 1}),
		service{mode: "dsr", protocol: "tcp", attach: "xdp", port: 80, vip: vip4, backend: server4}.yaml(Point{Value: 1}),
		snatYAML("xdp")(Point{Value: 4_000_000}),
		manyServices(Point{Name: "1,000 services", Value: 1000}, "xdp"),
		manyServices(Point{Name: "1,000 backends", Value: 1000}, ""),
	} {
		if _, err := config.Decode("bench", []byte(yaml)); err != nil {
			t.Errorf("%v in\n%.300s", err, yaml)
		}
	}
}

// TestFlood: no open connection is lost to a flood of SYNs.
func TestFlood(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack)
	s, err := Find("flood")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(context.Background(), s, Options{Reps: 1, Seconds: 2, AllowHostSysctl: true, Rows: regexp.MustCompile("ebpf (dnat|fullnat|snat) .xdp")})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 4 {
		t.Fatalf("%d rows", len(r.Rows))
	}
	for _, row := range r.Rows[1:] { // the first one is the unit
		lost, flood := row.findCell("10,000 open", "lost"), row.findCell("10,000 open", "flood")
		if lost == nil || flood == nil || lost.Median != 0 || flood.Median == 0 {
			t.Errorf("%s: lost %+v, flood %+v, absent %v", row.Name, lost, flood, row.Absent)
		}
	}
}

// TestRows runs short trials of representative rows.
func TestRows(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables)
	profiles := t.TempDir()
	for suite, rows := range map[string]string{
		"packets": "redirect|^kernel forwarding|^nft DSR", "flows": "redirect|^kernel", "drop": "limit|nft ingress", "scale": "^nft DNAT",
	} {
		s, err := Find(suite)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(context.Background(), s, Options{Reps: 1, Seconds: 0.05, Rows: regexp.MustCompile(rows), Points: regexp.MustCompile("^(1 |HTTP|1,000$)"), Profile: profiles})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range r.Rows {
			if len(row.Cells) != 1 || row.Cells[0].Median <= 0 {
				t.Errorf("%s: %s: %+v, absent %v", suite, row.Name, row.Cells, row.Absent)
			}
			if c := row.Cells; len(c) == 1 && (len(c[0].Per) != 1 || c[0].Per[0] <= 0) {
				t.Errorf("%s: %s: no yardstick beside it: %+v", suite, row.Name, c[0])
			}
		}
	}
	for _, name := range []string{"flows-kernel-forwarding-no-nat-http", "scale-nft-dnat-1-000", "scale-nft-dnat-1-000-new-flows"} {
		if b, err := os.ReadFile(filepath.Join(profiles, name+folded)); err != nil || !bytes.Contains(b, []byte(" ")) {
			t.Errorf("the profile of a row: %v, %.200q", err, b)
		}
	}
}

// TestFullNATRows: fullnat by XDP is measured in all families, with and without fast transmit.
func TestFullNATRows(t *testing.T) {
	s := fnat64Suite()
	for _, families := range []string{"44", "66", "64", "46"} {
		for _, transmit := range []string{"", ", no fast transmit"} {
			name := "sluice ebpf FNAT" + families + " (xdp)" + transmit
			if !slices.ContainsFunc(s.Rows, func(r Row) bool { return r.Name == name }) {
				t.Errorf("no row %q", name)
			}
		}
	}
}

// TestGatewaysMemory: a gateway that only forwards uses no memory per connection, connection tracking has an
// entry for each, and the eBPF datapath has its tables.
func TestGatewaysMemory(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack)
	if why := tool("nginx")(Point{}); why != "" {
		t.Skip(why)
	}
	const entry, slots = 384, 64 + 128 // bytes
	const connections = 1000
	ebpf := func(t *Trial, n *network) error {
		return applySluice(t, n, "ebpf", service{attach: "tc"}.configHead(Point{})+"nat:\n  - {name: office, type: masquerade, out: lan0}\n")
	}
	for _, c := range []struct {
		name     string
		set      setup
		low, top float64
	}{
		{"forwarding", nil, 0, 0}, {"nft", nftMasquerade, connections * entry, (connections + 20) * entry},
		{"ebpf", ebpf, 65536 * slots, 10 * 65536 * slots}, {"forwarding again", nil, 0, 0},
	} {
		var got float64
		row := gatewayRow(c.name, "", 0, c.set, func(t *Trial, n *network) error {
			if _, err := startWeb(t, n); err != nil {
				return err
			}
			for range connections {
				c, err := n.client.Dial(t, nil, "tcp", netip.AddrPortFrom(server4, 80).String())
				if err != nil {
					return err
				}
				defer c.Close()
			}
			bytes, err := n.connectionMemory(os.Getpid()) // the datapath is in this process
			got = float64(bytes)
			return err
		})
		trial := &Trial{Context: t.Context(), values: map[string]reportedValue{}}
		if err := errors.Join(row.Run(trial), trial.end()); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got < c.low || got > c.top {
			t.Errorf("%s: %.0f bytes, want %.0f to %.0f", c.name, got, c.low, c.top)
		}
	}
}
