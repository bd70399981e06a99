// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// childEnv names the namespace that this test binary shows when it is started by
// TestTerminal instead of go test.
const childEnv = "SLUICE_TOP_NAMESPACE"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		ns, err := conntrack.NamespaceAt(path)
		if err == nil {
			err = Run(context.Background(), &Host{Only: []conntrack.Namespace{ns}}, os.Stdin, os.Stdout)
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
	labtest.Eventually(w.T, 20*time.Second, "the screen", func() error {
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
	ns, err := conntrack.NamespaceAt(l.Node("gw").Path())
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
	labtest.Eventually(t, 10*time.Second, "the end of the program", func() error {
		if exec.Command("tmux", "-S", w.socket, "has-session", "-t", "top").Run() == nil {
			return fmt.Errorf("it still runs")
		}
		return nil
	})
}
