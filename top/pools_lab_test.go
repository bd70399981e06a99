// SPDX-License-Identifier: Apache-2.0

package top

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestSmallestPool: if the counters alone indicate a race, the rules are read. They show a small exhausted pool.
func TestSmallestPool(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "pools", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table ip nat { chain post { type nat hook postrouting priority srcnat; ip protocol tcp snat to 203.0.113.5:2000-2019; }\n}\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	failed := conntrack.Counters{Drop: 5, InsertFailed: 5}
	var h Host
	if got := h.smallestPool(t.Context(), ns, conntrack.Counters{Drop: 5}, time.Now()); got != 0 || h.pools != nil {
		t.Errorf("pool of %d read for a full table", got)
	}
	if got := failed.Refused(h.smallestPool(t.Context(), ns, failed, time.Now()), conntrack.Use{}); got != (conntrack.Refused{Ports: 5}) {
		t.Errorf("%+v, want no ports for 5", got)
	}
}

// TestNameGivenAgain: a namespace that has the name of an earlier one begins at zero.
func TestNameGivenAgain(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "again", Nodes: []lab.NodeSpec{{Name: "first"}, {Name: "second"}}})
	h := &Host{}
	for _, node := range []string{"first", "second"} {
		ns, err := netdev.NamespaceAt(l.Node(node).Path())
		if err != nil {
			t.Fatal(err)
		}
		if node == "first" { // makes its counters differ from a new one's
			c, err := conntrack.OpenIn(ns)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			made := entry(1)
			if n, err := c.Insert(t.Context(), []conntrack.Entry{made}); n != 1 || err != nil {
				t.Fatalf("%d entries made: %v", n, err)
			}
		}
		ns.Name = "blue"
		h.Only = []netdev.Namespace{ns}
		c, err := h.Counts(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Fills[0].Counted; got != (conntrack.Counters{CPU: got.CPU}) {
			t.Errorf("the %s namespace of the name is said to have counted %+v", node, got)
		}
	}
}

// TestFlowsOfThoseThatAreLeft: a namespace that ended since the list was made hides no
// other one's connections.
func TestFlowsOfThoseThatAreLeft(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "left", Nodes: []lab.NodeSpec{{Name: "one"}}})
	ns, err := netdev.NamespaceAt(l.Node("one").Path())
	if err != nil {
		t.Fatal(err)
	}
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	made := entry(1)
	if n, err := c.Insert(t.Context(), []conntrack.Entry{made}); n != 1 || err != nil {
		t.Fatalf("%d entries made: %v", n, err)
	}
	ended := netdev.Namespace{Name: "pid 1 (gone)", Path: ns.Path + "-ended", Inode: 1}
	h := &Host{Only: []netdev.Namespace{ended, ns}}
	list, err := h.Flows(t.Context(), conntrack.Filter{}, "", 10)
	if err != nil || len(list) != 1 {
		t.Errorf("%d connections, %v; want one", len(list), err)
	}
}
