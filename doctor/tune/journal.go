// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/disk"
)

// Progress is the progress of a journal entry.
type Progress string

// The states of a journal entry.
const (
	Trial      Progress = "trial"       // Written live, not yet confirmed, not in Etc.
	Applied    Progress = "applied"     // Confirmed and kept for the next boot.
	RolledBack Progress = "rolled back" // Taken back.
)

// Step is one value that was written.
type Step struct {
	Key    string `json:"key"`
	Before string `json:"before"`
	Wanted string `json:"wanted"` // empty: it changed with the next step that has one
	After  string `json:"after"`  // as the kernel read back; empty before it was written
}

// File is the file for the next boot, as it was.
type File struct {
	Path    string `json:"path"`
	Existed bool   `json:"existed"`
	Content string `json:"content,omitempty"`
	Mode    uint32 `json:"mode,omitempty"`
	// Written is the written value; empty if the setting was not changed.
	Written string `json:"written,omitempty"`
}

// Entry is one run of Apply in the journal. It is on disk before the first value
// is written, so that a crash loses nothing.
type Entry struct {
	ID        string    `json:"id"`
	Time      time.Time `json:"time"`
	Profile   string    `json:"profile"`
	Namespace string    `json:"namespace"` // path; empty for the caller's own
	// Host marks the host's first namespace, whose number differs between kernels.
	Host  bool   `json:"host,omitempty"`
	Inode uint64 `json:"inode,omitempty"`
	// Boot is the boot that the number belongs to; other namespaces end with it.
	Boot  string   `json:"boot,omitempty"`
	State Progress `json:"state"`
	Why   string   `json:"why,omitempty"` // it was rolled back
	Steps []Step   `json:"steps"`
	// Commands of a remedy; Rollback undoes them before the steps.
	Commands []Command `json:"commands,omitempty"`
	File     *File     `json:"file,omitempty"` // nil before anything was kept for the next boot
}

// lock takes the journal for one program at a time.
func (s *System) lock() (unlock func(), err error) {
	if err := os.MkdirAll(s.dir(), 0o755); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(s.dir(), "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("journal %s: another 'sluice tune' is at work: %w", s.dir(), err)
	}
	// Files that a crash left incomplete.
	left, _ := filepath.Glob(filepath.Join(s.dir(), "*.json"+disk.Unfinished))
	for _, name := range left {
		_ = os.Remove(name) // tried again next time
	}
	return func() { f.Close() }, nil
}

// save writes e in one step: a reader sees the old or the new one.
func (s *System) save(e *Entry) error {
	text, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err
	}
	return disk.Replace(filepath.Join(s.dir(), e.ID+".json"), append(text, '\n'), 0o644)
}

// keepsFiles refuses a boot configuration directory that is not writable, such as on a read-only
// system, before anything is changed.
func (s *System) keepsFiles() error {
	name := s.file() + disk.Unfinished
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, nil, 0o644)
	}
	if err != nil {
		return fmt.Errorf("values for the next boot: %w; another directory: --sysctl-dir", err)
	}
	return os.Remove(name)
}

// Journal returns all entries of the namespace, oldest first. With all it includes other
// namespaces.
func (s *System) Journal(all bool) ([]Entry, error) {
	names, err := filepath.Glob(filepath.Join(s.dir(), "*.json"))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var list []Entry
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
		e, err := decodeEntry(text)
		if err != nil {
			return nil, fmt.Errorf("journal %s is damaged, or of another version (%w): see in it which values to put back, then remove it", name, err)
		}
		if all || s.own(&e) {
			list = append(list, e)
		}
	}
	return list, nil
}

// decodeEntry refuses unknown members: an ignored value would not be reverted.
func decodeEntry(text []byte) (e Entry, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		return e, err
	}
	if e.State != Trial && e.State != Applied && e.State != RolledBack || e.ID == "" {
		return e, fmt.Errorf("entry %q in state %q", e.ID, e.State)
	}
	return e, nil
}

// own reports whether an entry belongs to the namespace of s.
func (s *System) own(e *Entry) bool {
	same := e.Inode == s.Namespace.Inode
	if s.host() {
		return e.Host || same && e.Boot == "" // written before entries knew
	}
	return !e.Host && same && (e.Inode == 0 || e.Boot == "" || e.Boot == bootID())
}

