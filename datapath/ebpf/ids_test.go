// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// changing returns a gateway for many changes of the configuration.
func changing(t *testing.T, yaml string) *subject {
	t.Helper()
	return changingAt(t, "xdp", yaml)
}

// changingAt is changing with programs at a given hook.
func changingAt(t *testing.T, hook, yaml string) *subject {
	t.Helper()
	return changingIn(t, hook, yaml, poolOf(t, programKind{}))
}

// changingIn is changing with programs and tables of a pool. Without a pool it has its own, which another
// process may adopt.
func changingIn(t *testing.T, hook, yaml string, pool *programPool) *subject {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("changing", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, hook)
	s.programPool = pool
	if err := s.Reset(c, golden.StandardHost()); err != nil {
		t.Fatal(err)
	}
	return s
}

// change applies another configuration to the existing tables.
func (s *subject) change(yaml string) error {
	c, err := config.Decode("changing", []byte(yaml))
	if err != nil {
		return err
	}
	return s.Apply(c)
}

// mustChange is change, and fails the test if the configuration is refused.
func (s *subject) mustChange(yaml string) {
	s.t.Helper()
	if err := s.change(yaml); err != nil {
		s.t.Fatal(err)
	}
}

// readdress replaces an address of an interface.
func (s *subject) readdress(iface, old, fresh string) error {
	return s.inside(func() error {
		link, err := netlink.LinkByName(iface)
		if err != nil {
			return err
		}
		was, err := netlink.ParseAddr(old)
		is, err2 := netlink.ParseAddr(fresh)
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		return errors.Join(netlink.AddrDel(link, was), netlink.AddrAdd(link, is))
	})
}

// outsideOf sends a packet from inside and returns its translated source endpoint.
func (s *subject) outsideOf(inside, remote string, sport int) netip.AddrPort {
	s.t.Helper()
	if err := s.inside(func() error { // else the packet waits in the daemon, with an address of the host
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: s.ifaces["wan0"], IP: net.ParseIP(remote), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 1, 2}})
	}); err != nil {
		s.t.Fatal(err)
	}
	out := send(s.t, s, "lan0", fmt.Sprintf("ip4(src=%s,dst=%s)/udp(sport=%d,dport=53)", inside, remote, sport))
	if len(out.Out) != 1 {
		s.t.Fatalf("%s to %s: %v %v", inside, remote, out.Action, out.Reason)
	}
	p := packet.Parse(out.Out[0].Frame)
	ip, _ := packet.Find[*packet.IPv4](p)
	udp, _ := packet.Find[*packet.UDP](p)
	return netip.AddrPortFrom(ip.Src, udp.SrcPort)
}

// expire ends all flows and waits for the hold-down of their ports.
func (s *subject) expire() {
	s.t.Helper()
	for range 3 {
		if err := s.Advance(301 * time.Second); err != nil {
			s.t.Fatal(err)
		}
	}
}

// TestAddressesChangeForever renumbers the interface of a masquerade rule more often than the tables have
// numbers for pool addresses, with a flow through each address.
func TestAddressesChangeForever(t *testing.T) {
	const yaml = "nat:\n  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}\n"
	s := changing(t, yaml)
	old := "198.51.100.1/24"
	for i := range 70 {
		fresh := fmt.Sprintf("198.51.100.%d/24", 100+i)
		if err := s.readdress("wan0", old, fresh); err != nil {
			t.Fatal(err)
		}
		s.expire() // flows of the address before the last one have ended
		old = fresh
		s.mustChange(yaml)
		if got := s.outsideOf("10.0.2.2", fmt.Sprintf("198.51.100.%d", 2), 4000+i); got.Addr() != netip.MustParsePrefix(fresh).Addr() {
			t.Fatalf("address %s: a flow leaves from %s", fresh, got)
		}
	}
	if n := len(s.d.t.IDs.Used[ids.Pool]); n > int(s.d.t.Pool) {
		t.Errorf("%d numbers of pool addresses are kept", n)
	}
}

