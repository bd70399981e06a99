// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
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

// trackedNamespace creates a namespace and returns its name. Its connection table has 300 masqueraded TCP
// connections to one service, 100 of them in TIME_WAIT, and 20 unanswered queries to a name server over IPv6.
func trackedNamespace(t *testing.T) string {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "conns", Nodes: []lab.NodeSpec{{Name: "gw"}}})
	ns, err := netdev.NamespaceAt(l.Node("gw").Path())
	if err != nil {
		t.Fatal(err)
	}
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	addr := func(s string) conntrack.Addr { return conntrack.AddrOf(netip.MustParseAddr(s)) }
	var entries []conntrack.Entry
	for i := range 300 {
		e := conntrack.Entry{Family: unix.AF_INET, Protocol: flow.TCP, State: uint8(conntrack.TCPEstablished),
			Status: conntrack.Assured | conntrack.SeenReply, Timeout: 300000,
			Original: conntrack.Tuple{Source: addr(fmt.Sprintf("10.0.0.%d", 1+i%3)), Dest: addr("198.51.100.7"), SourcePort: uint16(2000 + i), DestPort: 443},
			Reply:    conntrack.Tuple{Source: addr("198.51.100.7"), Dest: addr("203.0.113.5"), SourcePort: 443, DestPort: uint16(2000 + i)}}
		if i < 100 {
			e.State, e.Timeout = uint8(conntrack.TCPTimeWait), 100
		}
		entries = append(entries, e)
	}
	for i := range 20 {
		o := conntrack.Tuple{Source: addr("2001:db8::5"), Dest: addr("2001:db8:1:2:3:4:5:53"), SourcePort: uint16(3000 + i), DestPort: 53}
		entries = append(entries, conntrack.Entry{Family: unix.AF_INET6, Protocol: flow.UDP, Timeout: 600, Original: o,
			Reply: conntrack.Tuple{Source: o.Dest, Dest: o.Source, SourcePort: o.DestPort, DestPort: o.SourcePort}})
	}
	if n, err := c.Insert(context.Background(), entries); err != nil || n != len(entries) {
		t.Fatalf("made %d entries: %v", n, err)
	}
	return l.Node("gw").Name()
}

