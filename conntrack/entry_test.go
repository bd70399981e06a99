// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// Two messages as Linux 6.18 sent them, after the netlink header: a masqueraded
// TCP connection and an ICMP query, both with byte counters.
const (
	goldenTCP = "02000000340001801400018008000100c000020208000200c63364021c000280050001000600000006000200a19a0000" +
		"0600030000500000340002801400018008000100c633640208000200c63364011c00028005000100060000000600020000500000" +
		"06000300a19a0000080003000000019e080008000000000008000c00b4f71a8d08000b0000000001080007000006978030000480" +
		"2c0001800500010003000000050002000a000000050003000a000000060004002300000006000500230000001c0009800c000100" +
		"00000000000000020c00020000000000000000701c000a800c00010000000000000000010c000200000000000000003c"
	goldenICMP = "020000003c0001801400018008000100c000020208000200c63364022400028005000100010000000600040012340000" +
		"050005000800000005000600000000003c0002801400018008000100c633640208000200c6336401240002800500010001000000" +
		"060004001234000005000500000000000500060000000000080003000000019a080008000000000008000c003391a18008000b00" +
		"00000001080007000000001d1c0009800c00010000000000000000010c000200000000000000001c1c000a800c00010000000000" +
		"000000010c000200000000000000001c"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestDecodeGolden(t *testing.T) {
	for _, tc := range []struct {
		name, message string
		want          flow.Flow
		state         string
	}{
		{"masqueraded TCP", goldenTCP, flow.Flow{
			Original: flow.Tuple{Protocol: flow.TCP, Source: ap("192.0.2.2:41370"), Dest: ap("198.51.100.2:80")},
			Reply:    flow.Tuple{Protocol: flow.TCP, Source: ap("198.51.100.2:80"), Dest: ap("198.51.100.1:41370")},
			State:    "ESTABLISHED", Replied: true, Assured: true, Timeout: 432000 * time.Second,
			Counted: true, Packets: [2]uint64{2, 1}, Bytes: [2]uint64{112, 60}, Datapath: "kernel",
		}, "ESTABLISHED"},
		{"ICMP query", goldenICMP, flow.Flow{
			Original: flow.Tuple{Protocol: flow.ICMP, Source: ap("192.0.2.2:4660"), Dest: ap("198.51.100.2:4660")},
			Reply:    flow.Tuple{Protocol: flow.ICMP, Source: ap("198.51.100.2:4660"), Dest: ap("198.51.100.1:4660")},
			Replied:  true, Timeout: 29 * time.Second,
			Counted: true, Packets: [2]uint64{1, 1}, Bytes: [2]uint64{28, 28}, Datapath: "kernel",
		}, "REPLIED"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var e Entry
			if err := e.decode(unhex(t, tc.message)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, e.Flow(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Errorf("flow (-want +got):\n%s", diff)
			}
			if e.StateName() != tc.state {
				t.Errorf("state %s, want %s", e.StateName(), tc.state)
			}
			if !e.SourceTranslated() || e.DestTranslated() || e.Status&SourceNAT == 0 {
				t.Errorf("source translation is not seen: %+v", e)
			}
		})
	}
}

func TestDecodeTruncated(t *testing.T) {
	whole := unhex(t, goldenTCP)
	var e Entry
	refused := 0
	for n := range whole {
		if e.decode(whole[:n]) != nil {
			refused++
		}
	}
	// Cut between two attributes a message is shorter, not broken: that happens
	// at the ten borders of the outermost attributes.
	if refused < len(whole)-20 {
		t.Errorf("%d of %d cuts were noticed", refused, len(whole))
	}
}

func TestEvictable(t *testing.T) {
	for _, tc := range []struct {
		name string
		e    Entry
		want bool
	}{
		{"established", Entry{Protocol: flow.TCP, State: uint8(TCPEstablished), Status: Assured}, false},
		{"handshake", Entry{Protocol: flow.TCP, State: uint8(TCPSynSent)}, true},
		{"time wait", Entry{Protocol: flow.TCP, State: uint8(TCPTimeWait), Status: Assured}, true},
		{"udp stream", Entry{Protocol: flow.UDP, Status: Assured | SeenReply}, false},
		{"udp question", Entry{Protocol: flow.UDP}, true},
		{"sctp shutdown", Entry{Protocol: flow.SCTP, State: 5, Status: Assured}, true},
	} {
		if got := tc.e.Evictable(); got != tc.want {
			t.Errorf("%s: evictable %v, want %v", tc.name, got, tc.want)
		}
	}
}

// TestTranslated: a query identifier that source NAT changed is no other destination,
// a port that DNAT changed is.
func TestTranslated(t *testing.T) {
	a, b, c := AddrOf(ap("192.0.2.2:0").Addr()), AddrOf(ap("198.51.100.2:0").Addr()), AddrOf(ap("203.0.113.1:0").Addr())
	for _, tc := range []struct {
		name         string
		e            Entry
		source, dest bool
		backends     int
	}{
		{"ping, masqueraded with another identifier", Entry{Protocol: flow.ICMP,
			Original: Tuple{Source: a, Dest: b, SourcePort: 7, DestPort: 7}, Reply: Tuple{Source: b, Dest: c, SourcePort: 9, DestPort: 9}}, true, false, 0},
		{"the host's own ping, with another identifier", Entry{Protocol: flow.ICMPv6,
			Original: Tuple{Source: a, Dest: b, SourcePort: 7, DestPort: 7}, Reply: Tuple{Source: b, Dest: a, SourcePort: 9, DestPort: 9}}, true, false, 0},
		{"ping by DNAT", Entry{Protocol: flow.ICMP,
			Original: Tuple{Source: a, Dest: b, SourcePort: 7, DestPort: 7}, Reply: Tuple{Source: c, Dest: a, SourcePort: 7, DestPort: 7}}, false, true, 1},
		{"another port", Entry{Protocol: flow.UDP,
			Original: Tuple{Source: a, Dest: b, SourcePort: 7, DestPort: 7}, Reply: Tuple{Source: b, Dest: a, SourcePort: 9, DestPort: 7}}, false, true, 1},
		{"a helper's own connection", Entry{Protocol: flow.UDP, Status: Expected,
			Original: Tuple{Source: a, Dest: b, SourcePort: 7, DestPort: 7}, Reply: Tuple{Source: c, Dest: a, SourcePort: 7, DestPort: 7}}, false, true, 0},
	} {
		f := tc.e.Flow()
		if tc.e.SourceTranslated() != tc.source || tc.e.DestTranslated() != tc.dest || f.SourceTranslated() != tc.source || f.DestTranslated() != tc.dest {
			t.Errorf("%s: source %v %v, destination %v %v, want %v and %v", tc.name,
				tc.e.SourceTranslated(), f.SourceTranslated(), tc.e.DestTranslated(), f.DestTranslated(), tc.source, tc.dest)
		}
		s := NewSummary(ByBackend)
		s.Add(&tc.e)
		if got := s.Backends(0); len(got) != tc.backends {
			t.Errorf("%s: backends %v, want %d", tc.name, got, tc.backends)
		}
	}
}

func TestFlowRoundTrip(t *testing.T) {
	var e, back Entry
	if err := e.decode(unhex(t, goldenTCP)); err != nil {
		t.Fatal(err)
	}
	f := e.Flow()
	back.SetFlow(&f)
	if got := back.Flow(); got != f {
		t.Errorf("round trip: %+v, want %+v", got, f)
	}
	if back.Family != unix.AF_INET || !back.Original.Source.Is4() {
		t.Errorf("family %d of an IPv4 flow", back.Family)
	}
}

// FuzzDecode checks that no input causes a panic, and that the tuples of an accepted message survive encoding and
// decoding.
func FuzzDecode(f *testing.F) {
	f.Add(unhex(f, goldenTCP))
	f.Add(unhex(f, goldenICMP))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, body []byte) {
		var e, again Entry
		if e.decode(body) != nil {
			return
		}
		e.Flow()
		NewSummary(BySource | ByDest | ByService | BySNATPort | ByBackend).Add(&e)
		if e.Family != unix.AF_INET && e.Family != unix.AF_INET6 {
			return
		}
		if e.Family == unix.AF_INET && (!e.Original.Source.Is4() || !e.Original.Dest.Is4() || !e.Reply.Source.Is4() || !e.Reply.Dest.Is4()) {
			return // a message with attributes of another family
		}
		c := &Conn{}
		if err := again.decode(c.appendEntry(nil, &e)[headerLen:]); err != nil {
			t.Fatalf("own message: %v", err)
		}
		if e.Protocol == flow.TCP && again.State != e.State {
			t.Errorf("state %d became %d", e.State, again.State)
		}
		if again.Original.Source != e.Original.Source || again.Reply.Dest != e.Reply.Dest || again.Zone != e.Zone || again.Protocol != e.Protocol {
			t.Errorf("%+v became %+v", e, again)
		}
	})
}

