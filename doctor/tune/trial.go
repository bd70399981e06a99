// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Tried is a remedy that is applied and neither kept nor taken back yet. It holds the lock of the journal.
type Tried struct {
	Entry  Entry
	system *System
	unlock func()
}

// Reversible reports why one of the commands cannot be taken back; nil: all can. It changes nothing.
func Reversible(ctx context.Context, s *System, commands []string) error {
	for _, command := range commands {
		if _, err := s.plan(ctx, command); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
	}
	return nil
}

// Try applies the commands of a remedy in the namespace of s. The journal knows the former state before each command
// runs. If one fails, Try takes back all others. The caller must call Keep or TakeBack.
func Try(ctx context.Context, s *System, name string, commands []string) (*Tried, error) {
	unlock, err := s.lock()
	if err != nil {
		return nil, err
	}
	if err := s.unfinished(); err != nil {
		unlock()
		return nil, err
	}
	t := &Tried{Entry: *s.newEntry(&Proposal{Profile: name}, time.Now()), system: s, unlock: unlock}
	for _, command := range commands {
		if err = t.apply(ctx, command); err != nil {
			break
		}
	}
	if err != nil {
		why := fmt.Errorf("the remedy did not run: %w", err)
		notes, err := t.TakeBack(why.Error())
		return nil, errors.Join(why, err, noted(notes))
	}
	return t, nil
}

func noted(notes []string) error {
	if len(notes) == 0 {
		return nil
	}
	return errors.New(strings.Join(notes, "; "))
}

// apply runs one command.
func (t *Tried) apply(ctx context.Context, command string) error {
	a, err := t.system.plan(ctx, command)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	if len(a.set) > 0 {
		return t.write(a.set)
	}
	list := &t.Entry.Commands
	*list = append(*list, Command{Run: command, Undo: a.undo})
	c := &(*list)[len(*list)-1]
	if err := t.system.save(&t.Entry); err != nil {
		return err
	}
	argv := a.words
	if a.chains != nil {
		argv = slices.Insert(slices.Clone(argv), 1, "--echo", "--handle")
	}
	echo, err := t.system.output(ctx, argv...)
	if err != nil {
		*list = (*list)[:len(*list)-1] // neither program changes anything if it fails
		return err
	}
	if c.Done = true; a.chains != nil {
		c.Undo = nftUndo(echo, a.chains)
	}
	return t.system.save(&t.Entry)
}

// write sets values. The kernel rounds some, such as times to its ticks: the traffic decides, not the value. The values that change with one are steps before it.
func (t *Tried) write(settings []Setting) error {
	for _, set := range settings {
		steps, err := t.system.steps(set)
		if err != nil {
			return err
		}
		t.Entry.Steps = append(t.Entry.Steps, steps...)
		if err := t.system.save(&t.Entry); err != nil {
			return err
		}
		if err := t.system.Set(set.Key, set.Value); err != nil {
			return err
		}
		step := &t.Entry.Steps[len(t.Entry.Steps)-1]
		if step.After, err = t.system.Get(step.Key); err != nil {
			return err
		}
	}
	return t.system.save(&t.Entry)
}

// Keep ends the trial. The changes last until the next boot, or until Rollback.
func (t *Tried) Keep() error {
	defer t.unlock()
	t.Entry.State = Applied
	return t.system.save(&t.Entry)
}

// TakeBack ends the trial and restores the former state.
func (t *Tried) TakeBack(why string) (notes []string, err error) {
	defer t.unlock()
	return t.system.takeBack(&t.Entry, why)
}

// undoCommands undoes the commands of an entry, last one first.
func (s *System) undoCommands(e *Entry) (notes []string, err error) {
	var errs []error
	for _, c := range slices.Backward(e.Commands) {
		if !c.Done && len(c.Undo) == 0 {
			notes = append(notes, c.Run+": whether it ran is not known: look for its objects")
			continue
		}
		for _, undo := range c.Undo {
			argv, err := words(undo)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			switch _, err := s.output(context.Background(), argv...); {
			case err == nil:
			case alreadyGone(err):
				notes = append(notes, fmt.Sprintf("%s: nothing to take back: %v", c.Run, err))
			default:
				errs = append(errs, err)
			}
		}
	}
	return notes, errors.Join(errs...)
}

// alreadyGone reports whether an object does not exist any more, or exists again.
func alreadyGone(err error) bool {
	return slices.ContainsFunc([]string{"No such file or directory", "No such process", "Cannot assign requested address", "File exists", "Cannot find device", "does not exist"},
		func(text string) bool { return strings.Contains(err.Error(), text) })
}
