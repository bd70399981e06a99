// SPDX-License-Identifier: Apache-2.0

// Package control decides what is to be in force: the operator's file, and on top of it what was
// changed at run time, which it keeps on disk. It hands the result to the engine. Every change, from
// the file, the API or a command, goes through it, one at a time.
package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/store"
)

// Control joins file, store and engine.
type Control struct {
	engine *engine.Engine
	store  *store.Store
	path   string // of the operator's file, absolute
	log    *slog.Logger

	mu   sync.Mutex     // serialises changes; protects file
	file *config.Config // the operator's file as it was last accepted
}

// New returns one for the file at the absolute path; nothing is in force yet.
func New(path string, s *store.Store, e *engine.Engine, log *slog.Logger) *Control {
	nothing := &config.Config{}
	nothing.SetDefaults()
	return &Control{engine: e, store: s, path: path, log: log, file: nothing}
}

// Author says who makes a change, and how it is called in the history.
type Author struct {
	Who  string
	What string
}

// states that an operator can give to a backend; auto takes it back.
var states = map[string]datapath.State{"up": datapath.Up, "drain": datapath.Drain, "down": datapath.Down}

// Start puts the file, with what was changed at run time, in force for the first time.
func (c *Control) Start(ctx context.Context, file *config.Config) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.follow(ctx, file, "start")
	return err
}

// Reload reads the file again and puts it in force, with what was changed at run time. Where the two
// contradict each other, nothing changes.
func (c *Control) Reload(ctx context.Context) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	file, err := config.Load(c.path)
	if err != nil {
		c.engine.Refuse(err)
		return engine.Applied{}, err
	}
	return c.follow(ctx, file, "the file changed")
}

// follow puts a new content of the file in force. The file is on disk already: a change that cannot
// be noted is a warning.
func (c *Control) follow(ctx context.Context, file *config.Config, what string) (engine.Applied, error) {
	wanted, err := c.store.Merge(file)
	if err != nil {
		err = fmt.Errorf("%s: %w", c.path, err)
		c.engine.Refuse(err)
		return engine.Applied{}, err
	}
	pending, keepErr := c.store.Prepare(file, wanted, c.path, what)
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
	if keepErr != nil {
		c.log.Warn("the history of changes has a gap, and changes at run time will be refused", "error", keepErr)
	}
	c.file = file
	return applied, nil
}

func overrides(of []store.State) []engine.Override {
	var list []engine.Override
	for _, s := range of {
		list = append(list, engine.Override{Service: s.Service, Backend: s.Backend, State: states[s.State]})
	}
	return list
}

// Apply puts a configuration in force in place of what is, and keeps it over restarts. It returns
// [engine.ErrChanged] when expected, which may be nil, does not accept what is in force.
func (c *Control) Apply(ctx context.Context, by Author, cfg *config.Config, expected func(*config.Config) bool) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.keep(by, store.Content{Config: cfg, States: c.store.States()}, func() (engine.Applied, error) {
		return c.engine.ApplyIf(ctx, cfg, expected)
	})
}

// Change is Apply of what make makes of the configuration in force. An error of make changes nothing.
func (c *Control) Change(ctx context.Context, by Author, make func(*config.Config) (*config.Config, error)) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	inForce := c.engine.View().Config
	if inForce == nil {
		inForce = c.file
	}
	next, err := make(inForce)
	if err != nil {
		return engine.Applied{}, err
	}
	return c.keep(by, store.Content{Config: next, States: c.store.States()}, func() (engine.Applied, error) {
		return c.engine.Apply(ctx, next)
	})
}

// SetState gives a backend a state, up, drain or down, until auto takes it back. It survives
// restarts.
func (c *Control) SetState(ctx context.Context, by Author, service, backend, state string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	wanted := slices.DeleteFunc(c.store.States(), func(s store.State) bool { return s.Service == service && s.Backend == backend })
	_, known := states[state]
	if known {
		wanted = append(wanted, store.State{Service: service, Backend: backend, State: state})
	} else if state != "auto" {
		return fmt.Errorf("state %q: not one of up, drain, down, auto", state)
	}
	_, err := c.keep(by, store.Content{Config: c.engine.View().Config, States: wanted}, func() (engine.Applied, error) {
		if known {
			return engine.Applied{}, c.engine.SetState(ctx, service, backend, states[state])
		}
		return engine.Applied{}, c.engine.ClearState(ctx, service, backend)
	})
	return err
}

// Revert goes back to a revision of the history, which is a change of its own.
func (c *Control) Revert(ctx context.Context, by Author, revision uint64) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wanted, err := c.store.At(revision)
	if err != nil {
		return engine.Applied{}, err
	}
	return c.replace(ctx, by, wanted)
}

// RevertAll goes back to what the file says, without anything that was changed at run time.
func (c *Control) RevertAll(ctx context.Context, by Author) (engine.Applied, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	file, err := config.Load(c.path)
	if err != nil {
		return engine.Applied{}, err
	}
	c.file = file
	return c.replace(ctx, by, store.Content{Config: file})
}

func (c *Control) replace(ctx context.Context, by Author, wanted store.Content) (engine.Applied, error) {
	return c.keep(by, wanted, func() (engine.Applied, error) {
		return c.engine.ApplyStates(ctx, wanted.Config, overrides(wanted.States))
	})
}

// keep writes a change to the disk, makes it, and lets it count: so a change that cannot be kept is
// not made, and one that is refused is not kept. When it turns out at last that it cannot be kept,
// what was before is in force again.
func (c *Control) keep(by Author, wanted store.Content, change func() (engine.Applied, error)) (engine.Applied, error) {
	before := store.Content{Config: c.engine.View().Config, States: c.store.States()}
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
	c.log.Info("changed at run time", "revision", c.store.Revision(), "by", by.Who, "what", by.What)
	return applied, nil
}

// Save writes the configuration in force into the operator's file: from then on nothing is changed
// at run time but the states of backends. Comments of the file are lost.
func (c *Control) Save(by Author) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	inForce := c.engine.View().Config
	if inForce == nil {
		return errors.New("no configuration is in force yet")
	}
	pending, err := c.store.Prepare(inForce, store.Content{Config: inForce, States: c.store.States()}, by.Who, by.What)
	if err != nil {
		return err
	}
	if err := writeFile(c.path, inForce); err != nil {
		pending.Discard()
		return err
	}
	c.file = inForce
	return pending.Commit()
}

// Changes is what was changed at run time.
type Changes struct {
	File     string
	Revision uint64
	Edits    []config.Edit
	States   []store.State
	History  []store.Revision
}

// Changes returns what was changed at run time, and the last revisions.
func (c *Control) Changes() Changes {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Changes{c.path, c.store.Revision(), c.store.Edits(), c.store.States(), c.store.History()}
}
