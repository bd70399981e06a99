// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	codeBlock = regexp.MustCompile("(?s)```.*?```")
	pageLink  = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading   = regexp.MustCompile(`(?m)^#+\s+(.*)$`)
	linkText  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	noAnchor  = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
)

// anchors returns the fragments of a page's headings, as code hosts derive them.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		text := linkText.ReplaceAllString(strings.ToLower(strings.TrimSpace(m[1])), "$1")
		all[strings.ReplaceAll(noAnchor.ReplaceAllString(text, ""), " ", "-")] = true
	}
	return all
}

// TestLinksOfDocs: each link between the pages leads to a file, and its fragment to a heading there.
func TestLinksOfDocs(t *testing.T) {
	walk(t, ".md", func(path string, text []byte) {
		page := codeBlock.ReplaceAllString(string(text), "")
		for _, m := range pageLink.FindAllStringSubmatch(page, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, fragment, _ := strings.Cut(m[1], "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link %s: %v", path, m[1], err)
				continue
			}
			if fragment == "" || filepath.Ext(target) != ".md" {
				continue
			}
			if other, err := os.ReadFile(target); err != nil || !anchors(string(other))[fragment] {
				t.Errorf("%s: link %s: no such heading", path, m[1])
			}
		}
	})
}