func TestParseProcStat(t *testing.T) {
	const text = `entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error  expect_new expect_create expect_delete search_restart
000003e8  00000001 0000d750 00000000 00000022 00000000 00000000 00000003 00000000 00000320 00003955 00000016 00000000  00000000 00000000 00000000 00000007
000003e8  00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000001 00000000 00000000  00000000 00000000 00000000 00000000
`
	list, err := parseProcStat(text)
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	want := Counters{CPU: -1, ClashResolve: 1, Found: 55121, Invalid: 34, ChainTooLong: 3, InsertFailed: 800,
		Drop: 14678, EarlyDrop: 22, SearchRestart: 7}
	if got := Total(list); got != want {
		t.Errorf("total %+v, want %+v", got, want)
	}
	before := Counters{Drop: 0xfffffff0}
	if d := (Counters{Drop: 4}).Sub(before); d.Drop != 20 {
		t.Errorf("difference across the wrap is %d, want 20", d.Drop)
	}
	if _, err := parseProcStat("entries drop\nxyz nonsense\n"); err == nil {
		t.Error("a line that is no numbers was accepted")
	}
}

func TestSummary(t *testing.T) {
	s := NewSummary(BySource | ByDest | ByService | BySNATPort | ByBackend)
	s.Enter("blue", 432000)
	for i := range 1000 {
		e := masqueraded(i, 1)
		e.Original.Source = Addr{10: 0xff, 11: 0xff, 12: 10, 15: byte(i % 4)}
		if i%4 == 3 {
			e.State = uint8(TCPTimeWait)
		}
		if i < 100 {
			e.Status, e.State, e.Timeout = 0, uint8(TCPSynSent), 100
		}
		s.Add(&e)
	}
	s.Enter("red", 432000)
	ask := Entry{Protocol: flow.UDP, Family: unix.AF_INET, Timeout: 20,
		Original: Tuple{Source: mappedPrefix, Dest: mappedPrefix, DestPort: 53}, Reply: Tuple{Source: mappedPrefix, Dest: mappedPrefix, SourcePort: 5353}}
	s.Add(&ask)
	if want := (Count{Entries: 1001, Unassured: 101, Closing: 225}); s.Total != want {
		t.Errorf("total %+v, want %+v", s.Total, want)
	}
	if top := s.Sources(1); len(top) != 1 || top[0].Entries != 250 || top[0].Key != "10.0.0.0" {
		t.Errorf("top source %+v", top)
	}
	states := s.States()
	if len(states) != 4 || states[0].Key != "tcp ESTABLISHED" || states[0].Entries != 675 || states[3].Key != "udp UNREPLIED" {
		t.Errorf("states %+v", states)
	}
	occ := s.Occupancies(2, 1000)
	if len(occ) != 2 || occ[0].Used != 250 || occ[0].Share() != 0.25 || occ[0].Remote != ap("198.51.0.0:443") ||
		occ[0].Range != (flow.Ports{First: 1024, Last: 1273}) {
		t.Errorf("occupancies %+v", occ)
	}
	if o, found := s.Fullest(func(netip.Addr) uint32 { return 500 }); !found || o.Used != 250 || o.Share() != 0.5 || o.Range.First != 1024 {
		t.Errorf("fullest %+v", o)
	}
	if o, found := s.Fullest(func(netip.Addr) uint32 { return 0 }); found {
		t.Errorf("fullest of none is %+v", o)
	}
	if ns := s.Namespaces(0); len(ns) != 2 || ns[0].Key != "blue" || ns[1].Entries != 1 {
		t.Errorf("namespaces %+v", ns)
	}
	if b := s.Backends(0); len(b) != 1 || b[0].Key != "udp 0.0.0.0:5353" {
		t.Errorf("backends %+v", b)
	}
	if _, day, all := s.IdleEstablished(); day != 675 || all != 675 {
		t.Errorf("idle for a day: %d of %d", day, all)
	}
	// Pings of many identifiers are one service, and share the identifiers of one address.
	pings := NewSummary(ByService | BySNATPort)
	for id := range uint16(30) {
		ping := Entry{Protocol: flow.ICMP, Original: Tuple{Source: mappedPrefix, SourcePort: id, Dest: mappedPrefix, DestPort: id},
			Reply: Tuple{Source: mappedPrefix, SourcePort: 100 + id, Dest: AddrOf(netip.MustParseAddr("203.0.113.9")), DestPort: 100 + id}}
		pings.Add(&ping)
	}
	if o, services := pings.Occupancies(0, 1000), pings.Services(0); len(o) != 1 || o[0].Used != 30 || o[0].Range != (flow.Ports{First: 100, Last: 129}) ||
		len(services) != 1 || services[0].Entries != 30 {
		t.Errorf("pings: occupancies %+v, services %+v", o, services)
	}
	free := s.FreeFirst()
	if len(free) != 3 || free[0].Entries != 225 || free[1].Entries != 100 || free[2].Entries != 675 {
		t.Errorf("free first %+v", free)
	}
	if ages := s.Ages(); len(ages) != 3 || ages[0].Key != "10-30s" {
		t.Errorf("ages %+v", ages)
	}
}

