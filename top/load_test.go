// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestThroughputLost measures what the view takes from a loaded gateway: short
// HTTP connections through nftables masquerade, in turns with and without the
// view on the gateway, on the same CPUs. SLUICE_TOP_LOAD is the number of turns.
func TestThroughputLost(t *testing.T) {
	turns, _ := strconv.Atoi(os.Getenv("SLUICE_TOP_LOAD"))
	if turns == 0 {
		t.Skip("measures the throughput of a gateway in SLUICE_TOP_LOAD turns; takes a minute or more, run by hand")
	}
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Nftables, labtest.Tool("tmux"), labtest.Tool("ab"), labtest.Tool("nginx"), labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "topload",
		Nodes: []lab.NodeSpec{
			{Name: "client", Routes: []lab.Route{{To: "default", Via: "192.0.2.1"}}},
			{Name: "gateway", Forward: true}, {Name: "server"},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"192.0.2.2/24"}},
				B: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"192.0.2.1/24"}}},
			{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24"}},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"198.51.100.2/24"}}},
		}})
	ctx := t.Context()
	nft := l.Node("gateway").Command(ctx, "nft", "-f", "-")
	nft.Stdin = strings.NewReader("table ip t {\n chain p {\n type nat hook postrouting priority 100\n oifname wan0 masquerade\n }\n}\n")
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	serve(t, l)
	w := &terminal{t, t.TempDir() + "/tmux"}
	var without, with []float64
	var cpu, wall time.Duration
	for range turns {
		without = append(without, requests(t, l))
		w.tmux("new-session", "-d", "-s", "top", "-x", "80", "-y", "24",
			"env", childEnv+"="+l.Node("gateway").Path(), os.Args[0])
		w.shows("[1 Sources]", "> 192.0.2.2")
		pid := strings.TrimSpace(w.tmux("display-message", "-p", "-t", "top", "#{pane_pid}"))
		before, start := usedCPU(t, pid), time.Now()
		with = append(with, requests(t, l))
		cpu, wall = cpu+usedCPU(t, pid)-before, wall+time.Since(start)
		w.press("q")
		labtest.Eventually(t, 10*time.Second, "the end of the view", func() error {
			if exec.Command("tmux", "-S", w.socket, "has-session", "-t", "top").Run() == nil {
				return fmt.Errorf("it still runs")
			}
			return nil
		})
	}
	slices.Sort(without)
	slices.Sort(with)
	a, b := without[len(without)/2], with[len(with)/2]
	best, bestWith := without[turns-1], with[turns-1]
	t.Logf("requests/s, median: %.0f without the view, %.0f with it, %.1f %% lost; best: %.0f and %.0f, %.1f %% lost; the view took %.1f %% of one core",
		a, b, 100*(1-b/a), best, bestWith, 100*(1-bestWith/best), 100*cpu.Seconds()/wall.Seconds())
}

// serve starts a web server that answers at once and closes.
func serve(t *testing.T, l *lab.Lab) {
	t.Helper()
	dir := t.TempDir()
	conf := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log stderr crit;
events { worker_connections 8192; }
http { access_log off; keepalive_timeout 0; client_body_temp_path %[1]s; proxy_temp_path %[1]s; fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;
 server { listen 198.51.100.2:80 backlog=4096; return 200 "ok"; } }
`, dir)
	if err := os.WriteFile(dir+"/nginx.conf", []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	nginx := l.Node("server").Command(ctx, "nginx", "-c", dir+"/nginx.conf")
	if err := nginx.Start(); err != nil {
		stop()
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(); _ = nginx.Wait() })
	labtest.Eventually(t, 10*time.Second, "the web server", func() error {
		out, err := l.Node("client").Command(ctx, "ab", "-n", "1", "-s", "1", "http://198.51.100.2/").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

var perSecond = regexp.MustCompile(`Requests per second:\s+([0-9.]+)`)

// requests runs 40,000 requests and returns their rate.
func requests(t *testing.T, l *lab.Lab) float64 {
	t.Helper()
	out, err := l.Node("client").Command(t.Context(), "ab", "-q", "-r", "-c", "200", "-n", "40000", "http://198.51.100.2/").CombinedOutput()
	m := perSecond.FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("ab: %v: %s", err, out)
	}
	v, _ := strconv.ParseFloat(string(m[1]), 64)
	return v
}
