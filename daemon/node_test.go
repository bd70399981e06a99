// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

func TestNodeOf(t *testing.T) {
	nodes := []config.Node{{Name: "n1", Address: netip.MustParseAddr("10.255.0.1")}, {Name: "n2", Address: netip.MustParseAddr("10.255.0.2")}, {Name: "n2.example", Address: netip.MustParseAddr("10.255.0.3")}}
	for _, c := range []struct {
		host, addresses, want string
	}{
		{"n1", "10.255.0.1 10.0.0.1", "n1"},
		{"n1", "10.0.0.1", "n1"}, // before the address is added at boot
		{"n1.example", "10.0.0.1", "n1"},
		{"n2.example", "10.0.0.1", "n2.example"},
		{"gateway", "10.0.0.1 10.255.0.2", "n2"},
		{"n1", "10.255.0.1 10.255.0.2", "n1"},
		{"n1", "10.255.0.2", "the name of node n1 and the address 10.255.0.2 of node n2"},
		{"gateway", "10.0.0.1", "gateway, is none of cluster.nodes (n1, n2, n2.example)"},
	} {
		var addresses []netip.Addr
		for a := range strings.FieldsSeq(c.addresses) {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		got, err := nodeOf(nodes, c.host, addresses)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("host %s with %s: %s, want %s", c.host, c.addresses, got, c.want)
		}
	}
	if got, err := nodeName(nodes, "n2"); got != "n2" || err != nil {
		t.Error(got, err)
	}
	if _, err := Node("n2")(&config.Config{}); err == nil || !strings.Contains(err.Error(), "--node n2: the configuration has no cluster.nodes") {
		t.Errorf("--node without nodes: %v", err)
	}
	if got, err := Node("")(&config.Config{}); got != "" || err != nil {
		t.Error(got, err)
	}
	if _, err := nodeName(nodes, "n4"); err == nil || !strings.Contains(err.Error(), "--node n4 is none of") {
		t.Error(err)
	}
}
