// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestRandomSnapshots applies random configurations one after the other. After each apply, the kernel's tables
// must equal the compiled ruleset, and a new process must find no difference.
func TestRandomSnapshots(t *testing.T) {
	b := newBench(t, lab.Topology{Nodes: []lab.NodeSpec{{Name: "gateway", Forward: true}, {Name: "lan"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.2.1/24", "fd00:2::1/64"}},
		B: lab.End{Node: "lan", Iface: "eth0"},
	}}})
	ctx := context.Background()
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("40") // each check is several transactions
		defer f.Value.Set(f.DefValue)
	}
	rapid.Check(t, func(t *rapid.T) {
		for range rapid.IntRange(1, 4).Draw(t, "applies") {
			c := randomConfig(t)
			s := b.snapshot(c)
			for i := range s.Services {
				for k := range s.Services[i].State {
					s.Services[i].State[k] = datapath.State(rapid.IntRange(0, 2).Draw(t, "state"))
				}
			}
			plan, err := b.d.Plan(ctx, s)
			if err != nil {
				t.Skip(err) // such as two stateless services with one backend
			}
			change, err := b.d.Apply(ctx, s)
			if err != nil {
				t.Fatal(err)
			}
			if plan.Objects != change.Objects || plan.Elements != change.Elements {
				t.Fatalf("plan %+v, apply %+v", plan, change)
			}
			held, _, err := b.d.conn.Read()
			if err != nil {
				t.Fatal(err)
			}
			left, err := b.d.diffFromKernel(held, b.d.inForce)
			if err != nil {
				t.Fatal(err)
			}
			if !left.Empty() {
				t.Fatalf("the kernel differs: %v", describe(left, 5))
			}
		}
	})
	if err := b.d.Remove(ctx); err != nil {
		t.Fatal(err)
	}
}

// randomConfig returns a random configuration that nftables supports.
func randomConfig(t *rapid.T) *config.Config {
	c := &config.Config{}
	c.Firewall.Sets = map[string][]netip.Prefix{}
	for _, name := range []string{"good", "bad"} {
		for range rapid.IntRange(0, 5).Draw(t, "prefixes") {
			c.Firewall.Sets[name] = append(c.Firewall.Sets[name], randomPrefix(t))
		}
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "services") {
		s := randomService(t, i)
		if (*Datapath)(nil).CarriesService(&s) == nil {
			c.Services = append(c.Services, s)
		}
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "nat") {
		c.NAT = append(c.NAT, randomNAT(t, i))
	}
	for range rapid.IntRange(0, 3).Draw(t, "rules") {
		r := config.FirewallRule{
			Action: rapid.SampledFrom([]config.Action{config.ActionDrop, config.ActionAccept, config.ActionReject, config.ActionLog, config.ActionNotrack, config.ActionMark}).Draw(t, "action"),
			Hook:   rapid.SampledFrom([]config.Hook{"", config.HookIngress, config.HookPrerouting, config.HookForward, config.HookInput}).Draw(t, "hook"),
			Prefix: "log:", Mark: 3, Burst: rapid.IntRange(0, 3).Draw(t, "burst"),
		}
		if rapid.Bool().Draw(t, "set") {
			r.Source.Set = "bad"
		} else if rapid.Bool().Draw(t, "prefix") {
			r.Destination.Prefix = randomPrefix(t)
		}
		if rapid.Bool().Draw(t, "limited") {
			r.Rate = config.Rate{Count: 7, Per: time.Minute}
		}
		for range rapid.IntRange(0, 2).Draw(t, "ports") {
			r.Protocol, r.Ports = flow.TCP, append(r.Ports, randomPorts(t))
		}
		if (*Datapath)(nil).CarriesRule(&r) == nil {
			c.Firewall.Rules = append(c.Firewall.Rules, r)
		}
	}
	return c
}

func randomPrefix(t *rapid.T) netip.Prefix {
	if rapid.Bool().Draw(t, "ipv6") {
		a := netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, byte(rapid.IntRange(0, 3).Draw(t, "byte"))})
		return netip.PrefixFrom(a, rapid.IntRange(33, 128).Draw(t, "bits")).Masked()
	}
	a := netip.AddrFrom4([4]byte{10, byte(rapid.IntRange(0, 3).Draw(t, "byte")), 0, byte(rapid.IntRange(0, 255).Draw(t, "byte"))})
	return netip.PrefixFrom(a, rapid.IntRange(8, 32).Draw(t, "bits")).Masked()
}

func randomPorts(t *rapid.T) flow.Ports {
	first := rapid.IntRange(1, 60000).Draw(t, "port")
	return flow.Ports{First: uint16(first), Last: uint16(first + rapid.SampledFrom([]int{0, 0, 1, 99}).Draw(t, "span"))}
}

