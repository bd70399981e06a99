// SPDX-License-Identifier: Apache-2.0

package conntrack

import "github.com/sluice-lb/sluice/capacity"

// Report is a survey in the form of 'sluice conns --json', which is part of the command's interface.
type Report struct {
	Window     float64      `json:"window_seconds"`
	Namespaces []FillReport `json:"namespaces"`
	Total      Count        `json:"total"`
	Memory     uint64       `json:"memory_bytes"` // memory of the counted entries, including NAT extensions
	IPv4       uint32       `json:"ipv4"`
	IPv6       uint32       `json:"ipv6"`
	Unreplied  uint32       `json:"unreplied"`
	Offloaded  uint32       `json:"offloaded"`
	SNAT       uint32       `json:"snat"`
	DNAT       uint32       `json:"dnat"`
	FullNAT    uint32       `json:"snat_and_dnat"`
	By         string       `json:"by,omitempty"`
	Rows       []Row        `json:"rows,omitempty"`
	States     []Row        `json:"states,omitempty"`
	Sources    []Row        `json:"sources,omitempty"`
	Services   []Row        `json:"services,omitempty"`
	SNATPorts  []Occupancy  `json:"snat_ports,omitempty"`
	FreeFirst  []Victims    `json:"free_first,omitempty"`
	Blind      []string     `json:"not_seen,omitempty"`
}

// FillReport is a Fill with its conclusions. Raw and Effective are shares of the limit, from 0 to 1.
type FillReport struct {
	Fill
	Raw        float64 `json:"fill"`
	Effective  float64 `json:"effective_fill"`
	FullInSecs float64 `json:"time_to_full_seconds,omitempty"` // absent if the number does not grow
}

// Grouping selects the rankings of a [Report].
type Grouping struct {
	By   string // One of Groupings; "" for an overview.
	Top  int    // Rows of each ranking; 0 for all.
	Pool uint32 // Ports that SNAT may use on one address; 0 means capacity.MasqueradePorts.
}

// grouping is one value of Grouping.By: the dimension that a survey needs for it, and its rows.
type grouping struct {
	name string
	need Dimension
	rows func(s *Summary, top int) []Row // nil for snat-port, which has occupancies
}

var groupings = []grouping{
	{"state", 0, func(s *Summary, _ int) []Row { return s.States() }},
	{"source", BySource, (*Summary).Sources},
	{"destination", ByDest, (*Summary).Dests},
	{"service", ByService, (*Summary).Services},
	{"backend", ByBackend, (*Summary).Backends},
	{"snat-port", BySNATPort, nil},
	{"netns", 0, (*Summary).Namespaces},
	{"age", 0, func(s *Summary, _ int) []Row { return s.Ages() }},
}

// Groupings returns the valid values of Grouping.By, without the overview.
func Groupings() (names []string) {
	for _, g := range groupings {
		names = append(names, g.name)
	}
	return names
}

// Dimensions returns the dimensions that [Look] has to summarize for the report.
func (g Grouping) Dimensions() Dimension {
	if g.By == "" {
		return BySource | ByService | BySNATPort
	}
	for _, known := range groupings {
		if known.name == g.By {
			return known.need
		}
	}
	return 0
}

// NewReport returns the report of a survey that has the dimensions of g.
func NewReport(s *Survey, g Grouping) *Report {
	sum := s.Summary
	r := &Report{Window: s.Window.Seconds(), Total: sum.Total, By: g.By, Blind: s.Blind,
		Memory: uint64(sum.Total.Entries) * capacity.EntryBytes(capacity.Extensions{NAT: true}),
		IPv4:   sum.Families[0], IPv6: sum.Families[1], Unreplied: sum.Unreplied, Offloaded: sum.Offloaded,
		SNAT: sum.Translated[1], DNAT: sum.Translated[2], FullNAT: sum.Translated[3]}
	for _, fill := range s.Fills {
		c := FillReport{Fill: fill, Raw: fill.Fill(), Effective: fill.Effective()}
		if d := fill.TimeToFull(); d >= 0 && fill.Foreseeable() {
			c.FullInSecs = d.Seconds()
		}
		r.Namespaces = append(r.Namespaces, c)
	}
	if g.By == "" {
		r.States, r.Sources, r.Services = sum.States(), sum.Sources(g.Top), sum.Services(g.Top)
		r.SNATPorts, r.FreeFirst = sum.Occupancies(g.Top, g.Pool), sum.FreeFirst()
		return r
	}
	for _, known := range groupings {
		switch {
		case known.name != g.By:
		case known.rows == nil:
			r.SNATPorts = sum.Occupancies(g.Top, g.Pool)
		default:
			r.Rows = known.rows(sum, g.Top)
		}
	}
	return r
}

// Level rates the fullest table: 2 if it dropped packets or more than 90 % is held, 1 above 75 %, else 0.
func (r *Report) Level() int {
	worst := 0
	for _, n := range r.Namespaces {
		switch {
		case n.Effective > 0.90, n.Counted.Drop > 0:
			return 2
		case n.Effective > 0.75:
			worst = 1
		}
	}
	return worst
}
