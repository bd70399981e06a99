// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPrefixes compares the prefixes of random ranges with the addresses of the ranges.
func TestPrefixes(t *testing.T) {
	for range 2000 {
		base := netip.MustParseAddr([]string{"198.51.100.0", "2001:db8::", "255.255.255.0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00"}[rand.N(4)])
		at := func(n int) netip.Addr {
			b := base.AsSlice()
			b[len(b)-1] = byte(n)
			a, _ := netip.AddrFromSlice(b)
			return a
		}
		low := rand.N(256)
		high := low + rand.N(256-low)
		next, list := at(low), Prefixes(at(low), at(high))
		for i, p := range list {
			if p.Masked().Addr() != next || p != p.Masked() {
				t.Fatalf("%s-%s: %v: prefix %d does not begin at %s", at(low), at(high), list, i, next)
			}
			next = lastOf(p).Next()
		}
		if last := lastOf(list[len(list)-1]); last != at(high) {
			t.Fatalf("%s-%s: %v ends at %s", at(low), at(high), list, last)
		}
		if len(list) > 2*8 {
			t.Fatalf("%s-%s: %d prefixes, more than necessary", at(low), at(high), len(list))
		}
	}
	if got := Prefixes(netip.Addr{}, netip.Addr{}); got != nil {
		t.Errorf("no range: %v", got)
	}
}

// speaker is an announcer in a node.
type speaker struct {
	*Announcer
	t      *testing.T
	node   node
	dir    string
	events *event.Log
	last   uint64
}

// node is a gateway with a link to a router.
type node struct {
	*lab.Node
	lab *lab.Lab
}

func gateway(t *testing.T) node {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "announce", Nodes: []lab.NodeSpec{{Name: "gw"}, {Name: "up"}},
		Links: []lab.LinkSpec{{A: lab.End{Node: "gw", Iface: "wan0", Addresses: []string{"10.9.1.2/24"}}, B: lab.End{Node: "up", Iface: "eth0", Addresses: []string{"10.9.1.1/24"}}}}})
	return node{l.Node("gw"), l}
}

func begin(t *testing.T, n node, dir string) *speaker {
	s := &speaker{t: t, node: n, dir: dir, events: event.New(100)}
	s.last = s.events.Last()
	s.Announcer = New(Options{StateDir: dir, Log: slog.New(slog.DiscardHandler), Events: s.events})
	return s
}

// apply sets a request in the node.
func (s *speaker) apply(r *Request) {
	s.t.Helper()
	if err := s.node.Do(func() error { _, err := s.Set(r); return err }); err != nil {
		s.t.Fatal(err)
	}
}

// look follows the host.
func (s *speaker) look() {
	s.t.Helper()
	if err := s.node.Do(func() error { _, err := s.reconcileRoutes(); return err }); err != nil {
		s.t.Fatal(err)
	}
}

