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

// coming is a backend that comes by slow-start, as it is kept over restarts of the daemon.
type coming struct {
	Service string         `json:"service"`
	Backend string         `json:"backend"`
	To      netip.AddrPort `json:"to"`
	Since   time.Time      `json:"since"` // it takes new flows
}

// readComing reads which backends came when an earlier daemon ended. Without the file they have all of
// their weights.
func (e *Engine) readComing() {
	if e.opt.Coming == "" {
		return
	}
	raw, err := os.ReadFile(e.opt.Coming)
	if err == nil {
		err = json.Unmarshal(raw, &e.kept)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.opt.Log.Warn("backends that were coming by slow-start have all of their weights", "error", fmt.Errorf("%s: %w", e.opt.Coming, err))
	}
	e.earlier = e.kept
}

// cameBefore returns since when a backend has taken new flows, if an earlier daemon saw it come.
func (e *Engine) cameBefore(service string, b *config.Backend) (time.Time, bool) {
	i := slices.IndexFunc(e.earlier, func(c coming) bool {
		return c.Service == service && c.Backend == b.Name && c.To == netip.AddrPortFrom(b.Address, b.Port)
	})
	if i < 0 {
		return time.Time{}, false
	}
	return e.earlier[i].Since, true
}

// keepComing writes which backends come, where that is not what the file says.
func (e *Engine) keepComing(list []coming) {
	slices.SortFunc(list, func(a, b coming) int {
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
