// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// ledgerFile is the ledger; its rows are | id | what | nftables | ebpf | proof |.
const ledgerFile = "../../docs/reference/rfc.md"

type row struct {
	id, what string
	status   map[string]string // by datapath
	proof    []string
}

// statuses are the allowed beginnings of a cell. A remark follows a colon or comma.
var statuses = []string{"met", "not met", "not carried", "unproven", "does not apply"}

func ledger(t *testing.T) map[string]row {
	t.Helper()
	b, err := os.ReadFile(ledgerFile)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]row{}
	for line := range strings.SplitSeq(string(b), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 7 || strings.Contains(line, "---") || strings.TrimSpace(cells[1]) == "Requirement" {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		r := row{id: cells[1], what: cells[2], status: map[string]string{"nftables": cells[3], "ebpf": cells[4]}}
		for p := range strings.FieldsFuncSeq(cells[5], func(c rune) bool { return c == ' ' || c == ',' || c == '`' }) {
			r.proof = append(r.proof, p)
		}
		if _, twice := rows[r.id]; twice {
			t.Errorf("%s stands twice in the ledger", r.id)
		}
		rows[r.id] = r
	}
	return rows
}

// TestLedger checks that every row of docs/reference/rfc.md has an existing proof, and that every test of this
// package has a row.
func TestLedger(t *testing.T) {
	rows := ledger(t)
	if len(rows) < 60 {
		t.Fatalf("only %d rows were read", len(rows))
	}
	tests := testNames(t)
	used := map[string]bool{"TestLedger": true, "TestMain": true}
	for id, r := range rows {
		for name, s := range r.status {
			if !slices.ContainsFunc(statuses, func(known string) bool { return strings.HasPrefix(s, known) }) {
				t.Errorf("%s, %s: %q is none of %q", id, name, s, statuses)
			}
		}
		claims := strings.HasPrefix(r.status["nftables"], "met") || strings.HasPrefix(r.status["ebpf"], "met")
		if len(r.proof) == 0 && claims {
			t.Errorf("%s: says met and names no proof", id)
		}
		for _, p := range r.proof {
			switch {
			case strings.HasPrefix(p, "Test"):
				used[p] = true
				if !tests[p] {
					t.Errorf("%s: there is no test %s", id, p)
				}
			case p == "—":
			default:
				if _, err := os.Stat(filepath.Join("../../testdata/packets", p+".txt")); err != nil {
					t.Errorf("%s: there is no packet case %s", id, p)
				}
			}
		}
	}
	for name := range tests {
		if !used[name] {
			t.Errorf("%s proves no row of the ledger", name)
		}
	}
}

var testName = regexp.MustCompile(`^Test[A-Z0-9]`)

// testNames lists the test functions of this package.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && testName.MatchString(fn.Name.Name) && fn.Name.Name != "TestMain" {
				names[fn.Name.Name] = true
			}
		}
	}
	return names
}
