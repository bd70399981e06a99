// SPDX-License-Identifier: Apache-2.0

// Package disk reads and replaces files. A read never waits for another process. After a crash of the
// machine, a replaced file has its old content or the new one.
package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ErrKind is wrapped by errors about directories, pipes, sockets and devices in the place of a file.
var ErrKind = errors.New("not a regular file")

// Open opens a regular file, and refuses everything else: opening, reading or writing a pipe can block
// forever, and reading a device can return data forever.
func Open(path string, flags int, mode os.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flags|syscall.O_NONBLOCK, mode)
	if errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.EISDIR) { // a socket, or a pipe without a reader
		return nil, &fs.PathError{Op: "open", Path: path, Err: ErrKind}
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: path, Err: ErrKind}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Read returns the content of a regular file, and an error if it has more than limit bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = fmt.Errorf("%s: larger than %d bytes", path, limit)
	}
	return content, err
}

// Unfinished is the suffix of a file that is being written. A crash can leave one such file for each
// path; the next Prepare for that path removes it.
const Unfinished = ".new"

// Pending is a new content of a file. It is on disk, and has the file's name after Commit.
type Pending struct{ path string }

// Prepare writes the new content of a file into its directory. Each adjust changes the new file before
// it is flushed.
func Prepare(path string, content []byte, mode os.FileMode, adjust ...func(*os.File) error) (*Pending, error) {
	temp := path + Unfinished
	_ = os.Remove(temp) // the next line reports a file that cannot be removed
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode) // in spite of the umask
	}
	for _, change := range adjust {
		if err == nil {
			err = change(f)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(temp)
		return nil, err
	}
	return &Pending{path}, nil
}

// Commit replaces the file. If only flushing the directory fails, the file has the new content, but a
// crash of the machine may bring the old one back.
func (p *Pending) Commit() error {
	if err := os.Rename(p.path+Unfinished, p.path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(p.path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Discard removes the new content. After Commit it does nothing.
func (p *Pending) Discard() { _ = os.Remove(p.path + Unfinished) }

// Replace creates the file, or replaces it as a whole.
func Replace(path string, content []byte, mode os.FileMode, adjust ...func(*os.File) error) error {
	p, err := Prepare(path, content, mode, adjust...)
	if err != nil {
		return err
	}
	if err := p.Commit(); err != nil {
		p.Discard()
		return err
	}
	return nil
}

// Rewrite replaces an existing file that belongs to somebody else: mode and owner stay. A symbolic link
// stays too; its target is replaced.
func Rewrite(path string, content []byte) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return &fs.PathError{Op: "replace", Path: path, Err: ErrKind}
	}
	return Replace(path, content, info.Mode().Perm(), func(f *os.File) error {
		owner := info.Sys().(*syscall.Stat_t)
		return f.Chown(int(owner.Uid), int(owner.Gid))
	})
}
