// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/disk/damage"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// cached makes the daemon write each of its caches.
const cached = `
services:
  - name: web
    listen: [{address: 10.0.2.40, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: wrr
    slow-start: 1h
    backends: [{name: a, address: 10.0.2.2, port: 8080}]
    backends-from: {directory: %s, port: 8080}
`

// TestDamagedFiles: no damaged cache prevents a start of the daemon, and show reports it. A damaged document of
// changes is refused with its name, and its rules stay in force.
func TestDamagedFiles(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Balancer())
	found := t.TempDir()
	key := filepath.Join(t.TempDir(), "key")
	if err := errors.Join(os.WriteFile(filepath.Join(found, "a.yaml"), []byte("- {address: 10.0.2.3}\n"), 0o600), os.WriteFile(key, []byte("key"), 0o600)); err != nil {
		t.Fatal(err)
	}
	d := start(t, l.Node("gateway"), fmt.Sprintf("datapath: nftables"+cached, found), "--nftlb-api", "127.0.0.1:0", "--nftlb-key", key)
	state := l.Node("gateway").StateDir()
	documents, err := filepath.Glob(filepath.Join(state, "changes", "*", "changes.json"))
	if err != nil || len(documents) != 1 {
		t.Fatalf("documents %v, %v", documents, err)
	}
	bases, err := filepath.Glob(filepath.Join(filepath.Dir(documents[0]), "base-*"))
	if err != nil || len(bases) != 1 {
		t.Fatalf("bases %v, %v", bases, err)
	}
	caches := []string{bases[0], filepath.Join(state, "addresses.json")}
	for _, name := range []string{"discovered.json", "audit.jsonl", "refused.jsonl", "slow-start.json", "nftlb.json"} {
		caches = append(caches, filepath.Join(state, "changes", name))
	}
	intact := map[string][]byte{}
	for _, path := range append(slices.Clone(caches), documents[0]) {
		labtest.Eventually(t, patience, path, func() (err error) {
			intact[path], err = os.ReadFile(path)
			return err
		})
	}
	for i := range damage.Few([]byte("xx")) {
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		name := ""
		for _, path := range caches {
			one := damage.Few(intact[path])[i]
			if name = one.Name; one.Apply(path) != nil {
				t.Fatal(one.Apply(path))
			}
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		warns(t, d, name, caches)
		for _, path := range caches {
			_ = os.RemoveAll(path)
		}
	}

	if err := d.Kill(); err != nil {
		t.Fatal(err)
	}
	damage.Each(t, documents[0], damage.Few(intact[documents[0]]), func(one damage.Damage) error {
		if one.Name == "missing" {
			return nil
		}
		out, err := d.Command(t.Context(), "run", "-c", d.File).CombinedOutput()
		if err == nil || !strings.Contains(string(out), documents[0]) || !strings.Contains(string(out), "move the file away") {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err := errors.Join(os.RemoveAll(documents[0]), d.Restart(t.Context()), d.Kill()); err != nil {
		t.Fatal(err)
	}

	changes := filepath.Join(state, "changes")
	if err := errors.Join(unix.Mount(changes, changes, "", unix.MS_BIND, ""), unix.Mount("", changes, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(changes, unix.MNT_DETACH) })
	if err := os.WriteFile(d.File, fmt.Appendf(nil, "datapath: nftables"+strings.ReplaceAll(cached, "name: a,", "name: a, weight: 2,"), found), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Restart(t.Context()); err != nil {
		t.Fatalf("read-only directory: %v", err)
	}
	for _, name := range []string{"audit.jsonl", "discovered.json", "the history of changes has a gap"} {
		labtest.Eventually(t, patience, "a warning about "+name, func() error {
			status, err := d.Status(t.Context())
			if err == nil && !strings.Contains(strings.Join(status.Warnings, "\n"), name) {
				err = fmt.Errorf("warnings %q", status.Warnings)
			}
			return err
		})
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}

// warns fails the test unless the daemon warns of each damaged file. Some damages are valid content of
// some files.
func warns(t *testing.T, d *daemon.Daemon, damaged string, files []string) {
	t.Helper()
	status, err := d.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if damaged == "missing" {
		return
	}
	log := d.Log()
	for _, path := range files {
		name := filepath.Base(path)
		harmless := strings.HasSuffix(name, ".jsonl") && !slices.Contains([]string{"directory", "pipe", "loop of links"}, damaged) || // files that are only appended to
			slices.Contains([]string{"null", "empty list", "empty object"}, damaged) || strings.Contains(damaged, "flipped")
		if !harmless && !strings.Contains(log, name) {
			t.Errorf("%s: the log does not name %s", damaged, name)
		}
		lasting := strings.HasPrefix(name, "nftlb") || name == "addresses.json" || damaged == "directory" && !strings.HasPrefix(name, "base")
		if !harmless && lasting && !strings.Contains(strings.Join(status.Warnings, "\n"), name) {
			t.Errorf("%s: no warning names %s: %q", damaged, name, status.Warnings)
		}
	}
}
