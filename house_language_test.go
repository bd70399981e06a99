// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// hardForms are constructions that make a technical sentence hard to read. cilium/ebpf has 0.65 per 1,000 words of
// comments, caddy 1.08.
var hardForms = []*regexp.Regexp{
	regexp.MustCompile(`(?i)\bwhat\s+(?:is|are|was|were|comes?|came|goes|has|have|had|they|it|he|she|we|the\s+\w+\s+(?:is|are|has|had)|no|else|an?|each|every|its|leaves|left|stands?|happens?)\b`),
	regexp.MustCompile(`(?i)\b(?:tells?|told)\b`),
	regexp.MustCompile(`(?i)\b(?:that|those)\s+of\b`),
	regexp.MustCompile(`(?i)\bstands?\b`),
	regexp.MustCompile(`(?i)\b(?:comes?|came|goes|went)\b`),
	regexp.MustCompile(`(?i)\b(?:who|whoever|whom|nobody|whose)\b`),
	regexp.MustCompile(`(?i)\b(?:beside|meets?|met)\b`),
	regexp.MustCompile(`(?i)\b(?:is|are|was|were)\s+to\s+(?:be|have|get|go|come|take|hold)\b`),
	regexp.MustCompile(`(?i)\bof\s+(?:it|them|which|these|those)\b`),
	regexp.MustCompile(`(?:^|[.;:]\s+)Of\s`),
}

// Limits of hard constructions per 1,000 words, and of the mean length of a sentence in words.
const (
	packageLimit  = 4.0
	documentLimit = 3.0
	sentenceLimit = 18.0
	toleratedHits = 2 // in a package or document with few words
)

// Limits of hard constructions per 1,000 words of all comments of the code and of the tests. They may only be lowered.
const (
	totalCeiling = 2.0
	testsCeiling = 2.0
)

// pendingDocuments are documents above documentLimit, with their ceilings. A ceiling may only be lowered, and a document
// below the limit is removed. In rfc.md most hits
// are the result "met".
var pendingDocuments = map[string]float64{
	"docs/guide/import.md":            5,
	"docs/internals/debugging.md":     23,
	"docs/internals/packet-walk.md":   13,
	"docs/measurements/benchmarks.md": 9,
	"docs/reference/rfc.md":           97,
}

// pendingGroup returns the pending pattern that matches a package, or its own name.
func pendingGroup(name string, pending map[string]float64) string {
	for pattern := range pending {
		if root, group := strings.CutSuffix(pattern, "/..."); group && under(name, root) {
			return pattern
		}
	}
	return name
}

// measure is the number of words and of hard constructions in texts.
type measure struct{ words, hits int }

func (m *measure) add(text string) {
	m.words += len(strings.Fields(text))
	for _, form := range hardForms {
		m.hits += len(form.FindAllString(text, -1))
	}
}

func (m measure) rate() float64 { return 1000 * float64(m.hits) / float64(max(m.words, 1)) }

// check compares a measure with the limit, or with the ceiling of a pending name.
func (m measure) check(t *testing.T, name string, limit float64, pending map[string]float64) {
	t.Helper()
	ceiling, waits := pending[name]
	if waits {
		limit = ceiling
	}
	if m.rate() > limit && m.hits > toleratedHits {
		t.Errorf("%s: %.1f hard constructions per 1,000 words, more than %.1f; see docs/internals/contributing.md, Language", name, m.rate(), limit)
	}
	if waits && m.rate() < ceiling-1 {
		t.Logf("%s: lower the ceiling from %.1f to %.1f, or remove it", name, ceiling, m.rate())
	}
}

// pendingTests are packages with comments of tests above packageLimit, with their ceilings per 1,000 words. A pattern
// with /... is one measure of all packages below it. The same rules hold. If a package moves, its entry moves too.
var pendingTests = map[string]float64{
	".": 9,
}

