// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestBroadcasts publishes a port of the broadcast address of a connected network.
func TestBroadcasts(t *testing.T) {
	networks := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/23"), netip.MustParsePrefix("10.1.0.0/31"), netip.MustParsePrefix("fd00:2::/64")}
	for target, warned := range map[string]bool{"10.0.3.255": true, "10.0.2.255": false, "10.1.0.1": false, "fd00:2::ffff:ffff:ffff:ffff": false} {
		for _, c := range []struct {
			on   []string // interfaces with bc_forwarding
			want bool
		}{{nil, warned}, {[]string{"all"}, warned}, {[]string{"wan0"}, warned}, {[]string{"all", "wan0/7"}, false}, {[]string{"all", "lan0"}, warned}} {
			s := &Snapshot{NAT: []*config.NATRule{{Name: "wol", Type: config.NATPortForward, To: config.Target{Address: netip.MustParseAddr(target)}}}}
			got := Broadcasts(s, networks, []string{"wan0.7"}, func(key string) string {
				for _, name := range c.on {
					if key == "net.ipv4.conf."+name+".bc_forwarding" {
						return "1"
					}
				}
				return "0"
			})
			if (len(got) == 1 && strings.HasPrefix(got[0], "nat wol: target "+target+" is the broadcast address of 10.0.2.0/23")) != c.want || len(got) > 1 {
				t.Errorf("%s with bc_forwarding on %v: %q", target, c.on, got)
			}
		}
	}
}
