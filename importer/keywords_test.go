// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
)

// keywordFrames are configurations with places for keywords: {CONTEXT}.
var keywordFrames = map[string][]string{
	"keepalived": {`{top}
global_defs {
{global}
}
virtual_server_group G {
192.0.2.9 80
{group}
}
virtual_server group G {
real_server 10.0.0.9 80 {
}
}
virtual_server 192.0.2.1 80 {
protocol TCP
delay_loop 20
{virtual_server}
real_server 10.0.0.1 80 {
{real_server}
TCP_CHECK {
{TCP_CHECK}
}
}
}
`, checkerFrame("HTTP_GET", "url {\npath /\n{url}\n}\n"), checkerFrame("SSL_GET", "url {\npath /\n}\n"),
		checkerFrame("SMTP_CHECK", ""), checkerFrame("DNS_CHECK", ""), checkerFrame("MISC_CHECK", "misc_path /bin/true\n"),
		checkerFrame("UDP_CHECK", ""), checkerFrame("PING_CHECK", "")},
	"haproxy": {`global
{global}
defaults
mode tcp
{defaults}
frontend f
bind 192.0.2.1:80 {bind}
default_backend b
{frontend}
backend b
balance random
{backend}
server a 10.0.0.1:80 check {server}
listen l
bind 192.0.2.2:80
option httpchk
{listen}
server a 10.0.0.1:80 check
`},
	"ipvs": {`-A -t 192.0.2.1:80 -s rr {service}
-a -t 192.0.2.1:80 -r 10.0.0.1:80 -m -w 2 {server}
-a -t 192.0.2.1:80 -r 10.0.0.9:80 -m -w 1
{command}
`},
}

func checkerFrame(kind, rest string) string {
	return fmt.Sprintf("virtual_server 192.0.2.1 80 {\nprotocol TCP\ndelay_loop 20\nreal_server 10.0.0.1 80 {\n%s {\n%s{%s}\n}\n}\n}\n", kind, rest, kind)
}

// TestEveryKeyword inserts each keyword of a program into a configuration. The keyword must change the imported
// configuration, or have a note. testdata/keywords/SOURCE has lines "OUTCOME CONTEXT KEYWORD VALUES", with the keywords
// of the program's manual; -update writes the outcomes.
func TestEveryKeyword(t *testing.T) {
	for source, frames := range keywordFrames {
		t.Run(source, func(t *testing.T) {
			bases := map[string]keywordImport{}
			for _, frame := range frames {
				bases[frame] = importedWith(t, source, frame, "", "")
			}
			path := "testdata/keywords/" + source
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var got strings.Builder
			for line := range strings.Lines(string(text)) {
				f := strings.SplitN(strings.TrimSpace(line), " ", 3)
				if len(f) < 3 {
					t.Fatalf("%s: no outcome, context and keyword in %q", path, line)
				}
				at := slices.IndexFunc(frames, func(frame string) bool { return strings.Contains(frame, "{"+f[1]+"}") })
				if at < 0 {
					t.Fatalf("%s: no context %s", path, f[1])
				}
				outcome := bases[frames[at]].outcome(importedWith(t, source, frames[at], f[1], f[2]))
				if outcome == "" {
					t.Errorf("%s: nothing is said of %q, and the configuration does not depend on it", f[1], f[2])
					outcome = "silent"
				}
				fmt.Fprintf(&got, "%s %s %s\n", outcome, f[1], f[2])
			}
			if *update {
				expect(t, path, got.String())
			} else if d := cmp.Diff(string(text), got.String()); d != "" {
				t.Errorf("%s (-want +got):\n%s", path, d)
			}
		})
	}
}

// keywordImport is the import of a configuration with one more keyword.
type keywordImport struct {
	yaml        string
	result      *draft.Result
	first, last int // lines of the keyword
}

func importedWith(t *testing.T, source, frame, context, keyword string) keywordImport {
	t.Helper()
	var text strings.Builder
	k := keywordImport{}
	n := 0
	for line := range strings.Lines(frame) {
		if at := strings.Index(line, "{"+context+"}"); at >= 0 && context != "" {
			k.first, k.last = n+1, n+1+strings.Count(keyword, `\n`)
			line = line[:at] + strings.ReplaceAll(keyword, `\n`, "\n") + line[at+len(context)+2:]
		}
		if at := strings.Index(line, "{"); at >= 0 && strings.HasSuffix(line, "}\n") {
			line = line[:at] + "\n" // the place of another keyword
		}
		text.WriteString(line)
		n += strings.Count(line, "\n")
	}
	r, err := importer.Import(source, text.String(), importer.Options{})
	if err != nil {
		t.Fatalf("%s: %q: %v\n%s", context, keyword, err, text.String())
	}
	yaml, err := config.Marshal(r.Config)
	if err != nil {
		t.Fatal(err)
	}
	k.yaml, k.result = string(yaml), r
	return k
}

// outcome names the effect of a keyword: the most serious note about its lines, otherwise "translated" if the
// configuration differs, and "" for neither.
func (base keywordImport) outcome(k keywordImport) string {
	known := map[string]bool{}
	for _, n := range base.result.Notes {
		known[n.Reason+n.Text] = true
	}
	kinds := map[draft.Kind]bool{}
	for _, n := range k.result.Notes {
		if n.Line >= k.first && n.Line <= k.last && !known[n.Reason+n.Text] {
			kinds[n.Kind] = true
		}
	}
	for _, kind := range []draft.Kind{draft.Lost, draft.Changed} {
		if kinds[kind] {
			return string(kind)
		}
	}
	if k.yaml != base.yaml {
		return "translated"
	}
	if kinds[draft.Implied] {
		return string(draft.Implied)
	}
	return ""
}
