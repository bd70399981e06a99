// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// TestSingleRequests asks a fresh server one thing each. Sections are of RFC 6887.
func TestSingleRequests(t *testing.T) {
	announcement := append([]byte{version, byte(announce), 0, 0, 0, 0, 0, 0}, plain(0)[8:24]...)
	thirdParty := append([]byte{1, 0, 0, 16}, make([]byte, 16)...)
	filter := append([]byte{3, 0, 0, 20}, make([]byte, 20)...)
	with := func(options ...byte) []byte { return message(alice, 1, flow.TCP, 80, hour, outer+":8080", options...) }
	for _, c := range []struct {
		name string
		m    []byte
		want string
	}{
		{"§8.3: shorter than two bytes", []byte{2}, "silence"},
		{"§8.3: an answer", edit(plain(hour), 1, 0x81), "silence"},
		{"§9: version 1", edit(plain(hour), 0, 1), "unsupp-version 1800"},
		{"§9: version 3", edit(plain(hour), 0, 3), "unsupp-version 1800"},
		{"§8.3: PEER", edit(plain(hour), 1, 2), "unsupp-opcode 1800"},
		{"§8.3: opcode 127", edit(plain(hour), 1, 127), "unsupp-opcode 1800"},
		{"§8.3: a header alone", plain(hour)[:24], "malformed-request 1800"},
		{"§8.3: half a header", plain(hour)[:8], "malformed-request 1800"},
		{"§8.3: no multiple of four", append(plain(hour), 128), "malformed-request 1800"},
		{"§7: longer than 1100 bytes", append(plain(hour), make([]byte, 1101)...)[:1104], "malformed-request 1800"},
		{"§8.3: somebody else's address", message(bob, 1, flow.TCP, 80, hour, anyPort), "address-mismatch 1800"},
		{"§14.1: ANNOUNCE", announcement, "success 0"},
		{"§14.1: ANNOUNCE for a time", edit(announcement, 7, 9), "success 0"},
		{"§7.3: an option longer than the message", with(130, 0, 0, 4), "malformed-option 1800"},
		{"§7.3: an optional option", with(130, 0, 0, 3, 1, 2, 3, 0), "success 3600 203.0.113.1:8080"},
		{"§7.3: a mandatory option that is not known", with(99, 0, 0, 0), "unsupp-option 1800"},
		{"§13.1: THIRD_PARTY", with(thirdParty...), "unsupp-option 1800"},
		{"§13.2: PREFER_FAILURE", with(2, 0, 0, 0), "success 3600 203.0.113.1:8080"},
		{"§13.2: PREFER_FAILURE twice", with(2, 0, 0, 0, 2, 0, 0, 0), "malformed-option 1800"},
		{"§13.2: PREFER_FAILURE with data", with(2, 0, 0, 1, 0, 0, 0, 0), "malformed-option 1800"},
		{"§13.2: PREFER_FAILURE of ANNOUNCE", append(announcement, 2, 0, 0, 0), "unsupp-option 1800"},
		{"§13.3: FILTER", with(filter...), "unsupp-option 1800"},
		{"§11.3: nothing suggested", plain(hour), "success 3600 203.0.113.1:40001"},
		{"§15: shorter than two minutes", plain(1), "success 120 203.0.113.1:40001"},
		{"§15: longer than a day", plain(1 << 31), "success 86400 203.0.113.1:40001"},
		{"§11.1: a port of all protocols", message(alice, 1, 0, 80, hour, anyPort), "malformed-request 1800"},
		{"§11.3: all protocols", message(alice, 1, 0, 0, hour, anyPort), "unsupp-protocol 1800"},
		{"§11.3: all ports", message(alice, 1, flow.TCP, 0, hour, anyPort), "unsupp-protocol 1800"},
		{"§11.3: SCTP", message(alice, 1, flow.SCTP, 80, hour, anyPort), "unsupp-protocol 1800"},
		{"§15: deletion of nothing", plain(0), "success 0 0.0.0.0:0"},
		{"§15: deletion of nothing at all", message(alice, 1, 0, 0, 0, anyPort), "success 0 0.0.0.0:0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := newBench(t).ask(alice, c.m); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// TestLife follows mappings through renewals, attempts by other clients, deletion and expiry.
func TestLife(t *testing.T) {
	b := newBench(t)
	exact := func(client string, n byte, port uint16) []byte {
		return message(client, n, flow.TCP, port, hour, outer+":8080", 2, 0, 0, 0)
	}
	for _, step := range []struct {
		name   string
		after  time.Duration
		client string
		m      []byte
		want   string
		left   int // mappings, after a second's expiry
	}{
		{"the suggested port", 0, alice, message(alice, 1, flow.TCP, 80, hour, outer+":8080"), "success 3600 203.0.113.1:8080", 1},
		{"another protocol", 0, alice, message(alice, 1, flow.UDP, 80, hour, anyPort), "success 3600 203.0.113.1:40001", 2},
		{"a port that is taken", 0, bob, message(bob, 1, flow.TCP, 80, 600, outer+":8080"), "success 600 203.0.113.1:40002", 3},
		{"nothing but a port that is taken", 0, bob, exact(bob, 1, 81), "cannot-provide-external 30", 3},
		{"nothing but what another mapping has", 0, bob, exact(bob, 1, 80), "cannot-provide-external 30", 3},
		{"a renewal with another suggested port", time.Minute, alice, message(alice, 1, flow.TCP, 80, 7200, outer+":9"), "success 7200 203.0.113.1:8080", 3},
		{"a renewal that insists on what there is", 0, alice, exact(alice, 1, 80), "success 3600 203.0.113.1:8080", 3},
		{"another nonce", time.Minute, alice, message(alice, 2, flow.TCP, 80, hour, anyPort), "not-authorized 3540", 3},
		{"a deletion with another nonce", 0, alice, message(alice, 2, flow.TCP, 80, 0, anyPort), "not-authorized 3540", 3},
		{"a deletion of everything with another nonce", 0, alice, message(alice, 2, 0, 0, 0, anyPort), "success 0 0.0.0.0:0", 3},
		{"a mapping expires", 10 * time.Minute, bob, message(bob, 1, flow.UDP, 9, 0, anyPort), "success 0 0.0.0.0:0", 2},
		{"a deletion", 0, alice, message(alice, 1, flow.TCP, 80, 0, anyPort), "success 0 0.0.0.0:0", 1},
		{"a deletion of all of another protocol", 0, alice, message(alice, 1, flow.TCP, 0, 0, anyPort), "success 0 0.0.0.0:0", 1},
		{"a deletion of all of a protocol", 0, alice, message(alice, 1, flow.UDP, 0, 0, anyPort), "success 0 0.0.0.0:0", 0},
	} {
		b.now += step.after
		if got := b.ask(step.client, step.m); got != step.want {
			t.Errorf("%s: got %s, want %s", step.name, got, step.want)
		}
		if err := b.expire(); err != nil {
			t.Fatal(err)
		}
		if len(b.Server.mappings) != step.left || len(b.table.mappings) != step.left {
			t.Errorf("%s: %d mappings, %d in the datapath, want %d", step.name, len(b.Server.mappings), len(b.table.mappings), step.left)
		}
	}
	if len(b.clients) != 0 {
		t.Errorf("clients without mappings are counted: %v", b.clients)
	}
}

// TestRestart starts a second server on the mappings of the first.
func TestRestart(t *testing.T) {
	b := newBench(t)
	b.ask(alice, plain(hour))
	before := b.Server.Mappings()
	second := &bench{t: t, now: b.now, table: b.table}
	second.Server = newServer(b.table, slog.New(slog.DiscardHandler), func() time.Duration { return second.now })
	if err := second.load(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, second.Server.Mappings(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	second.now += hour * time.Second
	if err := second.expire(); err != nil || len(b.table.mappings) != 0 {
		t.Errorf("%v, %d mappings outlive their time", err, len(b.table.mappings))
	}
}

// TestWhoMayAsk asks from places that get no answer, and under rules of two families.
func TestWhoMayAsk(t *testing.T) {
	v6only, six6 := rule("v6only", "203.0.113.9", "fd00::/64"), rule("six", "2001:db8::1", "fd00::/64")
	office2 := rule("lan1", "203.0.113.2", "10.9.0.0/24")
	office2.In = "lan1"
	b := newBench(t, v6only, six6, office2)
	for _, c := range []struct{ name, client, iface, suggested, want string }{
		{"an inside host", alice, "lan0", anyPort, outer},
		{"an inside host's address outside", alice, "wan0", anyPort, ""},
		{"an inside host's address on another network", alice, "guest0", anyPort, ""},
		{"an inside host's address on an interface without networks", alice, "wan1", anyPort, ""},
		{"no inside host", "10.0.1.2", "lan0", anyPort, ""},
		{"a host behind the rule's interface", "10.9.0.2", "lan1", anyPort, "203.0.113.2"},
		{"a host on another interface", "10.9.0.2", "lan0", anyPort, ""},
		{"IPv6 inside, IPv4 suggested", six, "lan0", anyPort, "203.0.113.9"},
		{"IPv6 inside, IPv6 suggested", "fd00::3", "lan0", "[::]:0", "2001:db8::1"},
	} {
		out := b.answerMessage(message(c.client, 1, flow.TCP, 80, hour, c.suggested), netip.MustParseAddr(c.client), c.iface, true)
		if (out == nil) != (c.want == "") {
			t.Errorf("%s: answered % x", c.name, out)
		} else if out != nil && netip.AddrFrom16([16]byte(out[44:60])).Unmap() != netip.MustParseAddr(c.want) {
			t.Errorf("%s: got % x, want %s", c.name, out[44:60], c.want)
		}
	}
	if n := b.Counts()[Count{"map", "not-a-client"}]; n != 5 {
		t.Errorf("%d requests from nobody were counted, want 5", n)
	}
}

// TestRefusals compares the datapath's errors with the clients' results.
func TestRefusals(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		err   error
		exact bool
		want  string
	}{
		{datapath.ErrQuota, false, "user-ex-quota 30"},
		{fmt.Errorf("x: %w", datapath.ErrNoPort), false, "no-resources 30"},
		{datapath.ErrNoPort, true, "cannot-provide-external 30"},
		{errors.New("broken"), true, "no-resources 30"},
	} {
		b.err = c.err
		m := plain(hour)
		if c.exact {
			m = append(m, 2, 0, 0, 0)
		}
		if got := b.ask(alice, m); got != c.want {
			t.Errorf("%v: got %s, want %s", c.err, got, c.want)
		}
	}
}

// TestQuota exhausts a client's quota; other clients are unaffected.
func TestQuota(t *testing.T) {
	for _, c := range []struct {
		name           string
		portsPerClient int
		client         string // of the n-th mapping
		other          string
	}{
		{"one address", 0, alice, bob},
		{"a larger quota of ports", 2 * perClient, alice, bob},
		{"addresses of a /64", 0, "fd00::%x", "fd00:0:0:1::1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := rule("both", outer, "10.0.0.0/24", "fd00::/16")
			r.PortsPerClient = c.portsPerClient
			b := newBench(t)
			b.allowed = []datapath.MappingRule{r}
			b.networks["lan0"] = r.Source
			if err := b.load(); err != nil {
				t.Fatal(err)
			}
			for i := range perClient + 1 {
				b.now += time.Second // below the rate
				want := fmt.Sprintf("success 86400 203.0.113.1:%d", 40001+i)
				if i == perClient {
					want = "user-ex-quota 30"
				}
				client := strings.Replace(c.client, "%x", fmt.Sprintf("%x", i+1), 1)
				if got := b.ask(client, message(client, 1, flow.UDP, uint16(i+1), 1<<20, anyPort)); got != want {
					t.Fatalf("mapping %d: got %s, want %s", i+1, got, want)
				}
			}
			if got := b.ask(c.other, message(c.other, 1, flow.UDP, 1, hour, anyPort)); got[:7] != "success" {
				t.Errorf("another client: %s", got)
			}
		})
	}
}

// TestTakenAway renews a mapping that the datapath has lost and the server still lists,
// as after an Apply that was taken back. The datapath's epoch lies after the server's
// clock meanwhile.
func TestTakenAway(t *testing.T) {
	b := newBench(t)
	b.ask(alice, plain(hour))
	clear(b.table.mappings)
	b.epoch = b.now + time.Second
	if got, want := b.ask(alice, plain(hour)), "success 3600 203.0.113.1:40002"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if len(b.table.mappings) != 1 || b.clients[netip.MustParseAddr(alice)] != 1 {
		t.Errorf("%d mappings in the datapath, %v of clients, want one", len(b.table.mappings), b.clients)
	}
}

// TestComplaints checks the log lines by the frequency and duration of a datapath's refusals.
func TestComplaints(t *testing.T) {
	b := newBench(t)
	var text bytes.Buffer
	b.log = slog.New(slog.NewTextHandler(&text, nil))
	for _, step := range []struct {
		after time.Duration
		err   string
		want  int // lines so far
	}{
		{0, "TABLE_FULL", 1}, {time.Second, "TABLE_FULL", 1}, {over, "TABLE_FULL", 1}, {over, "TABLE_FULL", 1}, {0, "CLIENTS_FULL", 2},
		{time.Second, "TABLE_FULL", 2}, {2 * over, "TABLE_FULL", 3},
	} {
		b.now += step.after
		b.err = errors.New(step.err)
		b.ask(alice, plain(hour))
		if n := strings.Count(text.String(), "\n"); n != step.want {
			t.Fatalf("%d lines, want %d:\n%s", n, step.want, &text)
		}
	}
}

// TestRate sends requests without pause. Requests above the rate get no answer, and other clients are unaffected.
func TestRate(t *testing.T) {
	b := newBench(t, rule("six", "2001:db8::1", "fd00::/16"))
	answered := 0
	for range 10 * burst {
		if b.ask(alice, plain(hour)) != "silence" {
			answered++
		}
	}
	if answered != burst {
		t.Errorf("%d of a burst were answered, want %d", answered, burst)
	}
	if b.ask(bob, message(bob, 1, flow.TCP, 80, hour, anyPort)) == "silence" {
		t.Error("another client is held back too")
	}
	b.now += time.Second
	for range 10 * burst {
		if b.ask(alice, plain(hour)) != "silence" {
			answered++
		}
	}
	if answered != burst+perSecond {
		t.Errorf("%d were answered within a second, want %d", answered, burst+perSecond)
	}
	for i := range 2 * maxSources {
		b.limit.allow(netip.MustParseAddr(fmt.Sprintf("10.1.%d.%d", i>>8, i&255)), b.now)
	}
	if n := len(b.limit.conforms); n > maxSources {
		t.Errorf("%d sources are remembered, more than %d", n, maxSources)
	}
	for i := range 10 * burst {
		b.now += time.Millisecond / burst
		b.limit.allow(netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1)), b.now+time.Hour)
	}
	if b.limit.allow(netip.MustParseAddr("fd00::ffff:1"), b.now+time.Hour) {
		t.Error("a /64 has as many requests as it has addresses")
	}
}

// TestMassExpiry lets more mappings expire at once than a second takes away.
func TestMassExpiry(t *testing.T) {
	b := newBench(t)
	for i := range 2*perTick + 1 {
		m := datapath.Mapping{Rule: "office", Protocol: flow.UDP, Expires: start,
			Inside: netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i%250+2)), uint16(i+1))}
		b.table.mappings[endpoint{m.Protocol, m.Inside}] = m
	}
	if err := b.load(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{perTick + 1, 1, 0, 0} {
		if err := b.expire(); err != nil || len(b.table.mappings) != want {
			t.Fatalf("%v, %d mappings are left, want %d", err, len(b.table.mappings), want)
		}
	}
}

