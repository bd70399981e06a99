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
	"github.com/sluice-lb/sluice/disk"
)

// savedSlowStart is a backend in slow start, in the form of the file that survives restarts of the
// daemon.
type savedSlowStart struct {
	Service string         `json:"service"`
	Backend string         `json:"backend"`
	To      netip.AddrPort `json:"to"`
	Since   time.Time      `json:"since"` // time of the first new flow
}

// maxStarting is the largest file of backends in slow start that is read, in bytes.
const maxStarting = 64 << 20

// readStarting reads the backends in slow start under the previous daemon. Without the file they
// have their full weight.
func (e *Engine) readStarting() {
	if e.opt.Coming == "" {
		return
	}
	raw, err := disk.Read(e.opt.Coming, maxStarting)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var list []savedSlowStart
	if err == nil {
		err = json.Unmarshal(raw, &list)
	}
	if err == nil && slices.ContainsFunc(list, func(c savedSlowStart) bool { return c.Service == "" || c.Backend == "" }) {
		err = errors.New("an entry names no backend")
	}
	if err != nil {
		e.unkept = fmt.Sprintf("backends that were in slow start have their full weights: %s: %v", e.opt.Coming, err)
		e.opt.Log.Warn(e.unkept)
		return
	}
	now := time.Now() // a time in the future would keep a backend from ever having its full weight
	e.kept = slices.DeleteFunc(list, func(c savedSlowStart) bool { return c.Since.After(now) })
	e.earlier = e.kept
}

// earlierStart returns when a backend began its slow start under a previous daemon.
func (e *Engine) earlierStart(service string, b *config.Backend) (time.Time, bool) {
	i := slices.IndexFunc(e.earlier, func(c savedSlowStart) bool {
		return c.Service == service && c.Backend == b.Name && c.To == netip.AddrPortFrom(b.Address, b.Port)
	})
	if i < 0 {
		return time.Time{}, false
	}
	return e.earlier[i].Since, true
}

// saveStarting writes the backends in slow start, unless the file is current.
func (e *Engine) saveStarting(list []savedSlowStart) {
	slices.SortFunc(list, func(a, b savedSlowStart) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Backend, b.Backend))
	})
	if e.opt.Coming == "" || slices.Equal(list, e.kept) && e.unkept == "" {
		return
	}
	raw, err := json.Marshal(list)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(e.opt.Coming), 0o700)
	}
	if err == nil {
		err = disk.Replace(e.opt.Coming, raw, 0o600)
	}
	before := e.unkept
	if e.unkept = ""; err != nil {
		e.unkept = fmt.Sprintf("after a restart of the daemon, backends in slow start would have their full weights at once: %v", err)
		if e.unkept != before {
			e.opt.Log.Warn(e.unkept)
		}
	}
	e.kept = list
}
