// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluice-lb/sluice/disk"
)

// recordFile names the table and the protocol of the routes. If this process is killed and the configuration changes,
// the next one, or "sluice stop --force", finds the routes there. The file exists before the first route.
const recordFile = "announcements.json"

// maxRecord is the largest record that is read, in bytes.
const maxRecord = 4 << 10

// routeLocation is the location of the routes. The zero value means that there are none.
type routeLocation struct {
	Table    uint32 `json:"table"`
	Protocol uint8  `json:"protocol"`
}

// usual is the place of a configuration without the keys.
var usual = routeLocation{5100, 76}

// readRecord returns the place of the routes. If the record is damaged, it returns the usual place, and lost describes
// the damage.
func readRecord(dir string) (p routeLocation, lost string) {
	path := filepath.Join(dir, recordFile)
	text, err := disk.Read(path, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return routeLocation{}, ""
	}
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err == nil && (p.Table == 0 || p.Protocol == 0) {
		err = errors.New("no table or no protocol")
	}
	if err != nil {
		return usual, fmt.Sprintf("announcements: %s: damaged (%v); routes are looked for in table %d with protocol %d: remove others with ip route flush table TABLE proto PROTOCOL", path, err, usual.Table, usual.Protocol)
	}
	return p, ""
}

// writeRecord replaces the file, or removes it if there are no routes.
func writeRecord(dir string, p routeLocation) error {
	path := filepath.Join(dir, recordFile)
	if p == (routeLocation{}) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("announcements: %w", err)
		}
		return nil
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := disk.Replace(path, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("announcements: %w", err)
	}
	return nil
}

// Left reports whether an earlier process has left routes.
func Left(dir string) (bool, error) {
	p, _ := readRecord(dir)
	if p == (routeLocation{}) {
		return false, nil
	}
	routes, err := p.routes()
	return len(routes) > 0, err
}

// Remove removes the routes that an earlier process left.
func Remove(dir string) error {
	p, _ := readRecord(dir)
	if p == (routeLocation{}) {
		return nil
	}
	if err := p.removeRoutes(); err != nil {
		return err
	}
	return writeRecord(dir, routeLocation{})
}
