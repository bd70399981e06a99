// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
	"github.com/sluice-lb/sluice/disk/damage"
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

// TestSurvives: the next process has the changes, on top of a file with other edits.
func TestSurvives(t *testing.T) {
	dir := t.TempDir()
	file := decode(t, "services:\n"+service("web", 1, 1))
	s := open(t, dir)
	change(t, s, file, Content{Config: file}, "start")
	drained := []Override{{Service: "web", Backend: "b", State: "drain"}, {Node: true, State: "drain"}, {Service: "web", Backend: "gone", State: "down"}}
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
	if !slices.Equal(c.States, drained[:2]) {
		t.Errorf("states %v, want %v: the other backend does not exist", c.States, drained[:2])
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

// statesOf returns the states of revision i of TestHistory, sorted by path.
func statesOf(i int) (states []Override) {
	if i%5 == 0 {
		states = append(states, Override{Node: true, State: "drain"}, Override{State: "drain"})
	}
	if i%2 == 0 {
		states = append(states, Override{Service: "web", Backend: "a", State: "drain"})
	}
	return states
}

// TestHistory reverts to each stored revision, and no further.
func TestHistory(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	for i := 1; i <= MaxHistory+5; i++ {
		services := service("web", i, 1)
		if i%3 == 0 {
			services = service("other", 1, i) + services
		}
		change(t, s, file, Content{Config: decode(t, "services:\n"+services), States: statesOf(i)}, fmt.Sprint("change ", i))
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
		byPath := func(x, y Override) int { return strings.Compare(x.path(), y.path()) }
		if (len(c.Config.Services) == 2) != (i%3 == 0) || !slices.Equal(slices.SortedFunc(slices.Values(c.States), byPath), statesOf(i)) {
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

// TestDiscard: a prepared but uncommitted document leaves the old one and no file.
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
	for name, text := range map[string]string{"not JSON": "{", "of another layout": `{"layout": 99}`, "no document": "{}", "null": "null"} {
		if err := os.WriteFile(s.Path(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, "/etc/sluice/sluice.yaml"); err == nil || !strings.Contains(err.Error(), "move the file away") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDamage: a damaged document is refused with its name and the next step, or not damaged in its
// meaning. A document of an earlier version, without a checksum, is read.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: file}, "start")
	drained := []Override{{Service: "web", Backend: "b", State: "drain", Until: time.Unix(1, 0).UTC(), Then: "reset"}}
	change(t, s, file, Content{Config: decode(t, "services:\n"+service("web", 5, 1)), States: drained}, "apply")
	intact, err := os.ReadFile(s.Path())
	if err != nil {
		t.Fatal(err)
	}
	want := s.doc
	for name, content := range map[string][]byte{"sealed": intact, "of an earlier version": unsealed(t, intact)} {
		damage.Each(t, s.Path(), []damage.Damage{{Name: name, Content: content}}, func(damage.Damage) error {
			s, err := Open(dir, "/etc/sluice/sluice.yaml")
			if err == nil && (!reflect.DeepEqual(s.doc, want) || s.Lost() != "") {
				err = fmt.Errorf("read as %+v, want %+v; lost %s", s.doc, want, s.Lost())
			}
			return err
		})
	}
	damage.Each(t, s.Path(), damage.All(intact, 4096), func(d damage.Damage) error {
		s, err := Open(dir, "/etc/sluice/sluice.yaml")
		switch {
		case d.Name == "missing":
			return err
		case err == nil && !reflect.DeepEqual(s.doc, want):
			return fmt.Errorf("accepted as %+v", s.doc)
		case err != nil && (!strings.Contains(err.Error(), s.pathOf(dir)) || !strings.Contains(err.Error(), "move the file away")):
			return err
		}
		return nil
	})
	damage.Each(t, s.Path(), damage.All(unsealed(t, intact), 200), func(damage.Damage) error {
		_, _ = Open(dir, "/etc/sluice/sluice.yaml")
		return nil
	})
	for _, state := range []string{"drbin", "", "Up"} {
		text := strings.Replace(string(unsealed(t, intact)), `"state":"drain"`, `"state":"`+state+`"`, 1)
		damage.Each(t, s.Path(), []damage.Damage{{Name: state, Content: []byte(text)}}, func(damage.Damage) error {
			if _, err := Open(dir, "/etc/sluice/sluice.yaml"); err == nil || !strings.Contains(err.Error(), "not one of up, drain, down") {
				return fmt.Errorf("state %q: %v", state, err)
			}
			return nil
		})
	}
}

func unsealed(t *testing.T, text []byte) []byte {
	t.Helper()
	object, sealed, err := disk.Unseal(text)
	if err != nil || !sealed {
		t.Fatalf("the document has no checksum: %v", err)
	}
	return append(object, '\n')
}

// pathOf also works for a store that could not be opened.
func (*Store) pathOf(dir string) string {
	return (&Store{dir: directory(dir, "/etc/sluice/sluice.yaml")}).path()
}

// TestLostBase: without a readable base the changes hold, the history is lost, and the next change writes
// a new base.
func TestLostBase(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: file}, "start")
	change(t, s, file, Content{Config: decode(t, "services:\n"+service("web", 5, 1))}, "apply")
	base := filepath.Join(s.dir, s.doc.Base)
	document, err := os.ReadFile(s.Path())
	if err != nil {
		t.Fatal(err)
	}
	intact, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	damage.Each(t, base, damage.Few(intact), func(d damage.Damage) error {
		if err := os.WriteFile(s.Path(), document, 0o600); err != nil {
			return err
		}
		s, err := Open(dir, "/etc/sluice/sluice.yaml")
		if err != nil || !strings.Contains(s.Lost(), base) || len(s.History()) > 0 {
			return fmt.Errorf("%v, lost %q, history %v", err, s.Lost(), s.History())
		}
		c, err := s.Merge(file)
		if err != nil || c.Config.Services[0].Backends[0].Weight != 5 {
			return fmt.Errorf("the change is lost: %v", err)
		}
		if d.Name == "directory" { // in the place of the new base
			return nil
		}
		change(t, s, file, c, "start")
		if s.Lost() != "" || open(t, dir).Lost() != "" {
			return errors.New("the base is not written again")
		}
		return nil
	})
}

// TestMovedAway: a document that the operator moved away is not deleted.
func TestMovedAway(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	change(t, s, file, Content{Config: file}, "start")
	if err := os.Rename(s.Path(), s.Path()+".away"); err != nil {
		t.Fatal(err)
	}
	change(t, open(t, dir), file, Content{Config: file}, "start")
	if _, err := os.Stat(s.Path() + ".away"); err != nil {
		t.Error(err)
	}
}
