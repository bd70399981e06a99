// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// mute drops all frames between the router and n3, as if the machine had lost its power: the interfaces keep their
// carrier.
const mute = `
table netdev mute {
	chain in { type filter hook ingress device n3 priority -500; policy drop; }
	chain out { type filter hook egress device n3 priority -500; policy drop; }
}
`

// TestClusterFailures ends a BGP session, stalls every daemon, and cuts a machine off. Connections continue with their
// servers. Datagrams are lost only between the loss of the machine and its detection by BFD.
func TestClusterFailures(t *testing.T) {
	labtest.Require(t, labtest.BPF, labtest.Tool("nft"))
	c := newHashCluster(t)
	lines := openLines(t, c, 40)
	client := c.lab.Node("client")
	dsr, stateless := sendNumbered(t, client, "192.0.2.30:53", 20), sendNumbered(t, client, "192.0.2.10:123", 20)
	flow := func(when string) {
		t.Helper()
		dsr.progress()
		stateless.progress()
		askAll(t, when, lines)
	}
	flow("before")

	c.speakers[1].do("disable router4")
	c.hops("192.0.2.30", "n1 n3")
	c.hops("192.0.2.10", "n1 n3")
	flow("the session of n2 is down")
	c.speakers[1].do("enable router4")
	c.hops("192.0.2.30", "n1 n2 n3")
	c.hops("192.0.2.10", "n1 n2 n3")
	flow("the session of n2 is up")

	updates := c.router.updates()
	for _, d := range c.gateways {
		if err := d.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	flow("all daemons are stalled")
	for _, d := range c.gateways {
		if err := d.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	flow("all daemons run again")
	if now := c.router.updates(); now != updates {
		t.Errorf("updates at the router:\nbefore %s\n after %s", updates, now)
	}
	for name, n := range map[string]*numbered{"dsr": dsr, "stateless": stateless} {
		if lost := n.finish(); lost > 0 {
			t.Errorf("%s: %d of %d datagrams are lost", name, lost, n.sent.Load())
		}
	}

	cut := c.lab.Node("router").Command(t.Context(), "nft", "-f", "-")
	cut.Stdin = strings.NewReader(mute)
	if out, err := cut.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c.hops("192.0.2.30", "n1 n2")
	c.hops("192.0.2.10", "n1 n2")
	askAll(t, "n3 is dead", lines)
	dsr = sendNumbered(t, client, "192.0.2.30:53", 20)
	dsr.progress()
	if lost := dsr.finish(); lost > 0 {
		t.Errorf("after the detection: %d of %d datagrams are lost", lost, dsr.sent.Load())
	}
}
