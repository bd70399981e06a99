// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
)

func TestDrainFlags(t *testing.T) {
	for args, want := range map[string]string{
		"backend web a down --wait":             "--deadline, --then and --wait go with drain; see",
		"backend web a drain --then reset":      "--then goes with --deadline: without one a drain never ends; see",
		"backend web a drain --deadline 1500ms": "--deadline 1.5s: write whole seconds, from 1s to 720h; see",
		"drain --deadline 5m --then explode":    "--then \"explode\": write keep or reset; see",
		"drain --cancel --deadline 5m":          "--deadline, --then and --wait go with drain; see",
	} {
		if code, _, stderr := sluiceCommand("", strings.Fields(args)...); code != exitUsage || !strings.HasPrefix(stderr, "sluice: "+want) {
			t.Errorf("sluice %s: exit %d, %s\nwant %s", args, code, stderr, want)
		}
	}
}

func TestDrainText(t *testing.T) {
	until := time.Date(2026, 11, 25, 20, 0, 0, 0, time.Local)
	for want, d := range map[string]*api.Drain{
		"":                            nil,
		"connections are not counted": {Left: -1},
		"1 connection left":           {Left: 1},
		"75 connections left, none in about 2m30s":                           {Left: 75, Estimate: 150},
		"2 connections left; until 2026-11-25 20:00:00, then they are ended": {Left: 2, Until: until, Then: "reset"},
		"0 connections left; until 2026-11-25 20:00:00, then they go on":     {Until: until, Then: "keep"},
	} {
		if got := drainText(d); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if got := joinTexts("set by the operator", leftText(&api.Drain{Left: 75, Estimate: 150})); got != "set by the operator; 75 left, about 2m30s" {
		t.Errorf("in the table: %s", got)
	}
}
