// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// clientAddr returns the i-th of the many addresses of the lab's client.
func clientAddr(family string, i int) string {
	if family == "ipv6" {
		return fmt.Sprintf("fd00:64::%x", i+1)
	}
	return fmt.Sprintf("10.64.%d.%d", i/250, i%250+1)
}

// few is the minimum number of flows, of 40, for a server that gets every other one. By chance it has fewer once
// in 600,000,000 times.
const few = 3

func TestFullNATHidesTheClient(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	pools := map[string][]config.AddressRange{
		"masquerade": nil,
		"range":      {pool("10.0.2.100", "10.0.2.103"), pool("fd00:2::100", "fd00:2::100")},
		"two ranges": {pool("10.0.2.100", "10.0.2.100"), pool("10.0.2.102", "10.0.2.103"), pool("fd00:2::100", "fd00:2::100")},
	}
	for name, sources := range pools {
		t.Run(name, func(t *testing.T) {
			for family, vip := range virtual {
				s := web(config.ModeFullNAT, config.SchedulerRR)
				s.SourcePool = sources
				oneFamily(&s, family)
				b.apply(one(s))
				seen := make(map[netip.Addr]int)
				b.spread(120, func(i int) (answer, error) { // with a quarter of the flows, an address is unused once in 10^15 times
					a, err := b.tcp("client", clientAddr(family, i), vip)
					seen[a.client.Addr()]++
					return a, err
				})
				for a := range seen {
					ok := len(sources) == 0 && (a == addr("10.0.2.1") || prefix("fd00:2::/64").Contains(a))
					for _, r := range sources {
						ok = ok || r.Contains(a)
					}
					if !ok {
						t.Errorf("%s: a server saw %s, which is not of the pool", family, a)
					}
				}
				if family == "ipv4" && len(sources) > 0 && len(seen) < 3 {
					t.Errorf("only %d of the pool's addresses were used: %v", len(seen), seen)
				}
			}
		})
	}
}

func pool(first, last string) config.AddressRange {
	return config.AddressRange{First: addr(first), Last: addr(last)}
}

// oneFamily removes the listeners and backends of the other family from a service.
func oneFamily(s *config.Service, family string) {
	four := family == "ipv4"
	var listeners []config.Listen
	for _, l := range s.Listen {
		if l.Address.Is4() == four {
			listeners = append(listeners, l)
		}
	}
	var backends []config.Backend
	for _, b := range s.Backends {
		if b.Address.Is4() == four {
			backends = append(backends, b)
		}
	}
	s.Listen, s.Backends = listeners, backends
}

