// SPDX-License-Identifier: Apache-2.0

// Package control determines the configuration in force: the operator's file merged with the
// run-time changes stored on disk. It passes the result to the engine. All changes from the file,
// the API and commands are serialised here.
package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/batch"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/store"
)

// Control joins file, store and engine.
type Control struct {
	engine *engine.Engine
	store  *store.Store
	path   string // absolute path of the operator's file
	log    *slog.Logger
	// Events receives every accepted or refused change; may be nil. Set it before Start.
	Events *event.Log
	Audit  *audit.Log // audit log of changes; may be nil
	// Changed is called after every accepted or refused change; may be nil. It must not call the control.
	Changed func()

	waiting *batch.Queue[*pendingChange]
	many    bool // the last batch had several changes; owned by the operation of waiting

	mu      sync.Mutex     // Serialises changes; protects all below.
	file    *config.Config // Last accepted content of the operator's file, or the document of the cluster's store in its place.
	own     *config.Config // Last accepted content of the operator's file.
	trial   *time.Timer    // Ends the trial of the last change; nil without a trial.
	changed bool           // The file changed during the trial.
	// conflict is why the file on disk does not fit the changes made at run time. Then the file in its last
	// accepted state is in force with them. Nil if it fits.
	conflict error

	drains drainStates

	warnings atomic.Pointer[[]string] // read without waiting for a change
}

// ErrTrial is returned for changes while the last one waits for its confirmation.
var ErrTrial = errors.New("the last change is not confirmed yet: 'sluice config confirm' keeps it; without that it is taken back, and then others can follow")

// New returns a Control for the file at an absolute path. Nothing is in force yet.
func New(path string, s *store.Store, e *engine.Engine, log *slog.Logger) *Control {
	nothing := &config.Config{}
	nothing.SetDefaults()
	c := &Control{engine: e, store: s, path: path, log: log, file: nothing, own: nothing,
		waiting: batch.New[*pendingChange](), drains: drainStates{begun: make(chan struct{}, 1)}}
	if c.updateWarnings(nil); s.Lost() != "" {
		log.Warn(s.Lost())
	}
	return c
}

// Author is the origin of a change, and its description in the history.
type Author struct {
	Who  string
	What string
}

// report records the result of a change to the events, the record and the log. The caller holds the
// lock. After many refused changes of one client, further ones are only counted in the record. A
// change with a failed precondition is no event: the client reads the configuration again and
// repeats the change.
func (c *Control) report(by Author, err error) {
	if c.Changed != nil {
		c.Changed()
	}
	e := event.Event{Kind: event.Apply, Who: by.Who, What: by.What, Revision: c.store.Revision()}
	if err == nil {
		e.Text = fmt.Sprintf("revision %d: %s, by %s", e.Revision, by.What, by.Who)
		c.Events.Add(e)
		c.Audit.Add(audit.Entry{Who: by.Who, What: by.What, Result: audit.Done, Revision: e.Revision})
		return
	}
	e.Error = err.Error()
	e.Text = fmt.Sprintf("refused: %s, by %s: %s", by.What, by.Who, strings.ReplaceAll(err.Error(), "\n", "; "))
	first := c.Audit.Add(audit.Entry{Who: by.Who, What: by.What, Result: audit.Refused, Revision: e.Revision, Error: e.Error})
	if !first || errors.Is(err, engine.ErrChanged) {
		return
	}
	c.Events.Add(e)
	if by != c.FileChanged() { // the daemon already logs errors of the file
		c.log.Warn("a change was refused", "by", by.Who, "what", by.What, "error", err)
	}
}

// Start puts the file, merged with the run-time changes, in force for the first time.
func (c *Control) Start(ctx context.Context, file *config.Config) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := Author{c.path, "start"}
	defer func() { c.report(by, err) }()
	if trial := c.store.Trial(); trial != nil {
		by.What = fmt.Sprintf("start: nobody confirmed the last change, back to revision %d", trial.Back)
		if err := c.store.GoBack(); err != nil {
			return err
		}
	}
	if _, err = c.applyFile(ctx, by, file); c.conflict != nil && c.store.Accepted() != nil {
		return c.startAccepted(ctx, &by, err)
	}
	return err
}

