// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"context"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/flow"
)

// TestSourceRules finds the rule that translates a packet, by its output interface, source and chain.
func TestSourceRules(t *testing.T) {
	inNamespace(t, `table ip nat {
	chain post {
		type nat hook postrouting priority srcnat;
		ip daddr 10.2.0.0/24 accept
		ip saddr 10.0.0.0/24 oifname "wan0" masquerade
		ip saddr 10.1.0.0/24 jump vpn
	}
	chain vpn {
		oifname "wan1" snat to 203.0.113.9
	}
}
table ip6 nat {
	chain post {
		type nat hook postrouting priority srcnat;
		oifname "wan0" masquerade
	}
}
`, func() error {
		r, err := Read(context.Background())
		for _, tc := range []struct {
			source, out string
			want        bool
		}{
			{"10.0.0.2", "wan0", true}, {"10.0.0.2", "wan1", false}, {"10.1.0.2", "wan0", false}, {"10.1.0.2", "wan1", true}, {"10.3.0.2", "wan1", false},
			{"fd00::2", "wan0", true}, {"fd00::2", "wan1", false},
		} {
			source := netip.MustParseAddr(tc.source)
			p := &Packet{Tuple: flow.Tuple{Protocol: flow.TCP, Source: netip.AddrPortFrom(source, 4000), Dest: netip.AddrPortFrom(source.Next(), 443)}, Out: tc.out, States: []uint32{StateNew}}
			if source.Is4() {
				p.Header = append([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0}, append(source.AsSlice(), source.Next().AsSlice()...)...)
			} else {
				p.Header = append([]byte{0x60, 0, 0, 0, 0, 20, 6, 64}, append(source.AsSlice(), source.Next().AsSlice()...)...)
			}
			got := false
			for i := range r.Sources {
				got = got || r.Sources[i].Fits(p)
			}
			if got != tc.want {
				t.Errorf("%s by %s: translated %v, want %v", tc.source, tc.out, got, tc.want)
			}
		}
		return err
	})
}
