// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk/damage"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// sink records the applied backends.
type sink struct {
	mu    sync.Mutex
	found map[string][]config.Backend
	puts  int
	err   error
}

func (s *sink) put(_ context.Context, found map[string][]config.Backend) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.puts++
	for name, list := range found {
		s.found[name] = list
	}
	return nil
}

// has returns an error when the backends of the service web are others.
func (s *sink) has(want ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var got []string
	for _, b := range s.found["web"] {
		text := b.Address.String()
		if b.Port != 0 {
			text = netip.AddrPortFrom(b.Address, b.Port).String()
		}
		if b.Name != b.Address.String() {
			text = b.Name + "=" + text
		}
		if b.Weight != 1 || b.Priority != 1 {
			text += fmt.Sprintf("*%d/%d", b.Weight, b.Priority)
		}
		got = append(got, text)
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("found are %q, want %q", got, want)
	}
	return nil
}

func (s *sink) eventually(t *testing.T, want ...string) {
	t.Helper()
	labtest.Eventually(t, 20*time.Second, "these backends", func() error { return s.has(want...) })
}

// services returns a configuration with the service web.
func services(t *testing.T, from string) *config.Config {
	t.Helper()
	cfg, err := config.Decode("test", []byte(`{services: [{name: web, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.1, ports: [80]}], backends-from: `+from+`}]}`))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// following runs a finder that follows the source.
func following(t *testing.T, path, from string) (*Finder, *sink) {
	t.Helper()
	s := &sink{found: map[string][]config.Backend{}}
	f := New(Options{Put: s.put, Path: path, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	f.Follow(services(t, from))
	return f, s
}

func warned(f *Finder, text string) func() error {
	return func() error {
		if w := strings.Join(f.Warnings(), "\n"); (text == "") != (w == "") || !strings.Contains(w, text) {
			return fmt.Errorf("warnings %q, want %q", w, text)
		}
		return nil
	}
}

func TestKeeper(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	k := newRetention(30*time.Second, 2)
	list := func(text string) (l []config.Backend) {
		for _, last := range strings.Fields(text) {
			l = append(l, config.Backend{Name: last, Address: netip.MustParseAddr("10.0.0." + last)})
		}
		return l
	}
	for _, step := range []struct {
		at    int // seconds
		found string
		want  string
		kept  int
		next  int // seconds; 0: never
	}{
		{0, "1 2 3 4", "1 2 3 4", 0, 0},
		{10, "4 3 2 1", "1 2 3 4", 0, 0}, // in whatever order
		{20, "1 3 4", "1 2 3 4", 0, 40},  // 2 is held
		{30, "1 2 3 4", "1 2 3 4", 0, 0}, // found again
		{40, "1 5", "1 2 3 4 5", 0, 60},  // a new one at once
		{60, "1 5", "1 5", 0, 0},         // the others after their time
		{89, "", "1 5", 0, 90},           // nothing: held until then
		{91, "", "1 5", 2, 0},            // and kept, for two stay at least
		{100, "6", "5 6", 1, 0},          // one may go now: the one that was found first
		{101, "6 7", "6 7", 0, 0},        // and the other one
		{200, "6", "6 7", 1, 0},          // 7 stays for the same reason
		{201, "6 8 9", "6 8 9", 0, 0},    // and expires
	} {
		now := start.Add(time.Duration(step.at) * time.Second)
		got, kept, next := k.update(list(step.found), now)
		var names []string
		for _, b := range got {
			names = append(names, b.Name)
		}
		wantNext := time.Time{}
		if step.next != 0 {
			wantNext = start.Add(time.Duration(step.next) * time.Second)
		}
		if strings.Join(names, " ") != step.want || kept != step.kept {
			t.Errorf("at %d s, found %q: in force %q, %d kept; want %q, %d", step.at, step.found, names, kept, step.want, step.kept)
		}
		if !next.Equal(wantNext) {
			t.Errorf("at %d s the next goes at %v, want %v", step.at, next, wantNext)
		}
	}
}

// TestDirectory: backends follow the files. An invalid file keeps its previous content, and the results survive a
// restart.
func TestDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "found")
	memory := filepath.Join(t.TempDir(), "discovered.json")
	write := func(name, text string) {
		t.Helper()
		temp := filepath.Join(dir, "."+name)
		if err := errors.Join(os.WriteFile(temp, []byte(text), 0o600), os.Rename(temp, filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write("a.yaml", "- {address: 10.0.0.1}\n- {address: 10.0.0.2, weight: 7}\n")
	write("b.txt", "no list of backends")
	f, s := following(t, memory, "{directory: "+dir+", port: 8080}")
	s.eventually(t, "10.0.0.1:8080", "10.0.0.2:8080*7/1")
	write("c.yaml", `[{"name": "six", "address": "2001:db8::1"}, {"name": "three", "address": "10.0.0.3", "port": 81}]`) // the service has IPv4 alone
	s.eventually(t, "10.0.0.1:8080", "10.0.0.2:8080*7/1", "three=10.0.0.3:81")
	write("a.yaml", "- {adress: 10.0.0.9}\n")
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, `a.yaml:1:4: backend 1: unknown key "adress"`))
	if err := os.Remove(filepath.Join(dir, "c.yaml")); err != nil {
		t.Fatal(err)
	}
	s.eventually(t, "10.0.0.1:8080", "10.0.0.2:8080*7/1") // the broken file's stay
	write("a.yaml", "- {address: 10.0.0.2}\n")
	s.eventually(t, "10.0.0.2:8080")
	labtest.Eventually(t, 10*time.Second, "no warning", warned(f, ""))
	write("a.yaml", "")
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, "1 of 1 backends are not found any more"))
	if err := s.has("10.0.0.2:8080"); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	g, again := following(t, memory, "{directory: "+dir+", port: 8080}")
	if last := g.Last()["web"]; len(last) != 1 || last[0].Address.String() != "10.0.0.2" {
		t.Errorf("after a restart: %+v", last)
	}
	labtest.Eventually(t, 10*time.Second, "a warning", warned(g, "no such file or directory: the last result remains in force"))
	if again.puts != 0 {
		t.Error("a source that does not answer changed the backends")
	}
	g.Follow(&config.Config{})
	labtest.Eventually(t, 10*time.Second, "no source", func() error {
		again.mu.Lock()
		defer again.mu.Unlock()
		if list := again.found["web"]; again.puts == 0 || len(list) > 0 || len(g.Statuses()) > 0 {
			return fmt.Errorf("%d changes, backends %v, sources %v", again.puts, list, g.Statuses())
		}
		return nil
	})
}

