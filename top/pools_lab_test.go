// SPDX-License-Identifier: Apache-2.0

package top

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestSmallestPool: rules are read when the counters alone would call it a race, and
// then tell a small pool that is used up.
func TestSmallestPool(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "pools", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table ip nat { chain post { type nat hook postrouting priority srcnat; ip protocol tcp snat to 203.0.113.5:2000-2019; }\n}\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ns, err := conntrack.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	failed := conntrack.Counters{Drop: 5, InsertFailed: 5}
	var h Host
	if got := h.smallestPool(t.Context(), ns, conntrack.Counters{Drop: 5}, time.Now()); got != 0 || h.pools != nil {
		t.Errorf("pool of %d read for a full table", got)
	}
	if got := failed.Refused(h.smallestPool(t.Context(), ns, failed, time.Now())); got != (conntrack.Refused{Ports: 5}) {
		t.Errorf("%+v, want no ports for 5", got)
	}
}
