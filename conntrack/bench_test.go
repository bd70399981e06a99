// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// entriesFlag chooses the size of the table that BenchmarkTable reads.
var entriesFlag = flag.Int("entries", 1_000_000, "tracked connections that BenchmarkTable makes and reads")

// BenchmarkTable creates a table of masqueraded connections in a namespace and reads it in four ways, in turns, so
// that a change of the machine's speed affects all alike. The ways are: undecoded (the kernel's share), decoded,
// summarized in every dimension, and by conntrack -L. It reports the shortest time of each, which other work
// disturbed least, and the ratios:
func BenchmarkTable(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.Tool("conntrack"))
	n := *entriesFlag
	raiseMax(b, uint64(n)+100_000)
	ns := alone(b)
	fillTable(b, ns, n)
	ways := []struct {
		name string
		run  func() (int, error)
	}{
		{"drain", func() (int, error) { return drain(ns) }},
		{"dump", func() (int, error) { return dump(ns) }},
		{"aggregate", func() (int, error) { return aggregate(ns) }},
		{"conntrack", func() (int, error) { return conntrackTool(ns) }},
	}
	times := map[string][]time.Duration{}
	const rounds = 5
	for b.Loop() {
		for range rounds {
			for _, w := range ways {
				runtime.GC()
				start := time.Now()
				got, err := w.run()
				times[w.name] = append(times[w.name], time.Since(start))
				if err != nil || got != n {
					b.Fatalf("%s read %d of %d entries: %v", w.name, got, n, err)
				}
			}
		}
	}
	best := func(name string) float64 { return slices.Min(times[name]).Seconds() }
	for _, w := range ways {
		b.ReportMetric(best(w.name), w.name+"-s")
	}
	b.ReportMetric(best("aggregate")/best("drain"), "aggregate/drain")
	b.ReportMetric(best("conntrack")/best("aggregate"), "conntrack/aggregate")
	b.ReportMetric(0, "ns/op")
}

func drain(ns netdev.Namespace) (int, error) {
	c, err := OpenIn(ns)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return c.Drain(context.Background())
}

func dump(ns netdev.Namespace) (n int, err error) {
	c, err := OpenIn(ns)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	err = c.Dump(context.Background(), nil, func(*Entry) error { n++; return nil })
	return n, err
}

func aggregate(ns netdev.Namespace) (int, error) {
	s := NewSummary(BySource | ByDest | ByService | BySNATPort)
	err := s.AddNamespace(context.Background(), ns, nil)
	if len(s.Sources(10)) != 10 {
		return 0, fmt.Errorf("sources: %v", s.Sources(10))
	}
	return int(s.Total.Entries), err
}

func conntrackTool(ns netdev.Namespace) (n int, err error) {
	err = ns.Do(func() error {
		var told bytes.Buffer
		cmd := exec.Command("conntrack", "-L")
		cmd.Stderr = &told // "conntrack v1.4.7 (conntrack-tools): 1000 flow entries have been shown."
		if err := cmd.Run(); err != nil {
			return err
		}
		_, tail, _ := strings.Cut(told.String(), "): ")
		n, err = strconv.Atoi(strings.Fields(tail)[0])
		return err
	})
	return n, err
}

// TestTableMemory reads a table in another process and reports its maximum resident memory. The flag -entries sets
// the size.
func TestTableMemory(t *testing.T) {
	if os.Getenv("SLUICE_TABLE_MEMORY") == "" {
		t.Skip("reads a table of SLUICE_TABLE_MEMORY entries and reports the memory; a measurement, run by hand")
	}
	n, err := strconv.Atoi(os.Getenv("SLUICE_TABLE_MEMORY"))
	if err != nil {
		t.Fatal(err)
	}
	labtest.Require(t, labtest.Root)
	raiseMax(t, uint64(n)+100_000)
	ns := alone(t)
	fillTable(t, ns, n)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestChildReads$", "-test.v")
	cmd.Env = append(os.Environ(), "SLUICE_TABLE_NAMESPACE="+ns.Path)
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ru := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	t.Logf("%s", out)
	t.Logf("%d entries in %v: %d kB resident at most, CPU %v user, %v system", n, time.Since(start).Round(time.Millisecond),
		ru.Maxrss, cmd.ProcessState.UserTime(), cmd.ProcessState.SystemTime())
}

// TestChildReads is the other process of TestTableMemory.
func TestChildReads(t *testing.T) {
	path := os.Getenv("SLUICE_TABLE_NAMESPACE")
	if path == "" {
		t.Skip("runs as a child of TestTableMemory")
	}
	ns, err := netdev.NamespaceAt(path)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, err := aggregate(ns)
	runtime.ReadMemStats(&after)
	if err != nil || n == 0 {
		t.Fatalf("%d entries: %v", n, err)
	}
	t.Logf("%.4f allocations and %.2f bytes for each entry", float64(after.Mallocs-before.Mallocs)/float64(n),
		float64(after.TotalAlloc-before.TotalAlloc)/float64(n))
}

// fillTable makes n entries and checks that they are all there.
func fillTable(t testing.TB, ns netdev.Namespace, n int) {
	t.Helper()
	c := openIn(t, ns)
	part := make([]Entry, 0, 10*batch)
	made := 0
	for i := 0; i < n; i++ {
		if part = append(part, masqueraded(i, 4000)); len(part) < cap(part) && i < n-1 {
			continue
		}
		got, err := c.Insert(context.Background(), part)
		if made += got; err != nil {
			t.Fatalf("after %d entries: %v", made, err)
		}
		part = part[:0]
	}
	if made != n {
		t.Fatalf("made %d of %d entries", made, n)
	}
}

// raiseMax raises the host's limit of tracked connections until the test ends.
// It holds the lock that every test which writes host-wide settings takes.
func raiseMax(t testing.TB, limit uint64) {
	t.Helper()
	const path = "/proc/sys/net/netfilter/nf_conntrack_max"
	labtest.ChangeHostSettings(t)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if now, _ := strconv.ParseUint(strings.TrimSpace(string(before)), 10, 64); now >= limit {
		return
	}
	if err := os.WriteFile(path, []byte(strconv.FormatUint(limit, 10)), 0o644); err != nil {
		labtest.Lacks(t, "nf_conntrack_max can be written only in the host's first network namespace: %v", err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, before, 0o644); err != nil {
			t.Errorf("restoring nf_conntrack_max: %v", err)
		}
	})
}

// BenchmarkEntry decodes one message and counts it in every dimension: the cost of this package per connection,
// without the kernel's.
func BenchmarkEntry(b *testing.B) {
	body := unhex(b, goldenTCP)
	var e Entry
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := e.decode(body); err != nil {
				b.Fatal(err)
			}
		}
	})
	entries := make([]Entry, 1<<16)
	for i := range entries {
		entries[i] = masqueraded(i, 4000)
	}
	b.Run("add", func(b *testing.B) {
		b.ReportAllocs()
		s := NewSummary(BySource | ByDest | ByService | BySNATPort)
		i := 0
		for b.Loop() {
			s.Add(&entries[i&(len(entries)-1)])
			i++
		}
	})
}
