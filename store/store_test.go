// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

func decode(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Decode("f.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// service has the backends a and b with these weights.
func service(name string, weights ...int) string {
	return fmt.Sprintf("  - {name: %s, listen: [{address: 192.0.2.%d, ports: [80]}], protocol: tcp, mode: dnat,\n"+
		"     backends: [{name: a, address: 10.0.0.1, weight: %d}, {name: b, address: 10.0.0.2, weight: %d}]}\n", name, len(name), weights[0], weights[1])
}

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, "/etc/sluice/sluice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func change(t *testing.T, s *Store, file *config.Config, to Content, what string) {
	t.Helper()
	p, err := s.Prepare(file, to, "tester", what)
	if err == nil {
		err = p.Commit()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func text(t *testing.T, c *config.Config) string {
	t.Helper()
	b, err := config.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestSurvives: what was changed is there for the next process, on top of a file that has changed
// elsewhere meanwhile.
func TestSurvives(t *testing.T) {
	dir := t.TempDir()
	file := decode(t, "services:\n"+service("web", 1, 1))
	s := open(t, dir)
	change(t, s, file, Content{Config: file}, "start")
	drained := []State{{Service: "web", Backend: "b", State: "drain"}, {Service: "web", Backend: "gone", State: "down"}}
	change(t, s, file, Content{Config: decode(t, "services:\n"+service("web", 5, 1)+service("shop", 1, 1)), States: drained}, "apply")

	s = open(t, dir)
	if s.Revision() != 2 || len(s.History()) != 2 || s.History()[1].Who != "tester" {
		t.Errorf("revision %d, history %v", s.Revision(), s.History())
	}
	c, err := s.Merge(decode(t, "services:\n"+service("web", 1, 3)))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := text(t, c.Config), text(t, decode(t, "services:\n"+service("web", 5, 3)+service("shop", 1, 1))); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
	if !slices.Equal(c.States, drained[:1]) {
		t.Errorf("states %v, want %v: the other backend does not exist", c.States, drained[:1])
	}
	if entries, _ := os.ReadDir(filepath.Dir(s.Path())); len(entries) != 2 {
		t.Errorf("%v in the directory, want the document and its base", entries)
	}
}

// TestConflict: a file that changed the same value is named, and changes nothing.
func TestConflict(t *testing.T) {
	s := open(t, t.TempDir())
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: decode(t, "services:\n"+service("web", 5, 1))}, "apply")
	_, err := s.Merge(decode(t, "services:\n"+service("web", 7, 1)))
	var conflict *ConflictError
	if !errors.As(err, &conflict) || !strings.Contains(err.Error(), "services/web/backends/a/weight: changed at run time from 1 to 5, and in the file to 7") {
		t.Errorf("error %v", err)
	}
	// The same value is none, and the edit is not needed any more.
	c, err := s.Merge(decode(t, "services:\n"+service("web", 5, 1)))
	if err != nil {
		t.Fatal(err)
	}
	change(t, s, decode(t, "services:\n"+service("web", 5, 1)), c, "reload")
	if e := s.Edits(); len(e) != 0 {
		t.Errorf("edits %v are left", e)
	}
}

// TestHistory goes back to each revision that is kept, and no further.
func TestHistory(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	for i := 1; i <= MaxHistory+5; i++ {
		services := service("web", i, 1)
		if i%3 == 0 {
			services = service("other", 1, i) + services
		}
		var states []State
		if i%2 == 0 {
			states = []State{{Service: "web", Backend: "a", State: "drain"}}
		}
		change(t, s, file, Content{Config: decode(t, "services:\n"+services), States: states}, fmt.Sprint("change ", i))
	}
	s = open(t, dir)
	if n := len(s.History()); n != MaxHistory {
		t.Errorf("%d revisions are kept, want %d", n, MaxHistory)
	}
	for i := 6; i <= MaxHistory+5; i++ {
		c, err := s.At(uint64(i))
		if err != nil {
			t.Fatal(err)
		}
		for _, sv := range c.Config.Services {
			if sv.Name == "web" && sv.Backends[0].Weight != i {
				t.Errorf("revision %d has weight %d", i, sv.Backends[0].Weight)
			}
		}
		if (len(c.Config.Services) == 2) != (i%3 == 0) || (len(c.States) == 1) != (i%2 == 0) {
			t.Errorf("revision %d: %d services, states %v", i, len(c.Config.Services), c.States)
		}
		if i%3 == 0 && c.Config.Services[0].Name != "other" {
			t.Errorf("revision %d: the order is lost", i)
		}
	}
	for _, n := range []uint64{0, 5, MaxHistory + 6} {
		if _, err := s.At(n); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("revision %d: %v", n, err)
		}
	}
}

// TestDiscard: what is prepared and not committed leaves the old document, and no file.
func TestDiscard(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: file}, "start")
	p, err := s.Prepare(file, Content{Config: decode(t, "services:\n"+service("web", 9, 1))}, "tester", "apply")
	if err != nil {
		t.Fatal(err)
	}
	p.Discard()
	if again := open(t, dir); len(again.Edits()) != 0 || again.Revision() != 1 {
		t.Errorf("the discarded change counts: %v", again.Edits())
	}
	if entries, _ := os.ReadDir(filepath.Dir(s.Path())); len(entries) != 2 {
		t.Errorf("left: %v", entries)
	}
	change(t, s, file, Content{Config: file}, "nothing")
	if s.Revision() != 1 {
		t.Error("a change that changes nothing is a revision")
	}
}

// TestBroken: a document that cannot be read is named, and not taken for none.
func TestBroken(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: file}, "start")
	for name, text := range map[string]string{"not JSON": "{", "of another layout": `{"layout": 99}`, "without base": `{"layout": 1, "base": "base-1.yaml"}`} {
		if err := os.WriteFile(s.Path(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, "/etc/sluice/sluice.yaml"); err == nil || !strings.Contains(err.Error(), "move the file away") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
