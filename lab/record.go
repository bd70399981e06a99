// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"time"

	"golang.org/x/sys/unix"
)

// recordDir keeps one file for each lab on the machine, and a directory for what the lab mounts.
const recordDir = "/run/sluice/lab"

// Record is what the machine knows about a lab. It is written before anything of the lab is made,
// so that whatever a crash leaves behind can be found and removed.
//
// The process that owns a lab holds a lock (flock) on the record's file. The kernel releases it
// when the process ends, however it ends: a record whose lock is free and that is not detached
// belongs to nobody.
type Record struct {
	ID       string    `json:"id"`
	Topology Topology  `json:"topology"`
	Created  time.Time `json:"created"`
	// Detached labs outlive the process that made them, until "sluice lab down".
	Detached bool `json:"detached"`
	// HostSysctls holds the values to restore of the host's settings that the lab has changed.
	HostSysctls map[string]string `json:"host_sysctls,omitempty"`
	// Live says that the process that made the lab still runs. It is not stored.
	Live bool `json:"-"`
}

func recordPath(id string) string { return filepath.Join(recordDir, id+".json") }

// lockRecords takes the lock under which records are made, judged and removed.
func lockRecords() (unlock func(), err error) {
	if err := os.MkdirAll(recordDir, 0o755); err != nil {
		return nil, err
	}
	dir, err := os.Open(recordDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		dir.Close()
		return nil, fmt.Errorf("%s: lock: %w", recordDir, err)
	}
	return func() { dir.Close() }, nil
}

// store writes the record to a new file, locks it, renames it into place and returns it. A reader
// sees the old record, the new one or none, never half of one. The file of the record that it
// replaces, nil for a new record, is closed.
func (r *Record) store(old *os.File) (*os.File, error) {
	unlock, err := lockRecords()
	if err != nil {
		return nil, err
	}
	defer unlock()
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(recordPath(r.ID)+unfinished, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(append(data, '\n'))
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		err = os.Rename(f.Name(), recordPath(r.ID))
	}
	if err != nil {
		os.Remove(f.Name())
		f.Close()
		return nil, err
	}
	if old != nil {
		old.Close()
	}
	return f, nil
}

// unfinished is the suffix of a record that is being written.
const unfinished = ".new"

// removeUnfinished removes records that a crash kept from being written: nothing was made for them.
func removeUnfinished() error {
	unlock, err := lockRecords()
	if err != nil {
		return err
	}
	defer unlock()
	names, err := filepath.Glob(recordPath("*") + unfinished)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := os.Remove(name); err != nil {
			return err
		}
	}
	return nil
}

// List returns the labs on this machine, oldest first.
func List() ([]Record, error) {
	names, err := filepath.Glob(filepath.Join(recordDir, "*.json"))
	if err != nil {
		return nil, err
	}
	var records []Record
	for _, name := range names {
		r, err := readRecord(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		records = append(records, r)
	}
	sort.Slice(records, func(i, j int) bool { return records[i].Created.Before(records[j].Created) })
	return records, nil
}

// readRecord reads one record and finds out whether its owner lives.
func readRecord(path string) (Record, error) {
	f, err := os.Open(path)
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil {
		return Record{}, err
	}
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return Record{}, fmt.Errorf("%s: %w", path, err)
	}
	// A shared lock is enough to see the owner's exclusive one, and two readers do not take
	// each other for an owner.
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	r.Live = errors.Is(err, unix.EWOULDBLOCK)
	return r, nil
}
