// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// compare describes what applying a desired state changes.
func (d *Datapath) compare(want *desired) *datapath.Change {
	var lines []string
	if d.t != nil {
		if differs := d.t.differs(want.tables); differs != "" {
			lines = append(lines, differs)
		}
	}
	var objects datapath.Count
	if d.programs == nil {
		objects.Added++
		lines = append(lines, fmt.Sprintf("load programs for attach: %s", cmp.Or(want.switches.Attach, config.AttachAuto)))
	} else if d.switches != want.switches {
		objects.Changed++
		lines = append(lines, "load programs anew: their switches change")
	}
	c := changes(d.inForce, want, lines)
	c.Datapath, c.Objects = d.Name(), objects
	return c
}
