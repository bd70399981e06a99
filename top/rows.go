// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// tab is one page of the view.
type tab int

const (
	tabSources tab = iota
	tabDests
	tabServices
	tabSNAT
	tabStates
	tabDrops
	tabCPU
	tabNamespaces
	tabCount
)

var tabNames = [tabCount]string{"Sources", "Dests", "Services", "SNAT", "States", "Drops", "CPU", "Netns"}

// column is a heading; numbers are aligned to the right.
type column struct {
	title string
	width int // 0 takes the remaining width
}

var columns = [tabCount][]column{
	tabSources:    {{"SOURCE", 0}, {"ENTRIES", 10}, {"SHARE", 6}, {"HELD", 10}, {"CLOSING", 9}, {"UNASSURED", 9}},
	tabDests:      {{"DESTINATION", 0}, {"ENTRIES", 10}, {"SHARE", 6}, {"HELD", 10}, {"CLOSING", 9}, {"UNASSURED", 9}},
	tabServices:   {{"SERVICE OR BACKEND (->)", 0}, {"ENTRIES", 10}, {"SHARE", 6}, {"HELD", 10}, {"CLOSING", 9}, {"UNASSURED", 9}},
	tabSNAT:       {{"SNAT ADDRESS -> REMOTE", 0}, {"PORTS", 6}, {"RANGE", 11}, {"USED", 5}, {"", 8}},
	tabStates:     {{"STATE", 0}, {"ENTRIES", 10}, {"SHARE", 6}, {"HELD", 10}, {"CLOSING", 9}, {"UNASSURED", 9}},
	tabDrops:      {{"CAUSE", 0}, {"NAMESPACE", 16}, {"PACKETS", 9}, {"PER s", 8}},
	tabCPU:        {{"PHASE", 0}, {"SHARE", 7}, {"us/PACKET", 10}, {"SAMPLES", 9}},
	tabNamespaces: {{"NAMESPACE", 0}, {"ENTRIES", 9}, {"FILL", 6}, {"HELD", 6}, {"GROWTH", 7}, {"FULL IN", 8}, {"DROPS", 7}},
}

var flowColumns = []column{{"FLOW", 0}, {"STATE", 11}, {"LEFT s", 7}, {"BYTES", 9}}

// row is one line of a tab.
type row struct {
	key     string
	cells   []string  // Without the key.
	numbers []float64 // Sort keys of the cells.
	faint   bool
	// filter selects the row's connections; valid if drill is true.
	filter    conntrack.Filter
	namespace string
	drill     bool
	detail    []string // lines that explain the row
}

// rowLimit is the number of stored rows of a ranking.
const rowLimit = 1000

// rowsOf returns the rows of a tab.
func (m *Model) rowsOf(t tab) []row {
	switch {
	case t == tabDrops:
		return dropRows(m.drops)
	case t == tabCPU:
		return phaseRows(m.profile)
	case t == tabNamespaces:
		return namespaceRows(m.counts)
	case m.table == nil || m.table.Summary == nil:
		return nil
	}
	if m.ranked[t].table != m.table {
		m.ranked[t] = rankedRows{m.table, tableRows(t, m.table.Summary)}
	}
	return m.ranked[t].rows
}

// tableRows ranks a dump for one of the tabs.
func tableRows(t tab, s *conntrack.Summary) []row {
	switch t {
	case tabSources:
		return ranking(s, s.Sources(rowLimit), func(key string, f *conntrack.Filter) { f.Source = singlePrefix(key) })
	case tabDests:
		return ranking(s, s.Dests(rowLimit), func(key string, f *conntrack.Filter) { f.Dest = singlePrefix(key) })
	case tabServices:
		return serviceRows(s)
	case tabSNAT:
		return snatRows(s)
	}
	return ranking(s, s.States(), stateFilter)
}

