// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestRestart: changes by apply and backend are in force after a restart, and end with revert.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, one)
	g := begin(t, file, filepath.Join(dir, "store"))
	if _, err := g.Apply(t.Context(), me, decode(t, two), nil, 0); err != nil {
		t.Fatal(err)
	}
	if err := g.SetState(t.Context(), me, "web", "a", Override{State: "drain"}, nil); err != nil {
		t.Fatal(err)
	}
	g = begin(t, file, g.at)
	g.want(t, "10.0.0.1 drain, 10.0.0.2 up")
	if _, err := g.Reload(t.Context(), g.FileChanged()); err != nil {
		t.Fatal(err)
	}
	g.want(t, "10.0.0.1 drain, 10.0.0.2 up")
	if _, err := g.RevertAll(t.Context(), me); err != nil {
		t.Fatal(err)
	}
	g = begin(t, file, g.at)
	g.want(t, "10.0.0.1 up")
}

// TestConflicts: a file that contradicts a change at run time is refused with both values, and nothing changes.
func TestConflicts(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, two)
	g := begin(t, file, filepath.Join(dir, "store"))
	if _, err := g.Apply(t.Context(), me, decode(t, strings.Replace(two, "10.0.0.2", "10.0.0.22", 1)), nil, 0); err != nil {
		t.Fatal(err)
	}
	write(t, file, strings.Replace(two, "10.0.0.2", "10.0.0.33", 1))
	if _, err := g.Reload(t.Context(), g.FileChanged()); err == nil || !strings.Contains(err.Error(), "services/web/backends/b/address: changed at run time from 10.0.0.2 to 10.0.0.22, and in the file to 10.0.0.33") {
		t.Errorf("error %v", err)
	}
	g.want(t, "10.0.0.1 up, 10.0.0.22 up")
	write(t, file, strings.Replace(two, "10.0.0.1}", "10.0.0.11}", 1)) // another value
	if _, err := g.Reload(t.Context(), g.FileChanged()); err != nil {
		t.Fatal(err)
	}
	g.want(t, "10.0.0.11 up, 10.0.0.22 up")
}

// TestConflictAtStart: a file that contradicts the changes made at run time, edited while no daemon ran,
// leaves the last accepted configuration in force. Warnings and events report it until the file fits.
func TestConflictAtStart(t *testing.T) {
	elsewhere := strings.Replace(two, "10.0.0.2", "10.0.0.33", 1)
	removed := "services: []\n" // the state of a backend has no service
	for name, c := range map[string]struct {
		edited string
		solve  func(t *testing.T, g *gateway, file string) error
		want   string
	}{
		"revert --all": {elsewhere, func(t *testing.T, g *gateway, _ string) error { _, err := g.RevertAll(t.Context(), me); return err }, "10.0.0.1 up, 10.0.0.33 up"},
		"revert":       {elsewhere, func(t *testing.T, g *gateway, _ string) error { _, err := g.Revert(t.Context(), me, 1); return err }, "10.0.0.1 up, 10.0.0.33 up"},
		"file": {elsewhere, func(t *testing.T, g *gateway, file string) error {
			write(t, file, strings.Replace(two, "10.0.0.1}", "10.0.0.11}", 1))
			_, err := g.Reload(t.Context(), g.FileChanged())
			return err
		}, "10.0.0.11 up, 10.0.0.22 up"},
		"removed service": {removed, func(t *testing.T, g *gateway, _ string) error { _, err := g.RevertAll(t.Context(), me); return err }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "sluice.yaml")
			write(t, file, two)
			g := begin(t, file, filepath.Join(dir, "store"))
			if _, err := g.Apply(t.Context(), me, decode(t, strings.Replace(two, "10.0.0.2", "10.0.0.22", 1)), nil, 0); err != nil {
				t.Fatal(err)
			}
			write(t, file, c.edited)
			for range 2 { // the next start is the same
				g = begin(t, file, g.at)
				g.want(t, "10.0.0.1 up, 10.0.0.22 up")
			}
			if w := strings.Join(g.Warnings(), "\n"); !strings.Contains(w, "the file is not in force") || !strings.Contains(w, "services/web") {
				t.Errorf("warnings %q", w)
			}
			if g.engine.View().Applied.Err == nil {
				t.Error("show does not report the refusal")
			}
			told := ""
			events, _, _ := g.Events.After(0, 100)
			for _, e := range events {
				told += e.Text + "\n"
			}
			if !strings.Contains(told, "refused: start") || !strings.Contains(told, "start with the last accepted configuration") {
				t.Errorf("events:\n%s", told)
			}
			if err := g.Save(me); err == nil {
				t.Error("save replaces the edited file")
			}
			if err := g.SetState(t.Context(), me, "web", "a", Override{State: "drain"}, nil); err != nil {
				t.Errorf("a change meanwhile: %v", err)
			}
			if err := g.SetState(t.Context(), me, "web", "a", Override{State: "auto"}, nil); err != nil {
				t.Errorf("a change meanwhile: %v", err)
			}
			if len(g.Warnings()) != 1 {
				t.Errorf("after other changes: warnings %q", g.Warnings())
			}
			if err := c.solve(t, g, file); err != nil {
				t.Fatal(err)
			}
			if w := g.Warnings(); len(w) > 0 {
				t.Errorf("afterwards: warnings %q", w)
			}
			g.want(t, c.want)
			g = begin(t, file, g.at)
			g.want(t, c.want)
		})
	}
}

