// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/store"
)

// patience is the longest wait for something that a busy machine delays.
const patience = 2 * time.Minute

// gateway is a node without a datapath.
type gateway struct {
	mu     sync.Mutex
	local  Local
	plan   error // the answer to plans
	refuse error // the result of applying
	seen   []int64
	text   string // in force
	member *Member
}

func (g *gateway) Local() Local {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.local
}

func (g *gateway) Plan(context.Context, *config.Config) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.plan
}

func (g *gateway) Apply(_ context.Context, d *Document, _ *config.Config, revision store.Shared) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refuse != nil && !strings.Contains(d.YAML, "# accepted") {
		return g.refuse
	}
	g.local.InForce, g.text, g.seen = revision, d.YAML, append(g.seen, revision.Revision)
	return nil
}

func (g *gateway) Drain(_ context.Context, _ string, drain bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.local.Drains = drain
	return nil
}

// set changes the node.
func (g *gateway) set(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
}

// inForce returns the text and the revision in force.
func (g *gateway) inForce() (string, int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text, g.local.InForce.Revision
}

// join runs a node until the test or stop ends it.
func join(t *testing.T, e *labtest.Etcd, name string, known store.Shared) (g *gateway, stop func()) {
	t.Helper()
	g = &gateway{local: Local{Settings: Settings{Name: "edge", Node: name, Store: &config.ClusterStore{Endpoints: []string{e.URL}, TLS: &config.ClusterTLS{CA: e.CA, Cert: e.Cert, Key: e.Key}}}, InForce: known}}
	g.member = New(Options{Gateway: g, Log: slog.New(slog.DiscardHandler), Lease: 15 * time.Second, Request: 30 * time.Second, Answer: patience})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.member.Run(ctx)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return g, stop
}

// live waits until each of the nodes sees these live nodes.
func live(t *testing.T, of []*gateway, want ...string) {
	t.Helper()
	labtest.Eventually(t, patience, "live nodes", func() error {
		for _, g := range of {
			peers := g.member.Peers()
			for _, n := range want {
				if !peers[n].Live || !g.member.Status().Connected {
					return fmt.Errorf("%s sees %v, %v", g.Local().Node, peers, g.member.Status().Failure)
				}
			}
			for n, p := range peers {
				if p.Live && !strings.Contains(strings.Join(want, " "), n) {
					return fmt.Errorf("%s sees %s", g.Local().Node, n)
				}
			}
		}
		return nil
	})
}

func newEtcd(t *testing.T) *labtest.Etcd {
	labtest.Require(t, labtest.Tool("etcd"))
	return labtest.NewEtcd(t, exec.Command, "127.0.0.1", labtest.FreePort(t))
}

func three(t *testing.T) (*labtest.Etcd, []*gateway) {
	e := newEtcd(t)
	var list []*gateway
	for i := 1; i <= 3; i++ {
		g, _ := join(t, e, fmt.Sprintf("n%d", i), store.Shared{})
		list = append(list, g)
	}
	live(t, list, "n1", "n2", "n3")
	return e, list
}

func document(comment string) Document {
	return Document{By: "test", Name: "cluster.yaml", YAML: "# " + comment + "\ncluster:\n  nodes:\n    - {name: n1, address: 10.255.0.1}\n    - {name: n2, address: 10.255.0.2}\n    - {name: n3, address: 10.255.0.3}\n"}
}

// agree checks that all nodes have a document in force.
func agree(t *testing.T, list []*gateway, comment string) {
	t.Helper()
	labtest.Eventually(t, patience, "the document "+comment, func() error {
		_, first := list[0].inForce()
		for _, g := range list {
			if text, revision := g.inForce(); text != document(comment).YAML || revision != first {
				return fmt.Errorf("%s has %q at revision %d, n1 revision %d", g.Local().Node, text, revision, first)
			}
		}
		return nil
	})
}

