// SPDX-License-Identifier: Apache-2.0

// Package audit records every change requested from the gateway: author, time, change and result.
// Changes and refused requests have separate files, so that no number of refused requests removes a
// change. The files contain JSON lines and are append-only.
package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/disk"
)

// Results of a requested change.
const (
	Done    = "done"
	Refused = "refused"
)

// Entry is one requested change.
type Entry struct {
	At       time.Time `json:"at"`
	Who      string    `json:"who" doc:"process, program and user at the socket; certificate, token and address over TCP; the file; or sluice itself"`
	What     string    `json:"what" doc:"what was asked for"`
	Result   string    `json:"result" enum:"done,refused"`
	Revision uint64    `json:"revision,omitempty" doc:"the revision in force afterwards"`
	Error    string    `json:"error,omitempty" doc:"why it was refused"`
	Count    uint64    `json:"count,omitempty" doc:"of refused requests: this entry stands for so many further ones like an earlier entry, within a minute"`
}

// Limits of the record of changes: a file is rotated at maxSize bytes, and maxFiles files are kept,
// including the present one. An entry has at most a few maxText bytes.
const (
	maxSize  = 4 << 20
	maxFiles = 5
	maxText  = 2048
)

// Log is the record in one directory. A nil Log records nothing.
type Log struct {
	path    string
	log     *slog.Logger
	size    int64     // at which a file is rotated
	files   int       // Files to keep.
	refused *refusals // nil in the log of refusals itself.

	mu     sync.Mutex // protects the rest
	file   *os.File
	length int64
	failed error // error of the last write; already logged
}

// Name is the name of the present file in the directory. Older files are Name.1 to Name.4.
const Name = "audit.jsonl"

// Open opens the record in a directory, which it creates. If that fails, the log and Warnings report it,
// and each entry is another attempt.
func Open(dir string, log *slog.Logger) *Log {
	l := &Log{path: filepath.Join(dir, Name), log: log, size: maxSize, files: maxFiles, refused: newRefusals(dir, log)}
	l.setWriteError(l.open())
	l.refused.journal.setWriteError(l.refused.journal.open())
	return l
}

// setWriteError stores the error that prevents writing, and logs it once.
func (l *Log) setWriteError(err error) {
	if err != nil && l.failed == nil {
		l.log.Error("changes are not recorded", "file", l.path, "error", err)
	}
	l.failed = err
}

// Warnings returns the reason if changes are not recorded.
func (l *Log) Warnings() []string {
	if l == nil {
		return nil
	}
	var list []string
	if l.refused != nil {
		list = l.refused.journal.Warnings()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		list = append(list, fmt.Sprintf("changes are not recorded: %s: %v", l.path, l.failed))
	}
	return list
}

// open opens the present file and terminates a line that a crash cut off.
func (l *Log) open() error {
	if err := os.MkdirAll(filepath.Dir(l.path), 0o700); err != nil {
		return err
	}
	f, err := disk.Open(l.path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.file, l.length = f, info.Size()
	last := make([]byte, 1)
	if l.length > 0 {
		if _, err := f.ReadAt(last, l.length-1); err == nil && last[0] != '\n' {
			_, err = f.WriteString("\n")
			l.length++
			return err
		}
	}
	return nil
}

// Add records a change or a refused request. It returns false for a refused request that is only counted,
// because the client had many refused within a minute. If the entry cannot be written, Add reports that
// to the daemon's log.
func (l *Log) Add(e Entry) bool {
	if l == nil {
		return true
	}
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	if e.Result == Refused && l.refused != nil {
		return l.refused.add(e)
	}
	l.add(e)
	return true
}

func (l *Log) add(e Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, text := range []*string{&e.Who, &e.What, &e.Error} {
		if len(*text) > maxText {
			*text = (*text)[:maxText-3] + "..."
		}
	}
	l.setWriteError(l.write(e))
}

func (l *Log) write(e Entry) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if l.file == nil { // the last attempt to open failed
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.length >= l.size {
		if err := l.putAway(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(append(line, '\n'))
	l.length += int64(n)
	if err != nil && n > 0 {
		_ = l.file.Truncate(l.length - int64(n)) // removes a partial line; if this fails, the next Open terminates it
		l.length -= int64(n)
	}
	return err
}

// putAway rotates the files and removes the oldest.
func (l *Log) putAway() error {
	err := l.file.Close()
	l.file = nil
	for i := l.files - 1; i > 0; i-- {
		if e := os.Rename(name(l.path, i-1), name(l.path, i)); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, l.open())
}

func name(path string, age int) string {
	if age == 0 {
		return path
	}
	return fmt.Sprintf("%s.%d", path, age)
}

// Close closes the file.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	var failed error
	if l.refused != nil {
		failed = l.refused.close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return failed
	}
	err := l.file.Close()
	l.file = nil
	return errors.Join(failed, err)
}

// Last returns the last entries of the record as [Read] does, with the refused requests that are counted
// and not written yet.
func (l *Log) Last(limit int) ([]Entry, error) {
	if l == nil {
		return nil, nil
	}
	changes, err := l.lastEntries(limit)
	if err != nil {
		return nil, err
	}
	refused, err := l.refused.lastEntries(limit)
	return merge(changes, refused, limit), err
}

// lastEntries returns the last entries of one journal, the oldest first.
func (l *Log) lastEntries(limit int) ([]Entry, error) {
	l.mu.Lock() // the lock prevents a rotation of the log
	defer l.mu.Unlock()
	return readFiles(l.path, l.files, limit)
}

// Read returns at most limit last entries of the record in a directory, the oldest first. Refused
// requests take at most half of the entries unless there are fewer changes. Invalid lines, such as
// a line cut off by a full disk, are omitted.
func Read(dir string, limit int) ([]Entry, error) {
	changes, err := readFiles(filepath.Join(dir, Name), maxFiles, limit)
	if err != nil {
		return nil, err
	}
	refused, err := readFiles(filepath.Join(dir, RefusedName), refusedFiles, limit)
	return merge(changes, refused, limit), err
}

// merge joins the last changes and the last refused requests by time.
func merge(changes, refused []Entry, limit int) []Entry {
	most := max((limit+1)/2, limit-len(changes)) // refused requests
	all := append(changes, refused...)
	slices.Reverse(all) // the stable sort then keeps the order of entries with equal times
	slices.SortStableFunc(all, func(a, b Entry) int { return b.At.Compare(a.At) })
	var list []Entry
	for _, e := range all {
		if len(list) == limit {
			break
		}
		if e.Result == Refused {
			if most == 0 {
				continue
			}
			most--
		}
		list = append(list, e)
	}
	slices.Reverse(list)
	return list
}

func readFiles(path string, files, limit int) ([]Entry, error) {
	var list []Entry
	for age := 0; age < files && len(list) < limit; age++ {
		entries, err := readFile(name(path, age))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("record of changes: %w", err)
		}
		list = append(entries, list...)
	}
	return list[max(0, len(list)-limit):], nil
}

func readFile(path string) ([]Entry, error) {
	f, err := disk.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []Entry
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		var e Entry
		if len(bytes.TrimSpace(line)) > 0 && json.Unmarshal(line, &e) == nil {
			list = append(list, e)
		}
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
	}
}
