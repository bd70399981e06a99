// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"context"
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
)

// TestReloadsLoseNothing takes a backend out and in again while clients connect
// without pause: its last connections end, and no connection fails.
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

// TestRestartIsSeamless closes the datapath without removing anything, as a
// process that is killed does, and adopts the rules with another.
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