// TestServicesWithoutPorts: pings of one host are one service, whatever their identifiers.
func TestServicesWithoutPorts(t *testing.T) {
	s := NewSummary(ByService)
	for id := range uint16(3) {
		s.Add(&Entry{Family: unix.AF_INET, Protocol: flow.ICMP, Original: Tuple{Dest: AddrOf(netip.MustParseAddr("10.0.0.2")), SourcePort: id, DestPort: id}})
	}
	if list := s.Services(0); len(list) != 1 || list[0].Key != "icmp 10.0.0.2" || list[0].Entries != 3 {
		t.Errorf("%+v", list)
	}
}

func TestTallyOrder(t *testing.T) {
	var small, large tally[int]
	for i := range 5000 {
		n := uint32((i * 7919) % 5000)
		small.record(i).Entries, large.record(i).Entries = n, n
	}
	short, long := small.largestPositions(100), large.largestPositions(0)
	if len(short) != 100 || len(long) != 5000 {
		t.Fatalf("%d and %d positions", len(short), len(long))
	}
	for i, p := range short {
		if p != long[i] {
			t.Fatalf("rank %d: %d by insertion, %d by sorting", i, p, long[i])
		}
	}
	if small.counts[short[0]].Entries != 4999 {
		t.Errorf("largest is %d", small.counts[short[0]].Entries)
	}
	var empty tally[int]
	if got := empty.largestPositions(5); len(got) != 0 {
		t.Errorf("empty tally ranks %v", got)
	}
}