// startAccepted starts with the last accepted content of the file, in place of one that contradicts the
// changes made at run time: after a reboot, there would be no rules at all.
func (c *Control) startAccepted(ctx context.Context, by *Author, conflict error) error {
	c.report(*by, conflict)
	c.log.Error("the file is not in force: starting with its last accepted content", "error", conflict)
	by.What = "start with the last accepted configuration"
	_, err := c.applyFile(ctx, *by, c.store.Accepted())
	if err == nil {
		c.conflict = conflict
		c.updateWarnings(nil)
		c.engine.RecordRefusal(conflict)
	}
	return err
}

// FileChanged returns the author of changes made in the file.
func (c *Control) FileChanged() Author { return Author{c.path, "the file changed"} }

// Reload reads the file again and puts it in force, merged with the run-time changes. If they
// conflict, nothing changes.
func (c *Control) Reload(ctx context.Context, by Author) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trial != nil {
		c.changed = true
		return engine.Applied{}, fmt.Errorf("%s is read again after that: %w", c.path, ErrTrial)
	}
	return c.reload(ctx, by)
}

func (c *Control) reload(ctx context.Context, by Author) (applied engine.Applied, err error) {
	defer func() { c.report(by, err) }()
	file, err := c.load()
	if err != nil {
		c.engine.RecordRefusal(err)
		return engine.Applied{}, err
	}
	return c.applyFile(ctx, by, file)
}

// applyFile puts a new content of the file in force. The file is already on disk, so a failure to
// store the change is only a warning.
func (c *Control) applyFile(ctx context.Context, by Author, own *config.Config) (engine.Applied, error) {
	file, shared := c.inPlaceOf(own)
	file.Share(c.file)
	wanted, err := c.store.Merge(file)
	if err != nil {
		err = fmt.Errorf("%s: %w", c.path, err)
		c.conflict = err
		c.updateWarnings(nil)
		c.engine.RecordRefusal(err)
		return engine.Applied{}, err
	}
	wanted.Shared = &shared
	wanted.Config.Share(file)
	c.share(wanted.Config)
	pending, keepErr := c.store.Prepare(file, wanted, by.Who, by.What)
	applied, err := c.engine.ApplyStates(ctx, wanted.Config, overrides(wanted.States))
	if err != nil {
		if keepErr == nil {
			pending.Discard()
		}
		return applied, err
	}
	if keepErr == nil {
		keepErr = pending.Commit()
	}
	c.conflict = nil
	if c.updateWarnings(keepErr); keepErr != nil {
		c.log.Warn("the history of changes has a gap, and changes at run time will be refused", "error", keepErr)
	}
	c.file, c.own = file, own
	return applied, nil
}

// share replaces the services of a new configuration by equal services of the configuration in
// force. The caller must be the only user of the new one.
func (c *Control) share(cfg *config.Config) {
	if inForce := c.engine.Config(); inForce != nil {
		cfg.Share(inForce)
	}
}

// Apply puts a configuration in force and stores it. The caller must be its only user. Apply
// returns [engine.ErrChanged] if expected, which may be nil, rejects the configuration in force.
// With a trial above 0, the change is reverted after that time unless [Control.Confirm] is called.
// If the daemon ends before that, it restarts without the change.
func (c *Control) Apply(ctx context.Context, by Author, cfg *config.Config, expected func(*config.Config) bool, trial time.Duration) (applied engine.Applied, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.report(by, err) }()
	c.share(cfg)
	wanted := store.Content{Config: cfg, States: c.store.States()}
	if trial > 0 {
		wanted.Until = time.Now().Add(trial)
	}
	return c.storeAndApply(by, wanted, func() (engine.Applied, error) { return c.engine.ApplyIf(ctx, cfg, expected) })
}

// Confirm ends the trial of the last change and keeps the change.
func (c *Control) Confirm(ctx context.Context, by Author) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.confirm(by)
	c.report(by, err)
	if err == nil {
		c.endTrial(ctx)
	}
	return err
}

