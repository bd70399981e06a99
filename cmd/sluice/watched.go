// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
)

// watched is a file by its name and by what that leads to: configuration management keeps
// files behind symbolic links and replaces the links, Kubernetes those to the directory.
type watched struct{ name, real string }

// follow watches the directories of the name and of what it leads to now: editors replace
// files by renaming.
func (w *watched) follow(watcher *fsnotify.Watcher) error {
	before := w.real
	real, err := filepath.EvalSymlinks(w.name)
	if err != nil {
		return watcher.Add(filepath.Dir(w.name)) // it may come
	}
	w.real = real
	if old := filepath.Dir(before); before != "" && old != filepath.Dir(real) && old != filepath.Dir(w.name) {
		_ = watcher.Remove(old) // it may be gone
	}
	return errors.Join(watcher.Add(filepath.Dir(w.name)), watcher.Add(filepath.Dir(real)))
}

// changed tells whether an event says that the file may be another.
func (w *watched) changed(watcher *fsnotify.Watcher, ev fsnotify.Event) (bool, error) {
	if real, err := filepath.EvalSymlinks(w.name); err == nil && real != w.real {
		return true, w.follow(watcher)
	}
	at := filepath.Clean(ev.Name)
	return (at == filepath.Clean(w.name) || at == w.real) && !ev.Has(fsnotify.Chmod) && !ev.Has(fsnotify.Remove), nil
}