// sourceOf is a Source over a list.
type sourceOf []flow.Flow

func (s sourceOf) Name() string { return "ebpf" }

func (s sourceOf) Flows(_ context.Context, visit func(*flow.Flow) error) error {
	for i := range s {
		if err := visit(&s[i]); err != nil {
			return err
		}
	}
	return nil
}

func TestAddSource(t *testing.T) {
	var e Entry
	if err := e.decode(unhex(t, goldenTCP)); err != nil {
		t.Fatal(err)
	}
	f := e.Flow()
	other := f
	other.State = "TIME_WAIT"
	s := NewSummary(BySNATPort)
	if err := s.AddSource(context.Background(), sourceOf{f, other}, &Filter{State: "TIME_WAIT"}); err != nil {
		t.Fatal(err)
	}
	if s.Total != (Count{Entries: 1, Closing: 1}) || s.Translated != [4]uint32{0, 1, 0, 0} {
		t.Errorf("summary %+v %v", s.Total, s.Translated)
	}
}

func TestUnseen(t *testing.T) {
	got := Unseen(0, []error{
		fmt.Errorf("namespace a: enter: %w", unix.EPERM), fmt.Errorf("namespace b: %w", unix.EACCES),
		fmt.Errorf("namespace gone: %w", unix.ENOENT), fmt.Errorf("namespace c: %w", unix.EIO)})
	want := []string{"namespace c: input/output error", "2 network namespaces may not be entered: run as root of the host"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sentences (-want +got):\n%s", diff)
	}
}