// TestOneDocument: all nodes put a document in force, and a change of an older revision is refused.
func TestOneDocument(t *testing.T) {
	_, list := three(t)
	out, err := list[0].member.Apply(t.Context(), document("one"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Join(out.InForce, " ") != "n1 n2 n3" || len(out.Silent) > 0 {
		t.Errorf("in force on %v, no report from %v", out.InForce, out.Silent)
	}
	agree(t, list, "one")
	if _, err := list[1].member.Apply(t.Context(), document("two"), 0); !errors.Is(err, ErrConflict) {
		t.Errorf("a change of revision 0: %v", err)
	}
	if _, err := list[1].member.Apply(t.Context(), document("two"), out.Revision); err != nil {
		t.Error(err)
	}
	agree(t, list, "two")
	if _, err := list[2].member.Apply(t.Context(), Document{Name: "f.yaml", YAML: "services: []\n"}, -1); err == nil {
		t.Error("a document without nodes is accepted")
	}
}

// TestOneOfTwoChanges: of concurrent changes of one revision exactly one is made.
func TestOneOfTwoChanges(t *testing.T) {
	_, list := three(t)
	for round := range 5 {
		revision := list[0].member.Status().Document
		errs := make([]error, 3)
		var wait sync.WaitGroup
		for i, g := range list {
			wait.Go(func() {
				_, errs[i] = g.member.Apply(t.Context(), document(fmt.Sprintf("round %d by %d", round, i)), revision)
			})
		}
		wait.Wait()
		winner := -1
		for i, err := range errs {
			switch {
			case err == nil && winner >= 0:
				t.Errorf("round %d: both %d and %d made their change", round, winner, i)
			case err == nil:
				winner = i
			case !errors.Is(err, ErrConflict):
				t.Errorf("round %d: %v", round, err)
			}
		}
		if winner < 0 {
			t.Fatalf("round %d: nobody made a change: %v", round, errs)
		}
		agree(t, list, fmt.Sprintf("round %d by %d", round, winner))
		labtest.Eventually(t, patience, "the revision on n1", func() error {
			if now := list[0].member.Status().Document; now <= revision {
				return fmt.Errorf("revision %d", now)
			}
			return nil
		})
	}
	for _, g := range list {
		g.set(func() {
			if !slices.IsSorted(g.seen) {
				t.Errorf("%s: revisions go back: %v", g.local.Node, g.seen)
			}
		})
	}
}

// TestRefusals: a refused plan changes nothing, and a document that a node refuses later is taken back.
func TestRefusals(t *testing.T) {
	_, list := three(t)
	if _, err := list[0].member.Apply(t.Context(), document("accepted"), -1); err != nil {
		t.Fatal(err)
	}
	list[2].set(func() { list[2].plan = errors.New("no interface wan0") })
	_, err := list[0].member.Apply(t.Context(), document("planned"), -1)
	if err == nil || err.Error() != "node n3 refuses: no interface wan0\nnothing has changed" {
		t.Errorf("refused plan: %v", err)
	}
	agree(t, list, "accepted")
	list[2].set(func() { list[2].plan, list[2].refuse = nil, errors.New("the kernel has no memory") })
	_, err = list[0].member.Apply(t.Context(), document("applied"), -1)
	if err == nil || !strings.HasPrefix(err.Error(), "node n3 refuses: the kernel has no memory\ntaken back: revision ") {
		t.Errorf("refused document: %v", err)
	}
	agree(t, list, "accepted")
}

// TestStoreAway: without the store, changes are refused with the reason, and a node starts with the document that it
// knows. When the store is back, they follow it again, also after a compaction.
func TestStoreAway(t *testing.T) {
	e, list := three(t)
	if _, err := list[0].member.Apply(t.Context(), document("before"), -1); err != nil {
		t.Fatal(err)
	}
	agree(t, list, "before")
	e.Kill()
	short, cancel := context.WithTimeout(t.Context(), time.Second) // etcd's client tries again until then
	defer cancel()
	_, err := list[0].member.Apply(short, document("away"), -1)
	if away := (*AwayError)(nil); !errors.As(err, &away) {
		t.Errorf("change without the store: %v", err)
	}
	known := list[0].Local().InForce
	late, stop := join(t, e, "n4", known)
	labtest.Eventually(t, patience, "warnings", func() error {
		for _, g := range append(list, late) {
			if w := strings.Join(g.member.Warnings(), " "); !strings.Contains(w, "the store of the cluster does not answer") {
				return fmt.Errorf("%s warns %q", g.Local().Node, w)
			}
		}
		return nil
	})
	if _, revision := late.inForce(); revision != known.Revision {
		t.Errorf("the node that started has revision %d, want %d", revision, known.Revision)
	}
	e.Start()
	live(t, append(list, late), "n1", "n2", "n3", "n4")
	out, err := list[1].member.Apply(t.Context(), document("after"), known.Revision)
	if err != nil {
		t.Fatal(err)
	}
	agree(t, append(list, late), "after")
	stop()
	live(t, list, "n1", "n2", "n3")
	s, err := list[0].member.current()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Compact(t.Context(), out.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	e.Kill()
	e.Start()
	live(t, list, "n1", "n2", "n3")
	if _, err := list[2].member.Apply(t.Context(), document("compacted"), -1); err != nil {
		t.Fatal(err)
	}
	agree(t, list, "compacted")
}

// TestDrainsOfOthers: a live node follows a request at once, another one when it is back.
func TestDrainsOfOthers(t *testing.T) {
	e, list := three(t)
	if done, err := list[0].member.Drain(t.Context(), "test", "n2", true); err != nil || !done {
		t.Fatalf("drain of n2: %v, %v", done, err)
	}
	if !list[1].Local().Drains || list[0].Local().Drains {
		t.Error("not n2 alone drains")
	}
	if done, err := list[2].member.Drain(t.Context(), "test", "n2", false); err != nil || !done || list[1].Local().Drains {
		t.Errorf("end of the drain: %v, %v, %v", done, err, list[1].Local().Drains)
	}
	if done, err := list[0].member.Drain(t.Context(), "test", "n4", true); err != nil || done {
		t.Errorf("drain of a node that is not there: %v, %v", done, err)
	}
	late, _ := join(t, e, "n4", store.Shared{})
	labtest.Eventually(t, patience, "the drain of n4", func() error {
		if !late.Local().Drains {
			return errors.New("it does not drain")
		}
		return nil
	})
}

// TestOtherStore: a node whose file names another cluster follows the document of that one.
func TestOtherStore(t *testing.T) {
	_, list := three(t)
	if _, err := list[0].member.Apply(t.Context(), document("first"), -1); err != nil {
		t.Fatal(err)
	}
	agree(t, list, "first")
	list[2].set(func() { list[2].local.Name = "other" })
	list[2].member.Kick()
	live(t, list[:2], "n1", "n2")
	live(t, list[2:], "n3")
	if _, err := list[2].member.Apply(t.Context(), document("second"), 0); err != nil {
		t.Fatal(err)
	}
	agree(t, list[:2], "first")
	agree(t, list[2:], "second")
}

// TestDocumentSize: a document that etcd would refuse is an error that says so.
func TestDocumentSize(t *testing.T) {
	d := document("small")
	value, err := encode(&d)
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := decode(value); err != nil || *got != d {
		t.Errorf("%v, %v", got, err)
	}
	if _, _, err := decode(value[:len(value)/2]); err == nil {
		t.Error("half a document is accepted")
	}
	noise := make([]byte, 4*maxDocument)
	for i := range noise {
		noise[i] = byte('!' + rand.IntN(90))
	}
	if _, err := encode(&Document{YAML: string(noise)}); err == nil || !strings.Contains(err.Error(), "at most 1048576") {
		t.Errorf("a large document: %v", err)
	}
}
