// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"os"

	"github.com/sluice-lb/sluice/netdev"
)

// ReplayCommand returns the sluice command that traces a sampled packet through the rules, to identify the dropping rule
// among several. It returns "" if no sample can be traced: its ingress interface or its namespace has no name.
func (g *DropGroup) ReplayCommand() string {
	for _, s := range g.Samples {
		packet := s.Packet
		if s.Original.IsValid() { // the tuple before translation is known
			packet = s.Original
		}
		if !packet.IsValid() || s.InIfIndex == 0 {
			continue
		}
		from, to := packet.Source.String(), packet.Dest.String()
		if !packet.Protocol.HasPorts() {
			from, to = packet.Source.Addr().String(), packet.Dest.Addr().String()
		}
		command := fmt.Sprintf("sluice explain --host %s %s %s", packet.Protocol, from, to)
		if s.Hook != HookPostrouting && s.Hook != HookHairpin && s.Interface != "" {
			command += " --in " + s.Interface
		}
		if g.Netns == netdev.HostNamespace().Inode {
			return command
		}
		if _, err := os.Stat("/run/netns/" + g.Namespace); err == nil {
			return "ip netns exec " + g.Namespace + " " + command
		}
	}
	return ""
}