func ranking(s *conntrack.Summary, list []conntrack.Row, choose func(key string, f *conntrack.Filter)) []row {
	rows := make([]row, 0, len(list))
	for _, r := range list {
		share := 0.0
		if s.Total.Entries > 0 {
			share = float64(r.Entries) / float64(s.Total.Entries)
		}
		out := row{key: r.Key, drill: true,
			cells:   []string{group(r.Entries), percent(share), group(r.Held()), group(r.Closing), group(r.Unassured)},
			numbers: []float64{float64(r.Entries), share, float64(r.Held()), float64(r.Closing), float64(r.Unassured)}}
		choose(r.Key, &out.filter)
		rows = append(rows, out)
	}
	return rows
}

func stateFilter(key string, f *conntrack.Filter) {
	protocol, state, _ := strings.Cut(key, " ")
	f.Protocol, _ = flow.ParseProtocol(protocol)
	f.State = state
	if state == "REPLIED" { // assured entries have their own row
		f.StatusMask = conntrack.Assured
	}
}

// backendArrow marks the rows of tabServices that are translated destinations.
const backendArrow = "-> "

func serviceRows(s *conntrack.Summary) []row {
	rows := ranking(s, s.Services(rowLimit), func(key string, f *conntrack.Filter) {
		addr := endpoint(key, f)
		f.Dest, f.DestPort = hostPrefix(addr.Addr()), portFilter(addr.Port())
	})
	backends := ranking(s, s.Backends(rowLimit), func(key string, f *conntrack.Filter) {
		addr := endpoint(key, f)
		f.TranslatedDest, f.TranslatedDestPort = hostPrefix(addr.Addr()), portFilter(addr.Port())
	})
	for _, b := range backends {
		b.key = backendArrow + b.key
		rows = append(rows, b)
	}
	return rows
}

// endpoint parses "tcp 198.51.100.1:443" or "icmp 198.51.100.1" and sets the protocol.
func endpoint(key string, f *conntrack.Filter) netip.AddrPort {
	protocol, addr, _ := strings.Cut(key, " ")
	f.Protocol, _ = flow.ParseProtocol(protocol)
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		alone, _ := netip.ParseAddr(addr)
		return netip.AddrPortFrom(alone, 0)
	}
	return ap
}

func snatRows(s *conntrack.Summary) []row {
	var rows []row
	for _, o := range s.Occupancies(rowLimit, 0) {
		rows = append(rows, row{
			key: o.Public.String() + " -> " + o.Protocol.String() + " " + o.Remote.String(), drill: true,
			cells:   []string{group(o.Used), o.Range.String(), percent(o.Share()), bar(o.Share(), 8)},
			numbers: []float64{float64(o.Used), float64(o.Range.First), o.Share(), o.Share()},
			filter: conntrack.Filter{Protocol: o.Protocol, TranslatedSource: hostPrefix(o.Public),
				TranslatedDest: hostPrefix(o.Remote.Addr()), TranslatedDestPort: portFilter(o.Remote.Port())},
		})
	}
	return rows
}

func dropRows(r *trace.DropReport) []row {
	if r == nil {
		return nil
	}
	var rows []row
	for _, g := range r.Groups {
		out := row{key: g.Cause.Title, cells: []string{g.Namespace, group(g.Packets), decimal(g.PerSecond)}, faint: g.Cause.Benign,
			numbers: []float64{0, float64(g.Packets), g.PerSecond}, detail: []string{g.Cause.Meaning}}
		if g.Cause.Benign {
			out.key += " (harmless)"
		}
		if g.Cause.Remedy != "" {
			out.detail = append(out.detail, "remedy: "+g.Cause.Remedy)
		}
		for _, p := range g.Places {
			out.detail = append(out.detail, fmt.Sprintf("at %s, reason %s: %d", p.Function, p.Reason, p.Packets))
		}
		for _, rule := range g.Rules {
			out.detail = append(out.detail, "rule: "+rule.String())
		}
		for _, s := range g.Samples {
			line := "packet: " + s.Packet.String()
			if s.Original.IsValid() && s.Original != s.Packet {
				line += ", before NAT " + s.Original.String()
			}
			out.detail = append(out.detail, line)
		}
		rows = append(rows, out)
	}
	return rows
}

