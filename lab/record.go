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

	"github.com/sluice-lb/sluice/disk"
)

// recordDir contains one file per lab on the machine, and a directory for the lab's mounts.
const recordDir = "/run/sluice/lab"

// Record is the stored description of a lab. It is written before the lab's other objects, so that they can be found
// and removed after a crash.
//
// The process that owns a lab holds a lock (flock) on the record's file. The kernel releases it when the process
// exits for any reason. An unlocked record that is not detached is orphaned.
type Record struct {
	ID       string    `json:"id"`
	Topology Topology  `json:"topology"`
	Created  time.Time `json:"created"`
	// Detached labs outlive their process, until "sluice lab down".
	Detached bool `json:"detached"`
	// HostSysctls holds the original values of the host's settings that the lab has changed.
	HostSysctls map[string]string `json:"host_sysctls,omitempty"`
	// Live reports whether the owner of the lab still runs. It is not stored.
	Live bool `json:"-"`
}

func recordPath(id string) string { return filepath.Join(recordDir, id+".json") }

// lockRecords takes the lock for creating, checking and removing records.
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

// store writes the record to a new file, locks it and renames it into place. A reader finds the old record, the new
// one or none, but never a partial one. old is the file of the replaced record, or nil, and is closed.
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
	var f *os.File // the descriptor that keeps the lock
	err = disk.Replace(recordPath(r.ID), append(data, '\n'), 0o644, func(written *os.File) error {
		if err := unix.Flock(int(written.Fd()), unix.LOCK_EX); err != nil {
			return err
		}
		fd, err := unix.FcntlInt(written.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			f = os.NewFile(uintptr(fd), recordPath(r.ID))
		}
		return err
	})
	if err != nil {
		if f != nil {
			f.Close()
		}
		return nil, err
	}
	if old != nil {
		old.Close()
	}
	return f, nil
}

// removeUnfinished removes incomplete records of crashed processes; their labs have no other objects.
func removeUnfinished() error {
	unlock, err := lockRecords()
	if err != nil {
		return err
	}
	defer unlock()
	names, err := filepath.Glob(recordPath("*") + disk.Unfinished)
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

// readRecord reads one record and checks whether its owner lives.
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
	// A shared lock detects the owner's exclusive lock, and two readers do not conflict.
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	r.Live = errors.Is(err, unix.EWOULDBLOCK)
	return r, nil
}