func (c *Control) confirm(by Author) error {
	if c.trial == nil {
		return fmt.Errorf("nothing waits to be confirmed: %w", engine.ErrNotFound)
	}
	pending, err := c.store.Prepare(c.file, store.Content{Config: c.engine.Config(), States: c.store.States()}, by.Who, by.What)
	if err == nil {
		err = pending.Commit()
	}
	if err != nil {
		return err
	}
	c.log.Info("the change is confirmed", "revision", c.store.Revision(), "by", by.Who)
	return nil
}

// endTrial permits further changes, beginning with a pending change of the file.
func (c *Control) endTrial(ctx context.Context) {
	c.trial.Stop()
	c.trial = nil
	if c.changed {
		c.changed = false
		if _, err := c.reload(ctx, c.FileChanged()); err != nil {
			c.log.Error("reload refused, the configuration in force stays", "file", c.path, "error", err)
		}
	}
}

// retryBack is the wait between two attempts to take a change back.
const retryBack = 5 * time.Second

// takeBack reverts a change that was not confirmed.
func (c *Control) takeBack(revision uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	trial := c.store.Trial()
	if trial == nil || c.trial == nil || c.store.Revision() != revision {
		return // the trial was confirmed in the meantime
	}
	by := Author{"sluice", fmt.Sprintf("not confirmed in time: back to revision %d", trial.Back)}
	wanted, err := c.store.At(trial.Back)
	if err == nil {
		_, err = c.commit(by, wanted, func() (engine.Applied, error) {
			return c.engine.ApplyStates(context.Background(), wanted.Config, overrides(wanted.States))
		})
	}
	if errors.Is(err, engine.ErrStopped) {
		return // the next start reverts the change
	}
	c.report(by, err)
	if err != nil {
		c.log.Error("the change was not confirmed, and could not be taken back; trying again", "after", retryBack, "error", err)
		c.trial = time.AfterFunc(retryBack, func() { c.takeBack(revision) })
		return
	}
	c.log.Warn("the change was not confirmed in time: what was before is in force again", "revision", c.store.Revision(), "as", trial.Back)
	c.endTrial(context.Background())
}

// Change calls make with the configuration in force, which may be a draft ([config.Config.Draft]), and
// applies the result. An error of make changes nothing.
func (c *Control) Change(ctx context.Context, by Author, make func(*config.Config) (*config.Config, error)) (engine.Applied, error) {
	return c.changeWithWaiting(&pendingChange{ctx: ctx, by: by, change: func(now store.Content) (store.Content, error) {
		next, err := make(now.Config)
		return store.Content{Config: next, States: now.States}, err
	}})
}

// Revert restores a revision of the history. This is itself a change.
func (c *Control) Revert(ctx context.Context, by Author, revision uint64) (applied engine.Applied, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.report(by, err) }()
	wanted, err := c.store.At(revision)
	if err != nil {
		return engine.Applied{}, err
	}
	if applied, err = c.replace(ctx, by, wanted); err == nil && c.conflict != nil { // the conflict with the file may be resolved now
		if again, err := c.reload(ctx, c.FileChanged()); err == nil {
			applied = again
		}
	}
	return applied, err
}

// RevertAll removes all run-time changes, so that the file alone is in force.
func (c *Control) RevertAll(ctx context.Context, by Author) (applied engine.Applied, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.report(by, err) }()
	file, err := c.load()
	if err != nil {
		return engine.Applied{}, err
	}
	before, own := c.file, c.own
	c.file, c.own = file, file
	if applied, err = c.replace(ctx, by, store.Content{Config: file}); err != nil {
		c.file, c.own = before, own
		return applied, err
	}
	c.conflict = nil
	c.updateWarnings(nil)
	return applied, nil
}

func (c *Control) replace(ctx context.Context, by Author, wanted store.Content) (engine.Applied, error) {
	if wanted.Config != c.engine.Config() {
		c.share(wanted.Config)
	}
	return c.storeAndApply(by, wanted, func() (engine.Applied, error) {
		return c.engine.ApplyStates(ctx, wanted.Config, overrides(wanted.States))
	})
}

