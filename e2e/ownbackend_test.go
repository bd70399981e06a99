// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestOwnBackends forwards services and a port-forward to servers on the gateway itself. The eBPF programs do
// not see their replies, so nftables handles them. A configuration that selects eBPF is refused before anything
// is applied.
func TestOwnBackends(t *testing.T) {
	labtest.Require(t, labtest.Root)
	const rules = `
services:
  - {name: own, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: dnat, backends: [{address: 10.0.2.1}]}
  - {name: full, listen: [{address: 192.0.2.20, ports: [80]}], protocol: udp, mode: fullnat, backends: [{address: 10.0.2.1}]}
nat:
  - {name: moved, type: port-forward, listen: {address: 10.0.1.1, ports: [81]}, protocol: udp, to: {address: 10.0.2.1, port: 80}}
`
	l := labtest.New(t, lab.Balancer())
	gateway := l.Node("gateway")
	serveDatagrams(t, l, "gateway own 10.0.2.1:80")
	if d, err := daemon.Start(t.Context(), gateway, binary, "test.yaml", []byte("datapath: ebpf\n"+rules)); err == nil {
		_ = d.Stop()
		t.Error("datapath ebpf was accepted")
	} else if strings.Contains(err.Error(), "is not available on this host") {
		labtest.Lacks(t, "%v", err)
	} else {
		for _, words := range []string{"service own: ", "service full: ", "nat rule moved: ", "10.0.2.1 is this host itself"} {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("the refusal does not say %q: %v", words, err)
			}
		}
	}
	d := start(t, gateway, rules)
	for _, to := range []string{"192.0.2.10:80", "192.0.2.20:80", "10.0.1.1:81"} {
		mustAnswer(t, host.Load{From: l.Node("client"), Target: netip.MustParseAddrPort(to), Ask: host.AskDatagram, Count: 10, Timeout: patience})
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}
