// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestNATTypesAreComparedRarely: code asks for a trait of config/traits.go in place of the name of a NAT type, so that
// a new type changes few files.
func TestNATTypesAreComparedRarely(t *testing.T) {
	const most = 20
	line := regexp.MustCompile(`(?m)^.*(?:[=!]=|\bcase\b).*\bNAT[A-Z].*$`)
	name := regexp.MustCompile(`\b(?:config\.)?NAT(?:Masquerade|SNAT|PortForward|Static|NPT66|NAT64|SIIT)\b`)
	var found []string
	walk(t, ".go", func(path string, text []byte) {
		if path == "config/traits.go" || strings.HasSuffix(path, "_test.go") {
			return
		}
		for _, compared := range line.FindAllString(string(text), -1) {
			for range name.FindAllString(compared, -1) {
				found = append(found, path+": "+strings.TrimSpace(compared))
			}
		}
	})
	t.Logf("%d comparisons", len(found))
	if len(found) >= most {
		t.Errorf("%d comparisons with names of NAT types, at most %d are allowed: use or add a trait in config/traits.go\n%s", len(found), most-1, strings.Join(found, "\n"))
	}
}

// TestNoForwardDeclarations: a header of bpf/ includes the definitions that it uses, so that the includes are the only
// order of reading.
func TestNoForwardDeclarations(t *testing.T) {
	declaration := regexp.MustCompile(`(?m)^[a-z_][\w *]*\w\([^{};=#]*\);$`)
	for _, ext := range []string{".c", ".h"} {
		walk(t, ext, func(path string, text []byte) {
			for _, found := range declaration.FindAllString(string(text), -1) {
				if !regexp.MustCompile(`^(extern|_Static_assert)\b|__attribute__`).MatchString(found) && !generated(text) {
					t.Errorf("%s declares a function without its body: include the file that defines it: %s", path, strings.TrimSpace(found))
				}
			}
		})
	}
}

// TestImportGroups: imports are in at most three groups, separated by an empty line: the standard library, other
// modules, this module.
func TestImportGroups(t *testing.T) {
	kind := func(path string) int {
		switch {
		case standard(path):
			return 0
		case path == module || strings.HasPrefix(path, module+"/"):
			return 2
		}
		return 1
	}
	walk(t, ".go", func(path string, text []byte) {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, text, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if generated(text) {
			return
		}
		for i := 1; i < len(file.Imports); i++ {
			before, now := file.Imports[i-1], file.Imports[i]
			first, _ := strconv.Unquote(before.Path.Value)
			second, _ := strconv.Unquote(now.Path.Value)
			start := now.Pos()
			if now.Doc != nil {
				start = now.Doc.Pos()
			}
			apart := files.Position(start).Line > files.Position(before.End()).Line+1
			if kind(first) > kind(second) || apart != (kind(first) != kind(second)) {
				t.Errorf("%s:%d: import %q belongs to another group: standard library, other modules, this module", path, files.Position(now.Pos()).Line, second)
			}
		}
	})
}

// TestReasonsAreTyped: a function of the datapath that returns a reason has the type enum reason, so that the compiler
// reports a verdict or another enumeration in its place.
func TestReasonsAreTyped(t *testing.T) {
	function := regexp.MustCompile(`(?ms)^(?:static )?(?:__noinline |__always_inline )int (\w+)\([^{;]*?\)\n\{\n(.*?)\n\}`)
	reason := regexp.MustCompile(`return (?:REASON_\w+|[^;]*[?:] REASON_\w+);`)
	walk(t, ".h", func(path string, text []byte) {
		for _, f := range function.FindAllSubmatch(text, -1) {
			if reason.Match(f[2]) {
				t.Errorf("%s: %s returns a reason as int", path, f[1])
			}
		}
		if regexp.MustCompile(`(?m)^#define \w+ REASON_COUNT`).Match(text) {
			t.Errorf("%s: a result that is no reason has the value of REASON_COUNT", path)
		}
	})
}
