// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/model/judge"
	"github.com/sluice-lb/sluice/packet"
)

// oneOf returns a random text.
func oneOf(r *rand.Rand, list ...string) string { return list[r.IntN(len(list))] }

// randomBackends returns some of five backends, one with a variable address.
func randomBackends(r *rand.Rand, format, port string) string {
	var list []string
	for i := range 5 {
		if r.IntN(4) == 0 {
			continue
		}
		at := i + 2
		if i == 4 && r.IntN(2) == 0 {
			at = 8
		}
		list = append(list, fmt.Sprintf("{name: b%d, address: \"%s\"%s%s%s}", i, fmt.Sprintf(format, at), port,
			oneOf(r, "", "", "", ", drain: true"), oneOf(r, "", "", ", weight: 3", ", max-connections: 2")))
	}
	if list == nil {
		return randomBackends(r, format, port)
	}
	return strings.Join(list, ", ")
}

// randomService returns a service with one of two names, in any mode.
func randomService(r *rand.Rand, name, protocol string, port int) string {
	mode := oneOf(r, "dnat", "dnat", "fullnat", "fullnat", "dsr", "tunnel", "stateless")
	listen := fmt.Sprintf("{address: 192.0.2.10, ports: [%d]}", port)
	six := fmt.Sprintf("{address: \"2001:db8::10\", ports: [%d]}", port)
	format := oneOf(r, "10.0.2.%d", "fd00:2::%d")
	switch {
	case mode == "fullnat":
		listen += ", " + six
	case mode != "tunnel" && format == "fd00:2::%d":
		listen = six
	}
	options := oneOf(r, "", ", limits: {connections-per-client: 2}", ", limits: {connections: 5}", ", persistence: {timeout: 10m}", ", mss-clamp: true",
		", limits: {new-connections-per-client: 5/s}", ", sessions: [{client: 203.0.113.4/30, backend: b1}]")
	if mode == "fullnat" {
		options += oneOf(r, ", source-pool: [10.0.2.100, \"fd00:2::100\"]", ", source-pool: [10.0.2.100-10.0.2.102, \"fd00:2::100\"]", "")
		if protocol == "tcp" {
			options += oneOf(r, "", ", client-address: toa", ", client-address: proxy-v2", ", syn-cookies: true")
		}
	}
	to := oneOf(r, "", "", fmt.Sprintf(", port: %d", port), fmt.Sprintf(", port: %d", port+8000))
	return fmt.Sprintf("  - {name: %s, listen: [%s], protocol: %s, mode: %s, scheduler: %s%s, backends: [%s]}\n", name, listen, protocol, mode,
		oneOf(r, "rr", "wrr", "random", "maglev", "source-hash", "lc", "wlc"), options, randomBackends(r, format, to))
}

// randomNAT returns some NAT rules.
func randomNAT(r *rand.Rand) string {
	options := func() string {
		return oneOf(r, "", ", filtering: address-dependent", ", filtering: address-and-port-dependent") +
			oneOf(r, "", ", connections-per-client: 3", ", ports-per-client: 3") +
			oneOf(r, "", "", ", mapping: address-and-port-dependent", ", mss-clamp: true", ", new-connections-per-client: 5/s")
	}
	text := ""
	if r.IntN(4) > 0 {
		text += "  - {name: office, type: snat, source: [10.0.2.0/24], " + oneOf(r, "", "out: wan0, ") + "to: [" +
			oneOf(r, "203.0.113.201", "203.0.113.202", "203.0.113.201-203.0.113.204", "203.0.113.202, 203.0.113.210") + "]" +
			oneOf(r, "", "", ", ports: 2000-2999, port-block: 100", ", ports: 2000-2999, port-block: 50",
				", ports: 2000-2999, port-block: 100, deterministic: true") + oneOf(r, "", ", pcp: true") + options() + "}\n"
	}
	if r.IntN(2) == 0 {
		text += "  - {name: office6, type: snat, source: [\"fd00:2::/64\"], out: wan0, to: [\"2001:db8:ab::1\"]" + options() + "}\n"
	}
	if r.IntN(2) == 0 {
		text += "  - {name: v6only, type: nat64, prefix: \"64:ff9b::/96\", source: [\"fd00:2::/64\"], pool: [" +
			oneOf(r, "203.0.113.205", "203.0.113.205-203.0.113.206") + "]" + options() + "}\n"
	}
	if r.IntN(2) == 0 {
		text += "  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2." +
			oneOf(r, "2", "3") + ", port: 8080}" + oneOf(r, "", ", hairpin: off") + "}\n"
	}
	return text
}

