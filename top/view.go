// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/sluice-lb/sluice/table"
)

// Styles. Words or signs repeat their meaning, so that no information depends on colour.
var (
	styleTitle    = lipgloss.NewStyle().Bold(true)
	styleFaint    = lipgloss.NewStyle().Faint(true)
	styleSelected = lipgloss.NewStyle().Reverse(true)
	styleLevels   = map[Level]lipgloss.Style{
		OK:       lipgloss.NewStyle().Foreground(lipgloss.Green),
		Warn:     lipgloss.NewStyle().Foreground(lipgloss.Yellow).Bold(true),
		Critical: lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true),
	}
)

// headLines are title, table, rates, verdict, tabs and column headings.
const headLines = 6

// listHeight returns the number of rows that fit.
func (m *Model) listHeight() int { return max(1, m.height-headLines-1) }

// View implements tea.Model.
func (m *Model) View() tea.View {
	v := tea.NewView(m.drawScreen())
	v.AltScreen = true
	v.WindowTitle = "sluice top"
	return v
}

// drawScreen returns the screen: exactly height lines of at most width columns.
func (m *Model) drawScreen() string {
	var rows []row
	lines := []string{m.titleLine(), m.tableLine(), m.rateLine(), m.verdictLine(), m.tabLine()}
	switch {
	case m.help:
		lines = append(lines, helpLines...)
		for _, b := range m.missingData() {
			lines = append(lines, m.wrapSentence("not seen: "+b, "")...)
		}
	case m.detail != nil:
		for _, l := range m.wrapSentence(m.detail.title, "") {
			lines = append(lines, styleTitle.Render(l))
		}
		for _, l := range m.detail.lines {
			lines = append(lines, m.wrapSentence(l, "  ")...)
		}
	default:
		rows = m.rows()
		lines = append(lines, m.listLines(rows)...)
	}
	if len(lines) > m.height-1 {
		lines = lines[:m.height-1]
	}
	for len(lines) < m.height-1 {
		lines = append(lines, "")
	}
	lines = append(lines, m.footLine(len(rows)))
	for i, l := range lines {
		lines[i] = ansi.Truncate(l, m.width, "~")
	}
	return strings.Join(lines, "\n")
}

// wrapSentence breaks a sentence at words. The first line begins with the indent, the others two columns further.
func (m *Model) wrapSentence(text, indent string) []string {
	lines := strings.Split(ansi.Wrap(text, max(m.width-len(indent)-2, 10), " "), "\n")
	for i, l := range lines {
		if i > 0 {
			l = "  " + l
		}
		lines[i] = indent + l
	}
	return lines
}

func (m *Model) titleLine() string {
	left := styleTitle.Render("sluice top")
	if m.paused {
		left += "  PAUSED"
	}
	if m.counts != nil && len(m.counts.Fills) > 1 {
		count, fullest := m.counts.total()
		left += fmt.Sprintf("  fullest: %s; %s in %d netns", fullest.Namespace, group(count), len(m.counts.Fills))
	}
	right := ""
	switch {
	case m.table != nil:
		right = fmt.Sprintf("%s, %v, every %v", m.table.Time.Format(time.TimeOnly),
			m.table.Took.Round(time.Millisecond), m.wait.Round(time.Second))
	case m.busy[fetchTable]:
		right = "reading the table"
	}
	return leftAndRight(left, right, m.width)
}

func (m *Model) tableLine() string {
	if m.counts == nil {
		return ""
	}
	_, f := m.counts.total()
	text := fmt.Sprintf("table %s of %s  fill %s %s", group(f.Count), group(f.Max), percent(f.Fill()), bar(f.Fill(), 10))
	if m.table != nil {
		text += "  held " + percent(f.Effective())
	}
	return text + "  full in " + duration(f)
}

