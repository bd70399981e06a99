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

// flowtableName is the flowtable of the table inet; offloadChain adds flows to it.
const (
	flowtableName = "fast"
	offloadChain  = "offload"
)

// flowtable offloads established connections to a flowtable. Their packets then skip the routing
// decision and all rules except the ingress hook.
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

// SeesEveryPacket returns the first object of the snapshot that must see every packet of a
// connection, or "" if none must. Such an object would miss the packets that a flowtable forwards.
func SeesEveryPacket(s *datapath.Snapshot) string {
	if len(s.Uplinks) > 0 {
		return "the choice of the uplink"
	}
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