// randomConfig returns a configuration that the datapath supports. It replaces some of the parts of the previous
// one.
func randomConfig(r *rand.Rand, parts *[4]string) (*config.Config, string) {
	for {
		next := *parts
		for i, protocol := range []string{"tcp", "udp", "tcp"} {
			switch r.IntN(5) {
			case 0:
				next[i] = ""
			case 1, 2:
				next[i] = randomService(r, fmt.Sprint(protocol, i), protocol, 80+i)
			}
		}
		if r.IntN(2) == 0 {
			next[3] = randomNAT(r)
		}
		text := ""
		if services := next[0] + next[1] + next[2]; services != "" {
			text = "services:\n" + services
		}
		if next[3] != "" {
			text += "nat:\n" + next[3]
		}
		c, err := config.Decode("random", []byte(text))
		if err == nil && text != "" && refusal(c) == nil {
			*parts = next
			return c, text
		}
	}
}

// crowdOpens are few hosts with few ports, so that their flows collide.
var crowdOpens = []judge.Opening{
	{Interface: "wan0", Sources: judge.Addresses("203.0.113.%d", 1, 8), Dests: judge.Addresses("192.0.2.%d", 10, 10), Ports: []uint16{80, 81, 82}, Protocols: crowdProtocols},
	{Interface: "wan0", Sources: judge.Addresses("2001:db8:5::%x", 1, 8), Dests: judge.Addresses("2001:db8::%x", 16, 16), Ports: []uint16{80, 81, 82}, Protocols: crowdProtocols},
	{Interface: "lan0", Sources: judge.Addresses("10.0.2.%d", 2, 9), Dests: append(judge.Addresses("198.18.0.%d", 1, 3), judge.Addresses("203.0.113.%d", 201, 201)...),
		Ports: []uint16{80, 81, 82}, Protocols: crowdProtocols},
	{Interface: "lan0", Sources: judge.Addresses("fd00:2::%x", 2, 9), Dests: append(judge.Addresses("64:ff9b::c612:%x", 1, 1), netip.MustParseAddr("2001:db8:9::1"), netip.MustParseAddr("64:ff9b::cb00:71c9")),
		Ports: []uint16{80, 81, 82}, Protocols: crowdProtocols},
	{Interface: "wan0", Sources: judge.Addresses("198.18.0.%d", 1, 8), Dests: judge.Addresses("203.0.113.%d", 201, 201), Ports: []uint16{80, 81, 82}, Protocols: crowdProtocols},
}

var crowdProtocols = []judge.Protocol{judge.TCP, judge.TCP, judge.UDP, judge.Ping}

// crowd sends packets through a gateway.
type crowd struct {
	*subject
	r       *rand.Rand
	traffic *judge.Traffic
	made    []datapath.Mapping
}

// world contains the addresses of all hosts.
var world = []string{"192.0.2.0/24", "198.18.0.0/24", "198.51.100.0/24", "203.0.113.0/24", "10.0.2.0/24", "2001:db8::/32", "fd00:2::/64", "64:ff9b::/96"}

// strange reports an address outside world.
func strange(frame []byte) error {
	for _, l := range packet.Parse(frame) {
		var ends []netip.Addr
		switch l := l.(type) {
		case *packet.IPv4:
			ends = []netip.Addr{l.Src, l.Dst}
		case *packet.IPv6:
			ends = []netip.Addr{l.Src, l.Dst}
		}
		for _, a := range ends {
			if !slices.ContainsFunc(world, func(p string) bool { return netip.MustParsePrefix(p).Contains(a) }) {
				return fmt.Errorf("nobody has %s", a)
			}
		}
	}
	return nil
}

