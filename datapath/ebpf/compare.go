// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"strings"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// hookNames lists the hooks of the loaded programs.
func hookNames(s wire.Switches) (list []string) {
	if s.XDP {
		list = append(list, "XDP")
	}
	if s.TC || s.Bare {
		list = append(list, "TC")
	}
	return list
}

// compare describes the changes that a desired state makes.
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
		lines = append(lines, "load programs for "+strings.Join(hookNames(want.Switches), " and "))
	} else if d.switches != want.Switches {
		objects.Changed++
		lines = append(lines, "load programs anew: their switches change")
	}
	c := compile.Changes(d.inForce, want, lines)
	c.Datapath, c.Objects = d.Name(), objects
	return c
}
