// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/disk/damage"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func open(t *testing.T, dir string) *Log {
	t.Helper()
	l := Open(dir, slog.New(slog.DiscardHandler))
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

// TestRecord: entries survive a restart, the last ones are kept first, and only the owner may read the file.
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
	files, err := filepath.Glob(filepath.Join(dir, Name+"*"))
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

// TestCutLine: a line truncated by a crash damages no other.
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

// TestFullDisk: the log reports once that nothing is recorded, and recording resumes when there is room.
func TestFullDisk(t *testing.T) {
	labtest.Require(t, labtest.Root)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	var said bytes.Buffer
	l := Open(dir, slog.New(slog.NewTextHandler(&said, nil)))
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

// TestRefusedRequestsRemoveNoChange: whatever is refused, and however often, all changes stay in the
// record, and the files of refused requests stay within their bounds.
func TestRefusedRequestsRemoveNoChange(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	minutes := 0
	l.refused.now = func() time.Time { return time.Unix(0, 0).Add(time.Duration(minutes) * time.Minute) }
	random := rand.New(rand.NewPCG(1, 2))
	const changes, requests = 50, 40_000
	written, all := 0, 0
	for i := range requests {
		if i%(requests/changes) == 0 {
			l.Add(Entry{Who: "me", What: fmt.Sprint(i / (requests / changes)), Result: Done})
		}
		if random.IntN(1000) == 0 {
			minutes++
		}
		who := fmt.Sprintf("token reader at 192.0.2.%d:%d", random.IntN(4), 1024+random.IntN(60000))
		what := []string{"PUT /api/v1/config", "DELETE /" + strings.Repeat(fmt.Sprint(i), 900)}[random.IntN(2)]
		if l.Add(Entry{Who: who, What: what, Result: Refused, Error: strings.Repeat("no ", 1000)}) {
			written++
		}
		all++
	}
	if most := (minutes + 1) * 4 * refusedOfClient; written > most {
		t.Errorf("%d entries, want %d at most", written, most)
	}
	list, err := l.Last(10_000)
	if err != nil {
		t.Fatal(err)
	}
	var done []string
	for _, e := range list {
		if e.Result == Done {
			done = append(done, e.What)
		}
	}
	if len(done) != changes || done[0] != "0" {
		t.Errorf("%d changes: %v", len(done), done)
	}
	if list, _ := l.Last(10); len(list) != 10 || list[0].Result+list[1].Result == "" {
		t.Errorf("the last ten: %v", list)
	}
	files, _ := filepath.Glob(filepath.Join(dir, RefusedName+"*"))
	for _, f := range files {
		if info, err := os.Stat(f); err != nil || info.Size() > refusedSize+8*refusedText {
			t.Errorf("%s has %d bytes, %v", f, info.Size(), err)
		}
	}
	if len(files) != refusedFiles {
		t.Errorf("files %v", files)
	}
}

// TestEveryRefusalCounts: entries and counts together are the number of requests, before and after the end
// of a period and over a restart.
func TestEveryRefusalCounts(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	minutes := 0
	l.refused.now = func() time.Time { return time.Unix(0, 0).Add(time.Duration(minutes) * time.Minute) }
	sum := func(l *Log) (n uint64) {
		list, err := l.Last(10_000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			n += max(1, e.Count)
		}
		return n
	}
	const requests = 1000
	for i := range requests {
		minutes = i / 400
		l.Add(Entry{Who: fmt.Sprintf("198.51.100.%d:%d", i%50, i), What: fmt.Sprint("PUT /", i%3, strings.Repeat("x", i%40)), Result: Refused})
	}
	if got := sum(l); got != requests {
		t.Errorf("%d requests in the record, want %d", got, requests)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := sum(open(t, dir)); got != requests {
		t.Errorf("%d requests after a restart, want %d", got, requests)
	}
}

// TestDamage: no damage of the file keeps the record from being opened; a change is recorded, or a
// warning reports that it is not.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	l.Add(Entry{Who: "me", What: "a"})
	intact, err := os.ReadFile(filepath.Join(dir, Name))
	if err != nil {
		t.Fatal(err)
	}
	damage.Each(t, filepath.Join(dir, Name), damage.All(intact, 4096), func(d damage.Damage) error {
		l := Open(dir, slog.New(slog.DiscardHandler))
		defer l.Close()
		l.Add(Entry{Who: "me", What: "b"})
		list, err := l.Last(10)
		recorded := err == nil && slices.ContainsFunc(list, func(e Entry) bool { return e.What == "b" })
		if file := d.Content != nil || d.Name == "missing"; file != recorded || file != (len(l.Warnings()) == 0) {
			return fmt.Errorf("recorded %v, %v, warnings %v", list, err, l.Warnings())
		}
		if recorded {
			return nil
		}
		if err := os.RemoveAll(filepath.Join(dir, Name)); err != nil {
			return err
		}
		if l.Add(Entry{What: "c"}); len(l.Warnings()) > 0 || whats(t, l, 10) != "c" {
			return fmt.Errorf("without the obstacle: %v", l.Warnings())
		}
		return nil
	})
}
