// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// alone is one namespace without links: entries are made by netlink. Tests make
// few, because others may have lowered the host-wide limit to 1,000.
func alone(t testing.TB) netdev.Namespace {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "conntrack", Nodes: []lab.NodeSpec{{Name: "alone"}}})
	ns, err := netdev.NamespaceAt(l.Node("alone").Path())
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func openIn(t testing.TB, ns netdev.Namespace) *Conn {
	t.Helper()
	c, err := OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// masqueraded makes the i-th of a set of distinct TCP connections: 4,096 clients,
// the given number of servers, four public addresses.
func masqueraded(i, servers int) Entry {
	client := netip.AddrFrom4([4]byte{10, 0, byte(i % 4096 >> 8), byte(i)})
	public := netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i%4)})
	server := netip.AddrFrom4([4]byte{198, 51, byte(i / 4 % servers >> 8), byte(i / 4 % servers)})
	return Entry{
		Family: unix.AF_INET, Protocol: flow.TCP, State: uint8(TCPEstablished), Timeout: 3600,
		Status: Assured | SeenReply,
		Original: Tuple{Source: AddrOf(client), Dest: AddrOf(server),
			SourcePort: uint16(1024 + i/4096), DestPort: 443},
		Reply: Tuple{Source: AddrOf(server), Dest: AddrOf(public),
			SourcePort: 443, DestPort: uint16(1024 + i/(4*servers))},
	}
}