func (m *Model) rateLine() string {
	c := m.counts
	if c == nil {
		return ""
	}
	fresh := "new ?/s"
	if c.NewPerSecond >= 0 {
		fresh = "new ~" + decimal(c.NewPerSecond) + "/s"
	}
	growth := 0.0
	for _, f := range c.Fills {
		growth += f.Growth
	}
	return fmt.Sprintf("%s  growth %+.0f/s  drops %s/s (no port %s, backlog %s)  softirq cpu%d %s", fresh, growth,
		decimal(c.DropsPerSecond+c.BacklogPerSecond), decimal(c.PortsPerSecond), decimal(c.BacklogPerSecond), c.HottestCPU, percent(c.Softirq))
}

// levelText uses capitals for problems, because colours may be unavailable.
func levelText(l Level) string {
	if l == OK {
		return l.String()
	}
	return strings.ToUpper(l.String())
}

func (m *Model) verdictLine() string {
	if err := cmp.Or(m.errs[fetchCounts], m.errs[fetchTable]); err != nil {
		return styleLevels[Warn].Render("cannot see: " + err.Error())
	}
	v := findVerdict(m.counts, m.table)
	line := styleLevels[v.Level].Render(levelText(v.Level) + ": " + v.Text)
	if blind := m.missingData(); len(blind) > 0 {
		line += "  (not seen: " + strings.Join(blind, "; ") + ")"
	}
	return line
}

