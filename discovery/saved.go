// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
)

// savedResult is the last result of a service's source.
type savedResult struct {
	Origin    string           `json:"origin"`
	Namespace string           `json:"namespace,omitempty"` // Options.Namespace
	Backends  []config.Backend `json:"backends"`
	Checksum  string           `json:"checksum,omitempty"` // of the others; earlier versions wrote none
}

// sum returns the checksum of a result. Without it, a damaged digit would be another backend.
func (s savedResult) sum() string {
	s.Checksum = ""
	raw, err := json.Marshal(s)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:8])
}

// maxSaved is the largest file of results that is read, in bytes.
const maxSaved = 256 << 20

// loadResults returns the results of earlier processes. A service with a damaged result has none until its
// source replies. The error lists the missing results.
func loadResults(path string) (map[string]savedResult, error) {
	last := map[string]savedResult{}
	if path == "" {
		return last, nil
	}
	raw, err := disk.Read(path, maxSaved)
	if errors.Is(err, fs.ErrNotExist) {
		return last, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &last)
	}
	if err != nil {
		return map[string]savedResult{}, fmt.Errorf("the backends found before the start are not known: %s: %w", path, err)
	}
	if last == nil {
		return map[string]savedResult{}, fmt.Errorf("the backends found before the start are not known: %s: the file is damaged", path)
	}
	var damaged []string
	for service, s := range last {
		if s.Checksum != "" && s.Checksum != s.sum() || !usableAll(s.Backends) {
			damaged = append(damaged, service)
			delete(last, service)
		}
	}
	if len(damaged) > 0 {
		slices.Sort(damaged)
		err = fmt.Errorf("the backends of %s found before the start are not known: %s: %w", strings.Join(damaged, ", "), path, disk.ErrDamaged)
	}
	return last, err
}

// usableAll reports whether backends can have been found: each has a name and an address.
func usableAll(list []config.Backend) bool {
	return !slices.ContainsFunc(list, func(b config.Backend) bool { return b.Name == "" || !b.Address.IsValid() })
}

// saveResults replaces the file as a whole.
func saveResults(path string, last map[string]savedResult) error {
	if path == "" {
		return nil
	}
	for service, s := range last {
		s.Checksum = s.sum()
		last[service] = s
	}
	raw, err := json.Marshal(last)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err == nil {
		err = disk.Replace(path, raw, 0o600)
	}
	return err
}
