// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestUplinks wants default routes of IPv4 alone to be counted: rp_filter looks at no other.
func TestUplinks(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "uplinks", Nodes: []lab.NodeSpec{{Name: "host"}}})
	host := l.Node("host")
	for _, step := range []struct {
		commands string
		want     int
	}{
		{`ip link add up0 type veth peer name up1
			ip addr add 192.0.2.1/24 dev up0
			ip addr add 198.51.100.1/24 dev up1
			ip addr add 2001:db8:1::1/64 dev up0 nodad
			ip addr add 2001:db8:2::1/64 dev up1 nodad
			ip link set up0 up
			ip link set up1 up
			ip route add default via 192.0.2.2
			ip -6 route add default nexthop via 2001:db8:1::2 dev up0 nexthop via 2001:db8:2::2 dev up1`, 1},
		{"ip route add default via 198.51.100.2 metric 5", 2},
	} {
		for line := range strings.Lines(step.commands) {
			words := strings.Fields(line)
			if out, err := host.Command(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", line, err, out)
			}
		}
		if err := host.Do(func() error {
			if n := uplinks(); n != step.want {
				t.Errorf("%d uplinks, want %d", n, step.want)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}