// restart lets another process adopt the tables.
func (s *subject) restart() error {
	return s.inside(func() (err error) {
		opt := s.d.opt
		s.d.Close()
		s.d, err = Open(opt)
		return err
	})
}

// talk sends some packets and advances the time.
func (c *crowd) talk(packets int) error {
	for sent := 0; sent < packets; {
		for _, p := range c.traffic.Next() {
			out, err := c.Step(p.Arrival)
			if err != nil {
				return err
			}
			if wrong := judge.Unsound(p.Frame, out); wrong != "" {
				return errors.New(wrong)
			}
			for _, d := range out.Out {
				if err := strange(d.Frame); err != nil {
					return fmt.Errorf("%s became %s: %w", packet.Parse(p.Frame), packet.Parse(d.Frame), err)
				}
			}
			c.traffic.Saw(p, out)
			sent++
		}
	}
	c.traffic.Forget()
	for range 3 {
		m := datapath.Mapping{Rule: "office", Protocol: flow.Protocol(6 + 11*c.r.IntN(2)), Expires: kernel.SinceBoot() + time.Hour,
			Inside:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + c.r.IntN(8))}), uint16(4000+c.r.IntN(6))),
			Outside: netip.AddrPortFrom(netip.IPv4Unspecified(), 0)}
		if c.Map(m) == nil { // if the rule allows it
			c.made = append(c.made, m)
		}
	}
	return c.Advance(time.Duration(c.r.IntN(200)) * time.Second)
}

// TestNothingLeaks applies random configurations one after the other. Packets between them create flows that
// outlive the change: services change mode, scheduler, limits and backends; rules change pools, blocks and
// filters. When all flows have ended, the tables equal their initial state. SLUICE_LEAK_RUNS sets the number of
// runs, SLUICE_MODEL_SEED the seed.
func TestNothingLeaks(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	runs, seed := number(t, "SLUICE_LEAK_RUNS", 1), uint64(number(t, "SLUICE_MODEL_SEED", 1))
	for _, hook := range []string{"xdp", "tc"} {
		for n := range runs {
			t.Run(fmt.Sprint(hook, "/", n), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(n)))
				s := newSubject(t, hook)
				var parts [4]string
				c, text := randomConfig(r, &parts)
				c.Tables = config.Tables{Flows: 512, Flows6: 512, Clients: 64, HalfOpen: 64}
				if err := s.Reset(c, golden.StandardHost()); err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				all := &crowd{subject: s, r: r, traffic: judge.NewTraffic(crowdOpens, golden.StandardHost(), r, netip.MustParsePrefix("64:ff9b::/96"))}
				log := []string{text}
				for range 12 {
					if err := all.talk(150); err != nil {
						t.Fatalf("%v\n%s", err, strings.Join(log, "\n"))
					}
					was, before := parts, s.snapshot
					c, text = randomConfig(r, &parts)
					log = append(log, text)
					if r.IntN(3) == 0 {
						if err := s.restart(); err != nil {
							t.Fatal(err)
						}
						log = append(log, "by another process")
					}
					err := s.Apply(c)
					if err != nil && strings.Contains(err.Error(), "the tables were made for") { // the tables are too small for the change: keep the previous configuration
						parts, s.snapshot = was, before
						err = s.inside(s.apply)
					}
					if err != nil {
						t.Fatalf("%v\n%s", err, strings.Join(log, "\n"))
					}
				}
				for _, m := range all.made {
					s.Unmap(m) // if the mapping still exists
				}
				for range 4 {
					if err := s.Advance(3 * time.Hour); err != nil {
						t.Fatal(err)
					}
				}
				if left := s.left(t); len(left) > 0 {
					t.Errorf("%s\nafter:\n%s", strings.Join(left, "\n"), strings.Join(log, "\n"))
				}
			})
		}
	}
}