// ip runs the ip command in the node and returns its output, one space between words.
func (s *speaker) ip(args string) string {
	s.t.Helper()
	out, err := s.node.Command(s.t.Context(), "ip", strings.Fields(args)...).CombinedOutput()
	if _, exited := err.(*exec.ExitError); err != nil && !(exited && strings.Contains(string(out), "does not exist")) {
		s.t.Fatalf("ip %s: %v: %s", args, err, out)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		if !strings.Contains(line, "does not exist") && !strings.Contains(line, "Dump terminated") {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(lines, "; ")
}

// table checks the routes of a table in the notation of the ip command.
func (s *speaker) table(number int, want string) {
	s.t.Helper()
	got := s.ip(fmt.Sprintf("route show table %d", number))
	if six := s.ip(fmt.Sprintf("-6 route show table %d", number)); six != "" {
		got = strings.TrimPrefix(got+"; "+strings.ReplaceAll(six, " pref medium", ""), "; ")
	}
	if got != want {
		s.t.Errorf("table %d:\n got %s\nwant %s", number, got, want)
	}
}

// told expects these texts of events since the last call.
func (s *speaker) told(want ...string) {
	s.t.Helper()
	sent, _, _ := s.events.After(s.last, 100)
	var got []string
	for _, e := range sent {
		got, s.last = append(got, e.Text), e.ID
	}
	if !slices.Equal(got, want) {
		s.t.Errorf("events:\n got %s\nwant %s", strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

func request(addresses ...Address) *Request {
	return &Request{Table: 5100, Protocol: 76, Metric: 10, Interfaces: []string{"wan0"}, Addresses: addresses}
}

func one(prefix, why string) Address {
	return Address{Prefix: netip.MustParsePrefix(prefix), Owners: []string{"service web"}, Why: why}
}

const (
	four = "unreachable 192.0.2.10 proto 76 metric 10"
	six  = "unreachable 2001:db8::10 dev lo proto 76 metric 10"
)

// TestRoutes announces and withdraws addresses of both families.
func TestRoutes(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	s.apply(request(one("192.0.2.10/32", ""), one("198.51.100.0/28", ""), one("2001:db8::10/128", "")))
	s.table(5100, four+"; unreachable 198.51.100.0/28 proto 76 metric 10; "+six)
	s.told("address 192.0.2.10 is announced: service web", "address 198.51.100.0/28 is announced: service web", "address 2001:db8::10 is announced: service web")
	s.apply(request(one("192.0.2.10/32", "no backend"), one("2001:db8::10/128", "")))
	s.table(5100, six)
	s.told("address 192.0.2.10 is withdrawn: no backend", "address 198.51.100.0/28 is withdrawn: no service or rule of the configuration has it")
	s.apply(request(one("192.0.2.10/32", "no backend at all"), one("2001:db8::10/128", "")))
	s.told() // another reason is no change
	if st := s.Statuses()[0]; st.State != Withdrawn || st.Why != "no backend at all" || st.Since.IsZero() {
		t.Errorf("status %+v", st)
	}
	s.apply(nil)
	s.table(5100, "")
	s.told("address 2001:db8::10 is withdrawn: the configuration has no cluster.announce")
	if now, _ := s.Counts(); now != nil {
		t.Errorf("without announcements: counts %v", now)
	}
}

// TestInterfaces withdraws everything while an interface is down, has no carrier or is missing.
func TestInterfaces(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	s.apply(request(one("192.0.2.10/32", "")))
	s.told("address 192.0.2.10 is announced: service web")
	for _, c := range []struct{ down, up, why string }{
		{"link set wan0 down", "link set wan0 up", "interface wan0 is down"},
		{"link set wan0 name other", "link set other name wan0", "interface wan0 does not exist"},
	} {
		s.ip("link set wan0 down") // an interface is renamed while it is down
		s.ip(c.down)
		s.look()
		s.table(5100, "")
		s.told("address 192.0.2.10 is withdrawn: " + c.why)
		s.ip(c.up)
		s.ip("link set wan0 up")
		s.look()
		s.table(5100, four)
		s.told("address 192.0.2.10 is announced: service web")
	}
	if _, changes := s.Counts(); changes[Announced] != 3 || changes[Withdrawn] != 2 {
		t.Errorf("counts of changes: %v", changes)
	}
}

// TestCarrier withdraws everything while the other end of the link is down.
func TestCarrier(t *testing.T) {
	n := gateway(t)
	s := begin(t, n, t.TempDir())
	s.apply(request(one("192.0.2.10/32", "")))
	router := n.lab.Node("up")
	if out, err := router.Command(t.Context(), "ip", "link", "set", "eth0", "down").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.look()
	s.table(5100, "")
	s.told("address 192.0.2.10 is announced: service web", "address 192.0.2.10 is withdrawn: interface wan0 has no carrier")
}

// TestRestart adopts the routes of a killed process: no route that stays is written again.
func TestRestart(t *testing.T) {
	n, dir := gateway(t), t.TempDir()
	s := begin(t, n, dir)
	s.apply(request(one("192.0.2.10/32", ""), one("192.0.2.11/32", ""), one("192.0.2.12/32", "")))
	seen := filepath.Join(t.TempDir(), "monitor")
	out, err := os.Create(seen)
	if err != nil {
		t.Fatal(err)
	}
	monitor := n.Command(t.Context(), "ip", "monitor", "route")
	monitor.Stdout = out
	if err := monitor.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = monitor.Process.Kill()
		_ = monitor.Wait()
		out.Close()
	})
	sees := func(route string) (text string) {
		t.Helper()
		labtest.Eventually(t, time.Minute, "the monitor sees "+route, func() error {
			read, err := os.ReadFile(seen)
			if text = string(read); err == nil && !strings.Contains(text, route) {
				s.ip("route add unreachable " + route + " table 5100 proto static metric 7") // the kernel reports no replacement by an equal route
				s.ip("route del unreachable " + route + " table 5100 metric 7")
				err = errors.New("not yet")
			}
			return err
		})
		return text
	}
	sees("203.0.113.8")
	s.ip("route add unreachable 203.0.113.9 table 5100 proto static") // of another program
	s = begin(t, n, dir)
	s.table(5100, four+"; unreachable 192.0.2.11 proto 76 metric 10; unreachable 192.0.2.12 proto 76 metric 10; unreachable 203.0.113.9 proto static")
	unknown := one("192.0.2.12/32", "not probed")
	unknown.Unknown = true
	fresh := one("192.0.2.13/32", "not probed")
	fresh.Unknown = true
	s.apply(request(one("192.0.2.10/32", ""), unknown, fresh))
	s.table(5100, four+"; unreachable 192.0.2.12 proto 76 metric 10; unreachable 203.0.113.9 proto static")
	s.told("address 192.0.2.11 is withdrawn: no service or rule of the configuration has it")
	if text := sees("203.0.113.10"); strings.Contains(text, "192.0.2.10 ") || strings.Contains(text, "192.0.2.12") || !strings.Contains(text, "Deleted unreachable 192.0.2.11") {
		t.Errorf("route changes:\n%s", text)
	}
}

// TestSettle announces a withdrawn address after its reason has been absent for the whole time.
func TestSettle(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	address := one("192.0.2.10/32", "")
	address.Settle = time.Minute
	s.apply(request(address))
	s.table(5100, four) // nothing was withdrawn before
	now := time.Now()
	at := func(after time.Duration, want string) {
		t.Helper()
		if err := s.node.Do(func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			_, err := s.reconcile(now.Add(after))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		s.table(5100, want)
	}
	s.ip("link set wan0 down")
	at(0, "")
	s.ip("link set wan0 up")
	at(time.Second, "")
	if st := s.Statuses()[0]; st.State != Withdrawn || !strings.HasPrefix(st.Why, "usable again") || s.next != time.Minute {
		t.Errorf("status %+v, next %s", st, s.next)
	}
	at(50*time.Second, "")
	s.ip("link set wan0 down")
	at(51*time.Second, "")
	s.ip("link set wan0 up")
	at(52*time.Second, "")
	at(62*time.Second, "")
	at(112*time.Second, four)
	at(113*time.Second, four)
	s.told("address 192.0.2.10 is announced: service web", "address 192.0.2.10 is withdrawn: interface wan0 is down", "address 192.0.2.10 is announced: service web")
}

// TestOtherTable changes the table and the metric: the routes are written before the old ones are removed.
func TestOtherTable(t *testing.T) {
	n, dir := gateway(t), t.TempDir()
	s := begin(t, n, dir)
	s.apply(request(one("192.0.2.10/32", "")))
	s.told("address 192.0.2.10 is announced: service web")
	r := request(one("192.0.2.10/32", ""))
	r.Metric = 100
	s.apply(r)
	s.table(5100, "unreachable 192.0.2.10 proto 76 metric 100")
	s = begin(t, n, dir)
	r = request(one("192.0.2.10/32", ""))
	r.Table = 5200
	s.apply(r)
	s.table(5100, "")
	s.table(5200, four)
	s.told()
	s = begin(t, n, dir) // the configuration announces nothing now
	s.apply(nil)
	s.table(5200, "")
}

// TestOthersChangeRoutes restores the routes, and leaves routes of other protocols.
func TestOthersChangeRoutes(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	s.apply(request(one("192.0.2.10/32", "")))
	s.ip("route flush table 5100")
	s.ip("route add blackhole 192.0.2.10 table 5100 proto 76 metric 10")
	s.ip("route add unreachable 192.0.2.99 table 5100 proto 76 metric 10")
	s.look()
	s.table(5100, four)
	if !s.Writes(5100, 76) || s.Writes(254, 76) || s.Writes(5100, 4) {
		t.Error("the announcer does not know its routes")
	}
}

// TestEnd removes the routes at the end, keeps them with keep, and removes those that a process left.
func TestEnd(t *testing.T) {
	n, dir := gateway(t), t.TempDir()
	do := func(f func() error) {
		t.Helper()
		if err := n.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want bool) {
		t.Helper()
		var got bool
		do(func() (err error) { got, err = Left(dir); return err })
		if got != want {
			t.Errorf("left %v, want %v", got, want)
		}
	}
	left(false)
	s := begin(t, n, dir)
	s.apply(request(one("192.0.2.10/32", "")))
	do(func() error { return s.Release(true) })
	s.table(5100, four)
	left(true)
	do(func() error { return Remove(dir) })
	s.table(5100, "")
	left(false)
	s = begin(t, n, dir)
	s.apply(request(one("192.0.2.10/32", "")))
	do(func() error { return s.Release(false) })
	s.apply(request(one("192.0.2.10/32", ""))) // after the end
	s.table(5100, "")
	left(false)
}

// TestDamagedRecord finds the routes of the usual table.
func TestDamagedRecord(t *testing.T) {
	for _, text := range []string{"", "{", `{"table": "x"}`, `{}`, `{"table": 5100, "protocol": 4000}`} {
		n, dir := gateway(t), t.TempDir()
		s := begin(t, n, dir)
		s.apply(request(one("192.0.2.10/32", "")))
		if err := os.WriteFile(filepath.Join(dir, recordFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s = begin(t, n, dir)
		if w := s.Warnings(); len(w) != 1 || !strings.Contains(w[0], "damaged") {
			t.Errorf("%s: warnings %q", text, w)
		}
		s.apply(nil)
		s.table(5100, "")
		s.apply(request(one("192.0.2.10/32", "")))
		if err := os.WriteFile(filepath.Join(dir, recordFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.Do(func() error { return Remove(dir) }); err != nil {
			t.Fatal(err)
		}
		s.table(5100, "")
	}
}

// TestPlan changes nothing.
func TestPlan(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	s.apply(request(one("192.0.2.10/32", "")))
	if err := s.node.Do(func() error {
		c, err := s.Plan(request(one("192.0.2.10/32", "no backend"), one("192.0.2.11/32", "")))
		if err == nil && strings.Join(c.Lines, "; ") != "announce 192.0.2.11/32; withdraw 192.0.2.10/32" {
			t.Errorf("plan %q", c.Lines)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	s.table(5100, four)
}

// TestManyChanges become one event.
func TestManyChanges(t *testing.T) {
	s := begin(t, gateway(t), t.TempDir())
	var all []Address
	for a := netip.MustParseAddr("192.0.2.10"); len(all) <= maxAlike; a = a.Next() {
		all = append(all, Address{Prefix: netip.PrefixFrom(a, 32), Owners: []string{"service " + a.String()}})
	}
	s.apply(request(all...))
	s.told("17 addresses are announced")
	s.ip("link set wan0 down")
	s.look()
	s.told("17 addresses are withdrawn: interface wan0 is down")
}