// TestAddressInUseKeepsItsNumber keeps a port of every pool address in use. No number may be reused, and the
// error names the cause. Once the flows have ended, the configuration is accepted.
func TestAddressInUseKeepsItsNumber(t *testing.T) {
	yaml := func(i int) string {
		return fmt.Sprintf("nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.%d]}\n", 1+i)
	}
	s := changing(t, yaml(0))
	var refused error
	for i := range 70 {
		if refused = s.change(yaml(i)); refused != nil {
			if i != int(s.d.t.Pool) {
				t.Errorf("address %d of %d is refused", i+1, s.d.t.Pool)
			}
			break
		}
		s.outsideOf("10.0.2.2", "198.51.100.2", 4000+i)
	}
	if refused == nil || !strings.Contains(refused.Error(), "the tables were made for 64 pool addresses, and previous ones count") ||
		!strings.Contains(refused.Error(), "stop --force") {
		t.Fatalf("a pool address too many: %v", refused)
	}
	s.expire()
	s.mustChange(yaml(80))
	if got := s.outsideOf("10.0.2.3", "198.51.100.2", 5000); got.Addr().String() != "203.0.113.81" {
		t.Errorf("a flow leaves from %s", got)
	}
}

// TestPoolsChange removes addresses from the middle of a pool, extends a pool that is followed by other
// addresses, and reverses one. Every address serves its own rule only.
func TestPoolsChange(t *testing.T) {
	yaml := func(office, guests string) string {
		return "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [" + office + "]}\n" +
			"  - {name: guests, type: snat, source: [10.1.0.0/16], out: wan0, to: [" + guests + "]}\n" +
			"services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: fullnat, source-pool: [" + office + "], backends: [{name: a, address: 10.0.2.9, port: 80}]}\n"
	}
	s := changing(t, yaml("203.0.113.1-203.0.113.2", "203.0.113.9"))
	last := netip.AddrPort{}
	for i, pools := range [][2][]string{
		{{"203.0.113.1", "203.0.113.2", "203.0.113.3"}, {"203.0.113.9"}},
		{{"203.0.113.1", "203.0.113.3"}, {"203.0.113.9", "203.0.113.2"}},
		{{"203.0.113.3", "203.0.113.1"}, {"203.0.113.2"}},
		{{"203.0.113.4", "203.0.113.1", "203.0.113.9"}, {"203.0.113.2", "203.0.113.3", "203.0.113.5"}},
		{{"203.0.113.9"}, {"203.0.113.9"}},
	} {
		s.expire()
		s.mustChange(yaml(strings.Join(pools[0], ", "), strings.Join(pools[1], ", ")))
		s.mustChange(yaml(strings.Join(pools[0], ", "), strings.Join(pools[1], ", "))) // and again
		met := [3]map[string]bool{{}, {}, {}}
		for k := range 60 {
			last = s.outsideOf(fmt.Sprintf("10.0.2.%d", 20+k), "198.51.100.2", 4000)
			met[0][last.Addr().String()] = true
			met[1][s.outsideOf(fmt.Sprintf("10.1.0.%d", 20+k), "198.51.100.2", 4000).Addr().String()] = true
			out := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.51.100.%d,dst=192.0.2.10)/udp(sport=4000,dport=80)", 20+k))
			if len(out.Out) != 1 {
				t.Fatalf("change %d: the service: %v %v", i, out.Action, out.Reason)
			}
			ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame))
			met[2][ip.Src.String()] = true
		}
		for k, want := range [][]string{pools[0], pools[1], pools[0]} {
			for a := range met[k] {
				if !slices.Contains(want, a) {
					t.Errorf("change %d: pool %d gives out %s, which is not its", i, k, a)
				}
			}
			if len(met[k]) != len(want) {
				t.Errorf("change %d: pool %d gives out %v of %v", i, k, met[k], want)
			}
		}
	}
	// The reply to the last address is translated. It waits for the hardware address of the host.
	out := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.51.100.2,dst=%s)/udp(sport=53,dport=%d)", last.Addr(), last.Port()))
	if want := netip.MustParseAddrPort("10.0.2.79:4000"); out.Reason != model.ReasonUnresolved || out.Planned.Tuple.Dest != want {
		t.Errorf("the reply: %v %v to %v, want to %v", out.Action, out.Reason, out.Planned.Tuple.Dest, want)
	}
}

