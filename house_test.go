// SPDX-License-Identifier: Apache-2.0

// Package sluice holds the tests of the house itself: which package may import
// which, how big files get, and that every package says what it is for.
package sluice

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sluice-lb/sluice"

type pkg struct {
	ImportPath string
	Name       string
	Doc        string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Name,Doc,Imports,Deps,GoFiles", "./...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	all := map[string]pkg{}
	d := json.NewDecoder(bytes.NewReader(out))
	for {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")] = p
	}
}

// standard reports whether an import path is of the standard library.
func standard(path string) bool {
	return !strings.Contains(strings.SplitN(path, "/", 2)[0], ".")
}

func TestImportsPointOneWay(t *testing.T) {
	all := packages(t)
	for _, imp := range all["flow"].Imports {
		if !standard(imp) {
			t.Errorf("flow imports %s; it imports only the standard library", imp)
		}
	}
	for _, imp := range all["event"].Imports {
		if !standard(imp) {
			t.Errorf("event imports %s; it imports only the standard library", imp)
		}
	}
	// Pure packages link nothing that talks to a kernel.
	impure := regexp.MustCompile(`cilium/ebpf|vishvananda|google/nftables|mdlayher|` + module + `/(datapath/|kernel|lab|netdev|conntrack|engine|server|health)`)
	for _, name := range []string{"config", "balance", "packet", "datapath", "model", "model/golden", "model/judge", "capacity", "importer", "datapath/nft/compile"} {
		for _, dep := range all[name].Deps {
			if impure.MatchString(dep) && !(name == "datapath/nft/compile" && dep == module+"/datapath/nft/ruleset") {
				t.Errorf("%s depends on %s; it is pure", name, dep)
			}
		}
	}
	top := []string{module + "/server", module + "/engine", module + "/api"}
	for name, p := range all {
		for _, imp := range p.Imports {
			if strings.HasPrefix(imp, "github.com/cilium/ebpf") && !under(name, "datapath/ebpf", "trace", "load", "accelerate", "conntrack") {
				t.Errorf("%s imports %s; only datapath/ebpf, trace, load, accelerate and conntrack do", name, imp)
			}
			if strings.HasPrefix(imp, "github.com/google/nftables") && !under(name, "firewall", "lab/labtest") {
				t.Errorf("%s imports %s; only firewall reads the rules of others", name, imp)
			}
			if slices.Contains(top, imp) && !under(name, "server", "control", "daemon", "cmd", "e2e", "top", "lab/daemon", "lab/demo") {
				t.Errorf("%s imports %s, which is above it", name, imp)
			}
			if strings.HasPrefix(imp, module+"/cmd") {
				t.Errorf("%s imports %s", name, imp)
			}
		}
	}
}

// TestFilesAreReplacedByOnePackage: only disk renames a file into the place of another, because a rename
// without flushing the file and its directory can lose both contents.
func TestFilesAreReplacedByOnePackage(t *testing.T) {
	for name, p := range packages(t) {
		if under(name, "disk", "audit", "datapath/ebpf/table") { // audit renames old records, table pins
			continue
		}
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(name, file))
			if err != nil {
				t.Fatal(err)
			}
			if name != "nftlb" && bytes.Contains(text, []byte("os.Rename(")) || bytes.Contains(text, []byte("os.CreateTemp(")) {
				t.Errorf("%s/%s replaces a file; disk.Replace does it durably", name, file)
			}
		}
	}
}

// TestCompilerOfEBPFIsPure: the compiler and the ids import nothing that talks to a kernel. (The types of
// netdev and wire link it.)
func TestCompilerOfEBPFIsPure(t *testing.T) {
	all := packages(t)
	for _, name := range []string{"datapath/ebpf/compile", "datapath/ebpf/ids"} {
		if _, there := all[name]; !there {
			t.Errorf("there is no package %s", name)
		}
		for _, imp := range all[name].Imports {
			if regexp.MustCompile(`cilium/ebpf|vishvananda|x/sys|^os$|^syscall$|/ebpf/table$|` + module + `/kernel`).MatchString(imp) {
				t.Errorf("%s imports %s", name, imp)
			}
		}
	}
}