func TestInsertDumpDelete(t *testing.T) {
	ns := alone(t)
	c := openIn(t, ns)
	ctx := context.Background()
	const n = 400
	var want []Entry
	for i := range n {
		want = append(want, masqueraded(i, 200))
	}
	six := Entry{Family: unix.AF_INET6, Protocol: flow.UDP, Timeout: 59, Mark: 7, Zone: 3,
		Original: Tuple{Source: AddrOf(netip.MustParseAddr("2001:db8::2")), Dest: AddrOf(netip.MustParseAddr("2001:db8:1::1")), SourcePort: 4000, DestPort: 53},
		Reply:    Tuple{Source: AddrOf(netip.MustParseAddr("2001:db8:1::1")), Dest: AddrOf(netip.MustParseAddr("2001:db8::2")), SourcePort: 53, DestPort: 4000}}
	want = append(want, six)
	if made, err := c.Insert(ctx, want); err != nil || made != len(want) {
		t.Fatalf("Insert made %d of %d: %v", made, len(want), err)
	}
	if made, err := c.Insert(ctx, want[:3]); err != nil || made != 0 {
		t.Errorf("Insert of entries that exist made %d: %v", made, err)
	}
	type key struct{ o, r Tuple }
	got := map[key]Entry{}
	if err := c.Dump(ctx, nil, func(e *Entry) error { got[key{e.Original, e.Reply}] = *e; return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Errorf("dump shows %d entries, want %d", len(got), len(want))
	}
	for _, w := range want {
		g, ok := got[key{w.Original, w.Reply}]
		if !ok {
			t.Fatalf("entry %v is missing", w.Flow().Original)
		}
		if g.State != w.State || g.Mark != w.Mark || g.Zone != w.Zone || g.Family != w.Family ||
			g.Status&(Assured|SeenReply) != w.Status || g.Timeout > w.Timeout || g.ID == 0 {
			t.Fatalf("entry reads back as %+v, want %+v", g, w)
		}
	}
	testEntries(t, c, ns, uint32(len(want)))
	testFilters(t, c)
	testDelete(t, c, ns, len(want))
}

func testEntries(t *testing.T, c *Conn, ns netdev.Namespace, want uint32) {
	t.Helper()
	count, limit, err := c.Entries(context.Background())
	if err != nil || count != want || limit == 0 {
		t.Errorf("Entries = %d of %d, %v; want %d", count, limit, err, want)
	}
	l, err := ReadLimits(ns)
	if err != nil || l.Count != want || l.Max != limit || l.Buckets == 0 {
		t.Errorf("ReadLimits = %+v, %v; want count %d and max %d", l, err, want, limit)
	}
	if host, err := ReadLimits(netdev.Namespace{}); err != nil || host.Max != limit {
		t.Errorf("the caller's own namespace answers %+v, %v", host, err)
	}
}

func testFilters(t *testing.T, c *Conn) {
	t.Helper()
	for _, tc := range []struct {
		name string
		f    Filter
		want int
	}{
		{"zone", Filter{Zone: 3, HasZone: true}, 1},
		{"mark", Filter{Mark: 7, MarkMask: 0xff}, 1},
		{"mark beyond the mask", Filter{Mark: 0xf07, MarkMask: 0xff}, 1},
		{"assured", Filter{Status: Assured}, 400},
		{"not assured", Filter{StatusMask: Assured}, 1},
		{"source", Filter{Source: netip.MustParsePrefix("10.0.0.1/32")}, 1},
		{"source net", Filter{Source: netip.MustParsePrefix("10.0.0.32/27")}, 32},
		{"source six", Filter{Source: netip.MustParsePrefix("2001:db8::/32")}, 1},
		{"every six", Filter{Source: netip.MustParsePrefix("::/0")}, 1},
		{"source six alone", Filter{Source: netip.MustParsePrefix("2001:db8::2/128")}, 1},
		{"dest six with port", Filter{Dest: netip.MustParsePrefix("2001:db8:1::1/128"), Protocol: flow.UDP, DestPort: flow.Ports{First: 53, Last: 53}}, 1},
		{"six with port", Filter{Family: unix.AF_INET6, Protocol: flow.UDP, DestPort: flow.Ports{First: 53, Last: 53}}, 1},
		{"another six", Filter{Source: netip.MustParsePrefix("2001:db8::3/128")}, 0},
		{"source with port", Filter{Source: netip.MustParsePrefix("10.0.0.1/32"), Protocol: flow.TCP, SourcePort: flow.Ports{First: 1024, Last: 1024}}, 1},
		{"source with another port", Filter{Source: netip.MustParsePrefix("10.0.0.1/32"), Protocol: flow.TCP, SourcePort: flow.Ports{First: 1025, Last: 1025}}, 0},
		{"public", Filter{TranslatedSource: netip.MustParsePrefix("203.0.113.2/32")}, 100},
		{"port of a protocol", Filter{Protocol: flow.TCP, DestPort: flow.Ports{First: 443, Last: 443}}, 400},
		{"port", Filter{DestPort: flow.Ports{First: 50, Last: 60}}, 1},
		{"protocol", Filter{Protocol: flow.UDP}, 1},
		{"state", Filter{State: "established"}, 400},
		{"unreplied", Filter{State: "unreplied"}, 1},
		{"remaining", Filter{RemainingAtMost: time.Minute}, 1},
		{"translated", Filter{Translated: true}, 400},
		{"nothing", Filter{Protocol: flow.ICMP}, 0},
	} {
		n, local := 0, 0
		if err := c.Dump(context.Background(), &tc.f, func(*Entry) error { n++; return nil }); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		if err := c.Dump(context.Background(), nil, func(e *Entry) error {
			if tc.f.Matches(e) {
				local++
			}
			return nil
		}); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		if n != tc.want || local != tc.want {
			t.Errorf("filter %s: dump shows %d, matching here %d; want %d", tc.name, n, local, tc.want)
		}
	}
	bad := &Filter{State: "HALF"}
	if err := c.Dump(context.Background(), bad, func(*Entry) error { return nil }); err == nil {
		t.Error("an unknown state was accepted")
	}
}

func testDelete(t *testing.T, c *Conn, ns netdev.Namespace, all int) {
	t.Helper()
	ctx := context.Background()
	var one Entry
	stop := errors.New("stop")
	if err := openIn(t, ns).Dump(ctx, nil, func(e *Entry) error { one = *e; return stop }); !errors.Is(err, stop) {
		t.Fatalf("the visitor's error is lost: %v", err)
	}
	wrong := one
	wrong.ID++
	if gone, err := c.Delete(ctx, &wrong); err != nil || gone {
		t.Errorf("an entry with another ID was deleted: %v", err)
	}
	if gone, err := c.Delete(ctx, &one); err != nil || !gone {
		t.Errorf("Delete: %v, %v", gone, err)
	}
	if gone, err := c.Delete(ctx, &one); err != nil || gone {
		t.Errorf("second Delete: %v, %v", gone, err)
	}
	if _, err := c.DeleteAll(ctx, &Filter{}); err == nil {
		t.Error("an empty filter would have emptied the table")
	}
	n, err := c.DeleteAll(ctx, &Filter{Protocol: flow.TCP, Source: netip.MustParsePrefix("10.0.0.0/8")})
	if err != nil || n < all-2 {
		t.Errorf("DeleteAll: %d of %d, %v", n, all, err)
	}
	if count, _, _ := c.Entries(ctx); int(count) != all-1-n {
		t.Errorf("%d entries left, want %d", count, all-1-n)
	}
}

func TestEvents(t *testing.T) {
	ns := alone(t)
	c := openIn(t, ns)
	l, err := Listen(ns, New|Destroy)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	e := masqueraded(1, 1)
	if _, err := c.Insert(ctx, []Entry{e}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Delete(ctx, &e); err != nil {
		t.Fatal(err)
	}
	var got []Group
	for len(got) < 2 {
		if _, err := l.Read(ctx, func(ev Group, x *Entry) error {
			if x.Original != e.Original {
				t.Errorf("event tells %v", x.Flow().Original)
			}
			got = append(got, ev)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if got[0] != New || got[1] != Destroy {
		t.Errorf("events %v, want New and Destroy", got)
	}
	short, stop := context.WithCancel(ctx)
	stop()
	if _, err := l.Read(short, func(Group, *Entry) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled Read answers %v", err)
	}
}

// TestEventsLost fills a listener's buffer and expects a count of lost events.
func TestEventsLost(t *testing.T) {
	ns := alone(t)
	c := openIn(t, ns)
	l, err := Listen(ns, New)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.conn.control(func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)
	}); err != nil {
		t.Fatal(err)
	}
	var entries []Entry
	for i := range 500 {
		entries = append(entries, masqueraded(i, 1))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := c.Insert(ctx, entries); err != nil {
		t.Fatal(err)
	}
	seen, lost := 0, uint32(0)
	for seen+int(lost) < len(entries) {
		n, err := l.Read(ctx, func(Group, *Entry) error { seen++; return nil })
		if err != nil {
			t.Fatalf("after %d events seen and %d lost: %v", seen, lost, err)
		}
		lost += n
	}
	if lost == 0 || seen+int(lost) != len(entries) {
		t.Errorf("%d events seen and %d lost of %d", seen, lost, len(entries))
	}
}

// TestRealFlows masquerades real TCP, UDP and ICMP traffic and reads it back.
func TestRealFlows(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "conntrack",
		Nodes: []lab.NodeSpec{
			{Name: "client", Routes: []lab.Route{{To: "default", Via: "192.0.2.1"}}},
			{Name: "gateway", Forward: true},
			{Name: "server"},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"192.0.2.2/24"}},
				B: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"192.0.2.1/24"}}},
			{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24"}},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"198.51.100.2/24"}}},
		}})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	gw := l.Node("gateway")
	nft := gw.Command(ctx, "nft", "-f", "-")
	nft.Stdin = strings.NewReader("table ip t {\n chain p {\n type nat hook postrouting priority 100\n oifname wan0 masquerade\n }\n}\n")
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	if err := gw.Sysctl("net.netfilter.nf_conntrack_acct", "1"); err != nil {
		t.Fatal(err)
	}
	ln, err := l.Node("server").Listen("198.51.100.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var port uint16
	if err := l.Node("client").Do(func() error {
		conn, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(conn) })
		if err := unix.Connect(conn, &unix.SockaddrInet4{Port: 80, Addr: [4]byte{198, 51, 100, 2}}); err != nil {
			return err
		}
		local, err := unix.Getsockname(conn)
		if err == nil {
			port = uint16(local.(*unix.SockaddrInet4).Port)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := l.Node("client").Do(func() error { return echo([4]byte{198, 51, 100, 2}) }); err != nil {
		t.Fatalf("icmp echo: %v", err)
	}
	ns, err := netdev.NamespaceAt(gw.Path())
	if err != nil {
		t.Fatal(err)
	}
	checkRealFlows(t, ns, port)
}

// echo sends one ICMP echo request and waits for an answer.
func echo(to [4]byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
		return err
	}
	// type 8, code 0, checksum, identifier 0x1234, sequence 1
	request := []byte{8, 0, 0xe5, 0xca, 0x12, 0x34, 0, 1}
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrInet4{Addr: to}); err != nil {
		return err
	}
	_, _, err = unix.Recvfrom(fd, make([]byte, 1500), 0)
	return err
}

