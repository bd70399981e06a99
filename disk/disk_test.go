// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOnlyRegularFiles: no kind of file makes Open wait or return.
func TestOnlyRegularFiles(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	l, err := net.Listen("unix", at("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.Mkdir(at("directory"), 0o700), unix.Mkfifo(at("pipe"), 0o600), os.Symlink(at("pipe"), at("link")),
		os.WriteFile(at("file"), []byte("12345"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{at("directory"), at("pipe"), at("link"), at("socket"), "/dev/zero"} {
		for _, flags := range []int{os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND} {
			if f, err := Open(path, flags, 0); !errors.Is(err, ErrKind) || !strings.Contains(err.Error(), path) {
				t.Errorf("%s opened with flags %x: %v, %v", path, flags, f, err)
			}
		}
		if err := Rewrite(path, nil); !errors.Is(err, ErrKind) && path != at("socket") {
			t.Errorf("%s is replaced: %v", path, err)
		}
	}
	if text, err := Read(at("file"), 5); err != nil || string(text) != "12345" {
		t.Errorf("read %q, %v", text, err)
	}
	if _, err := Read(at("file"), 4); err == nil {
		t.Error("a file that is too large is read")
	}
	if _, err := Read(at("none"), 4); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
}

// TestReplace: a file that a crash left behind is no obstacle, whatever it is, and nothing else is left.
func TestReplace(t *testing.T) {
	for name, leave := range map[string]func(string) error{
		"nothing":   func(string) error { return nil },
		"file":      func(path string) error { return os.WriteFile(path, []byte("half"), 0o400) },
		"pipe":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"symlink":   func(path string) error { return os.Symlink("elsewhere", path) },
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		if err := leave(path + Unfinished); err != nil {
			t.Fatal(err)
		}
		for _, content := range []string{"first", "2nd"} {
			if err := Replace(path, []byte(content), 0o666); err != nil {
				t.Fatalf("%s left: %v", name, err)
			}
			text, err := os.ReadFile(path)
			info, _ := os.Stat(path)
			entries, _ := os.ReadDir(dir)
			if err != nil || string(text) != content || info.Mode() != 0o666 || len(entries) != 1 {
				t.Errorf("%s left: %q, %v, mode %v, %v", name, text, err, info.Mode(), entries)
			}
		}
	}
}

// TestDiscard: a content that does not count leaves nothing.
func TestDiscard(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	wrong := errors.New("wrong")
	if _, err := Prepare(path, nil, 0o600, func(*os.File) error { return wrong }); !errors.Is(err, wrong) {
		t.Errorf("error %v", err)
	}
	p, err := Prepare(path, nil, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	p.Discard()
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left: %v", entries)
	}
}

// TestRewrite: the file stays where its link leads, with its mode and owner.
func TestRewrite(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, []byte("old"), 0o640), os.Symlink("file", link)); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		if err := os.Chown(file, 12, 34); err != nil {
			t.Fatal(err)
		}
	}
	before, _ := os.Stat(file)
	if err := Rewrite(link, []byte("new")); err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(file)
	after, _ := os.Stat(file)
	was, is := before.Sys().(*syscall.Stat_t), after.Sys().(*syscall.Stat_t)
	if info, _ := os.Lstat(link); string(text) != "new" || info.Mode()&os.ModeSymlink == 0 || is.Mode != was.Mode || is.Uid != was.Uid || is.Gid != was.Gid {
		t.Errorf("%q, link %v, %+v was %+v", text, info.Mode(), is, was)
	}
}