// fewPackets is the minimum number of packets in a window for a time per packet. With fewer packets, unrelated work
// of the host would dominate.
const fewPackets = 1000

func phaseRows(p *trace.Profile) []row {
	if p == nil {
		return nil
	}
	var rows []row
	for _, s := range p.Phases {
		perPacket := ""
		if p.Packets >= fewPackets && s.Network {
			perPacket = fmt.Sprintf("%.2f", s.MicrosPerPacket)
		}
		rows = append(rows, row{key: s.Phase, faint: !s.Network, cells: []string{percent(s.Share), perPacket, group(s.Samples)},
			numbers: []float64{s.Share, s.MicrosPerPacket, float64(s.Samples)}})
	}
	return rows
}

func namespaceRows(c *Counts) []row {
	if c == nil {
		return nil
	}
	var rows []row
	for _, f := range c.Fills {
		left := f.TimeToFull()
		order := left.Seconds()
		if left < 0 {
			order = 1e18
		}
		rows = append(rows, row{key: f.Namespace, drill: f.Count > 0, namespace: f.Namespace,
			cells: []string{group(f.Count), percent(f.Fill()), percent(f.Effective()), fmt.Sprintf("%+.0f", f.Growth),
				duration(f), group(f.Counted.Drop)},
			numbers: []float64{float64(f.Count), f.Fill(), f.Effective(), f.Growth, order, float64(f.Counted.Drop)}})
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.numbers[0], a.numbers[0]) })
	return rows
}

func flowRows(list []Flow) []row {
	var rows []row
	for i := range list {
		f := &list[i]
		bytes := "-"
		if f.Counted {
			bytes = size(f.Bytes[0] + f.Bytes[1])
		}
		rows = append(rows, row{key: f.Original.String(), cells: []string{f.Entry.StateName(), strconv.Itoa(int(f.Entry.Timeout)), bytes},
			numbers: []float64{0, float64(f.Entry.Timeout), float64(f.Bytes[0] + f.Bytes[1])}, detail: explain(f)})
	}
	return rows
}

// explain describes a connection in sentences.
func explain(f *Flow) []string {
	lines := []string{
		"namespace " + f.Namespace + fmt.Sprintf(", id %#x, mark %#x, zone %d", f.Entry.ID, f.Mark, f.Zone),
		"the initiator sends  " + f.Original.String(),
		"the responder sends  " + f.Reply.String(),
	}
	switch {
	case f.SourceTranslated() && f.DestTranslated():
		lines = append(lines, "source translated to "+f.Reply.Dest.String()+", destination to "+f.Reply.Source.String())
	case f.SourceTranslated():
		lines = append(lines, "source translated to "+f.Reply.Dest.String()+" (SNAT)")
	case f.DestTranslated():
		lines = append(lines, "destination translated to "+f.Reply.Source.String()+" (DNAT)")
	default:
		lines = append(lines, "not translated")
	}
	lines = append(lines, fmt.Sprintf("%s, forgotten in %v without packets", f.Entry.StateName(), f.Timeout))
	switch {
	case !f.Assured:
		lines = append(lines, "not assured: the first to go when the table is full")
	case f.Entry.Closing():
		lines = append(lines, "closing: evicted when the table is over 95 % full")
	default:
		lines = append(lines, "assured: the kernel does not evict it to make room")
	}
	if f.Counted {
		lines = append(lines, fmt.Sprintf("%s packets, %s out; %s packets, %s back", group(f.Packets[0]), size(f.Bytes[0]), group(f.Packets[1]), size(f.Bytes[1])))
	} else {
		lines = append(lines, "not counted: sysctl net.netfilter.nf_conntrack_acct=1 counts new connections")
	}
	return lines
}

func singlePrefix(addr string) netip.Prefix {
	a, _ := netip.ParseAddr(addr)
	return hostPrefix(a)
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func portFilter(p uint16) flow.Ports { return flow.Ports{First: p, Last: p} }