// TestNamesComeAndGo changes prefixes of firewall rules, sets and names of NAT rules more often than there are
// bits for them.
func TestNamesComeAndGo(t *testing.T) {
	yaml := func(i int) string {
		text := fmt.Sprintf("nat:\n  - {name: office%d, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}\n", i) +
			fmt.Sprintf("firewall:\n  sets: {bad%d: [198.51.100.%d]}\n  rules:\n    - {hook: ingress, action: drop, source: \"@bad%[1]d\"}\n", i, 50+i)
		for k := range 40 {
			text += fmt.Sprintf("    - {hook: ingress, action: drop, source: 198.18.%d.%d}\n", k, i)
		}
		return text
	}
	s := changing(t, yaml(0))
	for i := range 80 {
		s.mustChange(yaml(i))
		if err := errors.Join(s.Advance(301*time.Second), s.Advance(301*time.Second)); err != nil {
			t.Fatal(err)
		}
		s.outsideOf("10.0.2.2", "198.51.100.2", 4000)
		for k, want := range map[string]string{fmt.Sprintf("198.51.100.%d", 50+i): "denied", fmt.Sprintf("198.51.100.%d", 51+i): "not-ours",
			fmt.Sprintf("198.18.7.%d", i): "denied", fmt.Sprintf("198.18.7.%d", i+1): "not-ours"} {
			if out := send(t, s, "wan0", "ip4(src="+k+",dst=10.0.2.9)/udp(sport=1,dport=2)"); string(out.Reason) != want {
				t.Fatalf("change %d: a packet from %s: %s, want %s", i, k, out.Reason, want)
			}
		}
	}
	again, err := table.LoadIDs(s.d.t.Maps["ids"])
	if err != nil {
		t.Fatal(err)
	}
	for kind, limit := range map[ids.Kind]int{ids.Set: compile.MaxSets, ids.Source: wire.MaxNATRules} {
		uniqueNumbers(t, again, kind, limit)
	}
}

// uniqueNumbers returns the names of a kind by their numbers, and checks that the numbers are unique.
func uniqueNumbers(t *testing.T, list *ids.IDs, kind ids.Kind, limit int) map[uint32]string {
	t.Helper()
	names := map[uint32]string{}
	for k, v := range list.Known {
		if k.Kind != kind {
			continue
		}
		name := string(bytes.TrimRight(k.Name[:], "\x00"))
		if other, twice := names[v]; twice {
			t.Errorf("%s %d has two names: %q and %q", kind, v, name, other)
		}
		names[v] = name
	}
	if len(names) > limit {
		t.Errorf("%d numbers of %s are kept, of %d", len(names), kind, limit)
	}
	return names
}

// TestRuleInUseKeepsItsID renames NAT rules more often than there are ids, while a flow of one of the first
// rules is open. No other rule may get its id.
func TestRuleInUseKeepsItsID(t *testing.T) {
	yaml := func(i int) string {
		return fmt.Sprintf("nat:\n  - {name: office%d, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}\n", i)
	}
	s := changing(t, yaml(0))
	s.outsideOf("10.0.2.2", "198.51.100.2", 4000)
	first := s.d.t.IDs.Known[ids.KeyOf(ids.Source, "office0")]
	for i := range 70 {
		s.mustChange(yaml(i + 1))
		if id := s.d.t.IDs.Known[ids.KeyOf(ids.Source, fmt.Sprintf("office%d", i+1))]; id == first {
			t.Fatalf("office%d has the id of a rule that has a flow", i+1)
		}
	}
}

const webYAML = "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: dnat, backends: [{name: up, address: 10.0.2.2, port: 80}]}\n"

// web returns a configuration with one service, and others with the given prefix of names and other ports.
func web(t *testing.T, others int, prefix string) *config.Config {
	t.Helper()
	c, err := config.Decode("changing", []byte(webYAML))
	if err != nil {
		t.Fatal(err)
	}
	for i := range others {
		other := c.Services[0]
		other.Name = fmt.Sprintf("%s%d", prefix, i)
		other.Listen = []config.Listen{{Address: netip.MustParseAddr("192.0.2.11"), Ports: []flow.Ports{{First: uint16(1 + i), Last: uint16(1 + i)}}}}
		c.Services = append(c.Services, other)
	}
	return c
}

