// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/top"
)

func TestTopOnce(t *testing.T) {
	name := trackedNamespace(t)
	text, stderr, code := sluice(t, "top", "--once", "--netns", name)
	if code != 0 {
		t.Fatal(stderr)
	}
	if lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n"); len(lines) != 24 {
		t.Errorf("%d lines, want 24", len(lines))
	}
	for _, want := range []string{"table 320 of", "[1 Sources]", "2001:db8::5", "10.0.0.1"} {
		if !strings.Contains(text, want) {
			t.Errorf("screen lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Errorf("colours on what is no terminal:\n%q", text)
	}
	if _, stderr, code := sluice(t, "top"); code != exitUsage || !strings.Contains(stderr, "--once") {
		t.Errorf("without a terminal: code %d, %s", code, stderr)
	}
}

func TestTopJSON(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	name := trackedNamespace(t)
	text, stderr, code := sluice(t, "top", "--once", "--json", "--netns", name, "--rows", "2")
	var p top.Picture
	if code != 0 {
		t.Fatal(stderr)
	}
	// Levels of the verdict are words; every other field decodes to the same value.
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	if p.Entries != 320 || len(p.Sources) != 2 || p.SNATPorts[0].Used != 300 || p.Held[name] != 200 ||
		p.Verdict.Level != top.OK && !strings.Contains(p.Verdict.Text, "softirqs") { // other programs may cause it
		t.Errorf("%+v", p)
	}
	if p.Drops == nil || len(p.Phases) == 0 {
		t.Errorf("drops and CPU phases are missing: %v", p.Blind)
	}
}