// TestImportsFollowTheTable: docs/internals/architecture.md lists every package, and no package imports one of a
// later row.
func TestImportsFollowTheTable(t *testing.T) {
	text, err := os.ReadFile("docs/internals/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| package | responsibility |")
	table, _, _ = strings.Cut(table, "\n\n")
	row := map[string]int{}
	for i, line := range strings.Split(table, "\n") {
		if cells := strings.Split(line, "|"); len(cells) > 2 {
			for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
				row[name[1]] = i
			}
		}
	}
	// Packages below one that is listed are part of it.
	place := func(name string) (int, bool) {
		for ; name != "."; name = filepath.Dir(name) {
			if i, ok := row[name]; ok {
				return i, true
			}
		}
		return 0, false
	}
	for name, p := range packages(t) {
		own, listed := place(name)
		if !listed && name != "" && len(p.GoFiles) > 0 && !under(name, "e2e") {
			t.Errorf("docs/internals/architecture.md does not list package %s", name)
		}
		for _, imp := range p.Imports {
			imp, local := strings.CutPrefix(imp, module+"/")
			if at, ok := place(imp); local && listed && ok && at > own {
				t.Errorf("%s imports %s, which docs/internals/architecture.md lists below it", name, imp)
			}
		}
	}
}

func under(name string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(r string) bool { return name == r || strings.HasPrefix(name, r+"/") })
}

// Only engine calls Apply on a datapath; tests and benchmarks drive one directly.
func TestOnlyEngineAppliesSnapshots(t *testing.T) {
	call := regexp.MustCompile(`\.Apply\(.*[sS]napshot`)
	walk(t, ".go", func(path string, text []byte) {
		if call.Match(text) && !strings.HasSuffix(path, "_test.go") && !under(filepath.Dir(path), "engine", "datapath", "bench", "lab") {
			t.Errorf("%s calls Apply with a snapshot; only engine does", path)
		}
	})
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for name, p := range packages(t) {
		if p.Doc == "" && len(p.GoFiles) > 0 {
			t.Errorf("package %s has no doc comment", name)
		}
	}
}

func TestFilesAndRoomsStaySmall(t *testing.T) {
	const fileLimit = 800 // lines; 500 is the aim
	vague := regexp.MustCompile(`(^|/)(util|utils|common|helper|helpers|manager|misc|types|core)(/|\.go$|\.h$)`)
	check := func(path string, text []byte) {
		if generated(text) {
			return
		}
		if n := bytes.Count(text, []byte("\n")); n > fileLimit {
			t.Errorf("%s has %d lines, more than %d: is a concept missing its own file?", path, n, fileLimit)
		}
		if vague.MatchString(path) && path != "bpf/datapath/types.h" {
			t.Errorf("%s: the name says nothing about what lives there", path)
		}
	}
	for _, ext := range []string{".go", ".c", ".h"} {
		walk(t, ext, check)
	}
}

func TestEveryFileNamesItsLicense(t *testing.T) {
	for _, ext := range []string{".go", ".c", ".h"} {
		walk(t, ext, func(path string, text []byte) {
			first, _, _ := bytes.Cut(text, []byte("\n"))
			if !generated(text) && !bytes.Contains(first, []byte("SPDX-License-Identifier:")) {
				t.Errorf("%s does not begin with its SPDX line", path)
			}
		})
	}
}

func generated(text []byte) bool {
	head := text[:min(len(text), 300)]
	return bytes.Contains(head, []byte("Code generated"))
}

