// SPDX-License-Identifier: Apache-2.0

package flow_test

import (
	"testing"

	"github.com/sluice-lb/sluice/flow"
)

// TestParseEnd reads the ends of a packet: of a protocol without ports an address alone.
func TestParseEnd(t *testing.T) {
	for _, c := range []struct {
		protocol, text, want string
	}{
		{"tcp", "192.0.2.1:80", "192.0.2.1:80"},
		{"tcp", "192.0.2.1", ""},
		{"icmp", "192.0.2.1:7", "192.0.2.1:7"},
		{"esp", "192.0.2.1", "192.0.2.1:0"},
		{"50", "2001:db8::1", "[2001:db8::1]:0"},
		{"gre", "[2001:db8::1]:9", "[2001:db8::1]:0"},
		{"47", "192.0.2.1:", ""},
	} {
		p, err := flow.ParseProtocol(c.protocol)
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.ParseEnd(c.text)
		if (err == nil) != (c.want != "") || err == nil && got.String() != c.want {
			t.Errorf("%s %s: %s, %v", c.protocol, c.text, got, err)
		}
	}
}
