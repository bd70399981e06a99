// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

func TestPersistence(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	keys := map[string][]config.PersistenceKey{
		"source address":   nil,
		"source hardware":  {config.KeySourceMAC},
		"source and port":  {config.KeySourceAddress, config.KeyDestAddress, config.KeyDestPort},
		"destination only": {config.KeyDestAddress, config.KeyDestMAC},
	}
	for name, key := range keys {
		t.Run(name, func(t *testing.T) {
			c := one(web(config.ModeDNAT, config.SchedulerRR))
			c.Services[0].Persistence = &config.Persistence{Key: key, Timeout: config.Duration(time.Minute)}
			b.apply(&config.Config{})
			b.apply(c)
			for family, vip := range virtual {
				from := clientAddr(family, 1)
				count := b.spread(6, func(int) (answer, error) { return b.tcp("client", from, vip) })
				if len(count) != 1 {
					t.Errorf("%s: a client was answered by %v", family, count)
				}
			}
		})
	}
	t.Run("clients of a backend that went down move", func(t *testing.T) {
		c := one(web(config.ModeDNAT, config.SchedulerRR))
		c.Services[0].Persistence = &config.Persistence{}
		b.apply(c)
		first, err := b.tcp("client", "10.64.0.9", virtual["ipv4"])
		if err != nil {
			t.Fatal(err)
		}
		s := b.snapshot(c)
		down := strings.Index("s1s2s3", first.server) / 2
		s.Services[0].State[down], s.Services[0].State[down+3] = datapath.Down, datapath.Down
		b.applySnapshot(s)
		count := b.spread(6, func(int) (answer, error) { return b.tcp("client", "10.64.0.9", virtual["ipv4"]) })
		if count[first.server] > 0 || len(count) != 1 {
			t.Errorf("%s is down, but: %v", first.server, count)
		}
	})
	t.Run("sessions", func(t *testing.T) {
		c := one(web(config.ModeDNAT, config.SchedulerRR))
		c.Services[0].Sessions = []config.Session{
			{Client: prefix("10.64.0.0/24"), Backend: "b"}, {Client: prefix("10.64.0.5/32"), Backend: "c"}, {Client: prefix("fd00:64::/64"), Backend: "a6"},
		}
		b.apply(c)
		for from, want := range map[string]string{"10.64.0.7": "s2", "10.64.0.5": "s3", "fd00:64::7": "s1"} {
			vip := virtual["ipv4"]
			if strings.Contains(from, ":") {
				vip = virtual["ipv6"]
			}
			count := b.spread(4, func(int) (answer, error) { return b.tcp("client", from, vip) })
			if count[want] != 4 {
				t.Errorf("%s is pinned to %s, but was answered by %v", from, want, count)
			}
		}
	})
}

// held opens n connections and keeps them open. The first few are expected to open.
func (b *bench) held(n, opens int, from, to string) (open []net.Conn) {
	for i := range n {
		if c, err := b.dialIf(i < opens, "tcp", "client", from, to); err == nil {
			open = append(open, c)
		}
	}
	return open
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		name   string
		limits config.Limits
		max    int // limit of backend a
		open   int // opened connections of 6 from one client
		other  int // opened connections of 2 from another client afterwards
	}{
		{"connections per client", config.Limits{ConnectionsPerClient: 4}, 0, 4, 2},
		{"connections", config.Limits{Connections: 4}, 0, 4, 0},
		{"connections per backend", config.Limits{ConnectionsPerBackend: 1}, 0, 3, 0},
		{"new connections", config.Limits{NewConnections: config.Rate{Count: 4, Per: time.Hour}}, 0, 4, 0},
		{"new connections per client", config.Limits{NewConnectionsPerClient: config.Rate{Count: 4, Per: time.Hour}}, 0, 4, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, lab.Balancer())
			b.tcpServers(8080, "s1", "s2", "s3")
			for family, vip := range virtual {
				s := web(config.ModeDNAT, config.SchedulerRR)
				oneFamily(&s, family)
				s.Limits = c.limits
				b.apply(one(s))
				if open := b.held(6, c.open, clientAddr(family, 1), vip); len(open) != c.open {
					t.Errorf("%s: %d of 6 connections opened, want %d\n%s", family, len(open), c.open, b.ruleset())
				}
				if family == "ipv6" {
					continue // the other addresses of the /64 are the same client
				}
				if open := b.held(2, c.other, clientAddr(family, 2), vip); len(open) != c.other {
					t.Errorf("%s: %d of 2 connections of another client opened, want %d", family, len(open), c.other)
				}
			}
			counters, err := b.d.Counters(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if counters.Services[0].Refused == 0 {
				t.Errorf("nothing was counted as refused: %+v", counters.Services)
			}
		})
	}
}

