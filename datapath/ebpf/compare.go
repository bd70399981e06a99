// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// compare describes what applying a desired state changes.
func (d *Datapath) compare(want *compile.Desired) *datapath.Change {
	var lines []string
	if d.t != nil {
		if differs := d.t.Differs(want.Tables); differs != "" {
			lines = append(lines, differs)
		}
	}
	var objects datapath.Count
	if d.programs == nil {
		objects.Added++
		lines = append(lines, fmt.Sprintf("load programs for attach: %s", cmp.Or(want.Switches.Attach, config.AttachAuto)))
	} else if d.switches != want.Switches {
		objects.Changed++
		lines = append(lines, "load programs anew: their switches change")
	}
	c := compile.Changes(d.inForce, want, lines)
	c.Datapath, c.Objects = d.Name(), objects
	return c
}
