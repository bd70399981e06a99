// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet/golden"
)

func writeFile(name, value string) error { return os.WriteFile(name, []byte(value), 0o644) }

// openCases are known faults: cases that a hook does not meet yet, and why. They
// stand in docs/limits.md. A case that is met again must leave the list, which the
// test sees to.
var openCases = map[string]map[string]string{
	"fragments-early":   {"xdp": earlyFragments, "tc": earlyFragments, "tc-complete": earlyFragments},
	"nat64-too-big":     {"tc-complete": cutFrame},
	"too-big":           {"tc-complete": cutFrame},
	"too-big-ipv6":      {"tc-complete": cutFrame},
	"tunnel-too-big":    {"tc-complete": cutFrame},
	"udp-zero-checksum": {"tc-complete": "the checksum over the whole packet does not follow the port of a datagram without a checksum of its own"},
}

const (
	earlyFragments = "fragments that come before their first one are dropped, not held"
	cutFrame       = "the checksum over the whole packet is not right after an ICMP error was cut to size"
)

// TestPacketCases runs every packet case on XDP, on TC, and on TC with a checksum
// over the whole packet. What the datapath refuses to carry is skipped in the
// words of the refusal.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	for _, hook := range []string{"xdp", "tc", "tc-complete"} {
		t.Run(hook, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) {
					if why, skip := c.Skip[hook]; skip {
						t.Skip(why)
					}
					if err := refusal(c.Config); err != nil {
						t.Skip(err)
					}
					err := c.Run(newSubject(t, hook))
					switch why := openCases[c.Name][hook]; {
					case why != "" && err == nil:
						t.Errorf("met, but listed as open: %s", why)
					case why != "":
						t.Skipf("open: %s", why)
					case err != nil:
						t.Error(err)
					}
				})
			}
		})
	}
}