// TestLanguageOfComments bounds the hard constructions in comments, in total and per package.
func TestLanguageOfComments(t *testing.T) {
	t.Run("code", func(t *testing.T) { checkComments(t, false, totalCeiling, nil) })
	t.Run("tests", func(t *testing.T) { checkComments(t, true, testsCeiling, pendingTests) })
}

// checkComments checks the comments of the tests, or of the other files.
func checkComments(t *testing.T, tests bool, limit float64, pending map[string]float64) {
	packages := map[string]*measure{}
	for _, ext := range []string{".go", ".c", ".h"} {
		walk(t, ext, func(path string, text []byte) {
			if generated(text) || strings.HasSuffix(path, "_test.go") != tests || strings.Contains(path, ".gen.") ||
				strings.Contains(path, "_bpfel") || strings.Contains(path, "vmlinux") || strings.Contains(path, "testdata/") {
				return
			}
			name := pendingGroup(filepath.Dir(path), pending)
			if packages[name] == nil {
				packages[name] = &measure{}
			}
			for _, comment := range comments(string(text)) {
				packages[name].add(comment)
			}
		})
	}
	var total measure
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		m := *packages[name]
		total.words, total.hits = total.words+m.words, total.hits+m.hits
		m.check(t, name, packageLimit, pending)
		t.Logf("%-28s %6d words %5.1f", name, m.words, m.rate())
	}
	t.Logf("%-28s %6d words %5.2f", "all", total.words, total.rate())
	if total.rate() > limit {
		t.Errorf("%.2f hard constructions per 1,000 words of comments, more than %.2f", total.rate(), limit)
	}
	for name := range pending {
		if packages[name] == nil {
			t.Logf("%s is pending, and there is no such package", name)
		}
	}
}

// TestLanguageOfDocuments bounds the hard constructions and the mean length of sentences in docs. It excludes the
// pages of commands, which are generated.
func TestLanguageOfDocuments(t *testing.T) {
	seen := map[string]bool{}
	walk(t, ".md", func(path string, text []byte) {
		if !strings.HasPrefix(path, "docs/") || strings.HasPrefix(path, "docs/cli/") {
			return
		}
		seen[path] = true
		var m measure
		words, sentences := 0, 0
		for _, paragraph := range prose(string(text)) {
			m.add(paragraph)
			for _, sentence := range sentenceEnd.Split(paragraph, -1) {
				if n := len(strings.Fields(sentence)); n > 3 { // shorter ones are cells of tables and list labels
					words, sentences = words+n, sentences+1
				}
			}
		}
		mean := float64(words) / float64(max(sentences, 1))
		m.check(t, path, documentLimit, pendingDocuments)
		if mean > sentenceLimit {
			t.Errorf("%s: sentences of %.1f words on average, more than %.0f", path, mean, sentenceLimit)
		}
		t.Logf("%-34s %6d words %5.1f, %.1f words per sentence", path, m.words, m.rate(), mean)
	})
	if len(seen) == 0 {
		t.Error("there are no documents")
	}
	for path := range pendingDocuments {
		if !seen[path] {
			t.Logf("pendingDocuments: there is no %s", path)
		}
	}
}

// comments returns the comments of Go or C source. Adjacent lines with // form one comment.
func comments(source string) (list []string) {
	var block []string
	last := -2 // line of the latest //
	flush := func() {
		text := strings.Join(strings.Fields(strings.Join(block, " ")), " ")
		block = nil
		if text != "" && !strings.Contains(text, "SPDX") && !strings.HasPrefix(text, "go:") && !strings.HasPrefix(text, "+build") {
			list = append(list, text)
		}
	}
	line := 1
	for i := 0; i < len(source); {
		switch rest := source[i:]; {
		case rest[0] == '\n':
			line++
			i++
		case rest[0] == '"' || rest[0] == '\'' || rest[0] == '`':
			n := literal(rest)
			line += strings.Count(rest[:n], "\n")
			i += n
		case strings.HasPrefix(rest, "//"):
			text, _, _ := strings.Cut(rest, "\n")
			if line != last+1 {
				flush()
			}
			block, last = append(block, strings.TrimPrefix(text, "//")), line
			i += len(text)
		case strings.HasPrefix(rest, "/*"):
			text, _, _ := strings.Cut(rest, "*/")
			flush()
			block, last = []string{leadingStar.ReplaceAllString(text[2:], "")}, -2
			flush()
			line += strings.Count(text, "\n")
			i += min(len(text)+2, len(rest))
		default:
			i++
		}
	}
	flush()
	return list
}