// missingData describes in sentences the data missing from the numbers and the table.
func (m *Model) missingData() []string {
	var list []string
	if m.counts != nil {
		list = append(list, m.counts.Blind...)
	}
	if m.table != nil {
		list = append(list, m.table.Blind...)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// tabLine names the tabs. If there is no room, it names the open one and numbers the others.
func (m *Model) tabLine() string {
	full, short := "", ""
	for i, name := range tabNames {
		word := fmt.Sprintf("%d %s", i+1, name)
		if tab(i) == m.tab {
			full += styleTitle.Render("[" + word + "]")
			short += styleTitle.Render("[" + word + "]")
			continue
		}
		full += " " + word + " "
		short += fmt.Sprintf(" %d ", i+1)
	}
	if ansi.StringWidth(full) > m.width {
		return short
	}
	return full
}

// listLines draws the column headings and the rows that fit.
func (m *Model) listLines(rows []row) []string {
	cols := m.columns()
	widths := m.columnWidths(cols)
	p := m.currentPage()
	head := make([]string, len(cols))
	for i, c := range cols {
		head[i] = c.title
		if i == p.sort {
			head[i] += map[bool]string{false: "v", true: "^"}[p.ascending]
		}
	}
	lines := []string{styleFaint.Render("  " + alignColumns(head, widths))}
	if len(rows) == 0 {
		return append(lines, m.wrapSentence(m.emptyText(), "  ")...)
	}
	height := m.listHeight()
	p.cursor = max(0, min(p.cursor, len(rows)-1))
	p.offset = max(0, min(p.offset, p.cursor, len(rows)-height))
	if p.cursor >= p.offset+height {
		p.offset = p.cursor - height + 1
	}
	for i := p.offset; i < min(len(rows), p.offset+height); i++ {
		text := alignColumns(slices.Concat([]string{rows[i].key}, rows[i].cells), widths)
		switch {
		case i == p.cursor:
			lines = append(lines, styleSelected.Render("> "+text))
		case rows[i].faint:
			lines = append(lines, styleFaint.Render("  "+text))
		default:
			lines = append(lines, "  "+text)
		}
	}
	return lines
}

// emptyText returns the reason why a list is empty.
func (m *Model) emptyText() string {
	p := m.currentPage()
	switch {
	case p.match != nil && m.exceedsRowLimit():
		return "nothing matches " + p.filter + " among the largest " + group(uint32(rowLimit))
	case p.match != nil:
		return "nothing matches " + p.filter
	case m.flows != nil && m.errs[fetchFlows] != nil:
		return "cannot see: " + m.errs[fetchFlows].Error()
	case m.flows == nil && m.tab == tabDrops && m.errs[fetchDrops] != nil:
		return "cannot see: " + m.errs[fetchDrops].Error()
	case m.flows == nil && m.tab == tabCPU && m.errs[fetchProfile] != nil:
		return "cannot see: " + m.errs[fetchProfile].Error()
	case m.flows != nil && !m.flows.loaded:
		return "reading connections ..."
	case m.flows != nil:
		return "none left"
	case m.tab == tabDrops && m.drops == nil || m.tab == tabCPU && m.profile == nil:
		return fmt.Sprintf("watching for %v ...", watchWindow)
	case m.tab == tabDrops:
		return fmt.Sprintf("no packet was dropped in %v", m.drops.Window.Round(time.Second))
	case m.table == nil:
		return "reading the table ..."
	}
	return "no connection"
}

// exceedsRowLimit reports whether the ranking is longer than rowLimit.
func (m *Model) exceedsRowLimit() bool { return m.flows == nil && len(m.rowsOf(m.tab)) >= rowLimit }

func (m *Model) columnWidths(cols []column) []int {
	widths := make([]int, len(cols))
	left := m.width - 2
	for i, c := range cols {
		widths[i] = c.width
		left -= c.width
		if i > 0 {
			left--
		}
	}
	widths[0] = max(12, left)
	return widths
}

// alignColumns formats cells in columns: the first left-aligned, the others right-aligned.
func alignColumns(cells []string, widths []int) string {
	var b strings.Builder
	for i, c := range cells {
		c = table.Escape(c) // names of namespaces, programs and rules come from the host
		if i == 0 {
			c = shorten(c, widths[i])
			b.WriteString(c + strings.Repeat(" ", widths[i]-ansi.StringWidth(c)))
			continue
		}
		c = ansi.Truncate(c, widths[i], "~")
		b.WriteString(" " + strings.Repeat(" ", widths[i]-ansi.StringWidth(c)) + c)
	}
	return b.String()
}

// shorten removes the middle of a text that is too wide, on both sides of an arrow. Addresses of a network differ at
// their ends.
func shorten(s string, width int) string {
	if from, to, ok := strings.Cut(s, " -> "); ok && width > 20 && ansi.StringWidth(s) > width {
		half := (width - 4) / 2
		left, right := min(ansi.StringWidth(from), half), min(ansi.StringWidth(to), half)
		return shorten(from, width-4-right) + " -> " + shorten(to, width-4-left)
	}
	return table.Middle(s, width, "~")
}

func (m *Model) footLine(rows int) string {
	p := m.currentPage()
	switch {
	case m.typing && m.typedErr != nil:
		return "/" + m.typed + "  (not a regular expression yet)"
	case m.typing:
		return "/" + m.typed + "_"
	case m.help:
		return "any key returns"
	case m.detail != nil:
		return "esc back  q quit"
	case m.flows != nil:
		more := ""
		if len(m.flows.list) == flowLimit {
			more = " (first " + group(uint32(flowLimit)) + ")"
		}
		const before, after = "connections of ", "enter explain  esc back"
		return leftAndRight(before+shorten(m.flows.title, max(20, m.width-len(before+more+after)-2))+more, after, m.width)
	}
	left := "enter open  / filter  s sort  p pause  ? help  q quit"
	if p.filter != "" {
		left = "filter " + p.filter + " (esc clears)  s sort  ? help  q quit"
	}
	right := ""
	if m.table != nil {
		right = fmt.Sprintf("%d rows", rows)
		if m.exceedsRowLimit() {
			right = fmt.Sprintf("%d of the largest %s", rows, group(uint32(rowLimit)))
		}
	}
	return styleFaint.Render(leftAndRight(left, right, m.width))
}

// leftAndRight formats one text at the left and one at the right.
func leftAndRight(left, right string, width int) string {
	gap := width - ansi.StringWidth(left) - ansi.StringWidth(right)
	if gap < 2 {
		return left
	}
	return left + strings.Repeat(" ", gap) + right
}
