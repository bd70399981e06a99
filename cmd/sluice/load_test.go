// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestLoadAsksWhoseNetwork: outside a lab nothing is sent, counted or answered without a confirmation that the
// network is the user's own.
func TestLoadAsksWhoseNetwork(t *testing.T) {
	for _, args := range [][]string{
		{"load", "packets", "--from", "lo", "--source", "127.0.0.1:1024", "--dest", "127.0.0.1:9", "--count", "1"},
		{"load", "flows", "--from", "lo", "--to", "lo", "--source", "127.0.0.1:1024-1033", "--dest", "127.0.0.1:9", "--count", "1"},
		{"load", "http", "-n", "1", "http://127.0.0.1:9/"},
	} {
		refused(t, "--i-own-this-network", args...)
	}
	// With the confirmation the client connects; without a listener it reports the error.
	out, stderr, code := sluice(t, "load", "http", "-n", "1", "--i-own-this-network", "http://127.0.0.1:9/")
	if code != exitFailure || !strings.Contains(out, "connection refused: 1") || !strings.Contains(stderr, "no request was answered") {
		t.Errorf("code %d, %q, %q", code, stderr, out)
	}
}

// TestLoadAsksWhoseFarEnd: the far end captures every packet of its interface, so a sender in a lab does not
// install it on an interface of the host.
func TestLoadAsksWhoseFarEnd(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	from := loadLab(t) + "/source/eth0"
	refused(t, "--i-own-this-network", "load", "packets", "--from", from, "--to", "lo", "--source", "192.0.2.1:1024", "--dest", "192.0.2.2:9", "--count", "1")
	refused(t, "--i-own-this-network", "load", "flows", "--from", from, "--to", "lo", "--source", "192.0.2.1:1024-1033", "--dest", "192.0.2.2:9", "--count", "1", "--seconds", "1")
}

// TestLoadFlowsNeedsTheServers: the client end understands only the answers of load's own server end.
func TestLoadFlowsNeedsTheServers(t *testing.T) {
	refused(t, "load flows: --to is missing\nUsage: sluice load flows --from", "load", "flows", "--from", "lo", "--source", "127.0.0.1:1024-1033", "--dest", "127.0.0.1:9")
}

// TestLoadRefusesWhatItWouldIgnore: a flag without effect is refused.
func TestLoadRefusesWhatItWouldIgnore(t *testing.T) {
	packets := []string{"load", "packets", "--i-own-this-network", "--from", "lo", "--source", "127.0.0.1:1024", "--dest", "127.0.0.1:9", "--count", "1"}
	for why, flags := range map[string][]string{
		"name it with --to":    {"--checksums"},
		"--to and --stamp":     {"--histogram", filepath.Join(t.TempDir(), "latency.svg")},
		"tcp flags syn":        {"--tcp-flags", "syn"},
		"no destination ports": {"--protocol", "icmp"},
		"whole datagrams":      {"--stamp", "--fragments", "2"},
		"--cpus 0,0":           {"--cpus", "0,0"},
		"rate -5":              {"--rate", "-5"},
		`tcp flag "foo"`:       {"--protocol", "tcp", "--tcp-flags", "foo"},
		"size 20":              {"--size", "20"},
		"size 9000":            {"--size", "9000"},
		"fragments: from 1":    {"--fragments", "9223372036854775807"},
		"--seconds 0: more":    {"--seconds", "0"},
		"--seconds NaN":        {"--seconds", "NaN"},
		"--seconds 1e+300":     {"--seconds", "1e300"},
		"/nowhere/latency.svg": {"--to", "lo", "--stamp", "--histogram", "/nowhere/latency.svg"},
	} {
		misused(t, why, slices.Concat(packets, flags)...)
	}
	flows := []string{"load", "flows", "--from", "lo", "--to", "lo", "--source", "127.0.0.1", "--dest", "127.0.0.1:9"}
	for why, flags := range map[string][]string{"--seconds -1": {"--seconds", "-1"}, "-1 tries": {"--tries", "-1"}, "response of 9999": {"--response", "9999"}} {
		misused(t, why, slices.Concat(flows, flags)...)
	}
	for why, args := range map[string][]string{
		"--seconds NaN":            {"--seconds", "NaN", "http://127.0.0.1:9/"},
		"--seconds 0":              {"--seconds", "0", "http://127.0.0.1:9/"},
		"are not negative":         {"-c", "-5", "http://127.0.0.1:9/"},
		"ftp://127.0.0.1/":         {"ftp://127.0.0.1/"},
		"/nowhere/latency.svg":     {"--histogram", "/nowhere/latency.svg", "http://127.0.0.1:9/"},
		`"127.0.0.1" is not a URL`: {"--from", "no/node", "127.0.0.1"},
	} {
		misused(t, why, slices.Concat([]string{"load", "http"}, args)...)
	}
}

