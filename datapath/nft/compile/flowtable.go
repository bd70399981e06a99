// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"
	"strings"

	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// flowtableName is the flowtable of the table inet.
const flowtableName = "fast"

// flowtable hands established connections to a flowtable: their packets then
// skip the rules and the routing decision.
func (c *compiler) flowtable(b *base) {
	devices := slices.Clone(c.devices())
	if !c.env.Flowtable || len(devices) == 0 {
		return
	}
	slices.Sort(devices)
	id := rs.ID{Table: rs.Inet, Name: flowtableName}
	b.objects = append(b.objects, &rs.Object{ID: id, Kind: rs.ObjectFlowtable, Devices: strings.Join(devices, " ")})
	forward := rs.ID{Table: rs.Inet, Name: "forward"}
	b.chains[forward] = append([]rs.Rule{rs.NewRule().Offload(flowtableName).Rule("")}, b.chains[forward]...)
}