func TestDirectServerReturn(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(80, "s1", "s2")
	for _, scheduler := range []config.Scheduler{config.SchedulerMaglev, config.SchedulerRR} {
		t.Run(string(scheduler), func(t *testing.T) {
			b.apply(one(config.Service{
				Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: scheduler,
				Listen: []config.Listen{listen("192.0.2.30", "80"), listen("2001:db8::30", "80")},
				Backends: []config.Backend{
					backend("a", "10.0.2.2", 0), backend("b", "10.0.2.3", 0),
					backend("a6", "fd00:2::2", 0), backend("b6", "fd00:2::3", 0),
				},
			}))
			for family, vip := range map[string]string{"ipv4": "192.0.2.30:80", "ipv6": "[2001:db8::30]:80"} {
				count := b.spread(40, func(i int) (answer, error) { return b.tcp("client", clientAddr(family, i), vip) })
				if count["s1"] < few || count["s2"] < few {
					t.Errorf("%s: spread %v", family, count)
				}
			}
		})
	}
	t.Run("mac", func(t *testing.T) {
		server, err := b.lab.Node("s2").Interface("eth0")
		if err != nil {
			t.Fatal(err)
		}
		s := config.Service{
			Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
			Listen:   []config.Listen{listen("192.0.2.30", "80")},
			Backends: []config.Backend{backend("b", "10.0.2.3", 0)},
		}
		s.Backends[0].MAC = config.MAC(server.HardwareAddr)
		b.apply(one(s))
		b.spread(3, func(i int) (answer, error) { return b.tcp("client", "", "192.0.2.30:80") })
	})
	t.Run("a drained server keeps its connections", func(t *testing.T) {
		c := one(config.Service{
			Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerRR,
			Listen:   []config.Listen{listen("192.0.2.30", "80")},
			Backends: []config.Backend{backend("a", "10.0.2.2", 0), backend("b", "10.0.2.3", 0)},
		})
		set := func(a, bb datapath.State) {
			s := b.snapshot(c)
			s.Services[0].State = []datapath.State{a, bb}
			b.applySnapshot(s)
		}
		set(0, datapath.Down)
		conn, err := b.dial("tcp", "client", "", "192.0.2.30:80")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		set(datapath.Drain, 0)
		if err := echo(conn); err != nil {
			t.Errorf("the connection died: %v\n%s", err, b.ruleset())
		}
	})
	t.Run("a server changes its hardware address", func(t *testing.T) {
		b.apply(one(config.Service{
			Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
			Listen:   []config.Listen{listen("192.0.2.30", "80")},
			Backends: []config.Backend{backend("a", "10.0.2.2", 0)},
		}))
		b.spread(1, func(i int) (answer, error) { return b.tcp("client", "", "192.0.2.30:80") })
		ctx := context.Background()
		for _, args := range [][]string{
			{"link", "set", "eth0", "address", "02:00:00:00:00:77"},
			{"neigh", "flush", "all"},
		} {
			if out, err := b.lab.Node("s1").Command(ctx, "ip", args...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		// The server sends a packet, as a host does that takes over an address.
		if _, err := b.tcp("s1", "", "10.0.2.1:1"); err == nil {
			t.Fatal("nobody listens there")
		}
		labtest.Eventually(t, 2*time.Minute, "the datapath to follow", func() error {
			c, err := b.dialFor(time.Second, "tcp", "client", "", "192.0.2.30:80")
			if err == nil {
				err = c.Close()
			}
			return err
		})
	})
}

func TestStatelessTranslatesBothWaysWithoutConntrack(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.udpServers(5514, "s1", "s2")
	b.tcpServers(8080, "s1", "s2")
	syslog := config.Service{
		Name: "syslog", Protocol: flow.UDP, Mode: config.ModeStateless, Scheduler: config.SchedulerSourceHash,
		Listen: []config.Listen{listen("192.0.2.40", "514"), listen("2001:db8::40", "514")},
		Backends: []config.Backend{
			backend("a", "10.0.2.2", 5514), backend("b", "10.0.2.3", 5514),
			backend("a6", "fd00:2::2", 5514), backend("b6", "fd00:2::3", 5514),
		},
	}
	plain := config.Service{
		Name: "plain", Protocol: flow.TCP, Mode: config.ModeStateless, Scheduler: config.SchedulerMaglev,
		Listen: []config.Listen{listen("192.0.2.41", "8000-8080"), listen("2001:db8::41", "8000-8080")},
		Backends: []config.Backend{
			backend("a", "10.0.2.2", 0), backend("b", "10.0.2.3", 0),
			backend("a6", "fd00:2::2", 0), backend("b6", "fd00:2::3", 0),
		},
	}
	b.apply(&config.Config{Services: []config.Service{syslog, plain}})
	for family, vip := range map[string]string{"ipv4": "192.0.2.40:514", "ipv6": "[2001:db8::40]:514"} {
		for _, noChecksum := range []bool{false, true} {
			if noChecksum && family == "ipv6" {
				continue // IPv6 has no UDP without checksum
			}
			count := b.spread(40, func(i int) (answer, error) {
				a, err := b.udpChecksum("client", clientAddr(family, i), vip, noChecksum)
				if err == nil && a.client.Addr() != addr(clientAddr(family, i)) {
					err = fmt.Errorf("server saw %s", a.client)
				}
				return a, err
			})
			if count["s1"] < few || count["s2"] < few {
				t.Errorf("%s: spread %v", family, count)
			}
		}
	}
	for family, vip := range map[string]string{"ipv4": "192.0.2.41:8080", "ipv6": "[2001:db8::41]:8080"} {
		count := b.spread(40, func(i int) (answer, error) { return b.tcp("client", clientAddr(family, i), vip) })
		if count["s1"] < few || count["s2"] < few {
			t.Errorf("%s: spread %v", family, count)
		}
	}
	if n := b.flows(); n != 0 {
		t.Errorf("%d flows are tracked, want none", n)
	}
}

// TestHashesAgree compares the servers of real connections with the schedulers' results.
func TestHashesAgree(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	servers := map[string]string{"10.0.2.2": "s1", "10.0.2.3": "s2", "10.0.2.4": "s3", "fd00:2::2": "s1", "fd00:2::3": "s2", "fd00:2::4": "s3"}
	for round, scheduler := range []config.Scheduler{config.SchedulerMaglev, config.SchedulerSourceHash, config.SchedulerSymmetricHash} {
		s := web(config.ModeDNAT, scheduler)
		b.apply(one(s))
		for family, vip := range virtual {
			to := netip.MustParseAddrPort(vip)
			var members []balance.Member
			for _, k := range s.Backends {
				if k.Address.Is4() == to.Addr().Is4() {
					members = append(members, balance.Member{Key: k.Key(), Weight: 1})
				}
			}
			size := balance.TableSize(len(s.Backends))
			table := balance.Maglev(members, size)
			for i := range 30 {
				from := netip.AddrPortFrom(addr(clientAddr(family, i)), uint16(20000+1000*round+i))
				data := from.Addr().AsSlice()
				if scheduler == config.SchedulerSymmetricHash && to.Addr().Less(from.Addr()) {
					data = append(hashed(to), hashed(from)...)
				} else if scheduler != config.SchedulerSourceHash {
					data = append(hashed(from), hashed(to)...)
				}
				member := members[table[balance.Slot(balance.JHash(data, balance.Seed), size)]]
				want := servers[netip.MustParseAddrPort(member.Key).Addr().String()]
				got, err := b.tcp("client", from.String(), vip)
				if err != nil {
					t.Fatal(err)
				}
				if got.server != want {
					t.Errorf("%s: %s to %s went to %s, want %s", scheduler, from, to, got.server, want)
				}
			}
		}
	}
}

// hashed returns an endpoint as hash input.
func hashed(a netip.AddrPort) []byte {
	return append(a.Addr().AsSlice(), byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

func TestSchedulersSpreadByWeight(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	for _, c := range []struct {
		scheduler config.Scheduler
		exact     bool
	}{{config.SchedulerWRR, true}, {config.SchedulerRandom, false}, {config.SchedulerSymmetricHash, false}, {config.SchedulerMaglev, false}} {
		s := web(config.ModeDNAT, c.scheduler)
		for i := range s.Backends {
			s.Backends[i].Weight = i%3 + 1
		}
		b.apply(one(s))
		for family, vip := range virtual {
			count := b.spread(360, func(i int) (answer, error) { return b.tcp("client", clientAddr(family, i), vip) })
			slack := 55 // 5.8 standard deviations of 180; even shares would be 60 away
			if c.exact {
				slack = 0
			}
			for server, want := range map[string]int{"s1": 60, "s2": 120, "s3": 180} {
				if d := count[server] - want; d > slack || d < -slack {
					t.Errorf("%s %s: %s got %d of 360, want %d", c.scheduler, family, server, count[server], want)
				}
			}
		}
	}
}

func TestStates(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	c.Services[0].Backends[2].Priority = 2
	c.Services[0].Backends[5].Priority = 2
	set := func(a, bb, spare datapath.State) {
		s := b.snapshot(c)
		s.Services[0].State = []datapath.State{a, bb, spare, a, bb, spare}
		b.applySnapshot(s)
	}
	for _, step := range []struct {
		name  string
		state [3]datapath.State
		want  []string
	}{
		{"spare unused", [3]datapath.State{}, []string{"s1", "s2"}},
		{"one drained", [3]datapath.State{0, datapath.Drain, 0}, []string{"s1"}},
		{"one down", [3]datapath.State{datapath.Down, 0, 0}, []string{"s2"}},
		{"spare takes over", [3]datapath.State{datapath.Down, datapath.Down, 0}, []string{"s3"}},
		{"back", [3]datapath.State{}, []string{"s1", "s2"}},
	} {
		t.Run(step.name, func(t *testing.T) {
			set(step.state[0], step.state[1], step.state[2])
			for _, vip := range virtual {
				count := b.spread(6, func(int) (answer, error) { return b.tcp("client", "", vip) })
				if len(count) != len(step.want) {
					t.Errorf("%s: answered by %v, want %v", vip, count, step.want)
				}
				for _, w := range step.want {
					if count[w] != 6/len(step.want) {
						t.Errorf("%s: answered by %v, want %v", vip, count, step.want)
					}
				}
			}
		})
	}
	t.Run("a drained backend keeps its connections", func(t *testing.T) {
		set(0, datapath.Down, datapath.Down)
		conn, err := b.dial("tcp", "client", "", virtual["ipv4"])
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		set(datapath.Drain, 0, 0)
		if err := echo(conn); err != nil {
			t.Errorf("the connection died: %v", err)
		}
	})
	t.Run("a backend on the address of one that goes down keeps its connections", func(t *testing.T) {
		b.tcpServers(8081, "s1")
		two := one(web(config.ModeDNAT, config.SchedulerRR))
		two.Services[0].Listen = two.Services[0].Listen[:1]
		two.Services[0].Backends = []config.Backend{backend("a", "10.0.2.2", 8080), backend("b", "10.0.2.2", 8081)}
		set := func(a, bb datapath.State) {
			s := b.snapshot(two)
			s.Services[0].State = []datapath.State{a, bb}
			b.applySnapshot(s)
		}
		set(datapath.Down, 0)
		conn, err := b.dial("tcp", "client", "", virtual["ipv4"])
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		set(0, 0)
		set(datapath.Down, datapath.Drain)
		if err := echo(conn); err != nil {
			t.Errorf("the connection died: %v", err)
		}
	})
	t.Run("all down", func(t *testing.T) {
		for _, answer := range []config.WhenDown{config.WhenDownReset, config.WhenDownReject, config.WhenDownDrop} {
			c.Services[0].WhenDown = answer
			c = &config.Config{Services: []config.Service{c.Services[0]}}
			set(datapath.Down, datapath.Down, datapath.Down)
			for _, vip := range virtual {
				_, err := b.dialIf(answer != config.WhenDownDrop, "tcp", "client", "", vip)
				var timeout net.Error
				switch silent := errors.As(err, &timeout) && timeout.Timeout(); {
				case err == nil:
					t.Errorf("%s: a connection was opened", answer)
				case silent != (answer == config.WhenDownDrop):
					t.Errorf("%s: %v", answer, err)
				}
			}
		}
	})
}

// connections returns the number of connections that a service has counted.
func (b *bench) connections(service string) (n uint64) {
	b.Helper()
	counters, err := b.d.Counters(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	for _, s := range counters.Services {
		if s.Name == service {
			n = s.Connections
		}
	}
	return n
}

func TestProtocolsAndPorts(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8001, "s1", "s2")
	b.tcpServers(8099, "s1", "s2")
	b.udpServers(53, "s1", "s2")
	both := []config.Backend{backend("a", "10.0.2.2", 0), backend("b", "10.0.2.3", 0), backend("a6", "fd00:2::2", 0), backend("b6", "fd00:2::3", 0)}
	b.apply(&config.Config{Services: []config.Service{
		{
			Name: "range", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR, Backends: both,
			Listen: []config.Listen{listen("192.0.2.50", "443", "8000-8099"), listen("2001:db8::50", "443", "8000-8099")},
		},
		{
			Name: "dns", Protocol: flow.UDP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR, Backends: both,
			Listen: []config.Listen{listen("192.0.2.50", "53"), listen("192.0.2.51", "53"), listen("2001:db8::50", "53")},
		},
		{
			Name: "host", Protocol: flow.Any, Mode: config.ModeDNAT, Scheduler: config.SchedulerSourceHash, Backends: []config.Backend{both[0], both[2]},
			Listen: []config.Listen{listen("192.0.2.52"), listen("2001:db8::52")},
		},
		{
			Name: "lan", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR, Backends: both[:2],
			Listen: []config.Listen{{Address: addr("192.0.2.53"), Ports: []flow.Ports{{First: 8001, Last: 8001}}, Interface: "lan0"}},
		},
	}})
	for _, to := range []string{"192.0.2.50:8001", "192.0.2.50:8099", "[2001:db8::50]:8001", "192.0.2.52:8001"} {
		b.spread(2, func(int) (answer, error) { return b.tcp("client", "", to) })
	}
	for _, to := range []string{"192.0.2.50:53", "192.0.2.51:53", "[2001:db8::50]:53", "192.0.2.52:53"} {
		b.spread(2, func(int) (answer, error) { return b.udp("client", "", to) })
	}
	if _, err := b.dialFor(silence, "tcp", "client", "", "192.0.2.53:8001"); err == nil {
		t.Error("a listener of lan0 took a connection from wan0")
	}
	for _, to := range []string{"192.0.2.52", "2001:db8::52"} {
		before := b.connections("host")
		if err := b.ping("client", to); err != nil {
			t.Errorf("ping of a service of any protocol at %s: %v", to, err)
		}
		if n := b.connections("host") - before; n != 1 {
			t.Errorf("the ping of %s opened %d connections of the service, want 1", to, n)
		}
	}
	if err := b.pingFor(silence, "client", "192.0.2.50"); err == nil {
		t.Error("services of single protocols answered a ping")
	}
	t.Run("fragments", func(t *testing.T) {
		for _, to := range []string{"192.0.2.50:53", "[2001:db8::50]:53"} {
			conn, err := b.dial("udp", "client", "", to)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write(make([]byte, 4000)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 8000)
			if n, err := conn.Read(buf); err != nil || n < 4000 {
				t.Errorf("%s: answer of %d bytes, %v", to, n, err)
			}
		}
	})
}
