// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/store"
)

const (
	nodes     = "cluster:\n  nodes: [{name: n1, address: 10.255.0.1}]\n"
	withStore = nodes + "  store: {endpoints: [\"http://127.0.0.1:2379\"]}\n"
)

var revision7 = store.Shared{Cluster: "default", Store: 1, Revision: 7}

// shared returns a gateway with the document two in force, whose file has the services of one.
func shared(t *testing.T) *gateway {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, withStore+one)
	g := begin(t, file, filepath.Join(dir, "store"))
	if _, err := g.ApplyShared(t.Context(), me, decode(t, nodes+two), revision7); err != nil {
		t.Fatal(err)
	}
	return g
}

// TestSharedDocument: the document of the cluster is in force in place of the file, and a restart needs no store.
func TestSharedDocument(t *testing.T) {
	g := shared(t)
	check := func(g *gateway, want string) {
		t.Helper()
		own, _, _ := g.Shared()
		if got := g.path.state(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if g.engine.Config().Store() == nil || own.Store() == nil {
			t.Error("the store of the file is not in force")
		}
	}
	check(g, "10.0.0.1 up, 10.0.0.2 up")
	if _, err := g.Apply(t.Context(), me, decode(t, withStore+one), nil, 0); !errors.Is(err, ErrShared) {
		t.Errorf("a change of this node: %v", err)
	}
	if _, err := g.RevertAll(t.Context(), me); !errors.Is(err, ErrShared) {
		t.Errorf("back to the file: %v", err)
	}
	g.set(t, "web", "a", Override{State: "drain"})
	check(g, "10.0.0.1 drain, 10.0.0.2 up")
	write(t, g.file, withStore+strings.Replace(one, "10.0.0.1", "10.0.0.9", 1))
	if _, err := g.Reload(t.Context(), me); err != nil {
		t.Fatal(err)
	}
	check(g, "10.0.0.1 drain, 10.0.0.2 up")
	again := begin(t, g.file, g.at)
	check(again, "10.0.0.1 drain, 10.0.0.2 up")
	if _, got, _ := again.Shared(); got != revision7 {
		t.Errorf("after a restart: %+v", got)
	}
	if edits := again.Changes().Edits; len(edits) > 0 {
		t.Errorf("changes of this node: %v", edits)
	}
	next := revision7
	next.Revision = 8 // the same content
	if _, err := again.ApplyShared(t.Context(), me, decode(t, nodes+two), next); err != nil {
		t.Fatal(err)
	}
	if _, got, _ := begin(t, g.file, g.at).Shared(); got != next {
		t.Errorf("the revision of an equal document is not stored: %+v", got)
	}
}

// TestLeavingTheCluster: a file without the store, or with another cluster, is in force itself.
func TestLeavingTheCluster(t *testing.T) {
	for name, file := range map[string]string{"no store": nodes + one, "other name": strings.Replace(withStore, "cluster:\n", "cluster:\n  name: other\n", 1) + one} {
		g := shared(t)
		write(t, g.file, file)
		if _, err := g.Reload(t.Context(), me); err != nil {
			t.Fatal(err)
		}
		if _, got, _ := g.Shared(); got != (store.Shared{}) || g.path.state() != "10.0.0.1 up" {
			t.Errorf("%s: %+v, %s", name, got, g.path.state())
		}
		write(t, g.file, withStore+one)
		if again := begin(t, g.file, g.at); again.path.state() != "10.0.0.1 up" {
			t.Errorf("%s: the document is back: %s", name, again.path.state())
		}
	}
}

// TestSharedPrograms: whoever writes to the store cannot make the nodes run programs, and a refused document changes
// nothing.
func TestSharedPrograms(t *testing.T) {
	g := shared(t)
	document := decode(t, nodes+strings.Replace(one, "mode: dnat,", "mode: dnat, check: {type: exec, command: [/bin/sh, -c, id]},", 1))
	next := revision7
	next.Revision = 8
	for how, try := range map[string]func() error{
		"plan":  func() error { return g.PlanShared(t.Context(), document) },
		"apply": func() error { _, err := g.ApplyShared(t.Context(), me, document, next); return err },
	} {
		if err := try(); err == nil || !strings.Contains(err.Error(), "is not a command of the daemon's file") {
			t.Errorf("%s: %v", how, err)
		}
	}
	if err := g.PlanShared(t.Context(), decode(t, one)); err == nil {
		t.Error("a document without nodes is accepted")
	}
	g.path.refuse = os.ErrPermission
	if _, err := g.ApplyShared(t.Context(), me, decode(t, nodes+one), next); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a document that the datapath refuses: %v", err)
	}
	if _, got, _ := g.Shared(); got != revision7 || g.path.state() != "10.0.0.1 up, 10.0.0.2 up" {
		t.Errorf("after refusals: %+v, %s", got, g.path.state())
	}
}
