// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// starting is a backend in slow start, in the form of the file that survives restarts of the
// daemon.
type starting struct {
	Service string         `json:"service"`
	Backend string         `json:"backend"`
	To      netip.AddrPort `json:"to"`
	Since   time.Time      `json:"since"` // start of the new flows
}

// readStarting reads the backends in slow start under the previous daemon. Without the file they
// have their full weight.
func (e *Engine) readStarting() {
	if e.opt.Coming == "" {
		return
	}
	raw, err := os.ReadFile(e.opt.Coming)
	if err == nil {
		err = json.Unmarshal(raw, &e.kept)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.opt.Log.Warn("backends in slow start get their full weight", "error", fmt.Errorf("%s: %w", e.opt.Coming, err))
	}
	e.earlier = e.kept
}

// earlierStart returns when a backend began its slow start under a previous daemon.
func (e *Engine) earlierStart(service string, b *config.Backend) (time.Time, bool) {
	i := slices.IndexFunc(e.earlier, func(c starting) bool {
		return c.Service == service && c.Backend == b.Name && c.To == netip.AddrPortFrom(b.Address, b.Port)
	})
	if i < 0 {
		return time.Time{}, false
	}
	return e.earlier[i].Since, true
}

// saveStarting writes the backends in slow start, unless the file is current.
func (e *Engine) saveStarting(list []starting) {
	slices.SortFunc(list, func(a, b starting) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Backend, b.Backend))
	})
	if e.opt.Coming == "" || slices.Equal(list, e.kept) {
		return
	}
	raw, err := json.Marshal(list)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(e.opt.Coming), 0o700)
	}
	if err == nil {
		err = os.WriteFile(e.opt.Coming+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(e.opt.Coming+".new", e.opt.Coming)
	}
	if err != nil {
		e.opt.Log.Warn("after a restart of the daemon, backends that come by slow-start would have all of their weights at once", "error", err)
	}
	e.kept = list
}