// TestRefused: a change that the datapath refuses is not stored.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, one)
	g := begin(t, file, filepath.Join(dir, "store"))
	g.path.refuse = errors.New("no room")
	if _, err := g.Apply(t.Context(), me, decode(t, two), nil, 0); err == nil {
		t.Error("a refusal is accepted")
	}
	if err := g.SetState(t.Context(), me, "web", "a", Override{State: "down"}, nil); err == nil {
		t.Error("a refusal is accepted")
	}
	if c := g.Changes(); len(c.Edits)+len(c.States) > 0 || c.Revision != 1 {
		t.Errorf("kept: %+v", c)
	}
}

// TestChangesAreTold: the events name the author of each change and of each refusal.
func TestChangesAreTold(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, one)
	g := begin(t, file, filepath.Join(dir, "store"))
	if _, err := g.Apply(t.Context(), Author{"anna", "apply two.yaml"}, decode(t, two), nil, 0); err != nil {
		t.Fatal(err)
	}
	g.path.refuse = errors.New("no room")
	_ = g.SetState(t.Context(), Author{"ben", "backend web a down"}, "web", "a", Override{State: "down"}, nil)
	g.path.refuse = nil
	write(t, file, "services: [")
	_, _ = g.Reload(t.Context(), g.FileChanged())
	write(t, file, one)
	if _, err := g.RevertAll(t.Context(), Author{"anna", "revert --all"}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"revision 1: start, by " + file,
		"revision 2: apply two.yaml, by anna",
		"refused: backend web a down, by ben: fake: no room",
		"refused: the file changed, by " + file,
		"revision 3: revert --all, by anna",
	}
	events, _, _ := g.Events.After(0, 100)
	for i, e := range events {
		if i >= len(want) || !strings.HasPrefix(e.Text, want[i]) || e.Who == "" || (e.Error == "") == strings.HasPrefix(e.Text, "refused") {
			t.Errorf("event %d: %+v", i+1, e)
		}
	}
	if len(events) != len(want) {
		t.Errorf("%d events, want %d", len(events), len(want))
	}
}

