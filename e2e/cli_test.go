// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/examples"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestCommands runs the scripts of testdata/script with the program in $PATH, the examples in $EXAMPLES, a
// script for certificates in $CERTIFICATES, and a balancer lab of their own in $LAB.
func TestCommands(t *testing.T) {
	labtest.Require(t, labtest.Root)
	dir := t.TempDir()
	if err := os.CopyFS(dir, examples.Files); err != nil {
		t.Fatal(err)
	}
	certificates, err := filepath.Abs("../examples/certificates.sh")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			l, err := lab.Up(t.Context(), lab.Balancer())
			if err != nil {
				return err
			}
			e.Defer(func() {
				if err := l.Down(); err != nil {
					t.Error(err)
				}
			})
			e.Values["lab"] = l
			e.Setenv("LAB", l.ID())
			e.Setenv("EXAMPLES", dir)
			e.Setenv("CERTIFICATES", certificates)
			e.Setenv("PATH", filepath.Dir(binary)+string(filepath.ListSeparator)+e.Getenv("PATH"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"ready": ready, "capture": capture},
	})
}

// ready waits until a daemon answers in the lab's gateway.
func ready(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: ready")
	}
	l := ts.Value("lab").(*lab.Lab)
	c := api.NewClient(filepath.Join(l.Node("gateway").StateDir(), "sluice.sock"))
	deadline := time.Now().Add(patience)
	for {
		_, err := c.Status(context.Background())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("no daemon answers: %v", err)
		}
		time.Sleep(10 * time.Millisecond) // between two requests
	}
}

// capture sets a variable to the first group of the expression in the last output.
func capture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: capture VARIABLE EXPRESSION")
	}
	m := regexp.MustCompile(args[1]).FindStringSubmatch(ts.ReadFile("stdout"))
	if len(m) != 2 {
		ts.Fatalf("nothing in the last output matches %q", args[1])
	}
	ts.Setenv(args[0], m[1])
}