// left lists the remaining content of tables that should be empty.
func (s *subject) left(t *testing.T) (list []string) {
	note := func(n int, format string, args ...any) {
		if n != 0 {
			list = append(list, fmt.Sprintf(format, args...)+fmt.Sprintf(": %d", n))
		}
	}
	tb := s.d.t
	note(int(int32(tb.Control.Values[0].HalfOpen)), "handshakes")
	for id, l := range tb.ServiceLoads.Values {
		note(int(l.Active), "flows of service %d", id)
	}
	for id, l := range tb.BackendLoads.Values {
		note(int(l.Active), "flows of backend %d", id)
	}
	note(ports(s), "ports")
	for i, m := range tb.Ports.Values {
		for w, word := range m.Words {
			if word != 0 {
				note(1, "port map %d word %d", i, w)
			}
		}
	}
	for i := range tb.Owners.Values {
		for k, entry := range tb.Owners.Values[i].Owner {
			note(int(entry), "owner of port %d", 2*i+k)
		}
	}
	used := 0
	for i := range tb.Flows4.Values {
		used += min(int(tb.Flows4.Values[i].Key.State), 1)
	}
	for i := range tb.Flows6.Values {
		used += min(int(tb.Flows6.Values[i].Key.State), 1)
	}
	note(used, "entries")
	for family, index := range [][]wire.Bucket{tb.Index4.Values, tb.Index6.Values} {
		for i, b := range index {
			if b != (wire.Bucket{}) {
				note(1, "bucket %d of index %d %v", i, family, b)
			}
		}
	}
	for name, m := range map[string]*ebpf.Map{"adjusts": tb.Late("adjusts"), "clients": tb.Maps["clients"], "mappings": tb.Maps["mappings"]} {
		var k, v []byte
		n := 0
		for it := m.Iterate(); it.Next(&k, &v); {
			n++
		}
		note(n, "elements of %s", name)
	}
	return list
}

// TestClientAddressComes adds a PROXY header to a service during the handshake of a client. This connection
// continues without one, and no state remains.
func TestClientAddressComes(t *testing.T) {
	yaml := func(options string) string {
		return "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100]" + options +
			", backends: [{name: a, address: 10.0.2.2}]}\n"
	}
	const client = "ip4(src=203.0.113.5,dst=192.0.2.10)/tcp(sport=4000,dport=80,"
	s := changing(t, yaml(""))
	send(t, s, "wan0", client+"flags=S,seq=100)")
	s.mustChange(yaml(", client-address: proxy-v2"))
	out := send(t, s, "wan0", client+"flags=S,seq=100)")
	if len(out.Out) != 1 {
		t.Fatalf("SYN: %s %s", out.Action, out.Reason)
	}
	tcp, _ := packet.Find[*packet.TCP](packet.Parse(out.Out[0].Frame))
	send(t, s, "lan0", fmt.Sprintf("ip4(src=10.0.2.2,dst=10.0.2.100)/tcp(sport=80,dport=%d,flags=SA,seq=900,ack=101)", tcp.SrcPort))
	for range 2 {
		out = send(t, s, "wan0", client+"flags=A,seq=101,ack=901)")
		if want := len(packet.MustText("eth()/" + client + "flags=A)").Build()); len(out.Out) != 1 || len(out.Out[0].Frame) != want {
			t.Errorf("the acknowledgement becomes %v", out)
		}
	}
	if n, err := table.Content[uint32, wire.Adjust](s.d.t.Late("adjusts")); len(n) > 0 || err != nil {
		t.Errorf("%d records of changed numbers (%v)", len(n), err)
	}
}