// FuzzAnswer checks every message: the answer is an answer, is not longer than the request or a header, and grants
// values within bounds.
func FuzzAnswer(f *testing.F) {
	f.Add(plain(hour))
	f.Add(plain(0))
	f.Add([]byte{0, 0})
	f.Add(message(alice, 1, 0, 0, 0, anyPort))
	f.Add(message(alice, 1, flow.UDP, 9, 1<<31, outer+":8080", 2, 0, 0, 0, 130, 0, 0, 1, 0, 0, 0, 0))
	f.Add(append([]byte{version, 0, 0, 0, 0, 0, 0, 0}, plain(0)[8:24]...))
	f.Fuzz(func(t *testing.T, m []byte) {
		b := newBench(t)
		sent := slices.Clone(m)
		out := b.answerMessage(m, netip.MustParseAddr(alice), "lan0", true)
		if !bytes.Equal(m, sent) {
			t.Fatal("the request was changed")
		}
		if len(m) > 0 && m[0] == natpmpVersion {
			fuzzedNATPMP(t, b, m, out)
			return
		}
		if out == nil {
			if len(m) >= minMessage && m[1] < 0x80 {
				t.Fatal("a request was not answered")
			}
			return
		}
		if len(out) < headerSize || len(out) > max(headerSize, min(len(m), maxMessage)) {
			t.Fatalf("%d bytes are answered with %d", len(m), len(out))
		}
		if out[0] != version || out[1] != m[1]|0x80 || int(out[3]) >= len(resultNames) {
			t.Fatalf("answer % x", out)
		}
		if again := b.answerMessage(out, netip.MustParseAddr(alice), "lan0", true); again != nil {
			t.Fatal("an answer was answered")
		}
		for _, x := range b.Server.Mappings() {
			if x.Inside.Addr() != netip.MustParseAddr(alice) || x.Expires < minLifetime || x.Expires > maxLifetime {
				t.Fatalf("mapped: %+v", x)
			}
		}
	})
}

// fuzzedNATPMP checks the same for NAT-PMP, with answers of up to 16 bytes.
func fuzzedNATPMP(t *testing.T, b *bench, m, out []byte) {
	if out == nil {
		if len(m) >= natpmpMapRequest && m[1] < 0x80 {
			t.Fatal("a request was not answered")
		}
		return
	}
	if len(out) < natpmpHeader || len(out) > natpmpHeader+8 || out[0] != natpmpVersion || out[1] != m[1]|0x80 || out[2] != 0 || out[3] > 5 {
		t.Fatalf("answer % x", out)
	}
	for _, x := range b.Server.Mappings() {
		if x.Inside.Addr() != netip.MustParseAddr(alice) || x.Expires == 0 || x.Expires > maxLifetime {
			t.Fatalf("mapped: %+v", x)
		}
	}
}