func randomService(t *rapid.T, i int) config.Service {
	s := config.Service{
		Name:     rapid.SampledFrom([]string{"web", "mail", "Größe 1", "x"}).Draw(t, "name") + fmt.Sprint(i),
		Protocol: rapid.SampledFrom([]flow.Protocol{flow.TCP, flow.UDP, flow.SCTP, flow.Any}).Draw(t, "protocol"),
		Mode:     rapid.SampledFrom([]config.Mode{config.ModeDNAT, config.ModeDNAT, config.ModeFullNAT, config.ModeDSR, config.ModeStateless}).Draw(t, "mode"),
		Scheduler: rapid.SampledFrom([]config.Scheduler{
			config.SchedulerRR, config.SchedulerWRR, config.SchedulerRandom, config.SchedulerSourceHash, config.SchedulerSymmetricHash, config.SchedulerMaglev,
		}).Draw(t, "scheduler"),
		WhenDown: rapid.SampledFrom([]config.WhenDown{"", config.WhenDownReject, config.WhenDownDrop}).Draw(t, "when-down"),
	}
	six := rapid.Bool().Draw(t, "ipv6")
	ip := func(four, six16 string, n int, v6 bool) netip.Addr {
		if v6 {
			return addr(fmt.Sprintf("%s%x", six16, n))
		}
		return addr(fmt.Sprintf("%s%d", four, n))
	}
	l := config.Listen{Address: ip("192.0.2.", "2001:db8::", 10+i, six)}
	if s.Protocol != flow.Any {
		for range rapid.IntRange(0, 1).Draw(t, "ports") {
			l.Ports = append(l.Ports, randomPorts(t))
		}
	}
	s.Listen = []config.Listen{l}
	for n := range rapid.IntRange(1, 5).Draw(t, "backends") {
		k := config.Backend{
			Name: fmt.Sprint("b", n), Address: ip("10.0.2.", "fd00:2::", 2+n+10*i, six), Weight: rapid.IntRange(1, 9).Draw(t, "weight"),
			Priority: rapid.IntRange(1, 2).Draw(t, "priority"),
		}
		if rapid.Bool().Draw(t, "max") {
			k.MaxConnections = 5
		}
		s.Backends = append(s.Backends, k)
	}
	if rapid.Bool().Draw(t, "persistence") {
		s.Persistence = &config.Persistence{Key: []config.PersistenceKey{config.KeySourceAddress, config.KeySourceMAC}, Timeout: config.Duration(time.Minute)}
	}
	if rapid.Bool().Draw(t, "protected") {
		s.Limits = config.Limits{NewConnectionsPerClient: config.Rate{Count: 5, Per: time.Second}, ConnectionsPerClient: 9, StrictTCP: true}
		s.Allow, s.Deny, s.Mark = []string{"good"}, []string{"bad"}, 5
	}
	s.MSSClamp = rapid.Bool().Draw(t, "mss-clamp") && s.Mode != config.ModeDSR && s.Mode != config.ModeStateless
	if rapid.Bool().Draw(t, "sessions") {
		s.Sessions = []config.Session{{Client: randomPrefix(t), Backend: "b0"}, {Client: randomPrefix(t), Backend: "b1"}}
	}
	return s
}

func randomNAT(t *rapid.T, i int) config.NATRule {
	n := config.NATRule{Name: fmt.Sprint("nat", i), Type: rapid.SampledFrom([]config.NATType{
		config.NATMasquerade, config.NATSNAT, config.NATPortForward, config.NATStatic, config.NATNPT66,
	}).Draw(t, "type"), Out: "lan0"}
	if n.Type != config.NATNPT66 && rapid.Bool().Draw(t, "mark") {
		n.Mark = 9
	}
	n.MSSClamp = n.Type != config.NATNPT66 && n.Type != config.NATStatic && rapid.Bool().Draw(t, "mss-clamp")
	switch n.Type {
	case config.NATMasquerade, config.NATSNAT:
		n.ConnectionsPerClient = rapid.SampledFrom([]int{0, 3}).Draw(t, "connections-per-client")
		n.NewConnectionsPerClient = rapid.SampledFrom([]config.Rate{{}, {Count: 5, Per: time.Second}}).Draw(t, "new-connections-per-client")
		for range rapid.IntRange(0, 2).Draw(t, "sources") {
			n.Source = append(n.Source, randomPrefix(t))
		}
		n.FullyRandom = rapid.Bool().Draw(t, "random")
		if rapid.Bool().Draw(t, "except") {
			n.Except = []netip.Prefix{randomPrefix(t)}
		}
		if n.Type == config.NATSNAT {
			n.To.Addresses = []config.AddressRange{pool("203.0.113.1", "203.0.113.4"), pool("2001:db8::1", "2001:db8::1")}
		}
	case config.NATPortForward:
		n.Out = ""
		l := listen("203.0.113.9", fmt.Sprint(1000+i))
		n.Listen, n.Protocol, n.To = &l, flow.TCP, config.Target{Address: addr("10.0.2.7"), Port: 80}
	case config.NATStatic:
		n.External, n.Internal = prefix(fmt.Sprintf("198.51.%d.0/24", i)), prefix(fmt.Sprintf("10.9.%d.0/24", i))
	case config.NATNPT66:
		bits := rapid.SampledFrom([]string{"48", "40", "56"}).Draw(t, "bits")
		n.External, n.Internal = prefix(fmt.Sprintf("2001:db8:%x::/%s", 0xa00+256*i, bits)), prefix(fmt.Sprintf("fd00:%x::/%s", 0xa00+256*i, bits))
	}
	return n
}
