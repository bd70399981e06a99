// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestListenersOfInterfaces: two services on one endpoint, told apart by where packets come
// in; each translates sources in its own way, and clamps.
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