// TestNoRoom: on a full or read-only file system, a change is refused and not applied. The gateway continues.
func TestNoRoom(t *testing.T) {
	labtest.Require(t, labtest.Root)
	for name, spoil := range map[string]func(t *testing.T, at string){
		"full": func(t *testing.T, at string) {
			f, err := os.Create(filepath.Join(at, "filler"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for err == nil {
				_, err = f.Write(bytes.Repeat([]byte{1}, 4096))
			}
		},
		"read-only": func(t *testing.T, at string) {
			if err := unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, at := filepath.Join(dir, "sluice.yaml"), filepath.Join(dir, "store")
			write(t, file, one)
			if err := os.Mkdir(at, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=64k"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
			g := begin(t, file, at)
			spoil(t, at)
			if _, err := g.Apply(t.Context(), me, decode(t, two), nil, 0); err == nil || !strings.Contains(err.Error(), "cannot be kept") {
				t.Errorf("error %v", err)
			}
			g.want(t, "10.0.0.1 up")
			write(t, file, two) // the operator's file may be on another disk
			if _, err := g.Reload(t.Context(), g.FileChanged()); err != nil {
				t.Fatal(err)
			}
			g.want(t, "10.0.0.1 up, 10.0.0.2 up")
		})
	}
}

// TestSave: the saved file equals the configuration in force, keeps its mode, and leaves no changes at run time.
func TestSave(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file+".real", one)
	if err := os.Symlink("sluice.yaml.real", file); err != nil {
		t.Fatal(err)
	}
	g := begin(t, file, filepath.Join(dir, "store"))
	if _, err := g.Apply(t.Context(), me, decode(t, two), nil, 0); err != nil {
		t.Fatal(err)
	}
	if err := g.Save(me); err != nil {
		t.Fatal(err)
	}
	if c := g.Changes(); len(c.Edits) != 0 {
		t.Errorf("edits %v are left", c.Edits)
	}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.Services[0].Backends) != 2 {
		t.Errorf("the file has %v", cfg.Services[0].Backends)
	}
	info, err := os.Lstat(file)
	if err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the symbolic link is gone: %v", err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	g = begin(t, file, g.at)
	g.want(t, "10.0.0.1 up, 10.0.0.2 up")
}

// TestTrial: a change on trial stays only after a confirmation. Without one it is reverted at the deadline or at
// the end of the daemon. Until then, other changes are refused, and a changed file waits.
func TestTrial(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, one)
	g := begin(t, file, filepath.Join(dir, "store"))
	try := func(trial time.Duration) {
		t.Helper()
		if _, err := g.Apply(t.Context(), me, decode(t, two), nil, trial); err != nil {
			t.Fatal(err)
		}
		g.want(t, "10.0.0.1 up, 10.0.0.2 up")
	}
	try(20 * time.Millisecond)
	labtest.Eventually(t, 10*time.Second, "the change is taken back", func() error {
		if g.Changes().Trial != nil {
			return errors.New("the change is still on trial")
		}
		return nil
	})
	g.want(t, "10.0.0.1 up")

	try(time.Hour)
	if err := g.SetState(t.Context(), me, "web", "a", Override{State: "down"}, nil); !errors.Is(err, ErrTrial) {
		t.Errorf("another change: %v", err)
	}
	write(t, file, strings.Replace(one, "10.0.0.1", "10.0.0.9", 1))
	if _, err := g.Reload(t.Context(), g.FileChanged()); !errors.Is(err, ErrTrial) {
		t.Errorf("a changed file: %v", err)
	}
	if err := g.Confirm(t.Context(), me); err != nil {
		t.Fatal(err)
	}
	g.want(t, "10.0.0.9 up, 10.0.0.2 up") // the file is read again
	if err := g.Confirm(t.Context(), me); !errors.Is(err, engine.ErrNotFound) {
		t.Errorf("confirmed twice: %v", err)
	}

	if _, err := g.Apply(t.Context(), me, decode(t, one), nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	g = begin(t, file, g.at) // as after kill -9
	g.want(t, "10.0.0.9 up, 10.0.0.2 up")
	if g.Changes().Trial != nil {
		t.Error("the trial goes on after a restart")
	}
}

