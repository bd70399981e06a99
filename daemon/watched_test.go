// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestWatchedFile changes a file in every way in which such files are changed.
func TestWatchedFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) error { return os.WriteFile(at(name), []byte(text), 0o600) }
	for _, d := range []string{"etc", "v1", "v2"} {
		if err := errors.Join(os.Mkdir(at(d), 0o700), write(d+"/sluice.yaml", d)); err != nil {
			t.Fatal(err)
		}
	}
	link := func(name, to string) error {
		return errors.Join(os.Symlink(to, at(name+".new")), os.Rename(at(name+".new"), at(name)))
	}
	if err := errors.Join(os.Remove(at("etc/sluice.yaml")), link("etc/data", at("v1")), link("etc/sluice.yaml", "data/sluice.yaml")); err != nil {
		t.Fatal(err)
	}
	file := polledFile{name: at("etc/sluice.yaml"), seen: identify(at("etc/sluice.yaml"))}
	now := time.Now()
	looks := func() (told int) {
		for range 3 {
			if now = now.Add(glance); file.hasChanged(now) {
				told++
			}
		}
		return told
	}
	if looks() != 0 {
		t.Error("nothing is told as a change")
	}
	for _, step := range []struct {
		name   string
		change func() error
		want   int
	}{
		{"what the link leads to is written", func() error { return write("v1/sluice.yaml", "v1a") }, 1},
		{"a neighbour is written", func() error { return write("etc/other.yaml", "") }, 0},
		{"the directory behind the link is another", func() error { return link("etc/data", at("v2")) }, 1},
		{"that of before is written", func() error { return write("v1/sluice.yaml", "v1b") }, 0},
		{"the new one is written", func() error { return write("v2/sluice.yaml", "v2a") }, 1},
		{"a file takes the link's place", func() error {
			return errors.Join(write("etc/next", "own"), os.Rename(at("etc/next"), at("etc/sluice.yaml")))
		}, 1},
		{"the file is written", func() error { return write("etc/sluice.yaml", "own, again") }, 1},
		{"the file is removed", func() error { return os.Remove(at("etc/sluice.yaml")) }, 0},
		{"it is there again", func() error { return write("etc/sluice.yaml", "back") }, 1},
		{"its directory is removed", func() error { return os.RemoveAll(at("etc")) }, 0},
		{"the directory is made again", func() error { return errors.Join(os.Mkdir(at("etc"), 0o700), write("etc/sluice.yaml", "anew")) }, 1},
		{"the file is written there", func() error { return write("etc/sluice.yaml", "anew, again") }, 1},
		{"the directory is replaced at once", func() error {
			return errors.Join(os.Rename(at("etc"), at("old")), os.Mkdir(at("etc"), 0o700), write("etc/sluice.yaml", "the third"))
		}, 1},
		{"a link takes the directory's place", func() error { return errors.Join(os.RemoveAll(at("etc")), link("etc", at("v1"))) }, 1},
	} {
		if err := step.change(); err != nil {
			t.Fatal(err)
		}
		if got := looks(); got != step.want {
			t.Errorf("%s: told %d times", step.name, got)
		}
	}
}

// TestAWriterIsWaitedFor keeps the file open after it was written.
func TestAWriterIsWaitedFor(t *testing.T) {
	file := polledFile{name: filepath.Join(t.TempDir(), "sluice.yaml")}
	f, err := os.Create(file.name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	now := time.Now()
	file.hasChanged(now)
	if file.hasChanged(now.Add(patience - glance)) {
		t.Error("a file that is being written is read")
	}
	if !file.hasChanged(now.Add(patience)) {
		t.Error("a file that stays open is never read")
	}
}

// TestAFileThatIsWrittenIsNotReadYet: half a configuration may be a valid one.
func TestAFileThatIsWrittenIsNotReadYet(t *testing.T) {
	file := polledFile{name: filepath.Join(t.TempDir(), "sluice.yaml")}
	if file.beingWritten() {
		t.Error("a file that is not there is being written")
	}
	f, err := os.Create(file.name)
	if err != nil {
		t.Fatal(err)
	}
	if !file.beingWritten() {
		t.Error("an open file is not being written")
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if file.beingWritten() {
		t.Error("a closed file is being written")
	}
}