// TestClientAddressGoes removes the PROXY header from a service with a connection that has one. Its sequence
// numbers remain shifted. Only a new connection on the same ports has no header.
func TestClientAddressGoes(t *testing.T) {
	yaml := func(options string) string {
		return "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100]" + options +
			", backends: [{name: a, address: 10.0.2.2}]}\n"
	}
	const client = "ip4(src=203.0.113.5,dst=192.0.2.10)/tcp(sport=4000,dport=80,"
	for _, then := range []string{"", ", client-address: toa"} {
		s := changingIn(t, "xdp", yaml(", client-address: proxy-v2"), nil)
		segment := func(iface, text string) *packet.TCP {
			t.Helper()
			out := send(t, s, iface, text)
			if len(out.Out) != 1 {
				t.Fatalf("%q, %s: %s %s", then, text, out.Action, out.Reason)
			}
			tcp, _ := packet.Find[*packet.TCP](packet.Parse(out.Out[0].Frame))
			return tcp
		}
		server := fmt.Sprintf("ip4(src=10.0.2.2,dst=10.0.2.100)/tcp(sport=80,dport=%d,", segment("wan0", client+"flags=S,seq=100)").SrcPort)
		segment("lan0", server+"flags=SA,seq=900,ack=101)")
		segment("wan0", client+"flags=A,seq=101,ack=901)")
		for process := range 2 { // the same process, and another
			if process > 0 {
				if err := s.restart(); err != nil {
					t.Fatal(err)
				}
			}
			s.mustChange(yaml(then))
			if seq := segment("wan0", client+"flags=A,seq=111,ack=901)/data(10)").Seq; seq != 139 {
				t.Errorf("%q: byte 111 of the client is %d to the server, want 139", then, seq)
			}
			if ack := segment("lan0", server+"flags=A,seq=901,ack=149)").Ack; ack != 121 {
				t.Errorf("%q: the server has byte 149, the client is told %d, want 121", then, ack)
			}
		}
		segment("wan0", client+"flags=FA,seq=121,ack=901)")
		segment("lan0", server+"flags=FA,seq=901,ack=150)")
		server = fmt.Sprintf("ip4(src=10.0.2.2,dst=10.0.2.100)/tcp(sport=80,dport=%d,", segment("wan0", client+"flags=S,seq=5000)").SrcPort)
		segment("lan0", server+"flags=SA,seq=700,ack=5001)")
		if again := segment("wan0", client+"flags=A,seq=5001,ack=701)/data(10)"); again.Seq != 5001 {
			t.Errorf("%q: byte 5001 of the next connection is %d to the server", then, again.Seq)
		}
		if ack := segment("lan0", server+"flags=A,seq=701,ack=5011)").Ack; ack != 5011 {
			t.Errorf("%q: of the next connection the server has byte 5011, the client is told %d", then, ack)
		}
	}
}

// TestModeChanges changes the mode and the family of a service. The old mode's flows have one direction, the new
// mode's have two. The next packet of the client opens a flow of the new mode.
func TestModeChanges(t *testing.T) {
	yaml := func(options string) string {
		return "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, " + options + "}\n"
	}
	const client = "ip4(src=203.0.113.5,dst=192.0.2.10)/udp(sport=4000,dport=80)"
	s := changing(t, yaml("mode: tunnel, scheduler: rr, backends: [{name: a, address: \"fd00:2::3\"}]"))
	if out := send(t, s, "wan0", client); out.Reason != model.ReasonNewFlow {
		t.Fatalf("tunnel: %s", out.Reason)
	}
	s.mustChange(yaml("mode: fullnat, scheduler: rr, source-pool: [\"fd00:2::100\"], backends: [{name: a, address: \"fd00:2::3\"}]"))
	out := send(t, s, "wan0", client)
	if len(out.Out) != 1 || out.Reason != model.ReasonNewFlow {
		t.Fatalf("fullnat: %s %s", out.Action, out.Reason)
	}
	p := packet.Parse(out.Out[0].Frame)
	ip, _ := packet.Find[*packet.IPv6](p)
	udp, _ := packet.Find[*packet.UDP](p)
	if ip == nil || ip.Src.String() != "fd00:2::100" {
		t.Fatalf("fullnat sends %s", p)
	}
	out = send(t, s, "lan0", fmt.Sprintf("ip6(src=fd00:2::3,dst=fd00:2::100)/udp(sport=80,dport=%d)", udp.SrcPort))
	if out.Reason != model.ReasonFlow {
		t.Errorf("the answer: %s %s", out.Action, out.Reason)
	}
	if l := s.d.t.ServiceLoads.Values[s.d.t.IDs.Known[ids.KeyOf(ids.Service, "web")]]; l.Active != 1 || l.Flows != 2 {
		t.Errorf("%d flows of %d are counted as alive, want 1 of 2", l.Active, l.Flows)
	}
}
