// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/packet"
)

// The full-speed test is: go test ./datapath/ebpf -run TestSYNFlood -flood 30s -flood-rate 0
var (
	floodTime = flag.Duration("flood", time.Second, "how long each flood of SYNs lasts")
	// At full speed, connections mostly wait for a CPU, and each lost packet costs them a second.
	floodRate = flag.Float64("flood-rate", 100_000, "SYNs a second; 0: as fast as the generator makes them")
)

// flood is a kind of service or rule under SYNs with as many sources as possible.
type flood struct {
	name, yaml   string
	topology     func() lab.Topology
	from, server string // nodes
	dial         string
	source       load.Range
	// reason of refused SYNs once no more state is kept for them; "" if they pass without state
	refused string
	// new connections succeed during the flood
	opens bool
}

// The sources do not exist: replies of a server are lost.
var floods = []flood{
	{name: "dnat by hash", topology: lab.Balancer, from: "client", server: "s1", dial: "192.0.2.10:80", source: spoofed, opens: true,
		yaml: `services: [{name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2, port: 8080}]}]`},
	{name: "dnat in turn", topology: lab.Balancer, from: "client", server: "s1", dial: "192.0.2.10:80", source: spoofed, opens: true,
		yaml: `services: [{name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}]}]`},
	{name: "fullnat", topology: lab.Balancer, from: "client", server: "s1", dial: "192.0.2.10:80", source: spoofed, refused: "half-open-full",
		yaml: `services: [{name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}]}]`},
	{name: "fullnat, cookies", topology: lab.Balancer, from: "client", server: "s1", dial: "192.0.2.10:80", source: spoofed, refused: "cookie", opens: true,
		yaml: `services: [{name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], scheduler: rr, syn-cookies: true, backends: [{name: a, address: 10.0.2.2, port: 8080}]}]`},
	{name: "fullnat, table full", topology: lab.Balancer, from: "client", server: "s1", dial: "192.0.2.10:80", source: spoofed, refused: "table-full",
		yaml: `
tables: {flows: 4096, flows6: 4096, half-open: 1000000}
services: [{name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}]}]`},
	{name: "snat", topology: lab.Office, from: "pc", server: "outside", dial: "203.0.113.10:8080", refused: "half-open-full",
		source: load.Range{First: netip.MustParseAddr("10.1.10.100"), Count: 100, Ports: flow.Ports{First: 1024, Last: 65535}},
		yaml:   `nat: [{name: office, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}]`},
}

var spoofed = load.Range{First: netip.MustParseAddr("198.18.0.0"), Count: 1 << 14, Ports: flow.Ports{First: 1024, Last: 65535}}

// TestSYNFlood opens connections and sends a flood of SYNs. No connection may fail during the flood or
// afterwards. New connections succeed if no state is kept for a SYN.
func TestSYNFlood(t *testing.T) {
	for _, c := range floods {
		t.Run(c.name, func(t *testing.T) {
			l := labFor(t, c.topology(), config.AttachXDP)
			mirror(t, l.Node(c.server), ":8080")
			yaml := c.yaml
			if c.refused != "table-full" {
				yaml += "\ntables: {flows: 4096, flows6: 4096}"
			}
			d := gateway(t, l.Node("gateway"), config.AttachXDP, yaml)
			var conns []net.Conn
			for range 100 {
				conns = append(conns, transfer(t, l.Node(c.from), c.dial))
			}
			all := func(when string) {
				t.Helper()
				for i, conn := range conns {
					if err := patientTrip(conn); err != nil {
						t.Fatalf("connection %d of %d, %s: %v\n%s", i, len(conns), when, err, describeReasons(d))
					}
				}
			}
			all("before")
			before := flowsOf(t, d)
			sent, end := c.begin(t, l)
			deadline := time.Now().Add(*floodTime)
			for turn := 0; time.Now().Before(deadline); turn++ {
				all("under SYNs")
				if c.opens && turn == 0 {
					if err := patientTrip(transfer(t, l.Node(c.from), c.dial)); err != nil {
						t.Errorf("a new connection under SYNs: %v", err)
					}
				}
			}
			end()
			all("afterwards")
			after := flowsOf(t, d)
			for tuple, f := range before {
				if g, ok := after[tuple]; !ok || g.Reply != f.Reply || g.Backend != f.Backend || g.State != f.State {
					t.Errorf("flow %v was %+v, is %+v", tuple, f, g)
				}
			}
			if len(before) != len(conns) {
				t.Errorf("%d flows of %d connections", len(before), len(conns))
			}
			if c.refused != "" && counted(t, d, c.refused) == 0 {
				t.Errorf("no SYN was refused as %s: the flood was none. %s", c.refused, describeReasons(d))
			}
			t.Logf("%d SYNs, %d flows: %s", sent(), len(after), describeReasons(d))
		})
	}
}

// begin sends SYNs until end is called.
func (c flood) begin(t *testing.T, l *lab.Lab) (sent func() uint64, end func()) {
	t.Helper()
	target := netip.MustParseAddrPort(c.dial)
	sender, err := load.NewSender(l.Node(c.from), load.PacketSpec{
		Source: c.source, Dest: load.Range{First: target.Addr(), Ports: flow.Ports{First: target.Port(), Last: target.Port()}},
		Protocol: flow.TCP, Flags: "syn", Interface: "eth0", Rate: *floodRate,
	}, []int{0})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sender.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	ended, started := make(chan error, 1), make(chan struct{})
	go func() { ended <- sender.Run(ctx, started) }()
	<-started
	t.Cleanup(cancel)
	return sender.Sent, func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// patientTrip gives TCP time to retransmit packets that a busy machine has dropped.
func patientTrip(c net.Conn) error {
	c.SetDeadline(time.Now().Add(2 * patience))
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}

// TestPinnedUnderFlood opens a connection of a client with a persistent backend while no state is kept for SYNs.
// Its SYN reaches this backend, and so do later packets when the table has room again.
func TestPinnedUnderFlood(t *testing.T) {
	for name, yaml := range map[string]string{
		"sessions":    "sessions: [{client: 203.0.113.0/29, backend: b}]",
		"persistence": "persistence: {timeout: 10m}",
	} {
		t.Run(name, func(t *testing.T) {
			s := changing(t, "services:\n  - {name: web, listen: [{address: 192.0.2.30, ports: [80]}], protocol: tcp, mode: dsr, scheduler: rr, "+yaml+
				", backends: [{name: a, address: 10.0.2.3, weight: 1}, {name: b, address: 10.0.2.4}, {name: c, address: 10.0.2.5}]}\n")
			reaches := func(sport int, flags string) string {
				out := send(t, s, "wan0", fmt.Sprintf("ip4(src=203.0.113.5,dst=192.0.2.30)/tcp(sport=%d,dport=80,flags=%s)", sport, flags))
				if len(out.Out) != 1 {
					t.Fatalf("%s: %s %s", flags, out.Action, out.Reason)
				}
				eth, _ := packet.Find[*packet.Ethernet](packet.Parse(out.Out[0].Frame))
				return eth.Dst.String()
			}
			want := reaches(3999, "S")
			for sport := range 8 {
				quota := s.d.switches.HalfOpen
				s.d.t.Control.Values[0].HalfOpen += quota
				syn := reaches(4000+sport, "S")
				s.d.t.Control.Values[0].HalfOpen -= quota
				if ack := reaches(4000+sport, "A"); syn != want || ack != want {
					t.Errorf("the SYN reaches %s and the acknowledgement %s, want %s", syn, ack, want)
				}
			}
		})
	}
}
