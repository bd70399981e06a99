// SPDX-License-Identifier: Apache-2.0

package top

import (
	"regexp"
	"strings"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
)

// helpLines is the help text of '?'.
var helpLines = []string{
	"1-8, tab, left, right   choose a page",
	"up, down, k, j          move; pgup, pgdown, home, end too",
	"enter                   the connections of a row; on those: explain one",
	"esc                     back",
	"/                       filter by a regular expression; !x hides what matches x",
	"s, r                    sort by the next column; reverse the order",
	"p, space                pause and resume",
	"u                       read the table now",
	"q, ctrl+c               quit",
	"",
	"FILL counts all entries. HELD are those that are assured and not closing:",
	"the kernel does not evict them to make room. new/s is sampled from its",
	"events for 60 ms every four seconds.",
	"The view only reads. Drops and CPU are traced while their page is open.",
}

// key performs the action of one key press.
func (m *Model) key(k tea.KeyPressMsg) tea.Cmd {
	name := k.String()
	if name == "ctrl+c" {
		return tea.Quit
	}
	if m.typing {
		m.typeFilter(name, k.Key().Text)
		return nil
	}
	if m.help {
		m.help = false
		return nil
	}
	if m.move(name) {
		return nil
	}
	switch name {
	case "q":
		return tea.Quit
	case "?":
		m.help = true
	case "esc", "backspace":
		m.goBack()
	case "enter":
		return m.open()
	case "/":
		m.typing, m.typed, m.typedErr = true, m.currentPage().filter, nil
	case "s":
		m.nextSort()
	case "r":
		p := m.currentPage()
		p.ascending = !p.ascending
	case "p", "space":
		m.paused = !m.paused
		return m.resume()
	case "u":
		return m.start(fetchTable)
	case "tab", "right", "l":
		return m.openTab((m.tab + 1) % tabCount)
	case "shift+tab", "left", "h":
		return m.openTab((m.tab + tabCount - 1) % tabCount)
	}
	if len(name) == 1 && name[0] >= '1' && name[0] < '1'+byte(tabCount) {
		return m.openTab(tab(name[0] - '1'))
	}
	return nil
}

// openTab opens a tab and starts the fetches that only this tab needs.
func (m *Model) openTab(t tab) tea.Cmd {
	m.tab, m.flows, m.detail = t, nil, nil
	return m.resume()
}

// resume starts every required fetch that no timer will start.
func (m *Model) resume() tea.Cmd {
	var cmds []tea.Cmd
	for f := fetchCounts; f <= fetchProfile; f++ {
		if !m.due[f] {
			cmds = append(cmds, m.start(f))
		}
	}
	return tea.Batch(cmds...)
}

func (m *Model) goBack() {
	switch {
	case m.detail != nil:
		m.detail = nil
	case m.flows != nil:
		m.flows = nil
	default:
		p := m.currentPage()
		p.filter, p.match = "", nil
	}
}

// open opens the details of the selected row.
func (m *Model) open() tea.Cmd {
	rows := m.rows()
	p := m.currentPage()
	if m.detail != nil || len(rows) == 0 {
		return nil
	}
	r := rows[min(p.cursor, len(rows)-1)]
	switch {
	case r.drill:
		m.flows = &flowPage{title: r.key, filter: r.filter, namespace: r.namespace, page: page{sort: -1}}
		return m.start(fetchFlows)
	case r.detail != nil:
		m.detail = &detailPage{r.key, r.detail}
	}
	return nil
}

// move handles the keys that move the cursor.
func (m *Model) move(name string) bool {
	p := m.currentPage()
	step := map[string]int{"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -m.listHeight(), "pgdown": m.listHeight(),
		"home": -1 << 30, "g": -1 << 30, "end": 1 << 30, "G": 1 << 30}[name]
	if step == 0 || m.detail != nil {
		return false
	}
	p.cursor = max(0, min(p.cursor+step, len(m.rows())-1))
	return true
}

// nextSort selects the next column for sorting; after the last column, the original order.
func (m *Model) nextSort() {
	p := m.currentPage()
	p.sort++
	if p.sort >= len(m.columns()) {
		p.sort = -1
	}
	p.ascending = false
}

// typeFilter handles a key while the user types a filter.
func (m *Model) typeFilter(name, text string) {
	p := m.currentPage()
	switch name {
	case "enter":
		if m.typedErr == nil {
			m.typing = false
		}
		return
	case "esc":
		m.typing = false
		p.filter, p.match = "", nil
		return
	case "backspace":
		_, n := utf8.DecodeLastRuneInString(m.typed)
		m.typed = m.typed[:len(m.typed)-n]
	case "ctrl+u":
		m.typed = ""
	default:
		m.typed += text
	}
	pattern, inverse := strings.CutPrefix(m.typed, "!")
	match, err := regexp.Compile("(?i)" + pattern)
	if m.typedErr = err; err != nil {
		return
	}
	if pattern == "" {
		match = nil
	}
	p.filter, p.match, p.inverse, p.cursor = m.typed, match, inverse, 0
}
