// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestMasqueradeWaitsForItsInterface starts the gateway before its uplink exists, as at boot. The uplink appears
// without an address at first, and appears again with another address.
func TestMasqueradeWaitsForItsInterface(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Office())
		serveWeb(t, l, "outside internet "+outsideWeb)
		gateway, outside := l.Node("gateway"), l.Node("outside")
		d := start(t, gateway, force+"nat:\n  - {name: office, type: masquerade, source: [10.1.10.0/24], out: later0}\n")
		warned := func(of string) {
			t.Helper()
			labtest.Eventually(t, patience, "a warning of "+of, func() error {
				status, err := d.Status(t.Context())
				if err == nil && !slices.ContainsFunc(status.Warnings, func(w string) bool { return strings.Contains(w, of) }) {
					err = fmt.Errorf("warnings %q", status.Warnings)
				}
				return err
			})
		}
		for _, line := range []string{"192.0.2", "198.18.7"} {
			warned("nat office: there is no interface later0")
			ip(t, gateway, "link add later0 type veth peer name far0 netns "+outside.Name())
			ip(t, outside, "addr add "+line+".1/24 dev far0")
			ip(t, outside, "link set far0 up")
			ip(t, gateway, "link set later0 up")
			warned("nat office: interface later0 has no address")
			ip(t, gateway, "addr add "+line+".2/24 dev later0")
			ip(t, gateway, "route add 203.0.113.10/32 via "+line+".1")
			labtest.Eventually(t, patience, "an answer to "+line+".2", func() error {
				a, err := host.AskWeb(t.Context(), l.Node("pc"), netip.AddrPort{}, netip.MustParseAddrPort(outsideWeb))
				if err == nil && !strings.HasPrefix(a.Client, line+".2:") {
					err = fmt.Errorf("the server saw %s", a.Client)
				}
				return err
			})
			ip(t, gateway, "link del later0")
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}