func checkRealFlows(t *testing.T, ns netdev.Namespace, port uint16) {
	t.Helper()
	c := openIn(t, ns)
	found := map[flow.Protocol]flow.Flow{}
	var entry Entry
	// The client knows that it is connected before the gateway has seen its ACK.
	labtest.Eventually(t, time.Minute, "an established connection", func() error {
		if err := c.Dump(context.Background(), nil, func(e *Entry) error {
			found[e.Protocol] = e.Flow()
			if e.Protocol == flow.TCP {
				entry = *e
			}
			return nil
		}); err != nil {
			return err
		}
		if state := found[flow.TCP].State; state != "ESTABLISHED" {
			return fmt.Errorf("it is %s", state)
		}
		return nil
	})
	tcp := found[flow.TCP]
	if tcp.Original.String() != fmt.Sprintf("tcp 192.0.2.2:%d -> 198.51.100.2:80", port) ||
		tcp.Reply.String() != fmt.Sprintf("tcp 198.51.100.2:80 -> 198.51.100.1:%d", port) ||
		tcp.State != "ESTABLISHED" || !tcp.Assured || !tcp.Counted || tcp.Packets[0] < 2 || tcp.Bytes[1] < 60 ||
		!tcp.SourceTranslated() || tcp.DestTranslated() {
		t.Errorf("tcp flow reads %+v", tcp)
	}
	if entry.Status&SourceNAT == 0 || entry.Evictable() {
		t.Errorf("tcp entry has status %#x", entry.Status)
	}
	icmp := found[flow.ICMP]
	if !icmp.Replied || icmp.Original.Source.Port() == 0 || icmp.Original.Source.Port() != icmp.Original.Dest.Port() {
		t.Errorf("icmp flow reads %+v", icmp)
	}
	for _, e := range []Entry{entry} {
		if gone, err := c.Delete(context.Background(), &e); err != nil || !gone {
			t.Errorf("delete of %v: %v, %v", e.Flow().Original, gone, err)
		}
	}
	if n, err := c.DeleteAll(context.Background(), &Filter{Protocol: flow.ICMP}); err != nil || n != 1 {
		t.Errorf("delete of the icmp entry: %d, %v", n, err)
	}
	var before []Counters
	before, err := ReadPerCPU(context.Background(), ns)
	if err != nil || len(before) == 0 {
		t.Fatalf("ReadPerCPU: %v, %v", before, err)
	}
}

