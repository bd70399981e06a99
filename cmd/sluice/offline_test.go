// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/store"
)

// TestChangesWithoutADaemon: 'check' fails for a file that contradicts changes made at run time. 'config diff',
// 'history' and 'revert' work without a daemon, and resolve the conflict.
func TestChangesWithoutADaemon(t *testing.T) {
	labtest.Require(t, labtest.Root)
	const text = "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1, weight: 1}]}\n"
	weight := func(n string) string { return strings.Replace(text, "weight: 1", "weight: "+n, 1) }
	for name, revert := range map[string][]string{"all": {"--all"}, "revision": {"1"}, "named file": {"--all", "--config"}} {
		t.Run(name, func(t *testing.T) {
			state := t.TempDir()
			file := filepath.Join(t.TempDir(), "sluice.yaml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := store.Open(filepath.Join(state, "changes"), file)
			if err != nil {
				t.Fatal(err)
			}
			base, err := config.Load(file)
			if err != nil {
				t.Fatal(err)
			}
			changed, err := config.Decode("changed", []byte(weight("5")))
			if err != nil {
				t.Fatal(err)
			}
			for _, cfg := range []*config.Config{base, changed} {
				p, err := s.Prepare(base, store.Content{Config: cfg}, "tester", "apply")
				if err == nil {
					err = p.Commit()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			run := func(args ...string) (int, string) {
				code, out, stderr := sluiceCommand("", append(args, "--state-dir", state)...)
				return code, out + stderr
			}
			if code, out := run("check", file); code != exitOK {
				t.Errorf("before the edit: exit %d: %s", code, out)
			}
			if err := os.WriteFile(file, []byte(weight("7")), 0o600); err != nil {
				t.Fatal(err)
			}
			if code, out := run("check", file); code != exitFailure || !strings.Contains(out, "changed at run time from 1 to 5, and in the file to 7") {
				t.Errorf("exit %d: %s", code, out)
			}
			if code, out := run("check", file, "--json"); code != exitFailure || !strings.Contains(out, `"conflict": "`) {
				t.Errorf("exit %d: %s", code, out)
			}
			if code, out := run("config", "diff"); code != exitOK || !strings.Contains(out, "weight") {
				t.Errorf("exit %d: %s", code, out)
			}
			if code, out := run("config", "history"); code != exitOK || !strings.Contains(out, "tester") {
				t.Errorf("exit %d: %s", code, out)
			}
			if code, out := run("config", "revert", "9"); code != exitFailure || !strings.Contains(out, "known are 1 to 2") {
				t.Errorf("exit %d: %s", code, out)
			}
			args := append([]string{"config", "revert"}, revert...)
			if name == "named file" {
				args = append(args, file)
			}
			if code, out := run(args...); code != exitOK || !strings.Contains(out, "the next one starts with it") {
				t.Errorf("exit %d: %s", code, out)
			}
			if code, out := run("check", file); code != exitOK {
				t.Errorf("after the revert: exit %d: %s", code, out)
			}
			if code, out := run("audit"); code != exitOK || !strings.Contains(out, "without a daemon") {
				t.Errorf("exit %d: %s", code, out)
			}
			if _, err := os.Stat(filepath.Join(state, "lock")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the lock is left: %v", err)
			}
		})
	}
	if code, out, stderr := sluiceCommand("", "config", "revert", "--all", "--state-dir", t.TempDir()); code != exitFailure || !strings.Contains(stderr, "name the daemon's file with --config FILE") {
		t.Errorf("without changes: exit %d: %s%s", code, out, stderr)
	}
}
