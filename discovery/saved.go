// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluice-lb/sluice/config"
)

// saved is the stored result for a service.
type saved struct {
	Origin   string           `json:"origin"`
	Backends []config.Backend `json:"backends"`
}

func load(path string) (map[string]saved, error) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var last map[string]saved
	if err == nil {
		err = json.Unmarshal(raw, &last)
	}
	if err != nil {
		return nil, fmt.Errorf("backends found before: %s: %w; move the file away to start without them", path, err)
	}
	return last, nil
}

// store replaces the file as a whole. The next query renews the data, so a crash of the machine may lose it.
func store(path string, last map[string]saved) error {
	if path == "" {
		return nil
	}
	raw, err := json.Marshal(last)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err == nil {
		err = os.WriteFile(path+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	return err
}
