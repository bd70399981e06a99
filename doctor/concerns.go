// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Concerns is the traffic that a finding can explain. An empty field matches all traffic, a field
// with values matches traffic with any one.
type Concerns struct {
	Interfaces   []string       `json:"interfaces,omitempty"`   // of arrival or departure
	Sources      []netip.Prefix `json:"sources,omitempty"`      // Before or after translation.
	Destinations []netip.Prefix `json:"destinations,omitempty"` // Before or after translation.
	NextHops     []netip.Addr   `json:"next_hops,omitempty"`
	// LinkAddresses are the hardware addresses of next hops.
	LinkAddresses []string        `json:"link_addresses,omitempty"`
	Protocols     []flow.Protocol `json:"protocols,omitempty"`
	Ports         []uint16        `json:"ports,omitempty"` // of the server, before or after translation
	// Stages at which exchanges end for this reason; empty: as the list of the check says.
	Stages []outcome.Stage `json:"stages,omitempty"`
}

// concerning names the traffic that the finding can explain.
func (f Finding) concerning(c Concerns) Finding {
	f.Concerns = &c
	return f
}

// hosts are the single addresses as prefixes.
func hosts(addresses ...netip.Addr) (list []netip.Prefix) {
	for _, a := range addresses {
		if a.IsValid() {
			list = append(list, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return list
}

// explains lists the stages at which exchanges end for the reason that a check looks at, for findings that do
// not name their own.
var explains = map[string][]outcome.Stage{
	"CT01": {outcome.NeverLeft}, "CT02": {outcome.NeverLeft}, "CT04": {outcome.NeverLeft}, "CT05": {outcome.NeverLeft}, "CT09": {outcome.NeverLeft},
	"CT11": {outcome.NeverLeft}, "PT01": {outcome.NeverLeft}, "PT02": {outcome.NeverLeft},
	"ST08": {outcome.NoAnswer, outcome.AnswerLost, outcome.ClientRejects},
	"ST10": {outcome.NoAnswer, outcome.Refused},
	"ST12": {outcome.Untranslated, outcome.NoAnswer, outcome.Refused},
	"RL07": {outcome.NeverLeft}, "RL09": {outcome.NeverLeft}, "RL15": {outcome.NeverLeft, outcome.AnswerLost},
	"RL16": {outcome.Untranslated, outcome.NoAnswer, outcome.ClientRejects},
	"FW01": {outcome.NeverLeft}, "FW02": {outcome.NeverLeft, outcome.AnswerLost}, "FW03": {outcome.TooBig, outcome.NeverLeft, outcome.AnswerLost},
	"FW05": {outcome.TooBig}, "FW06": {outcome.NeverLeft}, "FW07": {outcome.NeverLeft, outcome.AnswerLost}, "FW08": {outcome.NeverLeft, outcome.AnswerLost},
	"FW09": {outcome.WrongWay}, "FW12": {outcome.NeverLeft, outcome.AnswerLost}, "FW13": {outcome.NeverLeft, outcome.AnswerLost},
	"FW14": {outcome.NeverLeft, outcome.AnswerLost, outcome.TooBig}, "FW15": {outcome.NeverLeft, outcome.AnswerLost, outcome.NoAnswer},
	"FW16": {outcome.WrongWay, outcome.NoAnswer, outcome.ClientRejects}, "FW17": {outcome.ClientRejects, outcome.WrongWay},
	"FW18": {outcome.NoAnswer, outcome.NeverLeft},
	"RX01": {outcome.NeverLeft, outcome.AnswerLost}, "RX06": {outcome.NeverLeft, outcome.NoAnswer}, "RX07": {outcome.NeverLeft, outcome.NoAnswer, outcome.AnswerLost},
	"RX08": {outcome.NeverLeft, outcome.AnswerLost}, "RX11": {outcome.NeverLeft, outcome.NoAnswer, outcome.AnswerLost}, "RX12": {outcome.TooBig, outcome.NeverLeft, outcome.AnswerLost},
	"LS01": {outcome.NoAnswer}, "LS02": {outcome.NoAnswer},
	"LS05": {outcome.NeverLeft},
}

// dropChecks lists the checks that explain a cause of drops.
var dropChecks = map[string][]string{
	trace.CauseTableFull.ID: {"CT05", "CT01", "CT02", "CT04"}, trace.CausePortsExhausted.ID: {"PT01", "PT02", "CT11"}, trace.CauseConfirmRace.ID: {"PT01", "CT11", "PT04"},
	trace.CauseLongChain.ID: {"CT09", "CT07"},
	trace.CauseNftRule.ID:   {"RL15", "RL07", "ST08"}, trace.CauseLegacyRule.ID: {"RL15", "RL07", "ST08"}, trace.CauseHookRule.ID: {"RL15", "RL07", "ST08"},
	trace.CauseForwardOff.ID: {"FW01"}, trace.CauseRPFilter.ID: {"FW02"}, trace.CauseMTU.ID: {"FW03", "FW05"}, trace.CauseTTL.ID: {"FW09"},
	trace.CauseHeader.ID: {"FW13"}, trace.CauseNoRoute.ID: {"FW08"}, trace.CauseBlackhole.ID: {"FW08", "FW13"},
	trace.CauseNeighbour.ID: {"ST10", "RX14", "RX11", "FW07"}, trace.CauseNeighbourQueue.ID: {"RX14", "FW07"}, trace.CauseNeighbourFull.ID: {"FW06"},
	trace.CauseQdisc.ID: {"RX14", "RX13", "RX07"}, trace.CauseBacklog.ID: {"RX01"}, trace.CauseReceiveBuffer.ID: {"LS05"}, trace.CauseChecksum.ID: {"FW15"},
	trace.CauseFragment.ID: {"FW14"}, trace.CauseFarEnd.ID: {"RX12"}, trace.CauseBridgePort.ID: {"RX11"}, trace.CauseMartian.ID: {"FW12"},
	trace.CauseXDP.ID: {"FW13", "RX08"}, trace.CauseTC.ID: {"FW13"}, trace.CauseIPsec.ID: {"FW13"},
}

// explainedBy rates how well a finding explains a class; 0: not at all.
func explainedBy(c *outcome.Class, f *Finding) int {
	if f.Verdict < Info || f.Verdict == Unknown || c.Reason.Unrecognised && f.Check != "RL16" {
		return 0
	}
	if c.Reason.Unrecognised {
		return 1
	}
	scope := f.Concerns
	stages, listed := explains[f.Check], false
	if scope != nil && len(scope.Stages) > 0 {
		stages = scope.Stages
	}
	if len(stages) == 0 && scope == nil || len(stages) > 0 && !slices.Contains(stages, c.Stage) {
		return 0
	}
	rate := 10 * int(f.Verdict)
	if d := c.Reason.Drop; d != nil {
		checks := dropChecks[d.Cause.ID]
		if listed = slices.Contains(checks, f.Check); listed {
			rate += 100 - slices.Index(checks, f.Check)
		} else if len(checks) > 0 && (scope == nil || len(scope.Stages) == 0) {
			return 0
		}
	}
	if scope == nil {
		// Without a scope or a drop of its kind a finding explains only by its weight. A notrack rule is the reason why
		// packets without an entry are not translated.
		untracked := f.Check == "RL16" && c.Stage == outcome.Untranslated && !c.Example.Tracked()
		if f.Verdict < Warn && !listed && !untracked {
			return 0
		}
		return rate + f.weight/10
	}
	fits := func(there, overlap bool) bool {
		if there && overlap {
			rate += 20
		}
		return !there || overlap
	}
	if !fits(len(scope.Interfaces) > 0, overlap(scope.Interfaces, c.Interfaces())) || !fits(len(scope.Protocols) > 0, overlap(scope.Protocols, c.Protocols())) ||
		!fits(len(scope.LinkAddresses) > 0, overlap(scope.LinkAddresses, c.LinkAddresses())) ||
		!fits(len(scope.Ports) > 0, overlap(scope.Ports, c.Ports())) {
		return 0
	}
	clients, servers := contain(scope.Sources, c.Clients()), contain(scope.Destinations, c.Servers())
	if len(scope.Sources) > 0 && slices.Equal(scope.Sources, scope.Destinations) { // in either direction
		clients = clients || servers
		servers = clients
	}
	if !fits(len(scope.Sources) > 0, clients) || !fits(len(scope.Destinations) > 0, servers) {
		return 0
	}
	if hops := c.NextHops(); len(hops) > 0 && !fits(len(scope.NextHops) > 0, overlap(scope.NextHops, hops)) {
		return 0
	}
	return rate + f.weight/10
}

func overlap[T comparable](a, b []T) bool {
	return slices.ContainsFunc(a, func(x T) bool { return slices.Contains(b, x) })
}

func contain(prefixes []netip.Prefix, addresses []netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return slices.ContainsFunc(addresses, p.Contains) })
}
