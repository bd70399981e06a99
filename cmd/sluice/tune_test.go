// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/doctor/tune"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestTune applies, shows and reverts the values of a namespace.
func TestTune(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "tunecmd", Nodes: []lab.NodeSpec{{Name: "gw", Forward: true}}})
	ns, err := netdev.NamespaceAt(l.Node("gw").Path())
	if err != nil {
		t.Fatal(err)
	}
	read := func() string {
		v, err := (&tune.System{Namespace: ns}).Get("net.netfilter.nf_conntrack_udp_timeout_stream")
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	before := read()
	dir := t.TempDir()
	run := func(args ...string) (string, string, int) {
		return sluice(t, append(args, "--netns", l.Node("gw").Name(), "--state-dir", dir, "--sysctl-dir", dir)...)
	}
	out, stderr, code := run("tune", "--dry-run")
	if code != 0 || !strings.Contains(stderr, "profile router: forwarding is on") || read() != before {
		t.Errorf("dry run: code %d, %s, value %s", code, stderr, read())
	}
	for line := range strings.Lines(out) {
		if len([]rune(strings.TrimRight(line, "\n"))) > 80 {
			t.Errorf("line of more than 80 columns: %q", line)
		}
	}
	if out, stderr, code := run("tune", "router", "--trial", "0", "--set", "net.ipv4.ip_local_port_range=20001 60000"); code != 0 || read() != "300" || !strings.Contains(out, "undo: sluice tune rollback") {
		t.Errorf("apply: code %d, value %s, %s\n%s", code, read(), stderr, out)
	}
	if out, _, _ := run("tune", "status"); !strings.Contains(out, ": applied") || !strings.Contains(out, "udp_timeout_stream") || !strings.Contains(out, "20001 60000  20001 60000") {
		t.Errorf("status:\n%s", out)
	}
	if out, stderr, code := run("tune", "rollback"); code != 0 || read() != before || !strings.Contains(out, "taken back") {
		t.Errorf("rollback: code %d, value %s, %s\n%s", code, read(), stderr, out)
	}
	if out, _, _ := run("tune", "status"); !strings.Contains(out, ": rolled back (asked for)") {
		t.Errorf("status after the rollback:\n%s", out)
	}
}

// TestInterrupted: after Ctrl-C the error says "interrupted", not "context canceled".
func TestInterrupted(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	end()
	var out, stderr strings.Builder
	if code := execute(ctx, []string{"doctor", "--netns", "host"}, strings.NewReader(""), &out, &stderr); code != exitUnexamined || !strings.HasSuffix(stderr.String(), "sluice: interrupted\n") {
		t.Errorf("code %d, %q", code, stderr.String())
	}
}

func TestTuneRefusals(t *testing.T) {
	labtest.Require(t, labtest.Conntrack)
	out, stderr, code := sluice(t, "tune", "router", "--dry-run", "--set", "net.netfilter.nf_conntrack_tcp_timeout_established=60")
	if code != exitFailure || !strings.Contains(stderr, "RFC 5382") {
		t.Errorf("below the floor: code %d, %s\n%s", code, stderr, out)
	}
	if _, stderr, code := sluice(t, "tune", "reactor", "--dry-run"); code != exitUsage || !strings.Contains(stderr, "there are router, balancer, containers and proxy") {
		t.Errorf("an unknown profile: code %d, %s", code, stderr)
	}
	load := t.TempDir() + "/load.yaml"
	if err := os.WriteFile(load, []byte("classes: [{name: a, clients: 100, connections: 10}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, stderr, code := sluice(t, "tune", "--for-load", load, "--dry-run", "--json")
	var p tune.Proposal
	if err := json.Unmarshal([]byte(text), &p); err != nil || code != 0 || p.Profile != "load" || len(p.Changes) < 2 {
		t.Errorf("for a load: %v, %s\n%s", err, stderr, text)
	}
}

// TestRefusedByDiagnosis: an ineffective or ambiguous flag is refused before anything is read or changed.
func TestRefusedByDiagnosis(t *testing.T) {
	for line, want := range map[string]string{
		"tune router --netns nowhere --trial -1s": "must not be negative",
		"doctor --watch --markdown":               "watch",
		"doctor --watch --all":                    "watch",
		"doctor --markdown --json":                "either --markdown or --json",
		"drops port 99999":                        "not a number from 1 to 65535",
	} {
		if _, stderr, code := sluice(t, strings.Fields(line)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %s", line, code, stderr)
		}
	}
}

// TestNegativeSeconds: no watching command accepts a negative duration as "for ever".
func TestNegativeSeconds(t *testing.T) {
	for _, command := range []string{"drops", "profile", "doctor"} {
		for _, odd := range []string{"nan", "inf", "1e300"} {
			if _, stderr, code := sluice(t, command, "--seconds", odd); code != exitUsage {
				t.Errorf("%s --seconds %s: code %d, %s", command, odd, code, stderr)
			}
		}
		if _, stderr, code := sluice(t, command, "--seconds", "-1"); code != exitUsage || !strings.Contains(stderr, "must not be negative") {
			t.Errorf("%s: code %d, %s", command, code, stderr)
		}
	}
}

// TestProposalFoldsHostWide: settings that the namespace cannot set are one line.
func TestProposalFoldsHostWide(t *testing.T) {
	p := &tune.Proposal{Changes: []tune.Change{
		{Setting: tune.Setting{Key: "net.netfilter.nf_conntrack_max"}, Skipped: "of the host", WholeHost: true},
		{Setting: tune.Setting{Key: "net.core.netdev_budget"}, Skipped: "set already", WholeHost: true},
		{Setting: tune.Setting{Key: "net.ipv4.ip_forward"}, Now: "1", Skipped: "set already"},
	}}
	var text strings.Builder
	if err := writeProposal(&text, p); err != nil {
		t.Fatal(err)
	}
	const want = "kept: net.ipv4.ip_forward = 1 (set already)\nkept: nf_conntrack_max, netdev_budget (of the whole host: run it without\n      --netns)\n"
	if text.String() != want {
		t.Errorf("%q, want %q", text.String(), want)
	}
}
