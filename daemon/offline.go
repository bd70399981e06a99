// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/store"
	"github.com/sluice-lb/sluice/uplink"
)

// openStore opens the changes made at run time, without a daemon. Without a name, the configuration file is
// the only one with changes.
func (p Paths) openStore(file string) (*store.Store, string, error) {
	dir := p.ChangesDirectory()
	if file == "" {
		files := store.Files(dir)
		if len(files) != 1 {
			return nil, "", fmt.Errorf("no daemon runs, and %s has the changes of %d files%s: name the daemon's file with --config FILE", dir, len(files), joinFiles(files))
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

func joinFiles(files []string) string {
	if len(files) == 0 {
		return ""
	}
	return " (" + strings.Join(files, ", ") + ")"
}

// StoredChanges returns the changes made at run time as the daemon would.
func (p Paths) StoredChanges(file string) (*api.ConfigChanges, error) {
	s, file, err := p.openStore(file)
	if err != nil {
		return nil, err
	}
	changes := server.Changes(control.Changes{File: file, Revision: s.Revision(), Edits: s.Edits(), States: s.States(), History: s.History(), Trial: s.Trial()})
	return &changes, nil
}

// Revert reverts changes without a daemon. The lock keeps one from starting meanwhile.
func (p Paths) Revert(file string, to api.Revert) (err error) {
	lock, err := Acquire(p.Directory(), "sluice config revert", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer lock.Release()
	s, file, err := p.openStore(file)
	if err != nil {
		return err
	}
	who, what := fmt.Sprintf("process %d (sluice) of user %d", os.Getpid(), os.Getuid()), "revert --all, without a daemon"
	if !to.All {
		what = fmt.Sprintf("revert to revision %d, without a daemon", to.Revision)
	}
	record := audit.Open(p.ChangesDirectory(), slog.New(slog.DiscardHandler))
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
		wanted.Config, wanted.Shared = base, &store.Shared{}
	} else if s.Shared() != (store.Shared{}) {
		return control.ErrShared
	} else {
		wanted, err = s.At(to.Revision)
	}
	if err != nil {
		return err
	}
	prepared, err := s.Prepare(base, wanted, who, what)
	if err != nil {
		return err
	}
	if err := prepared.Commit(); err != nil {
		prepared.Discard()
		return err
	}
	return nil
}

// Forecast returns the changes that applying cfg would make to the kernel, without a daemon. Node is the name of this
// host in a cluster; "" for the host name.
func Forecast(ctx context.Context, dir, node string, cfg *config.Config) (*api.Outcome, error) {
	log := slog.New(slog.DiscardHandler)
	paths, err := OpenDatapaths(dir, log)
	if err != nil {
		return nil, err
	}
	holder, err := hold.New(hold.Options{StateDir: dir, Log: log})
	if err != nil {
		return nil, err
	}
	e := engine.New(engine.Options{Datapaths: paths, Addresses: holder, Announcer: announce.New(announce.Options{StateDir: dir, Log: log}), Uplinks: uplink.New(uplink.Options{Log: log}), Node: Node(node)})
	f, err := e.Forecast(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, e.Stop(ctx, true))
	}
	o := server.Outcome(f)
	return &o, e.Stop(ctx, true)
}

// RemoveLeft removes the kernel state of a daemon that no longer runs, and reports whether there
// was any.
func RemoveLeft(ctx context.Context, dir string) (bool, error) {
	paths, err := OpenDatapaths(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		return false, err
	}
	e := engine.New(engine.Options{Datapaths: paths})
	left, err := paths.hasLeftovers()
	held, unread := hold.Left(dir)
	announced, unknown := announce.Left(dir)
	routed, unlisted := uplink.Left()
	if err := errors.Join(err, unread, unknown, unlisted); err != nil {
		return false, errors.Join(err, e.Stop(ctx, true))
	}
	left = left || held || announced || routed
	if !left {
		rules, err := health.RemovePaths()
		return rules > 0, errors.Join(err, e.Stop(ctx, true))
	}
	lock, err := Acquire(dir, "sluice stop --force", slog.New(slog.DiscardHandler))
	if err != nil {
		return false, errors.Join(err, e.Stop(ctx, true))
	}
	defer lock.Release()
	_, err = health.RemovePaths()
	err = errors.Join(err, announce.Remove(dir), hold.Remove(dir), e.Stop(ctx, false), uplink.Remove())
	lock.Leave(err)
	return true, err
}