// bootID identifies this boot of the host; "" if unknown.
func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// idForm is how the time of an entry is its name.
const idForm = "20060102T150405.000000000"

// newEntry starts a journal entry. Its name sorts after all earlier ones, even if the clock was set
// back.
func (s *System) newEntry(p *Proposal, now time.Time) *Entry {
	id := now.UTC()
	if list, err := s.Journal(true); err == nil && len(list) > 0 { // unreadable entries are reported elsewhere
		if last, err := time.Parse(idForm, list[len(list)-1].ID); err == nil && !id.After(last) {
			id = last.Add(1)
		}
	}
	e := &Entry{ID: id.Format(idForm), Time: now.UTC(), Profile: p.Profile,
		Namespace: s.Namespace.Path, Inode: s.Namespace.Inode, Host: s.host(), Boot: bootID(), State: Trial}
	for _, c := range p.Pending() {
		e.Steps = append(e.Steps, Step{Key: c.Key, Before: c.Now, Wanted: c.Value})
	}
	return e
}

// persist writes the entry's values to the file for the next boot. Values of
// earlier entries that are still in force stay in it.
func (s *System) persist(e *Entry, now time.Time) error {
	f := &File{Path: s.file()}
	old, err := os.ReadFile(f.Path)
	switch {
	case err == nil:
		f.Existed, f.Content = true, string(old)
		if st, err := os.Stat(f.Path); err == nil {
			f.Mode = uint32(st.Mode().Perm())
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	f.Written = fileText(f.Content, e, now)
	e.File = f
	// The journal knows of the file before the file changes.
	if err := s.save(e); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.Path), 0o755); err != nil {
		return err
	}
	mode := os.FileMode(0o644)
	if f.Existed {
		mode = os.FileMode(f.Mode)
	}
	return disk.Replace(f.Path, []byte(f.Written), mode)
}

// fileText merges the content of the file with the entry's values.
func fileText(old string, e *Entry, now time.Time) string {
	written := map[string]bool{}
	for _, step := range e.Steps {
		written[step.Key] = true
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Written by 'sluice tune' (%s) on %s; 'sluice tune rollback' takes it back.\n",
		e.Profile, now.UTC().Format("2006-01-02 15:04 MST"))
	for line := range strings.Lines(old) {
		key, _, isSetting := strings.Cut(line, "=")
		if isSetting && !strings.HasPrefix(line, "#") && !written[strings.TrimSpace(key)] {
			b.WriteString(line)
		}
	}
	for _, step := range e.Steps {
		fmt.Fprintf(&b, "%s = %s\n", step.Key, strings.Join(strings.Fields(step.Wanted), " "))
	}
	return b.String()
}

// restoreFile puts the file back as it was before the entry, byte by byte.
func restoreFile(f *File) (note string, err error) {
	if f == nil || f.Written == "" {
		return "", nil
	}
	now, err := os.ReadFile(f.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !f.Existed, err == nil && f.Existed && string(now) == f.Content:
		return "", nil // never written, or back already
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", err
	case err == nil && string(now) != f.Written && string(now) != f.Content:
		return fmt.Sprintf("%s was edited since it was written: left alone; it still holds the tuned values", f.Path), nil
	}
	if f.Existed {
		return "", disk.Replace(f.Path, []byte(f.Content), os.FileMode(f.Mode))
	}
	return "", os.Remove(f.Path)
}

// Overrides returns the files that set a key of the entry after our own file at
// boot, in the order in which systemd-sysctl reads them.
func (s *System) Overrides(e *Entry) (list []string) {
	dir := filepath.Dir(s.file())
	names, _ := filepath.Glob(filepath.Join(dir, "*.conf"))
	if dir == "/etc/sysctl.d" {
		for _, other := range []string{"/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d"} {
			more, _ := filepath.Glob(filepath.Join(other, "*.conf"))
			names = append(names, more...)
		}
	}
	for _, name := range names {
		if filepath.Base(name) <= FileName {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			key, _, ok := strings.Cut(strings.TrimLeft(line, "- "), "=")
			key = strings.ReplaceAll(strings.TrimSpace(key), "/", ".")
			if ok && slices.ContainsFunc(e.Steps, func(st Step) bool { return st.Key == key }) {
				list = append(list, name+" sets "+key)
			}
		}
	}
	return list
}