// TestRefused: what cannot be put in force is tried again.
// TestNoServer finds addresses that no server has, as filtering resolvers answer.
func TestNoServer(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"0.0.0.0", "127.0.0.1", "127.9.9.9", "224.0.0.1", "255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "ff02::1", "fe80::1"} {
		w := &watch{spec: sourceSpec{v4: true, v6: true}}
		found := []config.Backend{{Address: netip.MustParseAddr(text)}, {Address: netip.MustParseAddr("10.0.0.1")}}
		got, refused := w.usableBackends(found)
		if len(got) != 1 || got[0].Name != "10.0.0.1" || !strings.Contains(refused, found[0].Address.Unmap().String()+" is not the address of a server") {
			t.Errorf("%s: backends %v, warning %q", text, got, refused)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("- {address: 127.0.0.1}\n- {address: 10.0.0.1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, s := following(t, "", "{directory: "+dir+"}")
	s.eventually(t, "10.0.0.1")
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, "127.0.0.1 is not the address of a server"))
}

// TestFoundInAnotherNamespace starts again in the same and in another network namespace of the same name.
func TestFoundInAnotherNamespace(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "found.json")
	if err := saveResults(path, map[string]savedResult{"web": {Namespace: "1", Backends: []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.0.1"), Port: 80, Weight: 1, Priority: 1}}}}); err != nil {
		t.Fatal(err)
	}
	for namespace, want := range map[string]int{"1": 1, "2": 0, "": 0} {
		f := New(Options{Path: path, Namespace: namespace, Log: slog.New(slog.DiscardHandler)})
		if got := f.Last(); len(got) != want {
			t.Errorf("namespace %q: found %v", namespace, got)
		}
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("- {address: 10.0.0.1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &sink{found: map[string][]config.Backend{}, err: errors.New("the kernel refuses")}
	f := New(Options{Put: s.put, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go f.Run(ctx)
	f.Follow(services(t, "{directory: "+dir+"}"))
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, "the kernel refuses"))
	s.mu.Lock()
	s.err = nil
	s.mu.Unlock()
	s.eventually(t, "10.0.0.1")
	labtest.Eventually(t, 10*time.Second, "no warning", warned(f, ""))
}

// TestTogether: the results for many services take few changes, and a refused result does not affect others.
func TestTogether(t *testing.T) {
	t.Parallel()
	begun, free := make(chan struct{}), make(chan struct{})
	var mu sync.Mutex
	calls, in := 0, map[string]bool{}
	f := New(Options{Log: slog.New(slog.DiscardHandler), Put: func(_ context.Context, found map[string][]config.Backend) error {
		mu.Lock()
		calls++
		first := calls == 1
		mu.Unlock()
		if first {
			close(begun)
			<-free
		}
		if _, bad := found["s7"]; bad {
			return errors.New("s7 is refused")
		}
		mu.Lock()
		defer mu.Unlock()
		for name := range found {
			in[name] = true
		}
		return nil
	}})
	results := make(chan error)
	put := func(name string) { results <- f.applyWaiting(context.Background(), name, nil) }
	go put("first")
	<-begun
	for i := range 20 {
		go put(fmt.Sprintf("s%d", i))
	}
	labtest.Eventually(t, 10*time.Second, "20 that wait", func() error {
		if n := f.waiting.Len(); n < 20 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	close(free)
	refused := 0
	for range 21 {
		if err := <-results; err != nil {
			refused++
		}
	}
	if refused != 1 || len(in) != 20 || in["s7"] || calls != 1+1+20 {
		t.Errorf("%d refused, %d in force, %d calls", refused, len(in), calls)
	}
}

// TestDamagedMemory: a damaged file of results is reported and replaced by the next result, and a damaged
// result is never a backend.
func TestDamagedMemory(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "discovered.json")
	was := map[string]savedResult{}
	for i, name := range []string{"web", "shop"} {
		was[name] = savedResult{Origin: "directory /x", Backends: []config.Backend{{Name: "a", Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), Port: 80, Weight: 1, Priority: 1}}}
	}
	if err := saveResults(path, was); err != nil {
		t.Fatal(err)
	}
	intact, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damage.Each(t, path, damage.All(intact, 4096), func(d damage.Damage) error {
		f := New(Options{Path: path, Log: slog.New(slog.DiscardHandler)})
		same := 0
		for name, found := range f.Last() {
			if slices.Equal(found, was[name].Backends) {
				same++
			} else if len(found) > 0 && was[name].Backends != nil {
				return fmt.Errorf("%s has the backends %v", name, found)
			}
		}
		if empty := d.Name == "missing" || d.Name == "empty object"; !empty && same < len(was) && len(f.Warnings()) == 0 && len(f.last) < len(was) {
			return errors.New("no warning")
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.save()
		if written := f.unsaved == ""; written != (d.Name != "directory") {
			return fmt.Errorf("after the next result: %s", f.unsaved)
		}
		return nil
	})
}

// TestNoFiles: entries of the directory that are no files block nothing; the other files count.
func TestNoFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("- {address: 10.0.0.1}\n"), 0o600),
		unix.Mkfifo(filepath.Join(dir, "b.yaml"), 0o600), os.Mkdir(filepath.Join(dir, "c.yaml"), 0o700)); err != nil {
		t.Fatal(err)
	}
	f, s := following(t, "", "{directory: "+dir+"}")
	s.eventually(t, "10.0.0.1")
	for _, name := range []string{"b.yaml", "c.yaml"} {
		labtest.Eventually(t, 10*time.Second, "a warning", warned(f, filepath.Join(dir, name)+": not a regular file"))
	}
}
