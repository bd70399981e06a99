// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/examples"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// binary is the program under test, built from this tree.
var binary string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	if os.Geteuid() != 0 {
		return m.Run(), nil // every test skips with the reason
	}
	dir, err := os.MkdirTemp("", "sluice-e2e-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "sluice")
	build := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the program under test: %w\n%s", err, out)
	}
	// Parallel tests wait for two thirds of their time.
	flag.Parse()
	if p := flag.Lookup("test.parallel"); p.Value.String() == p.DefValue {
		if err := p.Value.Set(strconv.Itoa(2 * runtime.NumCPU())); err != nil {
			return 0, err
		}
	}
	return m.Run(), nil
}

// onDatapaths runs the test once for each datapath of this host, with the configuration line that selects it.
func onDatapaths(t *testing.T, test func(t *testing.T, force string)) {
	labtest.Require(t, labtest.Root)
	for _, name := range []string{"nftables", "ebpf"} {
		t.Run(name, func(t *testing.T) { test(t, "datapath: "+name+"\n") })
	}
}

// onDatapathsAtOnce is onDatapaths in parallel, for tests that mostly wait.
func onDatapathsAtOnce(t *testing.T, test func(t *testing.T, force string)) {
	onDatapaths(t, func(t *testing.T, force string) {
		t.Parallel()
		test(t, force)
	})
}

// start runs the daemon in the node until the end of the test. If the host or the selected datapath lacks
// support, it skips with the reason.
func start(t *testing.T, n *lab.Node, config string, args ...string) *daemon.Daemon {
	t.Helper()
	d, err := daemon.Start(t.Context(), n, binary, "test.yaml", []byte(config), args...)
	if err != nil && strings.Contains(err.Error(), "is not available on this host") {
		labtest.Lacks(t, "%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			lines := strings.Split(d.Log(), "\n")
			t.Logf("the end of the daemon's log:\n%s", strings.Join(lines[max(0, len(lines)-20):], "\n"))
		}
		_ = d.Kill() // most tests have ended it already; the lab removes the rest
	})
	if line, _, _ := strings.Cut(config, "\n"); strings.HasPrefix(line, "datapath: ") {
		name := strings.TrimPrefix(line, "datapath: ")
		status, err := d.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(status.Datapaths, name) {
			labtest.Lacks(t, "datapath %s is not available on this host, only %v", name, status.Datapaths)
		}
	}
	return d
}

// ip runs "ip" with these arguments in a node.
func ip(t *testing.T, n *lab.Node, args string) {
	t.Helper()
	if out, err := n.Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// example returns an example configuration.
func example(t *testing.T, name string) string {
	t.Helper()
	data, err := examples.Files.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// serveWeb starts web servers, each "node name address...", until the end of the test.
func serveWeb(t *testing.T, l *lab.Lab, specs ...string) map[string]*host.Web {
	t.Helper()
	servers := make(map[string]*host.Web)
	for _, spec := range specs {
		f := strings.Fields(spec)
		w, err := host.ServeWeb(l.Node(f[0]), f[1], f[2:]...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = w.Stop() })
		servers[f[1]] = w
	}
	return servers
}

// serveDatagrams starts datagram servers in the same way.
func serveDatagrams(t *testing.T, l *lab.Lab, specs ...string) {
	t.Helper()
	for _, spec := range specs {
		f := strings.Fields(spec)
		s, err := host.ServeDatagrams(l.Node(f[0]), f[1], f[2])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Stop() })
	}
}

// patience is the timeout for expected events.
const patience = time.Minute

var (
	manyClients  = netip.MustParsePrefix("10.64.0.0/16")
	manyClients6 = netip.MustParsePrefix("fd00:64::/64")
)

// webLoad returns a load of HTTP requests from the balancer's client.
func webLoad(l *lab.Lab, target string, count int) host.Load {
	ap := netip.MustParseAddrPort(target)
	sources := manyClients
	if ap.Addr().Is6() {
		sources = manyClients6
	}
	return host.Load{From: l.Node("client"), Target: ap, Ask: host.AskWeb, Sources: sources, Count: count, Timeout: patience}
}

// mustAnswer runs a load and fails unless every exchange is answered.
func mustAnswer(t *testing.T, load host.Load) host.Tally {
	t.Helper()
	tally := load.Run(t.Context())
	if tally.Good() != load.Count || len(tally.Failures) > 0 {
		t.Errorf("%s: %d of %d answered, causes %v", load.Target, tally.Good(), load.Count, tally.Causes())
	}
	return tally
}

// inBackground runs a load until end is called.
func inBackground(t *testing.T, load host.Load) (end func() host.Tally) {
	t.Helper()
	ctx, done := t.Context(), make(chan host.Tally, 1)
	stop := make(chan struct{})
	go func() { done <- load.RunUntil(ctx, stop) }()
	return func() host.Tally {
		close(stop)
		return <-done
	}
}

// events records the actions during a load, so that a failed request can report the actions of its time.
type events struct {
	mu  sync.Mutex
	all []happened
}

// happened is the period of an action.
type happened struct {
	what     string
	from, to time.Time
}

// note does something and records its period.
func (e *events) note(what string, do func() error) error {
	from := time.Now()
	err := do()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, happened{what, from, time.Now()})
	return err
}

// during describes the failure of a request and the actions of its time.
func (e *events) during(f host.Failure) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "%s after %v, from %s on", f.Cause, f.End.Sub(f.Start).Round(time.Millisecond), f.Start.Format("15:04:05.000"))
	for _, h := range e.all {
		if f.Start.Before(h.to) && f.End.After(h.from) {
			fmt.Fprintf(&b, "; %s from %s to %s", h.what, h.from.Format("05.000"), h.to.Format("05.000"))
		}
	}
	return b.String()
}

// nft runs the nft program in the node.
func nft(t *testing.T, n *lab.Node, stdin string, args ...string) string {
	t.Helper()
	labtest.Require(t, labtest.Tool("nft"))
	cmd := n.Command(t.Context(), "nft", args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nft %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