func walk(t *testing.T, ext string, visit func(path string, text []byte)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ext {
			if d != nil && d.IsDir() && (d.Name() == ".git" || d.Name() == "node_modules") {
				return filepath.SkipDir
			}
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil {
			visit(path, text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// privateWords were names in this code that no reader from outside could know. Each has a plain word
// in the code now.
var privateWords = regexp.MustCompile(`(?i)\b(` + strings.Join([]string{
	`deaf`,             // cannot transmit, does not read, stubborn
	`newDoor`,          // newTCPDaemon
	`readTries`,        // difference
	`stoodUp`,          // priorUp
	`design\.md`,       // not part of the repository
	`barred`, `misled`, // excluded, mismatched
	`checks tell nothing`,
	`heirs?`, `sicken`, // replacement, fault
	`births?`, `estranged`, `ENTRY_LOOSE`, // new_flow, lost_reply_half, ENTRY_RETURNING
	`doors?`, // iface_listeners
}, "|") + `)\b`)

// TestPlainWords: words that were replaced do not come back.
func TestPlainWords(t *testing.T) {
	for _, ext := range []string{".go", ".h", ".c", ".md"} {
		walk(t, ext, func(path string, text []byte) {
			if path == "house_test.go" || generated(text) {
				return
			}
			for i, line := range bytes.Split(text, []byte("\n")) {
				if word := privateWords.Find(line); word != nil {
					t.Errorf("%s:%d: %q: write the plain word", path, i+1, word)
				}
			}
		})
	}
}

// TestNoMirroredConstants: what the programs and Go share is written down in bpf/ and generated
// (wire_constants.go). No constant in Go repeats the number of one there under the same name.
func TestNoMirroredConstants(t *testing.T) {
	number := regexp.MustCompile(`(?m)^(?:#define (\w+) |\t(\w+) = )\(?(?:0x)?[0-9]`)
	plain := func(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", "")) }
	shared := map[string]string{}
	walk(t, ".h", func(path string, text []byte) {
		for _, m := range number.FindAllSubmatch(text, -1) {
			name := string(m[1]) + string(m[2])
			shared[plain(name)] = name + " of " + path
		}
	})
	walk(t, ".go", func(path string, text []byte) {
		if !under(path, "datapath/ebpf") || generated(text) {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			s, ok := n.(*ast.ValueSpec)
			if !ok || len(s.Values) != len(s.Names) {
				return true
			}
			for i, name := range s.Names {
				_, literal := s.Values[i].(*ast.BasicLit)
				if c := shared[plain(name.Name)]; literal && c != "" {
					t.Errorf("%s: %s repeats %s: add it to an enumeration in bpf/datapath/export.h", path, name.Name, c)
				}
			}
			return true
		})
	})
}

// TestLinesOfC: lines have at most 120 columns, as .clang-format has it. The comment of a reason stays on
// its line, because it is the entry in docs/reference/reasons.md.
func TestLinesOfC(t *testing.T) {
	for _, ext := range []string{".c", ".h"} {
		walk(t, ext, func(path string, text []byte) {
			for i, line := range strings.Split(string(text), "\n") {
				if strings.HasPrefix(line, "\tREASON_") {
					continue
				}
				columns := 0
				for _, c := range line {
					if columns++; c == '\t' {
						columns = (columns + 7) / 8 * 8
					}
				}
				if columns > 120 {
					t.Errorf("%s:%d has %d columns: run clang-format", path, i+1, columns)
				}
			}
		})
	}
}

// snakeCase is how keys of JSON are written.
var snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

// TestKeysOfJSON: all that Sluice prints with --json, and the API, write keys_like_this. The
// configuration's keys are those of its file, nftlb's are nftlb's, and Docker's Docker's.
func TestKeysOfJSON(t *testing.T) {
	walk(t, ".go", func(path string, text []byte) {
		if strings.HasPrefix(path, "config/") || path == "bench/nftlb.go" || path == "discovery/docker.go" || path == "published/engine.go" || strings.HasSuffix(path, "_test.go") || !bytes.Contains(text, []byte("json:\"")) {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			s, ok := n.(*ast.StructType)
			if !ok || !slices.ContainsFunc(s.Fields.List, func(f *ast.Field) bool { _, tagged := key(f); return tagged }) {
				return true
			}
			for _, f := range s.Fields.List {
				switch name, tagged := key(f); {
				case tagged && name != "-" && !snakeCase.MatchString(name):
					t.Errorf("%s: the key %q", path, name)
				case !tagged && slices.ContainsFunc(f.Names, (*ast.Ident).IsExported):
					t.Errorf("%s: %s has no key", path, f.Names[0])
				}
			}
			return true
		})
	})
}

// key is what a field is called in JSON.
func key(f *ast.Field) (name string, tagged bool) {
	if f.Tag == nil {
		return "", false
	}
	tag, tagged := reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Lookup("json")
	name, _, _ = strings.Cut(tag, ",")
	return name, tagged
}
