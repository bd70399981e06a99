// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// childEnv names the namespace that this test binary shows when it is started by
// TestTerminal instead of go test.
const childEnv = "SLUICE_TOP_NAMESPACE"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		ns, err := netdev.NamespaceAt(path)
		if err == nil {
			ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM) // as the program does
			defer stop()
			err = Run(ctx, &Host{Only: []netdev.Namespace{ns}}, os.Stdin, os.Stdout)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// terminal is the view in a tmux session of its own server.
type terminal struct {
	*testing.T
	socket string
}

func (w *terminal) tmux(args ...string) string {
	w.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", w.socket, "-f", "/dev/null"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		w.Fatalf("tmux %v: %v: %s", args, err, out)
	}
	return string(out)
}

// shows waits until the screen holds all parts.
func (w *terminal) shows(parts ...string) {
	w.Helper()
	labtest.Eventually(w.T, time.Minute, "the screen", func() error {
		text := w.tmux("capture-pane", "-p", "-t", "top")
		for _, p := range parts {
			if !strings.Contains(text, p) {
				return fmt.Errorf("lacks %q:\n%s", p, text)
			}
		}
		return nil
	})
}

func (w *terminal) press(keys ...string) {
	w.Helper()
	w.tmux(append([]string{"send-keys", "-t", "top"}, keys...)...)
}

// TestTerminal drives the real program in a real terminal of 80 by 24 without
// colours, over the table of a real namespace.
func TestTerminal(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Tool("tmux"))
	l := labtest.New(t, lab.Topology{Name: "top", Nodes: []lab.NodeSpec{{Name: "gw"}}})
	ns, err := netdev.NamespaceAt(l.Node("gw").Path())
	if err != nil {
		t.Fatal(err)
	}
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var entries []conntrack.Entry
	for i := range 300 {
		entries = append(entries, entry(i))
	}
	ask := conntrack.Entry{Family: unix.AF_INET6, Protocol: flow.UDP, Timeout: 600}
	ask.Original.Source, ask.Original.Dest = conntrack.AddrOf(netip.MustParseAddr("2001:db8::2")), conntrack.AddrOf(netip.MustParseAddr("2001:db8::53"))
	ask.Original.SourcePort, ask.Original.DestPort = 4000, 53
	ask.Reply = conntrack.Tuple{Source: ask.Original.Dest, Dest: ask.Original.Source, SourcePort: 53, DestPort: 4000}
	if n, err := c.Insert(context.Background(), append(entries, ask)); err != nil || n != 301 {
		t.Fatalf("made %d entries: %v", n, err)
	}
	w := &terminal{t, t.TempDir() + "/tmux"}
	w.tmux("new-session", "-d", "-s", "top", "-x", "80", "-y", "24",
		"env", childEnv+"="+ns.Path, "NO_COLOR=1", "TERM=screen", os.Args[0])
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", w.socket, "kill-server").Run() })

	w.shows("table 301 of", "[1 Sources]", "> 10.0.0.", "? help")
	w.press("3")
	w.shows("[3 Services]", "tcp 198.51.100.7:443", "udp [2001:db8::53]:53")
	w.press("/", "u", "d", "p", "Enter")
	w.shows("filter udp", "> udp [2001:db8::53]:53", "1 rows")
	w.press("Enter")
	w.shows("connections of udp [2001:db8::53]:53", "UNREPLIED")
	w.press("Enter")
	w.shows("the initiator sends  udp [2001:db8::2]:4000", "not assured: the first to go")
	w.press("Escape")
	w.shows("connections of udp")
	w.press("5")
	w.shows("[5 States]", "tcp ESTABLISHED", "225")
	w.press("p")
	w.shows("PAUSED")
	if _, err := c.Insert(context.Background(), []conntrack.Entry{entry(400)}); err != nil {
		t.Fatal(err)
	}
	w.press("p")
	w.shows("table 302 of")
	w.tmux("resize-window", "-t", "top", "-x", "100", "-y", "30")
	w.shows("table 302 of")
	w.press("?")
	w.shows("any key returns")
	w.press("x", "q")
	labtest.Eventually(t, time.Minute, "the end of the program", func() error {
		if exec.Command("tmux", "-S", w.socket, "has-session", "-t", "top").Run() == nil {
			return fmt.Errorf("it still runs")
		}
		return nil
	})
}