// TestRefusedChangesFloodNothing: clients that repeat refused changes cause few lines in the log, the events and
// the record. A failed precondition is no event. All accepted changes are logged, reported and recorded.
func TestRefusedChangesFloodNothing(t *testing.T) {
	for name, cause := range map[string]error{"precondition": engine.ErrChanged, "invalid": config.Errors{{Cause: "no"}}, "missing": config.ErrNoObject} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "sluice.yaml")
			write(t, file, two)
			g := begin(t, file, filepath.Join(dir, "store"))
			var logged bytes.Buffer
			g.log = slog.New(slog.NewTextHandler(&logged, nil))
			record := audit.Open(dir, g.log)
			defer record.Close()
			g.Audit, g.Events = record, event.New(event.Held)
			first := g.Events.Last()
			for i := range 3000 {
				by := Author{fmt.Sprintf("token admin at 192.0.2.7:%d", i), fmt.Sprintf("put services/s%d", i%200)}
				if _, err := g.Change(t.Context(), by, func(*config.Config) (*config.Config, error) { return nil, cause }); err == nil {
					t.Fatal("accepted")
				}
				if i == 1500 {
					g.set(t, "web", "a", Override{State: "drain"})
				}
			}
			events, _, _ := g.Events.After(first, event.Held)
			lines := strings.Count(logged.String(), "\n")
			entries, err := record.Last(10_000)
			if err != nil || len(events) > 100 || lines > 100 || len(entries) > 100 {
				t.Errorf("%d events, %d lines, %d entries, %v", len(events), lines, len(entries), err)
			}
			if name == "precondition" && len(events) != 1 {
				t.Errorf("%d events of failed preconditions", len(events)-1)
			}
			if !slices.ContainsFunc(entries, func(e audit.Entry) bool { return e.Result == audit.Done }) {
				t.Error("the accepted change is not in the record")
			}
		})
	}
}

// TestProgramsAreTheOperators: no change at run time adds a program that the daemon would run. Commands of the
// file and programs of its exec-directory may be used, and the directory itself does not change.
func TestProgramsAreTheOperators(t *testing.T) {
	with := func(text, command string) string {
		return strings.Replace(text, "mode: dnat,", "mode: dnat, check: {type: exec, command: "+command+"},", 1)
	}
	other := strings.NewReplacer("web", "shop", "192.0.2.10", "192.0.2.11")
	file := "exec-directory: /etc/sluice/checks\n" + with(one, "[/usr/bin/own, a]")
	for command, allowed := range map[string]bool{
		"[/usr/bin/own, a]": true, "[/usr/bin/own, b]": false, "[/bin/sh, -c, id]": false, "[/etc/sluice/checks/one, any]": true,
		"[/etc/sluice/checks/../../../bin/sh]": false, "[/etc/sluice/checks/below/one]": false, "[/etc/sluice/checks2/one]": false, "[/etc/sluice/checks]": false,
	} {
		g := gatewayWith(t, file)
		service := strings.TrimPrefix(other.Replace(with(one, command)), "services:\n  - ")
		for how, change := range map[string]func() error{
			"apply": func() error {
				_, err := g.Apply(t.Context(), me, decode(t, file+"  - "+service), nil, 0)
				return err
			},
			"change": func() error {
				_, err := g.Change(t.Context(), me, func(c *config.Config) (*config.Config, error) { return c.Put("services/shop", []byte(service)) })
				return err
			},
		} {
			err := change()
			if (err == nil) != allowed {
				t.Errorf("%s of %s: %v", how, command, err)
			}
			if err != nil && !strings.Contains(err.Error(), "exec-directory") {
				t.Errorf("%s: %v", command, err)
			}
		}
	}
	g := gatewayWith(t, file)
	if _, err := g.Apply(t.Context(), me, decode(t, strings.Replace(file, "/etc/sluice/checks", "/bin", 1)), nil, 0); err == nil {
		t.Error("the exec-directory was changed at run time")
	}
}
