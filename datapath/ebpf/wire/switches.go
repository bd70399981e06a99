// SPDX-License-Identifier: Apache-2.0

package wire

// Switches are the constants of the programs that follow from a snapshot, and the
// hooks that they are loaded for.
type Switches struct {
	XDP, TC, Bare                                                                          bool // which programs are loaded
	Services, Reverse, NAT, ByEgress, Prefixes, Crossing, Pools, Blocks, Mappings, Rules   bool
	Denied                                                                                 bool // sources that are dropped before parsing
	Ranges, IfaceListeners, Any, Direct, MACKeys, Edits, Cookies, Resets, Forwards, Paired bool
	HostLists, TrieLists                                                                   uint32 // bits LIST_*
	LocalPortLast                                                                          uint32
	RuleCount                                                                              uint32
	Established, Transitory, UDP, ICMP, Other, Hold                                        uint32 // Ticks.
	HalfOpen                                                                               uint32 // Handshakes in progress.
	LowestIPv6MTU                                                                          uint32 // Bytes; 0 means the MTU of the next link.
	Owned, CrossByEgress, FamilyChange                                                     bool
	Persistence, Rates                                                                     bool   // Something uses the map stickies, client_rates.
	Errors                                                                                 uint32 // A second.
}

// AllOn turns all features on that do nothing where no map has anything for them. Mappings
// have programs of their own, rules close the straight path.
func (s *Switches) AllOn() {
	for _, on := range []*bool{&s.Owned, &s.Services, &s.Reverse, &s.NAT, &s.ByEgress, &s.Prefixes, &s.Crossing, &s.Pools, &s.Blocks,
		&s.Ranges, &s.IfaceListeners, &s.Any, &s.Direct, &s.MACKeys, &s.Edits, &s.Cookies, &s.Resets, &s.Forwards, &s.CrossByEgress, &s.FamilyChange, &s.Persistence, &s.Rates, &s.Denied} {
		*on = true
	}
	s.HostLists, s.TrieLists = ^uint32(0), ^uint32(0)
}

// WayOut says how to get tables of another size.
const WayOut = "'sluice stop --force' removes them with their flows, and the next start makes new ones"

// MaxPool is how many pool addresses one rule or service may have.
const MaxPool = 4096
