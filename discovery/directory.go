// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
)

// Bounds of a directory.
const (
	pollEvery   = time.Second
	mostOfFile  = 1 << 20 // maximum size of a file in bytes
	mostOfFiles = 1000
)

// directory finds backends in files.
type directory struct {
	path  string
	files map[string]*file // by name
}

// file is the last valid content of a file.
type file struct {
	state    os.FileInfo
	backends []config.Backend
	err      error
}

// awaitChange implements source. It only waits, because look is cheap if nothing changed.
func (d *directory) awaitChange(ctx context.Context) { <-ctx.Done() }

func (d *directory) find(context.Context) (found []config.Backend, again time.Duration, err error) {
	names, err := filepath.Glob(filepath.Join(escapePattern(d.path), "*.yaml"))
	if err == nil {
		_, err = os.ReadDir(d.path) // Glob returns nothing for an unreadable directory
	}
	if err != nil {
		return nil, 0, err
	}
	if len(names) > mostOfFiles {
		return nil, 0, fmt.Errorf("%s has %d files, at most %d are read", d.path, len(names), mostOfFiles)
	}
	there := map[string]bool{}
	var broken []error
	for _, name := range names { // sorted by name
		if strings.HasPrefix(filepath.Base(name), ".") {
			continue // an editor's temporary file, or a file before its final rename
		}
		there[name] = true
		f := d.read(name)
		if f.err != nil {
			broken = append(broken, f.err)
		}
		found = append(found, f.backends...)
	}
	for name := range d.files {
		if !there[name] {
			delete(d.files, name)
		}
	}
	if err := errors.Join(broken...); err != nil {
		return found, pollEvery, &partlyError{err}
	}
	return found, pollEvery, nil
}

// escapePattern escapes the pattern characters of a path.
func escapePattern(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// read returns a file's content, from the disk if it changed.
func (d *directory) read(name string) *file {
	state, err := os.Stat(name)
	f := d.files[name]
	if f == nil {
		f = &file{}
		d.files[name] = f
	}
	if err == nil && f.state != nil && os.SameFile(state, f.state) && state.ModTime().Equal(f.state.ModTime()) && state.Size() == f.state.Size() {
		return f
	}
	f.state = state
	var list []config.Backend
	if err == nil {
		list, err = backendsOf(name)
	}
	if f.err = err; err == nil {
		f.backends = list
	}
	return f
}

func backendsOf(name string) ([]config.Backend, error) {
	raw, err := disk.Read(name, mostOfFile)
	if err != nil {
		return nil, err
	}
	if len(strings.TrimSpace(string(raw))) == 0 {
		return nil, nil
	}
	return config.DecodeBackends(name, raw)
}
