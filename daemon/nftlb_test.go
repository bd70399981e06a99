// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNftlbKey: the key is read from a file that is its owner's alone, and again when it changes.
func TestNftlbKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write := func(text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, mode); err != nil {
			t.Fatal(err)
		}
	}
	var log strings.Builder
	k := &keyFile{file: file, log: slog.New(slog.NewTextHandler(&log, nil))}
	if err := k.read(); err == nil {
		t.Error("no file, and no error")
	}
	for text, mode := range map[string]os.FileMode{"open\n": 0o644, "": 0o600, "two\nlines\n": 0o600} {
		if write(text, mode); k.read() == nil {
			t.Errorf("%q with mode %o is taken", text, mode)
		}
	}
	if write("a key with blanks\n", 0o600); k.currentKey() != "a key with blanks" {
		t.Errorf("the key is %q", k.key)
	}
	write("another", 0o644)
	log.Reset()
	first, second := k.currentKey(), k.currentKey()
	if first != "a key with blanks" || second != first || strings.Count(log.String(), "the key of before stays") != 1 {
		t.Errorf("the key is %q; log:\n%s", k.key, &log)
	}
	if write("another", 0o600); k.currentKey() != "another" {
		t.Errorf("the key is %q", k.key)
	}
}
