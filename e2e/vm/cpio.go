// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"io"
	"io/fs"
)

// archive writes an initramfs in the "newc" format of cpio
// (Documentation/driver-api/early-userspace/buffer-format.rst of the kernel).
type archive struct {
	w     io.Writer
	inode int
	err   error
	made  map[string]bool
}

func newArchive(w io.Writer) *archive { return &archive{w: w, made: map[string]bool{}} }

// Bits of st_mode.
const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeLink = 0o120000
)

func (a *archive) file(name string, mode fs.FileMode, data []byte) {
	a.parents(name)
	a.entry(name, modeFile|int(mode.Perm()), data)
}

func (a *archive) symlink(name, target string) {
	a.parents(name)
	a.entry(name, modeLink|0o777, []byte(target))
}

// parents adds the missing parent directories of name.
func (a *archive) parents(name string) {
	for i, c := range name {
		if c == '/' && i > 0 {
			a.dir(name[:i])
		}
	}
}

func (a *archive) dir(name string) {
	if !a.made[name] {
		a.made[name] = true
		a.entry(name, modeDir|0o755, nil)
	}
}

func (a *archive) entry(name string, mode int, data []byte) {
	a.inode++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	a.write([]byte(header + name + "\x00"))
	a.pad(len(header) + len(name) + 1)
	a.write(data)
	a.pad(len(data))
}

// pad pads to a multiple of four bytes.
func (a *archive) pad(n int) { a.write(make([]byte, (4-n%4)%4)) }

func (a *archive) write(b []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(b)
	}
}

func (a *archive) close() error {
	a.entry("TRAILER!!!", 0, nil)
	return a.err
}
