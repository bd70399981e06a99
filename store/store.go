// SPDX-License-Identifier: Apache-2.0

// Package store keeps the run-time changes on disk: the difference between the operator's file and
// the configuration in force, the states set by the operator, and the history of changes. It is one
// document, replaced as a whole: after a crash, the old or the new document exists.
package store

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
)

// MaxHistory is the number of stored revisions.
const MaxHistory = 20

// Trial is the pending confirmation of the last change, which is reverted without it.
type Trial struct {
	Back  uint64    `json:"back"` // revision that is restored if the trial is not confirmed
	Until time.Time `json:"until"`
}

// Shared names the document of a cluster's store that is in force in place of the operator's file. The zero value is
// none.
type Shared struct {
	Cluster  string `json:"cluster"`
	Store    uint64 `json:"store"`    // ID of the etcd cluster, whose revisions are comparable with each other only
	Revision int64  `json:"revision"` // of etcd at which the document was written
}

// Override is a state set by the operator for a backend, or for the whole gateway if both names are
// empty: up, drain or down.
type Override struct {
	Service string    `json:"service"`
	Backend string    `json:"backend"`
	Node    bool      `json:"node,omitempty"` // The node of the cluster; its only state is drain, and both names are empty.
	State   string    `json:"state"`
	Until   time.Time `json:"until,omitzero"` // When a drain ends; zero: never.
	Then    string    `json:"then,omitempty"` // Treatment of the remaining connections: keep or reset.
}

// nodePath is the path of the node's state in an edit.
const nodePath = "@node"

// path returns the path of a backend's state in an edit. It is no key of the file.
func (s Override) path() string {
	switch {
	case s.Node:
		return nodePath
	case s.Service == "":
		return "@state"
	}
	return config.Join("services", s.Service, "backends", s.Backend, "@state")
}

// Revision is one stored change.
type Revision struct {
	Number uint64    `json:"number"`
	At     time.Time `json:"at"`
	Who    string    `json:"who" doc:"the process and user at the socket, the client over TCP, or file"`
	What   string    `json:"what" doc:"what was asked for"`
	// Undo are the edits from this revision to the previous one.
	Undo []config.Edit `json:"undo" doc:"the edits that lead back to the revision before"`
}

// Edits returns the edits of the revision.
func (r Revision) Edits() []config.Edit {
	edits := slices.Clone(r.Undo)
	for i := range edits {
		edits[i].Before, edits[i].After = edits[i].After, edits[i].Before
	}
	return edits
}

// Content is the desired configuration and states.
type Content struct {
	Config *config.Config
	States []Override
	// Until is the time at which an unconfirmed change is reverted; zero: never.
	Until time.Time
	// Shared replaces the document of the cluster's store; nil keeps it.
	Shared *Shared
}

// Store is the document of one configuration file. It is not safe for concurrent use.
type Store struct {
	dir string
	doc document
	now func() time.Time
	// base and content are the configurations of doc; nil before the first Commit, and while lost.
	base    *config.Config
	content Content
	lost    string // reason if the base of doc cannot be read
}

// Files returns the configuration files that have a document in the directory. A damaged document is
// left out.
func Files(dir string) []string {
	var files []string
	documents, _ := filepath.Glob(filepath.Join(dir, "*", documentName)) // Glob fails only for an invalid pattern
	for _, path := range documents {
		if raw, err := disk.Read(path, maxDocument); err == nil {
			if doc, err := decodeDocument(raw); err == nil {
				files = append(files, doc.File)
			}
		}
	}
	return files
}

// Open reads the document that belongs to a configuration file, named by its absolute path, from
// the directory. It writes nothing. A document that cannot be read is an error, because the next change
// would replace it.
func Open(dir, file string) (*Store, error) {
	s := &Store{dir: directory(dir, file), now: time.Now, doc: document{Layout: formatVersion, File: file}}
	raw, err := disk.Read(s.path(), maxDocument)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = s.read(raw)
	}
	if err != nil {
		return nil, fmt.Errorf("changes made at run time: %s: %w; move the file away to start without them", s.path(), err)
	}
	return s, nil
}

// directory returns the directory of a configuration file's document.
func directory(dir, file string) string {
	sum := sha256.Sum256([]byte(file))
	return filepath.Join(dir, hex.EncodeToString(sum[:4]))
}

func (s *Store) read(raw []byte) error {
	doc, err := decodeDocument(raw)
	if err != nil {
		return err
	}
	s.doc = *doc
	if s.base, err = s.readBase(); err != nil {
		s.doc.History, s.doc.Trial = nil, nil // both depend on the base
		s.lost = fmt.Sprintf("the history of changes made at run time is lost, the changes are not: %v", err)
		return nil
	}
	merged, _, conflicts, err := config.Merge(s.base, s.doc.Edits)
	if err == nil && len(conflicts) > 0 {
		err = fmt.Errorf("does not fit %s: %s", s.doc.Base, conflicts[0])
	}
	s.content = Content{Config: merged, States: s.doc.States}
	return err
}

