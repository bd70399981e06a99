// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestListenersOfInterfaces: two services have the same endpoint on different ingress interfaces. Each
// translates sources in its own way, and clamps.
func TestListenersOfInterfaces(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1")
	at := func(iface string) []config.Listen {
		l := listen("192.0.2.10", "80")
		l.Interface = iface
		return []config.Listen{l}
	}
	backends := []config.Backend{backend("a", "10.0.2.2", 8080)}
	b.apply(&config.Config{Services: []config.Service{
		{Name: "outer", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR, Listen: at("wan0"), Backends: backends, MSSClamp: true},
		{Name: "inner", Protocol: flow.TCP, Mode: config.ModeFullNAT, Scheduler: config.SchedulerRR, Listen: at("lan0"), Backends: backends, MSSClamp: true},
	}})
	for node, private := range map[string]bool{"client": false, "s2": true} {
		a, err := b.tcp(node, "", "192.0.2.10:80")
		if own := a.client.Addr() == addr("10.0.2.1"); err != nil || own != private {
			t.Errorf("from %s the server saw %v, %v\n%s", node, a.client, err, b.ruleset())
		}
	}
}

// TestBackendsNamedAsChains: a backend may have the name of a chain of its service.
func TestBackendsNamedAsChains(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	s := web(config.ModeDNAT, config.SchedulerRR)
	s.Limits = config.Limits{StrictTCP: true, ConnectionsPerBackend: 1000, NewConnections: config.Rate{Count: 1000, Per: time.Second}}
	for i := range s.Backends {
		s.Backends[i].Name = [...]string{"refused", "limits", "guard", "source", "a", "b"}[i]
	}
	b.apply(one(s))
	for _, vip := range virtual {
		if count := b.spread(6, func(int) (answer, error) { return b.tcp("client", "", vip) }); len(count) != 3 {
			t.Errorf("%s: answered by %v", vip, count)
		}
	}
}

// TestListenersFollowTheirAddress: an interface loses the address of one family, then both, and gets them back.
// Listeners without a fixed address use the current one, and no apply fails.
func TestListenersFollowTheirAddress(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1")
	c := &config.Config{
		Services: []config.Service{{Name: "svc", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
			Listen:   []config.Listen{{Interface: "wan0", Ports: []flow.Ports{{First: 443, Last: 443}}}},
			Backends: []config.Backend{backend("a", "10.0.2.2", 8080), backend("b", "fd00:2::2", 8080)}}},
		NAT: []config.NATRule{
			{Name: "web", Type: config.NATPortForward, Protocol: flow.TCP, To: config.Target{Address: addr("10.0.2.2"), Port: 8080},
				Listen: &config.Listen{Interface: "wan0", Ports: []flow.Ports{{First: 80, Last: 80}}}},
			{Name: "web6", Type: config.NATPortForward, Protocol: flow.TCP, To: config.Target{Address: addr("fd00:2::2"), Port: 8080},
				Listen: &config.Listen{Interface: "wan0", Ports: []flow.Ports{{First: 80, Last: 80}}}},
		},
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := b.gateway.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	check := func(answers map[string]bool) {
		t.Helper()
		b.apply(c)
		for at, want := range answers {
			for _, port := range []string{":80", ":443"} {
				a, err := b.tcp("client", "", at+port)
				if (err == nil && a.server == "s1") != want {
					t.Errorf("%s%s answered by %q, %v", at, port, a.server, err)
				}
			}
		}
		warned := 0
		for _, w := range b.d.Warnings() {
			if strings.Contains(w, "interface wan0 has no IPv") {
				warned++
			}
		}
		if lacking := 2 - len(answers); warned != lacking {
			t.Errorf("%d families lack an address, the warnings are %q", lacking, b.d.Warnings())
		}
	}
	both := map[string]bool{"10.0.1.1": true, "[fd00:1::1]": true}
	check(both)
	ip("-6", "addr", "flush", "dev", "wan0", "scope", "global")
	check(map[string]bool{"10.0.1.1": true})
	ip("addr", "flush", "dev", "wan0", "scope", "global")
	check(nil)
	ip("addr", "add", "fd00:1::1/64", "dev", "wan0", "nodad")
	check(map[string]bool{"[fd00:1::1]": true})
	ip("addr", "add", "10.0.1.1/24", "dev", "wan0")
	check(both)
}
