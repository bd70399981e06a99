// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

func open(t *testing.T, dir string) *Log {
	t.Helper()
	l, err := Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// whats are the changes of the record.
func whats(t *testing.T, l *Log, limit int) string {
	t.Helper()
	list, err := l.Last(limit)
	if err != nil {
		t.Fatal(err)
	}
	var words []string
	for _, e := range list {
		words = append(words, e.What)
	}
	return strings.Join(words, " ")
}

// TestRecord: entries are there again after a restart, the last ones first to be kept, and nobody but
// the owner may read them.
func TestRecord(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	l := open(t, dir)
	l.Add(Entry{Who: "me", What: "a", Result: Done, Revision: 3})
	l.Add(Entry{Who: "me", What: "b", Result: Refused, Error: "no room"})
	l = open(t, dir)
	l.Add(Entry{Who: "you", What: strings.Repeat("c", 5000), Result: Done})
	list, err := l.Last(10)
	if err != nil || len(list) != 3 || list[0].Revision != 3 || list[1].Error != "no room" || list[2].At.IsZero() || len(list[2].What) != maxText {
		t.Errorf("%+v, %v", list, err)
	}
	if got := whats(t, l, 2); !strings.HasPrefix(got, "b ccc") {
		t.Errorf("the last two: %s", got)
	}
	if info, err := os.Stat(filepath.Join(dir, Name)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestOldFilesGo: the record is bounded, and the newest entries stay.
func TestOldFilesGo(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	l.size = 300
	for i := range 100 {
		l.Add(Entry{What: fmt.Sprint(i), Result: Done})
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != maxFiles {
		t.Errorf("%d files, %v", len(files), err)
	}
	if got := whats(t, l, 8); got != "92 93 94 95 96 97 98 99" {
		t.Errorf("the last ones: %s", got)
	}
	if list, _ := l.Last(1000); len(list) > 30 || list[0].What == "0" {
		t.Errorf("%d entries are kept, from %s on", len(list), list[0].What)
	}
}

// TestCutLine: what a crash has left of a line spoils no other.
func TestCutLine(t *testing.T) {
	dir := t.TempDir()
	open(t, dir).Add(Entry{What: "a"})
	f, err := os.OpenFile(filepath.Join(dir, Name), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"at":"2026-`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	l := open(t, dir)
	l.Add(Entry{What: "b"})
	if got := whats(t, l, 10); got != "a b" {
		t.Errorf("the record: %s", got)
	}
}

// TestFullDisk: the log says once that nothing is recorded, and the record goes on when there is room.
func TestFullDisk(t *testing.T) {
	labtest.Require(t, labtest.Root)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	var said bytes.Buffer
	l, err := Open(dir, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	l.Add(Entry{What: "before"})
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 60<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		l.Add(Entry{What: "lost", Error: strings.Repeat("x", 1000)})
	}
	if n := strings.Count(said.String(), "changes are not recorded"); n != 1 {
		t.Errorf("%d times: %s", n, &said)
	}
	os.Remove(filler)
	l.Add(Entry{What: "after"})
	if got := whats(t, l, 1000); !strings.HasPrefix(got, "before ") || !strings.HasSuffix(got, " after") {
		t.Errorf("the record: %s", got)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