// readBase reads the configuration that the edits begin from. Its name has its checksum.
func (s *Store) readBase() (*config.Config, error) {
	path := filepath.Join(s.dir, filepath.Base(s.doc.Base))
	text, err := disk.Read(path, config.MaxFileSize)
	if err != nil {
		return nil, err
	}
	if baseName(text) != s.doc.Base {
		return nil, fmt.Errorf("%s: %w", path, disk.ErrDamaged)
	}
	return config.Decode(path, text)
}

// Lost describes a loss found by Open that has no other effect; "" for none.
func (s *Store) Lost() string { return s.lost }

func (s *Store) path() string { return filepath.Join(s.dir, documentName) }

// Path returns the path of the document.
func (s *Store) Path() string { return s.path() }

// Revision returns the number of the last change, 0 before the first.
func (s *Store) Revision() uint64 { return s.doc.Revision }

// Edits returns the run-time changes relative to the file.
func (s *Store) Edits() []config.Edit { return slices.Clone(s.doc.Edits) }

// States returns the states set by the operator.
func (s *Store) States() []Override { return slices.Clone(s.doc.States) }

// History returns the last revisions, oldest first.
func (s *Store) History() []Revision { return slices.Clone(s.doc.History) }

// Shared returns the document of the cluster's store that is in force in place of the operator's file.
func (s *Store) Shared() Shared { return s.doc.Shared }

// Trial returns the pending confirmation, or nil.
func (s *Store) Trial() *Trial { return s.doc.Trial }

// GoBack drops a change that was not confirmed before the daemon ended. The next Merge does not
// contain it.
func (s *Store) GoBack() error {
	if s.doc.Trial == nil {
		return nil
	}
	c, err := s.At(s.doc.Trial.Back)
	if err != nil {
		return err
	}
	s.doc.Edits, s.doc.States = config.Diff(s.base, c.Config), c.States
	return nil
}

// ConflictError is returned if the file and the run-time changes contradict each other.
type ConflictError struct{ Conflicts []config.Conflict }

func (e *ConflictError) Error() string {
	lines := []string{"the file and what was changed at run time contradict each other; " +
		"write the wanted value into the file, or drop the changes by 'sluice config revert --all'"}
	for _, c := range e.Conflicts {
		lines = append(lines, "  "+c.String())
	}
	return strings.Join(lines, "\n")
}

// Accepted returns the content of the file in its last accepted state, with which Merge succeeds. It returns
// nil before the first change, and while that content is lost.
func (s *Store) Accepted() *config.Config { return s.base }

// Merge returns the configuration in force for this content of the file: the file with the changes made
// at run time.
func (s *Store) Merge(file *config.Config) (Content, error) {
	merged, _, conflicts, err := config.Merge(file, s.doc.Edits)
	if err != nil {
		return Content{}, fmt.Errorf("the file with what was changed at run time: %w", err)
	}
	if len(conflicts) > 0 {
		return Content{}, &ConflictError{conflicts}
	}
	return Content{Config: merged, States: knownStates(merged, s.doc.States)}, nil
}

