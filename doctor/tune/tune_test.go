// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/disk"
	"github.com/sluice-lb/sluice/netdev"
)

// stock has the default settings of a small router.
var stock = map[string]string{
	conntrackMax: "65536", conntrackBuckets: "16384", conntrackCount: "1200",
	timeoutPrefix + "tcp_timeout_established": "432000",
	timeoutPrefix + "tcp_timeout_time_wait":   "120",
	timeoutPrefix + "udp_timeout":             "30",
	timeoutPrefix + "udp_timeout_stream":      "120",
	timeoutPrefix + "icmp_timeout":            "30",
	timeoutPrefix + "acct":                    "0",
	"net.core.netdev_max_backlog":             "1000",
	"net.core.netdev_budget":                  "1200",
	"net.ipv4.neigh.default.gc_thresh1":       "128",
	"net.ipv4.neigh.default.gc_thresh2":       "512",
	"net.ipv4.neigh.default.gc_thresh3":       "1024",
	localRange:                                "32768\t60999",
	localReserved:                             "8080,9000-9010",
	"net.ipv4.ip_forward":                     "1",
}

// fake is a System on a tree of plain files.
func fake(t *testing.T) *System {
	t.Helper()
	dir := t.TempDir()
	s := &System{Proc: filepath.Join(dir, "proc"), Etc: filepath.Join(dir, "etc"), Dir: filepath.Join(dir, "journal"),
		Memory: 2 * capacity.GiB, Cores: 2}
	for key, value := range stock {
		put(t, s, key, value)
	}
	return s
}