func TestNamespacesAreListedOnce(t *testing.T) {
	ns := alone(t)
	list, _ := netdev.Namespaces()
	seen := map[uint64]int{}
	for _, n := range list {
		seen[n.Inode]++
	}
	if seen[ns.Inode] != 1 {
		t.Errorf("namespace %d listed %d times among %v", ns.Inode, seen[ns.Inode], list)
	}
	for inode, n := range seen {
		if n > 1 {
			t.Errorf("namespace %d listed %d times", inode, n)
		}
	}
	var inside string
	if err := ns.Do(func() (err error) {
		inside, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	}); err != nil || inside != "net:["+strconv.FormatUint(ns.Inode, 10)+"]" {
		t.Errorf("Do ran in %s: %v", inside, err)
	}
	if _, err := netdev.NamespaceAt("no-such-namespace"); err == nil {
		t.Error("a namespace that is not there was found")
	}
	for _, path := range []string{"/etc/passwd", "/proc/self/ns/mnt"} {
		if _, err := netdev.NamespaceAt(path); err == nil {
			t.Errorf("%s was taken for a network namespace", path)
		}
	}
	// The name, or the process id, was given to another one meanwhile.
	reused := ns
	reused.Inode++
	if err := reused.Do(func() error { return nil }); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Do entered another namespace of the same name: %v", err)
	}
}

func TestLook(t *testing.T) {
	ns := alone(t)
	c := openIn(t, ns)
	var entries []Entry
	for i := range 200 {
		e := masqueraded(i, 2)
		if i >= 150 {
			e.State = uint8(TCPTimeWait)
		}
		entries = append(entries, e)
	}
	ctx := context.Background()
	if _, err := c.Insert(ctx, entries[:100]); err != nil {
		t.Fatal(err)
	}
	// The second half is made while the table is looked at, before the last count.
	more := sourceFunc(func() error {
		_, err := c.Insert(ctx, entries[100:])
		return err
	})
	s, err := Look(ctx, Ask{Namespaces: []netdev.Namespace{ns}, Dimensions: BySNATPort, Window: time.Millisecond,
		Filter: &Filter{Source: netip.MustParsePrefix("10.0.0.0/27")}, Sources: []Source{more}})
	if err != nil {
		t.Fatal(err)
	}
	f := s.Fills[0]
	if f.Count != 200 || f.Held != 100 || s.Summary.Total.Entries != 32 {
		t.Errorf("count %d, held %d, summed %d; want 200, 100, 32", f.Count, f.Held, s.Summary.Total.Entries)
	}
	if f.Growth <= 0 || f.TimeToFull() <= 0 || f.Effective() >= f.Fill() {
		t.Errorf("growth %g, full in %v, effective %g of %g", f.Growth, f.TimeToFull(), f.Effective(), f.Fill())
	}
	if f.Counted.Insert != 0 && f.Counted.Insert != 100 {
		t.Errorf("counted %+v", f.Counted)
	}
	counted, err := Look(ctx, Ask{Namespaces: []netdev.Namespace{ns}, CountOnly: true, Window: time.Millisecond})
	if err != nil || counted.Summary != nil || counted.Fills[0].Count != 200 || counted.Fills[0].TimeToFull() >= 0 {
		t.Errorf("counting only: %+v, %v", counted, err)
	}
}

// sourceFunc is a Source without flows that does something when it is read.
type sourceFunc func() error

func (sourceFunc) Name() string { return "test" }

func (f sourceFunc) Flows(context.Context, func(*flow.Flow) error) error { return f() }
