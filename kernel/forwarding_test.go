// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"strings"
	"testing"
)

// TestForwardingOff asks the settings that the kernel asks.
func TestForwardingOff(t *testing.T) {
	for _, c := range []struct {
		iface string
		v6    bool
		zero  string // settings that are 0
		want  string // to be written
	}{
		{"lan0", false, "", ""},
		{"lan0", false, "net.ipv4.ip_forward net.ipv4.conf.lan0.forwarding", "net.ipv4.ip_forward=1"},
		{"lan0", false, "net.ipv4.conf.lan0.forwarding", "net.ipv4.conf.lan0.forwarding=1"},
		{"lan0.5", false, "net.ipv4.conf.lan0/5.forwarding", "net.ipv4.conf.lan0/5.forwarding=1"},
		{"lan0", false, "net.ipv4.ip_forward net.ipv4.conf.wan0.forwarding", ""},
		{"lan0", false, "net.ipv6.conf.all.forwarding net.ipv6.conf.lan0.forwarding", ""},
		{"lan0", true, "net.ipv6.conf.all.forwarding", "net.ipv6.conf.all.forwarding=1"},
		{"lan0", true, "net.ipv6.conf.lan0.forwarding", "net.ipv6.conf.lan0.forwarding=1"},
	} {
		read := func(key string) string {
			for zero := range strings.FieldsSeq(c.zero) {
				if key == zero {
					return "0"
				}
			}
			return "1"
		}
		got := ForwardingOff(read, c.iface, c.v6)
		if (got == "") != (c.want == "") || !strings.HasSuffix(got, c.want+map[bool]string{true: "\""}[c.want != ""]) {
			t.Errorf("%s, 0 are %q: %s, want %s", c.iface, c.zero, got, c.want)
		}
	}
	if got := Sysctl("net.ipv4.conf.lo.forwarding"); got != "0" && got != "1" {
		t.Errorf("of lo: %q", got)
	}
}

// TestForwardingWarnings warns once about a family that is off for all interfaces, about each named interface, and
// about the others if none forwards.
func TestForwardingWarnings(t *testing.T) {
	for _, c := range []struct {
		zero          string // settings that are 0
		named, others string
		want          string // beginnings of the warnings
	}{
		{"", "wan0", "wan0 lan0", ""},
		{"net.ipv6.conf.all.forwarding", "", "wan0 lan0", ""}, // IPv6 is not needed
		{"net.ipv4.ip_forward net.ipv4.conf.wan0.forwarding net.ipv4.conf.lan0.forwarding", "wan0", "wan0 lan0", "net.ipv4.ip_forward"},
		{"net.ipv4.ip_forward net.ipv4.conf.wan0.forwarding net.ipv4.conf.lan0.forwarding", "", "wan0 lan0", "net.ipv4.ip_forward"},
		{"net.ipv4.ip_forward", "", "", "net.ipv4.ip_forward"},
		{"net.ipv4.conf.lan0.forwarding", "lan0 wan0", "wan0 lan0", "net.ipv4.conf.lan0.forwarding"},
		{"net.ipv4.conf.mgmt.forwarding", "", "mgmt wan0", ""},
	} {
		read := func(key string) string {
			for zero := range strings.FieldsSeq(c.zero) {
				if key == zero {
					return "0"
				}
			}
			return "1"
		}
		var got []string
		for _, w := range ForwardingWarnings(read, true, false, strings.Fields(c.named), strings.Fields(c.others)) {
			key, _, _ := strings.Cut(w, " is 0")
			got = append(got, key)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("0 are %q, named %q, others %q: %q, want %q", c.zero, c.named, c.others, got, c.want)
		}
	}
}
