// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"io/fs"
	"os"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
)

// load reads the operator's file. It refuses a pipe in its place, because reading it would block all changes.
func (c *Control) load() (*config.Config, error) {
	if info, err := os.Stat(c.path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("configuration: %w", &fs.PathError{Op: "read", Path: c.path, Err: disk.ErrKind})
	}
	return config.Load(c.path)
}

// writeFile replaces the operator's file.
func writeFile(path string, cfg *config.Config) error {
	text, err := config.Marshal(cfg)
	if err != nil {
		return err
	}
	return disk.Rewrite(path, text)
}
