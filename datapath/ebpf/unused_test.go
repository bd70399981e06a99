// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/netdev"
)

// TestUnusedInterfaceWithoutXDP has an interface without XDP support in its driver. It prevents an apply only if
// a rule uses it, and a warning names it.
func TestUnusedInterfaceWithoutXDP(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw := l.Node("gateway")
	if err := gw.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "guest0"}}
		return errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge))
	}); err != nil {
		t.Fatal(err)
	}
	d := gateway(t, gw, config.AttachXDP, oneServer)
	if w := strings.Join(d.Warnings(), "\n"); !strings.Contains(w, "interface guest0: xdp") {
		t.Errorf("warnings %s", w)
	}
	if _, err := d.Apply(t.Context(), snapshotOf(t, config.AttachXDP, oneServer+"nat: [{name: guests, type: masquerade, source: [10.9.0.0/24], in: guest0, out: wan0}]\n")); err == nil {
		t.Error("a rule names the interface, and the apply succeeds without a program there")
	}
}

// TestUnused distinguishes interfaces that rules use from others.
func TestUnused(t *testing.T) {
	h := &compile.Host{Details: map[int][]compile.HostAddress{1 << 20: {{Addr: netip.MustParseAddr("10.0.2.1"), Network: netip.MustParsePrefix("10.0.2.0/24")}}}}
	i := netdev.Interface{Index: 1 << 20, Name: "eth0"} // does not exist on this host
	for text, want := range map[string]bool{
		"{}": true,
		"services: [{name: a, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.1, ports: [80]}], backends: [{address: 10.0.3.2}]}]":                  true,
		"services: [{name: a, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.1, ports: [80]}], backends: [{address: 10.0.2.2}]}]":                  false,
		"services: [{name: a, protocol: tcp, mode: dnat, listen: [{address: 10.0.2.9, ports: [80]}], backends: [{address: 10.0.3.2}]}]":                   false,
		"services: [{name: a, protocol: tcp, mode: dnat, listen: [{interface: eth0, address: 192.0.2.1, ports: [80]}], backends: [{address: 10.0.3.2}]}]": false,
		"nat: [{name: a, type: masquerade, source: [10.0.3.0/24], out: wan0}]":                                                                            true,
		"nat: [{name: a, type: masquerade, source: [10.0.0.0/8], out: wan0}]":                                                                             false,
		"nat: [{name: a, type: masquerade, source: [10.0.3.0/24], out: eth*}]":                                                                            false,
		"nat: [{name: a, type: masquerade, out: wan0}]":                                                                                                   false,
		"nat: [{name: a, type: static, external: 192.0.2.0/28, internal: 10.0.3.0/28}]":                                                                   true,
		"nat: [{name: a, type: port-forward, listen: {address: 192.0.2.1, ports: [80]}, protocol: tcp, to: {address: 10.0.2.3}}]":                         false,
		"firewall: {sets: {bad: [203.0.113.0/24]}, rules: [{action: drop, source: '@bad'}]}":                                                              false,
	} {
		c, err := config.Decode("test", []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if got := needsNoProgram(c, h, i); got != want {
			t.Errorf("%s: unused %v, want %v", text, got, want)
		}
	}
}
