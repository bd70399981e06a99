// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/store"
)

// offline reports whether a command may read the changes made at run time from the disk: err is that no
// daemon runs in the own network namespace.
func (a *app) offline(err error) bool {
	return errors.Is(err, api.ErrNoDaemon) && a.remote.Server == "" && (a.socket == "" || a.stateDir != "")
}

// openStore opens the changes made at run time, without a daemon. Without a name, the configuration file is
// the only one with changes.
func (a *app) openStore(file string) (*store.Store, string, error) {
	dir := a.storeDirectory()
	if file == "" {
		files := store.Files(dir)
		if len(files) != 1 {
			return nil, "", fmt.Errorf("no daemon runs, and %s has the changes of %s: name the daemon's file with --config FILE", dir, plural(len(files), "file")+listed(files))
		}
		file = files[0]
	}
	file, err := filepath.Abs(file)
	if err != nil {
		return nil, "", err
	}
	s, err := store.Open(dir, file)
	return s, file, err
}

func listed(files []string) string {
	if len(files) == 0 {
		return ""
	}
	return " (" + strings.Join(files, ", ") + ")"
}

// storedChanges returns the changes made at run time as the daemon would.
func (a *app) storedChanges(file string) (*api.ConfigChanges, error) {
	s, file, err := a.openStore(file)
	if err != nil {
		return nil, err
	}
	changes := server.Changes(control.Changes{File: file, Revision: s.Revision(), Edits: s.Edits(), States: s.States(), History: s.History(), Trial: s.Trial()})
	return &changes, nil
}

// revertStored reverts changes without a daemon. The lock keeps one from starting meanwhile.
func (a *app) revertStored(file string, to api.Revert) (err error) {
	lock, err := acquireAlone(a.directory(), "sluice config revert", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer lock.release()
	s, file, err := a.openStore(file)
	if err != nil {
		return err
	}
	who, what := fmt.Sprintf("process %d (sluice) of user %d", os.Getpid(), os.Getuid()), "revert --all, without a daemon"
	if !to.All {
		what = fmt.Sprintf("revert to revision %d, without a daemon", to.Revision)
	}
	record := audit.Open(a.storeDirectory(), slog.New(slog.DiscardHandler))
	defer record.Close()
	err = revert(s, file, to, who, what)
	entry := audit.Entry{Who: who, What: what, Result: audit.Done, Revision: s.Revision()}
	if err != nil {
		entry.Result, entry.Error = audit.Refused, err.Error()
	}
	record.Add(entry)
	return err
}

func revert(s *store.Store, file string, to api.Revert, who, what string) error {
	base := s.Accepted()
	wanted, err := store.Content{}, error(nil)
	if to.All {
		base, err = config.Load(file)
		wanted.Config = base
	} else {
		wanted, err = s.At(to.Revision)
	}
	if err != nil {
		return err
	}
	p, err := s.Prepare(base, wanted, who, what)
	if err != nil {
		return err
	}
	if err := p.Commit(); err != nil {
		p.Discard()
		return err
	}
	return nil
}
