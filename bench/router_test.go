// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestRouterConfigurations: the daemon accepts the configuration of each row, and only rows with a policy drop
// packets.
func TestRouterConfigurations(t *testing.T) {
	for _, by := range []string{"sluice", "ebpf", "fullnat"} {
		for _, policy := range []bool{false, true} {
			r := router{by: by, policy: policy}
			c, err := config.Decode("router", []byte(r.sluiceConfig()))
			if err != nil {
				t.Errorf("%+v: %v\n%s", r, err, r.sluiceConfig())
				continue
			}
			drops := 0
			for i := range c.Firewall.Rules {
				if c.Firewall.Rules[i].Action == "drop" {
					drops++
				}
			}
			if by != "fullnat" && (drops > 0) != policy {
				t.Errorf("%+v: %d rules drop", r, drops)
			}
		}
	}
	for _, policy := range []bool{false, true} {
		if rules := (router{by: "iptables", policy: policy}).iptablesRules(); strings.Contains(rules, "-j DROP") != policy {
			t.Errorf("policy %v:\n%s", policy, rules)
		}
	}
}

// TestRouterWithoutPrograms: a row with DHCP and VPN names the program that the host lacks.
func TestRouterWithoutPrograms(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, row := range routerSuite().Rows {
		if why := row.Absent(Point{}); why != "iperf3 is not installed" {
			t.Errorf("%s: %q", row.Name, why)
		}
	}
	if why := tool("dnsmasq", "openvpn")(Point{}); why != "dnsmasq is not installed" {
		t.Errorf("%q", why)
	}
}
