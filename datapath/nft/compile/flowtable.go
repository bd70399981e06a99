// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// flowtableName is the flowtable of the table inet, offloadChain what fills it.
const (
	flowtableName = "fast"
	offloadChain  = "offload"
)

// flowtable hands established connections to a flowtable: their packets then
// skip all rules but those of the ingress hook, and the routing decision.
func (c *compiler) flowtable(b *base) {
	devices := slices.Clone(c.devices())
	if !c.env.Flowtable || len(devices) == 0 {
		return
	}
	slices.Sort(devices)
	id := rs.ID{Table: rs.Inet, Name: flowtableName}
	b.objects = append(b.objects, &rs.Object{ID: id, Kind: rs.ObjectFlowtable, Devices: strings.Join(devices, " ")})
	b.chains[rs.ID{Table: rs.Inet, Name: offloadChain}] = []rs.Rule{rs.NewRule().Offload(flowtableName).Rule("")}
}

// SeesEveryPacket returns what of the snapshot has to see every packet of a
// connection and would miss those that a flowtable forwards; "" when nothing has.
func SeesEveryPacket(s *datapath.Snapshot) string {
	for _, svc := range s.Services {
		switch {
		case svc.Limits.StrictTCP:
			return "strict-tcp of service " + svc.Name
		case svc.Mark != 0 || slices.ContainsFunc(svc.Backends, func(b config.Backend) bool { return b.Mark != 0 }):
			return "the mark of service " + svc.Name
		}
	}
	for _, n := range s.NAT {
		if n.Mark != 0 {
			return "the mark of nat rule " + n.Name
		}
	}
	for i, r := range s.Rules {
		forwarded := ruleChain(r).Name == "forward" || ruleChain(r).Name == "early"
		if forwarded && r.Action != config.ActionNotrack {
			return fmt.Sprintf("firewall rule %s", RuleName(r, i))
		}
	}
	return ""
}