// sluice runs a command line and returns its output and exit code.
func sluice(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs strings.Builder
	code = execute(context.Background(), args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

func TestConns(t *testing.T) {
	name := trackedNamespace(t)
	text, stderr, code := sluice(t, "conns", "--netns", name, "--window", "1ms", "--check")
	if code != 0 {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{
		"320 entries (120 KiB): 200 held, 100 closing, 20 not assured",
		"IPv4 300, IPv6 20; SNAT 300, DNAT 0, both 0; unreplied 20",
		"tcp ESTABLISHED", "tcp TIME_WAIT", "udp UNREPLIED",
		"10.0.0.1", "tcp 198.51.100.7:443", "udp [2001:db8:1:2:3:4:5:53]:53",
		"203.0.113.5   tcp 198.51.100.7:443",
		"FREE FIRST\n      100  tcp TIME_WAIT",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("output lacks %q:\n%s", want, text)
		}
	}
	for line := range strings.Lines(text) {
		if len([]rune(strings.TrimRight(line, "\n"))) > 80 {
			t.Errorf("line of more than 80 columns: %q", line)
		}
	}
	for _, by := range conntrack.Groupings() {
		if out, stderr, code := sluice(t, "conns", "--netns", name, "--window", "1ms", "--by", by); code != 0 ||
			by != "backend" && strings.Count(out, "\n") < 6 {
			t.Errorf("--by %s: code %d, %s\n%s", by, code, stderr, out)
		}
	}
}

func TestConnsJSON(t *testing.T) {
	name := trackedNamespace(t)
	text, _, _ := sluice(t, "conns", "--netns", name, "--window", "1ms", "--json", "--state", "time_wait")
	var r conntrack.Report
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	if r.Total.Entries != 100 || r.Namespaces[0].Count != 320 || r.Namespaces[0].Held != 200 || r.SNATPorts[0].Used != 100 {
		t.Errorf("report %+v", r)
	}
	list, _, _ := sluice(t, "conns", "--netns", name, "--list", "--json", "--proto", "udp")
	if n := strings.Count(list, "\n"); n != 20 {
		t.Errorf("--list shows %d connections, want 20", n)
	}
	one, _, _ := sluice(t, "conns", "--netns", name, "--list", "--sport", "2100")
	if want := "tcp 10.0.0.2:2100 -> 198.51.100.7:443 ESTABLISHED"; !strings.Contains(one, want) ||
		!strings.HasSuffix(one, " snat 203.0.113.5:2100\n") {
		t.Errorf("--list prints %q", one)
	}
}

func TestConnsDelete(t *testing.T) {
	name := trackedNamespace(t)
	if _, stderr, code := sluice(t, "conns", "delete", "--netns", name); code != exitUsage {
		t.Errorf("without a filter: code %d, %s", code, stderr)
	}
	for _, step := range []struct {
		args []string
		want string
	}{
		{[]string{"--state", "TIME_WAIT"}, "100  would go"},
		{[]string{"--state", "TIME_WAIT", "--yes"}, "100  removed"},
		{[]string{"--state", "TIME_WAIT"}, "no connection matches"},
	} {
		out, stderr, _ := sluice(t, append([]string{"conns", "delete", "--netns", name}, step.args...)...)
		if !strings.Contains(out, step.want) {
			t.Errorf("delete %v: %q, want %q: %s", step.args, out, step.want, stderr)
		}
	}
}

// TestConnsEach: if all namespaces are selected, an inaccessible or ended one does not prevent reading the
// others. If it is selected by name, it is an error.
func TestConnsEach(t *testing.T) {
	name := trackedNamespace(t)
	var stderr strings.Builder
	a := &app{stderr: &stderr}
	fail := func(err error) func(netdev.Namespace) error {
		return func(ns netdev.Namespace) error {
			if ns.Name == name {
				return fmt.Errorf("namespace %s: %w", name, err)
			}
			return nil
		}
	}
	all, one := &connsFlags{netns: []string{"all"}}, &connsFlags{netns: []string{name}}
	if err := all.forEachNamespace(a, fail(fs.ErrNotExist)); err != nil || strings.Contains(stderr.String(), "entered") {
		t.Errorf("one that has ended: %v, %q", err, stderr.String())
	}
	if err := all.forEachNamespace(a, fail(fs.ErrPermission)); err != nil || !strings.Contains(stderr.String(), "not seen: 1 network namespace may not be entered") {
		t.Errorf("one that may not be entered: %v, %q", err, stderr.String())
	}
	for _, err := range []error{one.forEachNamespace(a, fail(fs.ErrNotExist)), all.forEachNamespace(a, fail(io.EOF))} {
		if err == nil {
			t.Error("a failure is hidden")
		}
	}
}

func TestConnsUsage(t *testing.T) {
	for _, args := range [][]string{{"--by", "colour"}, {"--src", "10.0.0.300"}, {"--port", "0"}, {"--proto", "tpc"}, {"--mark", "x"}, {"--mark", "5/0"},
		{"--zone", "65536"}, {"--zone", "-5"}, {"--top", "-1"}, {"--window", "-1s"}, {"--pool", "0"}, {"--state", "OPEN"}} {
		if _, stderr, code := sluice(t, append([]string{"conns"}, args...)...); code != exitUsage || !strings.Contains(stderr, args[1]) {
			t.Errorf("%v: code %d, %s", args, code, stderr)
		}
	}
}

// TestConnsFlagsExclude: a flag that another one would make ineffective is a usage error.
func TestConnsFlagsExclude(t *testing.T) {
	for _, args := range [][]string{{"-4", "-6"}, {"--list", "--by", "source"}, {"--list", "--top", "3"}, {"--list", "--check"}} {
		if _, stderr, code := sluice(t, append([]string{"conns"}, args...)...); code != exitUsage || !strings.Contains(stderr, "exclude each other") {
			t.Errorf("%v: code %d, %s", args, code, stderr)
		}
	}
}

// TestFullIn expects no forecast from a short growth of a nearly empty table.
func TestFullIn(t *testing.T) {
	for _, c := range []struct {
		count, most uint32
		over        time.Duration
		want        string
	}{{37, 262144, time.Second, "-"}, {37, 262144, time.Hour, ">2d"}, {600, 1000, time.Second, "40s"}} {
		f := conntrack.Fill{Limits: conntrack.Limits{Count: c.count, Max: c.most}, Growth: 10, Over: c.over}
		if c.over == time.Hour {
			f.Growth = 1
		}
		if got := fullIn(f); got != c.want {
			t.Errorf("%d of %d over %s: %s, want %s", c.count, c.most, c.over, got, c.want)
		}
	}
}