func TestStrictTCPAndResetRate(t *testing.T) {
	for _, protocol := range []flow.Protocol{flow.TCP, flow.Any} {
		t.Run(protocol.String(), func(t *testing.T) { strictTCP(t, protocol) })
	}
}

func strictTCP(t *testing.T, protocol flow.Protocol) {
	b := newBench(t, lab.Balancer())
	s := web(config.ModeDNAT, config.SchedulerRR)
	if s.Protocol = protocol; protocol == flow.Any {
		for i := range s.Listen {
			s.Listen[i].Ports = nil
		}
		for i := range s.Backends {
			s.Backends[i].Port = 0
		}
		b.tcpServers(80, "s1", "s2", "s3")
	}
	b.tcpServers(8080, "s1", "s2", "s3")
	s.Limits = config.Limits{StrictTCP: true, ResetRate: config.Rate{Count: 2, Per: time.Hour}}
	b.apply(one(s))
	for _, vip := range virtual {
		b.spread(3, func(int) (answer, error) { return b.tcp("client", "", vip) })
	}
	// Resets: closing with unread data and no linger sends one.
	for range 5 {
		c, err := b.dial("tcp", "client", "", virtual["ipv4"])
		if err != nil {
			t.Fatal(err)
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	// The server's data after the end of the client causes more resets.
	n := uint64(0)
	b.eventually("at least 3 packets to be refused of 5 resets at 2 an hour", func() bool { n = b.refused("web"); return n >= 3 })
	// A segment without a connection.
	if err := b.segment("client", "10.64.0.1:4000", virtual["ipv4"], 0x10); err != nil {
		t.Fatal(err)
	}
	b.eventually("the stray segment to be refused", func() bool { return b.refused("web") > n })
}

func (b *bench) refused(service string) uint64 {
	b.Helper()
	counters, err := b.d.Counters(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	for _, s := range counters.Services {
		if s.Name == service {
			return s.Refused
		}
	}
	b.Fatalf("no counters of service %s", service)
	return 0
}

func TestAccessSets(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	c.Firewall.Sets = map[string][]prefixT{
		"partners": {prefix("10.64.0.0/24"), prefix("10.64.0.0/25"), prefix("10.64.1.0/24"), prefix("fd00:64::/64")},
		"banned":   {prefix("10.64.0.66/32"), prefix("fd00:64::42/128")},
	}
	c.Services[0].Allow, c.Services[0].Deny = []string{"partners"}, []string{"banned"}
	b.apply(c)
	for from, ok := range map[string]bool{
		"10.64.0.1": true, "10.64.0.200": true, "10.64.1.9": true, "10.64.0.66": false, "10.64.2.1": false, "fd00:64::1": true, "fd00:64::42": false,
	} {
		vip := virtual["ipv4"]
		if strings.Contains(from, ":") {
			vip = virtual["ipv6"]
		}
		_, err := b.dialIf(ok, "tcp", "client", from, vip)
		if (err == nil) != ok {
			t.Errorf("%s: %v, want allowed %v", from, err, ok)
		}
	}
}

func TestMarksAndLog(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	c.Services[0].Mark = 0x11
	c.Services[0].Backends[1].Mark = 0x22
	c.Services[0].Log = &config.Log{Prefix: "web:", Level: "notice", Rate: config.Rate{Count: 5, Per: time.Second}}
	b.apply(c)
	b.spread(3, func(int) (answer, error) { return b.tcp("client", "", virtual["ipv4"]) })
	marks := make(map[uint32]int)
	for _, f := range b.tracked() {
		marks[f.Mark]++
	}
	if marks[0x11] != 2 || marks[0x22] != 1 {
		t.Errorf("marks of connections: %v", marks)
	}
	if text := b.ruleset(); !strings.Contains(text, `log prefix "web:" level notice`) {
		t.Errorf("no log rule in\n%s", text)
	}
}

func TestFirewall(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1")
	c := &config.Config{Interfaces: []string{"wan0", "lan0"}}
	c.Firewall.Sets = map[string][]prefixT{
		"banned": {prefix("10.64.9.0/24"), prefix("fd00:64::bad/128")}, "spared": {prefix("10.64.9.7/32")},
	}
	c.Firewall.Rules = []config.FirewallRule{
		{Name: "spare", Action: config.ActionAccept, Source: config.Match{Set: "spared"}},
		{Action: config.ActionDrop, Source: config.Match{Set: "banned"}},
		{Name: "no-udp", Action: config.ActionReject, Hook: config.HookForward, Protocol: flow.UDP, Ports: []flow.Ports{{First: 7000, Last: 7999}, {First: 9000, Last: 9000}}},
		{Name: "quiet", Action: config.ActionNotrack, Source: config.Match{Prefix: prefix("10.64.8.0/24")}},
		{Name: "back", Action: config.ActionNotrack, Destination: config.Match{Prefix: prefix("10.64.8.0/24")}},
		{Name: "log", Action: config.ActionLog, Protocol: flow.TCP, Rate: config.Rate{Count: 6, Per: time.Minute}, Burst: 1, Prefix: "NAT:", Level: "debug"},
		{Name: "closed", Action: config.ActionReject, Hook: config.HookForward, Destination: config.Match{Prefix: prefix("10.0.2.4/32")}},
		{Name: "mark", Action: config.ActionMark, In: "wan0", Out: "lan0", Mark: 7},
	}
	b.apply(c)
	for from, ok := range map[string]bool{"10.64.0.1": true, "10.64.9.1": false, "10.64.9.7": true, "fd00:64::bad": false, "fd00:64::1": true} {
		to := "10.0.2.2:8080"
		if strings.Contains(from, ":") {
			to = "[fd00:2::2]:8080"
		}
		if _, err := b.dialIf(ok, "tcp", "client", from, to); (err == nil) != ok {
			t.Errorf("%s: %v, want open %v", from, err, ok)
		}
	}
	if _, err := b.tcp("client", "", "10.0.2.4:8080"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a rejected TCP connection: %v, want refused", err)
	}
	if text := b.ruleset(); !strings.Contains(text, "reject with tcp reset") {
		t.Errorf("TCP is not answered by a reset:\n%s", text)
	}
	connections := map[uint32]bool{}
	for _, f := range b.tracked() {
		connections[f.Mark] = true
	}
	if !connections[7] {
		t.Errorf("no connection has the mark of the rule: %v", connections)
	}
	if _, err := b.udp("client", "", "10.0.2.2:7500"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("udp port 7500: %v, want refused", err)
	}
	if _, err := b.tcp("client", "10.64.8.1", "10.0.2.2:8080"); err != nil {
		t.Error(err)
	}
	for _, f := range b.tracked() {
		if f.Forward.SrcIP.String() == "10.64.8.1" {
			t.Errorf("notrack: tracked all the same: %v", f)
		}
	}
	counters, err := b.d.Counters(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range counters.Rules {
		if r.Packets == 0 {
			t.Errorf("rule %s counted nothing: %+v", r.Name, counters.Rules)
		}
	}
	if len(counters.Rules) != len(c.Firewall.Rules) {
		t.Errorf("%d rules counted, want %d", len(counters.Rules), len(c.Firewall.Rules))
	}
}
