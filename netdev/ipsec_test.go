// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestIPsecPolicies reads what "ip xfrm policy" has written.
func TestIPsecPolicies(t *testing.T) {
	labtest.Require(t, labtest.Root)
	gw := labtest.New(t, lab.Topology{Name: "ipsec", Nodes: []lab.NodeSpec{{Name: "gateway"}}}).Node("gateway")
	const tunnel = " tmpl src 192.0.2.1 dst 198.51.100.1 proto esp mode tunnel"
	for _, c := range []struct{ policy, want string }{
		{"dir out src 10.1.10.0/24 dst 10.99.0.5/32" + tunnel, "10.1.10.0/24 to 10.99.0.5/32: encrypts"},
		{"dir out src 0.0.0.0/0 dst 10.99.0.0/24" + tunnel, "0.0.0.0/0 to 10.99.0.0/24: encrypts"},
		{"dir out src fd00::/16 dst ::/0 tmpl src 2001:db8::1 dst 2001:db8::2 proto esp mode tunnel", "fd00::/16 to ::/0: encrypts"},
		{"dir out src 192.0.2.1/32 dst 198.51.100.9/32 proto udp sport 1701 tmpl proto esp mode transport", "192.0.2.1/32 to 198.51.100.9/32: encrypts"},
		{"dir fwd src 10.5.0.0/16 dst 10.6.0.0/16 action block", "10.5.0.0/16 to 10.6.0.0/16: blocks"},
		{"dir out src 10.5.0.0/16 dst 10.6.0.0/16 action block", "10.5.0.0/16 to 10.6.0.0/16: blocks"},
		{"dir out src 10.5.0.0/16 dst 10.6.0.0/16", ""}, // lets pass
		{"dir fwd src 10.99.0.5/32 dst 10.1.10.0/24" + tunnel, ""},
		{"dir in src 10.99.0.5/32 dst 10.1.10.0/24" + tunnel, ""},
		{"dir in src 10.99.0.5/32 dst 10.1.10.0/24 action block", ""},
		{"dir out src 10.1.10.0/24 dst 10.99.0.5/32 if_id 7" + tunnel, ""},
		{"dir out src 10.1.10.0/24 dst 10.99.0.5/32 mark 7" + tunnel, ""},
	} {
		for _, args := range []string{"flush", "add " + c.policy} {
			if out, err := gw.Command(t.Context(), "ip", append([]string{"xfrm", "policy"}, strings.Fields(args)...)...).CombinedOutput(); err != nil {
				t.Fatalf("ip xfrm policy %s: %v: %s", args, err, out)
			}
		}
		var got []IPsecPolicy
		do(t, gw, func() (err error) { got, err = IPsecPolicies(); return err })
		var want []string
		if c.want != "" {
			want = []string{c.want}
		}
		if !slices.EqualFunc(got, want, func(p IPsecPolicy, s string) bool { return p.String() == s }) {
			t.Errorf("ip xfrm policy add %s: %v, want %q", c.policy, got, c.want)
		}
		if strings.Contains(c.policy, "sport") && (len(got) != 1 || got[0].SourcePort != 1701 || got[0].DestPort != 0 || got[0].Protocol != 17) {
			t.Errorf("ip xfrm policy add %s: %+v", c.policy, got)
		}
	}
}