// misused runs an invalid command line.
func misused(t *testing.T, why string, args ...string) {
	t.Helper()
	if out, stderr, code := sluice(t, args...); code != exitUsage || !strings.Contains(stderr, why) {
		t.Errorf("%v: code %d, no %q in %q, %q", args, code, why, stderr, out)
	}
}

// TestLoadThatGetsNothingThrough expects exit code 1 after the summary.
func TestLoadThatGetsNothingThrough(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	id := loadLab(t)
	for says, args := range map[string][]string{
		"no packet arrived":      {"packets", "--dest", "192.0.2.2:53"},
		"no connection was made": {"flows", "--dest", "192.0.2.2:80"}, // eth0's kernel resets them
	} {
		args = slices.Concat([]string{"load"}, args, []string{"--from", id + "/source/eth0", "--to", id + "/sink/eth1", "--source", "192.0.2.1:1024-1033", "--count", "10", "--json"})
		out, stderr, code := sluice(t, args...)
		if code != exitFailure || !strings.Contains(stderr, says) || !json.Valid([]byte(out)) {
			t.Errorf("%v: code %d, %q, %s", args, code, stderr, out)
		}
	}
}

// TestLoadHTTPEndsWhenItIsTold: an interrupted run reports the interruption, also inside a node of a lab.
func TestLoadHTTPEndsWhenItIsTold(t *testing.T) {
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, os.Interrupt) // in the background, child processes would ignore the signal
	defer signal.Stop(heard)
	for code := range 2 {
		ctx, stop := context.WithCancel(t.Context())
		child := exec.CommandContext(ctx, "sh", "-c", fmt.Sprintf("trap 'exit %d' INT; echo ready; while :; do sleep 0.01; done", code))
		child.Stdout = writerFunc(func(b []byte) (int, error) {
			stop()
			return len(b), nil
		})
		var exit exitError
		if err := runToItsEnd(child); code == 0 && err != nil || code == 1 && (!errors.As(err, &exit) || exit.code != 1) {
			t.Errorf("the child ends with %d: %v", code, err)
		}
	}
}

