// SPDX-License-Identifier: Apache-2.0

// Package damage generates damaged files for tests: a program must survive each damage of its files.
package damage

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Damage is one way in which a file differs from its intact content.
type Damage struct {
	Name string
	// Content of the damaged file; nil if Make creates it.
	Content []byte
	Make    func(path string) error
}

// kinds are the damages that do not depend on the content. A directory and a pipe take the place of
// a file without permission, which root can read.
var kinds = []Damage{
	{Name: "missing", Make: func(string) error { return nil }},
	{Name: "directory", Make: func(path string) error { return os.Mkdir(path, 0o700) }},
	{Name: "pipe", Make: func(path string) error { return unix.Mkfifo(path, 0o600) }},
	{Name: "loop of links", Make: func(path string) error { return os.Symlink(path, path) }},
	{Name: "empty", Content: []byte{}},
	{Name: "null", Content: []byte("null")},
	{Name: "empty object", Content: []byte("{}")},
	{Name: "empty list", Content: []byte("[]")},
	{Name: "list of null", Content: []byte("[null]")},
	{Name: "number", Content: []byte("1")},
	{Name: "text", Content: []byte(`"x"`)},
	{Name: "zeros", Content: make([]byte, 4096)},
	{Name: "deep", Content: bytes.Repeat([]byte("["), 1<<16)},
}

// Few returns a subset of the damages for slow tests: one cut and one flipped bit.
func Few(intact []byte) []Damage {
	if len(intact) == 0 {
		intact = []byte{' '}
	}
	half := len(intact) / 2
	return append([]Damage{{Name: "cut in half", Content: intact[:half]}, flipBit(intact, half, 1)}, kinds...)
}

// All returns every damage: the content cut at each length, and bits of each byte flipped. In a
// content of more than most bytes, only that number of positions is used.
func All(intact []byte, most int) []Damage {
	all := slices.Clone(kinds)
	for n := 0; n < len(intact); n += 1 + len(intact)/most {
		all = append(all, Damage{Name: fmt.Sprintf("cut at %d", n), Content: intact[:n]})
		for _, bit := range []int{0, 2, 5} { // the last is the case of a letter
			all = append(all, flipBit(intact, n, bit))
		}
	}
	return all
}

func flipBit(intact []byte, n, bit int) Damage {
	content := bytes.Clone(intact)
	content[n] ^= 1 << bit
	return Damage{Name: fmt.Sprintf("bit %d of byte %d flipped: %q", bit, n, content[n]), Content: content}
}

// Apply damages the file.
func (d Damage) Apply(path string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	if d.Content == nil {
		return d.Make(path)
	}
	return os.WriteFile(path, d.Content, 0o600)
}

// Each calls check after each damage to the file, and fails the test if check blocks.
func Each(t *testing.T, path string, list []Damage, check func(Damage) error) {
	t.Helper()
	for _, d := range list {
		if err := d.Apply(path); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			defer func() {
				if p := recover(); p != nil {
					done <- fmt.Errorf("panic: %v", p)
				}
			}()
			done <- check(d)
		}()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s: %v", d.Name, err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: it blocks", d.Name)
		}
	}
}
