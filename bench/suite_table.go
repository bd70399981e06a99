// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

func tableSuite() Suite {
	s := Suite{
		Name: "table", Title: "The table of connection tracking, read by a program",
		About: "The gateway's connection table holds masqueraded TCP connections of 4,096 clients to 4,000 servers. Each program reads the whole " +
			"table: `conntrack -L` prints every entry, to a pipe whose reader drops it; `sluice conns` adds the entries up by state, source, " +
			"service, destination and SNAT port, and prints the sums. Time is that from the start of the program to its end, memory the most " +
			"that it had resident, CPU its own and the kernel's on its behalf.",
		AllCPUs: true, Seconds: 1, MaxReps: 5,
		Points: []Point{{Name: "100,000 entries", Value: 100_000}, {Name: "1,000,000 entries", Value: 1_000_000}},
		Metrics: []Metric{
			{Name: "rate", Unit: "1000 entries/s"}, {Name: "time", Unit: "s", LowerIsBetter: true, Digits: 2},
			{Name: "memory", Unit: "MB", LowerIsBetter: true, Digits: 1, Absolute: true}, {Name: "CPU", Unit: "s", LowerIsBetter: true, Digits: 2},
		},
		NotShown: []string{"A table that changes while it is read: the entries here are idle."},
	}
	read := func(name, about string, absent func(Point) string, args func(*network) ([]string, error), entries func(out, words []byte) (int, error)) {
		s.Rows = append(s.Rows, Row{Name: name, About: about, Absent: absent, Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			if err := t.needConntrack(t.Point.Value + 1<<17); err != nil {
				return err
			}
			if err := n.fillTable(t, t.Point.Value); err != nil {
				return err
			}
			words, err := args(n)
			if err != nil {
				return err
			}
			return n.reportReader(t, entries, words...)
		}})
	}
	read("conntrack -L", "the program of conntrack-tools", tool("conntrack"),
		func(*network) ([]string, error) { return []string{"conntrack", "-L"}, nil }, shownEntries)
	read("sluice conns", "sums in every dimension", nil, func(n *network) ([]string, error) {
		self, err := os.Executable()
		return []string{self, "conns", "--json", "--window", "1ms", "--netns", n.gateway.Name()}, err
	}, summedEntries)
	// 1.9 s for a million entries.
	s.Comparisons = goals("entries added up, 1000/s", "sluice conns", "", map[string]float64{"1,000,000 entries": 1e6 / 1.9 / 1e3})
	return s
}

// fillTable makes masqueraded connections in the gateway's table.
func (n *network) fillTable(t *Trial, entries int) error {
	var c *conntrack.Conn
	err := n.gateway.Do(func() (err error) {
		c, err = conntrack.Open()
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	part := make([]conntrack.Entry, 0, 4096)
	made := 0
	for i := range entries {
		if part = append(part, masqueradedEntry(i)); len(part) < cap(part) && i < entries-1 {
			continue
		}
		some, err := c.Insert(t, part)
		if made += some; err != nil {
			return fmt.Errorf("after %d entries: %w", made, err)
		}
		part = part[:0]
	}
	if made != entries {
		return fmt.Errorf("%d of %d entries were made", made, entries)
	}
	return nil
}

// masqueradedEntry is one of many connections of 4,096 clients to 4,000 servers behind four addresses.
func masqueradedEntry(i int) conntrack.Entry {
	const clients, servers, addresses = 4096, 4000, 4
	client := conntrack.AddrOf(netip.AddrFrom4([4]byte{10, 0, byte(i % clients >> 8), byte(i)}))
	public := conntrack.AddrOf(netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i%addresses)}))
	server := conntrack.AddrOf(netip.AddrFrom4([4]byte{198, 51, byte(i / addresses % servers >> 8), byte(i / addresses % servers)}))
	return conntrack.Entry{
		Family: unix.AF_INET, Protocol: flow.TCP, State: uint8(conntrack.TCPEstablished), Timeout: 3600,
		Status:   conntrack.Assured | conntrack.SeenReply,
		Original: conntrack.Tuple{Source: client, Dest: server, SourcePort: uint16(1024 + i/clients), DestPort: 443},
		Reply:    conntrack.Tuple{Source: server, Dest: public, SourcePort: 443, DestPort: uint16(1024 + i/(addresses*servers))},
	}
}

// reportReader runs a program on the gateway and reports its time and memory. entries returns the number that the
// program has read, from its output and its messages.
func (n *network) reportReader(t *Trial, entries func(out, words []byte) (int, error), args ...string) error {
	cmd := n.gateway.Command(t, args[0], args[1:]...)
	var out tailBuffer
	var words bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &words
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(t)
	peak := make(chan float64)
	go func() { peak <- watchPeak(ctx, cmd.Process.Pid, args[0]) }()
	err := cmd.Wait()
	took := time.Since(start).Seconds()
	stop()
	memory := <-peak
	if err != nil {
		return fmt.Errorf("%s: %w: %.300s", args[0], err, words.Bytes())
	}
	read, err := entries(out.kept, words.Bytes())
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	if read != t.Point.Value {
		return fmt.Errorf("%s has read %d of %d entries", args[0], read, t.Point.Value)
	}
	t.Report("rate", float64(read)/took/1e3)
	t.Report("time", took)
	t.Report("memory", memory/1e6)
	t.Report("CPU", (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds())
	return nil
}

// watchPeak returns the peak resident size in bytes of a process while it runs the program. The process begins as
// another program, which enters the namespace, so the figure of getrusage includes that one.
func watchPeak(ctx context.Context, pid int, program string) (peak float64) {
	program, _ = exec.LookPath(program) // the row requires the program, so it exists
	for wait(ctx, 5) == nil {
		if running, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || !sameFile(running, program) {
			continue
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if m := peakLine.FindSubmatch(status); err == nil && m != nil {
			kb, _ := strconv.ParseFloat(string(m[1]), 64) // the expression admits digits only
			peak = max(peak, kb*1024)
		}
	}
	return peak
}

var peakLine = regexp.MustCompile(`(?m)^VmHWM:\s+(\d+) kB$`)

func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	other, err := os.Stat(b)
	return err == nil && os.SameFile(one, other)
}

// tailBuffer keeps the last part of what is written.
type tailBuffer struct{ kept []byte }

func (b *tailBuffer) Write(p []byte) (int, error) {
	const most = 1 << 20
	if len(p) >= most {
		b.kept = append(b.kept[:0], p[len(p)-most:]...)
		return len(p), nil
	}
	b.kept = append(b.kept, p...)
	if over := len(b.kept) - most; over > most {
		b.kept = append(b.kept[:0], b.kept[over:]...)
	}
	return len(p), nil
}

var _ io.Writer = (*tailBuffer)(nil)

// shownEntries parses "conntrack v1.4.7 (conntrack-tools): 1000 flow entries have been shown."
func shownEntries(_, words []byte) (int, error) {
	_, tail, _ := strings.Cut(string(words), "): ")
	count, _, _ := strings.Cut(tail, " ")
	return strconv.Atoi(count)
}

// summedEntries reads the total of "sluice conns --json".
func summedEntries(out, _ []byte) (int, error) {
	var report struct {
		Total conntrack.Count `json:"total"`
	}
	err := json.Unmarshal(out, &report)
	return int(report.Total.Entries), err
}