// TestLoadHTTPInANode runs the same command line in a node, with any separator of the URL.
func TestLoadHTTPInANode(t *testing.T) {
	for _, c := range [][2]string{
		{"load http --from client http://192.0.2.1/", "load http --from client http://192.0.2.1/ --from="},
		{"load http --from client -- http://192.0.2.1/", "load http --from client --from= -- http://192.0.2.1/"},
	} {
		if got := strings.Join(withoutFrom(strings.Fields(c[0])), " "); got != c[1] {
			t.Errorf("%s: %s", c[0], got)
		}
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// refused runs a command that must fail with a reason.
func refused(t *testing.T, why string, args ...string) {
	t.Helper()
	if out, stderr, code := sluice(t, args...); code == 0 || !strings.Contains(stderr, why) {
		t.Errorf("%v: code %d, no %q in %q, %q", args, code, why, stderr, out)
	}
}

func loadLab(t *testing.T) string {
	t.Helper()
	return labtest.New(t, lab.Topology{
		Name:  "loadcmd",
		Nodes: []lab.NodeSpec{{Name: "source"}, {Name: "sink"}},
		Links: []lab.LinkSpec{{
			A: lab.End{Node: "source", Iface: "eth0", Addresses: []string{"192.0.2.1/24"}},
			B: lab.End{Node: "sink", Iface: "eth0", Addresses: []string{"192.0.2.2/24"}},
		}, {
			A: lab.End{Node: "source", Iface: "eth1", Addresses: []string{"198.51.100.1/24"}},
			B: lab.End{Node: "sink", Iface: "eth1", Addresses: []string{"198.51.100.2/24"}},
		}},
	}).ID()
}

// checkHistogram reads an SVG and looks for the percentiles.
func checkHistogram(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var svg struct {
		XMLName xml.Name   `xml:"svg"`
		Text    []string   `xml:"g>text"`
		Rects   []struct{} `xml:"rect"`
	}
	if err := xml.Unmarshal(b, &svg); err != nil {
		t.Fatal(err)
	}
	words := strings.Join(svg.Text, "|")
	if len(svg.Rects) < 2 || !strings.Contains(words, "p50 ") || !strings.Contains(words, "p99.9 ") {
		t.Errorf("%d bars, words %q", len(svg.Rects), words)
	}
}

// TestLoadPackets: limited by count, from two CPUs if available, as JSON, with the histogram.
func TestLoadPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	id, histogram := loadLab(t), filepath.Join(t.TempDir(), "latency.svg")
	cpus := "0"
	if runtime.NumCPU() > 1 {
		cpus = "0,1"
	}
	out, stderr, code := sluice(t, "load", "packets", "--from", id+"/source/eth0", "--to", id+"/sink/eth0", "--source", "192.0.2.1:1024-2047",
		"--dest", "192.0.2.2:53", "--stamp", "--checksums", "--rate", "5000", "--count", "11001", "--cpus", cpus, "--seconds", "60", "--histogram", histogram, "--json")
	var r packetsReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("code %d, %s, %v in %s", code, stderr, err, out)
	}
	if r.Sent != 11001 || r.Unsent != 0 || r.Received.Packets != 11001 || r.Received.BadL4Checksum != 0 || r.Received.SequenceLost != 0 || r.Latency.Count != 11001 {
		t.Errorf("sent %d, received %+v, latency %+v", r.Sent, r.Received, r.Latency)
	}
	checkHistogram(t, histogram)
	if _, stderr, code := sluice(t, "load", "packets", "--from", id+"/source/eth0", "--source", "192.0.2.1", "--dest", "192.0.2.2", "--cpus", "999"); code == 0 || !strings.Contains(stderr, "--cpus 999") {
		t.Errorf("CPU 999: code %d, %q", code, stderr)
	}
}

// TestLoadTellsThatItIsBehind: if the sender cannot hold its rate, the report does not attribute the latency to
// the gateway alone.
func TestLoadTellsThatItIsBehind(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	id := loadLab(t)
	ends := []string{"--from", id + "/source/eth0", "--to", id + "/sink/eth0", "--source", "192.0.2.1:1024-2047", "--seconds", "0.3", "--rate", "1e9"}
	for says, args := range map[string][]string{
		"packets were due and not sent": {"load", "packets", "--dest", "192.0.2.2:53", "--stamp"},
		"turns were due and not begun":  {"load", "flows", "--dest", "192.0.2.2:80"},
	} {
		args = append(args, ends...)
		if out, stderr, code := sluice(t, args...); code != 0 || !strings.Contains(out, says) {
			t.Errorf("code %d, %s, no %q in %s", code, stderr, says, out)
		}
	}
}

// TestLoadFlows is the same for connections, as text, with a line per second.
func TestLoadFlows(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	id, histogram := loadLab(t), filepath.Join(t.TempDir(), "response.svg")
	out, stderr, code := sluice(t, "load", "flows", "--from", id+"/source/eth0", "--to", id+"/sink/eth0", "--source", "192.0.2.1:1024-2023",
		"--dest", "192.0.2.2:80", "--rate", "1000", "--count", "4000", "--seconds", "60", "--histogram", histogram)
	if code != 0 || !strings.Contains(out, "4,000 completed in ") || !strings.Contains(out, "4,000 answered: ") || !strings.Contains(out, "errors       0: ") {
		t.Errorf("code %d, %s\n%s", code, stderr, out)
	}
	for _, line := range []string{"  1 s  ", "  2 s  ", " connections/s  ", " open  "} {
		if !strings.Contains(stderr, line) {
			t.Errorf("no %q in the progress\n%s", line, stderr)
		}
	}
	checkHistogram(t, histogram)
}
