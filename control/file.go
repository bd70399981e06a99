// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sluice-lb/sluice/config"
)

// writeFile replaces the operator's file by one with the same mode and owner. A symbolic link stays;
// what it leads to is replaced. A crash leaves the old file or the new one.
func writeFile(path string, cfg *config.Config) error {
	text, err := config.Marshal(cfg)
	if err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return err
	}
	old, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(old.Mode().Perm())
	}
	if owner, ok := old.Sys().(*syscall.Stat_t); ok && err == nil {
		err = f.Chown(int(owner.Uid), int(owner.Gid))
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