// knownStates removes the states of backends that the configuration does not have and that no discovery
// can find.
func knownStates(c *config.Config, states []Override) []Override {
	if len(states) == 0 {
		return nil
	}
	of := make(map[string]bool, len(states))
	for _, s := range states {
		of[s.Service] = true
	}
	have := map[Override]bool{{}: true} // The whole gateway.
	finds := map[string]bool{}          // Services with discovery.
	for i := range c.Services {
		if sv := &c.Services[i]; of[sv.Name] {
			finds[sv.Name] = sv.BackendsFrom != nil
			for _, b := range sv.Backends {
				have[Override{Service: sv.Name, Backend: b.Name}] = true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(states), func(s Override) bool {
		return !finds[s.Service] && !have[Override{Service: s.Service, Backend: s.Backend}]
	})
}

// At returns the content as of one of the revisions of the history.
func (s *Store) At(number uint64) (Content, error) {
	h := s.doc.History
	switch {
	case len(h) == 0:
		return Content{}, fmt.Errorf("revision %d: %w: nothing was changed yet", number, fs.ErrNotExist)
	case number < h[0].Number || number > s.doc.Revision:
		return Content{}, fmt.Errorf("revision %d: %w: known are %d to %d", number, fs.ErrNotExist, h[0].Number, s.doc.Revision)
	}
	c := s.content
	for _, r := range slices.Backward(h) {
		if r.Number == number {
			break
		}
		edits, states := splitEdits(r.Undo)
		merged, _, conflicts, err := config.Merge(c.Config, edits)
		if err == nil && len(conflicts) > 0 {
			err = &ConflictError{conflicts}
		}
		if err != nil {
			return Content{}, fmt.Errorf("revision %d: %w", r.Number, err)
		}
		c = Content{Config: merged, States: applyStateEdits(c.States, states)}
	}
	return c, nil
}

// Pending is a change on disk that is not yet in effect.
type Pending struct {
	s       *Store
	doc     document
	base    *config.Config
	content Content
	file    *disk.Pending // nil if no change is pending
}

// Prepare writes a change to disk. file is the present content of the operator's file, wanted the
// desired content. The change is in effect after Commit.
func (s *Store) Prepare(file *config.Config, wanted Content, who, what string) (*Pending, error) {
	p := &Pending{s: s, doc: s.doc, base: file, content: Content{Config: wanted.Config, States: knownStates(wanted.Config, wanted.States)}}
	if file == s.base && s.content.Config != nil {
		p.doc.Edits = config.DiffAgain(file, wanted.Config, s.content.Config, s.doc.Edits)
	} else {
		p.doc.Edits = config.Diff(file, wanted.Config)
	}
	p.doc.States = p.content.States
	p.doc.Trial = nil
	if !wanted.Until.IsZero() {
		p.doc.Trial = &Trial{s.doc.Revision, wanted.Until}
	}
	if wanted.Shared != nil {
		p.doc.Shared = *wanted.Shared
	}
	undo, first := []config.Edit{}, s.content.Config == nil
	if !first {
		undo = append(config.Diff(wanted.Config, s.content.Config), stateEdits(p.content.States, s.content.States)...)
		if len(undo) == 0 && p.doc.Trial == nil && s.doc.Trial == nil && p.doc.Shared == s.doc.Shared && len(config.Diff(file, s.base)) == 0 {
			return p, nil
		}
	}
	if first || len(undo) > 0 {
		p.doc.Revision++
		p.doc.History = append(slices.Clone(s.doc.History), Revision{p.doc.Revision, s.now().UTC(), who, what, undo})
		p.doc.History = p.doc.History[max(0, len(p.doc.History)-MaxHistory):]
	}
	if err := p.write(); err != nil {
		p.Discard()
		return nil, fmt.Errorf("the change cannot be kept: %w", err)
	}
	return p, nil
}

func (p *Pending) write() error {
	if err := os.MkdirAll(p.s.dir, 0o700); err != nil {
		return err
	}
	if p.base != p.s.base || !p.s.fileExists(p.doc.Base) {
		if err := p.writeBase(); err != nil {
			return err
		}
	}
	text, err := encodeDocument(&p.doc)
	if err != nil {
		return err
	}
	p.file, err = disk.Prepare(p.s.path(), text, 0o600)
	return err
}

// fileExists reports whether the store has a file with that name.
func (s *Store) fileExists(name string) bool {
	_, err := os.Stat(filepath.Join(s.dir, name))
	return name != "" && err == nil
}

// writeBase writes the configuration that the edits are relative to, unless it exists.
func (p *Pending) writeBase() error {
	base, err := config.Marshal(p.base)
	if err != nil {
		return err
	}
	p.doc.Base = baseName(base)
	path := filepath.Join(p.s.dir, p.doc.Base)
	if was, err := disk.Read(path, config.MaxFileSize); err == nil && baseName(was) == p.doc.Base {
		return nil
	}
	return disk.Replace(path, base, 0o600)
}

// Commit puts the change into effect.
func (p *Pending) Commit() error {
	if p.file == nil {
		return nil
	}
	if err := p.file.Commit(); err != nil {
		return fmt.Errorf("the change cannot be kept: %w", err)
	}
	p.s.doc, p.s.base, p.s.content, p.s.lost = p.doc, p.base, p.content, ""
	p.s.removeUnused()
	return nil
}

// Discard removes the pending change from disk.
func (p *Pending) Discard() {
	if p.file != nil {
		p.file.Discard()
	}
}

// removeUnused removes old bases and unfinished files of a crash. Other files belong to the operator, for
// example a document that was moved away.
func (s *Store) removeUnused() {
	entries, _ := os.ReadDir(s.dir)
	for _, e := range entries {
		name := e.Name()
		older := strings.HasPrefix(name, "base-") && name != s.doc.Base
		if older || strings.HasSuffix(name, disk.Unfinished) || strings.HasPrefix(name, "new-") { // earlier versions used the last prefix
			os.Remove(filepath.Join(s.dir, name))
		}
	}
}