func put(t *testing.T, s *System, key, value string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(s.path(key)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path(key), []byte(value+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func wantValues(t *testing.T, s *System, want map[string]string) {
	t.Helper()
	for key, value := range want {
		if got, err := s.Get(key); err != nil || got != value {
			t.Errorf("%s = %q, %v; want %q", key, got, err, value)
		}
	}
}

func router(t *testing.T, s *System, o Options) *Proposal {
	t.Helper()
	profile, err := ProfileNamed("router")
	if err != nil {
		t.Fatal(err)
	}
	p, err := Propose(s, profile, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func find(t *testing.T, p *Proposal, key string) Change {
	t.Helper()
	i := slices.IndexFunc(p.Changes, func(c Change) bool { return c.Key == key })
	if i < 0 {
		t.Fatalf("%s is not in the proposal", key)
	}
	return p.Changes[i]
}

func TestProposeRouter(t *testing.T) {
	s := fake(t)
	p := router(t, s, Options{})
	if p.Changes[0].Key != conntrackBuckets {
		t.Errorf("the first change is %s, want buckets before the limit", p.Changes[0].Key)
	}
	limit := find(t, p, conntrackMax)
	if limit.Now != "65536" || limit.Value != "524288" || limit.Cost != (524288-65536)*384 {
		t.Errorf("limit %+v", limit)
	}
	if c := find(t, p, "net.core.netdev_budget"); c.Skipped != "larger already" {
		t.Errorf("a larger budget would become %s (%s)", c.Value, c.Skipped)
	}
	if c := find(t, p, "net.ipv6.neigh.default.gc_thresh3"); !strings.Contains(c.Skipped, "not on this kernel") {
		t.Errorf("a key that is not there: %+v", c)
	}
	if c := find(t, p, timeoutPrefix+"tcp_timeout_established"); c.Value != "86400" || c.Skipped != "" {
		t.Errorf("established %+v", c)
	}
	if profile, why := Detect(s); profile.Name != "router" || why == "" {
		t.Errorf("detected %s (%s)", profile.Name, why)
	}
}

func TestApplyAndRollBack(t *testing.T) {
	for _, tc := range []struct {
		name, file string
	}{
		{"no file before", ""},
		{"a file before", "# mine\nnet.ipv4.ip_forward = 1\nnet.netfilter.nf_conntrack_max = 70000\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := fake(t)
			if tc.file != "" {
				if err := errors.Join(os.MkdirAll(s.Etc, 0o755), os.WriteFile(s.file(), []byte(tc.file), 0o640)); err != nil {
					t.Fatal(err)
				}
			}
			p := router(t, s, Options{})
			r, err := Apply(context.Background(), s, p, Watch{})
			if err != nil || r.RolledBack != "" || r.Entry.State != Applied {
				t.Fatalf("%+v, %v", r, err)
			}
			wantValues(t, s, map[string]string{conntrackMax: "524288", conntrackBuckets: "524288", timeoutPrefix + "acct": "1"})
			text, err := os.ReadFile(s.file())
			if err != nil || !strings.Contains(string(text), "net.netfilter.nf_conntrack_max = 524288\n") || strings.Contains(string(text), "70000") {
				t.Errorf("file: %v\n%s", err, text)
			}
			if tc.file != "" && !strings.Contains(string(text), "net.ipv4.ip_forward = 1") {
				t.Errorf("a foreign line is lost:\n%s", text)
			}
			if again := router(t, s, Options{}); len(again.Pending()) != 0 {
				t.Errorf("a second run would change %+v", again.Pending())
			}
			done, notes, err := Rollback(s, false)
			if err != nil || len(done) != 1 || len(notes) != 0 || done[0].State != RolledBack {
				t.Fatalf("rollback: %+v, %v, %v", done, notes, err)
			}
			wantValues(t, s, stock)
			text, err = os.ReadFile(s.file())
			if tc.file == "" && !errors.Is(err, os.ErrNotExist) || tc.file != "" && string(text) != tc.file {
				t.Errorf("file after rollback: %v\n%s", err, text)
			}
			if st, err := os.Stat(s.file()); err == nil && st.Mode().Perm() != 0o640 {
				t.Errorf("mode of the file is %v, was 0640", st.Mode())
			}
			if done, _, err := Rollback(s, true); err != nil || len(done) != 0 {
				t.Errorf("a second rollback did %+v, %v", done, err)
			}
		})
	}
}

func TestTwoRunsRollBackInOrder(t *testing.T) {
	s := fake(t)
	for _, value := range []string{"100000", "200000"} {
		p, err := propose(s, "test", []Setting{{Key: conntrackMax, Value: value}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Apply(context.Background(), s, p, Watch{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := Rollback(s, false); err != nil {
		t.Fatal(err)
	}
	wantValues(t, s, map[string]string{conntrackMax: "100000"})
	if text, _ := os.ReadFile(s.file()); !strings.Contains(string(text), "nf_conntrack_max = 100000") {
		t.Errorf("file after the first rollback:\n%s", text)
	}
	if _, _, err := Rollback(s, true); err != nil {
		t.Fatal(err)
	}
	wantValues(t, s, stock)
	if _, err := os.Stat(s.file()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
}

func TestTrialTakesBackWhenDropsRise(t *testing.T) {
	s := fake(t)
	drops := uint64(0)
	w := Watch{Window: 10 * time.Second, Every: time.Millisecond, Drops: func(context.Context) (uint64, error) {
		if now, _ := s.Get(conntrackMax); now == "524288" {
			drops += 1000
		}
		return drops, nil
	}}
	r, err := Apply(context.Background(), s, router(t, s, Options{}), w)
	if err != nil || !strings.Contains(r.RolledBack, "drops rose from 0.0/s") || r.Entry.State != RolledBack {
		t.Fatalf("%+v, %v", r, err)
	}
	wantValues(t, s, stock)
	if _, err := os.Stat(s.file()); !errors.Is(err, os.ErrNotExist) {
		t.Error("a trial that failed was kept for the next boot")
	}
}

func TestInterruptedTrialTakesBack(t *testing.T) {
	s := fake(t)
	ctx, cancel := context.WithCancel(context.Background())
	w := Watch{Window: time.Minute, Every: 10 * time.Millisecond, Drops: func(context.Context) (uint64, error) { return 0, nil },
		Tell: func(string) { cancel() }} // the values are written, the trial begins
	r, err := Apply(ctx, s, router(t, s, Options{}), w)
	if err != nil || !strings.Contains(r.RolledBack, "interrupted") {
		t.Fatalf("%+v, %v", r, err)
	}
	wantValues(t, s, stock)
}

func TestRefusedValueTakesBackTheOthers(t *testing.T) {
	s := fake(t)
	p := router(t, s, Options{})
	last := p.Pending()[len(p.Pending())-1].Key
	goes := func(context.Context) (uint64, error) { // just before the values are written
		_ = os.Remove(s.path(last))
		return 0, nil
	}
	r, err := Apply(context.Background(), s, p, Watch{Window: time.Millisecond, Every: time.Millisecond, Drops: goes})
	if err != nil || !strings.Contains(r.RolledBack, last) {
		t.Fatalf("a value that could not be written was passed over: %+v, %v", r, err)
	}
	want := map[string]string{}
	for k, v := range stock {
		if k != last {
			want[k] = v
		}
	}
	wantValues(t, s, want)
}

// TestJournalOutlivesTheClock: entries are in the order in which they were made, also when the
// clock is set back between them.
func TestJournalOutlivesTheClock(t *testing.T) {
	s := fake(t)
	p, now := router(t, s, Options{}), time.Now()
	var want []string
	for _, by := range []time.Duration{0, -time.Hour, -time.Hour, time.Minute} {
		e := s.newEntry(p, now.Add(by))
		if err := errors.Join(os.MkdirAll(s.Dir, 0o755), s.save(e)); err != nil {
			t.Fatal(err)
		}
		want = append(want, e.ID)
	}
	var got []string
	list, err := s.Journal(false)
	for _, e := range list {
		got = append(got, e.ID)
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("entries %v, %v, made in the order %v", got, err, want)
	}
}

func TestCrashInTrialIsTakenBackLater(t *testing.T) {
	s := fake(t)
	p := router(t, s, Options{})
	e := s.newEntry(p, time.Now())
	if err := errors.Join(os.MkdirAll(s.Dir, 0o755), s.save(e)); err != nil {
		t.Fatal(err)
	}
	for _, step := range e.Steps[:3] { // killed after the third value
		put(t, s, step.Key, step.Wanted)
	}
	if _, err := Apply(context.Background(), s, p, Watch{}); err == nil || !strings.Contains(err.Error(), "rollback") {
		t.Errorf("a new run on top of an unfinished one: %v", err)
	}
	if _, notes, err := Rollback(s, false); err != nil || len(notes) != 0 {
		t.Fatal(notes, err)
	}
	wantValues(t, s, stock)
}

// TestKilledAtEachStep wants everything as it was, whatever the last step before the end.
func TestKilledAtEachStep(t *testing.T) {
	const mine = "# mine\nnet.netfilter.nf_conntrack_max = 70000\n"
	steps := len(router(t, fake(t), Options{}).Pending())
	for killed := range steps + 5 {
		s := fake(t)
		if err := errors.Join(os.MkdirAll(s.Dir, 0o755), os.MkdirAll(s.Etc, 0o755), os.WriteFile(s.file(), []byte(mine), 0o640)); err != nil {
			t.Fatal(err)
		}
		e := s.newEntry(router(t, s, Options{}), time.Now())
		do := []func() error{func() error { return s.save(e) }}
		for i := range e.Steps {
			do = append(do, func() error { return s.Set(e.Steps[i].Key, e.Steps[i].Wanted) })
		}
		do = append(do,
			func() error { return os.WriteFile(filepath.Join(s.Dir, e.ID+".json.new"), []byte(`{"id": "2`), 0o644) },
			func() error { return s.write(e) },
			func() error { return s.save(e) },
			func() error { return s.persist(e, time.Now()) })
		for _, step := range do[:min(killed, len(do))] {
			if err := step(); err != nil {
				t.Fatal(err)
			}
		}
		if killed > 0 {
			if _, err := Apply(context.Background(), s, router(t, s, Options{}), Watch{}); err == nil {
				t.Errorf("killed after %d steps: a new run on top", killed)
			}
		}
		if _, notes, err := Rollback(s, true); err != nil || len(notes) > 0 {
			t.Errorf("killed after %d steps: %v, %v", killed, notes, err)
		}
		wantValues(t, s, stock)
		if text, err := os.ReadFile(s.file()); string(text) != mine {
			t.Errorf("killed after %d steps: file %q, %v", killed, text, err)
		}
		if left, _ := filepath.Glob(filepath.Join(s.Dir, "*.new")); len(left) > 0 {
			t.Errorf("killed after %d steps: %v are left", killed, left)
		}
	}
}

// TestDamagedJournal: what cannot be read is not passed over.
func TestDamagedJournal(t *testing.T) {
	for name, text := range map[string]string{
		"truncated":      `{"id": "20260101T000000.000000000", "state": "appl`,
		"empty":          "",
		"another state":  `{"id": "20260101T000000.000000000", "state": "half", "steps": []}`,
		"another form":   `{"id": "20260101T000000.000000000", "state": "applied", "settings": []}`,
		"another format": "id: 1\n",
	} {
		s := fake(t)
		p := router(t, s, Options{})
		file := filepath.Join(s.Dir, "20260101T000000.000000000.json")
		if err := errors.Join(os.MkdirAll(s.Dir, 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		_, applied := Apply(context.Background(), s, p, Watch{})
		_, _, back := Rollback(s, true)
		for _, err := range []error{applied, back} {
			if err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "then remove it") {
				t.Errorf("%s: %v", name, err)
			}
		}
		wantValues(t, s, stock)
	}
}

// TestReadOnlyEtc: a system without writable files is reported before anything changes, and does not prevent a
// rollback.
func TestReadOnlyEtc(t *testing.T) {
	s := fake(t)
	put(t, s, "etc", "a file")
	s.Etc = filepath.Join(s.Proc, "etc", "sysctl.d")
	if _, err := Apply(context.Background(), s, router(t, s, Options{}), Watch{}); err == nil || !strings.Contains(err.Error(), "--sysctl-dir") {
		t.Errorf("no directory: %v", err)
	}
	wantValues(t, s, stock)
	if list, err := s.Journal(true); err != nil || len(list) > 0 {
		t.Errorf("journal %v, %v", list, err)
	}
	path := filepath.Join(s.Proc, "file")
	if err := errors.Join(os.WriteFile(path, []byte("mine"), 0o644), os.Mkdir(path+disk.Unfinished, 0o755)); err != nil {
		t.Fatal(err)
	}
	if note, err := restoreFile(&File{Path: path, Existed: true, Content: "mine", Written: "tuned"}); note != "" || err != nil {
		t.Errorf("a file that was never written: %q, %v", note, err)
	}
}

// TestChangedMeanwhile: a rollback restores the values at the time of the write, not at the time of the
// proposal.
func TestChangedMeanwhile(t *testing.T) {
	s := fake(t)
	p := router(t, s, Options{})
	put(t, s, conntrackMax, "70000")
	if _, err := Apply(context.Background(), s, p, Watch{}); err == nil || !strings.Contains(err.Error(), "from 65536 to 70000") {
		t.Errorf("%v", err)
	}
	wantValues(t, s, map[string]string{conntrackMax: "70000", conntrackBuckets: "16384"})
}

func TestRollbackLeavesForeignValues(t *testing.T) {
	s := fake(t)
	if _, err := Apply(context.Background(), s, router(t, s, Options{}), Watch{}); err != nil {
		t.Fatal(err)
	}
	put(t, s, conntrackMax, "999999")
	_, notes, err := Rollback(s, false)
	if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "someone set 999999") {
		t.Errorf("notes %v, %v", notes, err)
	}
	wantValues(t, s, map[string]string{conntrackMax: "999999", conntrackBuckets: "16384"})
}

// TestRollbackAfterReboot: a key may be gone with its module, and the file is put back
// all the same.
func TestRollbackAfterReboot(t *testing.T) {
	s := fake(t)
	if _, err := Apply(context.Background(), s, router(t, s, Options{}), Watch{}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.path(conntrackMax)); err != nil {
		t.Fatal(err)
	}
	done, notes, err := Rollback(s, false)
	if err != nil || len(done) != 1 || done[0].State != RolledBack || len(notes) != 1 || !strings.Contains(notes[0], "the kernel has it no more") {
		t.Errorf("%+v, notes %v, %v", done, notes, err)
	}
	if _, err := os.Stat(s.file()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
}

// TestWhoseEntry: the number of the host's first namespace changes with a new kernel. After a reboot, any other
// number can belong to another namespace.
func TestWhoseEntry(t *testing.T) {
	host := &System{Namespace: netdev.Namespace{Name: "host", Inode: 1}}
	other := &System{Namespace: netdev.Namespace{Name: "other", Inode: 2}}
	for _, c := range []struct {
		s    *System
		e    Entry
		want bool
	}{
		{host, Entry{Host: true, Inode: 7, Boot: "earlier"}, true},
		{host, Entry{Inode: 1}, true}, // of an older version
		{host, Entry{Inode: 1, Boot: "earlier"}, false},
		{other, Entry{Inode: 2, Boot: bootID()}, true},
		{other, Entry{Inode: 2, Boot: "earlier"}, false},
		{other, Entry{Host: true, Inode: 2, Boot: bootID()}, false},
	} {
		if got := c.s.own(&c.e); got != c.want {
			t.Errorf("%s, %+v: %v", c.s.Namespace.Name, c.e, got)
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		key, value, want string
	}{
		{timeoutPrefix + "tcp_timeout_established", "3600", "RFC 5382"},
		{timeoutPrefix + "tcp_timeout_time_wait", "30", "RFC 5382"},
		{timeoutPrefix + "udp_timeout_stream", "60", "RFC 4787"},
		{conntrackMax, "1000", "1200 connections are tracked now"},
		{"kernel.panic", "1", "only keys of the form net."},
		{"net.ipv6.conf.eth0.mtu", "1280", "MTUs are not tuned"},
		{localRange, "1024 65000", "same parity"},
	} {
		s := fake(t)
		_, err := propose(s, "test", nil, Options{Set: []Setting{{Key: tc.key, Value: tc.value}}})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s = %s: %v, want %q", tc.key, tc.value, err, tc.want)
		}
		forcible := strings.Contains(tc.want, "RFC") || tc.key == conntrackMax
		if _, err := propose(s, "test", nil, Options{Force: true, Set: []Setting{{Key: tc.key, Value: tc.value}}}); (err == nil) != forcible {
			t.Errorf("%s = %s with force: %v", tc.key, tc.value, err)
		}
	}
	s := fake(t)
	if _, err := propose(s, "test", nil, Options{Set: []Setting{{Key: timeoutPrefix + "tcp_timeout_time_wait", Value: "180"}}}); err != nil {
		t.Errorf("raising a timeout that stays below its floor: %v", err)
	}
}

func TestProposeForLoad(t *testing.T) {
	s := fake(t)
	p, err := ProposeFor(s, capacity.Load{Classes: []capacity.Class{{Name: "a", Clients: 2000, Connections: 100}}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if c := find(t, p, conntrackMax); c.Value != "524288" {
		t.Errorf("limit %s", c.Value)
	}
	if c := find(t, p, "net.ipv4.neigh.default.gc_thresh3"); c.Value != "4096" {
		t.Errorf("neighbours %s", c.Value)
	}
	small, err := ProposeFor(s, capacity.Load{Classes: []capacity.Class{{Name: "a", Clients: 1, Connections: 1}}}, Options{})
	if err != nil || find(t, small, conntrackMax).Skipped == "" {
		t.Errorf("a small load lowers the limit: %+v, %v", small, err)
	}
}

func TestOverrides(t *testing.T) {
	s := fake(t)
	if err := errors.Join(os.MkdirAll(s.Etc, 0o755),
		os.WriteFile(filepath.Join(s.Etc, "99-z.conf"), []byte("net/netfilter/nf_conntrack_max=1\n"), 0o644),
		os.WriteFile(filepath.Join(s.Etc, "10-a.conf"), []byte("net.netfilter.nf_conntrack_max=2\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	r, err := Apply(context.Background(), s, router(t, s, Options{}), Watch{})
	if err != nil || len(r.Overridden) != 1 || !strings.Contains(r.Overridden[0], "99-z.conf sets net.netfilter.nf_conntrack_max") {
		t.Errorf("overrides %v, %v", r.Overridden, err)
	}
}
