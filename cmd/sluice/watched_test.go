// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// TestWatchedFollowsLinks changes a file in every way in which such files are changed.
func TestWatchedFollowsLinks(t *testing.T) {
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
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close()
	file := watched{name: at("etc/sluice.yaml")}
	if err := file.follow(watcher); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		name   string
		change func() error
		want   bool
	}{
		{"what the link leads to is written", func() error { return write("v1/sluice.yaml", "v1a") }, true},
		{"a neighbour is written", func() error { return write("etc/other.yaml", "") }, false},
		{"the directory behind the link is another", func() error { return link("etc/data", at("v2")) }, true},
		{"that of before is written", func() error { return write("v1/sluice.yaml", "v1b") }, false},
		{"the new one is written", func() error { return write("v2/sluice.yaml", "v2a") }, true},
		{"a file takes the link's place", func() error {
			return errors.Join(write("etc/next", "own"), os.Rename(at("etc/next"), at("etc/sluice.yaml")))
		}, true},
		{"the file is written", func() error { return write("etc/sluice.yaml", "own, again") }, true},
	} {
		if err := step.change(); err != nil {
			t.Fatal(err)
		}
		got := false
		for quiet := false; !quiet; {
			select {
			case ev := <-watcher.Events:
				changed, err := file.changed(watcher, ev)
				if err != nil {
					t.Fatal(err)
				}
				got = got || changed
			case <-time.After(200 * time.Millisecond):
				quiet = true
			}
		}
		if got != step.want {
			t.Errorf("%s: told %v", step.name, got)
		}
	}
}