// TestBackendsComeAndGo changes the backends of a service more often than there are numbers. A backend with a
// flow keeps its number. A backend with a reused number does not inherit counts or next hop.
func TestBackendsComeAndGo(t *testing.T) {
	const each = 25000
	s := changing(t, webYAML)
	generation := func(g int) {
		t.Helper()
		c := web(t, 0, "")
		backends := &c.Services[0].Backends
		(*backends)[0].Address = netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + g)})
		c.Services[0].Protocol = flow.TCP // TCP connections remain after their backend is removed from the configuration
		for i := range each {
			*backends = append(*backends, config.Backend{Name: fmt.Sprint(i), Drain: true,
				Address: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Port: uint16(1000 + g)})
		}
		if err := s.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	reaches := func(client, server int) {
		t.Helper()
		out := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.51.100.2,dst=192.0.2.10)/tcp(sport=%d,dport=80,flags=A)", client))
		if len(out.Out) != 1 {
			t.Fatalf("client %d: %v %v", client, out.Action, out.Reason)
		}
		eth, _ := packet.Find[*packet.Ethernet](packet.Parse(out.Out[0].Frame))
		ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame))
		if want := fmt.Sprintf("10.0.2.%d", server); ip.Dst.String() != want || eth.Dst[5] != byte(server) {
			t.Fatalf("client %d reaches %s by %v, want %s", client, ip.Dst, eth.Dst, want)
		}
	}
	name := func(g int) string { return fmt.Sprintf("web\x00up\x0010.0.2.%d:80", 2+g) }
	number := func(g int) uint32 { return s.d.t.IDs.Known[ids.KeyOf(ids.Backend, name(g))] }

	generation(0)
	reaches(1, 2)
	busy := number(0)
	generation(1)
	reaches(2, 3)
	idle := number(1)
	if err := s.d.t.Maps["backend_hops"].Put(idle, wire.BackendHop{Way: 1<<32 | 1}); err != nil { // as packets without a flow set it
		t.Fatal(err)
	}
	for _, d := range []time.Duration{200 * time.Second, 102 * time.Second} {
		if err := s.Advance(d); err != nil {
			t.Fatal(err)
		}
		reaches(1, 2) // the other flow ends in between
	}
	if n := s.d.t.BackendLoads.Values[idle].Flows; n != 1 {
		t.Errorf("a backend with one flow that has ended counts %d", n)
	}
	for g := 2; g < 5; g++ {
		generation(g)
		reaches(1, 2)
		reaches(10+g, 2+g)
		uniqueNumbers(t, s.d.t.IDs, ids.Backend, compile.MaxBackends)
	}
	names := uniqueNumbers(t, s.d.t.IDs, ids.Backend, compile.MaxBackends)
	if names[busy] != name(0) {
		t.Errorf("the number of a backend that has a flow went to %q", names[busy])
	}
	if names[idle] == name(1) {
		t.Fatal("the number of the backend without flows was given to nobody: the test proves nothing")
	}
	var hop wire.BackendHop
	if err := s.d.t.Maps["backend_hops"].Lookup(idle, &hop); err != nil || hop != (wire.BackendHop{}) || s.d.t.BackendLoads.Values[idle] != (wire.Load{}) {
		t.Errorf("the new owner of a number has next hop %v and counts %v (%v)", hop, s.d.t.BackendLoads.Values[idle], err)
	}
}

// TestServicesComeAndGo changes the names of services more often than there are numbers. Each service counts
// only its own flows.
func TestServicesComeAndGo(t *testing.T) {
	const each = 7000
	s := changing(t, webYAML)
	for g := range 3 {
		prefix := fmt.Sprintf("web%d-", g)
		if err := s.Apply(web(t, each, prefix)); err != nil {
			t.Fatal(err)
		}
		uniqueNumbers(t, s.d.t.IDs, ids.Service, wire.MaxServices)
		for i := range each {
			if l := s.d.t.ServiceLoads.Values[s.d.t.IDs.Known[ids.KeyOf(ids.Service, fmt.Sprint(prefix, i))]]; l != (wire.Load{}) {
				t.Fatalf("change %d: a new service has the counts %+v", g, l)
			}
		}
		out := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.51.100.2,dst=192.0.2.11)/udp(sport=%d,dport=%d)", 100+g, each))
		if len(out.Out) != 1 {
			t.Fatalf("change %d: %v %v", g, out.Action, out.Reason)
		}
		if l := s.d.t.ServiceLoads.Values[s.d.t.IDs.Known[ids.KeyOf(ids.Service, fmt.Sprint(prefix, each-1))]]; l.Flows != 1 || l.Active != 1 {
			t.Errorf("change %d: a service with one flow counts %d, %d of them now", g, l.Flows, l.Active)
		}
	}
}