// TestTerminated wants the view to end on SIGTERM, each time.
func TestTerminated(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Tool("tmux"))
	l := labtest.New(t, lab.Topology{Name: "topterm", Nodes: []lab.NodeSpec{{Name: "gw"}}})
	dir := t.TempDir()
	for i := range 5 {
		w := &terminal{t, fmt.Sprintf("%s/tmux%d", dir, i)} // not the last terminal's name, which may be about to end
		t.Cleanup(func() { _ = exec.Command("tmux", "-S", w.socket, "kill-server").Run() })
		w.tmux("new-session", "-d", "-s", "top", "-x", "80", "-y", "24", "env", childEnv+"="+l.Node("gw").Path(), os.Args[0])
		w.shows("[1 Sources]")
		pid, err := strconv.Atoi(strings.TrimSpace(w.tmux("display-message", "-p", "-t", "top", "#{pane_pid}")))
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, time.Minute, "the end of the view", func() error {
			if unix.Kill(pid, 0) == nil {
				return fmt.Errorf("process %d still runs", pid)
			}
			return nil
		})
	}
}

// TestCost measures the CPU time of the view for a table of SLUICE_TOP_ENTRIES connections, between the ends of two
// dumps.
func TestCost(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("SLUICE_TOP_ENTRIES"))
	if n == 0 {
		t.Skip("measures the cost over a table of SLUICE_TOP_ENTRIES connections; takes minutes, run by hand")
	}
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Tool("tmux"))
	raiseMax(t, uint64(n)+100_000)
	l := labtest.New(t, lab.Topology{Name: "topcost", Nodes: []lab.NodeSpec{{Name: "gw"}}})
	ns, err := netdev.NamespaceAt(l.Node("gw").Path())
	if err != nil {
		t.Fatal(err)
	}
	fillTable(t, ns, n)
	w := &terminal{t, t.TempDir() + "/tmux"}
	w.tmux("new-session", "-d", "-s", "top", "-x", "80", "-y", "24", "env", childEnv+"="+ns.Path, os.Args[0])
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", w.socket, "kill-server").Run() })
	w.shows("[1 Sources]", "> 10.")
	pid := strings.TrimSpace(w.tmux("display-message", "-p", "-t", "top", "#{pane_pid}"))
	stamp := func() string { // of the last dump, in the title
		first, _, _ := strings.Cut(w.tmux("capture-pane", "-p", "-t", "top"), "\n")
		return first
	}
	next := func() {
		before := stamp()
		labtest.Eventually(t, 5*time.Minute, "the next dump", func() error {
			if stamp() == before {
				time.Sleep(time.Second) // between two looks, which cost the measured machine
				return fmt.Errorf("still %s", before)
			}
			return nil
		})
	}
	next()
	start, cpu := time.Now(), usedCPU(t, pid)
	next()
	used, wall := usedCPU(t, pid)-cpu, time.Since(start)
	t.Logf("%d connections: %v CPU in %v: %.2f %% of one core\n%s", n, used, wall.Round(time.Millisecond), 100*used.Seconds()/wall.Seconds(), stamp())
}

// usedCPU reads utime and stime of a process in ticks of 10 ms.
func usedCPU(t *testing.T, pid string) time.Duration {
	t.Helper()
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(rest) // begins with field 3, the state
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond
}

func fillTable(t *testing.T, ns netdev.Namespace, n int) {
	t.Helper()
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	part := make([]conntrack.Entry, 0, 1024)
	for i := range n {
		e := entry(1) // assured and established, behind one SNAT address
		e.Original.Source = conntrack.AddrOf(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
		e.Original.SourcePort = uint16(1024 + i>>16)
		e.Original.Dest = conntrack.AddrOf(netip.AddrFrom4([4]byte{198, 51, byte(i % 4000 >> 8), byte(i % 4000)}))
		e.Reply.Source, e.Reply.DestPort = e.Original.Dest, uint16(1024+i/4000)
		if part = append(part, e); len(part) == cap(part) || i == n-1 {
			if made, err := c.Insert(context.Background(), part); err != nil || made != len(part) {
				t.Fatalf("made %d of %d: %v", made, len(part), err)
			}
			part = part[:0]
		}
	}
}

// raiseMax raises the host's limit of tracked connections until the test ends, under the lock for host-wide settings.
func raiseMax(t *testing.T, limit uint64) {
	t.Helper()
	const path = "/proc/sys/net/netfilter/nf_conntrack_max"
	labtest.ChangeHostSettings(t)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
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
