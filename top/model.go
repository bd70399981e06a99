// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/trace"
)

// Model is the state of the view. It is a bubbletea model: Update changes it,
// View draws it, commands fetch data from the Reader.
type Model struct {
	ctx    context.Context
	reader Reader

	width, height int

	counts  *Counts
	table   *TableSummary
	drops   *trace.DropReport
	profile *trace.Profile
	wait    time.Duration
	errs    [fetchCount]error // of the last fetch of each kind
	busy    [fetchCount]bool  // in progress
	due     [fetchCount]bool  // A timer will start it.
	paused  bool

	ranked   [tabCount]rankedRows
	tab      tab
	pages    [tabCount]page
	flows    *flowPage // open while the connections of a row are listed
	detail   *detailPage
	help     bool
	typing   bool
	typed    string
	typedErr error
}

// page is the display state of a list.
type page struct {
	cursor, offset int
	sort           int // column, 0 is the key; -1 keeps the original order
	ascending      bool
	filter         string
	match          *regexp.Regexp
	inverse        bool
}

// rankedRows caches a page's rows as long as the table is the same. Ranking a hundred thousand sources for every key
// press would cost more than the dump.
type rankedRows struct {
	table *TableSummary
	rows  []row
}

// flowPage lists the connections of one row.
type flowPage struct {
	title     string
	filter    conntrack.Filter
	namespace string
	page      page
	list      []Flow
	loaded    bool
}

// detailPage explains one row.
type detailPage struct {
	title string
	lines []string
}

// flowLimit is the maximum number of connections listed for a row.
const flowLimit = 500

// New returns a view of reader's data. Blocking calls end with ctx.
func New(ctx context.Context, reader Reader) *Model {
	m := &Model{ctx: ctx, reader: reader, width: 80, height: 24}
	for i := range m.pages {
		m.pages[i].sort = -1
	}
	return m
}

// fetch is a kind of refresh; at most one fetch of each kind runs.
type fetch int

const (
	fetchCounts fetch = iota
	fetchTable
	fetchDrops
	fetchProfile
	fetchFlows
	fetchCount
)

// Messages that report finished fetches.
type (
	countsMsg struct {
		counts *Counts
		err    error
	}
	tableMsg struct {
		table *TableSummary
		err   error
	}
	dropsMsg struct {
		report *trace.DropReport
		err    error
	}
	profileMsg struct {
		profile *trace.Profile
		err     error
	}
	flowsMsg struct {
		page *flowPage
		list []Flow
		err  error
	}
	// dueMsg reports that the next fetch is due.
	dueMsg fetch
)

// Init implements tea.Model.
func (m *Model) Init() tea.Cmd { return tea.Batch(m.start(fetchCounts), m.start(fetchTable)) }

// start begins a fetch unless it is running or not needed now.
func (m *Model) start(f fetch) tea.Cmd {
	if m.busy[f] || m.paused && f != fetchFlows || f == fetchDrops && m.tab != tabDrops || f == fetchProfile && m.tab != tabCPU {
		return nil
	}
	m.busy[f] = true
	ctx, r := m.ctx, m.reader
	switch f {
	case fetchCounts:
		return func() tea.Msg {
			c, err := r.Counts(ctx)
			return countsMsg{c, err}
		}
	case fetchTable:
		return func() tea.Msg {
			t, err := r.Table(ctx)
			return tableMsg{t, err}
		}
	case fetchDrops:
		return func() tea.Msg {
			d, err := r.Drops(ctx)
			return dropsMsg{d, err}
		}
	case fetchProfile:
		return func() tea.Msg {
			p, err := r.Profile(ctx)
			return profileMsg{p, err}
		}
	}
	page := m.flows
	return func() tea.Msg {
		list, err := r.Flows(ctx, page.filter, page.namespace, flowLimit)
		return flowsMsg{page, list, err}
	}
}

// fetchAfter starts a fetch in d, unless a timer for it is running.
func (m *Model) fetchAfter(d time.Duration, f fetch) tea.Cmd {
	if m.due[f] {
		return nil
	}
	m.due[f] = true
	return tea.Tick(d, func(time.Time) tea.Msg { return dueMsg(f) })
}

// Update implements tea.Model.
func (m *Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		if msg.Width > 0 && msg.Height > 0 { // a serial console reports no size
			m.width, m.height = msg.Width, msg.Height
		}
	case tea.KeyPressMsg:
		return m, m.key(msg)
	case dueMsg:
		m.due[msg] = false
		return m, m.start(fetch(msg))
	case countsMsg:
		m.busy[fetchCounts] = false
		if m.errs[fetchCounts] = msg.err; msg.err != nil {
			return m, m.fetchAfter(countEvery, fetchCounts)
		}
		m.counts = msg.counts
		return m, m.fetchAfter(min(waitAfter(msg.counts.Took, countShare, countEvery), countSlowest), fetchCounts)
	case tableMsg:
		m.busy[fetchTable] = false
		if m.errs[fetchTable] = msg.err; msg.err == nil {
			// The cost varies with the load of the host: the higher of two counts.
			cost := msg.table.CPU
			if m.table != nil {
				cost = max(cost, m.table.CPU)
			}
			m.table = msg.table
			m.wait = waitAfter(cost, dumpShare, dumpMinimum)
			return m, m.fetchAfter(m.wait, fetchTable)
		}
		return m, m.fetchAfter(dumpMinimum, fetchTable)
	case dropsMsg:
		m.busy[fetchDrops] = false
		if m.errs[fetchDrops] = msg.err; msg.err == nil {
			m.drops = msg.report
		}
		return m, m.fetchAfter(watchWindow, fetchDrops)
	case profileMsg:
		m.busy[fetchProfile] = false
		if m.errs[fetchProfile] = msg.err; msg.err == nil {
			m.profile = msg.profile
		}
		return m, m.fetchAfter(watchWindow, fetchProfile)
	case flowsMsg:
		m.busy[fetchFlows] = false
		switch m.errs[fetchFlows] = msg.err; {
		case m.flows == msg.page && m.flows != nil:
			m.flows.list, m.flows.loaded = msg.list, true
		case m.flows != nil: // opened while the flows of another row were read
			return m, m.start(fetchFlows)
		}
	}
	return m, nil
}

// currentPage returns the page with the keyboard focus.
func (m *Model) currentPage() *page {
	if m.flows != nil {
		return &m.flows.page
	}
	return &m.pages[m.tab]
}

// columns returns the headings of the displayed list.
func (m *Model) columns() []column {
	if m.flows != nil {
		return flowColumns
	}
	return columns[m.tab]
}

// rows returns the displayed rows, filtered and sorted.
func (m *Model) rows() []row {
	p := m.currentPage()
	var rows []row
	if m.flows != nil {
		rows = flowRows(m.flows.list)
	} else {
		rows = slices.Clone(m.rowsOf(m.tab)) // filtering and sorting modify it
	}
	if p.match != nil {
		rows = slices.DeleteFunc(rows, func(r row) bool {
			return p.match.MatchString(r.key+" "+strings.Join(r.cells, " ")) == p.inverse
		})
	}
	if p.sort >= 0 {
		slices.SortStableFunc(rows, func(a, b row) int {
			order := compareRows(a, b, p.sort)
			if p.ascending {
				return order
			}
			return -order
		})
	}
	return rows
}

func compareRows(a, b row, column int) int {
	if column == 0 {
		return -strings.Compare(a.key, b.key) // "descending" is A to Z for names
	}
	x, y := a.numbers[column-1], b.numbers[column-1]
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return strings.Compare(a.cells[column-1], b.cells[column-1])
}
