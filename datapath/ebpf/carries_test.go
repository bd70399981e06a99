// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
)

// TestOwnAddressThatCameLater gives the gateway the address of a backend. This datapath does not support the
// service from then on.
func TestOwnAddressThatCameLater(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	node := l.Node("gateway")
	d := gateway(t, node, config.AttachTC, oneServer)
	s := &config.Service{Mode: config.ModeDNAT, Backends: []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.2.77"), Port: 80}}}
	for _, own := range []bool{false, true, false} {
		if err := d.checkBackends(s); (err != nil) != own {
			t.Errorf("own: %t, refused: %v", own, err)
		}
		what := map[bool]string{false: "add", true: "del"}[own]
		if err := node.Command(t.Context(), "ip", "addr", what, "10.0.2.77/32", "dev", "lan0").Run(); err != nil {
			t.Fatal(err)
		}
	}
}
