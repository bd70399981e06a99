// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestInterfacesComeAndGo adds a second link between the client and the gateway while the gateway runs, and
// removes it again. A service in mode dsr depends on the ingress interface, so it works over the new link only
// if the datapath has followed. A later change of the configuration must not fail because the kernel removed
// parts with the interface.
func TestInterfacesComeAndGo(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveDatagrams(t, l, "s1 a 192.0.2.30:80")
		gateway, client := l.Node("gateway"), l.Node("client")
		config := force + "flowtable: off\n" + modeCase{mode: "dsr", protocol: "udp"}.config("IPv4")
		config = strings.Replace(config, ", {name: b, address: 10.0.2.3}", "", 1)
		d := start(t, gateway, config)
		answers := func(by string) {
			t.Helper()
			labtest.Eventually(t, patience, "an answer by way of "+by, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				_, err := host.AskDatagram(ctx, client, netip.MustParseAddrPort("10.0.1.2:0"), netip.MustParseAddrPort("192.0.2.30:80"))
				return err
			})
		}
		answers("the cable that was there")
		for _, name := range []string{"new0", "new1", "new0"} { // includes a reused name
			ip(t, gateway, "link add "+name+" type veth peer name far0 netns "+client.Name())
			ip(t, gateway, "addr add 10.0.9.1/24 dev "+name)
			ip(t, gateway, "link set "+name+" up")
			ip(t, client, "addr add 10.0.9.2/24 dev far0")
			ip(t, client, "link set far0 up")
			ip(t, client, "route add 192.0.2.30/32 via 10.0.9.1")
			answers("the new cable " + name)
			ip(t, gateway, "link del "+name)
			answers("the old cable, without " + name)
			changed := strings.Replace(config, "scheduler: source-hash", "scheduler: maglev # "+name, 1)
			for _, text := range []string{changed, config} {
				if _, err := d.Apply(t.Context(), "test.yaml", []byte(text)); err != nil {
					t.Fatalf("apply after %s is gone: %v", name, err)
				}
			}
			answers("the old cable, after a change")
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
		if _, err := exec.LookPath("nft"); err == nil {
			out, err := gateway.Command(t.Context(), "nft", "list", "ruleset").CombinedOutput()
			if err != nil || len(strings.TrimSpace(string(out))) > 0 {
				t.Errorf("after the end there is, %v:\n%s", err, out)
			}
		}
	})
}