var (
	leadingStar = regexp.MustCompile(`(?m)^\s*\*\s?`)
	sentenceEnd = regexp.MustCompile(`[.!?;:]\s+`)
)

// literal returns the length of the string or character literal at the beginning of source.
func literal(source string) int {
	quote := source[0]
	for i := 1; i < len(source); i++ {
		switch {
		case source[i] == quote:
			return i + 1
		case source[i] == '\\' && quote != '`':
			i++
		case source[i] == '\n' && quote != '`': // unterminated
			return i
		}
	}
	return len(source)
}

var (
	fencedCode   = regexp.MustCompile("(?s)```.*?```")
	htmlComment  = regexp.MustCompile(`(?s)<!--.*?-->`)
	inlineCode   = regexp.MustCompile("`[^`\n]*`")
	linkTarget   = regexp.MustCompile(`\]\([^)]*\)`)
	listItem     = regexp.MustCompile(`^(?:[*+-]|\d+\.)\s+`)
	tableRule    = regexp.MustCompile(`^\|?[\s:|-]+\|?$`)
	tableDivider = regexp.MustCompile(`\|`)
)

// prose returns the paragraphs, list items and table cells of a Markdown text. It omits headings and code.
func prose(text string) (paragraphs []string) {
	text = fencedCode.ReplaceAllString(text, "\n\n")
	text = htmlComment.ReplaceAllString(text, "")
	text = inlineCode.ReplaceAllString(text, "X")
	text = linkTarget.ReplaceAllString(text, "]")
	var block []string
	flush := func() {
		if len(block) > 0 {
			paragraphs = append(paragraphs, strings.Join(block, " "))
			block = nil
		}
	}
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "#") || tableRule.MatchString(line):
			flush()
		case strings.HasPrefix(line, "|"):
			flush()
			for _, cell := range tableDivider.Split(strings.Trim(line, "|"), -1) {
				if cell = strings.TrimSpace(cell); cell != "" {
					paragraphs = append(paragraphs, cell)
				}
			}
		case listItem.MatchString(line):
			flush()
			block = append(block, listItem.ReplaceAllString(line, ""))
		default:
			block = append(block, line)
		}
	}
	flush()
	return paragraphs
}

// TestMeasureOfLanguage checks the extraction of comments and prose.
func TestMeasureOfLanguage(t *testing.T) {
	source := "// SPDX-License-Identifier: X\n\n// Package a returns\n// what it has.\npackage a // \"b\"\n\nvar s = \"// not a comment\" /* nobody\n * came */\nvar r = '\"' // told\n"
	if got, want := fmt.Sprintf("%q", comments(source)), `["Package a returns what it has. \"b\"" "nobody came" "told"]`; got != want {
		t.Errorf("comments: %s, want %s", got, want)
	}
	var m measure
	for _, text := range comments(source) {
		m.add(text)
	}
	if m != (measure{words: 10, hits: 4}) {
		t.Errorf("measure %+v", m)
	}
	text := "# What it is\n\nA line of `what it is`\nand more. Next.\n\n```\nnobody\n```\n\n* one [link](who.md)\n  two\n* three\n\n| head | x |\n|---|---|\n| cell | |\n"
	if got, want := fmt.Sprintf("%q", prose(text)), `["A line of X and more. Next." "one [link] two" "three" "head" "x" "cell"]`; got != want {
		t.Errorf("prose: %s, want %s", got, want)
	}
}
