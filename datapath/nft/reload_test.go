// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"context"
	"fmt"
	"regexp"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestReloadsLoseNothing removes and adds a backend repeatedly while clients connect. Its last connections end,
// and no connection fails.
func TestReloadsLoseNothing(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	type result struct {
		made int
		err  error
	}
	done := make(chan result)
	go func() {
		r := result{}
		for r.err == nil && (r.made == 0 || ctx.Err() == nil) {
			if _, r.err = b.tcp("client", "", virtual["ipv4"]); r.err == nil {
				r.made++
			}
		}
		done <- r
	}()
	for i := range 20 {
		s := b.snapshot(c)
		if i%2 == 0 {
			s.Services[0].State[1], s.Services[0].State[4] = datapath.Drain, datapath.Drain
		}
		b.applySnapshot(s)
	}
	stop()
	if r := <-done; r.err != nil || r.made == 0 {
		t.Errorf("%d connections, then %v", r.made, r.err)
	}
}

// TestPacketThatMeetsAChange empties the maps of slots without changing the rules. A packet in transit during a
// change sees the same state. It must still reach a backend, from an address of the pool.
func TestPacketThatMeetsAChange(t *testing.T) {
	labtest.Require(t, labtest.Tool("nft"))
	maps := regexp.MustCompile(`(?m)^table (ip) (sluice)|^\tmap (targets-\S+|\S+/slots|\S+/pool) `)
	for name, change := range map[string]func(*config.Service){
		"plain":    func(*config.Service) {},
		"hash":     func(s *config.Service) { s.Scheduler = config.SchedulerMaglev },
		"backends": func(s *config.Service) { s.Backends[0].MaxConnections = 1000 },
		"pool": func(s *config.Service) {
			s.Mode = config.ModeFullNAT
			s.SourcePool = []config.AddressRange{pool("10.0.2.100", "10.0.2.100"), pool("10.0.2.102", "10.0.2.103")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, lab.Balancer())
			b.tcpServers(8080, "s1", "s2", "s3")
			s := web(config.ModeDNAT, config.SchedulerRR)
			oneFamily(&s, "ipv4")
			change(&s)
			b.apply(one(s))
			table, flushed := "", 0
			for _, m := range maps.FindAllStringSubmatch(b.ruleset(), -1) {
				if m[2] != "" {
					table = m[1]
					continue
				}
				out, err := b.gateway.Command(t.Context(), "nft", "flush", "map", table, "sluice", m[3]).CombinedOutput()
				if err != nil {
					t.Fatalf("flush %s: %v\n%s", m[3], err, out)
				}
				flushed++
			}
			if flushed == 0 {
				t.Fatal("there was no map of slots")
			}
			for i := range 4 {
				a, err := b.tcp("client", clientAddr("ipv4", i), virtual["ipv4"])
				if err != nil {
					t.Fatal(err)
				}
				if from := a.client.Addr(); name == "pool" && from != addr("10.0.2.100") {
					t.Errorf("the server saw %s", from)
				}
			}
		})
	}
}

// TestRestartIsSeamless closes the datapath without removing anything, like a killed process. Another one adopts
// the rules.
func TestRestartIsSeamless(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeFullNAT, config.SchedulerMaglev))
	oneFamily(&c.Services[0], "ipv4")
	b.apply(c)
	conn, err := b.dial("tcp", "client", "", virtual["ipv4"])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := b.d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.tcp("client", "", virtual["ipv4"]); err != nil {
		t.Errorf("while no process runs: %v", err)
	}
	b.d = b.open()
	if change := b.applySnapshot(b.snapshot(c)); !change.Empty() {
		t.Errorf("adoption changed %+v", change)
	}
	if _, err := fmt.Fprintln(conn, "still there?"); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(conn)
	_, _ = r.ReadString('\n')
	if line, err := r.ReadString('\n'); err != nil || line != "still there?\n" {
		t.Errorf("the old connection answers %q, %v", line, err)
	}
}