// storeAndApply writes a change to disk, applies it, and then commits it on disk. A change that cannot be
// stored is therefore not applied, and a refused change is not stored. If the commit fails, the
// previous configuration is applied again.
func (c *Control) storeAndApply(by Author, wanted store.Content, change func() (engine.Applied, error)) (engine.Applied, error) {
	if c.trial != nil {
		return engine.Applied{}, ErrTrial
	}
	if c.store.Shared() != (store.Shared{}) && wanted.Shared == nil && wanted.Config != c.engine.Config() {
		return engine.Applied{}, ErrShared
	}
	if err := wanted.Config.CheckPrograms(c.own, c.engine.Config()); err != nil {
		return engine.Applied{}, err
	}
	applied, err := c.commit(by, wanted, change)
	if err == nil && !wanted.Until.IsZero() {
		revision := c.store.Revision()
		c.trial = time.AfterFunc(time.Until(wanted.Until), func() { c.takeBack(revision) })
	}
	return applied, err
}

func (c *Control) commit(by Author, wanted store.Content, change func() (engine.Applied, error)) (engine.Applied, error) {
	before := store.Content{Config: c.engine.Config(), States: c.store.States()}
	pending, err := c.store.Prepare(c.file, wanted, by.Who, by.What)
	if err != nil {
		return engine.Applied{}, err
	}
	applied, err := change()
	if err != nil {
		pending.Discard()
		return applied, err
	}
	if err := pending.Commit(); err != nil {
		pending.Discard()
		if before.Config == nil {
			return applied, err
		}
		_, back := c.engine.ApplyStates(context.Background(), before.Config, overrides(before.States))
		return applied, errors.Join(err, back)
	}
	c.updateWarnings(nil)
	c.log.Info("changed at run time", "revision", c.store.Revision(), "by", by.Who, "what", by.What)
	return applied, nil
}

// Save writes the configuration in force into the operator's file. Afterwards, only states of
// backends remain as run-time changes. Comments of the file are lost.
func (c *Control) Save(by Author) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.report(by, err) }()
	if c.trial != nil {
		return ErrTrial
	}
	inForce := c.engine.Config()
	switch {
	case inForce == nil:
		return errors.New("no configuration is in force yet")
	case c.conflict != nil:
		return fmt.Errorf("the file has changes that are not in force and would be lost: %w", c.conflict)
	}
	pending, err := c.store.Prepare(inForce, store.Content{Config: inForce, States: c.store.States()}, by.Who, by.What)
	if err != nil {
		return err
	}
	if err := writeFile(c.path, inForce); err != nil {
		pending.Discard()
		return err
	}
	c.file, c.own = inForce, inForce
	return pending.Commit()
}

// Warnings returns whether the file contradicts the changes made at run time, and whether the history of
// changes is damaged or cannot be written.
func (c *Control) Warnings() []string { return *c.warnings.Load() }

// updateWarnings updates the warnings. unkept is the error that prevented storing the content of the file, or
// nil.
func (c *Control) updateWarnings(unkept error) {
	var list []string
	if lost := c.store.Lost(); lost != "" {
		list = append(list, lost)
	}
	if c.conflict != nil {
		list = append(list, "the file is not in force: "+strings.ReplaceAll(c.conflict.Error(), "\n", "; "))
	}
	if unkept != nil {
		list = append(list, fmt.Sprintf("the history of changes has a gap, and changes at run time will be refused: %v", unkept))
	}
	c.warnings.Store(&list)
}

// Changes are the run-time changes.
type Changes struct {
	File     string
	Revision uint64
	Edits    []config.Edit
	States   []store.Override
	History  []store.Revision
	Trial    *store.Trial // nil if no change waits for confirmation
}

// Changes returns the run-time changes and the last revisions.
func (c *Control) Changes() Changes {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Changes{c.path, c.store.Revision(), c.store.Edits(), c.store.States(), c.store.History(), c.store.Trial()}
}
