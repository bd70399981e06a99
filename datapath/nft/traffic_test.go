// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// web is a TCP service over s1, s2 and s3 in both families.
func web(mode config.Mode, scheduler config.Scheduler) config.Service {
	return config.Service{
		Name: "web", Protocol: flow.TCP, Mode: mode, Scheduler: scheduler,
		Listen: []config.Listen{listen("192.0.2.10", "80"), listen("2001:db8::10", "80")},
		Backends: []config.Backend{
			backend("a", "10.0.2.2", 8080), backend("b", "10.0.2.3", 8080), backend("c", "10.0.2.4", 8080),
			backend("a6", "fd00:2::2", 8080), backend("b6", "fd00:2::3", 8080), backend("c6", "fd00:2::4", 8080),
		},
	}
}

var virtual = map[string]string{"ipv4": "192.0.2.10:80", "ipv6": "[2001:db8::10]:80"}

func TestRoundRobinIsSmooth(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	b.apply(one(web(config.ModeDNAT, config.SchedulerRR)))
	for family, vip := range virtual {
		t.Run(family, func(t *testing.T) {
			var order []string
			count := b.spread(9, func(int) (answer, error) {
				a, err := b.tcp("client", "", vip)
				order = append(order, a.server)
				return a, err
			})
			if count["s1"] != 3 || count["s2"] != 3 || count["s3"] != 3 {
				t.Errorf("spread %v, want 3 each", count)
			}
			for i := 1; i < len(order); i++ {
				if order[i] == order[i-1] {
					t.Errorf("order %v repeats a server at %d", order, i)
				}
			}
		})
	}
}

func TestApplyTwiceChangesNothing(t *testing.T) {
	b := newBench(t, lab.Balancer())
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	if change := b.applySnapshot(b.snapshot(c)); !change.Empty() {
		t.Errorf("second apply changed %+v", change)
	}
	adopter := b.open()
	change, err := adopter.Apply(context.Background(), b.snapshot(c))
	if err != nil {
		t.Fatal(err)
	}
	if !change.Empty() {
		t.Errorf("a new process changed %+v", change)
	}
}
