// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// filesClock reads the clock of file times, which advances only at ticks. On a machine with late ticks it may be far
// behind.
func filesClock(t *testing.T) time.Time {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
		t.Fatal(err)
	}
	return time.Unix(now.Unix())
}

// TestCreated: a named namespace has a creation time.
func TestCreated(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := filesClock(t)
	l := labtest.New(t, lab.Topology{Name: "created", Nodes: []lab.NodeSpec{{Name: "node"}}})
	after := time.Now()
	ns, err := netdev.NamespaceAt(l.Node("node").Path())
	if err != nil {
		t.Fatal(err)
	}
	if created, known := ns.Created(); !known || created.Before(before) || created.After(after) {
		t.Errorf("created %v (%v), want between %v and %v", created, known, before, after)
	}
	if created, known := netdev.HostNamespace().Created(); known {
		t.Errorf("the host's own was created %v", created)
	}
}
