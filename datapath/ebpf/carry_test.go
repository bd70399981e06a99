// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// TestNotCarried: an object that the datapath does not support in full is refused before an apply, with the
// reason.
func TestNotCarried(t *testing.T) {
	inside := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}
	for want, n := range map[string]config.NATRule{
		"name the interface in out": {Type: config.NATMasquerade, Source: inside},
		"connection tracking":       {Type: config.NATMasquerade, Source: inside, Out: "wan0", Helper: "ftp"},
		"mark":                      {Type: config.NATMasquerade, Source: inside, Out: "wan0", Mark: 1},
		"protocol sctp":             {Type: config.NATPortForward, Protocol: flow.SCTP},
		"not available in the ebpf": {Type: "redirect"},
		"fe80::1 is link-local":     {Type: config.NATPortForward, Protocol: flow.TCP, Listen: &config.Listen{Address: netip.MustParseAddr("fe80::1")}},
		"":                          {Type: config.NATMasquerade, Source: inside, Out: "wan0"},
	} {
		err := anywhere{}.CarriesNAT(&n)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: want %q, got %v", n.Type, want, err)
		}
	}
}
